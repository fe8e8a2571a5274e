# SPDX-License-Identifier: Apache-2.0
"""mm, addmm and linear with a sparse first matrix, against the dense one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jax_layout as jl

FORMATS = [sparse.BCOO, sparse.BCSR]
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 2e-2, "complex64": 1e-5}
formats = pytest.mark.parametrize("kind", FORMATS)


def operands(dtype="float64"):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((9, 7)) * (rng.random((9, 7)) < 0.3)
    b, c = rng.standard_normal((7, 5)), rng.standard_normal((9, 5))
    return [jnp.asarray(x).astype(dtype) for x in (a, b, c)]


def close(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    tolerance = TOLERANCE[a.dtype.name]
    wide = np.complex128
    a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


FUNCTIONS = {
    "mm": lambda a, b, c: jl.mm(a, b),
    "addmm": lambda a, b, c: jl.addmm(c, a, b, beta=-2, alpha=0.5),
    "addmm array": lambda a, b, c: jl.addmm(c[0], a, b, alpha=jnp.float32(3)),
    "addmm zero": lambda a, b, c: jl.addmm(c, a, b, beta=0, alpha=0),
    "linear": lambda a, b, c: jl.linear(a, b.T),
    "linear bias": lambda a, b, c: jl.linear(a, b.T, c[0]),
}


@formats
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_dense(name, dtype, kind):
    a, b, c = operands(dtype)
    f = FUNCTIONS[name]
    close(jax.jit(f)(kind.fromdense(a), b, c), f(a, b, c))


@formats
def test_activation_and_result_dtype(kind):
    a, b, c = operands("float32")

    def f(a):
        options = {"activation": "gelu", "preferred_element_type": jnp.float64}
        return jl.linear(a, b.T, c[0].astype("float64"), **options)

    assert f(kind.fromdense(a)).dtype == f(a).dtype == jnp.float64
    np.testing.assert_allclose(f(kind.fromdense(a)), f(a), rtol=1e-5, atol=1e-6)


@formats
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_gradients(kind, dtype):
    """To the stored values, and to the dense operands."""
    a, b, c = operands(dtype)
    f = lambda a, b, c: jnp.sum(jnp.sin(jl.addmm(c, a, b, alpha=2)))  # noqa: E731
    dense = jax.grad(f, (0, 1, 2))(a, b, c)
    stored = kind.fromdense(a)
    da, db, dc = sparse.grad(f, (0, 1, 2))(stored, b, c)
    assert isinstance(da, kind)
    close(da.todense(), jnp.where(a != 0, dense[0], 0))
    close(db, dense[1])
    close(dc, dense[2])
    _, t = jax.jvp(lambda b: jl.mm(stored, b), (b,), (b,))
    close(t, jl.mm(a, b))


@formats
def test_vmap_of_the_dense_operand(kind):
    a, b, _ = operands()
    b = jnp.stack([b, 2 * b, -b])
    close(jax.vmap(lambda b: jl.mm(kind.fromdense(a), b))(b), jnp.matmul(a, b))


@formats
def test_a_bias_of_numpy(kind):
    with jax.enable_x64(False):
        a, b, _ = operands("float32")
        bias = np.ones(5)  # float64, which jax makes float32
        close(jl.linear(kind.fromdense(a), b.T, bias), jl.linear(a, b.T, bias))


@formats
def test_bad_input(kind):
    a, b, c = operands()
    s = kind.fromdense(a)
    with pytest.raises(ValueError, match=r"mm: .* cannot be multiplied \(9x7 and 5x7"):
        jl.mm(s, b.T)
    with pytest.raises(TypeError, match="mm: expected input and mat2 .* same dtype"):
        jl.mm(s, b.astype("float32"))
    with pytest.raises(TypeError, match="mm: only input may be sparse"):
        jl.mm(s, kind.fromdense(b))
    with pytest.raises(TypeError, match="addmm: mat2 must be an array, got list"):
        jl.addmm(c, s, [1.0])
    with pytest.raises(
        ValueError, match="addmm: input of shape .* cannot be broadcast"
    ):
        jl.addmm(c[:3], s, b)
    with pytest.raises(ValueError, match=r"linear: bias must have shape \(5,\)"):
        jl.linear(s, b.T, b)
    with pytest.raises(ValueError, match="linear: a sparse x excludes"):
        jl.linear(s, b.T, weight_grad=b.T)
    with pytest.raises(ValueError, match="must be a matrix without batch"):
        jl.mm(kind.fromdense(jnp.stack([a, a]), n_batch=1), b)
