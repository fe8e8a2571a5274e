# SPDX-License-Identifier: Apache-2.0
"""What jax's primitives become: the same numbers, and calls where they pay."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from hlo import count
from jax_layout import _backends, choices
from jax_layout.measured import Table

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the CPU backend is not built"
)
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2, "float16": 4e-3}


def array(*shape, dtype="float32", seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x, dtype)


def both(f, *args, operators=None):
    """f(*args) by jax alone and with kernels, the record, and the compiled program."""
    expected = jax.jit(lambda *args: f(*args))(*args)
    with jl.installed(operators) as record:
        compiled = jax.jit(lambda *args: f(*args)).lower(*args).compile()
    return expected, compiled(*args), record.by_primitive(), compiled.as_text()


def assert_close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = (np.asarray(v).astype(np.complex128) for v in (x, y))
        tolerance = TOLERANCES.get(jax.tree.leaves(expected)[0].dtype.name, 1e-5)
        np.testing.assert_allclose(
            x, y, rtol=0, atol=tolerance * np.abs(y).max(initial=1)
        )


def ours(record, primitive):
    return record[primitive]["ours"]


# --- convolutions

CONVOLUTIONS = {
    "NCHW": ((2, 8, 9, 7), (6, 8, 3, 3), {}),
    "strides": ((2, 8, 9, 7), (6, 8, 3, 3), {"window_strides": (2, 1)}),
    "dilated": ((2, 8, 9, 9), (6, 8, 3, 3), {"rhs_dilation": (2, 2)}),
    "transposed": ((2, 8, 9, 7), (6, 8, 3, 3), {"lhs_dilation": (2, 2)}),
    "NHWC": (
        (2, 9, 7, 8),
        (3, 3, 8, 6),
        {"dimension_numbers": ("NHWC", "HWIO", "NHWC")},
    ),
    "groups": ((2, 8, 9, 7), (8, 2, 3, 3), {"feature_group_count": 4}),
    "depthwise": ((2, 8, 9, 7), (8, 1, 3, 3), {"feature_group_count": 8}),
    "1D": ((2, 8, 9), (6, 8, 3), {}),
    "3D": ((1, 4, 5, 6, 7), (6, 4, 3, 3, 3), {}),
}


def convolve(x, w, **options):
    n = x.ndim - 2
    options = {"window_strides": (1,) * n, "padding": [(1, 1)] * n} | options
    return lax.conv_general_dilated(x, w, **options)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_convolutions_and_their_gradients(name, dtype):
    x, w, options = CONVOLUTIONS[name]
    x, w = array(*x, dtype=dtype), array(*w, dtype=dtype, seed=1)

    def f(x, w):
        y, pull = jax.vjp(lambda x, w: convolve(x, w, **options), x, w)
        return y, pull(jnp.sin(y))

    expected, found, record, _ = both(f, x, w)
    assert_close(found, expected)
    assert ours(record, "conv_general_dilated") == 3


@pytest.mark.parametrize("precision", [None, "default", "highest"])
def test_only_the_highest_precision_asks_for_plain_sums(precision):
    x, w = array(1, 16, 12, 32), array(3, 3, 32, 32)
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "precision": precision}
    *_, hlo = both(lambda x, w: convolve(x, w, **options), x, w)
    assert ("winograd = true" in hlo) == (precision != "highest")
    with jax.default_matmul_precision("highest"):
        *_, hlo = both(lambda x, w: convolve(x, w, **options), x, w)
    assert ("winograd = true" in hlo) == (precision == "default")


def test_the_result_has_the_type_that_was_preferred():
    x, w = array(2, 8, 9, 7, dtype="bfloat16"), array(6, 8, 3, 3, dtype="bfloat16")
    expected, found, record, _ = both(
        lambda x, w: convolve(x, w, preferred_element_type=np.float32), x, w
    )
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert ours(record, "conv_general_dilated") == 1


def test_parts_of_complex_convolutions():
    x = array(2, 8, 9, 7) * (1 + 2j)
    expected, found, record, _ = both(convolve, x, x[:, :, :3, :3])
    assert_close(found, expected)
    assert record["conv_general_dilated"] | {"kept_bytes": 0} == {
        "ours": 3, "XLA": 1, "kept_bytes": 0
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_convolutions_that_no_kernel_knows_are_xlas(dtype):
    x = array(2, 8, 9, 7).astype(dtype)
    expected, found, record, _ = both(convolve, x, x[:, :, :3, :3])
    assert np.array_equal(found, expected)
    assert ours(record, "conv_general_dilated") == 0


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_mapped_convolutions(axes):
    x = array(3, 2, 8, 9, 7) if axes[0] == 0 else array(2, 8, 9, 7)
    w = array(3, 6, 8, 3, 3) if axes[1] == 0 else array(6, 8, 3, 3)
    expected, found, record, _ = both(jax.vmap(convolve, axes), x, w)
    assert_close(found, expected)
    assert ours(record, "conv_general_dilated") == 1


def test_a_network_is_moved_where_it_is_entered_and_left_alone():
    x, w = array(2, 8, 12, 12), array(8, 8, 3, 3)

    def net(x, w):
        for _ in range(4):
            x = jnp.tanh(convolve(x, w) + 1)
        return x

    *_, hlo = both(net, x, w)
    assert hlo.count('custom_call_target="jax_layout_conv"') == 4
    assert count("copy", hlo) + count("transpose", hlo) <= 4


def test_scans_higher_derivatives_checkpoints_and_donation():
    x, w = array(2, 8, 9, 7), array(8, 8, 3, 3)

    def loss(w, x):
        body = jax.checkpoint(lambda x, _: (jnp.tanh(convolve(x, w)), None))
        return lax.scan(body, x, None, length=3)[0].sum()

    def hvp(w, x):
        return jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (jnp.cos(w),))

    expected, found, record, _ = both(hvp, w, x)
    assert_close(found, expected)
    assert ours(record, "conv_general_dilated") >= 3
    with jl.installed():
        step = jax.jit(lambda w, x: w - jax.grad(loss)(w, x), donate_argnums=0)
        step(jnp.array(w), x)


@pytest.mark.parametrize("known", [False, True])
def test_gradients_in_loops_and_branches_are_ours_unless_tables_know(
    monkeypatch, known
):
    """XLA is slow there with weights that are not HWIO, but not with tiny ones."""
    methods = dict.fromkeys(choices.methods_of("conv"), 0.5)
    cases = [f"conv {result} float32" for result in "xy"]
    if known:
        cases += [f"{case} in a loop" for case in cases]
    points = {case: {(64, 8, 8, 9): methods} for case in cases}
    table = Table("", "", "", 1, points)
    source = f"a test's, {known=}"  # which choices are kept by
    monkeypatch.setattr(choices, "_source", lambda: source)
    monkeypatch.setattr(choices, "_tables", lambda source: [(source, table)])
    x, w = array(2, 9, 7, 8), array(3, 3, 8, 8)

    def step(conv, x):
        return jnp.tanh(conv(x, w, (1, 1), "SAME", dimension_numbers=numbers))

    def loop(conv, x):
        body = jax.checkpoint(lambda x, _: (step(conv, x), None))
        return lax.scan(body, x, None, length=2)[0]

    def branch(conv, x):
        return lax.cond(x[0, 0, 0, 0] > 0, lambda x: step(conv, x), jnp.sin, x)

    numbers = ("NHWC", "HWIO", "NHWC")
    there = int(not known)
    for f, calls in ((step, 0), (loop, there), (branch, there)):

        def gradient(x, conv, f=f):
            return jax.grad(lambda x: f(conv, x).sum())(x)

        expected, found, record, _ = both(
            lambda x: gradient(x, lax.conv_general_dilated), x
        )
        assert_close(found, expected)
        assert ours(record, "conv_general_dilated") == calls
        compiled = jax.jit(lambda x: gradient(x, jl.conv_general_dilated)).lower(x)
        assert compiled.as_text().count("@jax_layout_conv") == calls


# --- products

DOTS = {
    "NN": ((64, 96), (96, 48), (((1,), (0,)), ((), ()))),
    "NT": ((64, 96), (48, 96), (((1,), (1,)), ((), ()))),
    "TN": ((96, 64), (96, 48), (((0,), (0,)), ((), ()))),
    "one row": ((1, 96), (96, 48), (((1,), (0,)), ((), ()))),
    "vector": ((96,), (96, 48), (((0,), (0,)), ((), ()))),
    "batch": ((3, 32, 40), (3, 40, 24), (((2,), (1,)), ((0,), (0,)))),
    "inner batch": ((32, 3, 40), (24, 3, 40), (((2,), (2,)), ((1,), (1,)))),
}


@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "complex64"]
)
def test_products_and_their_gradients(name, dtype):
    a, b, numbers = DOTS[name]
    a, b = array(*a, dtype=dtype), array(*b, dtype=dtype, seed=1)

    def f(a, b):
        y, pull = jax.vjp(lambda a, b: lax.dot_general(a, b, numbers), a, b)
        return y, pull(y)

    expected, found, record, _ = both(f, a, b)
    assert_close(found, expected)
    assert ours(record, "dot_general") >= 1


@pytest.mark.parametrize(
    "precision", ["highest", "high", lax.DotAlgorithmPreset.F32_F32_F32]
)
def test_precision_is_respected(precision):
    a, b = array(64, 96), array(96, 48)
    expected, found, *_ = both(lambda a, b: jnp.dot(a, b, precision=precision), a, b)
    assert_close(found, expected)


def test_algorithms_that_jax_refuses_are_refused():
    a = array(64, 64, dtype="float16")
    refused = lax.DotAlgorithmPreset.F16_F16_F32
    with pytest.raises(ValueError, match="not supported"), jl.installed():
        jax.jit(lambda a: jnp.dot(a, a, precision=refused)).lower(a)


def test_mixed_types_and_integers():
    a, b = jnp.ones((64, 96), jnp.int8), jnp.ones((96, 48), jnp.int8)
    for given in [(a, b), (a, b.astype(jnp.float32)), (a > 0, b > 0)]:
        expected, found, *_ = both(jnp.dot, *given)
        assert found.dtype == expected.dtype and np.array_equal(found, expected)
    wide = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.int32)  # noqa: E731
    expected, found, *_ = both(wide, a, b)
    assert np.array_equal(found, expected)


def test_products_read_through_transposes():
    a, b = array(64, 96), array(48, 96)
    expected, found, record, hlo = both(lambda a, b: a @ b.T, a, b)
    assert_close(found, expected)
    assert ours(record, "dot_general") == 1
    assert "jax_layout_permute" not in hlo and count("transpose", hlo) == 0
    assert record["dot_general"]["kept_bytes"] == 2 * b.nbytes


def test_xlas_products_read_through_our_transposes():
    a, b = array(64, 96), array(48, 96)
    *_, hlo = both(lambda a, b: a @ b.T, a, b, operators=["transpose"])
    assert "jax_layout_permute" not in hlo


def test_products_are_written_as_they_are_read():
    a, b = array(64, 96), array(96, 48)
    expected, found, record, hlo = both(lambda a, b: (a @ b).T + 1, a, b)
    assert_close(found, expected)
    assert hlo.count("jax_layout_gemm") == 1
    assert "jax_layout_permute" not in hlo and count("transpose", hlo) == 0
    assert record["transpose"]["kept_bytes"] == 2 * 64 * 48 * 4


def test_products_that_are_turned_twice_are_not_turned():
    """The gradient of a weight that is read through its transpose."""
    a, b = array(64, 96), array(96, 48)

    def f(a, b):
        y = a @ b
        return y.T.T + 1, y.T.T.T, y

    expected, found, record, hlo = both(lambda a, b: f(a, b)[:1], a, b)
    assert_close(found, expected)
    assert hlo.count('custom_call_target="jax_layout_gemm"') == 1
    assert "jax_layout_permute" not in hlo and count("transpose", hlo) == 0
    assert ours(record, "transpose") == 2
    expected, found, _, hlo = both(f, a, b)
    assert_close(found, expected)
    assert hlo.count('custom_call_target="jax_layout_gemm"') == 1


def test_a_product_that_is_read_both_ways_is_computed_once():
    a, b = array(64, 96), array(96, 48)

    def f(a, b):
        y = a @ b
        return y.T + 1, y * 2, jnp.cos(y).T

    expected, found, _, hlo = both(f, a, b)
    assert_close(found, expected)
    assert hlo.count('custom_call_target="jax_layout_gemm"') == 1


def test_numbers_that_were_widened_are_multiplied_as_they_were():
    a = array(64, 96, dtype="bfloat16")
    b = array(48, 96, dtype="bfloat16", seed=1)
    expected, found, record, hlo = both(
        lambda a, b: a.astype(jnp.float32) @ b.astype(jnp.float32).T, a, b
    )
    assert found.dtype == np.float32
    assert_close(found, expected)
    assert ours(record, "dot_general") == 1
    assert 'operand_type = "bfloat16"' in hlo
    exact = lambda a, b: jnp.dot(  # noqa: E731
        a.astype(jnp.float32), b.astype(jnp.float32).T, precision="highest"
    )
    assert 'operand_type = "bfloat16"' not in both(exact, a, b)[-1]


def test_what_xla_fuses_is_left_to_it(monkeypatch):
    monkeypatch.setattr(choices, "are_all_ours", lambda: False)
    v, x = array(4096), array(64, 96)
    _, _, record, _ = both(lambda v, x: (v @ v, jnp.outer(v, v)), v, x)
    assert ours(record, "dot_general") == 0  # sums of vectors, and no sums

    def loop(w, x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]

    w = array(96, 96)
    expected, found, record, _ = both(loop, w, x)
    assert ours(record, "dot_general") == 0  # all in the cache
    assert ours(both(jax.jit(lambda w, x: x @ w), w, x)[2], "dot_general") == 1

    def layers(ws, x):
        return lax.scan(lambda x, _: (sum(x @ w for w in ws), None), x, None, length=3)

    side = int(choices.level2_bytes() ** 0.5) // 4
    for many, calls in ((2, 0), (5, 5)):  # the last drive each other out
        ws = [array(side, side, seed=seed) for seed in range(many)]
        _, _, record, _ = both(layers, ws, array(8, side))
        assert ours(record, "dot_general") == calls
    side = int((choices.level2_bytes() / 4) ** 0.5) + 32
    _, _, record, _ = both(loop, array(side, side), array(8, side))
    assert ours(record, "dot_general") == 1


@pytest.mark.parametrize("gain", [1.5, 3.0])
def test_a_matrix_that_is_computed_for_a_vector_is_not_written(gain, monkeypatch):
    """Unless our product is so much faster that it may be."""
    points = {(512, 1, 384, 1): dict.fromkeys(choices.methods_of("gemm"), gain)}
    cases = {f"gemm float32 {order}": points for order in ("NN", "NT", "TN", "TT")}
    table = Table("", "", "", 1, cases)
    monkeypatch.setattr(choices, "_source", lambda: f"a test's, {gain}")
    monkeypatch.setattr(choices, "_tables", lambda source: [(source, table)])
    a, b, v = array(512, 192), array(512, 192, seed=1), array(384)
    x = array(512, 384)
    for f, args, most in (
        (lambda x, v: x @ v, (x, v), 1),
        (lambda x, v: (2 * x + 1) @ v, (x, v), gain > 2),
        (lambda a, b, v: jnp.concatenate([a, b], 1) @ v, (a, b, v), gain > 2),
    ):
        expected, found, record, _ = both(f, *args)
        assert_close(found, expected)
        assert ours(record, "dot_general") == most


def attend(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
    scores = jnp.where(jnp.arange(24) < 20, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("worth", [False, True])
def test_products_around_a_softmax_go_together(worth, monkeypatch):
    products = sys.modules["jax_layout.install.products"]
    monkeypatch.setattr(products, "attends", lambda *_: worth)
    # Where they do not become attention.
    attention = sys.modules["jax_layout.install.calls"]
    monkeypatch.setattr(attention, "with_calls", lambda jaxpr: (jaxpr, []))
    q, k, v = (array(2, 24, 3, 16, seed=i) for i in range(3))
    expected, found, record, hlo = both(attend, q, k, v)
    assert_close(found, expected)
    assert record["dot_general"]["XLA"] == 2 - ours(record, "dot_general")
    assert ours(record, "dot_general") == 2 * worth
    assert hlo.count('custom_call_target="jax_layout_gemm"') == 2 * worth


@pytest.mark.parametrize("rows, first, large, expected", [
    (2, 64, False, 0), (2, 96, False, 0), (2, None, False, 2), (8, 96, False, 1),
    (2, 96, True, 1),
])  # fmt: skip
def test_products_of_few_rows_in_a_loop_go_together(
    rows, first, large, expected, monkeypatch
):
    """Whether the first or the second of two products is to be ours, or both are."""
    products = sys.modules["jax_layout.install.products"]
    monkeypatch.setattr(products, "stays_in_cache", lambda _: False)
    monkeypatch.setattr(products, "is_large", lambda *_: large)

    def one(work, methods=choices.OURS, passes=1, gain=1.0):
        return methods[0] if first in (None, *work.sizes[:2]) else None

    monkeypatch.setattr(choices, "choose", one)

    def f(x, w, v):
        step = lambda h, _: (jnp.tanh((h @ w.T).T).T @ v, None)  # noqa: E731
        return lax.scan(step, x, None, length=3)[0]

    x, w, v = array(rows, 64), array(96, 64, seed=1) / 8, array(96, 64, seed=2) / 9
    plain, found, record, hlo = both(f, x, w, v)
    assert_close(found, plain)
    assert ours(record, "dot_general") == expected
    assert hlo.count('custom_call_target="jax_layout_gemm"') == expected


def test_a_product_before_a_loop_is_ours_though_those_inside_are_xlas(monkeypatch):
    products = sys.modules["jax_layout.install.products"]
    monkeypatch.setattr(products, "stays_in_cache", lambda _: False)

    def one(work, methods=choices.OURS, passes=1, gain=1.0):
        return methods[0] if 6 in work.sizes[:2] else None

    monkeypatch.setattr(choices, "choose", one)

    def f(xs, w, v):
        given = (xs @ v).reshape(3, 2, 64)
        step = lambda h, x: (jnp.tanh(x + h @ w), None)  # noqa: E731
        return lax.scan(step, given[0], given)[0]

    w, v = array(64, 64, seed=1) / 8, array(64, 64, seed=2) / 8
    plain, found, record, _ = both(f, array(6, 64), w, v)
    assert_close(found, plain)
    assert ours(record, "dot_general") == record["dot_general"]["XLA"] == 1


@pytest.mark.parametrize("gate", [jax.nn.silu, lambda x: x / (1 + jnp.exp(-x))])
def test_products_around_a_sigmoid_are_not_taken_for_attention(gate, monkeypatch):
    products = sys.modules["jax_layout.install.products"]
    monkeypatch.setattr(products, "attends", lambda *_: False)
    x, w, v = array(8, 24), array(24, 32, seed=1), array(32, 24, seed=2)
    f = lambda x, w, v: (gate(x @ w) * (x @ w)) @ v  # noqa: E731
    expected, found, record, _ = both(f, x, w, v)
    assert_close(found, expected)
    assert record["dot_general"]["XLA"] == 0


def test_transposes_that_xla_fuses_are_its_own():
    x = array(256, 128)
    _, _, record, _ = both(lambda x: jnp.sin(x).T, x)
    assert ours(record, "transpose") == 0
    expected, found, record, _ = both(lambda x: x.T, x)
    assert np.array_equal(found, expected)
    assert ours(record, "transpose") == 1


# --- windows

POOLS = {
    "2/2": (2, 2, "VALID", 1),
    "3/2 same": (3, 2, "SAME", 1),
    "3/1 padded": (3, 1, [(1, 1), (1, 0)], 1),
    "2/3": (2, 3, "VALID", 1),
    "dilated": (2, 1, [(0, 0), (2, 1)], 2),
}
UNITS = {"sum": (0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("operator, dtype", [("sum", "float32"), ("max", "float32"),
                                             ("min", "float16"), ("sum", "bfloat16"),
                                             ("max", "bfloat16")])  # fmt: skip
def test_windows_and_their_gradients(name, operator, dtype):
    size, stride, padding, dilation = POOLS[name]
    if not isinstance(padding, str):
        padding = [(0, 0), *padding, (0, 0)]
    unit, combine = UNITS[operator]
    if operator != "sum" and dilation > 1:
        pytest.skip("jax has no gradient of it")

    def pool(x):
        return lax.reduce_window(
            x, np.array(unit, x.dtype)[()], combine, (1, size, size, 1),
            (1, stride, stride, 1), padding, window_dilation=(1, dilation, dilation, 1)
        )  # fmt: skip

    def f(x):
        y, pull = jax.vjp(pool, x)
        weight = jnp.arange(1, y.size + 1).reshape(y.shape) % 5
        return y, pull(weight.astype(y.dtype))

    # Of equal elements, of which there are many, the first has the gradient.
    x = jnp.round(3 * array(2, 8, 9, 3)).astype(dtype)
    expected, found, record, hlo = both(f, x)
    assert_close(found, expected)
    assert ours(record, f"reduce_window_{operator}") == 1 + (operator == "sum")
    if operator == "max":
        assert ours(record, "select_and_scatter_add") == 1
        assert "select-and-scatter" not in hlo


@pytest.mark.parametrize("operator", UNITS)
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("between", [1, 3])
def test_windows_of_dilated_arrays(operator, dilation, between):
    unit, combine = UNITS[operator]
    x = array(2, 8, 9, 3)
    expected, found, record, _ = both(
        lambda x: lax.reduce_window(
            x, np.float32(unit), combine, (1, 2, 3, 1), (1, 1, 1, 1),
            [(0, 0), (1, 0), (2, 3), (0, 0)], base_dilation=(1, between, between, 1),
            window_dilation=(1, dilation, dilation, 1),
        ), x
    )  # fmt: skip
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    of = np.isfinite(expected)
    assert_close(np.asarray(found)[of], np.asarray(expected)[of])
    row = record[f"reduce_window_{operator}"]
    assert row["ours"] == (operator == "sum" or between == 1)


def test_windows_of_16_bits_are_added_in_32():
    x = jnp.full((1, 256, 256, 1), 1.01, jnp.bfloat16)
    zero, ones = np.zeros((), x.dtype)[()], (1, 1, 1, 1)
    size = (1, 255, 255, 1)
    _, found, record, _ = both(
        lambda x: lax.reduce_window(x, zero, lax.add, size, ones, "VALID"), x
    )
    assert ours(record, "reduce_window_sum") == 1
    exact = float(x[0, 0, 0, 0]) * 255**2
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-8)


# --- rows

INDEX = np.array([[0, 3, -1, 6, 7], [-7, -8, 100, -100, 3]], np.int32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mode", ["fill", "clip", "wrap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint16", "bool"])
@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint8])
def test_rows_gathered(axis, mode, dtype, index):
    x = array(7, 7, 5).astype(dtype)
    index = INDEX.astype(index)
    expected, found, record, _ = both(
        lambda x, i: jnp.take(x, i, axis=axis, mode=mode), x, index
    )
    assert np.array_equal(found, expected, equal_nan=dtype in ("float32", "bfloat16"))
    if index.dtype != np.uint8:
        assert ours(record, "gather") == 1


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("value", [None, 0, -0.0, 5])
def test_raw_gathers_count_from_the_start(mode, value):
    x = array(7, 5)
    numbers = lax.GatherDimensionNumbers((2,), (0,), (0,))

    def f(x, i):
        return lax.gather(x, i[..., None], numbers, (1, 5), mode=mode, fill_value=value)

    expected, found, record, _ = both(f, x, INDEX)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(expected))
    assert ours(record, "gather") == 1  # what fills with 5 gathers inside


@pytest.mark.parametrize("mode", ["fill", "clip", "drop", None])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int32", "uint8", "complex64"]
)
def test_rows_added(mode, dtype):
    x = jnp.asarray(np.arange(35).reshape(7, 5), dtype)
    rows = jnp.asarray(np.arange(50).reshape(2, 5, 5), dtype)
    for f in (
        lambda x, i, rows: x.at[i].add(rows, mode=mode),
        lambda x, i, rows: jnp.zeros_like(x).at[i].add(rows, mode=mode),
        lambda x, i, rows: x.T.at[:, i].add(rows.transpose(2, 0, 1), mode=mode),
    ):
        expected, found, record, _ = both(f, x, INDEX, rows)
        assert_close(found, expected)
        assert ours(record, "scatter_add") == 1


def test_raw_scatters_count_from_the_start():
    x, rows = array(7, 5), array(2, 5, 5)
    numbers = lax.ScatterDimensionNumbers((2,), (0,), (0,))

    def f(x, i, rows):
        return lax.scatter_add(x, i[..., None], rows, numbers, mode="fill")

    expected, found, record, _ = both(f, x, INDEX, rows)
    assert_close(found, expected)
    assert ours(record, "scatter_add") == 1


def test_the_gradient_of_an_embedding_starts_at_zero():
    x = array(50, 8)
    index = jnp.arange(60) % 50
    expected, found, record, hlo = both(
        jax.grad(lambda x, i: (x[i] ** 2).sum()), x, index
    )
    assert_close(found, expected)
    assert ours(record, "gather") == ours(record, "scatter_add") == 1
    assert re.search(r"keep = false", hlo)


def test_segments_and_rows_mapped():
    x, index = array(40, 8), jnp.arange(40) % 7
    expected, found, record, _ = both(
        lambda x, i: jax.ops.segment_sum(x, i, 7), x, index
    )
    assert_close(found, expected)
    assert ours(record, "scatter_add") == 1
    many = jnp.stack([index, index + 1])
    for axes in ((0, 0), (None, 0)):
        x = array(2, 40, 8) if axes[0] == 0 else array(40, 8)
        f = jax.vmap(lambda x, i: x[i], axes)
        expected, found, *_ = both(f, x, many)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: x[i, i],
        lambda x, i: x[i][..., 1:3],
        lambda x, i: lax.dynamic_slice_in_dim(x, i[0, 0], 2),
        lambda x, i: x.at[i, i].add(1.0),
        lambda x, i: x.at[i].max(1.0),
        lambda x, i: x[i.reshape(-1)[:0]],
    ],
)
def test_gathers_that_are_not_whole_rows(f):
    x = array(7, 5)
    expected, found, *_ = both(f, x, jnp.asarray(INDEX % 5))
    assert np.array_equal(found, expected)


def test_keys_are_gathered_by_xla():
    keys = jax.random.split(jax.random.key(0), 7)
    expected, found, record, _ = both(lambda k, i: k[i], keys, INDEX % 7)
    assert (jax.random.key_data(found) == jax.random.key_data(expected)).all()
    assert "gather" not in record  # nothing that anybody could choose
