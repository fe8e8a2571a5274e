# SPDX-License-Identifier: Apache-2.0
"""New rows of a cache, each sequence at its own position, written where it lies."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_layout import _backends
from jax_layout.attention.paged import PACKED, check_tables, update_paged_cache_p
from jax_layout.choices import Work
from jax_layout.op import Kernel, Op, define, in_front, jvp_of
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

    if order is not None:
        front, axis = order.find("B"), order.find("T") - order.find("B")
        if len(set(order)) != len(order) or front < 0 or axis <= 0:
            fail(f"order must be different letters, T behind B, got {order!r}")
        if not len(order) == cache.ndim == new.ndim:
            fail(
                f"order must name the axes of cache and new, got {order!r}, "
                f"{cache.shape} and {new.shape}"
            )
        if cache.shape[:front] != new.shape[:front]:
            fail(
                f"new must be shaped as cache but for axes B and T of {order!r}, got "
                f"{new.shape} and {cache.shape}"
            )
        update = functools.partial(
            update_cache, axis=axis, mode=mode, block_tables=block_tables
        )
        for _ in range(front):
            update = jax.vmap(update, (0, 0, None))
        return update(cache, new, position)

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
    given, axis = axis, axis + cache.ndim if axis < 0 else axis
    if not 0 < axis < cache.ndim:
        fail(f"axis must be one of cache's but the first, got {given}")
    paged = block_tables is not None
    want = (*cache.shape[paged:axis], *cache.shape[axis + 1 :])
    have = (*new.shape[paged:axis], *new.shape[axis + 1 :])
    if new.ndim != cache.ndim or want != have:
        fail(
            f"new must be shaped as cache but for axis {axis}, got {new.shape} and "
            f"{cache.shape}"
        )
    if position.shape not in ((), new.shape[:1]):
        fail(f"position must have shape {new.shape[:1]} or (), got {position.shape}")
    tables = None if block_tables is None else jnp.asarray(block_tables)
    if tables is not None:
        check_tables("update_cache", tables, new.shape[0])
    if mode == "error":
        _check_places(position, cache, new.shape[axis], axis, tables)
    if position.dtype.itemsize > 4:  # what is out of range stays so
        bounds = np.iinfo(np.int32)
        position = jnp.clip(position, bounds.min, bounds.max)
    position = jnp.broadcast_to(position.astype(np.int32), new.shape[:1])
    strict = mode == "error"
    updated: Array
    if tables is None:
        updated = update_cache_p(cache, new, position, axis=axis, strict=strict)
    else:
        updated = update_paged_cache_p(
            cache, new, position, tables, axis=axis, strict=strict
        )
    return updated


def _check_places(
    position: Array, cache: Array, count: int, axis: int, tables: Array | None
) -> None:
    """Of positions and tables that are known; others the kernel checks."""
    if any(isinstance(x, jax.core.Tracer) for x in (position, tables)):
        if jax.default_backend() != "cpu" or not _backends.available("cpu"):
            raise ValueError(
                'update_cache: mode "error" needs a kernel that checks positions in '
                "a program, and there is none here."
            )
        return
    places, rows = np.asarray(position), cache.shape[axis]
    if tables is not None:
        rows *= tables.shape[1]
    if places.size and (places.min() < 0 or places.max() + count > rows):
        raise ValueError(
            f"update_cache: position must leave room for {count} rows of {rows}, got "
            f"{places.tolist()}."
        )
    if tables is None or not count:
        return
    first, last = places // cache.shape[axis], (places + count - 1) // cache.shape[axis]
    at = np.arange(tables.shape[1])
    used = (at >= first.reshape(-1, 1)) & (at <= last.reshape(-1, 1))
    blocks = np.asarray(tables)[np.broadcast_to(used, tables.shape)]
    if blocks.size and (blocks.min() < 0 or blocks.max() >= cache.shape[0]):
        raise ValueError(
            f"update_cache: block_tables must name blocks below {cache.shape[0]} where "
            f"rows go, got {np.asarray(tables).tolist()}."
        )


def _lax(
    cache: Array, new: Array, position: Array, *, axis: int, strict: bool
) -> Array:
    rows = cache.shape[axis]

    def place(cache: Array, new: Array, at: Array) -> Array:
        to = at + jnp.arange(new.shape[axis - 1], dtype=at.dtype)
        # A negative index would count from the end.
        to = jnp.where(to < 0, rows, to)
        index = (*(slice(None),) * (axis - 1), to)
        return cache.at[index].set(new, mode="drop")

    placed: Array = jax.vmap(place)(cache, new, position)
    return placed


def _kernel(
    platform: str, cache: Any, new: Any, position: Any, *, axis: int, strict: bool
) -> Kernel | None:
    if cache.size == 0 or new.size == 0 or cache.dtype.name in PACKED:
        return None
    inner = math.prod(cache.shape[axis + 1 :]) * cache.dtype.itemsize
    sizes = (math.prod(cache.shape[:axis]), cache.shape[axis], new.shape[axis], inner)
    return Kernel(
        {"axis": np.int64(axis), "strict": strict},
        aliases={0: 0},
        work=None if strict else Work("update_cache", sizes),
    )


def _batch(
    operands: Sequence[Array], dims: Sequence[Any], *, axis: int, strict: bool
) -> tuple[Array, int]:
    """One batch of the two."""
    cache, new, position = in_front(operands, dims)
    count, batch = cache.shape[:2]
    merged = (x.reshape(count * batch, *x.shape[2:]) for x in (cache, new, position))
    out = update_cache_p(*merged, axis=axis, strict=strict)
    return out.reshape(cache.shape), 0


def _sharding(cache: Any, new: Any, position: Any, *, axis: int, strict: bool) -> str:
    names = ["b", *(f"a{i}" for i in range(1, cache.ndim))]
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
