# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions in the memory format of their operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_layout.formats.annotations import memory_format
from jax_layout.formats.physical import aligned
from jax_layout.formats.tags import formatted, store

P = ParamSpec("P")
R = TypeVar("R")


def elementwise(function: Callable[P, R]) -> Callable[P, R]:
    """Makes an elementwise function keep the memory format of its operands.

    The result of one operand has its format. Of several, the largest array decides,
    the first among equals; the others are brought to its format once. So NHWC with
    a number, or with a value per channel (shape `(C, 1, 1)` or `(1, C, 1, 1)`), is
    NHWC. An untagged value is row-major.

    Args:
      function: of arrays that it broadcasts, taken as positional arguments; others
        are passed on. It must not care where an element lies.

    Returns:
      the function on logical values.

    Source: the rules for elementwise operations in PyTorch's RFC #19092.

    >>> softsign = elementwise(lambda x: x / (1 + abs(x)))
    >>> softsign(jnp.ones((1, 1, 1, 2))).tolist()
    [[[[0.5, 0.5]]]]
    """

    @functools.wraps(function)
    def on_physical(*operands: Any, **options: Any) -> R:
        arrays = [x for x in operands if getattr(x, "ndim", 0)]
        largest = max(arrays, key=lambda x: x.size, default=None)
        if largest is None or largest.ndim < max(x.ndim for x in arrays):
            return function(*operands, **options)
        format = memory_format(largest)
        if format.row_major:
            return function(*operands, **options)
        physical = [
            aligned(x, format) if getattr(x, "ndim", 0) else x for x in operands
        ]
        out = function(*physical, **options)  # type: ignore[arg-type]
        return jax.tree.map(lambda y: store(y, format), out)

    return formatted(on_physical)


@elementwise
def relu(x: ArrayLike) -> Array:
    """max(x, 0), in the memory format of x.

    >>> relu(jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return jax.nn.relu(x)


@elementwise
def relu6(x: ArrayLike) -> Array:
    """min(max(x, 0), 6), in the memory format of x."""
    return jax.nn.relu6(x)


@elementwise
def leaky_relu(x: ArrayLike, negative_slope: float = 0.01) -> Array:
    """x, times negative_slope where it is negative, in the memory format of x."""
    return jax.nn.leaky_relu(x, negative_slope)


@elementwise
def gelu(x: ArrayLike, approximate: str = "none") -> Array:
    """x times the normal distribution function of x, in the memory format of x.

    Args:
      x: any shape.
      approximate: "none", or "tanh" for the usual approximation.

    Raises:
      ValueError: if approximate is neither.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(
            f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}."
        )
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@elementwise
def silu(x: ArrayLike) -> Array:
    """x * sigmoid(x), in the memory format of x."""
    return jax.nn.silu(x)


@elementwise
def sigmoid(x: ArrayLike) -> Array:
    """1 / (1 + exp(-x)), in the memory format of x."""
    return jax.nn.sigmoid(x)


@elementwise
def tanh(x: ArrayLike) -> Array:
    """The hyperbolic tangent, in the memory format of x."""
    return jnp.tanh(x)


@elementwise
def hardswish(x: ArrayLike) -> Array:
    """x * relu6(x + 3) / 6, in the memory format of x."""
    return jax.nn.hard_swish(x)


@elementwise
def add(x: ArrayLike, y: ArrayLike) -> Array:
    """x + y, in the memory format of the larger operand: see `elementwise`.

    >>> add(jnp.zeros((2, 3, 4, 4)), jnp.ones((3, 1, 1))).shape
    (2, 3, 4, 4)
    """
    return jnp.add(x, y)


@elementwise
def subtract(x: ArrayLike, y: ArrayLike) -> Array:
    """x - y, in the memory format of the larger operand: see `elementwise`."""
    return jnp.subtract(x, y)


@elementwise
def multiply(x: ArrayLike, y: ArrayLike) -> Array:
    """x * y, in the memory format of the larger operand: see `elementwise`."""
    return jnp.multiply(x, y)


@elementwise
def divide(x: ArrayLike, y: ArrayLike) -> Array:
    """x / y, in the memory format of the larger operand: see `elementwise`."""
    return jnp.divide(x, y)


@elementwise
def maximum(x: ArrayLike, y: ArrayLike) -> Array:
    """max(x, y), in the memory format of the larger operand: see `elementwise`."""
    return jnp.maximum(x, y)


@elementwise
def minimum(x: ArrayLike, y: ArrayLike) -> Array:
    """min(x, y), in the memory format of the larger operand: see `elementwise`."""
    return jnp.minimum(x, y)


@elementwise
def where(condition: ArrayLike, x: ArrayLike, y: ArrayLike) -> Array:
    """x where the condition holds, else y, in the memory format of the largest."""
    return jnp.where(condition, x, y)
