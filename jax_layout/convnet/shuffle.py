# SPDX-License-Identifier: Apache-2.0
"""Operators that only move elements, in the memory format of their input."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Literal

from jax import Array
from jax.typing import ArrayLike

from jax_layout.formats.memory_format import convert
from jax_layout.formats.physical import array, integer, unblocked, whole
from jax_layout.formats.tags import formatted, store, stored
from jax_layout.plain import jnp, lax

Mode = Literal["constant", "reflect", "replicate", "circular"]
_NUMPY_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@formatted
def pad(
    x: ArrayLike, pad: Sequence[int], mode: Mode = "constant", value: float = 0
) -> Array:
    """Adds elements at the borders.

    Args:
      x: any shape and dtype.
      pad: two numbers per dimension, before and after, from the last dimension on:
        `(left, right, top, bottom)`. Negative ones take elements away.
      mode: what is added: "constant", `value`; "reflect", what lies as far inside,
        without the border; "replicate", the border; "circular", the other side.
      value: of "constant".

    Returns:
      dtype and memory format of `x`.

    Raises:
      TypeError: if x is no array.
      ValueError: if the numbers do not fit the shape or the mode.

    Source: `torch.nn.functional.pad`.

    >>> pad(jnp.array([1, 2, 3]), (2, 1), "reflect").tolist()
    [3, 2, 1, 2, 3, 2]
    """
    x = array("pad", x)
    try:
        pad = [operator.index(n) for n in pad]
    except TypeError:
        raise TypeError(
            "pad: pad must hold two integers per dimension, from the last on, "
            f"got {pad!r}."
        ) from None
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ValueError(
            "pad: pad must hold two numbers per dimension, from the last on, "
            f"got {tuple(pad)} for x of shape {x.shape}."
        )
    if mode != "constant" and mode not in _NUMPY_MODES:
        raise ValueError(
            "pad: mode must be 'constant', 'reflect', 'replicate' or 'circular', "
            f"got {mode!r}."
        )
    widths = {
        x.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1])
        for i in range(len(pad) // 2)
        if pad[2 * i] or pad[2 * i + 1]
    }
    for dim, (low, high) in widths.items():
        most = {
            "constant": math.inf,
            "reflect": x.shape[dim] - 1,
            "replicate": math.inf if x.shape[dim] else 0,
            "circular": x.shape[dim],
        }[mode]
        if max(low, high) > most or x.shape[dim] + min(low, 0) + min(high, 0) < 0:
            raise ValueError(
                f"pad: {mode} padding of dimension {dim} by {(low, high)} does not fit "
                f"shape {x.shape}."
            )
    physical, format = whole(x, list(widths))
    config = [(0, 0, 0)] * physical.ndim
    for dim, (low, high) in widths.items():
        config[format.axes(dim)[0]] = (low, high, 0)
    if mode == "constant":
        fill = jnp.asarray(value, physical.dtype)
        return store(lax.pad(physical, fill, config), format)
    added = [(max(low, 0), max(high, 0)) for low, high, _ in config]
    taken = [(min(low, 0), min(high, 0), 0) for low, high, _ in config]
    zero = jnp.zeros((), physical.dtype)
    if mode == "circular":  # around what is left
        physical = jnp.pad(lax.pad(physical, zero, taken), added, mode="wrap")
    else:
        physical = jnp.pad(physical, added, mode=_NUMPY_MODES[mode])
        physical = lax.pad(physical, zero, taken)
    return store(physical, format)


@formatted
def pixel_shuffle(x: ArrayLike, upscale_factor: int) -> Array:
    """Moves groups of r * r channels to squares of r by r pixels.

    Args:
      x: shape `(N, C * r**2, H, W)`, any dtype.
      upscale_factor: r.

    Returns:
      shape `(N, C, H * r, W * r)`, dtype and memory format of `x`; moved once.

    Raises:
      TypeError: if x is no array.
      ValueError: if x has no four dimensions, or C is not divisible by r**2.

    Source: `torch.nn.functional.pixel_shuffle`.

    >>> pixel_shuffle(jnp.arange(4).reshape(1, 4, 1, 1), 2)[0, 0].tolist()
    [[0, 1], [2, 3]]
    """
    x = _image("pixel_shuffle", x)
    r = integer("pixel_shuffle", "upscale_factor", upscale_factor, 1)
    if x.shape[1] % (r * r):
        raise ValueError(
            "pixel_shuffle: channels must be divisible by upscale_factor squared, "
            f"got {x.shape[1]} channels and upscale_factor={r}."
        )
    return _regroup(x, [(1, r), (1, r)], (0, 1, 4, 2, 5, 3), [(2, r), (3, r)])


@formatted
def pixel_unshuffle(x: ArrayLike, downscale_factor: int) -> Array:
    """The inverse of `pixel_shuffle`.

    Args:
      x: shape `(N, C, H * r, W * r)`, any dtype.
      downscale_factor: r.

    Returns:
      shape `(N, C * r**2, H, W)`, dtype and memory format of `x`; moved once.

    Raises:
      TypeError: if x is no array.
      ValueError: if x has no four dimensions, or H or W is not divisible by r.

    Source: `torch.nn.functional.pixel_unshuffle`.

    >>> pixel_unshuffle(jnp.arange(4).reshape(1, 1, 2, 2), 2).ravel().tolist()
    [0, 1, 2, 3]
    """
    x = _image("pixel_unshuffle", x)
    r = integer("pixel_unshuffle", "downscale_factor", downscale_factor, 1)
    if x.shape[2] % r or x.shape[3] % r:
        raise ValueError(
            "pixel_unshuffle: height and width must be divisible by downscale_factor, "
            f"got shape {x.shape} and downscale_factor={r}."
        )
    return _regroup(x, [(3, r), (2, r)], (0, 1, 3, 5, 2, 4), [(1, r), (1, r)])


@formatted
def channel_shuffle(x: ArrayLike, groups: int) -> Array:
    """Interleaves groups of channels: channel g * (C / groups) + i to i * groups + g.

    Args:
      x: shape `(N, C, *spatial)`, any dtype.
      groups: a divisor of C.

    Returns:
      shape, dtype and memory format of `x`; moved once.

    Raises:
      TypeError: if x is no array.
      ValueError: if C is not divisible by groups.

    Source: `torch.nn.functional.channel_shuffle`.

    >>> channel_shuffle(jnp.arange(4).reshape(1, 4, 1), 2).ravel().tolist()
    [0, 2, 1, 3]
    """
    x = array("channel_shuffle", x)
    groups = integer("channel_shuffle", "groups", groups, 1)
    if x.ndim < 2:
        raise ValueError(
            f"channel_shuffle: x must have shape (N, C, *spatial), got {x.shape}."
        )
    if x.shape[1] % groups:
        raise ValueError(
            "channel_shuffle: channels must be divisible by groups, "
            f"got {x.shape[1]} channels and groups={groups}."
        )
    order = (0, 2, 1, *range(3, x.ndim + 1))
    return _regroup(x, [(1, x.shape[1] // groups)], order, [(1, groups)])


@formatted
def concatenate(arrays: Sequence[ArrayLike], dim: int = 0) -> Array:
    """Joins arrays along a dimension.

    Args:
      arrays: of one dtype, and of shapes that differ in that dimension alone.
      dim: logical dimension, which may be negative.

    Returns:
      the memory format is that of the largest array that is not row-major, if there
      is one, and of the first among equals; the others are brought to it once.

    Raises:
      TypeError: if these are no arrays, or of several dtypes.
      ValueError: if there are none, or shapes do not fit.

    Source: `torch.cat`.

    >>> concatenate([jnp.zeros((2, 3, 4, 4)), jnp.ones((2, 1, 4, 4))], 1).shape
    (2, 4, 4, 4)
    """
    values = [array("concatenate", x, "every operand") for x in arrays]
    shapes = [x.shape for x in values]
    dim = integer("concatenate", "dim", dim)
    if not values or not -values[0].ndim <= dim < values[0].ndim:
        raise ValueError(
            "concatenate: there must be arrays and dim must be one of their "
            f"dimensions, got shapes {shapes} and dim={dim}."
        )
    dim %= values[0].ndim
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ValueError(
            f"concatenate: shapes must agree outside of dimension {dim}, got {shapes}."
        )
    dtypes = sorted({x.dtype.name for x in values})
    if len(dtypes) > 1:
        raise TypeError(f"concatenate: dtypes must agree, got {', '.join(dtypes)}.")
    both = [stored(x) for x in values]
    own = [
        (x.size, f) for x, (_, f) in zip(values, both, strict=True) if not f.row_major
    ]
    format = max(own, key=lambda pair: pair[0])[1] if own else both[0][1]
    block = math.prod(format.blocks[dim])
    if any(shape[dim] % block for shape in shapes):
        format = unblocked(format, [dim])
    parts = [convert(physical, source, format) for physical, source in both]
    return store(lax.concatenate(parts, format.axes(dim)[0]), format)


def _image(name: str, x: ArrayLike) -> Array:
    x = array(name, x)
    if x.ndim != 4:
        raise ValueError(f"{name}: x must have shape (N, C, H, W), got {x.shape}.")
    return x


def _regroup(
    x: Array,
    splits: Sequence[tuple[int, int]],
    order: Sequence[int],
    merges: Sequence[tuple[int, int]],
) -> Array:
    """A reshape, a transpose and a reshape, as one move in memory at most.

    Args:
      x: logical value.
      splits: dimensions, each with the size of the inner part it gets.
      order: the transpose.
      merges: dimensions, each with the size of its successor, which joins it.
    """
    physical, format = stored(x)
    separate = list(x.shape)
    for dim, inner in splits:
        separate[dim : dim + 1] = [separate[dim] // inner, inner]
    shape = [separate[axis] for axis in order]
    for dim, inner in merges:
        shape[dim : dim + 2] = [shape[dim] * inner]
    target = format
    blocks = map(math.prod, format.blocks)
    if any(size % block for size, block in zip(shape, blocks, strict=True)):
        target = unblocked(format, range(x.ndim))
    try:
        moved = format
        for dim, inner in splits:
            moved = moved.split(dim, inner)
    except ValueError:  # a cut falls inside a block: by way of row-major order
        y = x.reshape(separate).transpose(order).reshape(shape)
        return store(target.pack(y), target)
    moved = moved.transposed(order)
    for dim, inner in merges:
        moved = moved.merge(dim, inner)
    # The same memory, but for axes of size 1.
    physical = physical.reshape(moved.physical_shape(shape))
    return store(convert(physical, moved, target), target)
