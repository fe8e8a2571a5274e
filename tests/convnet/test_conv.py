# SPDX-License-Identifier: Apache-2.0
"""conv and conv_transpose: torch's meaning, in the memory format of x."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from hlo import compiled, count, kernels
from jax_layout.formats.tags import stored

FORMATS = ["NCHW", "NHWC", "NCHW16c", "NHCW"]

# x, weight, arguments; channels that blocks of 16 divide
CONV = {
    "plain": ((2, 16, 9, 8), (32, 16, 3, 3), {}),
    "strides": ((2, 16, 9, 8), (16, 16, 3, 2), {"stride": (2, 3), "padding": (1, 0)}),
    "same": ((2, 16, 9, 8), (16, 16, 4, 3), {"padding": "same", "dilation": (1, 2)}),
    "valid": ((2, 16, 9, 8), (16, 16, 2, 2), {"padding": "valid"}),
    "groups": ((2, 32, 9, 8), (48, 16, 3, 3), {"groups": 2, "padding": 1}),
    "depthwise": ((2, 32, 9, 8), (32, 1, 3, 3), {"groups": 32, "padding": 1}),
    "one tap": ((2, 32, 9, 8), (16, 32, 1, 1), {"stride": 2}),
}
TRANSPOSED = {
    "plain": ((2, 16, 5, 6), (16, 32, 3, 3), {}),
    "strides": ((2, 16, 5, 6), (16, 16, 3, 4),
                {"stride": (2, 3), "padding": (1, 2), "output_padding": (1, 2)}),
    "dilation": ((2, 16, 5, 6), (16, 16, 3, 2), {"dilation": (1, 2), "stride": 2}),
    "groups": ((2, 32, 5, 6), (32, 16, 3, 3), {"groups": 2, "stride": 2}),
}  # fmt: skip
TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 1e-1, "float16": 1e-2}


def operands(x, weight, out, dtype="float32"):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in (x, weight, (out,))]
    return [jnp.asarray(a, dtype) for a in arrays]


def in_torch(name, *arrays, ct=None, relu=False, **arguments):
    """torch's value, and gradients, in float64."""
    torch = pytest.importorskip("torch")
    tensors = [
        torch.from_numpy(np.array(a, np.float64)).requires_grad_() for a in arrays
    ]
    f = getattr(torch.nn.functional, f"{name}{arrays[1].ndim - 2}d")
    y = f(*tensors, **arguments)
    y = torch.relu(y) if relu else y
    if ct is not None:
        y.backward(torch.from_numpy(np.array(ct, np.float64)))
    return y.detach().numpy(), [t.grad.numpy() for t in tensors if t.grad is not None]


@pytest.mark.parametrize(
    ("case", "dtype", "format"),
    [
        *itertools.product(CONV, ["float32"], FORMATS),
        *itertools.product(CONV, ["bfloat16"], ["NHWC"]),
        *itertools.product(["groups"], ["float16", "float64"], ["NCHW16c"]),
    ],
)
def test_conv_with_bias_and_relu(case, format, dtype):
    x, weight, arguments = CONV[case]
    args = operands(x, weight, weight[0], dtype)
    formats = []

    def f(x, *rest):
        x = jl.with_memory_format(x, format)
        y = jl.conv(x, *rest, activation="relu", **arguments)
        formats.append(jl.memory_format(y))
        return y

    expected, _ = in_torch("conv", *args, relu=True, **arguments)
    ct = jnp.asarray(np.cos(np.arange(expected.size)).reshape(expected.shape), dtype)
    y, vjp = jax.vjp(jax.jit(f), *args)
    assert y.dtype == dtype and str(formats[0]) == format
    expected, gradients = in_torch("conv", *args, relu=True, ct=ct, **arguments)
    for found, wanted in zip((y, *vjp(ct)), (expected, *gradients), strict=True):
        limit = TOLERANCE[dtype] * max(1, np.abs(wanted).max())
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=limit)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", TRANSPOSED)
def test_conv_transpose(case, format):
    x, weight, arguments = TRANSPOSED[case]
    args = operands(x, weight, weight[1] * arguments.get("groups", 1))

    def f(x, *rest):
        x = jl.with_memory_format(x, format)
        y = jl.conv_transpose(x, *rest, **arguments)
        assert str(jl.memory_format(y)) == format
        return y

    expected, _ = in_torch("conv_transpose", *args, **arguments)
    ct = jnp.asarray(np.cos(np.arange(expected.size)).reshape(expected.shape))
    expected, gradients = in_torch("conv_transpose", *args, ct=ct, **arguments)
    y, vjp = jax.vjp(jax.jit(f), *args)
    found = (y, *vjp(ct.astype(y.dtype)))
    for mine, wanted in zip(found, (expected, *gradients), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("sizes", [(11,), (6, 7, 5)], ids=["1-D", "3-D"])
def test_other_ranks_and_one_example(sizes):
    taps = (3,) * len(sizes)
    x, weight, bias = operands((2, 8, *sizes), (6, 8, *taps), 6)
    y = jl.conv(x, weight, bias, padding=1)
    expected, _ = in_torch("conv", x, weight, bias, padding=1)
    np.testing.assert_allclose(y, expected, atol=1e-4)
    one = jl.conv(x[0], weight, bias, padding=1)
    np.testing.assert_allclose(one, expected[0], atol=1e-4)
    back = jl.conv_transpose(y, weight, padding=1)
    expected, _ = in_torch("conv_transpose", y, weight, padding=1)
    np.testing.assert_allclose(back, expected, atol=1e-3)


@pytest.mark.parametrize("format", ["NCHW", "NHWC"])
def test_outside_of_a_trace_the_format_stays(format):
    x, weight, bias = operands((2, 16, 9, 8), (32, 16, 3, 3), 32)
    expected = jl.conv(x, weight, bias)
    y = jl.conv(jl.with_memory_format(x, format), weight, bias)
    assert jl.is_contiguous(y, format)
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("format", ["HWIO", "OHWI"])
def test_weights_in_a_format_of_their_own(format):
    x, weight, bias = operands((2, 16, 9, 8), (32, 16, 3, 3), 32)
    f = jax.jit(lambda x, w, b: jl.conv(x, jl.with_memory_format(w, format), b))
    np.testing.assert_allclose(f(x, weight, bias), jl.conv(x, weight, bias), atol=1e-5)


@pytest.mark.parametrize("mapped", list(itertools.product((None, 0), repeat=3))[1:])
def test_vmap_in_blocks(mapped):
    args = [
        a if axis is None else jnp.stack([a, a - 1, 2 * a])
        for a, axis in zip(
            operands((2, 32, 9, 8), (32, 8, 3, 3), 32), mapped, strict=True
        )
    ]

    def gradients(format):
        def loss(x, weight, bias):
            x = x if format is None else jl.with_memory_format(x, format)
            y = jl.conv(x, weight, bias, groups=4, activation="relu")
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1, 2)), mapped))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3),
        gradients("NCHW16c")(*args),
        gradients(None)(*args),
    )


def test_forward_with_its_epilogue_is_one_call():
    args = operands((2, 16, 9, 8), (32, 16, 3, 3), 32)
    hlo = compiled(lambda *a: jl.conv(*a, activation="relu"), *args)
    assert kernels(hlo) == 1 and count("convolution", hlo) == 0
    hlo = compiled(lambda x: jax.vmap(jl.conv, (0, None, None))(x, *args[1:]), args[0])
    assert kernels(hlo) == 1


@pytest.mark.parametrize("format", ["NHWC", "NCHW16c"])
def test_convolutions_follow_each_other_without_a_move(format):
    x, weight, bias = operands((2, 16, 9, 8), (16, 16, 3, 3), 16)
    memory = jl.MemoryFormat.named(format)

    def f(x, weight, bias):
        x = jl.with_memory_format(memory.unpack(x), format)
        for _ in range(3):
            x = jl.conv(x, weight, bias, padding=1, activation="relu")
        return stored(x)[0]

    hlo = compiled(f, memory.pack(x), weight, bias)
    assert hlo.count("jax_layout_conv") == 3
    assert count("transpose", hlo) <= 1  # into the format, of what comes from outside


def test_relu_lets_no_gradient_through_at_zero_and_below():
    x, weight = jnp.zeros((1, 16, 8, 8)), jnp.ones((16, 16, 3, 3))
    gradient = jax.grad(lambda x: jl.conv(x, weight, activation="relu").sum())(x)
    np.testing.assert_array_equal(gradient, 0)


def test_no_examples():
    assert jl.conv(jnp.ones((0, 16, 9, 8)), jnp.ones((32, 16, 3, 3))).shape == (
        0, 32, 7, 6,
    )  # fmt: skip


def test_integers():
    x = jnp.full((1, 16, 9, 8), 100, jnp.int8)
    weight = jnp.full((4, 16, 3, 3), 100, jnp.int8)
    y = jl.conv(x, weight, preferred_element_type=jnp.int32)
    assert y.dtype == jnp.int32 and (y == 9 * 16 * 10_000).all()


X, W = (2, 16, 9, 8), (32, 16, 3, 3)


@pytest.mark.parametrize(
    ("x", "weight", "arguments", "error", "match"),
    [
        (X, (32, 16, 3), {}, ValueError, "one to three spatial axes and x as many"),
        (X, (32, 16), {}, ValueError, "one to three spatial axes"),
        ((9,), W, {}, ValueError, "x as many"),
        (X, (32, 8, 3, 3), {}, ValueError, "weight must be for the channels of x"),
        (X, W, {"groups": 3}, ValueError, "channels must be divisible by groups"),
        (X, W, {"groups": 0}, ValueError, "groups must be a positive int"),
        (X, W, {"stride": 0}, ValueError, "stride must hold 2 integers of at least 1"),
        (X, W, {"stride": (1, 1, 1)}, ValueError, "stride must hold 2 int"),
        (X, W, {"stride": 1.5}, TypeError, "stride must be an int"),
        (X, W, {"padding": -1}, ValueError, "padding must hold 2 int"),
        (X, W, {"padding": "half"}, ValueError, 'padding must be "same"'),
        (X, W, {"padding": "same", "stride": 2}, ValueError, "takes a stride of 1"),
        (X, W, {"dilation": 5}, ValueError, "kernel must have taps and fit into x"),
        (X, (32, 16, 0, 3), {}, ValueError, "kernel must have taps"),
        (X, W, {"activation": "gelu"}, ValueError, "activation must be"),
        (X, W, {"bias": jnp.ones(16)}, ValueError, r"bias must have shape \(32,\)"),
    ],
)
def test_conv_rejects(x, weight, arguments, error, match):
    with pytest.raises(error, match=f"^conv: .*{match}"):
        jl.conv(jnp.ones(x), jnp.ones(weight), **arguments)


def test_conv_rejects_other_kinds():
    x, weight = jnp.ones(X, jnp.float32), jnp.ones(W, jnp.bfloat16)
    with pytest.raises(TypeError, match="conv: x and weight must have the same dtype"):
        jl.conv(x, weight)
    with pytest.raises(TypeError, match="conv: x must be an array, got list"):
        jl.conv([1.0], weight)

    @jax.jit
    def blocks(x):
        return jl.conv(jl.with_memory_format(x, "NCHW16c"), jnp.ones((8, 16, 3, 3)))

    with pytest.raises(ValueError, match="conv: channels of the result .* got 8"):
        blocks(jnp.ones(X))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"output_padding": 1}, "output_padding must be smaller than stride"),
        ({"padding": 6}, "the result must not be empty"),
        ({"groups": 5}, "channels must be divisible by groups"),
    ],
)
def test_conv_transpose_rejects(arguments, match):
    with pytest.raises(ValueError, match=f"conv_transpose: {match}"):
        jl.conv_transpose(jnp.ones((2, 16, 5, 6)), jnp.ones((16, 8, 3, 3)), **arguments)
