# SPDX-License-Identifier: Apache-2.0
"""What operators need to compute on the physical array of a value."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_layout.arguments import accumulator
from jax_layout.formats.memory_format import MemoryFormat, convert
from jax_layout.formats.tags import stored


def array(name: str, x: Any, what: str = "x") -> Array:
    """x as an array; anything without a shape is an error of the operator `name`."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: {what} must be an array, got {type(x).__name__}.")
    # A copy of a traced value, as asarray makes some, would be without its tag.
    return x if isinstance(x, Array) else jnp.asarray(x)


def floating(name: str, x: Any, what: str = "x") -> Array:
    """The same for operators on real floating-point numbers."""
    x = array(name, x, what)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: {what} must be of a floating dtype, got {x.dtype}.")
    return x


def wide(dtype: DTypeLike) -> DTypeLike:
    """The dtype to sum and average in: float32 for 16- and 8-bit types."""
    return accumulator(dtype)


def whole(x: Array, dims: Sequence[int]) -> tuple[Array, MemoryFormat]:
    """`stored(x)`, re-ordered if need be so that each of these dims is one axis."""
    physical, format = stored(x)
    if not any(format.blocks[dim] for dim in dims):
        return physical, format
    target = unblocked(format, dims)
    return convert(physical, format, target), target


def unblocked(format: MemoryFormat, dims: Sequence[int]) -> MemoryFormat:
    """The format with each of these dims in the place of its outermost atom."""
    return MemoryFormat(
        tuple(() if d in dims else blocks for d, blocks in enumerate(format.blocks)),
        tuple((d, atom) for d, atom in format.order if atom == 0 or d not in dims),
    )


def axes(format: MemoryFormat, dims: Sequence[int]) -> tuple[int, ...]:
    """All physical axes of some logical dimensions."""
    return tuple(axis for dim in dims for axis in format.axes(dim))


def aligned(x: ArrayLike, format: MemoryFormat) -> Array:
    """The physical array of a value that is to broadcast against this format.

    Args:
      x: logical shape with as many dimensions as the format, or fewer. Its
        dimensions of size 1 have axes of size 1 only.
      format: of the value that x is to be combined with.
    """
    x = x if isinstance(x, Array) else jnp.asarray(x)
    if x.ndim < format.ndim:
        x = x.reshape((1,) * (format.ndim - x.ndim) + x.shape)
    physical, own = stored(x)
    if own == format:
        return physical
    narrow = unblocked(format, [d for d, size in enumerate(x.shape) if size == 1])
    physical = convert(physical, own, narrow)
    place = {atom: axis for axis, atom in enumerate(narrow.order)}
    return physical.reshape(
        [physical.shape[place[atom]] if atom in place else 1 for atom in format.order]
    )


def per_channel(x: ArrayLike, format: MemoryFormat) -> Array:
    """The same for a vector with an entry per channel: shape `(C,)`."""
    return aligned(jnp.reshape(x, (1, -1) + (1,) * (format.ndim - 2)), format)


def sizes(name: str, what: str, given: Any, rank: int, least: int) -> tuple[int, ...]:
    """A number per spatial dimension, from one for all or from one for each.

    A tuple of one number is one for all, as in PyTorch.
    """
    try:
        found = (operator.index(given),) * rank
    except TypeError:
        try:
            found = tuple(operator.index(size) for size in given)
        except TypeError as error:
            raise TypeError(
                f"{name}: {what} must be an integer or a tuple of them, got {given!r}."
            ) from error
    if len(found) == 1:
        found *= rank
    if len(found) != rank or min(found, default=least) < least:
        raise ValueError(
            f"{name}: {what} must hold {rank} integers of at least {least}, "
            f"got {given!r}."
        )
    return found


def number(name: str, what: str, given: Any, least: float = -math.inf) -> None:
    """Checks a real number; one that is traced has no value to check."""
    if isinstance(given, Array | np.ndarray) and given.ndim == 0:
        given = 0 if isinstance(given, jax.core.Tracer) else given.item()
    if not isinstance(given, float | int | np.number) or isinstance(given, bool):
        raise TypeError(f"{name}: {what} must be a number, got {given!r}.")
    if not given >= least:
        raise ValueError(f"{name}: {what} must be at least {least}, got {given}.")


def flags(name: str, **given: Any) -> None:
    """Checks that arguments are True or False."""
    for what, value in given.items():
        if not isinstance(value, bool | int | np.bool_) or value not in (0, 1):
            raise TypeError(f"{name}: {what} must be True or False, got {value!r}.")


def integer(name: str, what: str, given: Any, least: int | None = None) -> int:
    """An integer, as one of Python."""
    try:
        value = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: {what} must be an integer, got {given!r}.") from None
    if least is not None and value < least:
        raise ValueError(f"{name}: {what} must be at least {least}, got {value}.")
    return value
