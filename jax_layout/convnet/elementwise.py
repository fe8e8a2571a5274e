# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions in the memory format of their operands."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax import Array
from jax.typing import ArrayLike

from jax_layout.formats import pointwise
from jax_layout.formats.annotations import memory_format
from jax_layout.formats.physical import aligned
from jax_layout.formats.tags import formatted, store
from jax_layout.plain import jnp, nn

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
        are passed on. It must not care where an element lies: it is made of
        elementwise primitives of jax, also in calls, of broadcasts, and of random
        numbers of the operands' shape, which are drawn in memory order. Arrays that
        it closes over must be numbers.

    Returns:
      the function on logical values; it raises a ValueError when it is traced, in
      any format, if it is not elementwise.

    Raises:
      TypeError: if function cannot be called.

    Source: the rules for elementwise operations in PyTorch's RFC #19092.

    >>> softsign = elementwise(lambda x: x / (1 + abs(x)))
    >>> softsign(jnp.ones((1, 1, 1, 2))).tolist()
    [[[[0.5, 0.5]]]]
    """

    if not callable(function):
        raise TypeError(f"elementwise: function must be callable, got {function!r}.")
    seen: set[Any] = set()

    def check(
        operands: Sequence[Any], physical: Sequence[Any], options: dict[str, Any]
    ) -> None:
        arrays = _arrays(operands)
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            _check(function, operands, physical, options)
            return
        # Of eager calls the first is traced, and others alike are not.
        rest = [
            (type(x), None if isinstance(x, float) else x)  # one of many that vary
            for x in operands
            if not getattr(x, "ndim", 0)
        ]
        alike = (*((x.shape, x.dtype) for x in arrays), *rest, *sorted(options.items()))
        try:
            new = alike not in seen
        except TypeError:  # not hashable
            return _check(function, operands, physical, options)
        if new:
            _check(function, operands, physical, options)
            seen.add(alike)

    return _on_physical(function, check)


def _arrays(operands: Sequence[Any]) -> list[Any]:
    return [x for x in operands if getattr(x, "ndim", 0)]


def _check(
    function: Callable[..., Any],
    operands: Sequence[Any],
    physical: Sequence[Any],
    options: dict[str, Any],
) -> None:
    places = [i for i, x in enumerate(operands) if getattr(x, "ndim", 0)]

    def of_arrays(*arrays: Any) -> Any:
        given = list(operands)
        for i, x in zip(places, arrays, strict=True):
            given[i] = x
        return function(*given, **options)

    if places:
        pointwise.check("elementwise", of_arrays, _arrays(operands), _arrays(physical))


def _on_physical(
    function: Callable[P, R], check: Callable[..., None]
) -> Callable[P, R]:
    """What is left of `elementwise` for a function that is so."""

    @functools.wraps(function)
    def on_physical(*operands: Any, **options: Any) -> R:
        arrays = _arrays(operands)
        largest = max(arrays, key=lambda x: x.size, default=None)
        if largest is None or largest.ndim < max(x.ndim for x in arrays):
            format = None
        else:
            format = memory_format(largest)
        if format is None or format.row_major:
            check(operands, operands, options)
            return function(*operands, **options)
        physical = [
            aligned(x, format) if getattr(x, "ndim", 0) else x for x in operands
        ]
        check(operands, physical, options)
        out = function(*physical, **options)  # type: ignore[arg-type]
        return jax.tree.map(lambda y: store(y, format), out)

    return formatted(on_physical)


def _of_numbers(function: Callable[P, R]) -> Callable[P, R]:
    """`elementwise` of a function of ours: its operands are arrays or numbers."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.annotation == "ArrayLike"]

    def check(
        operands: Sequence[Any], physical: Sequence[Any], options: dict[str, Any]
    ) -> None:
        given = {**dict(zip(names, operands, strict=False)), **options}
        for name in names:
            x = given.get(name, 0)
            if not (hasattr(x, "dtype") or isinstance(x, numbers.Number)):
                raise TypeError(
                    f"{function.__name__}: {name} must be an array or a number, "
                    f"got {x!r}."
                )

    return _on_physical(function, check)


@_of_numbers
def relu(x: ArrayLike) -> Array:
    """max(x, 0), in the memory format of x.

    >>> relu(jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return nn.relu(x)


@_of_numbers
def relu6(x: ArrayLike) -> Array:
    """min(max(x, 0), 6), in the memory format of x."""
    return nn.relu6(x)


@_of_numbers
def leaky_relu(x: ArrayLike, negative_slope: float = 0.01) -> Array:
    """x, times negative_slope where it is negative, in the memory format of x."""
    return nn.leaky_relu(x, negative_slope)


@_of_numbers
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
    return nn.gelu(x, approximate=approximate == "tanh")


@_of_numbers
def silu(x: ArrayLike) -> Array:
    """x * sigmoid(x), in the memory format of x."""
    return nn.silu(x)


@_of_numbers
def sigmoid(x: ArrayLike) -> Array:
    """1 / (1 + exp(-x)), in the memory format of x."""
    return nn.sigmoid(x)


@_of_numbers
def tanh(x: ArrayLike) -> Array:
    """The hyperbolic tangent, in the memory format of x."""
    return jnp.tanh(x)


@_of_numbers
def hardswish(x: ArrayLike) -> Array:
    """x * relu6(x + 3) / 6, in the memory format of x."""
    return nn.hard_swish(x)


@_of_numbers
def add(x: ArrayLike, y: ArrayLike) -> Array:
    """x + y, in the memory format of the larger operand: see `elementwise`.

    >>> add(jnp.zeros((2, 3, 4, 4)), jnp.ones((3, 1, 1))).shape
    (2, 3, 4, 4)
    """
    return jnp.add(x, y)


@_of_numbers
def subtract(x: ArrayLike, y: ArrayLike) -> Array:
    """x - y, in the memory format of the larger operand: see `elementwise`."""
    return jnp.subtract(x, y)


@_of_numbers
def multiply(x: ArrayLike, y: ArrayLike) -> Array:
    """x * y, in the memory format of the larger operand: see `elementwise`."""
    return jnp.multiply(x, y)


@_of_numbers
def divide(x: ArrayLike, y: ArrayLike) -> Array:
    """x / y, in the memory format of the larger operand: see `elementwise`."""
    return jnp.divide(x, y)


@_of_numbers
def maximum(x: ArrayLike, y: ArrayLike) -> Array:
    """max(x, y), in the memory format of the larger operand: see `elementwise`."""
    return jnp.maximum(x, y)


@_of_numbers
def minimum(x: ArrayLike, y: ArrayLike) -> Array:
    """min(x, y), in the memory format of the larger operand: see `elementwise`."""
    return jnp.minimum(x, y)


@_of_numbers
def where(condition: ArrayLike, x: ArrayLike, y: ArrayLike) -> Array:
    """x where the condition holds, else y, in the memory format of the largest."""
    return jnp.where(condition, x, y)
