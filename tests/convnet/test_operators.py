# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (tables)
"""Every operator in every format: against plain jax.numpy, torch and differences."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import hlo
import jax_layout as jl
from jax_layout.formats.tags import store, stored

try:
    import torch
except ImportError:
    torch = None

FORMATS = ("NCHW", "NHWC", "NCHW4c")
SHAPE = (2, 8, 5, 6)
WEIGHT = np.linspace(0.5, 2, 8)
BIAS = np.linspace(-1, 1, 8)
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    ours: Callable
    plain: Callable  # of a row-major array, in jax.numpy alone
    torch: Callable | None = None  # of torch.nn.functional and a tensor
    kept: bool = True  # whether a blocked format can be kept


def windows(x, reducer, unit, k, s, p, d=(1, 1)):
    pads = ((0, 0), (0, 0), *((q, q) for q in p))
    return lax.reduce_window(
        x, np.array(unit, x.dtype)[()], reducer, (1, 1, *k), (1, 1, *s), pads,
        window_dilation=(1, 1, *d),
    )  # fmt: skip


def mean_excluding_padding(x):
    total = windows(x, lax.add, 0, (3, 2), (2, 1), (1, 1))
    return total / windows(jnp.ones_like(x), lax.add, 0, (3, 2), (2, 1), (1, 1))


def adaptive(x, out, reduce):
    for axis, size in zip((2, 3), out, strict=True):
        n = x.shape[axis]
        parts = [
            reduce(
                x.take(np.arange(j * n // size, -(-(j + 1) * n // size)), axis), axis
            )
            for j in range(size)
        ]
        x = jnp.stack(parts, axis)
    return x


def normalized(x, axes, weight=None, bias=None):
    y = (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-5)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def groups(x):
    y = normalized(x.reshape(2, 4, 2, 5, 6), (2, 3, 4)).reshape(x.shape)
    return y * column(WEIGHT) + column(BIAS)


def column(v):
    return np.reshape(v, (-1, 1, 1))


def lines(x, f):
    """f along both spatial axes."""
    return jnp.apply_along_axis(f, 2, jnp.apply_along_axis(f, 3, x))


def halves(v):  # linear interpolation to twice the size, borders aligned
    left, right = jnp.r_[v[:1], v[:-1]], jnp.r_[v[1:], v[-1:]]
    return jnp.stack([0.25 * left + 0.75 * v, 0.75 * v + 0.25 * right], 1).ravel()


def t(v):
    return torch.from_numpy(np.asarray(v))


CASES = [
    Case(
        "max_pool",
        lambda x: jl.max_pool(x, 3, 2, 1),
        lambda x: windows(x, lax.max, -np.inf, (3, 3), (2, 2), (1, 1)),
        lambda f, x: f.max_pool2d(x, 3, 2, 1),
    ),
    Case(
        "max_pool, dilated",
        lambda x: jl.max_pool(x, (2, 3), (1, 3), dilation=2, padding=(1, 1)),
        lambda x: windows(x, lax.max, -np.inf, (2, 3), (1, 3), (1, 1), (2, 2)),
        lambda f, x: f.max_pool2d(x, (2, 3), (1, 3), (1, 1), 2),
    ),
    Case(
        "max_pool, apart",
        lambda x: jl.max_pool(x, 2),
        lambda x: windows(x, lax.max, -np.inf, (2, 2), (2, 2), (0, 0)),
        lambda f, x: f.max_pool2d(x, 2),
    ),
    Case(
        "avg_pool",
        lambda x: jl.avg_pool(x, 3, 2, 1),
        lambda x: windows(x, lax.add, 0, (3, 3), (2, 2), (1, 1)) / 9,
        lambda f, x: f.avg_pool2d(x, 3, 2, 1),
    ),
    Case(
        "avg_pool, apart",
        lambda x: jl.avg_pool(x, 2, divisor_override=3),
        lambda x: windows(x, lax.add, 0, (2, 2), (2, 2), (0, 0)) / 3,
        lambda f, x: f.avg_pool2d(x, 2, divisor_override=3),
    ),
    Case(
        "avg_pool, without padding",
        lambda x: jl.avg_pool(x, (3, 2), (2, 1), 1, count_include_pad=False),
        mean_excluding_padding,
        lambda f, x: f.avg_pool2d(x, (3, 2), (2, 1), 1, count_include_pad=False),
    ),
    Case(
        "adaptive_avg_pool",
        lambda x: jl.adaptive_avg_pool(x, (3, 4)),
        lambda x: adaptive(x, (3, 4), jnp.mean),
        lambda f, x: f.adaptive_avg_pool2d(x, (3, 4)),
    ),
    Case(
        "adaptive_max_pool",
        lambda x: jl.adaptive_max_pool(x, (None, 4)),
        lambda x: adaptive(x, (5, 4), jnp.max),
        lambda f, x: f.adaptive_max_pool2d(x, (None, 4)),
    ),
    Case(
        "batch_norm",
        lambda x: jl.batch_norm(x, BIAS, WEIGHT, WEIGHT, BIAS),
        lambda x: (
            (x - column(BIAS)) / np.sqrt(column(WEIGHT) + 1e-5) * column(WEIGHT)
            + column(BIAS)
        ),
        lambda f, x: f.batch_norm(x, t(BIAS), t(WEIGHT), t(WEIGHT), t(BIAS)),
    ),
    Case(
        "batch_norm, training",
        lambda x: jl.batch_norm(x, None, None, WEIGHT, BIAS, training=True)[0],
        lambda x: normalized(x, (0, 2, 3), column(WEIGHT), column(BIAS)),
        lambda f, x: f.batch_norm(x, None, None, t(WEIGHT), t(BIAS), training=True),
    ),
    Case(
        "instance_norm",
        lambda x: jl.instance_norm(x, WEIGHT, BIAS),
        lambda x: normalized(x, (2, 3), column(WEIGHT), column(BIAS)),
        lambda f, x: f.instance_norm(x, weight=t(WEIGHT), bias=t(BIAS)),
    ),
    Case(
        "group_norm",
        lambda x: jl.group_norm(x, 4, WEIGHT, BIAS),
        groups,
        lambda f, x: f.group_norm(x, 4, t(WEIGHT), t(BIAS)),
    ),
    Case(
        "layer_norm",
        lambda x: jl.layer_norm(x, (8, 5, 6)),
        lambda x: normalized(x, (1, 2, 3)),
        lambda f, x: f.layer_norm(x, (8, 5, 6)),
    ),
    Case(
        "softmax",
        lambda x: jl.softmax(x, 1),
        lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True),
        lambda f, x: f.softmax(x, 1),
    ),
    Case(
        "log_softmax",
        lambda x: jl.log_softmax(x, -1),
        lambda x: x - jnp.log(jnp.exp(x).sum(-1, keepdims=True)),
        lambda f, x: f.log_softmax(x, -1),
    ),
    Case(
        "interpolate, nearest",
        lambda x: jl.interpolate(x, scale_factor=2),
        lambda x: x.repeat(2, 2).repeat(2, 3),
        lambda f, x: f.interpolate(x, scale_factor=2),
    ),
    Case(
        "interpolate, nearest, down",
        lambda x: jl.interpolate(x, (3, 4)),
        lambda x: x[:, :, [0, 1, 3]][..., [0, 1, 3, 4]],
        lambda f, x: f.interpolate(x, (3, 4)),
    ),
    Case(
        "interpolate, bilinear",
        lambda x: jl.interpolate(x, (10, 12), mode="bilinear"),
        lambda x: lines(x, halves),
        lambda f, x: f.interpolate(x, (10, 12), mode="bilinear"),
    ),
    Case(
        "interpolate, bicubic",
        lambda x: jl.interpolate(x, (5, 6), mode="bicubic", align_corners=True),
        lambda x: x,
        lambda f, x: f.interpolate(x, (5, 6), mode="bicubic", align_corners=True),
    ),
    Case(
        "dropout",
        lambda x: jl.dropout(x, KEY, 0),
        lambda x: x,
        lambda f, x: f.dropout(x, 0),
    ),
    Case(
        "dropout2d",
        lambda x: jl.dropout2d(x, KEY, 0.25),
        lambda x: x * jax.random.bernoulli(KEY, 0.75, (2, 8, 1, 1)) / 0.75,
    ),
    Case(
        "pad",
        lambda x: jl.pad(x, (1, -2, 0, 3), value=2),
        lambda x: jnp.pad(
            x[..., :-2], ((0, 0), (0, 0), (0, 3), (1, 0)), constant_values=2
        ),
        lambda f, x: f.pad(x, (1, -2, 0, 3), value=2),
    ),
    *(
        Case(
            f"pad, {mode}",
            lambda x, mode=mode: jl.pad(x, (1, 2, 3, 0), mode),
            lambda x, named=named: jnp.pad(x, ((0, 0), (0, 0), (3, 0), (1, 2)), named),
            lambda f, x, mode=mode: f.pad(x, (1, 2, 3, 0), mode),
        )
        for mode, named in (
            ("reflect", "reflect"),
            ("replicate", "edge"),
            ("circular", "wrap"),
        )
    ),
    Case(
        "pixel_shuffle",
        lambda x: jl.pixel_shuffle(x, 2),
        lambda x: (
            x.reshape(2, 2, 2, 2, 5, 6)
            .transpose(0, 1, 4, 2, 5, 3)
            .reshape(2, 2, 10, 12)
        ),
        lambda f, x: f.pixel_shuffle(x, 2),
        kept=False,
    ),
    Case(
        "pixel_unshuffle",
        lambda x: jl.pixel_unshuffle(x[..., :4, :], 2),
        lambda x: (
            x[..., :4, :]
            .reshape(2, 8, 2, 2, 3, 2)
            .transpose(0, 1, 3, 5, 2, 4)
            .reshape(2, 32, 2, 3)
        ),
        lambda f, x: f.pixel_unshuffle(x[..., :4, :], 2),
        kept=False,  # the slice is not tagged
    ),
    Case(
        "channel_shuffle",
        lambda x: jl.channel_shuffle(x, 2),
        lambda x: x.reshape(2, 2, 4, 5, 6).swapaxes(1, 2).reshape(x.shape),
        lambda f, x: f.channel_shuffle(x, 2),
    ),
    Case(
        "concatenate",
        lambda x: jl.concatenate([x, jl.with_memory_format(2 * x, "NCHW"), x], 1),
        lambda x: jnp.concatenate([x, 2 * x, x], 1),
        lambda f, x: torch.cat([x, 2 * x, x], 1),
    ),
    *(
        Case(
            name, getattr(jl, name), plain, lambda f, x, name=name: getattr(f, name)(x)
        )
        for name, plain in {
            "relu": lambda x: x * (x > 0),
            "relu6": lambda x: jnp.clip(x, 0, 6),
            "leaky_relu": lambda x: jnp.where(x > 0, x, 0.01 * x),
            "gelu": lambda x: x * jax.scipy.stats.norm.cdf(x),
            "silu": lambda x: x / (1 + jnp.exp(-x)),
            "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
            "tanh": jnp.tanh,
            "hardswish": lambda x: x * jnp.clip(x + 3, 0, 6) / 6,
        }.items()
    ),
    *(
        Case(
            name,
            lambda x, name=name: getattr(jl, name)(x, column(WEIGHT)),
            lambda x, name=name: getattr(jnp, name)(x, column(WEIGHT)),
        )
        for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")
    ),
    Case(
        "where",
        lambda x: jl.where(column(BIAS) > 0, x, 1.0),
        lambda x: jnp.where(column(BIAS) > 0, x, 1.0),
    ),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_format = pytest.mark.parametrize("format", FORMATS)


def numbers(dtype, shape=SHAPE):
    x = np.random.default_rng(0).standard_normal(shape) * 3
    return jnp.asarray(x).astype(dtype)


def tagged(case, format):
    return lambda x: case.ours(jl.with_memory_format(x, format))


def same(actual, expected, dtype=np.float64, scale=8.0):
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64),
        np.asarray(expected, np.float64),
        rtol=8 * eps,
        atol=scale * 8 * eps,
    )


@each_case
@pytest.mark.parametrize(
    "format, dtype",
    [*((f, "float64") for f in FORMATS), ("NHWC", "float32"), ("NHWC", "bfloat16")],
)
def test_value_and_format(case, format, dtype):
    x, found = numbers(dtype), []

    def f(x):
        y = tagged(case, format)(x)
        found.append(str(jl.memory_format(y)))
        return y

    y = jax.jit(f)(x)
    same(y, case.plain(x.astype(np.float64)), dtype, scale=16)
    wide = case.name in ("batch_norm", *"add subtract multiply divide".split(), "where")
    if not wide and not case.name.startswith(("maximum", "minimum")):
        assert y.dtype == x.dtype
    if case.kept or format != "NCHW4c" and "unshuffle" not in case.name:
        assert found == [format]


@functools.cache
def pullback(case, format):
    """The result for `numbers(np.float64)`, and what takes its cotangent back."""
    return jax.vjp(jax.jit(tagged(case, format)), numbers(np.float64))


@each_case
@each_format
def test_gradient(case, format):
    x = numbers(np.float64)
    y, pull = pullback(case, format)
    ct = numbers(np.float64, y.shape)
    if "dilated" in case.name:
        pytest.skip("lax has no such gradient")
    expected = jax.vjp(case.plain, x)[1](ct)[0]
    same(pull(ct)[0], expected, scale=1e3)


@each_case
def test_gradient_is_that_of_differences(case):
    f = jax.jit(tagged(case, "NHWC"))
    check_grads(f, (numbers(np.float64),), order=1, rtol=1e-3, atol=1e-3, eps=1e-5)


@each_case
@each_format
def test_torch(case, format):
    pytest.importorskip("torch")
    if case.torch is None:
        pytest.skip("torch has no such function")
    x = numbers(np.float64)
    leaf = t(x).requires_grad_()
    expected = case.torch(torch.nn.functional, leaf)
    ct = np.asarray(numbers(np.float64, tuple(expected.shape)))
    expected.backward(t(ct))
    y, pull = pullback(case, format)
    same(y, expected.detach().numpy(), np.float32)
    same(pull(ct)[0], leaf.grad.numpy(), np.float32, scale=32)


@each_case
def test_eager_arrays_keep_their_format(case):
    x = jl.with_memory_format(numbers(np.float32), jl.channels_last)
    y = case.ours(x)
    same(y, case.plain(x.astype(np.float64)), np.float32, scale=16)
    if "unshuffle" not in case.name:
        assert jl.is_contiguous(y, jl.channels_last)
        assert not jl.is_contiguous(y)


@each_case
def test_vmap_and_scan(case):
    x = jnp.stack([numbers(np.float64), 1 - numbers(np.float64)])
    f = tagged(case, "NHWC")
    expected = jnp.stack([case.plain(v) for v in x])
    if case.name != "dropout2d":  # a vmapped key would be one for each
        same(jax.vmap(f)(x), expected, scale=64)
    same(jax.jit(lambda x: lax.map(f, x))(x), expected, scale=64)
    if "dilated" in case.name:
        return  # lax has no such gradient
    batched = jax.vmap(jax.grad(lambda v: f(v).sum()))(x)
    alone = jnp.stack([jax.grad(lambda v: case.plain(v).sum())(v) for v in x])
    same(batched, alone, scale=1e3)


POOLS = {
    "max_pool": lambda x, **k: jl.max_pool(x, **k),
    "avg_pool": lambda x, **k: jl.avg_pool(x, **k),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "k, s, p, ceil",
    [
        (3, 2, 1, True),
        (2, None, 0, True),
        (3, 5, 1, True),
        (2, 3, 1, True),
        (3, 1, 1, 0),
    ],
)
def test_pools_of_every_rank_with_ceil_mode(name, rank, k, s, p, ceil):
    pytest.importorskip("torch")
    x = np.asarray(numbers(np.float64, (2, 4, 9, 8, 7)[: rank + 2])).round()  # has ties
    leaf = t(x).requires_grad_()
    options = {"kernel_size": k, "stride": s, "padding": p, "ceil_mode": bool(ceil)}
    expected = getattr(torch.nn.functional, f"{name}{rank}d")(leaf, **options)
    ct = np.asarray(numbers(np.float64, tuple(expected.shape)))
    expected.backward(t(ct))
    y, pull = jax.vjp(
        lambda x: POOLS[name](jl.with_memory_format(x, jl.channels_last), **options), x
    )
    same(y, expected.detach().numpy())
    same(pull(ct)[0], leaf.grad.numpy())


@pytest.mark.parametrize("name", POOLS)
def test_pools_take_unbatched_input(name):
    x = numbers(np.float32, (3, 6, 6))
    y = POOLS[name](x, kernel_size=(2, 2))
    np.testing.assert_array_equal(y, POOLS[name](x[None], kernel_size=2)[0])


def test_one_number_in_a_tuple_is_for_all_dimensions():
    x = numbers(np.float32)
    expected = jl.avg_pool(x, 3, 2, 1)
    np.testing.assert_array_equal(jl.avg_pool(x, 3, (2,), padding=(1,)), expected)
    np.testing.assert_array_equal(jl.avg_pool(x, (3,), (2,), (1,)), expected)
    line = x[..., 0]
    expected = jl.avg_pool(line, 3, 2, 1)
    np.testing.assert_array_equal(jl.avg_pool(line, (3,), (2,), (1,)), expected)
    np.testing.assert_array_equal(jl.avg_pool(line[0], (3,), 2, 1), expected[0])


WITH_INDICES = [
    ((2,), {}),
    ((3, 2, 1), {}),
    (((2, 3), (1, 3), (1, 1), 2), {}),
    ((3, 2, 1), {"ceil_mode": True}),
]


@pytest.mark.parametrize("args, options", WITH_INDICES)
@each_format
def test_max_pool_with_indices(args, options, format):
    x = numbers(np.float32).round()  # has ties
    x = x.at[0, 0].set(-np.inf).at[1, 2, 3, 2].set(np.nan)

    def f(x):
        x = jl.with_memory_format(x, format)
        y, at = jl.max_pool(x, *args, **options, return_indices=True)
        assert str(jl.memory_format(y)) == str(jl.memory_format(at)) == format
        return y, at

    y, at = jax.jit(f)(x)
    assert at.dtype == np.int32
    np.testing.assert_array_equal(y, jl.max_pool(x, *args, **options))
    flat = jnp.take_along_axis(x.reshape(2, 8, -1), at.reshape(2, 8, -1), 2)
    np.testing.assert_array_equal(flat.reshape(y.shape), y)
    stacked = jax.vmap(f)(jnp.stack([x, x]))
    np.testing.assert_array_equal(stacked[1], jnp.stack([at, at]))
    ct = numbers(np.float32, y.shape)
    if len(args) < 4:  # lax has no gradient of dilated windows
        plain = jax.vjp(lambda x: jl.max_pool(x, *args, **options), x)[1]
        (expected,), (mine,) = plain(ct), jax.vjp(lambda x: jax.jit(f)(x)[0], x)[1](ct)
        np.testing.assert_allclose(mine, expected)
    if torch is not None:
        found = torch.nn.functional.max_pool2d(
            t(x), *args, **options, return_indices=True
        )
        np.testing.assert_array_equal(at, found[1].numpy())


def test_max_pool_with_indices_of_long_windows_and_integers():
    x = numbers(np.float64, (1, 2, 600)).astype(int)
    y, at = jl.max_pool(x, 300, return_indices=True)
    windows = x.reshape(1, 2, 2, 300)
    np.testing.assert_array_equal(y, windows.max(-1))
    np.testing.assert_array_equal(at, windows.argmax(-1) + np.array([0, 300]))


@pytest.mark.parametrize("rank", [1, 2, 3])
@each_format
def test_max_unpool(rank, format):
    if rank != 2:
        format = jl.channels_first if format == "NCHW" else jl.channels_last
    x = numbers(np.float64, (2, 8, 9, 8, 7)[: rank + 2])
    y, at = jl.max_pool(x, 2, return_indices=True)

    def f(y):
        y = jl.with_memory_format(y, format)
        out = jl.max_unpool(y, at, 2, output_size=x.shape)
        assert jl.memory_format(out) == jl.memory_format(y)
        return out

    out, pull = jax.vjp(jax.jit(f) if format != "NCHW" else f, y)
    np.testing.assert_array_equal(out, jnp.where(out != 0, x, 0))
    assert (out != 0).sum() == y.size
    ct = numbers(np.float64, x.shape)
    back = jnp.take_along_axis(ct.reshape(2, 8, -1), at.reshape(2, 8, -1), 2)
    np.testing.assert_array_equal(pull(ct)[0], back.reshape(y.shape))
    np.testing.assert_array_equal(jax.vmap(f)(jnp.stack([y, 2 * y]))[1], 2 * out)
    smaller = jl.max_unpool(y[0], at[0] * 0 - 1, (2,) * rank)
    assert smaller.shape == (8, *(2 * n for n in y.shape[2:])) and not smaller.any()
    if torch is not None:
        g = getattr(torch.nn.functional, f"max_unpool{rank}d")
        found = g(t(y), t(at).long(), 2, output_size=x.shape[2:])
        np.testing.assert_array_equal(out, found.numpy())


def test_indices_of_eight_bits():
    y = jnp.ones((1, 1, 150))
    out = jl.max_unpool(y, jnp.full(y.shape, 7, jnp.uint8), 2)
    assert out.shape == (1, 1, 300) and np.flatnonzero(out).tolist() == [7]


EIGHT_BITS = {
    "softmax": lambda x: jl.softmax(x, 1),
    "avg_pool": lambda x: jl.avg_pool(x, 2),
    "max_pool": lambda x: jl.max_pool(x, 3, 1, 1),
    "adaptive_avg_pool": lambda x: jl.adaptive_avg_pool(x, 4),
    "layer_norm": lambda x: jl.layer_norm(x, 6),
    "group_norm": lambda x: jl.group_norm(x, 4),
    "batch_norm": lambda x: jl.batch_norm(x, None, None, training=True)[0],
    "interpolate": lambda x: jl.interpolate(x, 12, mode="bilinear"),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats(name, dtype):
    x = numbers(np.float32).astype(dtype)
    y = EIGHT_BITS[name](x)
    assert y.dtype == dtype  # as jax.nn.softmax has it
    expected = EIGHT_BITS[name](x.astype(np.float32)).astype(dtype)
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(expected, np.float32), rtol=0.3
    )


def test_max_pool_long_windows_integers_and_second_derivatives():
    x = numbers(np.float64, (1, 2, 80))
    same(jl.max_pool(x, 40), x.reshape(1, 2, 2, 40).max(-1))
    grad = jax.grad(lambda x: jl.max_pool(x, 40).sum())(x)
    same(grad, x == x.reshape(1, 2, 2, 40).max(-1).repeat(40, -1))
    ints = jnp.arange(16).reshape(1, 1, 4, 4)
    assert jl.max_pool(ints, 2, padding=1)[0, 0].tolist() == [[0, 2, 3], [8, 10, 11], [12, 14, 15]]  # fmt: skip
    check_grads(lambda x: jl.max_pool(x, 3, 2, 1) ** 3, (x,), order=2, eps=1e-5)


def test_max_pool_gives_the_gradient_of_an_unbounded_window_to_its_first_element():
    x = jnp.full((1, 1, 3), -jnp.inf)
    grad = jax.grad(lambda x: jnp.where(jl.max_pool(x, 3, 3, 1) < 0, 0, 1.0).sum())(x)
    assert grad.tolist() == [[[0, 0, 0]]]
    _, pull = jax.vjp(lambda x: jl.max_pool(x, 2, 2, 1), x)
    assert pull(jnp.ones((1, 1, 2)))[0].tolist() == [[[1, 1, 0]]]


@pytest.mark.parametrize(
    "mode, size, factor, corners",
    [
        *itertools.product(["bilinear", "bicubic"], [(3, 9), (1, 11)], [None], [True, False]),
        *itertools.product(["bilinear", "bicubic"], [None], [1.7, 0.6], [True, False]),
        *itertools.product(["nearest", "nearest-exact"], [(3, 9), (7, 1)], [None], [None]),
        *itertools.product(["nearest", "nearest-exact"], [None], [2.1, 0.6], [None]),
    ],
)  # fmt: skip
def test_interpolate(mode, size, factor, corners):
    pytest.importorskip("torch")
    x = numbers(np.float64)
    options = {
        "size": size,
        "scale_factor": factor,
        "mode": mode,
        "align_corners": corners,
    }
    leaf = t(x).requires_grad_()
    expected = torch.nn.functional.interpolate(leaf, **options)
    ct = np.asarray(numbers(np.float64, tuple(expected.shape)))
    expected.backward(t(ct))
    y, pull = jax.vjp(
        jax.jit(
            lambda x: jl.interpolate(jl.with_memory_format(x, "NCHW4c"), **options)
        ),
        x,
    )
    same(y, expected.detach().numpy(), np.float32)
    same(pull(ct)[0], leaf.grad.numpy(), np.float32)


@pytest.mark.parametrize("format", ["NCHW", "NHWC"])
def test_whole_factors_gather_nothing(format):
    """XLA's CPU backend gathers within rows element by element."""

    def f(x):
        x = jl.with_memory_format(x, format)
        return jl.interpolate(x, scale_factor=(2, 3), mode="bilinear")

    assert hlo.count("gather", hlo.compiled(f, jnp.ones((2, 8, 5, 6)))) == 0


def test_batch_norm_updates_its_statistics():
    x = numbers(np.float64)
    y, mean, var = jl.batch_norm(x, BIAS, WEIGHT, training=True, momentum=0.25)
    same(y, normalized(x, (0, 2, 3)), scale=64)
    same(mean, 0.75 * BIAS + 0.25 * x.mean((0, 2, 3)))
    same(var, 0.75 * WEIGHT + 0.25 * x.var((0, 2, 3), ddof=1))
    assert jl.batch_norm(x, None, None, training=True)[1:] == (None, None)


def test_statistics_of_values_far_from_zero():
    x = numbers(np.float32) + 3000
    expected = normalized(np.asarray(x, np.float64), (0, 2, 3))
    y = jl.batch_norm(x, None, None, training=True)[0]
    assert np.abs(y - expected).max() < 1e-3


def test_regrouping_across_blocks():
    x = jnp.arange(2 * 12 * 4).reshape(2, 12, 2, 2)
    f = lambda format: jax.jit(  # noqa: E731
        lambda x: jl.channel_shuffle(jl.with_memory_format(x, format), 3)
    )
    for format in ("NCHW6c", "NCHW4c", "NCHW3c"):
        np.testing.assert_array_equal(f(format)(x), f("NCHW")(x))


def test_dropout_scales_what_it_keeps():
    x = jnp.ones((8, 16, 16, 16))
    y = jax.jit(lambda x: jl.dropout(jl.with_memory_format(x, "NHWC"), KEY, 0.25))(x)
    assert sorted(set(y.ravel().tolist())) == [0, np.float32(1 / 0.75)]
    assert abs(float((y == 0).mean()) - 0.25) < 0.02
    assert not jl.dropout(x, KEY, 1.0).any()
    assert jl.dropout(x, KEY, 0.5, training=False) is x
    assert jl.dropout(x, None, training=False) is x


@pytest.mark.parametrize(
    "left, right, result",
    [
        ((2, 8, 5, 6, "NHWC"), 2.0, "NHWC"),
        (2.0, (2, 8, 5, 6, "NHWC"), "NHWC"),
        ((2, 8, 5, 6, "NHWC"), (1, 8, 1, 1, "NCHW"), "NHWC"),
        ((8, 1, 1, None), (2, 8, 5, 6, "NCHW4c"), "NCHW4c"),
        ((2, 8, 5, 6, "NHWC"), (2, 8, 5, 6, "NCHW"), "NHWC"),
        ((2, 8, 5, 6, "NCHW"), (2, 8, 5, 6, "NHWC"), "NCHW"),
        ((2, 1, 5, 6, "NCHW"), (2, 8, 5, 6, "NCHW4c"), "NCHW4c"),
        ((2, 8, 1, 1, "NHWC"), (1, 1, 5, 6, "NCHW"), "NCHW"),
        ((2, 8, 5, 6, "NCHW4c"), (2, 8, 5, 6, "NHWC"), "NCHW4c"),
        ((2, 8, 5, 6, "NHWC"), (3, 2, 8, 5, 6, None), "NCDHW"),
    ],
)
def test_format_of_a_binary_result(left, right, result):
    def operand(spec):
        if isinstance(spec, float):
            return spec
        x = numbers(np.float64, spec[:-1])
        return jl.with_memory_format(x, spec[-1]) if spec[-1] else x

    def f():
        y = jl.add(operand(left), operand(right))
        return y, str(jl.memory_format(y))

    def plain(spec):
        return spec if isinstance(spec, float) else numbers(np.float64, spec[:-1])

    found = []
    y = jax.jit(lambda: (found.append(f()), found[0][0])[1])()
    np.testing.assert_array_equal(y, plain(left) + plain(right))
    assert found[0][1] == result


def test_concatenate_follows_the_largest_that_is_tagged():
    def f(x):
        small = jl.with_memory_format(x[:, :4], "NCHW4c")
        y = jl.concatenate([x, small, jl.with_memory_format(x, "NHWC")], 1)
        return y, str(jl.memory_format(y))

    found = []
    y = jax.jit(lambda x: (found.append(f(x)), found[0][0])[1])(numbers(np.float32))
    assert y.shape == (2, 20, 5, 6) and found[0][1] == "NHWC"


@pytest.mark.parametrize(
    "shape", [(0, 8, 5, 6), (1, 8, 1, 1), (1, 8, 3, 1), (1, 8, 7, 3)]
)
def test_small_and_empty_shapes(shape):
    x = numbers(np.float32, shape)
    training = functools.partial(jl.batch_norm, running_mean=None, running_var=None)
    functions = {
        "max_pool": lambda x: jl.max_pool(x, 1, 2),
        "avg_pool": lambda x: jl.avg_pool(x, 3, 2, 1, ceil_mode=True),
        "adaptive": lambda x: jl.adaptive_max_pool(x, 2),
        "group_norm": lambda x: jl.group_norm(x, 2),
        "layer_norm": lambda x: jl.layer_norm(x, x.shape[1:]),
        "interpolate": lambda x: jl.interpolate(x, 4, mode="bicubic"),
        "softmax": lambda x: jl.softmax(x, 1),
        "pad": lambda x: jl.pad(x, (1, 1), "replicate"),
        "pixel_shuffle": lambda x: jl.pixel_shuffle(x, 2),
        "dropout": lambda x: jl.dropout(x, KEY),
        "add": lambda x: jl.add(x, 1),
    }
    if x.size != x.shape[1]:
        functions["batch_norm"] = lambda x: training(x, training=True)[0]
    for name, f in functions.items():
        plain = jax.jit(f)(x)
        for format in ("NHWC", "NCHW4c"):
            g = lambda x, f=f, format=format: f(jl.with_memory_format(x, format))  # noqa: E731
            if name != "dropout":
                np.testing.assert_allclose(
                    jax.jit(g)(x), plain, atol=1e-5, err_msg=name
                )
            grad = jax.jit(jax.grad(lambda x, g=g: g(x).sum()))(x)
            assert grad.shape == x.shape, name


def test_nan_reaches_its_neighbours_alone():
    x = numbers(np.float32).at[0, 0, 2, 2].set(np.nan)
    expected = {
        "max_pool": (lambda x: jl.max_pool(x, 3, 1, 1), 9),
        "avg_pool": (lambda x: jl.avg_pool(x, 3, 1, 1), 9),
        "adaptive_avg_pool": (lambda x: jl.adaptive_avg_pool(x, (4, 4)), 2),
        "adaptive_max_pool": (lambda x: jl.adaptive_max_pool(x, (5, 3)), 1),
        "interpolate": (lambda x: jl.interpolate(x, (10, 12), mode="bilinear"), 16),
        "batch_norm": (
            lambda x: jl.batch_norm(x, None, None, training=True)[0],
            2 * 5 * 6,
        ),
        "group_norm": (lambda x: jl.group_norm(x, 4), 2 * 5 * 6),
        "softmax": (lambda x: jl.softmax(x, 1), 8),
        "relu": (jl.relu, 1),
    }
    for name, (f, count) in expected.items():
        for format in FORMATS:
            g = lambda x, f=f, format=format: f(jl.with_memory_format(x, format))  # noqa: E731
            assert int(jnp.isnan(jax.jit(g)(x)).sum()) == count, (name, format)


def test_a_chain_in_nhwc_moves_nothing():
    format = jl.MemoryFormat.named("NHWC")

    def block(physical, skip, weight):
        x, y = store(physical, format), store(skip, format)
        y = jl.add(jl.relu(jl.batch_norm(x, None, None, weight, training=True)[0]), y)
        y = jl.dropout2d(jl.max_pool(jl.pad(y, (1, 1, 1, 1)), 3, 2), KEY)
        y = jl.group_norm(jl.concatenate([y, jl.silu(y)], 1), 4)
        return stored(jl.avg_pool(y, 2))[0]

    x = jnp.ones((8, 64, 64, 64))
    assert (8 * 64**3 * 4) >= 1 << 20  # or XLA permutes, without a kernel of ours
    for f in (block, jax.grad(lambda *operands: block(*operands).sum())):
        text = hlo.compiled(f, x, x, jnp.ones(64))
        ours = re.findall('custom_call_target="jax_layout_([a-z_]*)"', text)
        assert set(ours) <= {"moments", "centered_sums", "pool"}
        assert hlo.count("transpose", text) == 0


BAD = [
    (lambda x: jl.max_pool(x, 9), r"max_pool: a window must fit into the padded input, got kernel_size=9"),
    (lambda x: jl.max_pool(x, 2, padding=2), r"max_pool: padding must be half a window at most, got padding=2"),
    (lambda x: jl.max_pool(x, (2, 2, 2, 2)), r"max_pool: x must have one to three spatial dimensions"),
    (lambda x: jl.max_pool(x, 0), r"max_pool: kernel_size must hold 2 integers of at least 1, got 0"),
    (lambda x: jl.avg_pool(x, 2, divisor_override=0), r"avg_pool: divisor_override must not be 0"),
    (lambda x: jl.avg_pool(x, 2, stride=(1, -1)), r"avg_pool: stride must hold 2 integers"),
    (lambda x: jl.adaptive_avg_pool(x[..., :0], 2), r"adaptive_avg_pool: spatial dimensions must not be empty"),
    (lambda x: jl.batch_norm(x, None, None), r"batch_norm: running_mean and running_var are needed"),
    (lambda x: jl.batch_norm(x, BIAS[:3], WEIGHT), r"batch_norm: running_mean must have shape \(8,\), got \(3,\)"),
    (lambda x: jl.batch_norm(x[:1, :, :1, :1], None, None, training=True), r"batch_norm: a channel must have more than one element"),
    (lambda x: jl.instance_norm(x[:, :, :1, :1]), r"instance_norm: a channel must have more than one element"),
    (lambda x: jl.group_norm(x, 3), r"group_norm: channels must be divisible by num_groups, got 8 channels and num_groups=3"),
    (lambda x: jl.group_norm(x[0, 0, 0], 1), r"group_norm: x must have shape \(N, C, \*spatial\), got \(6,\)"),
    (lambda x: jl.layer_norm(x, (8, 5)), r"layer_norm: normalized_shape must be the last dimensions of x, got \(8, 5\)"),
    (lambda x: jl.layer_norm(x, 6, WEIGHT), r"layer_norm: weight must have shape \(6,\), got \(8,\)"),
    (lambda x: jl.softmax(x, 4), r"softmax: dim must be a dimension of x, got 4"),
    (lambda x: jl.interpolate(x), r"interpolate: give either size or scale_factor"),
    (lambda x: jl.interpolate(x, 3, mode="linear"), r"interpolate: mode must be .* got 'linear' for x of shape \(2, 8, 5, 6\)"),
    (lambda x: jl.interpolate(x, 3, align_corners=True), r"interpolate: align_corners does not go with mode 'nearest'"),
    (lambda x: jl.interpolate(x, scale_factor=0.1), r"interpolate: the result must not be empty"),
    (lambda x: jl.interpolate(x[0, 0], 3), r"interpolate: x must have shape \(N, C, \*spatial\)"),
    (lambda x: jl.dropout(x, KEY, 1.5), r"dropout: p must be a probability from 0 to 1, got 1.5"),
    (lambda x: jl.dropout2d(x[0, 0], KEY), r"dropout2d: x must have shape \(N, C, \*spatial\), got \(5, 6\)"),
    (lambda x: jl.pad(x, (1, 2, 3)), r"pad: pad must hold two numbers per dimension"),
    (lambda x: jl.pad(x, (6, 0), "reflect"), r"pad: reflect padding of dimension 3 by \(6, 0\) does not fit"),
    (lambda x: jl.pad(x, (7, 0), "circular"), r"pad: circular padding of dimension 3"),
    (lambda x: jl.pad(x, (-4, -4)), r"pad: constant padding of dimension 3 by \(-4, -4\) does not fit"),
    (lambda x: jl.pad(x, (1, 1), "edge"), r"pad: mode must be 'constant', .* got 'edge'"),
    (lambda x: jl.pixel_shuffle(x, 3), r"pixel_shuffle: channels must be divisible by upscale_factor squared, got 8 channels and upscale_factor=3"),
    (lambda x: jl.pixel_unshuffle(x, 2), r"pixel_unshuffle: height and width must be divisible by downscale_factor"),
    (lambda x: jl.pixel_shuffle(x[0], 2), r"pixel_shuffle: x must have shape \(N, C, H, W\), got \(8, 5, 6\)"),
    (lambda x: jl.channel_shuffle(x, 5), r"channel_shuffle: channels must be divisible by groups, got 8 channels and groups=5"),
    (lambda x: jl.concatenate([], 0), r"concatenate: there must be arrays"),
    (lambda x: jl.concatenate([x, x[:1]], 1), r"concatenate: shapes must agree outside of dimension 1"),
    (lambda x: jl.group_norm(x, -4), r"group_norm: num_groups must be at least 1, got -4"),
    (lambda x: jl.batch_norm(x, BIAS, WEIGHT, eps=-5), r"batch_norm: eps must be at least 0, got -5"),
    (lambda x: jl.layer_norm(x, 6, eps=np.nan), r"layer_norm: eps must be at least 0, got nan"),
    (lambda x: jl.interpolate(x, scale_factor=np.nan), r"interpolate: scale_factor must be a number above 0, or 2 of them, got nan"),
    (lambda x: jl.interpolate(x, scale_factor=(1, 2, 3)), r"interpolate: scale_factor must be .* got \(1, 2, 3\)"),
    (lambda x: jl.channel_shuffle(x, 0), r"channel_shuffle: groups must be at least 1, got 0"),
    (lambda x: jl.max_unpool(x, jnp.zeros((2, 8), int), 2), r"max_unpool: indices must have the shape of x, got \(2, 8\)"),
    (lambda x: jl.max_unpool(x, jnp.zeros(x.shape, int), 2, output_size=(8, 12)), r"max_unpool: output_size must be within a stride of \(10, 12\), got \(8, 12\)"),
    (lambda x: jl.conv(x, jnp.ones((8, 8, 3, 3), np.float32), stride=(1, 2, 3)), r"conv: stride must hold 2 integers of at least 1, got \(1, 2, 3\)"),
    (lambda x: jl.gelu(x, "fast"), r"gelu: approximate must be 'none' or 'tanh', got 'fast'"),
]  # fmt: skip


@pytest.mark.parametrize("f, message", BAD, ids=[message[:40] for _, message in BAD])
def test_bad_values(f, message):
    with pytest.raises(ValueError, match=message):
        f(numbers(np.float32))


@pytest.mark.parametrize(
    "f, message",
    [
        (lambda x: jl.max_pool(x > 0, 2), r"max_pool: x must hold real numbers, got bool"),
        (lambda x: jl.max_pool(x, 2.5), r"max_pool: kernel_size must be an integer or"),
        (lambda x: jl.avg_pool(x.astype(int), 2), r"avg_pool: x must be of a floating dtype, got int64"),
        (lambda x: jl.batch_norm([1.0], None, None), r"batch_norm: x must be an array, got list"),
        (lambda x: jl.layer_norm(x, None), r"layer_norm: normalized_shape must be an integer or a tuple of them, got None"),
        (lambda x: jl.softmax(x, None), r"softmax: dim must be an integer, got None"),
        (lambda x: jl.pad(x, 1), r"pad: pad must hold two integers per dimension, from the last on, got 1"),
        (lambda x: jl.pad(x, (1.5, 1)), r"pad: pad must hold two integers per dimension"),
        (lambda x: jl.group_norm(x, 4.0), r"group_norm: num_groups must be an integer, got 4.0"),
        (lambda x: jl.pixel_shuffle(x, 2.5), r"pixel_shuffle: upscale_factor must be an integer, got 2.5"),
        (lambda x: jl.dropout(x, 0.5), r"dropout: key must be one of jax.random, as in dropout\(x, key, p\), got 0.5"),
        (lambda x: jl.dropout2d(x, jax.random.split(KEY)), r"dropout2d: key must be one of jax.random"),
        (lambda x: jl.dropout(x, KEY, "a"), r"dropout: p must be a number, got 'a'"),
        (lambda x: jl.batch_norm(x, BIAS, WEIGHT, training="False"), r"batch_norm: training must be True or False, got 'False'"),
        (lambda x: jl.batch_norm(x, None, None, training=True, momentum=None), r"batch_norm: momentum must be a number, got None"),
        (lambda x: jl.max_pool(x, 2, ceil_mode="no"), r"max_pool: ceil_mode must be True or False, got 'no'"),
        (lambda x: jl.max_unpool(x, x, 2), r"max_unpool: indices must be integers, got float32"),
        (lambda x: jl.conv(x, jnp.ones((8, 8, 3, 3), np.float32), stride="a"), r"conv: stride must be an integer or a tuple of them, got 'a'"),
        (lambda x: jl.concatenate([x, x.astype(int)]), r"concatenate: dtypes must agree, got float32, int64"),
    ],
)  # fmt: skip
def test_bad_types(f, message):
    with pytest.raises(TypeError, match=message):
        f(numbers(np.float32))
