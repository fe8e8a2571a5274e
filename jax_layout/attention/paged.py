# SPDX-License-Identifier: Apache-2.0
"""Keys and values in blocks that a table finds: attention, and what is written there.

Source: Kwon et al., PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

from jax_layout import _backends
from jax_layout.attention.blocked import (
    DTYPES,
    attention_p,
    attributes,
    batch_axis,
    merged,
    names,
)
from jax_layout.kernel import Kernel
from jax_layout.measured import Work
from jax_layout.op import Op, define, in_front, jvp_of
from jax_layout.plain import jnp


def check_tables(operator: str, tables: Array, batch: int) -> None:
    """The errors of `block_tables`."""
    shape = tables.shape
    if tables.dtype != np.dtype(np.int32) or len(shape) != 2 or shape[0] != batch:
        raise ValueError(
            f"{operator}: block_tables must be int32 of shape ({batch}, blocks), got "
            f"{tables.dtype} of {shape}."
        )
    if shape[1] == 0:
        raise ValueError(
            f"{operator}: block_tables must have a block for each sequence, got shape "
            f"{shape}."
        )


def gathered(x: Array, tables: Array, axis: int, row: int) -> Array:
    """The blocks of each sequence, which are along an axis, one after another.

    Their rows meet along the axis `row`. A block that is not there is the nearest
    that is.
    """
    x = jnp.take(x, tables, axis=axis, mode="clip")
    x = jnp.moveaxis(x, axis + 1, row)
    return x.reshape(*x.shape[:row], -1, *x.shape[row + 2 :])


def _attention(
    query: Array, key: Array, value: Array, *rest: Array, **params: Any
) -> list[Array]:
    *others, tables = rest
    key, value = (gathered(x, tables, *params["k_axes"][:2]) for x in (key, value))
    out: list[Array] = attention_p(query, key, value, *others, **params)
    return out


def _attention_kernel(
    platform: str, query: Any, key: Any, *rest: Any, **params: Any
) -> Kernel | None:
    if min(*query.shape, *key.shape) == 0 or not _backends.has_kernels("attention"):
        return None
    given = attributes(params) | {"block_tables": True}
    return Kernel(given, target="jax_layout_attention")


def _attention_batch(
    operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Array], list[int]]:
    """One batch of the two; blocks of all in one."""
    query, key, value, *rest, tables = operands
    tables_dim = dims[-1]
    mapped = [dim for dim in dims[1:3] if dim is not None]
    if mapped:
        axis = params["k_axes"][0]
        count = (key if dims[1] is not None else value).shape[mapped[0]]
        pools = []
        for x, dim in zip((key, value), dims[1:3], strict=True):
            if dim is None:
                x = jnp.broadcast_to(x, (count, *x.shape))
            x = jnp.moveaxis(x, dim or 0, axis)
            pools.append(x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]))
        key, value = pools
        each = key.shape[axis] // count
        if tables_dim is None:
            tables, tables_dim = tables[None], 0
        tables = jnp.moveaxis(tables, tables_dim, 0)
        first = jnp.arange(count, dtype=tables.dtype).reshape(-1, 1, 1) * each
        tables, tables_dim = jnp.clip(tables, 0, each - 1) + first, 0
    places = ["q", *["first"] * (len(rest) + 1)]
    moved = [dims[0], *dims[3:-1], tables_dim]
    (query, *rest), count = merged([query, *rest, tables], moved, places, params)
    axes = [batch_axis("q", params), 0]
    out = paged_attention_p(query, key, value, *rest, **params)
    return [
        x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])
        for x, axis in zip(out, axes, strict=True)
    ], axes


def _attention_sharding(
    query: Any, key: Any, value: Any, *rest: Any, **params: Any
) -> str:
    q, k, others = names(params, rest[:-1])
    blocks = " ".join({"b": "P", "s": "R", "S": "R"}.get(n, n) for n in k.split())
    others = [" ".join("S" if n == "s" else n for n in x.split()) for x in others]
    operands = [q, blocks, blocks, *others, "b M"]
    return ", ".join(operands) + f" -> {q}, b k g T E"


paged_attention_p: Any = define(
    Op(
        name="paged_attention",
        lax=_attention,
        kernel=_attention_kernel,
        jvp=jvp_of(_attention),
        batch=_attention_batch,
        sharding=_attention_sharding,
        multiple_results=True,
        platforms=("cpu",),
        dtypes=DTYPES,
    )
)


# --- rows of a cache in blocks

# Elements of less than a byte.
PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


def _update(
    cache: Array,
    new: Array,
    position: Array,
    tables: Array,
    *,
    first: int,
    axis: int,
    strict: bool,
) -> Array:
    blocks, rows, width = cache.shape[first], cache.shape[axis], tables.shape[1]
    to = position[:, None] + jnp.arange(new.shape[axis], dtype=position.dtype)
    inside = (to >= 0) & (to < rows * width)
    to = jnp.where(inside, to, 0)
    block = jnp.take_along_axis(tables, to // rows, axis=1)
    # A negative index would count from the end.
    block = jnp.where(inside & (block >= 0), block, blocks)
    whole = jnp.moveaxis(cache, (first, axis), (0, 1))
    rows_of_new = jnp.moveaxis(new, (first, axis), (0, 1))
    placed = whole.at[block, to % rows].set(rows_of_new, mode="drop")
    return jnp.moveaxis(placed, (0, 1), (first, axis))


def _update_kernel(
    platform: str,
    cache: Any,
    new: Any,
    position: Any,
    tables: Any,
    *,
    first: int,
    axis: int,
    strict: bool,
) -> Kernel | None:
    if cache.size == 0 or new.size == 0 or cache.dtype.name in PACKED:
        return None
    inner = math.prod(cache.shape[axis + 1 :]) * cache.dtype.itemsize
    rows = cache.shape[axis] * tables.shape[1]
    sizes = (math.prod(new.shape[:axis]), rows, new.shape[axis], inner)
    return Kernel(
        {"first": np.int64(first), "axis": np.int64(axis), "strict": strict},
        target="jax_layout_update_cache",
        aliases={0: 0},
        work=None if strict else Work("update_cache", sizes),
    )


def fold(x: Array, first: int) -> Array:
    """An array whose leading axis is made one with that which is `first` behind it."""
    count, *shape = x.shape
    shape[first] *= count
    return jnp.moveaxis(x, 0, first).reshape(shape)


def unfold(x: Array, shape: Sequence[int], first: int) -> Array:
    """`fold` of this shape undone; the leading axis stays in front of `first`."""
    count, *own = shape
    return x.reshape(*own[:first], count, *own[first:])


def _update_batch(
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    first: int,
    **params: Any,
) -> tuple[Array, int]:
    """One batch of the two; blocks of all in one."""
    cache, new, position, tables = in_front(operands, dims)
    count, blocks = cache.shape[0], cache.shape[1 + first]
    offsets = jnp.arange(count, dtype=tables.dtype).reshape(-1, 1, 1) * blocks
    there = (tables >= 0) & (tables < blocks)
    tables = jnp.where(there, tables + offsets, count * blocks)
    flat = (
        fold(cache, first),
        fold(new, first),
        position.reshape(-1),
        tables.reshape(-1, tables.shape[-1]),
    )
    out = update_paged_cache_p(*flat, first=first, **params)
    return unfold(out, cache.shape, first), first


def _update_sharding(
    cache: Any,
    new: Any,
    position: Any,
    tables: Any,
    *,
    first: int,
    axis: int,
    strict: bool,
) -> str:
    between = [f"a{i}" for i in range(cache.ndim)]

    def axes(block: str, row: str) -> str:
        named = list(between)
        named[first], named[axis] = block, row
        return " ".join(named)

    whole = axes("P", "R")
    return f"{whole}, {axes('B', 'T')}, B, B M -> {whole}"


update_paged_cache_p: Any = define(
    Op(
        name="update_paged_cache",
        lax=_update,
        kernel=_update_kernel,
        jvp=jvp_of(_update),
        batch=_update_batch,
        sharding=_update_sharding,
        platforms=("cpu",),
    )
)
