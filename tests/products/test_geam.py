# SPDX-License-Identifier: Apache-2.0
"""Sums of matrices, transposed or not, against NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_layout as jl
from hlo import collectives, compiled, kernels

DTYPES = {
    "float32": 1e-6, "float64": 1e-15, "bfloat16": 1e-2, "float16": 1e-3,
    "complex64": 1e-6, "complex128": 1e-15, "int32": 0,
}  # fmt: skip
SHAPES = [(1, 1), (64, 128), (1031, 517), (5, 333, 400), (100_003, 7), (7, 100_003)]
TRANSPOSES = list(itertools.product((False, True), repeat=2))


def operands(shape, dtype="float64", transposes=(False, False)):
    rng = np.random.default_rng(0)
    shapes = [
        shape[:-2] + (shape[:-3:-1] if transposed else shape[-2:])
        for transposed in transposes
    ]
    xs = [rng.integers(-9, 9, s) + rng.integers(0, 4, s) / 4 for s in shapes]
    if dtype.startswith("complex"):
        xs = [x + 1j * x[..., ::-1] for x in xs]
    return [jnp.asarray(x).astype(dtype) for x in xs]


@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_geam(dtype, shape, transposes):
    a, b = operands(shape, dtype, transposes)
    alpha, beta = (2, -3) if dtype == "int32" else (0.5, -3)
    f = functools.partial(
        jl.geam,
        alpha=alpha,
        beta=beta,
        transpose_a=transposes[0],
        transpose_b=transposes[1],
    )
    y = jax.jit(f)(a, b)
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    p, q = (
        np.asarray(x.astype(wide)).swapaxes(-1, -2) if t else np.asarray(x.astype(wide))
        for x, t in zip((a, b), transposes, strict=True)
    )
    assert y.dtype == dtype and y.shape == shape
    expected = alpha * p + beta * q
    np.testing.assert_allclose(
        np.asarray(y.astype(wide)), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype]
    )
    ran = dtype not in ("float16", "int32") and any(transposes)
    assert kernels(compiled(f, a, b)) == ran


def test_nan_and_overflow_in_bfloat16():
    a = jnp.full((1024, 1024), jnp.nan, jnp.bfloat16)
    b = jnp.full((1024, 1024), 3e38, jnp.bfloat16)
    assert jnp.isnan(jax.jit(jl.geam, static_argnums=(4,))(a, b, 1, 1, True)).all()
    y = jl.geam(b, b, 2, 2, True)
    assert jnp.isposinf(y).all()


def test_complex_and_array_scalars():
    a, b = operands((270, 290), "complex128", (True, False))
    y = jl.geam(a, b, 1 + 2j, -1j, transpose_a=True)
    expected = (1 + 2j) * np.asarray(a).T - 1j * np.asarray(b)
    np.testing.assert_allclose(y, expected, atol=1e-12)
    y = jax.jit(functools.partial(jl.geam, transpose_a=True))(a, b, 1 + 2j, -1j)
    np.testing.assert_allclose(y, expected, atol=1e-12)


def test_transformations():
    a, b = operands((6, 5), transposes=(True, False))
    f = functools.partial(jl.geam, alpha=0.5, beta=-2, transpose_a=True)
    check_grads(f, (a, b), order=2, modes=("fwd", "rev"), eps=1e-3)
    stacked = jnp.stack([a, 2 * a], 1)
    out = jax.vmap(f, (1, None), 2)(stacked, b)
    np.testing.assert_allclose(out[..., 1], f(2 * a, b))


def test_sharded_without_a_collective(mesh):
    a, b = operands((2048, 1024), "float32", (True, False))
    spec = P("a", "b")
    b = jax.device_put(b, NamedSharding(mesh, spec))
    a = jax.device_put(a, NamedSharding(mesh, P("b", "a")))
    f = functools.partial(jl.geam, transpose_a=True)
    hlo = compiled(f, a, b)
    assert kernels(hlo) == 1 and collectives(hlo) == {}
    np.testing.assert_allclose(jax.jit(f)(a, b), np.asarray(a).T + np.asarray(b))


def test_bad_input():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="geam: op.a. and op.b. must be matrices of"):
        jl.geam(x, x, transpose_a=True)
    with pytest.raises(TypeError, match="geam: a and b must have the same dtype"):
        jl.geam(x, x.astype(jnp.float32))
    with pytest.raises(TypeError, match="geam: for real arrays alpha must be real"):
        jl.geam(x, x, 1j)


def test_a_wrong_call_returns_an_error():
    x = jnp.ones((4, 4), jnp.int32)
    scalars = {"alpha": np.ones(2), "beta": np.ones(2)}
    flags = {"transpose_a": True, "transpose_b": False}
    call = jax.ffi.ffi_call("jax_layout_geam", x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="geam: a, b and y must be"):
        call(x, x, **scalars, **flags)
