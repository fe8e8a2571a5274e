# SPDX-License-Identifier: Apache-2.0
"""Weights in the order of the kernels: the same results, and nothing moved."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from hlo import collectives, compiled, count, kernels
from jax_layout import _backends

# x, weight, arguments
CASES = {
    "3x3": ((2, 32, 9, 8), (64, 32, 3, 3), {"padding": 1}),
    "channels apart": ((1, 512, 7, 7), (512, 512, 3, 3), {"padding": 1}),
    "one tap": ((2, 64, 9, 8), (128, 64, 1, 1), {"stride": 2}),
    "1-D": ((2, 32, 40), (64, 32, 5), {"padding": 2}),
    "3-D": ((1, 16, 5, 6, 7), (32, 16, 2, 3, 2), {}),
    "one example": ((32, 9, 8), (64, 32, 3, 3), {"dilation": 2}),
}


def operands(x, weight, dtype="float32"):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in (x, weight, weight[:1])]
    return [jnp.asarray(a, dtype) for a in arrays]


def pack(x, weight, **arguments):
    format = jl.conv_weight_format(x, weight, **arguments)
    return jl.FormattedArray.pack(weight, format)


def packs():
    x, weight, _ = operands(*CASES["3x3"][:2])
    return pack(x, weight, padding=1).format.permutation is None


needs_blocks = pytest.mark.skipif(
    not _backends.available("cpu") or not packs(),
    reason="oneDNN is missing, or has no order of its own on this machine",
)


@pytest.mark.parametrize(
    ("case", "dtype"), list(itertools.product(CASES, ["float32", "bfloat16"]))
)
def test_value_and_gradients_are_those_of_plain_weights(case, dtype):
    x_shape, w_shape, arguments = CASES[case]
    x, weight, bias = operands(x_shape, w_shape, dtype)
    packed = pack(x, weight, **arguments)
    np.testing.assert_array_equal(
        np.asarray(jl.conv(x, packed, **arguments), np.float32),
        np.asarray(jl.conv(x, weight, **arguments), np.float32),
    )

    def loss(x, weight, bias):
        y = jl.conv(x, weight, bias, activation="relu", **arguments)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(x, packed, bias)
    want = jax.jit(jax.grad(loss, (0, 1, 2)))(x, weight, bias)
    got = got[0], got[1].logical(), got[2]
    for a, b in zip(got, want, strict=True):
        scale = float(jnp.max(jnp.abs(b.astype(jnp.float32))))
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), atol=1e-2 * scale
        )


@needs_blocks
@pytest.mark.parametrize("case", ["3x3", "channels apart", "1-D"])
def test_the_kernel_reads_packed_weights_as_they_are(case):
    x_shape, w_shape, arguments = CASES[case]
    x, weight, _ = operands(x_shape, w_shape)
    packed = pack(x, weight, **arguments)
    assert packed.format.permutation is None
    hlo = compiled(lambda x, w: jl.conv(x, w, **arguments), x, packed)
    assert kernels(hlo) == 1 and 'w_format = "' in hlo and 'w_format = ""' not in hlo


@needs_blocks
def test_weights_packed_for_another_problem_are_unpacked():
    x, weight, _ = operands((2, 32, 9, 8), (64, 32, 3, 3))
    format = jl.MemoryFormat.named("OIHW8i4o")  # no kernel's
    packed = jl.FormattedArray.pack(weight, format)
    f = lambda x, w: jl.conv(x, w, padding=1)  # noqa: E731
    np.testing.assert_array_equal(f(x, packed), f(x, weight))
    assert 'w_format = ""' in compiled(f, x, packed)


def test_one_channel_in_a_format_that_no_kernel_has():
    x, weight, _ = operands((8, 1, 64, 64), (1, 1, 4, 3))  # a depthwise one
    rows = jl.MemoryFormat(((), (), (2,), ()), ((2, 1), (0, 0), (1, 0), (2, 0), (3, 0)))
    packed = jl.FormattedArray.pack(weight, rows)
    np.testing.assert_array_equal(jl.conv(x, packed), jl.conv(x, weight))


def test_formats_that_move_nothing():
    x, weight, _ = operands((2, 32, 9, 8), (32, 1, 3, 3))
    assert jl.conv_weight_format(x, weight, groups=32).row_major  # depthwise
    x, weight, _ = operands((2, 5, 9, 8), (7, 5, 3, 3))
    packed = pack(x, weight)  # no blocks divide its channels
    assert packed.format.row_major
    np.testing.assert_array_equal(jl.conv(x, packed), jl.conv(x, weight))


def test_shapes_are_enough():
    x, weight, _ = operands((2, 32, 9, 8), (64, 32, 3, 3))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, weight)]
    assert jl.conv_weight_format(*shapes) == jl.conv_weight_format(x, weight)


def test_formats_and_vmap():
    x, weight, _ = operands((2, 32, 9, 8), (64, 32, 3, 3))
    packed = pack(x, weight)
    last = jl.with_memory_format(x, jl.channels_last)
    y = jl.conv(last, packed)
    assert jl.is_contiguous(y, jl.channels_last)
    np.testing.assert_allclose(y, jl.conv(x, weight), atol=1e-4)
    stack = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(
        jax.vmap(jl.conv, (0, None))(stack, packed),
        jax.vmap(jl.conv, (0, None))(stack, weight),
        atol=1e-4,
    )
    tagged = jax.jit(lambda x, w: jl.conv(x, jl.with_memory_format(w, packed.format)))
    np.testing.assert_allclose(tagged(x, weight), jl.conv(x, weight), atol=1e-4)


def test_over_devices(mesh):
    axis = mesh.axis_names[0]
    x, weight, bias = operands((4 * mesh.shape[axis], 32, 9, 8), (64, 32, 3, 3))
    packed = pack(x, weight)
    spread = jax.device_put(x, NamedSharding(mesh, P(axis)))
    f = jax.jit(lambda x, w, b: jl.conv(x, w, b, activation="relu"))
    y = f(spread, packed, bias)
    assert y.sharding.spec[0] == axis
    np.testing.assert_allclose(y, f(x, weight, bias), atol=1e-4)
    assert not collectives(f.lower(spread, packed, bias).compile().as_text())


def test_rejects_as_conv_does():
    x, weight, _ = operands((2, 32, 9, 8), (64, 16, 3, 3))
    with pytest.raises(ValueError, match="weight must be for the channels of x"):
        jl.conv_weight_format(x, weight)
    with pytest.raises(TypeError, match="conv_weight_format: x must be an array"):
        jl.conv_weight_format([1.0], weight)


def test_no_copy_of_packed_weights():
    x, weight, _ = operands((1, 64, 14, 14), (64, 64, 3, 3))
    last = jl.MemoryFormat.named("NHWC")

    def f(x, w):
        x = jl.with_memory_format(last.unpack(x), "NHWC")
        return jnp.sum(jl.conv(x, w, padding=1))

    hlo = compiled(f, last.pack(x), pack(x, weight, padding=1))
    assert count("copy", hlo) + count("transpose", hlo) == 0
