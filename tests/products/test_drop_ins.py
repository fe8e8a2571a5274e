# SPDX-License-Identifier: Apache-2.0
"""The drop-ins stand in for jax's functions wherever those are called, also by us."""

import flax.linen as flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl

PLACES = [
    (jax.lax, "conv_general_dilated", jl.conv_general_dilated),
    (jax.lax, "dot_general", jl.dot_general),
    (jax.lax, "transpose", jl.permute),
    *(
        (jnp, name, getattr(jl, name))
        for name in (
            "add divide einsum matmul matrix_transpose maximum minimum moveaxis "
            "multiply subtract swapaxes tanh tensordot transpose where"
        ).split()
    ),
    *(
        (jax.nn, name, getattr(jl, name))
        for name in "relu relu6 leaky_relu silu sigmoid".split()
    ),
]


def contract(a, b):
    numbers = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(a, b, numbers)


def images(x, w):
    x, w = x.reshape(1, 2, 4, -1), w[:3, :4].reshape(2, 2, 3, 1)
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


def turned(a, b):
    x = jax.lax.transpose(jnp.stack([a, a + 1]), (2, 0, 1))
    x = jnp.moveaxis(jnp.swapaxes(jnp.transpose(x), 0, 1), 0, -1)
    return jnp.matrix_transpose(x)[0] * b.sum()


def elementwise(a, b):
    x = jnp.where(a > 0, jnp.maximum(a, 2), jnp.minimum(jnp.add(a, a), jnp.tanh(a)))
    x = jnp.divide(jnp.multiply(x, 2), jnp.subtract(5, a))
    x = jax.nn.relu(x) + jax.nn.relu6(x) + jax.nn.leaky_relu(x) + jax.nn.silu(x)
    return jl.gelu(x) + jl.softmax(x, -1) + jax.nn.sigmoid(x) * b.sum()


def ours(a, b):
    x = jl.linear(a, b.T, jnp.ones_like(a[0]), activation="gelu")
    x = jl.addmm(x, a, b, beta=2) + jl.geam(x, x, transpose_b=True)
    x = jl.with_memory_format(x.reshape(1, 2, 2, -1), jl.channels_last)
    x = jl.relu(jl.conv(x, jnp.ones((3, 2, 1, 1), x.dtype)))
    x = jl.max_pool(x, 2, 1)
    x = jl.layer_norm(x, x.shape[-1:])
    return jl.index_select(x, 1, jnp.array([2, 0, 0]))


PROGRAMS = [
    contract,
    images,
    turned,
    elementwise,
    ours,
    lambda a, b: jnp.einsum("ij,jk->ki", a, b),
    lambda a, b: jnp.einsum("ij,jk,kl", a, b, a),
    lambda a, b: jnp.einsum("ii,ij->j", a[:, :4], b),
    lambda a, b: jnp.matmul(a, b),
    lambda a, b: jnp.tensordot(a, b, 1),
    lambda a, b: jnp.linalg.multi_dot([a, b, a]),
    jl.optimize_layout(lambda a, b: images(contract(a, b), contract(b, a).T)),
]
NAMES = ["einsum", "three", "diagonal", "matmul", "tensordot", "multi_dot", "optimized"]


@pytest.fixture
def in_place(monkeypatch):
    def put():
        for module, name, function in PLACES:
            monkeypatch.setattr(module, name, function)

    return put


def same(ours, plain):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), ours, plain)


@pytest.mark.parametrize(
    "program", PROGRAMS, ids=[f.__name__ for f in PROGRAMS[:5]] + NAMES
)
def test_drop_ins_in_the_place_of_jaxs_functions(in_place, program):
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.standard_normal(shape), "float32") for shape in ((4, 4),) * 2
    )

    def results():
        def run(a, b):
            gradient = jax.grad(lambda a, b: (program(a, b) ** 2).sum(), (0, 1))
            batch = jnp.stack([a, 2 * a])
            return gradient(a, b), jax.vmap(program, (0, None))(batch, b)

        return jax.jit(run)(a, b)

    plain = results()
    in_place()
    same(results(), plain)


def test_attention_of_flax_with_drop_ins(in_place):
    layer = flax.MultiHeadDotProductAttention(num_heads=2)
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    params = layer.init(jax.random.key(1), x)

    def loss(params):
        return (layer.apply(params, x) ** 2).sum()

    plain = jax.grad(loss)(params)
    in_place()
    same(jax.jit(jax.grad(loss))(params), plain)
    jaxpr = str(jax.make_jaxpr(loss)(params))
    assert "gemm" in jaxpr and "dot_general[" not in jaxpr


def test_einsum_calls_another_dot_general():
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return jax.lax.dot_general(*args, **options)

    a, b = jnp.ones((2, 3)), jnp.ones((3, 4))
    same(jl.einsum("ij,jk", a, b, _dot_general=counted), a @ b)
    assert len(calls) == 1
    for dot_general in (jax.lax.dot_general, jl.dot_general):
        f = jax.make_jaxpr(lambda a, b, g=dot_general: jl.einsum(
            "ij,jk", a, b, _dot_general=g))  # fmt: skip
        assert "gemm" in str(f(a, b))
