# SPDX-License-Identifier: Apache-2.0
"""What is measured of normalizations, and of their gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax_layout as jl
from jax_layout.formats.tags import store, stored
from jax_layout.tune.case import Case, Function, Sizes, case_of, with_gradient
from jax_layout.tune.draw import Draw, is_drawn

_ORDERS = "NCHW", "NHWC"


def norms(quick: bool) -> Iterator[Case]:
    """The moments of normalizations, in them, and those of their gradients."""
    wanted = {"float32": 1, "bfloat16": 1, "float16": 3, "float64": 3}
    images = [(8, 64, 56, 56), (8, 256, 14, 14), (1, 16, 8, 8), (8, 64, 14, 14),
              (2, 512, 7, 7)]  # fmt: skip
    rows = [(128, 768), (512, 1024), (1, 768), (64, 64), (4096, 1024), (16, 768),
            (25088, 64), (2048, 256), (512, 4096), (4096, 768)]  # fmt: skip
    if quick:
        wanted, images, rows = {"float32": 1}, images[:1], rows[:2]
    for dtype, every in wanted.items():
        listed = list(itertools.product(images, _ORDERS, (_batch_norm, _group_norm)))
        for x, order, f in listed[::every]:
            yield from _in_order("", f, order, dtype, x)
        for x in rows[::every]:
            yield from _norm("layer_norm", _layer_norm, dtype, x, x[-1:], x[-1:])
        for x in images[:2:every]:
            yield from _norm("norm of samples", _sample_norm, dtype, x)


def _batch_norm(x: Any, w: Any, b: Any) -> Any:
    return jl.batch_norm(x, None, None, w, b, training=True)[0]


def _group_norm(x: Any, w: Any, b: Any) -> Any:
    return jl.group_norm(x, min(32, x.shape[1]), w, b)


def _layer_norm(x: Any, w: Any, b: Any) -> Any:
    return jl.layer_norm(x, x.shape[-1:], w, b)


def _sample_norm(x: Any) -> Any:
    return jl.layer_norm(x, x.shape[1:])


def _in_memory(f: Function, format: jl.MemoryFormat, x: Any, *rest: Any) -> Any:
    """The function of arrays whose axes lie as in memory."""
    return stored(f(store(x, format), *rest))[0]


def _in_order(
    prefix: str, f: Function, order: str, dtype: str, x: Sizes
) -> Iterator[Case]:
    format = jl.MemoryFormat.named(order)
    kept = functools.partial(_in_memory, f, format)
    kind, shape = f"{prefix}{f.__name__[1:]} {order}", format.physical_shape(x)
    yield from _norm(kind, kept, dtype, shape, (x[1],), (x[1],))


def _norm(
    kind: str, f: Function, dtype: str, x: Sizes, *parameters: Sizes
) -> Iterator[Case]:
    yield case_of(kind, f, dtype, x, *parameters, hot=True)
    g = with_gradient(f, 1 + len(parameters))
    both = case_of(f"{kind}, gradient", g, dtype, x, *parameters, x, hot=True)
    yield dataclasses.replace(both, together=True)  # its sums are about those moments


_CHANNELS = 3, 8, 16, 24, 32, 64, 96, 128, 256, 512, 1024
_SIDES = 4, 7, 8, 14, 16, 28, 32, 56, 64, 112
_DRAWN = 400


def drawn(quick: bool, seed: int = 0, count: int = _DRAWN) -> Iterator[Case]:
    """A norm each, or one and its gradient."""
    draw = Draw(seed)
    while count and not quick:
        dtype = draw.of(*3 * ["float32"], *2 * ["bfloat16"], "float16", "float64")
        f = draw.of(_layer_norm, _layer_norm, _batch_norm, _group_norm, _sample_norm)
        order, which = draw.of(*_ORDERS), draw.of(0, 0, 1)
        n, c, side = draw.of(1, 2, 4, 8, 16, 32), draw.of(*_CHANNELS), draw.of(*_SIDES)
        x: Sizes = n, c, side, side
        if f is _layer_norm:
            x = draw.below(8192), draw.extent()
        if f is _group_norm and c > 32 and c % 32:
            continue  # has no 32 groups
        if not is_drawn(dtype, math.prod(x), x, x):
            continue
        count -= 1
        if f in (_batch_norm, _group_norm):
            both = _in_order("drawn ", f, order, dtype, x)
        elif f is _layer_norm:
            both = _norm("drawn layer_norm", f, dtype, x, x[-1:], x[-1:])
        else:
            both = _norm("drawn norm of samples", f, dtype, x)
        yield list(both)[which]
