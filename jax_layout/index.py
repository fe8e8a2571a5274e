# SPDX-License-Identifier: Apache-2.0
"""Rows that an index names: selected, and added to."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.experimental import checkify
from jax.interpreters import ad
from jax.typing import ArrayLike

from jax_layout import _compat, rows
from jax_layout.arguments import accumulator, arrays, placement, scalar
from jax_layout.kernel import Kernel
from jax_layout.op import Op, define
from jax_layout.plain import jnp, lax

Mode = Literal["fill", "clip", "error"]

# Parts of complex numbers are summed as the real types, unsigned integers as signed.
SUMMED = (
    "float16 bfloat16 float32 float64 complex64 complex128 "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
).split()
# What a GPU can add atomically.
_ATOMIC = "float32 float64 complex64 complex128 int32 int64 uint32 uint64".split()


def index_select(
    x: ArrayLike,
    axis: int,
    index: ArrayLike,
    *,
    mode: Mode = "fill",
    deterministic: bool = False,
) -> Array:
    """The rows of x along an axis that an index names, as `torch.index_select`.

    Its derivative is `index_add`: rows that are selected twice sum their cotangents.

    Args:
      x: array of any shape and dtype; one without axes counts as one row.
      axis: the axis that is indexed; a negative one counts from the last.
      index: integers, shape `(n,)` or `()`, which is one row. Negative ones count
        from the end.
      mode: what an index out of range gives: "fill", as `jax.numpy.take`, NaN (the
        smallest integer, the largest unsigned one, True); "clip", the nearest row;
        "error", an error under `jax.experimental.checkify` and when called eagerly.
        Gradients of filled rows are zero.
      deterministic: of its gradient, as of `index_add`.

    Returns:
      shape of `x` with n in place of the axis, dtype of `x`.

    Raises:
      TypeError: if x or index is not an array, or index holds no integers.
      ValueError: if axis, the shape of index or mode is wrong, or rows of an empty
        axis are asked for.

    Source: `torch.index_select`, whose kernels serve one axis in the same way.

    >>> index_select(jnp.arange(6).reshape(2, 3), 1, jnp.array([2, 0, -1])).tolist()
    [[2, 0, 2], [5, 3, 5]]
    """
    x, index = arrays("index_select", x=x, index=index)
    axis = _axis("index_select", axis, x)
    index = _index("index_select", index, x, axis, mode)
    if x.ndim == 0:
        _one("index_select", index)
        return _select(x[None], index, 0, mode, bool(deterministic))[0]
    return _select(x, index, axis, mode, bool(deterministic))


def index_add(
    x: ArrayLike,
    axis: int,
    index: ArrayLike,
    source: ArrayLike,
    *,
    alpha: ArrayLike = 1,
    mode: Mode = "fill",
    deterministic: bool = False,
) -> Array:
    """x plus alpha times the rows of source, each at its index, as `torch.index_add`.

    Rows with the same index are added in an order that depends on shapes alone, so
    results are the same in every run; on a GPU, where that takes a sort, if so told.
    16-bit floating point is summed in float32 and rounded once. Donated, or carried by
    a loop, x is added to without a copy. Its derivative by source is `index_select`.

    Args:
      x: array of any shape, of numbers.
      axis: the axis that is indexed; a negative one counts from the last.
      index: integers, shape `(n,)` or `()`. Negative ones count from the end.
      source: shape of `x` with n in place of the axis, dtype of `x`.
      alpha: number, or array of shape `()`.
      mode: what becomes of the row of an index out of range: "fill" drops it, as
        `x.at[index].add`; "clip" adds it to the nearest; "error" is as in
        `index_select`.
      deterministic: a GPU sorts the indices first, and adds the rows of each in their
        order; else it may add atomically, in any order, as `x.at[index].add` does.
        CPUs need neither. Gradients of gradients do as their function does.

    Returns:
      shape and dtype of `x`.

    Raises:
      TypeError: if an argument is not an array, dtypes differ, index holds no
        integers, or alpha does not fit.
      ValueError: if axis, a shape or mode is wrong.

    Source: `torch.index_add`.

    >>> x, index = jnp.zeros((3, 2)), jnp.array([2, 0, -1])
    >>> index_add(x, 0, index, jnp.ones((3, 2)), alpha=2).tolist()
    [[2.0, 2.0], [0.0, 0.0], [4.0, 4.0]]
    """
    x, index, source = arrays("index_add", x=x, index=index, source=source)
    axis = _axis("index_add", axis, x)
    index = _index("index_add", index, x, axis, mode)
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise TypeError(f"index_add: x must hold numbers, got {x.dtype}.")
    if source.dtype != x.dtype:
        raise TypeError(
            f"index_add: source must have the dtype of x, {x.dtype}, "
            f"got {source.dtype}."
        )
    if x.ndim == 0:
        _one("index_add", index)
        shape: tuple[int, ...] = ()
    else:
        shape = (*x.shape[:axis], index.shape[0], *x.shape[axis + 1 :])
    if source.shape != shape:
        raise ValueError(
            f"index_add: source must have shape {shape}, for x of shape {x.shape} "
            f"and {index.shape[0]} indices along axis {axis}, got {source.shape}."
        )
    factor = scalar("index_add", "alpha", alpha, x.dtype)
    rows = jnp.asarray(source)
    if isinstance(factor, Array) or factor != 1:
        rows = (rows.astype(accumulator(x.dtype)) * factor).astype(x.dtype)
    if x.ndim == 0:
        return _add(x[None], index, rows[None], 0, mode, bool(deterministic))[0]
    return _add(x, index, rows, axis, mode, bool(deterministic))


def _axis(name: str, axis: int, x: Array) -> int:
    try:
        given = operator.index(axis)
    except TypeError:
        raise TypeError(f"{name}: axis must be an integer, got {axis!r}.") from None
    rank = max(x.ndim, 1)
    if not -rank <= given < rank:
        raise ValueError(f"{name}: axis must lie in [{-rank}, {rank}), got {given}.")
    return given % rank


def _index(name: str, index: Array, x: Array, axis: int, mode: str) -> Array:
    """The index as int32 or int64, 1-D."""
    if mode not in ("fill", "clip", "error"):
        raise ValueError(
            f'{name}: mode must be "fill", "clip" or "error", got {mode!r}.'
        )
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"{name}: index must hold integers, got {index.dtype}.")
    if index.ndim > 1:
        raise ValueError(f"{name}: index must be 1-D or 0-D, got shape {index.shape}.")
    index = index.reshape(-1)
    if index.size and x.ndim and x.shape[axis] == 0:
        raise ValueError(
            f"{name}: an empty axis has no rows, got x of shape {x.shape}, axis {axis} "
            f"and {index.size} indices."
        )
    return rows.signed(index)


def _one(name: str, index: Array) -> None:
    if index.shape != (1,):
        raise ValueError(
            f"{name}: x without axes is one row, got {index.shape[0]} indices."
        )


def _check(name: str, index: Array, extent: int) -> None:
    inside = (index >= -extent) & (index < extent)
    checkify.check(
        jnp.all(inside),
        f"{name}: indices must lie in [{-extent}, {extent}), got {{index}}.",
        index=index[jnp.argmin(inside)] if index.size else jnp.zeros((), index.dtype),
    )


@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _select_jit(
    x: Array, index: Array, axis: int, mode: str, deterministic: bool
) -> Array:
    return index_select_p(x, index, axis=axis, mode=mode, deterministic=deterministic)


def _select(x: Array, index: Array, axis: int, mode: str, deterministic: bool) -> Array:
    if mode == "error":
        _check("index_select", index, x.shape[axis])
        mode = "fill"
    return _select_jit(x, index, axis, mode, deterministic)


@functools.partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _add_jit(
    x: Array, index: Array, source: Array, axis: int, clip: bool, deterministic: bool
) -> Array:
    return index_add_p(
        index,
        source,
        x,
        axis=axis,
        extent=x.shape[axis],
        clip=clip,
        deterministic=deterministic,
    )


def _add(
    x: Array, index: Array, source: Array, axis: int, mode: str, deterministic: bool
) -> Array:
    if mode == "error":
        _check("index_add", index, x.shape[axis])
    return _add_jit(x, index, source, axis, mode == "clip", deterministic)


def _whole_bytes(dtype: Any) -> bool:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False  # PRNG keys and their like
    return jax.dtypes.itemsize_bits(dtype) >= 8


# --- index_select_p: `mode` is "fill", "clip", or "zero", which fills with zeros;
# `deterministic` is what its transpose is told


def fill_value(dtype: Any, mode: str) -> Any:
    """What a row out of range is filled with, in a mode of `index_select_p`."""
    if mode != "fill":
        return np.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.full((), np.nan, dtype)
    if dtype == np.bool_:
        return np.ones((), dtype)
    limits = jnp.iinfo(dtype)
    return np.full((), limits.min if limits.min < 0 else limits.max, dtype)


def _select_lax(
    x: Array,
    index: Array,
    *,
    axis: int,
    mode: str,
    wrap: bool = True,
    deterministic: bool = False,
) -> Array:
    batch = index.ndim - 1
    extent = x.shape[axis]
    clip = mode == "clip"
    as_take = wrap and not clip  # where jnp.take takes negative indices for 0

    def take(x: Array, index: Array) -> Array:
        return jnp.take(
            x,
            rows.wide(index, extent)
            if as_take
            else rows.resolve(index, extent, clip, wrap),
            axis=axis - batch,
            mode="clip" if clip else "fill",
            fill_value=0 if mode == "zero" else None,
        )

    spec = rows.spec_of(x, x.ndim)
    spec[axis] = rows.spec_of(index, index.ndim)[-1]
    return rows.on_mesh(rows.over_batches(take, index), (x, index), spec)


def _select_kernel(
    platform: str,
    x: Any,
    index: Any,
    *,
    axis: int,
    mode: str,
    wrap: bool = True,
    deterministic: bool = True,
) -> Kernel | None:
    if not _whole_bytes(x.dtype) or x.size == 0 or index.size == 0:
        return None
    fill = np.frombuffer(fill_value(x.dtype, mode).tobytes(), np.uint8)
    clip, work = mode == "clip", rows.work_of("index_select", x, index, axis)
    return Kernel(
        {"axis": np.int64(axis), "clip": clip, "wrap": wrap, "fill": fill}, work=work
    )


def _select_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, mode: str, **params: Any
) -> tuple[Any, Any]:
    x, index = primals
    y = index_select_p(x, index, mode=mode, **params)
    linear = "zero" if mode == "fill" else mode
    return y, index_select_p(tangents[0], index, mode=linear, **params)


def _select_transpose(
    ct: Any,
    x: Any,
    index: Any,
    *,
    axis: int,
    mode: str,
    deterministic: bool = True,
    **params: Any,
) -> list[Any]:
    out = index_add_p(
        index,
        ct,
        axis=axis,
        extent=x.aval.shape[axis],
        clip=mode == "clip",
        deterministic=deterministic,
        **params,
    )
    sharding = placement(x.aval)
    return [out if sharding is None else jax.sharding.reshard(out, sharding), None]


def _select_batch(
    operands: Sequence[Any], dims: Sequence[Any], *, axis: int, **params: Any
) -> tuple[Array, int]:
    (x, index), (x_dim, index_dim) = operands, dims
    batch = index.ndim - 1 - (index_dim is not None)
    if index_dim is None:
        # The batch axis stays where it was, behind those of the index.
        to = max(x_dim, batch)
        x = jnp.moveaxis(x, x_dim, to)
        y = index_select_p(x, index, axis=axis + (to <= axis), **params)
        return y, to
    if x_dim is None:  # one longer index serves all
        rows = jnp.moveaxis(index, index_dim, batch)
        flat = rows.reshape(*rows.shape[:batch], -1)
        y = index_select_p(x, flat, axis=axis, **params)
        shape = (*y.shape[:axis], *rows.shape[batch:], *y.shape[axis + 1 :])
        return y.reshape(shape), axis
    x, index = jnp.moveaxis(x, x_dim, 0), jnp.moveaxis(index, index_dim, 0)
    return index_select_p(x, index, axis=axis + 1, **params), 0


def _select_sharding(x: Any, index: Any, *, axis: int, **params: Any) -> str:
    whole, index_axes, selected = rows.axis_names(x.ndim, index, axis)
    return f"{whole}, {index_axes} -> {selected}"


index_select_p = define(
    Op(
        name="index_select",
        lax=_select_lax,
        kernel=_select_kernel,
        jvp=_select_jvp,
        transpose=_select_transpose,
        batch=_select_batch,
        sharding=_select_sharding,
    )
)


# --- index_add_p: operands index and source, and x unless the sum starts at zero


def _add_lax(
    index: Array,
    source: Array,
    *x: Array,
    axis: int,
    extent: int,
    clip: bool,
    deterministic: bool,
    wrap: bool = True,
    promised: rows.Promises = rows.NOTHING_PROMISED,
) -> Array:
    batch = index.ndim - 1
    floating = jnp.issubdtype(source.dtype, jnp.floating)
    wide = accumulator(source.dtype) if floating else source.dtype
    at = (slice(None),) * (axis - batch)

    def add(index: Array, source: Array, y: Array) -> Array:
        named = rows.wide(index, extent)
        if clip:
            named = rows.resolve(index, extent, clip, wrap)
        add_to = y.at[(*at, named)].add
        return add_to(
            source, mode="drop", wrap_negative_indices=wrap, **promised._asdict()
        )

    def sum_up(index: Array, source: Array, *x: Array) -> Array:
        shape = (*source.shape[:axis], extent, *source.shape[axis + 1 :])
        y = x[0].astype(wide) if x else jnp.zeros(shape, wide)
        out = rows.over_batches(add, index)(index, source.astype(wide), y)
        return out.astype(source.dtype)

    spec = rows.spec_of(source, source.ndim)
    spec[axis] = None
    if x:
        spec = rows.spec_of(x[0], source.ndim)
    return rows.on_mesh(sum_up, (index, source, *x), spec)


def _add_kernel(
    platform: str,
    index: Any,
    source: Any,
    *x: Any,
    axis: int,
    extent: int,
    clip: bool,
    deterministic: bool,
    wrap: bool = True,
    promised: rows.Promises = rows.NOTHING_PROMISED,
) -> Kernel | None:
    dtype = source.dtype
    if source.size == 0 or extent == 0:
        return None
    if max(extent, index.shape[-1]) >= 2**31:
        return None  # rows are counted in 32 bits
    attributes = {"axis": np.int64(axis), "clip": clip, "wrap": wrap}
    work = rows.work_of("index_add", source, index, axis, extent)
    if platform == "cpu":
        # Where x is not donated, XLA would copy it first; a copy is cheap enough to
        # make on the way if there is about as much to add. A loop that carries x would
        # copy what is elsewhere back.
        carried = "while" in _compat.inside()
        in_place = x and (carried or x[0].size > 2 * source.size)
        aliases = {2: 0} if in_place else {}
        return Kernel(
            attributes | {"sorted": False, "keep": bool(x)},
            aliases=aliases,
            work=work,
            # Plain `lax` widens all of x to add a few rows, in every step.
            ours_in_loops=dtype.name in ("bfloat16", "float16"),
        )
    if not wrap:
        return None  # segments: one thread would add all rows of each
    sort = deterministic or dtype.name not in _ATOMIC
    shape = (*source.shape[:axis], extent, *source.shape[axis + 1 :])

    def prepare(index: Array, source: Array, *x: Array) -> list[Array]:
        y = x[0] if x else jnp.zeros(shape, dtype)
        if not sort:
            return [index, source, y]
        named = rows.resolve(index, extent, clip, wrap)
        places = lax.broadcasted_iota(np.int32, named.shape, named.ndim - 1)
        named, places = lax.sort((named, places), num_keys=1, is_stable=True)
        return [named, source, places, y]

    return Kernel(
        attributes | {"sorted": sort, "keep": True},
        aliases={2 + sort: 0},
        prepare=prepare,
        work=None if deterministic else work,
    )


def _add_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    index, *_ = primals
    _, dsource, *dx = tangents
    y = index_add_p(*primals, **params)
    given = [t for t in dx if not isinstance(t, ad.Zero)]
    if not isinstance(dsource, ad.Zero):
        return y, index_add_p(index, dsource, *given, **params)
    return y, given[0]


def _add_transpose(
    ct: Any,
    index: Any,
    source: Any,
    *x: Any,
    axis: int,
    clip: bool,
    deterministic: bool,
    wrap: bool = True,
    **params: Any,
) -> list[Any]:
    ct_source = None
    if ad.is_undefined_primal(source):
        mode = "clip" if clip else "zero"
        ct_source = index_select_p(
            ct, index, axis=axis, mode=mode, wrap=wrap, deterministic=deterministic
        )
        sharding = placement(source.aval)
        if sharding is not None:
            ct_source = jax.sharding.reshard(ct_source, sharding)
    return [None, ct_source, *(ct if ad.is_undefined_primal(i) else None for i in x)]


def _add_batch(
    operands: Sequence[Any], dims: Sequence[Any], *, axis: int, **params: Any
) -> tuple[Array, int]:
    operands, to = rows.with_batch(operands, dims)
    return index_add_p(*operands, axis=axis + 1, **params), to


def _add_sharding(index: Any, source: Any, *x: Any, axis: int, **params: Any) -> str:
    whole, index_axes, selected = rows.axis_names(source.ndim, index, axis)
    return ", ".join([index_axes, selected, *[whole] * len(x)]) + f" -> {whole}"


def _add_in_parts(
    total: Any, index: Array, source: Array, *x: Array, **params: Any
) -> Array:
    """x is added once, not by every device; 16-bit sums are rounded at the end."""
    floating = jnp.issubdtype(source.dtype, jnp.floating)
    wide = accumulator(source.dtype) if floating else source.dtype
    out = total(index_add_p(index, source.astype(wide), **params))
    for addend in x:
        out = out + addend.astype(wide)
    return out.astype(source.dtype)


index_add_p = define(
    Op(
        name="index_add",
        lax=_add_lax,
        kernel=_add_kernel,
        jvp=_add_jvp,
        transpose=_add_transpose,
        batch=_add_batch,
        sharding=_add_sharding,
        in_parts=_add_in_parts,
        dtypes=SUMMED,
    )
)
