# SPDX-License-Identifier: Apache-2.0
"""Permute over eight devices: placed right, correct, and without a collective."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from hlo import collectives, compiled, kernels

SHAPE = (16, 32, 64)
SPECS = [
    P("a", "b", None),
    P(None, "a", "b"),
    P("b", None, "a"),
    P(None, None, ("a", "b")),
    P(("b", "a"), None, None),
    P("a", None, None),
    P(None, None, None),
]


def array(mesh, spec, shape=SHAPE):
    x = np.random.default_rng(0).standard_normal(shape)
    return jax.device_put(x, NamedSharding(mesh, spec))


def spec_of(y):
    spec = tuple(y.sharding.spec)
    return P(*spec, *(None,) * (y.ndim - len(spec)))


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_each_axis_keeps_its_placement(mesh, spec, axes):
    x = array(mesh, spec)
    f = jax.jit(functools.partial(jl.permute, axes=axes))
    y = f(x)
    np.testing.assert_array_equal(y, np.transpose(x, axes))
    assert spec_of(y) == P(*(spec[axis] for axis in axes))
    hlo = compiled(f, x)
    assert collectives(hlo) == {}
    assert kernels(hlo) == (axes != (0, 1, 2))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_need_no_collective(mesh, spec):
    x = array(mesh, spec)

    def f(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jl.permute(x, (2, 0, 1)))))(x)

    np.testing.assert_allclose(jax.jit(f)(x), np.cos(x), rtol=1e-12)
    hlo = compiled(f, x)
    assert collectives(hlo) == {}


def test_vmap_and_jvp(mesh):
    x = array(mesh, P("a", "b", None))
    f = jax.jit(jax.vmap(functools.partial(jl.permute, axes=(1, 0)), 1, 1))
    np.testing.assert_array_equal(f(x), np.transpose(x, (2, 1, 0)))
    assert collectives(compiled(f, x)) == {}
    g = functools.partial(jl.permute, axes=(2, 1, 0))
    _, t = jax.jit(lambda x: jax.jvp(g, (x,), (x,)))(x)
    np.testing.assert_array_equal(t, np.transpose(x, (2, 1, 0)))


def test_eager(mesh):
    x = array(mesh, P("a", None, "b"))
    y = jl.permute(x, (2, 0, 1))
    np.testing.assert_array_equal(y, np.transpose(x, (2, 0, 1)))
    assert spec_of(y) == P("b", "a", None)


def test_inside_scan(mesh):
    x = array(mesh, P("a", None, None), (32, 32, 32))

    def f(x):
        step = lambda c, _: (jl.permute(jl.permute(c, (1, 2, 0)), (2, 0, 1)), None)  # noqa: E731
        return jax.lax.scan(step, x, length=3)[0]

    np.testing.assert_array_equal(jax.jit(f)(x), x)
    assert collectives(compiled(f, x)) == {}


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh, check_vma):
    x = array(mesh, P("a", "b", None))
    f = jax.jit(
        jax.shard_map(
            functools.partial(jl.permute, axes=(2, 0, 1)),
            mesh=mesh,
            in_specs=P("a", "b", None),
            out_specs=P(None, "a", "b"),
            check_vma=check_vma,
        )
    )
    np.testing.assert_array_equal(f(x), np.transpose(x, (2, 0, 1)))
    hlo = compiled(f, x)
    assert kernels(hlo) == 1 and collectives(hlo) == {}
    g = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))
    np.testing.assert_allclose(g(x), np.cos(x), rtol=1e-12)


def test_shard_map_over_some_axes_only(mesh):
    """XLA partitions the rest; plain lax serves there."""
    x = array(mesh, P("a", "b", None))
    f = jax.shard_map(
        functools.partial(jl.permute, axes=(2, 0, 1)),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(None, "a"),
        axis_names={"a"},
    )
    np.testing.assert_array_equal(jax.jit(f)(x), np.transpose(x, (2, 0, 1)))


def test_a_varying_result_cannot_pass_for_a_replicated_one(mesh):
    """An abstract eval of shape and dtype alone would accept this."""
    x = array(mesh, P("a", "b", None))
    f = jax.shard_map(
        functools.partial(jl.permute, axes=(2, 0, 1)),
        mesh=mesh,
        in_specs=P("a", "b", None),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(f)(x)


def test_gradient_of_a_replicated_operand_in_shard_map(mesh):
    """Summed over the devices; without varying axes it would be one device's."""
    x = array(mesh, P("a", "b", None))
    w = jax.device_put(np.arange(64.0 * 48).reshape(64, 48), NamedSharding(mesh, P()))

    def f(x, w):
        y = jnp.einsum("ijk,lk->ijl", x, jl.permute(w, (1, 0)))
        return jax.lax.psum(jnp.sum(y), ("a", "b"))

    g = jax.shard_map(f, mesh=mesh, in_specs=(P("a", "b"), P()), out_specs=P())
    ours = jax.jit(jax.grad(g, 1))(x, w)
    expected = np.broadcast_to(np.asarray(x).sum((0, 1))[:, None], (64, 48))
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


def test_unreduced_operands_stay_unreduced():
    """Summing early and labelling the sum unreduced would be wrong twice."""
    mesh = jax.make_mesh(
        (4, 2),
        ("a", "b"),
        (jax.sharding.AxisType.Explicit,) * 2,
        devices=jax.devices("cpu"),
    )
    with jax.set_mesh(mesh):
        a, b = array(mesh, P("a", "b"), (64, 128)), array(mesh, P("b", None), (128, 96))

        def f(a, b):
            c = jnp.einsum(
                "ij,jk->ik", a, b, out_sharding=P("a", None, unreduced={"b"})
            )
            c = jl.permute(c, (1, 0))
            assert jax.typeof(c).sharding.spec.unreduced == {"b"}
            return jax.sharding.reshard(c, P(None, "a"))

        np.testing.assert_allclose(jax.jit(f)(a, b), (np.asarray(a) @ b).T, rtol=1e-9)
