# SPDX-License-Identifier: Apache-2.0
"""Sums and maxima of windows along up to three axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.interpreters import ad

from jax_layout.convnet.windows import Window, max_along, reduce_along, sum_along
from jax_layout.formats.physical import wide
from jax_layout.kernel import Kernel
from jax_layout.op import Op, define, jvp_of
from jax_layout.plain import lax

_OPERATORS = {"sum": lax.add, "max": lax.max}
_DTYPES = ("float32", "float64", "bfloat16")
# Elements side by side are reduced as vectors; few make short ones.
_MIN_INNER = 8
# What XLA does within one of its own loops, before a call has begun.
_MIN_SIZE = 4096
# Elements of a window: as in cpu/pool/pool.cc, and where an element is read as often
# as it is in windows, which is more than one axis after the other would cost.
_MOST_TAPS, _MOST_OVERLAPPING = 64, 16
_NO_WINDOW = Window(1, 1, 1, 0, 0, 0, 1, 1)


def pool(x: Array, kind: str, axes: Sequence[int], windows: Sequence[Window]) -> Array:
    """The windows of x, reduced.

    Args:
      x: any shape, dtype of real numbers.
      kind: "sum", or "max", of which the gradient goes to the first of equal elements
        along the first of the axes.
      axes: those that have windows, in the order in which they are reduced.
      windows: along each of them.

    Returns:
      the shape of `x`, with `Window.out` along those axes; its dtype, but float32 for
      sums of 16-bit types.

    >>> pairs = Window(2, 2, 1, low=0, high=0, padding=0, extent=4, out=2)
    >>> pool(lax.iota(np.float32, 4), "sum", [0], [pairs]).tolist()
    [1.0, 5.0]
    """
    y: Array = pool_p(x, kind=kind, axes=tuple(axes), windows=tuple(windows))
    return y


def _pool(
    x: Array, *, kind: str, axes: tuple[int, ...], windows: tuple[Window, ...]
) -> Array:
    y = x.astype(wide(x.dtype))
    for axis, window in zip(axes, windows, strict=True):
        y = reduce_along(y, axis, window, _OPERATORS[kind])
    return y if kind == "sum" else y.astype(x.dtype)


def _with_gradient(
    x: Array, *, kind: str, axes: tuple[int, ...], windows: tuple[Window, ...]
) -> Array:
    along = sum_along if kind == "sum" else max_along
    y = x.astype(wide(x.dtype)) if kind == "sum" else x
    for axis, window in zip(axes, windows, strict=True):
        y = along(y, axis, window)
    return y


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, kind: str, **params: Any
) -> tuple[Array, Any]:
    if kind == "max":
        y, tangent = jvp_of(_with_gradient)(primals, tangents, kind=kind, **params)
        return y, tangent
    ((x,), (tangent,)) = primals, tangents
    y = pool_p(x, kind=kind, **params)
    return y, _with_gradient(ad.instantiate_zeros(tangent), kind=kind, **params)


def _batch(
    operands: Sequence[Array],
    dims: Sequence[int],
    *,
    axes: tuple[int, ...],
    **params: Any,
) -> tuple[Array, int]:
    ((x,), (dim,)) = operands, dims
    moved = tuple(axis + (axis >= dim) for axis in axes)
    return pool_p(x, axes=moved, **params), dim


def _kernel(
    platform: str,
    x: Any,
    *,
    kind: str,
    axes: tuple[int, ...],
    windows: tuple[Window, ...],
) -> Kernel | None:
    outs = [window.out for window in windows]
    if x.dtype.name not in _DTYPES or x.size < _MIN_SIZE or 0 in outs:
        return None
    if all(window.inside and window.size <= window.stride for window in windows):
        return None  # elementwise, which XLA fuses with what makes x
    taps = math.prod(window.size for window in windows)
    apart = math.prod(window.stride for window in windows)
    if taps > (_MOST_TAPS if 2 * apart >= taps else _MOST_OVERLAPPING):
        return None
    along = dict(zip(axes, windows, strict=True))

    def in_order(order: tuple[int, ...]) -> Kernel | None:
        order = order or tuple(range(x.ndim))
        # An axis of one element has no place in memory.
        real = [axis for axis in order if x.shape[axis] > 1 or axis in along]
        places = [place for place, axis in enumerate(real) if axis in along]
        first, last = places[0], places[-1] + 1
        if len(places) > 3 or last - first != len(places):
            return None
        inner = math.prod(x.shape[axis] for axis in real[last:])
        if inner < _MIN_INNER:
            return None
        placed = [along[axis] for axis in real[first:last]]
        numbers = [(w.extent, w.out, w.size, w.stride, w.dilation, w.low)
                   for w in [_NO_WINDOW] * (3 - len(placed)) + placed]  # fmt: skip
        outer = math.prod(x.shape[axis] for axis in real[:first])
        return Kernel(
            {
                "kind": list(_OPERATORS).index(kind),
                "shape": np.array([outer, inner], np.int64),
                "windows": np.array(numbers, np.int64).ravel(),
            },
            operand_layouts=[order],
            result_layouts=[order],
        )

    kernel = in_order(())
    return kernel and dataclasses.replace(kernel, in_order=in_order)


pool_p: Any = define(
    Op(
        name="pool",
        lax=_pool,
        kernel=_kernel,
        jvp=_jvp,
        batch=_batch,
        platforms=("cpu",),  # a GPU's compiler makes one kernel of it
        layouts=True,
    )
)
