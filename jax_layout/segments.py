# SPDX-License-Identifier: Apache-2.0
"""Sums and extremes of segments: drop-ins for `jax.ops.segment_sum` and its kin."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.lax import GatherScatterMode
from jax.typing import ArrayLike

from jax_layout import rows
from jax_layout.arguments import arrays
from jax_layout.index import SUMMED, index_add_p, index_select_p
from jax_layout.kernel import Kernel
from jax_layout.op import Op, define
from jax_layout.plain import jnp, ops

Mode = GatherScatterMode | str | None


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: Any = None,
) -> Array:
    """The sums of the rows of data that share a segment, as `jax.ops.segment_sum`.

    float16 and bfloat16 are summed in float32 and rounded once. On CPUs, sums are the
    same in every run: they are added in an order that depends on shapes alone. The
    derivative is `index_select`.

    Args:
      data: array of any shape, of numbers.
      segment_ids: integers, shape `(n,)`, where data has n rows. Rows whose segment
        is negative, or num_segments or more, are dropped.
      num_segments: how many segments there are; left out, as many as there must be,
        which needs segment_ids that are not traced.
      indices_are_sorted: that segment_ids are, which is not checked. As in jax, it
        helps where XLA's code runs, on a GPU up to fifty times; ours does without.
      unique_indices: likewise, that no two rows share a segment.
      bucket_size: as in jax, which then runs.
      mode: what becomes of segment_ids out of range: "fill" or None drops their rows,
        "clip" takes the nearest segment.
      out_sharding: as in jax, which then runs.

    Returns:
      shape `(num_segments, *data.shape[1:])`, dtype of `data`.

    Raises:
      TypeError: if data or segment_ids is not an array, or segment_ids holds no
        integers.
      ValueError: if num_segments is negative, or mode unknown.

    Source: `jax.ops.segment_sum`.

    >>> segment_sum(jnp.arange(5), jnp.array([0, 0, 1, 1, 2])).tolist()
    [1, 5, 4]
    """
    more = (bucket_size, mode, out_sharding)
    flags = (indices_are_sorted, unique_indices)
    return _reduce("segment_sum", data, segment_ids, num_segments, flags, *more)


def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: Any = None,
) -> Array:
    """The largest of the rows of data that share a segment, as `jax.ops.segment_max`.

    Elementwise. A segment without rows has minus infinity, or the least integer; NaN
    is the largest. Rows that share the maximum share its gradient.

    Args:
      data: array of any shape.
      segment_ids: as in `segment_sum`, like all that follow.
      num_segments: how many segments there are.
      indices_are_sorted: that segment_ids are.
      unique_indices: that no two rows share a segment.
      bucket_size: as in jax, which then runs.
      mode: what becomes of segment_ids out of range.
      out_sharding: as in jax, which then runs.

    Returns:
      shape `(num_segments, *data.shape[1:])`, dtype of `data`.

    Raises:
      TypeError: if data or segment_ids is not an array, or segment_ids holds no
        integers.
      ValueError: if num_segments is negative, or mode unknown.

    Source: `jax.ops.segment_max`.

    >>> segment_max(jnp.arange(5), jnp.array([0, 0, 1, 1, 2])).tolist()
    [1, 3, 4]
    """
    more = (bucket_size, mode, out_sharding)
    flags = (indices_are_sorted, unique_indices)
    return _reduce("segment_max", data, segment_ids, num_segments, flags, *more)


def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: Any = None,
) -> Array:
    """The smallest of the rows of data that share a segment, as `jax.ops.segment_min`.

    As `segment_max`; a segment without rows has infinity, or the largest integer.

    Args:
      data: array of any shape.
      segment_ids: as in `segment_sum`, like all that follow.
      num_segments: how many segments there are.
      indices_are_sorted: that segment_ids are.
      unique_indices: that no two rows share a segment.
      bucket_size: as in jax, which then runs.
      mode: what becomes of segment_ids out of range.
      out_sharding: as in jax, which then runs.

    Returns:
      shape `(num_segments, *data.shape[1:])`, dtype of `data`.

    Raises:
      TypeError: if data or segment_ids is not an array, or segment_ids holds no
        integers.
      ValueError: if num_segments is negative, or mode unknown.

    Source: `jax.ops.segment_min`.

    >>> segment_min(jnp.arange(5), jnp.array([0, 0, 1, 1, 2])).tolist()
    [0, 2, 4]
    """
    more = (bucket_size, mode, out_sharding)
    flags = (indices_are_sorted, unique_indices)
    return _reduce("segment_min", data, segment_ids, num_segments, flags, *more)


# Whether segment_ids out of range are clipped.
_MODES = {
    None: False,
    GatherScatterMode.FILL_OR_DROP: False,
    GatherScatterMode.PROMISE_IN_BOUNDS: False,
    GatherScatterMode.CLIP: True,
}
_ORDERED = [d for d in SUMMED if not d.startswith("complex")] + ["bool"]


def _reduce(
    name: str,
    data: Any,
    ids: Any,
    num_segments: Any,
    flags: tuple[bool, bool],
    bucket_size: int | None,
    mode: Mode,
    out_sharding: Any,
) -> Array:
    data, ids = arrays(name, data=data, segment_ids=ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: segment_ids must hold integers, got {ids.dtype}.")
    try:
        given = GatherScatterMode.from_any(mode) if isinstance(mode, str) else mode
    except ValueError:
        raise ValueError(
            f'{name}: mode must be "fill", "drop", "clip" or "promise_in_bounds", '
            f"got {mode!r}."
        ) from None
    if num_segments is None:
        num_segments = np.max(ids) + 1
    try:
        extent = operator.index(num_segments)
    except (TypeError, jax.errors.JAXTypeError):
        extent = 0  # symbolic; or jax says what is wrong
    if extent < 0:
        raise ValueError(f"{name}: num_segments must be at least 0, got {extent}.")
    dtypes = SUMMED if name == "segment_sum" else _ORDERED
    if (
        extent == 0
        or data.size == 0
        or data.dtype.name not in dtypes
        or ids.ndim != 1
        or data.shape[:1] != ids.shape  # rows are repeated then
        or given not in _MODES
        or bucket_size is not None
        or out_sharding is not None
    ):
        plain = getattr(ops, name)
        return plain(data, ids, num_segments, *flags, bucket_size, mode, out_sharding)
    promised = rows.Promises(*map(bool, flags))
    return _reduce_jit(rows.signed(ids), data, extent, _MODES[given], promised, name)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), inline=True)
def _reduce_jit(
    ids: Array,
    data: Array,
    extent: int,
    clip: bool,
    promised: rows.Promises,
    name: str,
) -> Array:
    params = {"axis": 0, "extent": extent, "clip": clip, "promised": promised}
    if name == "segment_sum":
        return _sum(ids, data, **params)
    return segment_extreme_p(ids, data, least=name == "segment_min", **params)


def _sum(ids: Array, data: Array, **params: Any) -> Array:
    return index_add_p(ids, data, wrap=False, deterministic=True, **params)


# --- segment_extreme_p: operands index and source, as those of index_add


def _nothing(dtype: Any, least: bool) -> Any:
    """What is no larger, or smaller, than any number."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.inf if least else -np.inf, dtype)
    if dtype == np.bool_:
        return np.array(least)
    limits = jnp.iinfo(dtype)
    return np.array(limits.max if least else limits.min, dtype)


def _extreme_lax(
    index: Array,
    source: Array,
    *,
    axis: int,
    extent: int,
    clip: bool,
    promised: rows.Promises,
    least: bool,
) -> Array:
    at = (slice(None),) * (axis - index.ndim + 1)

    def pick(index: Array, source: Array, y: Array) -> Array:
        named = rows.wide(index, extent)
        if clip:
            named = rows.resolve(index, extent, clip, wrap=False)
        into = y.at[(*at, named)]
        into_it = into.min if least else into.max
        return into_it(
            source, mode="drop", wrap_negative_indices=False, **promised._asdict()
        )

    def picked(index: Array, source: Array) -> Array:
        shape = (*source.shape[:axis], extent, *source.shape[axis + 1 :])
        y = jnp.full(shape, _nothing(source.dtype, least))
        return rows.over_batches(pick, index)(index, source, y)

    spec = rows.spec_of(source, source.ndim)
    spec[axis] = None
    return rows.on_mesh(picked, (index, source), spec)


def _extreme_kernel(
    platform: str,
    index: Any,
    source: Any,
    *,
    axis: int,
    extent: int,
    clip: bool,
    promised: rows.Promises,
    least: bool,
) -> Kernel | None:
    if source.size == 0 or max(extent, index.shape[-1]) >= 2**31:
        return None  # rows are counted in 32 bits
    return Kernel(
        {"axis": np.int64(axis), "clip": clip, "least": least},
        work=rows.work_of("segment_extreme", source, index, axis, extent),
    )


def _extreme_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, least: bool, **params: Any
) -> tuple[Any, Any]:
    """The mean of the tangents of those that are the extreme, as jax's."""
    index, source = primals
    y = segment_extreme_p(index, source, least=least, **params)
    mode = "clip" if params["clip"] else "zero"
    there = index_select_p(y, index, axis=params["axis"], mode=mode, wrap=False)
    won = source == there
    wide = jnp.promote_types(source.dtype, np.float32)
    # What nobody won it began with, and that counts too.
    count = _sum(index, won.astype(wide), **params) + (y == _nothing(y.dtype, least))
    tangent = _sum(index, jnp.where(won, tangents[1], 0), **params)
    return y, (tangent.astype(wide) / jnp.maximum(count, 1)).astype(y.dtype)


def _extreme_batch(
    operands: Sequence[Any], dims: Sequence[Any], *, axis: int, **params: Any
) -> tuple[Array, int]:
    operands, to = rows.with_batch(operands, dims)
    return segment_extreme_p(*operands, axis=axis + 1, **params), to


def _extreme_sharding(index: Any, source: Any, *, axis: int, **params: Any) -> str:
    """Rows of a segment stay together: devices can only add what they have."""
    whole, index_axes, selected = rows.axis_names(source.ndim, index, axis)
    together = (names.replace("n", "M") for names in (index_axes, selected))
    return ", ".join(together) + f" -> {whole}"


segment_extreme_p: Callable[..., Any] = define(
    Op(
        name="segment_extreme",
        lax=_extreme_lax,
        kernel=_extreme_kernel,
        jvp=_extreme_jvp,
        batch=_extreme_batch,
        sharding=_extreme_sharding,
        platforms=("cpu",),
        dtypes=_ORDERED,
    )
)
