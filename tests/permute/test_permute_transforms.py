# SPDX-License-Identifier: Apache-2.0
"""Permute under every transformation of jax, against jax.numpy's."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.test_util import check_grads

import jax_layout as jl
from hlo import compiled, count, kernels

SHAPE, AXES = (8, 33, 24), (2, 0, 1)  # 50 KB in float64: a kernel moves it
ours = functools.partial(jl.permute, axes=AXES)
theirs = functools.partial(jnp.transpose, axes=AXES)


def array(shape=SHAPE, dtype=jnp.float64, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def check_same(f, g, *args, rtol=0.0):
    """f and g give the same, eagerly and compiled; to rtol where they reduce."""
    close = functools.partial(np.testing.assert_allclose, rtol=rtol)
    for a, b in [(f(*args), g(*args)), (jax.jit(f)(*args), jax.jit(g)(*args))]:
        jax.tree.map(close, a, b)


def loss(permute):
    weight = array((24, 8, 33), seed=1)
    return lambda x: jnp.sum(jnp.sin(permute(x)) * weight)


def test_eager_and_jit():
    check_same(ours, theirs, array())


def test_grad():
    check_same(jax.grad(loss(ours)), jax.grad(loss(theirs)), array())
    assert kernels(compiled(jax.grad(loss(ours)), array())) == 2


def test_jvp():
    x, t = array(), array(seed=2)
    for f, g in [(ours, theirs), (loss(ours), loss(theirs))]:
        jvps = [lambda p=p: jax.jvp(p, (x,), (t,)) for p in (f, g)]
        check_same(*jvps, rtol=1e-12)


def test_jvp_of_integers():
    x = jnp.arange(np.prod(SHAPE)).reshape(SHAPE)
    y, t = jax.jvp(ours, (x,), (np.zeros(SHAPE, jax.dtypes.float0),))
    np.testing.assert_array_equal(y, theirs(x))
    assert t.shape == y.shape and t.dtype == jax.dtypes.float0


def test_check_grads_to_second_order():
    check_grads(ours, (array(),), order=2, modes=("fwd", "rev"), eps=1.0)
    check_grads(loss(ours), (array(),), order=2, modes=("fwd", "rev"))


def test_jacfwd_and_hessian():
    def f(permute, x):
        y = permute(jnp.broadcast_to(x[:, None, None], (4, 66, 32)), (1, 0, 2))
        return jnp.sum(y**3)

    x = array((4,))
    check_same(
        jax.jacfwd(functools.partial(f, jl.permute)),
        jax.jacfwd(functools.partial(f, jnp.transpose)),
        x,
    )
    ours = jax.hessian(functools.partial(f, jl.permute))(x)
    np.testing.assert_allclose(ours, np.diag(6 * x * 66 * 32), rtol=1e-12)


@pytest.mark.parametrize(
    ("in_axis", "out_axis"), list(itertools.product(range(-4, 4), range(-4, 4)))
)
def test_vmap_over_any_axes(in_axis, out_axis):
    x = array((5, 9, 32, 16))
    batched = [jax.vmap(f, in_axis, out_axis) for f in (ours, theirs)]
    check_same(*batched, x)


@pytest.mark.parametrize("axis", range(3))
def test_vmap_over_the_same_axis_is_one_kernel(axis):
    f = jax.vmap(functools.partial(jl.permute, axes=(1, 0)), axis, axis)
    hlo = compiled(f, array())
    assert kernels(hlo) == 1
    assert count("transpose", hlo) == count("copy", hlo) == 0


def test_vmap_of_vmap_and_of_grad():
    x = array((3, 5, *SHAPE))
    check_same(jax.vmap(jax.vmap(ours)), jax.vmap(jax.vmap(theirs)), x)
    check_same(jax.vmap(jax.grad(loss(ours))), jax.vmap(jax.grad(loss(theirs))), x[0])


def test_vmap_of_an_unbatched_operand():
    x = array()
    f, g = (lambda s, p=p: p(x) * s for p in (ours, theirs))
    check_same(jax.vmap(f), jax.vmap(g), array((3,)))


def test_linear_transpose():
    ct = array((24, 8, 33))
    transposed = [jax.linear_transpose(f, array()) for f in (ours, theirs)]
    check_same(*transposed, ct)


def test_linearize():
    x, t = array(), array(seed=2)
    (_, f), (_, g) = (jax.linearize(loss(p), x) for p in (ours, theirs))
    np.testing.assert_array_equal(f(t), g(t))


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_remat(policy):
    policy = getattr(jax.checkpoint_policies, policy)
    f, g = (jax.grad(jax.checkpoint(loss(p), policy=policy)) for p in (ours, theirs))
    check_same(f, g, array())


def test_inside_scan_while_and_cond():
    def f(permute, x):
        def body(carry, _):
            return permute(carry, (1, 2, 0)) + 1.0, jnp.sum(carry)

        y, sums = jax.lax.scan(body, x, length=6)  # the order comes back every 3
        y = jax.lax.fori_loop(0, 3, lambda i, y: permute(y, (2, 0, 1)), y)
        return jax.lax.cond(sums[0] > 0, lambda y: permute(y, (2, 1, 0)), jnp.sin, y)

    x = array((24, 24, 24))
    f, g = functools.partial(f, jl.permute), functools.partial(f, jnp.transpose)
    check_same(f, g, x)
    check_grads(lambda x: f(x)[0, 1, :4], (x,), order=1, modes=("fwd",))


def test_grad_through_scan():
    def f(permute, x):
        step = lambda c, _: (jnp.sin(permute(c, (1, 2, 0))), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, length=3)[0] ** 2)

    f, g = (jax.grad(functools.partial(f, p)) for p in (jl.permute, jnp.transpose))
    np.testing.assert_allclose(
        f(array((24, 24, 24))), g(array((24, 24, 24))), rtol=1e-12
    )


def test_donation():
    x = array((96, 96))
    expected = np.asarray(x).T.copy()
    y = jax.jit(jl.matrix_transpose, donate_argnums=0)(x)
    np.testing.assert_array_equal(y, expected)


def test_half_of_a_program_differentiates():
    x, n = array(), jnp.arange(np.prod(SHAPE)).reshape(SHAPE)
    f, g = (lambda x, p=p: jnp.sum(p(x) * p(n)) for p in (ours, theirs))
    check_same(jax.grad(f), jax.grad(g), x, rtol=1e-12)


def test_integer_axes_of_any_kind_share_one_meaning():
    x = array((128, 96))
    for integer in (int, np.int32, np.int64, np.uint8):
        check_same(lambda x, i=integer: jl.permute(x, (i(1), i(0))), jnp.transpose, x)


def test_export_round_trip():
    f = jax.jit(ours)
    x = array()
    with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
        export.export(f)(x)
    check = export.DisabledSafetyCheck.custom_call("jax_layout_permute")
    exported = export.export(f, disabled_checks=[check])(x)
    assert "jax_layout_permute" in exported.mlir_module()
    again = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(x), theirs(x))


@pytest.mark.cpu
def test_export_for_several_platforms():
    check = export.DisabledSafetyCheck.custom_call("jax_layout_permute")
    platforms = ("cpu", "tpu")
    exported = export.export(
        jax.jit(ours), platforms=platforms, disabled_checks=[check]
    )
    again = export.deserialize(exported(array()).serialize())
    np.testing.assert_array_equal(again.call(array()), theirs(array()))


def test_persistent_compilation_cache(tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    saved = {
        name: getattr(jax.config, name)
        for name in (
            "jax_compilation_cache_dir",
            "jax_persistent_cache_min_compile_time_secs",
            "jax_persistent_cache_min_entry_size_bytes",
        )
    }
    try:
        for name, value in zip(saved, (str(tmp_path), 0, 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        x = array()
        for _ in range(2):
            jax.clear_caches()
            np.testing.assert_array_equal(jax.jit(ours)(x), np.transpose(x, AXES))
        assert any("cache_hits" in name for name in hits)
    finally:
        for name, value in saved.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
