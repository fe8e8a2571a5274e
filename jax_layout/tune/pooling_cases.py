# SPDX-License-Identifier: Apache-2.0
"""Windows that are summed up or searched, as Flax, Haiku and Keras write them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_layout.plain import jnp, lax
from jax_layout.tune.case import Case, Function, Sizes, case_of
from jax_layout.tune.draw import Draw, is_drawn

# Of samples, the extents in space, channels.
_IMAGES: list[Sizes] = [(8, 56, 56, 64), (8, 14, 14, 256), (1, 35, 35, 288),
                        (16, 28, 28, 32)]  # fmt: skip
# Extent, stride and padding of a window.
_WINDOWS = [(2, 2, 0), (3, 2, 1), (3, 1, 1), (7, 7, 0)]
_OF_SUMS, _OF_MAXIMA = "reduce_window_sum", "reduce_window_max"


def _pool(x: Any, *, mean: bool, last: bool, k: int, s: int, pad: int) -> Any:
    def each(value: Any, other: Any) -> list[Any]:
        inside = [value] * (x.ndim - 2)
        return [other, *inside, other] if last else [other, other, *inside]

    start, operator = (0, lax.add) if mean else (-np.inf, lax.max)
    given = each(k, 1), each(s, 1), each((pad, pad), (0, 0))
    return lax.reduce_window(x, np.array(start, x.dtype)[()], operator, *given)


def _gradient(f: Function, linear: bool, like: Any) -> Function:
    def of_sums(ct: Any) -> Any:
        return jax.linear_transpose(f, like)(ct)[0]

    def of_maxima(ct: Any, x: Any) -> Any:
        return jax.vjp(f, x)[1](ct)[0]

    return of_sums if linear else of_maxima


def pooling(quick: bool) -> Iterator[Case]:
    """Pools and their gradients, with channels last and first."""
    wanted = {"float32": 1, "bfloat16": 3, "float16": 7}
    kinds = list(itertools.product(_IMAGES, _WINDOWS, (True, False), (False, True)))
    if quick:
        wanted, kinds = {"float32": 1}, kinds[:8:2]
    for dtype, every in wanted.items():
        for size, window, last, mean in kinds[::every]:
            yield from _each("", dtype, size, window, last, mean)


_DRAWN_WINDOWS = [
    *3 * [(2, 2, 0), (3, 2, 1)],
    *[(3, 1, 1), (5, 1, 2), (3, 2, 0), (3, 3, 0), (4, 4, 0), (2, 1, 0), (7, 7, 0)],
]
_DRAWN = 300


def drawn(quick: bool, seed: int = 0, count: int = _DRAWN) -> Iterator[Case]:
    """A pool each, or its gradient."""
    draw = Draw(seed)
    while count and not quick:
        n, c = draw.of(1, 4, 8, 16, 32), draw.of(1, 3, 8, 16, 24, 32, 48, 64, 128, 256)
        extent = draw.of(7, 8, 14, 16, 28, 32, 35, 56, 64, 112)
        window = draw.of(*_DRAWN_WINDOWS)
        dtype = draw.of("float32", "float32", "bfloat16", "float16")
        last, mean = draw.of(True, False), draw.of(True, False)
        which = draw.of(0, 0, 1)
        size = (n, extent, extent, c)
        if is_drawn(dtype, math.prod(size) * window[0] ** 2, size):
            count -= 1
            yield list(_each("drawn ", dtype, size, window, last, mean))[which]


def _each(
    prefix: str,
    dtype: str,
    size: Sizes,
    window: tuple[int, int, int],
    last: bool,
    mean: bool,
) -> Iterator[Case]:
    """A pool and its gradient."""
    (n, *space, c), (k, s, pad) = size, window
    x = size if last else (n, c, *space)
    f = functools.partial(_pool, mean=mean, last=last, k=k, s=s, pad=pad)
    like = jax.ShapeDtypeStruct(x, jnp.dtype(dtype))
    y = jax.eval_shape(f, like).shape
    kind = f"{prefix}{'mean' if mean else 'max'} pool {k}/{s}/{pad}"
    of_pool = _OF_SUMS if mean else _OF_MAXIMA
    yield case_of(kind, f, dtype, x, whole=True, operators=(of_pool,))
    yield case_of(
        f"{kind}, gradient",
        _gradient(f, mean, like),
        dtype,
        *([y] if mean else [y, x]),
        whole=True,
        operators=(_OF_SUMS if mean else "select_and_scatter_add",),
    )
