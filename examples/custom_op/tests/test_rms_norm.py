# SPDX-License-Identifier: Apache-2.0
"""The operator under jit, grad, vmap and sharding, and that its kernels run there."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from rms_norm import rms_norm

import jax_layout as jl


def operands(shape=(8, 6, 32)):
    x = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    return jnp.asarray(x[0]), jnp.asarray(x[1].reshape(-1, shape[-1])[0])


def plain(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def loss(f):
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def calls(f, *args):
    return jax.jit(f).lower(*args).compile().as_text().count('"jax_layout_rms_norm')


def test_jit():
    x, w = operands()
    close(rms_norm(x, w), plain(x, w))
    close(jax.jit(rms_norm)(x, w), plain(x, w))
    assert calls(rms_norm, x, w) == 1


def test_grad_is_one_kernel():
    x, w = operands()
    ours = jax.grad(loss(rms_norm), (0, 1))
    for a, b in zip(ours(x, w), jax.grad(loss(plain), (0, 1))(x, w), strict=True):
        close(a, b)
    assert calls(ours, x, w) == 2  # one forward, one backward


def test_derivatives_of_both_modes_and_orders():
    x, w = operands((3, 8))
    check_grads(rms_norm, (x, w), order=2, modes=("fwd", "rev"), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dims", [(0, None), (1, None), (None, 0), (1, 0)])
def test_vmap(dims):
    x, w = operands()
    w = w if dims[1] is None else jnp.stack([w] * (6 if dims[0] == 1 else 8))
    close(jax.vmap(rms_norm, dims)(x, w), jax.vmap(plain, dims)(x, w))
    ours = jax.vmap(jax.grad(loss(rms_norm), (0, 1)), dims)(x, w)
    theirs = jax.vmap(jax.grad(loss(plain), (0, 1)), dims)(x, w)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b")), P(None, None, "a")])
def test_sharded(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2)
    x, w = operands()
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    close(jax.jit(rms_norm)(sharded, w), plain(x, w))
    assert calls(rms_norm, sharded, w) == 1
    ours = jax.jit(jax.grad(loss(rms_norm), (0, 1)))(sharded, w)
    theirs = jax.grad(loss(plain), (0, 1))(x, w)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


def test_other_dtypes_run_plain_jax():
    x, w = operands()
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    assert rms_norm(x, w).dtype == jnp.bfloat16
    assert calls(rms_norm, x, w) == 0


def test_zero_size():
    x, w = operands()
    assert rms_norm(x[:0], w).shape == (0, 6, 32)
    _, dw = jax.grad(loss(rms_norm), (0, 1))(x[:0], w)
    close(dw, jnp.zeros_like(w))


def test_it_is_in_the_table():
    assert jl.operators()["rms_norm"].dtypes == ("float32",)
