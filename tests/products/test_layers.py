# SPDX-License-Identifier: Apache-2.0
"""Layers of Flax and Equinox with our products, as their users write them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from hlo import compiled, kernels

IMAGES = jnp.asarray(
    np.random.default_rng(0).standard_normal((2, 9, 8, 16)), jnp.float32
)
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64, 128)), jnp.float32)


def same_with_gradient(ours, expected, *args):
    """Value, gradient, and that a kernel of ours computed them."""

    def loss(f):
        return lambda *args: jnp.sum(jnp.sin(f(*args)))

    value = jax.jit(jax.value_and_grad(loss(ours), tuple(range(len(args)))))
    like = jax.value_and_grad(loss(expected), tuple(range(len(args))))
    jax.tree.map(
        lambda o, e: np.testing.assert_allclose(o, e, rtol=1e-3, atol=2e-4),
        value(*args),
        like(*args),
    )
    assert kernels(compiled(ours, *args)) > 0


@pytest.fixture
def nnx():
    return pytest.importorskip("flax.nnx")


def functional(nnx, model):
    graph, state = nnx.split(model)
    return lambda state, x: nnx.merge(graph, state)(x), state


def test_nnx_linear(nnx):
    ours, state = functional(
        nnx, nnx.Linear(128, 96, dot_general=jl.dot_general, rngs=nnx.Rngs(0))
    )
    expected, _ = functional(nnx, nnx.Linear(128, 96, rngs=nnx.Rngs(0)))
    same_with_gradient(ours, expected, state, X)


def test_nnx_einsum(nnx):
    arguments = ("bsm,mhd->bhsd", (128, 4, 32))
    ours, state = functional(
        nnx, nnx.Einsum(*arguments, einsum_op=jl.einsum, rngs=nnx.Rngs(0))
    )
    expected, _ = functional(nnx, nnx.Einsum(*arguments, rngs=nnx.Rngs(0)))
    same_with_gradient(ours, expected, state, X)


def test_nnx_attention(nnx):
    def attention(**options):
        return functional(
            nnx,
            nnx.MultiHeadAttention(
                4, 128, decode=False, deterministic=True, rngs=nnx.Rngs(0), **options
            ),
        )

    ours, state = attention(
        qkv_dot_general=jl.dot_general, out_dot_general=jl.dot_general
    )
    expected, _ = attention()
    same_with_gradient(ours, expected, state, X)


@pytest.mark.cpu
def test_nnx_conv(nnx):
    arguments = {"kernel_size": (3, 3), "strides": 2, "feature_group_count": 4}
    f = jl.conv_general_dilated
    ours, state = functional(
        nnx, nnx.Conv(16, 32, conv_general_dilated=f, rngs=nnx.Rngs(0), **arguments)
    )
    expected, _ = functional(nnx, nnx.Conv(16, 32, rngs=nnx.Rngs(0), **arguments))
    same_with_gradient(ours, expected, state, IMAGES)


@pytest.mark.cpu
def test_linen_conv():
    nn = pytest.importorskip("flax.linen")
    expected = nn.Conv(32, (3, 3), padding="CIRCULAR")
    ours = nn.Conv(
        32, (3, 3), padding="CIRCULAR", conv_general_dilated=jl.conv_general_dilated
    )
    params = expected.init(jax.random.key(0), IMAGES)
    same_with_gradient(ours.apply, expected.apply, params, IMAGES)


def test_linen_dense():
    nn = pytest.importorskip("flax.linen")
    ours, expected = nn.Dense(96, dot_general=jl.dot_general), nn.Dense(96)
    params = expected.init(jax.random.key(0), X)
    same_with_gradient(ours.apply, expected.apply, params, X)


def test_equinox_linear():
    eqx = pytest.importorskip("equinox")
    from jax_layout.equinox import Linear

    ours = Linear(128, 96, key=jax.random.key(0))
    expected = eqx.nn.Linear(128, 96, key=jax.random.key(0))
    arrays = (ours.weight, ours.bias)

    def apply(layer, f):
        where = lambda m: (m.weight, m.bias)  # noqa: E731
        return lambda arrays, x: f(eqx.tree_at(where, layer, arrays))(x)

    same_with_gradient(
        apply(ours, lambda layer: layer),
        apply(expected, lambda layer: jax.vmap(jax.vmap(layer))),
        arrays,
        X,
    )
    per_example = jax.vmap(Linear(128, 96, activation="gelu", key=jax.random.key(0)))
    assert per_example(X).shape == (4, 64, 96)


@pytest.mark.parametrize("mode", ["ZEROS", "REFLECT"])
def test_equinox_conv(mode):
    eqx = pytest.importorskip("equinox")
    from jax_layout.equinox import Conv

    arguments = {"padding": 1, "groups": 2, "padding_mode": mode, "dtype": "float32"}
    ours = Conv(2, 16, 32, 3, key=jax.random.key(0), **arguments)
    expected = eqx.nn.Conv2d(16, 32, 3, key=jax.random.key(0), **arguments)
    images = jnp.moveaxis(IMAGES, -1, 1)
    np.testing.assert_allclose(
        jax.vmap(ours)(images), jax.vmap(expected)(images), atol=1e-4
    )
    hlo = compiled(jax.vmap(ours), images)
    assert kernels(hlo) == (1 if mode == "ZEROS" else 0)
