# SPDX-License-Identifier: Apache-2.0
"""Mean, variance and the sums of their gradients, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from hlo import collectives, compiled, kernels
from jax_layout import choices
from jax_layout.convnet.moments import (
    _one_pass,
    centered_affine,
    centered_sums_p,
    moments,
)

DTYPES = ("float32", "float64", "bfloat16", "float16")
# Shapes and axes: channels first, last, in blocks; groups; rows; columns.
CASES = [
    ((8, 64, 28, 28), (0, 2, 3)),
    ((5, 257, 7, 7), (0, 2, 3)),
    ((8, 17, 19, 64), (0, 1, 2)),
    ((9, 31, 17, 9), (0, 1, 2)),
    ((4, 4, 13, 13, 16), (0, 2, 3)),
    ((2, 9, 11, 13, 17), (1, 3)),
    ((1000, 700), (0,)),
    ((3, 100, 513), (1,)),
    ((5, 9999), (1,)),
    ((1, 300_001), (1,)),
    ((4001, 64), (1,)),
    ((300, 49), (1,)),
    ((3, 16_384), (1,)),
    ((20_000, 8), (1,)),
    ((1, 20_000), (0,)),
]
each_case = pytest.mark.parametrize("shape, axes", CASES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def numbers(shape, dtype, seed=0, mean=0.0):
    x = mean + np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x).astype(dtype)


def wide(x):
    return np.asarray(x, np.float64)


@each_case
@each_dtype
def test_moments(shape, axes, dtype):
    x = numbers(shape, dtype, mean=3)
    f = jax.jit(lambda x: moments(x, axes))
    assert kernels(compiled(f, x)) == 1
    mean, var = f(x)
    kind = "float64" if dtype == "float64" else "float32"
    assert mean.dtype == var.dtype == kind
    # float32 is summed in float64, from block to block.
    rtol = (512 if kind == "float64" else 8) * np.finfo(kind).eps
    np.testing.assert_allclose(mean, wide(x).mean(axes), rtol=rtol)
    np.testing.assert_allclose(var, wide(x).var(axes), rtol=rtol)


@each_case
@each_dtype
def test_centered_sums(shape, axes, dtype):
    x, ct = numbers(shape, dtype, mean=3), numbers(shape, dtype, 1)
    center = moments(x, axes)[0]
    f = jax.jit(lambda *v: centered_sums_p(*v, axes=axes))
    assert kernels(compiled(f, ct, x, center)) == 1
    total, product = f(ct, x, center)
    apart = wide(x) - np.expand_dims(wide(center), axes)
    eps = np.finfo(center.dtype).eps
    for found, terms in ((total, wide(ct)), (product, wide(ct) * apart)):
        assert found.dtype == center.dtype
        bound = 8 * eps * np.abs(terms).sum(axes)
        assert (np.abs(found - terms.sum(axes)) <= bound).all()


@pytest.mark.parametrize("shape, axes", CASES[:6], ids=str)
def test_variance_about_a_large_mean(shape, axes):
    x = numbers(shape, "float32", mean=1e4)
    mean, var = jax.jit(lambda x: moments(x, axes))(x)
    np.testing.assert_allclose(mean, wide(x).mean(axes), rtol=1e-7)
    np.testing.assert_allclose(var, wide(x).var(axes), rtol=1e-6)


@pytest.mark.parametrize("mean", [0, 3, 100])
@pytest.mark.parametrize("shape, axes", CASES[:6], ids=str)
def test_one_pass_as_on_gpus(shape, axes, mean):
    x = numbers(shape, "float32", mean=mean)
    found = jax.jit(functools.partial(_one_pass, axes=axes))(x)
    np.testing.assert_allclose(found[0], wide(x).mean(axes), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], wide(x).var(axes), rtol=1e-4)


def test_what_comes_later_may_lie_elsewhere():
    apart = np.repeat([0, 1e4, -1e4, 1], 2).reshape(8, 1, 1, 1)
    x = jnp.asarray(numbers((8, 16, 64, 64), "float32") + apart, "float32")
    for axes, x_in_order in (((0, 2, 3), x), ((0, 1, 2), x.transpose(0, 2, 3, 1))):
        mean, var = jax.jit(moments, static_argnums=1)(x_in_order, axes)
        np.testing.assert_allclose(mean, wide(x_in_order).mean(axes), atol=1e-3)
        np.testing.assert_allclose(var, wide(x_in_order).var(axes), rtol=1e-5)


@pytest.mark.parametrize("place", ["first", "last", "every hundredth"])
@pytest.mark.parametrize("mean", [0, 1e4])
@pytest.mark.parametrize("format", ["NCHW", "NHWC", "rows"])
def test_outliers_do_not_spoil_the_variance(place, mean, format):
    x = np.array(numbers((8 * 28 * 28, 64), "float32", mean=mean))
    rows = {"first": 0, "last": -1, "every hundredth": np.s_[::100]}
    x[rows[place]] = -1e6
    x = x.reshape(8, 28, 28, 64)
    axes = (0, 1, 2)
    if format == "NCHW":
        x, axes = x.transpose(0, 3, 1, 2).copy(), (0, 2, 3)
    if format == "rows":
        x, axes = x.reshape(-1, 64).T.copy(), (1,)
    _, var = jax.jit(lambda x: moments(x, axes))(x)
    np.testing.assert_allclose(var, wide(x).var(axes), rtol=1e-6)


def test_a_constant_has_no_variance():
    x = jnp.full((8, 64, 28, 28), 0.1, jnp.float32)
    mean, var = moments(x, (0, 2, 3))
    assert (mean == np.float32(0.1)).all()
    assert (var >= 0).all() and (var < 1e-16).all()


def test_nan_and_infinity_reach_their_own_channel():
    x = numbers((8, 16, 16, 64), "float32")
    x = x.at[3, 2, 1, 7].set(np.nan).at[0, 0, 0, 9].set(np.inf)
    mean, var = moments(x, (0, 1, 2))
    assert np.flatnonzero(np.isnan(var)).tolist() == [7, 9]
    assert np.isnan(mean[7]) and not np.isfinite(mean[9])
    assert np.isfinite(np.delete(np.asarray(mean), [7, 9])).all()


@pytest.mark.parametrize(
    "shape, axes",
    [
        ((64, 64), (0, 1)),  # scalars
        ((4, 4), (0,)),  # small
        ((4000, 3), (0,)),  # short vectors
        ((8, 9, 8, 9, 8, 9), (1, 3, 5)),  # too many pieces
        ((0, 8, 5), (0, 2)),
    ],
)
def test_what_xla_does_as_well(shape, axes):
    x = numbers(shape, "float32")
    f = jax.jit(lambda x: moments(x, axes))
    assert kernels(compiled(f, x)) == 0
    mean, var = f(x)
    np.testing.assert_allclose(mean, wide(x).mean(axes) if x.size else 0, atol=1e-6)
    np.testing.assert_allclose(var, wide(x).var(axes) if x.size else 0, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_affine_keeps_the_dtype(dtype):
    x = numbers((4, 6), dtype)
    one = jnp.ones(4)
    y = centered_affine(x, one, 2 * one, 3 * one, (1,))
    assert y.dtype == dtype
    np.testing.assert_allclose(
        wide(y), 2 * wide(x) + 1, rtol=float(jnp.finfo(dtype).eps)
    )


@pytest.mark.parametrize("format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_batch_norm_and_its_gradient_against_torch(format, dtype):
    torch = pytest.importorskip("torch")
    x, ct = numbers((4, 32, 20, 20), dtype, mean=2), numbers((4, 32, 20, 20), dtype, 1)
    weight, bias = numbers(32, "float32", 2), numbers(32, "float32", 3)

    def f(x, weight, bias):
        x = jl.with_memory_format(x, format)
        return jl.batch_norm(x, None, None, weight, bias, training=True)[0]

    y, pull = jax.vjp(jax.jit(f), x, weight, bias)
    leaves = [
        torch.from_numpy(np.array(wide(v))).requires_grad_() for v in (x, weight, bias)
    ]
    expected = torch.nn.functional.batch_norm(
        leaves[0], None, None, *leaves[1:], training=True
    )
    expected.backward(torch.from_numpy(np.array(wide(ct))))
    eps = float(jnp.finfo(dtype).eps)
    close = {"rtol": 4 * eps, "atol": 8 * eps}
    np.testing.assert_allclose(wide(y), expected.detach(), **close)
    for found, leaf in zip(pull(ct), leaves, strict=True):
        scale = float(leaf.grad.abs().max())
        np.testing.assert_allclose(
            wide(found) / scale, leaf.grad / scale, rtol=4 * eps, atol=8 * eps
        )
    text = compiled(
        jax.jit(lambda *v: jax.vjp(f, *v[:3])[1](v[3])), x, weight, bias, ct
    )
    assert text.count('custom_call_target="jax_layout_moments"') == 1
    assert text.count('custom_call_target="jax_layout_centered_sums"') == 1


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_two_devices(axis, kind):
    """A sharded channel stays where it is; a sharded image costs sums of channels."""
    mesh = jax.make_mesh((2,), ("a",), (kind,), devices=jax.devices("cpu")[:2])
    x = numbers((8, 32, 16, 16), "float32", mean=1e4)
    placed = jax.device_put(x, NamedSharding(mesh, P(*(None,) * axis, "a")))
    f = jax.jit(lambda x: moments(x, (0, 2, 3)))
    text = compiled(f, placed)
    assert kernels(text) == 1
    assert set(collectives(text)) <= ({"all-reduce"} if axis != 1 else set())
    mean, var = f(placed)
    np.testing.assert_allclose(mean, wide(x).mean((0, 2, 3)), rtol=1e-7)
    # The devices tell their means in float32.
    np.testing.assert_allclose(var, wide(x).var((0, 2, 3)), rtol=1e-4)


def test_tables_know_moments_with_a_derivative_from_those_without():
    x = jnp.ones((640, 64))

    def norm(x):
        mean, var = moments(x, (1,))
        return ((x - mean[:, None]) * jax.lax.rsqrt(var)[:, None]).sum()

    def asked(f, x):
        with choices.asked() as found:
            jax.jit(f).lower(x)
        return {work.case for work, _ in found}

    assert asked(norm, x) == {"moments float64 forward"}
    assert asked(jax.vmap(norm), x[None]) == {"moments float64 forward"}
    for gradient in (jax.grad(norm), jax.grad(jax.jit(norm))):
        assert "moments float64" in asked(gradient, x)
        assert "moments float64 forward" not in asked(gradient, x)
