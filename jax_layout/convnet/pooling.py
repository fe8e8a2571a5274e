# SPDX-License-Identifier: Apache-2.0
"""Pooling in one, two or three dimensions, in the memory format of the input.

Windows that overlap are a kernel's (pool_kernel.py). Elsewhere a window's maximum is
the maximum of its rows' maxima, and a sum goes the same way: one spatial axis after the
other, at a cost of k + k instead of k * k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_layout.convnet.pool_kernel import pool
from jax_layout.convnet.windows import Window, counts, max_and_place
from jax_layout.formats.memory_format import convert
from jax_layout.formats.physical import array, flags, floating, sizes, whole, wide
from jax_layout.formats.tags import formatted, store, stored
from jax_layout.plain import jnp, lax


@overload
def max_pool(
    x: ArrayLike,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
) -> Array: ...
@overload
def max_pool(
    x: ArrayLike,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    *,
    return_indices: Literal[True],
) -> tuple[Array, Array]: ...
@formatted
def max_pool(
    x: ArrayLike,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Array | tuple[Array, Array]:
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
      return_indices: whether to tell where the maxima are, for `max_unpool`.

    Returns:
      shape `(N, C, *spatial)`, dtype and memory format of `x`. The gradient goes to
      the first maximum of a window. With return_indices a tuple of that and of the
      indices of those maxima in the flattened spatial dimensions of x, int32, of the
      same shape and format.

    Raises:
      TypeError: if x is no array of real numbers.
      ValueError: if shapes or numbers do not fit.

    Source: `torch.nn.functional.max_pool1d`, `max_pool2d` and `max_pool3d`.

    >>> max_pool(jnp.arange(16.0).reshape(1, 1, 4, 4), 2)[0, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    x = array("max_pool", x)
    flags("max_pool", ceil_mode=ceil_mode, return_indices=return_indices)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or x.dtype == bool:
        raise TypeError(f"max_pool: x must hold real numbers, got {x.dtype}.")
    dims, windows = _windows(
        "max_pool", x, kernel_size, stride, padding, dilation, ceil_mode
    )
    physical, format = whole(x, dims)
    axes = [format.axes(dim)[0] for dim in dims]
    # The last axis first: of equal elements the first in row-major order is chosen.
    axes, windows = axes[::-1], windows[::-1]
    if not return_indices:
        return store(pool(physical, "max", axes, windows), format)
    place = jnp.zeros(physical.shape, np.int32)
    step = 1
    for axis, window in zip(axes, windows, strict=True):
        place += step * lax.broadcasted_iota(np.int32, physical.shape, axis)
        step *= window.extent
    for axis, window in zip(axes, windows, strict=True):
        physical, place = max_and_place(physical, place, axis, window)
    return store(physical, format), store(place, format)


@formatted
def max_unpool(
    x: ArrayLike,
    indices: ArrayLike,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    output_size: Sequence[int] | None = None,
) -> Array:
    """Puts maxima back where `max_pool` found them, among zeros.

    Args:
      x: shape `(N, C, *spatial)`, or `(C, *spatial)`: see `max_pool`.
      indices: integers of x's shape, in the flattened spatial dimensions of the
        result, as `max_pool` returns them. Those out of range are dropped. Of
        several elements with one index, one is kept, and has the gradient.
      kernel_size: as `max_pool` had it, as are all.
      stride: the same.
      padding: the same.
      output_size: the spatial dimensions of the result, or its whole shape, if it is
        not the smallest that pools to x's.

    Returns:
      shape `(N, C, *spatial)`, dtype and memory format of `x`.

    Raises:
      TypeError: if x is no array, or indices are no integers.
      ValueError: if shapes or numbers do not fit.

    Source: `torch.nn.functional.max_unpool1d`, `max_unpool2d` and `max_unpool3d`.

    >>> y, at = max_pool(jnp.arange(4.0).reshape(1, 1, 4), 2, return_indices=True)
    >>> max_unpool(y, at, 2)[0, 0].tolist()
    [0.0, 1.0, 0.0, 3.0]
    """
    name = "max_unpool"
    x, indices = array(name, x), array(name, indices, "indices")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"{name}: indices must be integers, got {indices.dtype}.")
    if indices.shape != x.shape:
        raise ValueError(
            f"{name}: indices must have the shape of x, got {indices.shape} for "
            f"{x.shape}."
        )
    dims, kernel, strides, pads = _kernel(name, x, kernel_size, stride, padding)
    least = [
        (x.shape[dim] - 1) * s - 2 * p + k
        for dim, k, s, p in zip(dims, kernel, strides, pads, strict=True)
    ]
    if output_size is None:
        output_size = least
    before = x.shape[: dims[0]]
    if np.ndim(output_size) and tuple(output_size[: -len(dims)]) == before:
        output_size = output_size[-len(dims) :]
    out = sizes(name, "output_size", output_size, len(dims), 1)
    if any(abs(a - b) >= s for a, b, s in zip(out, least, strides, strict=True)):
        raise ValueError(
            f"{name}: output_size must be within a stride of {tuple(least)}, "
            f"got {output_size} for x of shape {x.shape}."
        )
    physical, format = whole(x, dims)
    at = convert(*stored(indices), format)
    if at.dtype.itemsize < 4:
        at = at.astype(np.int32)  # which also holds what is out of range
    # Below 0 is out of range too, and not from the end.
    at = jnp.where(at < 0, math.prod(out), at)
    places: list[Any] = [
        lax.broadcasted_iota(np.int32, physical.shape, axis)
        for axis in range(physical.ndim)
    ]
    for dim, extent in reversed(list(zip(dims[1:], out[1:], strict=True))):
        at, places[format.axes(dim)[0]] = at // extent, at % extent
    places[format.axes(dims[0])[0]] = at
    zeros = jnp.zeros(format.physical_shape((*before, *out)), x.dtype)
    return store(zeros.at[tuple(places)].set(physical, mode="drop"), format)


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
    flags("avg_pool", ceil_mode=ceil_mode, count_include_pad=count_include_pad)
    dims, windows = _windows("avg_pool", x, kernel_size, stride, padding, 1, ceil_mode)
    if divisor_override == 0:
        raise ValueError("avg_pool: divisor_override must not be 0.")
    physical, format = whole(x, dims)
    axes = [format.axes(dim)[0] for dim in dims]
    total = pool(physical, "sum", axes, windows)
    if divisor_override is not None:
        return store((total / divisor_override).astype(x.dtype), format)
    divisor = 1
    for axis, window in zip(axes, windows, strict=True):
        held = counts(window, count_include_pad)
        if (held == held[0]).all():
            divisor *= int(held[0])
        else:
            shape = [1] * physical.ndim
            shape[axis] = held.size
            total = total / held.reshape(shape).astype(total.dtype)
    return store((total / divisor).astype(x.dtype), format)


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
) -> tuple[list[int], list[Window]]:
    dims, kernel, strides, pads = _kernel(
        name, x, kernel_size, stride, padding, dilation
    )
    dilations = sizes(name, "dilation", dilation, len(dims), 1)
    windows = []
    for dim, k, s, p, d in zip(dims, kernel, strides, pads, dilations, strict=True):
        n, reach = x.shape[dim], (k - 1) * d + 1
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
        windows.append(Window(k, s, d, p, high, p, n, out))
    return dims, windows


def _kernel(
    name: str,
    x: Array,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any = 1,
) -> tuple[list[int], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The spatial dimensions, and for each of them extent, stride and padding."""
    if np.ndim(kernel_size) and len(kernel_size) == 1 and x.ndim > 3:
        (kernel_size,) = kernel_size  # one for all dimensions
    dims = _spatial(name, x, kernel_size)
    rank = len(dims)
    kernel = sizes(name, "kernel_size", kernel_size, rank, 1)
    strides = kernel if stride is None else sizes(name, "stride", stride, rank, 1)
    pads = sizes(name, "padding", padding, rank, 0)
    dilations = sizes(name, "dilation", dilation, rank, 1)
    for k, p, d in zip(kernel, pads, dilations, strict=True):
        if p > ((k - 1) * d + 1) // 2:
            raise ValueError(
                f"{name}: padding must be half a window at most, got padding={p} for "
                f"kernel_size={k} and dilation={d}."
            )
    return dims, kernel, strides, pads


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
