# SPDX-License-Identifier: Apache-2.0
"""Every way to compute a convolution that a plan lists, asked for by its name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_conv_kernels import PASSES, Case, attributes, check

import jax_layout as jl
from hlo import compiled
from jax_layout import _cpu, choices

F16, BF16 = ("float16",) * 2, ("bfloat16",) * 2
CASES = {
    "3x3": Case(channels=(32, 64), size=(13, 7), winograd=True),
    "3x3 of few tiles": Case(batch=1, channels=(64, 32), size=(5, 6), winograd=True),
    "strides": Case(stride=(2, 3), size=(11, 13)),
    "crop": Case(pads=((-1, 2), (0, -2))),
    "one tap": Case(kernel=(1, 1), pads=((0, 0), (0, 0)), channels=(24, 40)),
    "depthwise": Case(groups=16, channels=(16, 16)),
    "groups": Case(groups=8, channels=(32, 32), x="NCHW", w="OIHW"),
    "1-D": Case(size=(29,), kernel=(5,), x="NWC", w="WIO", stride=(2,)),
    "3-D": Case(size=(5, 4, 6), kernel=(2, 3, 3), x="NDHWC", w="DHWIO"),
    "channels first": Case(x="NCHW", w="OIHW"),
    "blocks": Case(x="NCHW16c", w="OIHW"),
}


def plan(case, conv_pass):
    return _cpu.conv_plan(**attributes(case, conv_pass))


@pytest.mark.parametrize("conv_pass", PASSES)
@pytest.mark.parametrize(
    "types", [("float32",) * 2, BF16, F16, ("bfloat16", "float32")], ids="->".join
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_methods(case, types, conv_pass):
    """Rounded once, and the one that is asked for."""
    case = case.replace(types=types)
    methods = plan(case, conv_pass)["methods"]
    assert len(set(methods)) == len(methods)
    assert set(methods) <= set(_cpu.conv_method_names())
    for method in methods:
        asked = case.replace(method=method)
        found = plan(asked, conv_pass)["implementation"]
        if method != "oneDNN" or types[0] == "float32":
            assert found.startswith(method)
        check(asked, conv_pass, exact=True)
        if conv_pass == "forward":
            check(asked.replace(bias=True, relu=True), conv_pass, exact=True)


def test_the_first_without_a_name():
    for conv_pass in PASSES:
        for case in (CASES["3x3"], CASES["depthwise"], CASES["strides"]):
            found = plan(case, conv_pass)
            first = plan(case.replace(method=found["methods"][0]), conv_pass)
            assert first["implementation"] == found["implementation"]
            other = plan(case.replace(method="no such"), conv_pass)
            assert other["implementation"] == found["implementation"]


def test_16_bits_are_not_the_librarys_loops():
    """They are two orders slower than f32."""
    for case in CASES.values():
        for types in (BF16, F16):
            for conv_pass in PASSES:
                found = plan(case.replace(types=types), conv_pass)["implementation"]
                assert "ref" not in found and "simple" not in found


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tables_choose(dtype):
    """Lowered with the method that is chosen, gradients too."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 9, 11, 32)), dtype)
    w = jnp.asarray(rng.standard_normal((3, 3, 32, 64)) / 17, dtype)
    ct = jnp.asarray(rng.standard_normal((2, 9, 11, 64)), dtype)

    def f(conv, x, w, ct):
        names = ("NHWC", "HWIO", "NHWC")
        run = lambda x: conv(x, w, (1, 1), "SAME", dimension_numbers=names)  # noqa: E731
        y, pull = jax.vjp(run, x)
        return y, pull(ct)[0]

    ours = lambda *given: f(jl.conv_general_dilated, *given)  # noqa: E731
    wide = [np.asarray(a, np.float64) for a in (x, w, ct)]
    want = f(jax.lax.conv_general_dilated, *wide)
    for method in ("winograd", "widened"):
        with choices.forced(method):
            assert compiled(ours, x, w, ct).count(f'method = "{method}"') == 2
            got = jax.jit(ours)(x, w, ct)
        for a, b in zip(got, want, strict=True):
            half = jnp.finfo(dtype).eps / 2
            np.testing.assert_allclose(
                np.asarray(a, np.float64), b, rtol=1.01 * half, atol=1e-5
            )
        jax.clear_caches()
    with choices.forced("lax"):
        assert "jax_layout_conv" not in compiled(ours, x, w, ct)


FORMATS = {"NCHW": "OIHW", "NHWC": "HWIO"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", FORMATS)
def test_one_tap_is_a_product(format, dtype):
    """In every pass, and its bias and relu are the product's."""
    rng = np.random.default_rng(0)
    names = (format, FORMATS[format], format)
    shapes = {
        "x": {"N": 3, "C": 24, "H": 7, "W": 5},
        "w": {"O": 40, "I": 24, "H": 1, "W": 1},
        "y": {"N": 3, "C": 40, "H": 7, "W": 5},
    }
    x, w, ct = (
        jnp.asarray(rng.integers(-3, 4, [shapes[i][axis] for axis in axes]), dtype)
        for i, axes in zip("xwy", names, strict=True)
    )
    bias = jnp.asarray(rng.integers(-3, 4, 40), dtype)

    def f(conv, x, w, ct):
        run = lambda x, w: conv(x, w, (1, 1), "VALID", dimension_numbers=names)  # noqa: E731
        y, pull = jax.vjp(run, x, w)
        return y, *pull(ct)

    ours = lambda *given: f(jl.conv_general_dilated, *given)  # noqa: E731
    text = compiled(ours, x, w, ct)
    assert text.count("jax_layout_gemm") == 3 and "jax_layout_conv" not in text
    want = f(jax.lax.conv_general_dilated, *(a.astype(jnp.float64) for a in (x, w, ct)))
    for a, b in zip(jax.jit(ours)(x, w, ct), want, strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, b.astype(dtype))
    if format == "NCHW":
        y = jax.jit(lambda x, w, b: jl.conv(x, w, b))(x, w, bias)
        want = want[0] + np.asarray(bias, np.float64)[:, None, None]
        np.testing.assert_array_equal(y, want.astype(dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (2, 2), "padding": "VALID"},
        {"window_strides": (1, 1), "padding": [(0, 0), (1, 0)]},
        {"window_strides": (1, 1), "padding": [(0, 0), (-1, 1)]},
        {"window_strides": (1, 1), "padding": [(0, 0)] * 2, "lhs_dilation": (1, 2)},
        {"window_strides": (1, 1), "padding": "VALID", "feature_group_count": 2},
    ],
    ids=str,
)
def test_one_tap_that_is_no_product(options):
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (2, 32, 8, 8)), "float32")
    groups = options.get("feature_group_count", 1)
    w = jnp.ones((64, 32 // groups, 1, 1), "float32")
    ours = lambda x, w: jl.conv_general_dilated(x, w, **options)  # noqa: E731
    assert "jax_layout_gemm" not in compiled(ours, x, w)
    want = jax.lax.conv_general_dilated(x, w, **options)
    np.testing.assert_array_equal(jax.jit(ours)(x, w), want)
