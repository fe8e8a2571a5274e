# SPDX-License-Identifier: Apache-2.0
"""Permutes: the axes of an array in another order, written out row-major."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_layout.arguments import check_dtype
from jax_layout.kernel import Kernel
from jax_layout.measured import Work
from jax_layout.op import Op, define
from jax_layout.plain import jnp, lax


def permute(x: ArrayLike, axes: Sequence[int]) -> Array:
    """Reorders the axes of an array, as `torch.permute` does.

    The result is a new row-major array, moved by a kernel of ours at about the
    speed of a copy. Permutes that move nothing (the identity, or only axes of
    extent 1) cost no kernel. See docs/permute.md.

    Args:
      x: array of any shape and dtype.
      axes: one integer per axis of x, in a sequence or an array; axis i of the
        result is axis `axes[i]` of x. Negative axes count from the last.

    Returns:
      shape `tuple(x.shape[a] for a in axes)`, dtype of `x`.

    Raises:
      TypeError: if x is not an array, or an axis is not an integer.
      ValueError: if axes do not reorder the axes of x.

    >>> permute(jnp.zeros((2, 3, 5)), (2, 0, -2)).shape
    (5, 2, 3)
    """
    return _permute(_array("permute", x), axes, "permute")


def transpose(a: ArrayLike, axes: Sequence[int] | None = None) -> Array:
    """Drop-in for `jax.numpy.transpose`.

    Args:
      a: array of any shape and dtype.
      axes: the order of the axes; None reverses them.

    Returns:
      shape `tuple(a.shape[i] for i in axes)`, dtype of `a`.

    Raises:
      TypeError: if a is not an array, or an axis is not an integer.
      ValueError: if axes do not reorder the axes of a.

    >>> transpose(jnp.zeros((2, 3, 5))).shape
    (5, 3, 2)
    """
    x = _array("transpose", a)
    return _permute(x, range(x.ndim)[::-1] if axes is None else axes, "transpose")


def matrix_transpose(x: ArrayLike, /) -> Array:
    """Drop-in for `jax.numpy.matrix_transpose`: swaps the last two axes.

    Args:
      x: shape `(..., m, n)`, any dtype.

    Returns:
      shape `(..., n, m)`, dtype of `x`.

    Raises:
      TypeError: if x is not an array.
      ValueError: if x has fewer than two axes.

    >>> matrix_transpose(jnp.zeros((2, 3, 5))).shape
    (2, 5, 3)
    """
    matrices = _array("matrix_transpose", x)
    if matrices.ndim < 2:
        raise ValueError(
            "matrix_transpose: x must have at least two axes, "
            f"got shape {matrices.shape}."
        )
    return swapaxes(matrices, -1, -2)


def swapaxes(a: ArrayLike, axis1: int, axis2: int) -> Array:
    """Drop-in for `jax.numpy.swapaxes`.

    Args:
      a: array of any shape and dtype.
      axis1: the one axis.
      axis2: the other; negative axes count from the last.

    Returns:
      `a` with the two axes exchanged.

    Raises:
      TypeError: if a is not an array, or an axis is not an integer.
      ValueError: if an axis is out of range.

    >>> swapaxes(jnp.zeros((2, 3, 5)), 0, 2).shape
    (5, 3, 2)
    """
    x = _array("swapaxes", a)
    first, second = _axes("swapaxes", (axis1, axis2), x.ndim)
    order = list(range(x.ndim))
    order[first], order[second] = second, first
    return _permute(x, order, "swapaxes")


def moveaxis(
    a: ArrayLike, source: int | Sequence[int], destination: int | Sequence[int]
) -> Array:
    """Drop-in for `jax.numpy.moveaxis`.

    Args:
      a: array of any shape and dtype.
      source: the axes to move.
      destination: where each of them goes; the other axes keep their order.

    Returns:
      `a` with the axes moved.

    Raises:
      TypeError: if a is not an array, or an axis is not an integer.
      ValueError: if axes repeat, are out of range, or differ in number.

    >>> moveaxis(jnp.zeros((2, 3, 5)), 0, -1).shape
    (3, 5, 2)
    """
    x = _array("moveaxis", a)
    sources = _axes("moveaxis", source, x.ndim, distinct=True)
    targets = _axes("moveaxis", destination, x.ndim, distinct=True)
    if len(sources) != len(targets):
        raise ValueError(
            "moveaxis: source and destination must name as many axes, "
            f"got {source} and {destination}."
        )
    order = [axis for axis in range(x.ndim) if axis not in sources]
    for target, axis in sorted(zip(targets, sources, strict=True)):
        order.insert(target, axis)
    return _permute(x, order, "moveaxis")


def _permute(x: Any, axes: Sequence[int], name: str) -> Array:
    order = _axes(name, axes, x.ndim, shape=x.shape)
    if order == tuple(range(x.ndim)) and isinstance(x, Array):
        return x
    return _apply(x, order)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _apply(x: Array, axes: tuple[int, ...]) -> Array:
    return permute_p(x, axes=axes)


def _array(name: str, x: Any) -> Any:
    """x, if it is an array or a scalar, as jax.numpy understands it."""
    check_dtype(name, "x", x)
    if isinstance(x, Array | np.ndarray):
        return x
    if not isinstance(x, int | float | complex | np.generic) and not hasattr(
        x, "__jax_array__"
    ):
        raise TypeError(f"{name}: x must be an array, got {type(x).__name__}.")
    return jnp.asarray(x)


def _axes(
    name: str,
    axes: Any,
    rank: int,
    *,
    distinct: bool = False,
    shape: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Axes counted from the first, all checked; with a shape, a whole reordering."""
    given = axes
    if not isinstance(axes, Sequence) and not getattr(axes, "ndim", 0):
        axes = (axes,)
    try:
        order = tuple(operator.index(axis) for axis in axes)
    except TypeError:
        raise TypeError(f"{name}: axes must be integers, got {given}.") from None
    if shape is not None:
        order = tuple(axis + rank if axis < 0 else axis for axis in order)
        if sorted(order) != list(range(rank)):
            raise ValueError(
                f"{name}: axes must reorder the axes of x, got axes={tuple(axes)} "
                f"for x of shape {shape}."
            )
        return order
    for axis in order:
        if not -rank <= axis < rank:
            raise ValueError(f"{name}: axes must lie in [{-rank}, {rank}), got {axis}.")
    order = tuple(axis % rank for axis in order)
    if distinct and len(set(order)) != len(order):
        raise ValueError(f"{name}: axes must not repeat, got {given}.")
    return order


def _lax(x: Array, *, axes: tuple[int, ...]) -> Array:
    return lax.transpose(x, axes)


def _kernel(platform: str, x: Any, *, axes: tuple[int, ...]) -> Kernel | None:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return None  # PRNG keys and their like
    if jax.dtypes.itemsize_bits(x.dtype) < 8:
        return None  # int4 and its like, several elements to a byte
    moved = [axis for axis in axes if x.shape[axis] != 1]
    if x.size == 0 or moved == sorted(moved):
        return None  # nothing moves: XLA relabels the buffer
    return Kernel(
        {
            "shape": np.array(x.shape, np.int64),
            "axes": np.array(axes, np.int64),
            "itemsize": np.int64(x.dtype.itemsize),
        },
        work=_work(x, axes),
    )


def _work(x: Any, axes: tuple[int, ...]) -> Work:
    """In the tables of choices: elements, and the runs at the end of x and of y."""
    moving = [axis for axis in axes if x.shape[axis] != 1]
    kept = [axis for axis in range(x.ndim) if x.shape[axis] != 1]
    run, last = 1, moving[-1]
    for axis, before in zip(moving[::-1], kept[kept.index(last) :: -1], strict=False):
        if axis != before:
            break
        run *= x.shape[axis]
    case = f"permute {x.dtype.itemsize}"
    if last == kept[-1]:
        return Work(f"{case} rows", (x.size, run, run))
    return Work(case, (x.size, x.shape[kept[-1]], run))


def _transpose(ct: Array, x: Any, *, axes: tuple[int, ...]) -> list[Array]:
    return [permute_p(ct, axes=_inverse(axes))]


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.argsort(axes))


def _batch(
    operands: Sequence[Array], dims: Sequence[int], *, axes: tuple[int, ...]
) -> tuple[Array, int]:
    (x,), (dim,) = operands, dims
    order = [axis + (axis >= dim) for axis in axes]
    # The batch axis stays where it was: vmap(f, k, k) is then one permute.
    order.insert(dim, dim)
    return permute_p(x, axes=tuple(order)), dim


def _sharding(x: Any, *, axes: tuple[int, ...]) -> str:
    names = [f"a{axis}" for axis in range(x.ndim)]
    return " ".join(names) + " -> " + " ".join(names[axis] for axis in axes)


permute_p = define(
    Op(
        name="permute",
        lax=_lax,
        kernel=_kernel,
        transpose=_transpose,
        batch=_batch,
        sharding=_sharding,
    )
)
