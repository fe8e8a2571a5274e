# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit floats with scales, against NumPy in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RESULTS = [E4M3, E5M2, jnp.bfloat16, jnp.float16, jnp.float32]


def numbers(seed, shape, dtype):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x, jnp.float32).astype(dtype)


def wide(x):
    return np.asarray(x).astype(np.float64)


def close(got, want):
    info = jnp.finfo(got.dtype)
    want = np.clip(want, -float(info.max), float(info.max))
    slack = 1e-5 + 2 * float(info.smallest_subnormal)
    if jax.default_backend() != "cpu":
        # Hopper adds products of 8-bit floats in some 14 bits (DeepSeek-V3 technical
        # report, arXiv 2412.19437, section 3.5.2), each cut off at the largest.
        slack += 2**-10 * np.abs(want).max(initial=0)
    np.testing.assert_allclose(wide(got), want, rtol=float(info.eps), atol=slack)


def scale(x):
    return jnp.float32(x)


@pytest.mark.parametrize("types", list(itertools.product((E4M3, E5M2), repeat=2)))
@pytest.mark.parametrize("result", RESULTS)
def test_scales(types, result):
    a, b = numbers(0, (5, 16), types[0]), numbers(1, (8, 16), types[1])
    plain = wide(a) @ wide(b).T
    for given in itertools.product((None, 0.25), (None, 3.0), (None, 0.5)):
        if not any(given):
            continue
        names = ("scale_a", "scale_b", "scale_result")
        scales = {n: scale(x) for n, x in zip(names, given, strict=True) if x}
        got = jl.gemm(
            a, b, transpose_b=True, alpha=2, preferred_element_type=result, **scales
        )
        assert got.dtype == result
        close(got, 2 * plain * np.prod([x for x in given if x]))


def test_order_of_scales_and_epilogue():
    a, b = numbers(0, (5, 16), E4M3), numbers(1, (16, 8), E4M3)
    c, bias = numbers(2, (5, 8), jnp.bfloat16), numbers(3, (8,), jnp.bfloat16)
    got = jl.gemm(
        a, b, c, alpha=0.5, beta=2, bias=bias, activation="relu", scale_a=scale(0.25),
        scale_b=scale(2), scale_result=scale(4), preferred_element_type=jnp.bfloat16,
    )  # fmt: skip
    z = 0.25 * wide(a) @ wide(b) + 2 * wide(c) + wide(bias)
    close(got, 4 * np.maximum(z, 0))


@pytest.mark.parametrize("result", [E4M3, E5M2])
def test_large_results_are_bounded(result):
    a = jnp.full((2, 16), 448, E4M3)
    got = jl.gemm(a, -a.T, scale_a=scale(1e3), preferred_element_type=result)
    assert (wide(got) == -float(jnp.finfo(result).max)).all()
    nan = jl.gemm(a, a.T, scale_a=scale(np.nan), preferred_element_type=result)
    assert np.isnan(wide(nan)).all()


def test_alpha_zero_reads_nothing():
    a = jnp.full((2, 16), jnp.nan, E4M3)
    got = jl.gemm(a, a.T, alpha=0, scale_a=scale(2))
    assert (wide(got) == 0).all()


def test_scales_are_traced_and_have_gradients():
    a, b = numbers(0, (5, 16), E4M3), numbers(1, (16, 8), E5M2)

    def loss(a, b, scale_a, scale_b):
        y = jl.gemm(
            a, b, scale_a=scale_a, scale_b=scale_b, preferred_element_type=jnp.float32
        )
        return (y * jnp.arange(8.0)).sum()

    got = jax.jit(jax.grad(loss, range(4)))(a, b, scale(0.5), scale(3))
    ct = np.broadcast_to(np.arange(8.0), (5, 8))
    product = wide(a) @ wide(b)
    close(got[0], 1.5 * ct @ wide(b).T)
    close(got[1], 1.5 * wide(a).T @ ct)
    np.testing.assert_allclose(got[2], 3 * (ct * product).sum(), rtol=1e-5)
    np.testing.assert_allclose(got[3], 0.5 * (ct * product).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "in_axes", [(0, None, None), (None, 1, None), (0, 0, None), (0, 0, 0), (0, None, 0)]
)
def test_vmap(in_axes):
    shapes = [(5, 16), (16, 8), ()]
    operands = []
    for i, (shape, axis) in enumerate(zip(shapes, in_axes, strict=True)):
        batched = shape if axis is None else (*shape[:axis], 3, *shape[axis:])
        dtype = E4M3 if shape else jnp.float32
        operands.append(numbers(i, batched, dtype))

    def f(a, b, scale_a):
        return jl.gemm(a, b, scale_a=scale_a, preferred_element_type=jnp.float32)

    got = jax.vmap(f, in_axes)(*operands)
    for i in range(3):
        one = [
            x if axis is None else jnp.take(x.astype(jnp.float32), i, axis)
            for x, axis in zip(operands, in_axes, strict=True)
        ]
        close(got[i], wide(one[0]) @ wide(one[1]) * wide(one[2]))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"a": jnp.ones((4, 16), "f4")}, "gemm: scales are for 8-bit floats, got f"),
        ({"scale_a": jnp.ones(1, "f4")}, r"must be float32 of shape \(\), got float32"),
        ({"scale_b": jnp.bfloat16(1)}, r"must be float32 of shape \(\), got bfloat16"),
    ],
)
def test_wrong_scales_are_errors(changes, message):
    given = {"a": jnp.ones((4, 16), E4M3), "scale_a": scale(1)} | changes
    with pytest.raises(TypeError, match=message):
        jl.gemm(b=jnp.ones((16, 4), E4M3), **given)


def test_dtypes_differ_with_scales_alone():
    a, b = jnp.ones((4, 16), E4M3), jnp.ones((16, 4), E5M2)
    with pytest.raises(TypeError, match="same dtype"):
        jl.gemm(a, b)
