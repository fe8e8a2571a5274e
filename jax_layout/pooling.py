# SPDX-License-Identifier: Apache-2.0
"""Pooling in one, two or three dimensions, in the memory format of the input.

A window's maximum is the maximum of its rows' maxima, and a sum goes the same way:
one spatial axis after the other, at a cost of k + k instead of k * k.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad
from jax.typing import ArrayLike

from jax_layout.memory_format import formatted, store
from jax_layout.op import Op, define
from jax_layout.physical import array, floating, sizes, whole, wide

# The gradient of longer windows is left to XLA's own, one pass for any length.
_MAX_UNROLLED = 32


@dataclasses.dataclass(frozen=True)
class _Window:
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
    def disjoint(self) -> bool:
        return self.stride == self.size and not self.low and self.high <= 0


@formatted
def max_pool(
    x: ArrayLike,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Array:
    """The maximum of each window; NaN if there is one in it.

    Args:
      x: shape `(N, C, *spatial)` with one to three spatial dimensions. A kernel_size
        that is a tuple of as many numbers as x has dimensions but one tells that x
        is unbatched, `(C, *spatial)`.
      kernel_size: extent of a window, a number or one per spatial dimension.
      stride: from window to window; kernel_size if left out.
      padding: on either side, with values below all others; half a window at most.
      dilation: from element to element of a window.
      ceil_mode: whether a last window that does not fit counts, as far as it reaches.

    Returns:
      shape `(N, C, *spatial)`, dtype and memory format of `x`. The gradient goes to
      the first maximum of a window.

    Raises:
      TypeError: if x is no array of real numbers.
      ValueError: if shapes or numbers do not fit.

    Source: `torch.nn.functional.max_pool1d`, `max_pool2d` and `max_pool3d`.

    >>> max_pool(jnp.arange(16.0).reshape(1, 1, 4, 4), 2)[0, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    x = array("max_pool", x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or x.dtype == bool:
        raise TypeError(f"max_pool: x must hold real numbers, got {x.dtype}.")
    dims, windows = _windows(
        "max_pool", x, kernel_size, stride, padding, dilation, ceil_mode
    )
    physical, format = whole(x, dims)
    # The last axis first: of equal elements the first in row-major order is chosen.
    for dim, window in reversed(list(zip(dims, windows, strict=True))):
        axis = format.axes(dim)[0]
        if window.size > _MAX_UNROLLED or jnp.issubdtype(x.dtype, jnp.integer):
            physical = _reduce(physical, axis, window, lax.max)
        else:
            physical = _max_along(physical, axis, window)
    return store(physical, format)


@formatted
def avg_pool(
    x: ArrayLike,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    """The mean of each window.

    Args:
      x: shape `(N, C, *spatial)`, or `(C, *spatial)`: see `max_pool`.
      kernel_size: extent of a window, a number or one per spatial dimension.
      stride: from window to window; kernel_size if left out.
      padding: zeros on either side; half a window at most.
      ceil_mode: whether a last window that does not fit counts, as far as it reaches.
      count_include_pad: whether the zeros count as elements.
      divisor_override: what to divide the sums by instead of their elements' number.

    Returns:
      shape `(N, C, *spatial)`, dtype and memory format of `x`; summed in float32 for
      16-bit types.

    Raises:
      TypeError: if x is no floating-point array.
      ValueError: if shapes or numbers do not fit.

    Source: `torch.nn.functional.avg_pool1d`, `avg_pool2d` and `avg_pool3d`.

    >>> avg_pool(jnp.arange(16.0).reshape(1, 1, 4, 4), 2)[0, 0].tolist()
    [[2.5, 4.5], [10.5, 12.5]]
    """
    x = floating("avg_pool", x)
    dims, windows = _windows("avg_pool", x, kernel_size, stride, padding, 1, ceil_mode)
    if divisor_override == 0:
        raise ValueError("avg_pool: divisor_override must not be 0.")
    physical, format = whole(x, dims)
    total = physical.astype(wide(x.dtype))
    for dim, window in zip(dims, windows, strict=True):
        total = _sum_along(total, format.axes(dim)[0], window)
    if divisor_override is not None:
        return store((total / divisor_override).astype(x.dtype), format)
    whole_windows = 1
    for dim, window in zip(dims, windows, strict=True):
        counts = _counts(window, count_include_pad)
        if counts.size and (counts == counts[0]).all():
            whole_windows *= int(counts[0])
        else:
            shape = [1] * physical.ndim
            shape[format.axes(dim)[0]] = counts.size
            total = total / counts.reshape(shape).astype(total.dtype)
    return store((total / whole_windows).astype(x.dtype), format)


@formatted
def adaptive_avg_pool(
    x: ArrayLike, output_size: int | None | Sequence[int | None]
) -> Array:
    """The mean of each window, of windows that make a result of a given size.

    Args:
      x: shape `(N, C, *spatial)`, or `(C, *spatial)`: see `max_pool`.
      output_size: a number, or one per spatial dimension; None keeps the extent.

    Returns:
      shape `(N, C, *output_size)`, dtype and memory format of `x`; summed in float32
      for 16-bit types.

    Raises:
      TypeError: if x is no floating-point array.
      ValueError: if sizes do not fit.

    Source: `torch.nn.functional.adaptive_avg_pool1d` to `adaptive_avg_pool3d`.

    >>> adaptive_avg_pool(jnp.arange(6.0).reshape(1, 1, 6), 4)[0, 0].tolist()
    [0.5, 1.5, 3.5, 4.5]
    """
    x = floating("adaptive_avg_pool", x)
    dims, out = _output_size("adaptive_avg_pool", x, output_size)
    physical, format = whole(x, dims)
    y = physical.astype(wide(x.dtype))
    for dim, size in zip(dims, out, strict=True):
        y = _adaptive(y, format.axes(dim)[0], size, jnp.mean)
    return store(y.astype(x.dtype), format)


@formatted
def adaptive_max_pool(
    x: ArrayLike, output_size: int | None | Sequence[int | None]
) -> Array:
    """The maximum of each window, of windows that make a result of a given size.

    Args:
      x: shape `(N, C, *spatial)`, or `(C, *spatial)`: see `max_pool`.
      output_size: a number, or one per spatial dimension; None keeps the extent.

    Returns:
      shape `(N, C, *output_size)`, dtype and memory format of `x`. The gradient goes
      to the first maximum of a window.

    Raises:
      TypeError: if x is no floating-point array.
      ValueError: if sizes do not fit.

    Source: `torch.nn.functional.adaptive_max_pool1d` to `adaptive_max_pool3d`.

    >>> adaptive_max_pool(jnp.arange(6.0).reshape(1, 1, 6), 4)[0, 0].tolist()
    [1.0, 2.0, 4.0, 5.0]
    """
    x = floating("adaptive_max_pool", x)
    dims, out = _output_size("adaptive_max_pool", x, output_size)
    physical, format = whole(x, dims)
    for dim, size in reversed(list(zip(dims, out, strict=True))):
        physical = _adaptive(physical, format.axes(dim)[0], size, _first_of)
    return store(physical, format)


def _spatial(name: str, x: Array, sizes: Any) -> list[int]:
    """The spatial dimensions: all but N and C, or but C for as many sizes."""
    given = x.ndim - 2 if np.ndim(sizes) == 0 else len(sizes)
    if given not in (1, 2, 3) or x.ndim - given not in (1, 2):
        raise ValueError(
            f"{name}: x must have one to three spatial dimensions after N and C, or "
            f"after C, got shape {x.shape} and sizes {sizes}."
        )
    return list(range(x.ndim - given, x.ndim))


def _windows(
    name: str,
    x: Array,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
) -> tuple[list[int], list[_Window]]:
    dims = _spatial(name, x, kernel_size)
    rank = len(dims)
    kernel = sizes(name, "kernel_size", kernel_size, rank, 1)
    strides = kernel if stride is None else sizes(name, "stride", stride, rank, 1)
    pads = sizes(name, "padding", padding, rank, 0)
    dilations = sizes(name, "dilation", dilation, rank, 1)
    windows = []
    for dim, k, s, p, d in zip(dims, kernel, strides, pads, dilations, strict=True):
        n, reach = x.shape[dim], (k - 1) * d + 1
        if p > reach // 2:
            raise ValueError(
                f"{name}: padding must be half a window at most, got padding={p} for "
                f"kernel_size={k} and dilation={d}."
            )
        room = n + 2 * p - reach
        if room < 0:
            raise ValueError(
                f"{name}: a window must fit into the padded input, got kernel_size={k}"
                f", dilation={d} and padding={p} for x of shape {x.shape}."
            )
        out = -(-room // s) + 1 if ceil_mode else room // s + 1
        if (out - 1) * s >= n + p:  # the last window must not start in the padding
            out -= 1
        high = (out - 1) * s + reach - p - n
        windows.append(_Window(k, s, d, p, high, p, n, out))
    return dims, windows


def _reduce(x: Array, axis: int, window: _Window, operator: Any) -> Array:
    """One operator over the windows along one axis."""
    unit = 0 if operator is lax.add else _lowest(x.dtype)
    inside = not window.low and window.high <= 0
    if inside and window.size <= min(window.stride, _MAX_UNROLLED):
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


def _lowest(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _sum_along(x: Array, axis: int, window: _Window) -> Array:
    if window.disjoint and window.out:
        # The gradient of a reshape and a sum is a broadcast.
        used = window.out * window.size
        x = lax.slice_in_dim(x, 0, used, axis=axis)
        shape = (*x.shape[:axis], window.out, window.size, *x.shape[axis + 1 :])
        return x.reshape(shape).sum(axis + 1)
    return _reduce(x, axis, window, lax.add)


def _counts(window: _Window, include_pad: bool) -> np.ndarray:
    """How many elements of the input, padded or not, the windows hold."""
    start = np.arange(window.out) * window.stride - window.low
    border = window.padding if include_pad else 0
    stop = np.minimum(start + window.size, window.extent + border)
    return stop - np.maximum(start, -border)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _max_along(x: Array, axis: int, window: _Window) -> Array:
    return _reduce(x, axis, window, lax.max)


@_max_along.defjvp
def _max_along_jvp(
    axis: int, window: _Window, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    y, chosen = _first_max(x, axis, window)
    return y, pick_p(tangent, chosen, axis=axis, window=window)


def _first_max(x: Array, axis: int, window: _Window) -> tuple[Array, Array]:
    """The maximum of each window, and which of its elements that is."""
    x = _pad(x, axis, window, -np.inf)
    # Windows without a number above -inf choose their first that is no padding.
    missing = window.low - np.arange(window.out) * window.stride
    first = np.maximum(-(-missing // window.dilation), 0).astype(np.uint8)
    value = _slice(x, axis, window, 0)
    shape = [1] * x.ndim
    shape[axis] = window.out
    value = jnp.full_like(value, -np.inf)
    chosen = jnp.broadcast_to(first.reshape(shape), value.shape)
    for i in range(window.size):
        candidate = _slice(x, axis, window, i)
        better = (candidate > value) | (candidate != candidate)
        value = jnp.where(better, candidate, value)
        chosen = jnp.where(better, np.uint8(i), chosen)
    return value, chosen


def _pad(x: Array, axis: int, window: _Window, value: float) -> Array:
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (window.low, window.high, 0)
    return lax.pad(x, np.array(value, x.dtype)[()], config)


def _slice(x: Array, axis: int, window: _Window, i: int) -> Array:
    """Element i of each window."""
    start = i * window.dilation
    stop = start + (window.out - 1) * window.stride + 1
    return lax.slice_in_dim(x, start, stop, window.stride, axis)


def _pick(x: Array, chosen: Array, *, axis: int, window: _Window) -> Array:
    """The chosen element of each window."""
    x = _pad(x, axis, window, 0)
    y = jnp.zeros(chosen.shape, x.dtype)
    for i in range(window.size):
        y = jnp.where(chosen == i, _slice(x, axis, window, i), y)
    return y


def _spread(ct: Array, chosen: Array, *, axis: int, window: _Window) -> Array:
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
    chosen = lax.pad(chosen, np.uint8(255), pads)
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
        operands: Sequence[Array], dims: Sequence[Any], *, axis: int, window: _Window
    ) -> tuple[Array, int]:
        size = next(
            v.shape[d] for v, d in zip(operands, dims, strict=True) if d is not None
        )
        x, chosen = (
            jnp.broadcast_to(v, (size, *v.shape)) if d is None else jnp.moveaxis(v, d, 0)
            for v, d in zip(operands, dims, strict=True)
        )
        return apply(x, chosen, axis=axis + 1, window=window), 0

    apply = define(Op(name=name, lax=function, transpose=transpose, batch=batch))
    return apply


pick_p = _linear("pool_pick", _pick, lambda: spread_p)
spread_p = _linear("pool_spread", _spread, lambda: pick_p)


def _output_size(name: str, x: Array, given: Any) -> tuple[list[int], tuple[int, ...]]:
    dims = _spatial(name, x, given)
    if np.ndim(given) == 0:
        given = (given,) * len(dims)
    wanted = [x.shape[d] if n is None else n for d, n in zip(dims, given, strict=True)]
    if any(x.shape[dim] == 0 for dim in dims):
        raise ValueError(
            f"{name}: spatial dimensions must not be empty, got shape {x.shape}."
        )
    return dims, sizes(name, "output_size", wanted, len(dims), 0)


def _adaptive(x: Array, axis: int, out: int, reduce: Any) -> Array:
    """Reduces windows [floor(j n / out), ceil((j + 1) n / out)) along an axis."""
    n = x.shape[axis]
    if out and n % out == 0:
        shape = (*x.shape[:axis], out, n // out, *x.shape[axis + 1 :])
        return reduce(x.reshape(shape), axis=axis + 1)
    if not out:
        return lax.slice_in_dim(x, 0, 0, axis=axis)
    parts = [
        reduce(
            lax.slice_in_dim(x, j * n // out, -(-(j + 1) * n // out), axis=axis),
            axis=axis,
            keepdims=True,
        )
        for j in range(out)
    ]
    return lax.concatenate(parts, axis)


def _first_of(x: Array, axis: int, keepdims: bool = False) -> Array:
    """The maximum, with its gradient at the first of equal elements."""
    chosen = jnp.argmax(lax.stop_gradient(x), axis, keepdims=True)
    here = lax.broadcasted_iota(chosen.dtype, x.shape, axis) == chosen
    return jnp.where(here, x, jnp.zeros_like(x)).sum(axis, keepdims=keepdims)
