# SPDX-License-Identifier: Apache-2.0
"""New rows of a cache, each sequence at its own position, written where it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_layout import _backends
from jax_layout.attention.paged import (
    PACKED,
    check_tables,
    fold,
    unfold,
    update_paged_cache_p,
)
from jax_layout.kernel import Kernel
from jax_layout.measured import Work
from jax_layout.op import Op, define, in_front, jvp_of
from jax_layout.plain import jnp

_MODES = ("drop", "error")


def update_cache(
    cache: ArrayLike,
    new: ArrayLike,
    position: ArrayLike,
    *,
    axis: int = 1,
    mode: str = "drop",
    block_tables: ArrayLike | None = None,
    order: str | None = None,
) -> Array:
    """The cache with new rows from a position on, which differs between sequences.

    Donated to `jax.jit`, or carried by a loop, the cache stays where it is: the call
    costs what the new rows are. Otherwise XLA copies it first.

    Args:
      cache: shape `(B, S, ...)`, such as keys of a batch of sequences.
      new: shape `(B, T, ...)`, dtype of `cache`: T rows for each sequence.
      position: integers, shape `(B,)` or `()`: where the first of them goes; the i-th
        goes i rows behind it.
      axis: that of the rows, S of `cache` and T of `new`; not the first.
      mode: what becomes of rows outside of the cache: "drop", nothing; "error", on
        CPUs, an error when the program runs.
      block_tables: int32, shape `(B, M)`, for a cache of shape `(blocks, R, ...)` that
        all sequences share (PagedAttention, arXiv:2309.06180): which blocks hold the R
        x M rows of a sequence, in their order. A row of a block that is not there, such
        as -1, is outside. Where two rows go to one place, either stays.
      order: a letter for each axis of `cache` and `new`, as `dot_product_attention` has
        them: "B" is their first axis above, "T" that of the rows, behind it; of others
        there may be any, also in front, such as of "NBTH". Instead of `axis`.

    Returns:
      shape and dtype of `cache`.

    Raises:
      TypeError: if dtypes do not fit.
      ValueError: if shapes or the axis do not, the mode is unknown or not to be had,
        or a position that is known already is an error.

    >>> cache = jnp.zeros((2, 4, 1))
    >>> update_cache(cache, jnp.ones((2, 1, 1)), jnp.array([0, 2]))[..., 0].tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    >>> tables = jnp.array([[2, 0]], np.int32)
    >>> update_cache(
    ...     jnp.zeros((3, 2, 1)), jnp.ones((1, 2, 1)), 1, block_tables=tables
    ... )[..., 0].tolist()
    [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """
    cache, new, position = (jnp.asarray(x) for x in (cache, new, position))

    def fail(what: str) -> None:
        raise ValueError(f"update_cache: {what}.")

    if new.dtype != cache.dtype:
        raise TypeError(
            f"update_cache: new must have the dtype of cache, got {new.dtype} and "
            f"{cache.dtype}."
        )
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise TypeError(
            f"update_cache: position must be integers, got {position.dtype}."
        )
    if mode not in _MODES:
        fail(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
    first, given = 0, axis
    if order is None:
        axis += cache.ndim if axis < 0 else 0
        if not 0 < axis < cache.ndim:
            fail(f"axis must be one of cache's but the first, got {given}")
    else:
        first, axis = order.find("B"), order.find("T")
        if len(set(order)) != len(order) or not 0 <= first < axis:
            fail(f"order must be different letters, T behind B, got {order!r}")
        if len(order) != cache.ndim:
            fail(f"order must name the axes of cache, got {order!r} and {cache.shape}")
    paged = block_tables is not None
    apart = (axis, first) if paged else (axis,)
    want, have = (
        [n for i, n in enumerate(x.shape) if i not in apart] for x in (cache, new)
    )
    if new.ndim != cache.ndim or want != have:
        fail(
            f"new must be shaped as cache but for axis {axis}, got {new.shape} and "
            f"{cache.shape}"
        )
    batch = new.shape[first : first + 1]
    if position.shape not in ((), batch):
        fail(f"position must have shape {batch} or (), got {position.shape}")
    tables = None if block_tables is None else jnp.asarray(block_tables)
    if tables is not None:
        check_tables("update_cache", tables, *batch)
    if mode == "error":
        count, rows, blocks = new.shape[axis], cache.shape[axis], cache.shape[first]
        _check_places(position, count, rows, blocks, tables)
    if position.dtype.itemsize > 4:  # what is out of range stays so
        bounds = np.iinfo(np.int32)
        position = jnp.clip(position, bounds.min, bounds.max)
    position = jnp.broadcast_to(position.astype(np.int32), batch)
    places: dict[str, Any] = {"first": first, "axis": axis, "strict": mode == "error"}
    updated: Array
    if tables is None:
        updated = update_cache_p(cache, new, position, **places)
    else:
        updated = update_paged_cache_p(cache, new, position, tables, **places)
    return updated


def _check_places(
    position: Array, count: int, rows: int, blocks: int, tables: Array | None
) -> None:
    """Of positions and tables that are known; others the kernel checks."""
    if any(isinstance(x, jax.core.Tracer) for x in (position, tables)):
        if jax.default_backend() != "cpu" or not _backends.available("cpu"):
            raise ValueError(
                'update_cache: mode "error" needs a kernel that checks positions in '
                "a program, and there is none here."
            )
        return
    places, room = np.asarray(position), rows
    if tables is not None:
        room *= tables.shape[1]
    if places.size and (places.min() < 0 or places.max() + count > room):
        raise ValueError(
            f"update_cache: position must leave room for {count} rows of {room}, got "
            f"{places.tolist()}."
        )
    if tables is None or not count:
        return
    first, last = places // rows, (places + count - 1) // rows
    at = np.arange(tables.shape[1])
    used = (at >= first.reshape(-1, 1)) & (at <= last.reshape(-1, 1))
    named = np.asarray(tables)[np.broadcast_to(used, tables.shape)]
    if named.size and (named.min() < 0 or named.max() >= blocks):
        raise ValueError(
            f"update_cache: block_tables must name blocks below {blocks} where "
            f"rows go, got {np.asarray(tables).tolist()}."
        )


def _lax(
    cache: Array, new: Array, position: Array, *, first: int, axis: int, strict: bool
) -> Array:
    rows = cache.shape[axis]

    def place(cache: Array, new: Array, at: Array) -> Array:
        to = at + jnp.arange(new.shape[axis - 1], dtype=at.dtype)
        # A negative index would count from the end.
        to = jnp.where(to < 0, rows, to)
        index = (*(slice(None),) * (axis - 1), to)
        return cache.at[index].set(new, mode="drop")

    placed: Array = jax.vmap(place, (first, first, 0), first)(cache, new, position)
    return placed


def _kernel(
    platform: str,
    cache: Any,
    new: Any,
    position: Any,
    *,
    first: int,
    axis: int,
    strict: bool,
) -> Kernel | None:
    if cache.size == 0 or new.size == 0 or cache.dtype.name in PACKED:
        return None
    inner = math.prod(cache.shape[axis + 1 :]) * cache.dtype.itemsize
    sizes = (math.prod(cache.shape[:axis]), cache.shape[axis], new.shape[axis], inner)
    return Kernel(
        {"first": np.int64(first), "axis": np.int64(axis), "strict": strict},
        aliases={0: 0},
        work=None if strict else Work("update_cache", sizes),
    )


def _batch(
    operands: Sequence[Array], dims: Sequence[Any], *, first: int, **params: Any
) -> tuple[Array, int]:
    """One batch of the two."""
    cache, new, position = in_front(operands, dims)
    flat = fold(cache, first), fold(new, first), position.reshape(-1)
    out = update_cache_p(*flat, first=first, **params)
    return unfold(out, cache.shape, first), first


def _sharding(
    cache: Any,
    new: Any,
    position: Any,
    *,
    first: int,
    axis: int,
    strict: bool,
) -> str:
    names = [f"a{i}" for i in range(cache.ndim)]
    names[first] = "b"
    of = [[*names[:axis], row, *names[axis + 1 :]] for row in ("S", "T")]
    whole, rows = (" ".join(axes) for axes in of)
    return f"{whole}, {rows}, b -> {whole}"


update_cache_p: Any = define(
    Op(
        name="update_cache",
        lax=_lax,
        kernel=_kernel,
        jvp=jvp_of(_lax),
        batch=_batch,
        sharding=_sharding,
        platforms=("cpu",),
    )
)
