# SPDX-License-Identifier: Apache-2.0
"""The three passes of a convolution, and lax's own function made of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_layout as jl
from hlo import collectives, compiled, count, kernels
from native import has_vnni

LETTERS = {1: "W", 2: "HW", 3: "DHW"}
FORMATS = {"first": ("NC*", "OI*", "NC*"), "last": ("N*C", "*IO", "N*C"),
           "odd": ("C*N", "I*O", "*NC")}  # fmt: skip

# x as N, C and sizes; w as O, C of a group and taps; options of lax.
CASES = {
    "same": ((2, 8, 9, 8), (6, 8, 3, 3), {"padding": "SAME"}),
    "strides": ((2, 8, 15, 13), (5, 8, 3, 2),
                {"window_strides": (2, 3), "padding": "VALID"}),
    "dilation": ((2, 8, 12, 9), (4, 8, 3, 3),
                 {"rhs_dilation": (2, 3), "padding": [(1, 2), (3, 0)]}),
    "crop": ((2, 8, 12, 9), (4, 8, 3, 3), {"padding": [(-1, 2), (0, -2)]}),
    "wide pads": ((2, 8, 6, 5), (4, 8, 2, 2), {"padding": [(3, 4), (2, 3)]}),
    "groups": ((2, 12, 8, 8), (9, 4, 3, 3),
               {"feature_group_count": 3, "padding": "SAME"}),
    "depthwise": ((2, 16, 9, 9), (16, 1, 3, 3),
                  {"feature_group_count": 16, "padding": "SAME",
                   "window_strides": (2, 2)}),
    "multiplier": ((2, 8, 9, 9), (24, 1, 3, 3),
                   {"feature_group_count": 8, "padding": "SAME_LOWER"}),
    "one tap": ((2, 16, 8, 8), (24, 16, 1, 1), {"padding": "VALID"}),
    "1-D": ((2, 8, 40), (8, 8, 5), {"padding": [(2, 2)], "window_strides": (2,)}),
    "3-D": ((1, 4, 5, 6, 7), (4, 4, 2, 3, 2), {"padding": "SAME"}),
    "transposed": ((2, 8, 6, 5), (4, 8, 3, 3),
                   {"lhs_dilation": (2, 3), "padding": [(1, 2), (2, 1)]}),
    "transposed groups": ((2, 8, 6, 5), (6, 4, 3, 2),
                          {"lhs_dilation": (2, 2), "rhs_dilation": (1, 2),
                           "padding": [(1, 2), (2, 1)], "feature_group_count": 2}),
    "batch groups": ((6, 8, 9, 8), (6, 8, 7, 6),
                     {"batch_group_count": 3, "padding": "VALID"}),
}  # fmt: skip


def convolution(f, format, options):
    """f with these options on arrays in a format, and how to bring them into it."""
    options = dict(options)

    def apply(lhs, rhs):
        strides = options.get("window_strides", (1,) * (lhs.ndim - 2))
        names = tuple(s.replace("*", LETTERS[lhs.ndim - 2]) for s in FORMATS[format])
        rest = {k: v for k, v in options.items() if k != "window_strides"}
        return f(lhs, rhs, strides, dimension_numbers=names, **rest)

    return apply


def operands(case, format="first", dtype=jnp.float32):
    x, w, _ = CASES[case]
    rng = np.random.default_rng(0)
    x_axes = axes("NC*", FORMATS[format][0], len(x))
    w_axes = axes("OI*", FORMATS[format][1], len(w))
    x, w = rng.standard_normal(x).transpose(x_axes), rng.standard_normal(w)
    return jnp.asarray(x, dtype), jnp.asarray(w.transpose(w_axes), dtype)


def axes(of, name, ndim):
    of, name = (s.replace("*", LETTERS[ndim - 2]) for s in (of, name))
    return [of.index(letter) for letter in name]


def with_gradients(f):
    def run(x, w, ct):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(ct.astype(y.dtype))

    return run


TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def close(ours, expected, dtype="float32", scale=1.0):
    def compare(found, wanted):
        found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
        assert found.shape == wanted.shape
        limit = scale * TOLERANCE[dtype] * max(np.abs(wanted).max(initial=0), 1)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)

    jax.tree.map(compare, ours, expected)


@pytest.mark.parametrize(
    ("case", "dtype", "format"),
    [
        *itertools.product(CASES, ["float32"], FORMATS),
        *itertools.product(CASES, ["bfloat16"], ["last"]),
        *itertools.product(["groups", "transposed"], ["float16", "float64"], ["first"]),
    ],
)
def test_value_and_gradients(case, dtype, format):
    x, w = operands(case, format, dtype)
    ours = convolution(jl.conv_general_dilated, format, CASES[case][2])
    like = convolution(jax.lax.conv_general_dilated, format, CASES[case][2])
    wide = [a.astype(jnp.float64) for a in (x, w)]
    y = jax.eval_shape(like, x, w)
    ct = jnp.asarray(np.cos(np.arange(y.size)).reshape(y.shape), dtype)
    found = jax.jit(with_gradients(ours))(x, w, ct)
    expected = jax.jit(with_gradients(like))(*wide, ct.astype(jnp.float64))
    assert all(a.dtype == dtype for a in found)
    close(found, expected, dtype)


@pytest.mark.parametrize("format", ["first", "last"])
@pytest.mark.parametrize("case", CASES)
def test_each_pass_is_one_call(case, format):
    x, w = operands(case, format)
    ours = convolution(jl.conv_general_dilated, format, CASES[case][2])
    hlo = compiled(with_gradients(ours), x, w, ours(x, w))
    calls = hlo.count('custom_call_target="jax_layout_')
    moves = hlo.count('custom_call_target="jax_layout_permute"')  # of groups
    assert calls - moves == 3 and count("convolution", hlo) == 0


def test_the_count_above_sees_convolutions():
    like = convolution(jax.lax.conv_general_dilated, "last", CASES["same"][2])
    assert count("convolution", compiled(like, *operands("same", "last"))) == 1


def test_integers_and_wider_results():
    x, w = (jnp.round(4 * a).astype(jnp.int8) for a in operands("same", "last"))
    for dtype, wide in ((jnp.int8, jnp.int32), (jnp.bfloat16, jnp.float32)):
        args = x.astype(dtype), w.astype(dtype)
        options = {"padding": "SAME", "preferred_element_type": wide}
        ours = convolution(jl.conv_general_dilated, "last", options)
        like = convolution(jax.lax.conv_general_dilated, "last", options)
        found = jax.jit(ours)(*args)
        expected = int(dtype != jnp.int8 or has_vnni())
        assert found.dtype == wide and kernels(compiled(ours, *args)) == expected
        np.testing.assert_array_equal(found, like(*args))


def test_float32_cotangents_of_16_bit_operands_are_not_rounded():
    x, w = operands("same", "last", jnp.bfloat16)
    options = {"padding": "SAME", "preferred_element_type": jnp.float32}

    def gradients(f):
        f = convolution(f, "last", options)
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))(x, w)

    found = gradients(jl.conv_general_dilated)
    expected = gradients(jax.lax.conv_general_dilated)
    assert found[0].dtype == found[1].dtype == jnp.bfloat16
    close(found, expected, "bfloat16")


@pytest.mark.parametrize(
    ("lhs", "rhs", "options"),
    [
        ((2, 3, 2, 4), (4, 3, 3, 3), {}),  # nowhere to put a window
        ((0, 3, 5, 4), (4, 3, 3, 3), {}),
        ((2, 0, 5, 4), (4, 0, 3, 3), {}),
        ((2, 3, 5, 4), (0, 3, 3, 3), {}),
        ((2, 3), (4, 3), {}),
        ((1, 1, 1, 1), (1, 1, 1, 1), {}),
        ((2, 3, 4, 4, 4, 4), (4, 3, 2, 2, 2, 2), {}),
        ((2, 3, 5, 4), (4, 3, 3, 3), {"lhs_dilation": (2, 2), "strides": 2}),
    ],
)
def test_odd_shapes(lhs, rhs, options):
    options = {"padding": [(0, 0)] * (len(lhs) - 2), **options}
    strides = (options.pop("strides", 1),) * (len(lhs) - 2)
    lhs, rhs = jnp.ones(lhs), jnp.ones(rhs)

    def run(f):
        return f(lhs, rhs, strides, **options)

    found, expected = run(jl.conv_general_dilated), run(jax.lax.conv_general_dilated)
    np.testing.assert_array_equal(found, expected)
    if rhs.size:
        for argument in (0, 1):
            loss = lambda *a: jl.conv_general_dilated(*a, strides, **options).sum()  # noqa: E731
            like = lambda *a: jax.lax.conv_general_dilated(*a, strides, **options).sum()  # noqa: E731
            np.testing.assert_array_equal(
                jax.grad(loss, argument)(lhs, rhs), jax.grad(like, argument)(lhs, rhs)
            )


def test_not_a_number_stays_where_it_is_read():
    x, w = operands("same", "last")
    x = x.at[0, 4, 4, 0].set(jnp.nan)
    y = jax.jit(convolution(jl.conv_general_dilated, "last", {"padding": "SAME"}))(x, w)
    wrong = np.isnan(y)
    assert wrong[0, 3:6, 3:6].all() and wrong.sum() == 9 * w.shape[-1]


@pytest.mark.parametrize("format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", [(8, 13), (7, 7)], ids=str)
def test_winograd(size, format):
    """Where the default precision allows, with errors as those of plain sums."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 64, *size)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((96, 64, 3, 3)), jnp.float32)
    ct = jnp.asarray(rng.standard_normal((3, 96, *size)), jnp.float32)

    def values(x, w, ct, precision=None):
        def f(x):
            x = jl.with_memory_format(x, format)
            return jl.conv(x, w, padding=1, precision=precision)

        y, pull = jax.vjp(f, x)
        return y, pull(ct)[0]

    def error(actual, expected):
        return np.abs(actual - expected).max() / np.abs(expected).max()

    def by_winograd(f):
        return compiled(f, x, w, ct).count("winograd = true")

    plain = functools.partial(values, precision="highest")
    assert by_winograd(values) == 2 and by_winograd(plain) == 0
    exact = values(*(a.astype(jnp.float64) for a in (x, w, ct)))
    for found in (jax.jit(values)(x, w, ct), jax.jit(plain)(x, w, ct)):
        for actual, expected in zip(found, exact, strict=True):
            assert error(actual, expected) < 2e-6


@pytest.mark.parametrize("format", ["NCHW", "NHWC", None])
def test_winograd_of_what_is_not_finite(format):
    """It is found where lax has it, the same, and nowhere else."""

    def lax(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")

    def ours(x, w):
        return jl.conv(jl.with_memory_format(x, format), w, padding=1)

    @functools.partial(jax.jit, static_argnums=0)
    def values(convolve, x, w, ct):
        y, pull = jax.vjp(lambda x: convolve(x, w), x)
        return y, pull(ct)[0]

    rng = np.random.default_rng(0)
    given = {
        "x": rng.standard_normal((2, 64, 13, 14)).astype(np.float32),
        "w": rng.standard_normal((32, 64, 3, 3)).astype(np.float32) / 64,
        "ct": rng.standard_normal((2, 32, 13, 14)).astype(np.float32),
    }
    convolve = ours if format else jl.optimize_layout(lax)
    for name, value in itertools.product(given, [np.inf, -np.inf, np.nan, 3e38]):
        spoilt = given[name].copy()
        spoilt[1, 5, 0, 1] = value
        if name != "w":
            spoilt[0, 7, 6, 4:6] = value
        arrays = (given | {name: spoilt}).values()
        pairs = zip(values(convolve, *arrays), values(lax, *arrays), strict=True)
        for actual, like in pairs:
            # XLA multiplies the padding's zeros in some loops and not in others.
            inner = np.s_[:, :, 1:-1, 1:-1] if name == "w" else np.s_[:]
            np.testing.assert_allclose(
                actual[inner], like[inner], 1e-4, 1e-5, err_msg=f"{name}: {value}"
            )


@pytest.mark.parametrize(
    ("lhs", "rhs", "options"),
    [
        ((2, 3, 8, 8), (4, 2, 3, 3), {}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"feature_group_count": 2}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"window_strides": (1,)}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"padding": [(0, 0)]}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"padding": "ODD"}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"padding": [(-9, 0), (0, 0)]}),
        ((2, 3, 8, 8), (4, 3, 3), {}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"dimension_numbers": ("NCHW", "OIHW", "NCXY")}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"lhs_dilation": (2, 2), "padding": "SAME"}),
    ],
)
def test_what_lax_rejects_is_rejected_alike(lhs, rhs, options):
    options = {"window_strides": (1, 1), "padding": "VALID"} | options
    lhs, rhs = jnp.ones(lhs, jnp.float32), jnp.ones(rhs, jnp.float32)
    errors = []
    for f in (jl.conv_general_dilated, jax.lax.conv_general_dilated):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            f(lhs, rhs, **options)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1]) and str(errors[0]) == str(errors[1])


# --- transforms


@pytest.mark.parametrize("case", ["strides", "groups", "transposed", "batch groups"])
def test_second_derivatives(case):
    f = convolution(jl.conv_general_dilated, "last", CASES[case][2])
    x, w = operands(case, "last", jnp.float64)
    check_grads(f, (x, w), order=2, modes=("fwd", "rev"), eps=1e-3)


@pytest.mark.parametrize("mapped", [(0, None), (2, None), (None, 0), (None, 4), (1, 3)])
@pytest.mark.parametrize("case", ["strides", "groups", "transposed groups"])
def test_vmap(case, mapped):
    """The value, and gradients per example, which fold into other axes."""
    x, w = (
        a if axis is None else jnp.stack([a, 2 * a - 1, a + 1], axis)
        for a, axis in zip(operands(case, "last"), mapped, strict=True)
    )
    options = CASES[case][2]

    def run(f):
        f = convolution(f, "last", options)
        both = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))
        return jax.jit(lambda x, w: (jax.vmap(f, mapped)(x, w),
                                     jax.vmap(both, mapped)(x, w)))  # fmt: skip

    ours, like = run(jl.conv_general_dilated), run(jax.lax.conv_general_dilated)
    close(ours(x, w), like(x, w), scale=10)
    hlo = compiled(ours, x, w)
    assert kernels(hlo) > 0 and count("convolution", hlo) == 0


def test_vmap_of_nothing():
    x, w = operands("same")
    f = convolution(jl.conv_general_dilated, "first", {"padding": "SAME"})
    assert jax.vmap(f, (0, None))(x[None][:0], w).shape == (0, 2, 6, 9, 8)
    assert jax.vmap(f)(x[None][:0], w[None][:0]).shape == (0, 2, 6, 9, 8)


def in_scan(conv, x, ws):
    return jax.lax.scan(lambda x, w: (jnp.tanh(conv(x, w)), None), x, ws)[0]


def in_while(conv, x, ws):
    return jax.lax.while_loop(
        lambda carry: carry[0] < len(ws),
        lambda carry: (carry[0] + 1, jnp.tanh(conv(carry[1], ws[carry[0]]))),
        (0, x),
    )[1]


def in_cond(conv, x, ws):
    return jax.lax.cond(x.sum() > 0, lambda: conv(x, ws[0]), lambda: conv(2 * x, ws[1]))


def in_remat(conv, x, ws):
    step = jax.checkpoint(lambda x, w: jnp.tanh(conv(x, w)))
    return step(step(x, ws[0]), ws[1])


@pytest.mark.parametrize("format", ["first", "last"])
@pytest.mark.parametrize("program", [in_scan, in_while, in_cond, in_remat])
def test_control_flow(program, format):
    rng = np.random.default_rng(0)
    x, ws = rng.standard_normal((2, 8, 8, 8)), rng.standard_normal((3, 8, 8, 3, 3)) / 9
    x = jnp.asarray(x.transpose(axes("NC*", FORMATS[format][0], 4)), jnp.float32)
    order = [0, *(1 + axis for axis in axes("OI*", FORMATS[format][1], 4))]
    ws = jnp.asarray(ws.transpose(order), jnp.float32)
    options = {"padding": "SAME"}

    def run(f):
        f = functools.partial(program, convolution(f, format, options))
        if program is in_while:
            return f
        return jax.value_and_grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1))

    ours, like = run(jl.conv_general_dilated), run(jax.lax.conv_general_dilated)
    close(jax.jit(ours)(x, ws), jax.jit(like)(x, ws), scale=10)
    hlo = compiled(ours, x, ws)
    assert kernels(hlo) > 0 and count("convolution", hlo) == 0


@pytest.mark.parametrize("case", ["strides", "groups", "dilation", "depthwise"])
@pytest.mark.parametrize("format", ["first", "last"])
def test_convolutions_that_jax_wrote(case, format):
    """The gradients of lax's own convolution, recognised as what they are."""
    x, w = operands(case, format)
    like = convolution(jax.lax.conv_general_dilated, format, CASES[case][2])
    gradients = with_gradients(like)
    jaxpr = jax.make_jaxpr(gradients)(x, w, like(x, w))
    ct = jnp.cos(like(x, w))

    def ours(*args):
        return evaluate(jaxpr, args)

    names = str(jax.make_jaxpr(ours)(x, w, ct))
    assert "conv_general_dilated" not in names
    assert "conv_weight_grad" in names
    assert ("conv_input_grad" in names) == (case in ("strides", "depthwise"))
    close(jax.jit(ours)(x, w, ct), gradients(x, w, ct), scale=10)


def evaluate(jaxpr, args):
    """Runs a program with our convolution for lax's."""
    values = dict(zip(jaxpr.jaxpr.invars, args, strict=True))
    values |= dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))

    for eqn in jaxpr.jaxpr.eqns:
        given = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if eqn.primitive.name == "conv_general_dilated":
            out = jl.conv_general_dilated(*given, **eqn.params)
        else:
            out = eqn.primitive.bind(*given, **eqn.params)
        for v, value in zip(
            eqn.outvars,
            out if eqn.primitive.multiple_results else [out],
            strict=True,
        ):
            values[v] = value
    return tuple(values[v] for v in jaxpr.jaxpr.outvars)


# --- several devices

BATCH, CHANNELS, OUT = P("a"), P(None, None, None, "a"), P(None, None, None, "a")


@pytest.mark.parametrize(
    ("x_spec", "w_spec", "out_spec", "sums"),
    [
        (BATCH, P(), BATCH, 0),
        (P(), OUT, CHANNELS, 0),
        (P("a", None, None, "b"), P(None, None, "b"), BATCH, 1),
        (P(None, "a"), P(), P(), 0),  # rows are gathered
    ],
    ids=["batch", "out channels", "in channels", "rows"],
)
def test_sharded(mesh, x_spec, w_spec, out_spec, sums):
    place = lambda v, spec: jax.device_put(v, NamedSharding(mesh, spec))  # noqa: E731
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 8, 8, 16)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((3, 3, 16, 8)), jnp.float32)
    explicit = mesh.axis_types[0] == jax.sharding.AxisType.Explicit
    options = {"padding": "SAME"}
    expected = convolution(jax.lax.conv_general_dilated, "last", options)
    like = jax.value_and_grad(lambda x, w: jnp.sum(expected(x, w) ** 2), (0, 1))(x, w)
    y = expected(x, w)
    if explicit:
        if x_spec == P(None, "a"):
            pytest.skip("lax itself wants no sharded rows on an Explicit mesh")
        options["out_sharding"] = NamedSharding(mesh, out_spec)
    ours = convolution(jl.conv_general_dilated, "last", options)
    args = place(x, x_spec), place(w, w_spec)
    close(jax.jit(ours)(*args), y, scale=10)
    hlo = jax.jit(ours).lower(*args).compile().as_text()
    assert kernels(hlo) == 1
    if x_spec != P(None, "a"):
        assert collectives(hlo) == ({"all-reduce": sums} if sums else {})
    gradient = jax.value_and_grad(lambda x, w: jnp.sum(ours(x, w) ** 2), (0, 1))
    close(jax.jit(gradient)(*args), like, scale=10)


@pytest.mark.parametrize("groups", [1, 2, 16])
def test_data_parallel_gradients(mesh, groups):
    """One sum of the weight's gradient, none of the activations."""
    if mesh.axis_types[0] == jax.sharding.AxisType.Explicit and groups > 1:
        pytest.skip("covered by shard_map")
    x = jnp.cos(jnp.arange(8.0 * 8 * 8 * 16, dtype="float32")).reshape(8, 8, 8, 16)
    w = jnp.sin(jnp.arange(9.0 * 256 / groups, dtype="float32")).reshape(3, 3, -1, 16)
    options = {"padding": "SAME", "feature_group_count": groups}

    def run(f):
        f = convolution(f, "last", options)
        return jax.grad(lambda w, x: jnp.sum(f(x, w) ** 2))

    expected = run(jax.lax.conv_general_dilated)(w, x)
    sharded = jax.device_put(x, NamedSharding(mesh, BATCH))
    ours = jax.jit(run(jl.conv_general_dilated))
    close(
        ours(jax.device_put(w, NamedSharding(mesh, P())), sharded), expected, scale=10
    )
    hlo = ours.lower(w, sharded).compile().as_text()
    assert kernels(hlo) == 2 and collectives(hlo) == {"all-reduce": 1}


def test_inside_shard_map(mesh):
    x, w = operands("same", "last")
    x = jnp.concatenate([x, 2 * x])
    options = {"padding": "SAME"}

    def loss(f):
        f = convolution(f, "last", options)

        def local(x, w):
            return jax.lax.psum(jnp.sum(f(x, w) ** 2), "a")

        return local

    sharded = jax.shard_map(
        loss(jl.conv_general_dilated), in_specs=(P("a"), P()), out_specs=P()
    )
    found = jax.jit(jax.grad(sharded, (0, 1)))(
        jax.device_put(x, NamedSharding(mesh, P("a"))),
        jax.device_put(w, NamedSharding(mesh, P())),
    )
    like = convolution(jax.lax.conv_general_dilated, "last", options)
    expected = jax.grad(lambda x, w: jnp.sum(like(x, w) ** 2), (0, 1))(x, w)
    close(found, expected, scale=10)


def test_every_order_of_the_axes():
    """One order for x, w and y each, of all there are."""
    x, w = operands("groups")
    orders = list(itertools.permutations(range(4)))
    expected = convolution(jax.lax.conv_general_dilated, "first", CASES["groups"][2])
    y = expected(x, w)
    for i in range(0, 24, 5):
        specs = [orders[(i * k) % 24] for k in (1, 5, 7)]
        args = [
            jnp.transpose(a, np.argsort(s))
            for a, s in zip((x, w), specs[:2], strict=True)
        ]
        found = jl.conv_general_dilated(
            *args, (1, 1), "SAME", feature_group_count=3,
            dimension_numbers=jax.lax.ConvDimensionNumbers(*specs),
        )  # fmt: skip
        close(jnp.transpose(found, specs[2]), y)


@pytest.mark.parametrize("padding", ["VALID", "SAME", [(1, 1), (0, 0)]], ids=str)
@pytest.mark.parametrize("batch_groups", [1, 2])
def test_gradients_over_a_spatial_axis_of_size_0(padding, batch_groups):
    x, w = jnp.ones((4, 2, 0, 4)), jnp.ones((4, 2, 1, 2))

    def gradients(convolve):
        def total(x, w):
            y = convolve(x, w, (2, 1), padding, batch_group_count=batch_groups)
            return y.sum()

        return jax.grad(total, (0, 1))(x, w)

    ours, plain = map(
        gradients, (jl.conv_general_dilated, jax.lax.conv_general_dilated)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


@jax.numpy_dtype_promotion("strict")
def test_gradients_where_jax_is_told_to_promote_nothing():
    x, w = jnp.ones((1, 2, 4, 4), "bfloat16"), jnp.ones((3, 2, 3, 3), "bfloat16")

    def total(x, w):
        y = jl.conv_general_dilated(
            x, w, (1, 1), "VALID", preferred_element_type="float32"
        )
        return y.sum()

    dx, dw = jax.grad(total, (0, 1))(x, w)
    assert dx.dtype == dw.dtype == "bfloat16" and jnp.all(dw == 4)
