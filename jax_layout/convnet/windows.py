# SPDX-License-Identifier: Apache-2.0
"""Sums and maxima of the windows along one axis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.interpreters import ad

from jax_layout.op import Op, define, in_front
from jax_layout.plain import jnp, lax

# The gradient of longer windows is left to XLA's own, one pass for any length.
_MAX_UNROLLED = 32


@dataclasses.dataclass(frozen=True)
class Window:
    """The windows along one axis: out[j] is of x[j * stride + i * dilation - low]."""

    size: int
    stride: int
    dilation: int
    low: int
    high: int  # less than 0 where the last elements are in no window
    padding: int  # what was asked for on either side
    extent: int  # of the input
    out: int

    @property
    def inside(self) -> bool:
        """Whether no window reaches into the padding."""
        return not self.low and self.high <= 0


def sum_along(x: Array, axis: int, window: Window) -> Array:
    """The sum of each window."""
    if window.stride == window.size <= _MAX_UNROLLED and window.inside:
        return disjoint_sum_p(x, axis=axis, window=window)
    return reduce_along(x, axis, window, lax.add)


def _disjoint_sum_transpose(ct: Any, x: Any, *, axis: int, window: Window) -> list[Any]:
    if type(ct) is ad.Zero:
        return [ct]
    config = [(0, 0, 0)] * ct.ndim
    config[axis] = (0, -window.high, 0)
    spread = jnp.repeat(ct, window.size, axis)
    return [lax.pad(spread, np.zeros((), ct.dtype)[()], config)]


def _disjoint_sum_batch(
    operands: Sequence[Array], dims: Sequence[int], *, axis: int, window: Window
) -> tuple[Array, int]:
    x = jnp.moveaxis(operands[0], dims[0], 0)
    return disjoint_sum_p(x, axis=axis + 1, window=window), 0


# Windows that do not overlap: forward a few slices, backward a broadcast.
disjoint_sum_p = define(
    Op(
        name="pool_sum",
        lax=lambda x, *, axis, window: reduce_along(x, axis, window, lax.add),
        transpose=_disjoint_sum_transpose,
        batch=_disjoint_sum_batch,
    )
)


def counts(window: Window, include_pad: bool) -> np.ndarray:
    """How many elements of the input, padded or not, the windows hold."""
    start = np.arange(window.out) * window.stride - window.low
    border = window.padding if include_pad else 0
    stop = np.minimum(start + window.size, window.extent + border)
    return stop - np.maximum(start, -border)


def max_along(x: Array, axis: int, window: Window) -> Array:
    """The maximum of each window; the gradient goes to the first of equal ones."""
    if window.size > _MAX_UNROLLED or jnp.issubdtype(x.dtype, jnp.integer):
        return reduce_along(x, axis, window, lax.max)
    return _max(x, axis, window)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _max(x: Array, axis: int, window: Window) -> Array:
    return reduce_along(x, axis, window, lax.max)


@_max.defjvp
def _max_jvp(
    axis: int, window: Window, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    y, chosen = first_max(x, axis, window)
    return y, pick_p(tangent, chosen, axis=axis, window=window)


def reduce_along(x: Array, axis: int, window: Window, operator: Any) -> Array:
    """The sum, maximum or minimum of each window, without a gradient of ours."""
    unit = 0 if operator is lax.add else _lowest(x.dtype)
    if operator is lax.min:
        unit = -unit if jnp.issubdtype(x.dtype, jnp.floating) else ~unit
    if window.inside and window.size <= min(window.stride, _MAX_UNROLLED):
        # Elementwise, which is several times faster where it is possible.
        parts = (_slice(x, axis, window, i) for i in range(window.size))
        return functools.reduce(operator, parts)

    def along(value: Any, other: Any) -> list[Any]:
        return [value if i == axis else other for i in range(x.ndim)]

    return lax.reduce_window(
        x,
        np.array(unit, x.dtype)[()],
        operator,
        along(window.size, 1),
        along(window.stride, 1),
        along((window.low, window.high), (0, 0)),
        window_dilation=along(window.dilation, 1),
    )


def spread_sum_along(x: Array, axis: int, window: Window, spread: int) -> Array:
    """The sum of each window of x with spread - 1 zeros between its elements.

    Element i of the window of result p is element (p + i * dilation - low) / spread of
    x, where that is whole: for every phase of p there is a sum of shifted arrays.
    """
    zero = np.zeros((), x.dtype)[()]
    pads = [(0, 0, 0)] * x.ndim
    if window.size == spread and window.dilation == 1:  # one element in each window
        y = jnp.repeat(x, spread, axis)
        low = window.low - spread + 1
        pads[axis] = (low, window.out - low - y.shape[axis], 0)
        return lax.pad(y, zero, pads)
    steps = -(-window.out // spread)
    shifts = [
        [
            (phase + i * window.dilation - window.low) // spread
            for i in range(window.size)
            if (phase + i * window.dilation - window.low) % spread == 0
        ]
        for phase in range(spread)
    ]
    every = [shift for found in shifts for shift in found]
    low, high = -min(every), max(every) + steps - window.extent
    pads[axis] = (low, high, 0)
    x = lax.pad(x, zero, pads)
    phases = [
        functools.reduce(
            lax.add,
            (lax.slice_in_dim(x, low + i, low + i + steps, axis=axis) for i in found),
            jnp.zeros((*x.shape[:axis], steps, *x.shape[axis + 1 :]), x.dtype),
        )
        for found in shifts
    ]
    y = jnp.stack(phases, axis + 1)
    y = y.reshape(*y.shape[:axis], steps * spread, *y.shape[axis + 2 :])
    return lax.slice_in_dim(y, 0, window.out, axis=axis)


def _lowest(dtype: Any) -> Any:
    """What no number is below; some 8-bit floating types have no infinity."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.iinfo(dtype).min
    return -np.inf if np.isinf(np.array(np.inf, dtype)) else jnp.finfo(dtype).min


def max_and_place(
    x: Array, place: Array, axis: int, window: Window
) -> tuple[Array, Array]:
    """The maximum of each window, and what `place`, of x's shape, has there."""
    _, chosen = first_max(lax.stop_gradient(x), axis, window)
    return tuple(pick_p(v, chosen, axis=axis, window=window) for v in (x, place))


def first_max(x: Array, axis: int, window: Window) -> tuple[Array, Array]:
    """The maximum of each window, and which of its elements that is."""
    lowest = _lowest(x.dtype)
    kind = np.uint8 if window.size < 256 else np.int32
    x = _pad(x, axis, window, lowest)
    # Windows without a number above the lowest choose their first that is no padding.
    missing = window.low - np.arange(window.out) * window.stride
    first = np.maximum(-(-missing // window.dilation), 0).astype(kind)
    value = _slice(x, axis, window, 0)
    shape = [1] * x.ndim
    shape[axis] = window.out
    value = jnp.full_like(value, lowest)
    chosen = jnp.broadcast_to(first.reshape(shape), value.shape)
    for i in range(window.size):
        candidate = _slice(x, axis, window, i)
        better = (candidate > value) | (candidate != candidate)
        value = jnp.where(better, candidate, value)
        chosen = jnp.where(better, kind(i), chosen)
    return value, chosen


def _pad(x: Array, axis: int, window: Window, value: float) -> Array:
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (window.low, window.high, 0)
    return lax.pad(x, np.array(value, x.dtype)[()], config)


def _slice(x: Array, axis: int, window: Window, i: int) -> Array:
    """Element i of each window."""
    start = i * window.dilation
    stop = start + (window.out - 1) * window.stride + 1
    return lax.slice_in_dim(x, start, stop, window.stride, axis)


def _pick(x: Array, chosen: Array, *, axis: int, window: Window) -> Array:
    """The chosen element of each window."""
    x = _pad(x, axis, window, 0)
    y = jnp.zeros(chosen.shape, x.dtype)
    for i in range(window.size):
        y = jnp.where(chosen == i, _slice(x, axis, window, i), y)
    return y


def _spread(ct: Array, chosen: Array, *, axis: int, window: Window) -> Array:
    """The transpose of `_pick`: each number goes to where its window chose.

    Elements i * dilation = a * stride + phase of windows j lie at (j + a) * stride +
    phase: for every phase there is a sum of shifted arrays, and no scattering.
    """
    k, s, d = window.size, window.stride, window.dilation
    length = window.low + window.extent + window.high
    steps = -(-length // s)
    reach = (k - 1) * d // s
    pads = [(0, 0, 0)] * ct.ndim
    pads[axis] = (reach, max(steps - window.out, 0), 0)
    ct = lax.pad(ct, np.zeros((), ct.dtype)[()], pads)
    nowhere = np.array(np.iinfo(chosen.dtype).max, chosen.dtype)[()]
    chosen = lax.pad(chosen, nowhere, pads)
    phases = []
    for phase in range(s):
        total = jnp.zeros((*ct.shape[:axis], steps, *ct.shape[axis + 1 :]), ct.dtype)
        for i in range(k):
            if i * d % s == phase:
                start = reach - i * d // s
                moved, who = (
                    lax.slice_in_dim(v, start, start + steps, axis=axis)
                    for v in (ct, chosen)
                )
                total += jnp.where(who == i, moved, jnp.zeros_like(moved))
        phases.append(total)
    if s == 1:
        y = phases[0]
    else:
        y = jnp.stack(phases, axis + 1)
        y = y.reshape(*y.shape[:axis], steps * s, *y.shape[axis + 2 :])
    beyond = window.low + window.extent - y.shape[axis]
    pads[axis] = (-window.low, beyond, 0)
    return lax.pad(y, np.zeros((), y.dtype)[()], pads)


def _linear(name: str, function: Any, transposed: Any) -> Any:
    """The primitive of a function that is linear in its first operand."""

    def transpose(ct: Any, x: Any, chosen: Array, **params: Any) -> list[Any]:
        known = ct if type(ct) is ad.Zero else transposed()(ct, chosen, **params)
        return [known, None]

    def batch(
        operands: Sequence[Array], dims: Sequence[Any], *, axis: int, window: Window
    ) -> tuple[Array, int]:
        return apply(*in_front(operands, dims), axis=axis + 1, window=window), 0

    apply = define(Op(name=name, lax=function, transpose=transpose, batch=batch))
    return apply


pick_p: Any = _linear("pool_pick", _pick, lambda: spread_p)
spread_p: Any = _linear("pool_spread", _spread, lambda: pick_p)
