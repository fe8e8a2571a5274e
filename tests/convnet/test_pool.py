# SPDX-License-Identifier: Apache-2.0
"""The kernel of pools against XLA's reduce_window."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from hlo import compiled, kernels
from jax_layout.convnet.pool_kernel import pool
from jax_layout.convnet.windows import Window

# Shape; axes; sizes, strides, dilations, low and high padding of their windows.
CASES = {
    "2x2": ((2, 16, 16, 32), (1, 2), (2, 2), (1, 1), (1, 1), (0, 0), (0, 0)),
    "3x3/2, padded": ((2, 17, 15, 24), (1, 2), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)),
    "3x3/1": ((1, 14, 14, 40), (1, 2), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    "low alone": ((2, 13, 13, 19), (1, 2), (3, 2), (2, 3), (1, 1), (2, 0), (0, 0)),
    "dilated": ((2, 19, 17, 16), (1, 2), (3, 2), (1, 2), (2, 4), (2, 3), (1, 0)),
    "7x7": ((2, 14, 14, 64), (1, 2), (7, 7), (6, 6), (1, 1), (1, 1), (0, 0)),
    "4x4 of many": ((1, 9, 9, 1111), (1, 2), (4, 4), (1, 1), (1, 1), (2, 2), (1, 1)),
    "wide": ((1, 3, 901, 10), (1, 2), (2, 3), (1, 2), (1, 1), (0, 1), (0, 1)),
    "columns": ((3, 400, 9), (1,), (5,), (3,), (1,), (2,), (2,)),
    "rows": ((2, 30, 4, 32), (1,), (4,), (2,), (1,), (0,), (0,)),
    "volumes": ((1, 8, 9, 10, 16), (1, 2, 3), (2, 3, 2), (2, 1, 2), (1, 1, 1),
                (0, 1, 1), (0, 1, 0)),
    "first": ((20, 300), (0,), (3,), (2,), (1,), (0,), (1,)),
    "a window in padding": ((1, 6, 6, 128), (1, 2), (2, 2), (2, 2), (1, 1), (2, 4),
                            (0, 2)),
}  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_kind = pytest.mark.parametrize("kind", ["sum", "max"])


def windows_of(case):
    shape, axes, *numbers = case
    for axis, k, s, d, low, high in zip(axes, *numbers, strict=True):
        n, reach = shape[axis], (k - 1) * d
        out = (n + low + high - reach - 1) // s + 1
        used = (out - 1) * s + reach + 1 - low
        yield Window(k, s, d, low, used - n, max(low, high), n, out)


def numbers(shape, dtype="float32", seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x).astype(dtype)


def plainly(x, case, kind):
    shape, axes, *numbers = case

    def each(values, other):
        found = [other] * x.ndim
        for axis, value in zip(axes, values, strict=True):
            found[axis] = value
        return found

    sizes, strides, dilations, low, high = numbers
    start, operator = {
        "sum": (0, lax.add),
        "max": (-np.inf, lax.max),
    }[kind]
    return lax.reduce_window(
        x,
        np.array(start, x.dtype)[()],
        operator,
        each(sizes, 1),
        each(strides, 1),
        each(zip(low, high, strict=True), (0, 0)),
        window_dilation=each(dilations, 1),
    )


def pooled(case, kind):
    return functools.partial(
        pool, kind=kind, axes=case[1], windows=tuple(windows_of(case))
    )


@each_case
@each_kind
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_pool(case, kind, dtype):
    x = numbers(case[0], dtype)
    f = jax.jit(pooled(case, kind))
    assert kernels(compiled(f, x)) == (dtype != "float16")
    y = f(x)
    wide = "float64" if dtype == "float64" else "float32"
    expected = plainly(x.astype(wide), case, kind)
    assert y.shape == expected.shape
    assert y.dtype == (wide if kind == "sum" else dtype)
    if kind == "sum":
        bound = 8 * np.finfo(wide).eps * plainly(abs(x.astype(wide)), case, kind)
        assert (abs(y - expected) <= bound).all()
    else:
        assert (y == expected).all()


@each_kind
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_special_numbers(kind, dtype):
    case = CASES["3x3/2, padded"]
    x = np.array(numbers(case[0], dtype))
    x[0, 3, 4, 5], x[1, 8, 8], x[0, 9:14, 9:14] = np.nan, np.inf, -np.inf
    found, expected = jax.jit(pooled(case, kind))(x), plainly(x, case, kind)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isposinf(found), np.isposinf(expected))
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))


@each_kind
def test_gradient(kind):
    case = CASES["3x3/2, padded"]
    x = numbers(case[0])
    ct = numbers(jax.eval_shape(pooled(case, kind), x).shape, seed=1)

    def gradient(f):
        return jax.jit(lambda x, ct: jax.vjp(f, x)[1](ct)[0])(x, ct)

    expected = gradient(lambda x: plainly(x, case, kind))
    np.testing.assert_allclose(gradient(pooled(case, kind)), expected, atol=1e-5)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_mapped(at):
    case = CASES["2x2"]
    x = numbers((3, *case[0]))
    moved = jnp.moveaxis(x, 0, at)
    f = jax.jit(jax.vmap(pooled(case, "max"), at))
    assert kernels(compiled(f, moved)) == (at != 2)  # which lies between
    expected = jax.vmap(lambda x: plainly(x, case, "max"))(x)
    np.testing.assert_array_equal(f(moved), expected)


def test_operands_are_read_where_they_lie():
    case = ((16, 16, 4, 32), (0, 1), *CASES["2x2"][2:])

    def f(reduce, x, w):
        numbers = ("NHWC", "HWIO", "HWNC")
        y = jl.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
        return reduce(y).transpose(2, 0, 1, 3)

    operands = numbers((4, 16, 16, 16)), numbers((3, 3, 16, 32))
    ours = jax.jit(functools.partial(f, pooled(case, "max")))
    layout = r"f32\[15,15,4,32\]\{3,1,0,2\} custom-call\(%conv"
    assert re.search(layout, compiled(ours, *operands))
    expected = f(functools.partial(plainly, case=case, kind="max"), *operands)
    np.testing.assert_allclose(ours(*operands), expected, atol=1e-5)


@pytest.mark.parametrize(
    "shape, axes, why",
    [
        ((2, 32, 16, 16), (2, 3), "along what lies side by side"),
        ((16, 16, 16, 4), (1, 2), "too few side by side"),
        ((16, 16, 16, 32), (0, 2), "an axis between"),
        ((2, 4, 4, 8), (1, 2), "small"),
    ],
)
def test_what_is_left_to_xla(shape, axes, why):
    case = (shape, axes, *CASES["2x2"][2:])
    x = numbers(shape)
    f = jax.jit(pooled(case, "max"))
    assert kernels(compiled(f, x)) == 0, why
    np.testing.assert_array_equal(f(x), plainly(x, case, "max"))


@pytest.mark.parametrize(
    "sizes, strides, pads",
    [((5, 5), (1, 1), (2, 2)), ((2, 2), (2, 2), (0, 0))],
    ids=["overlapping much", "side by side"],
)
def test_windows_that_are_left_to_xla(sizes, strides, pads):
    case = ((2, 17, 19, 32), (1, 2), sizes, strides, (1, 1), pads, pads)
    x = numbers(case[0])
    f = jax.jit(pooled(case, "max"))
    assert kernels(compiled(f, x)) == 0
    np.testing.assert_array_equal(f(x), plainly(x, case, "max"))


def test_large_windows_and_integers():
    case = ((1, 200, 32), (1,), (100,), (1,), (1,), (0,), (0,))
    for x in (numbers(case[0]), jnp.arange(6400).reshape(case[0])):
        f = jax.jit(pooled(case, "max"))
        assert kernels(compiled(f, x)) == 0
        expected = np.lib.stride_tricks.sliding_window_view(x, 100, 1).max(-1)
        np.testing.assert_array_equal(f(x), expected)
