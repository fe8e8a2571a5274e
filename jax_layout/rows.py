# SPDX-License-Identifier: Apache-2.0
"""What operators on rows that an index names have in common.

Their `index` has shape (*batch, n), where the batch axes are the first of the arrays
too, and come before `axis`. Negative indices count from the end if `wrap`, else they
are out of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType

from jax_layout.measured import Work
from jax_layout.plain import jnp


class Promises(NamedTuple):
    """What the caller says of an index, as `lax.scatter` is told; kernels of ours
    make nothing of it."""

    indices_are_sorted: bool = False
    unique_indices: bool = False


NOTHING_PROMISED = Promises()


def signed(index: Array) -> Array:
    """The index as int32 or int64."""
    if index.dtype in (np.int32, np.int64):
        return index
    largest = jax.dtypes.canonicalize_dtype(np.int64)
    if jnp.iinfo(index.dtype).bits < 32:
        return index.astype(np.int32)
    # What does not fit is out of range, and stays so.
    return jnp.minimum(index, np.iinfo(largest).max).astype(largest)


def wide(index: Array, extent: int) -> Array:
    """The index in a type that counts the rows."""
    return index.astype(np.int64) if extent > np.iinfo(index.dtype).max else index


def resolve(index: Array, extent: int, clip: bool, wrap: bool) -> Array:
    """The index without negative ones; `extent` for those that name no row."""
    index = wide(index, extent)
    if wrap:
        index = jnp.where(index < 0, index + extent, index)
    if clip:
        return jnp.clip(index, 0, extent - 1)
    return jnp.where((index < 0) | (index >= extent), extent, index)


def over_batches(f: Callable[..., Array], index: Array) -> Callable[..., Array]:
    for _ in range(index.ndim - 1):
        f = jax.vmap(f)
    return f


def spec_of(x: Any, rank: int) -> list[Any]:
    """The mesh axes of each axis of x, as its type says."""
    spec = list(jax.typeof(x).sharding.spec)
    return spec + [None] * (rank - len(spec))


def on_mesh(
    f: Callable[..., Array], operands: Sequence[Array], spec: Sequence[Any]
) -> Array:
    """f(*operands), with the sharding that an Explicit mesh wants to be told."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return f(*operands)
    used: set[str] = set()
    placed = []
    for axes in spec:
        names = {axes} if isinstance(axes, str) else set(axes or ())
        placed.append(None if names & used else axes)
        used |= names
    return jax.sharding.auto_axes(f, out_sharding=jax.P(*placed))(*operands)


def axis_names(rank: int, index: Any, axis: int) -> tuple[str, str, str]:
    """The axes of x, of index and of what is selected, for a sharding rule."""
    names = [f"a{i}" for i in range(rank)]
    batch = names[: index.ndim - 1]
    whole = " ".join([*names[:axis], "N", *names[axis + 1 :]])
    selected = " ".join([*names[:axis], "n", *names[axis + 1 :]])
    return whole, " ".join([*batch, "n"]), selected


def _insert(x: Array, dim: int | None, to: int, size: int) -> Array:
    """x with its batch axis at `to`; a new one if it has none."""
    if dim is None:
        shape = (*x.shape[:to], size, *x.shape[to:])
        return jnp.broadcast_to(jnp.expand_dims(x, to), shape)
    return jnp.moveaxis(x, dim, to)


def with_batch(operands: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Array], int]:
    """An index and arrays with one more batch axis, and where it is in the arrays."""
    index, *rows = operands
    index_dim, *row_dims = dims
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    to = 0
    if index_dim is None:
        to = index.ndim - 1  # an axis like any other, behind those of the index
    else:
        index = jnp.moveaxis(index, index_dim, 0)
    rows = [_insert(x, d, to, size) for x, d in zip(rows, row_dims, strict=True)]
    return [index, *rows], to


def work_of(
    name: str, x: Any, index: Any, axis: int, extent: int | None = None
) -> Work:
    """In the tables of choices: slices, rows of the table, rows picked, their bytes."""
    slices, row = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    rows = extent or x.shape[axis]
    case = f"{name} {x.dtype.itemsize if name == 'index_select' else x.dtype.name}"
    return Work(case, (slices, rows, index.shape[-1], row * x.dtype.itemsize))
