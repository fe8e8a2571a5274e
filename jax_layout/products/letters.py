# SPDX-License-Identifier: Apache-2.0
"""The letters of a contraction, "mk,kn->mn", its axes; and what they make of arrays."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core.primitives import dot_general_p

from jax_layout import _backends

# The primitives that are products of two arrays, with letters for axes.
PRODUCTS = ("dot_general", "gemm", "linear")


def terms(spec: str) -> tuple[str, str, str]:
    """The letters of both operands and of the result."""
    operands, y = spec.split("->")
    a, b = operands.split(",")
    return a, b, y


def letters_of(dimension_numbers: Any, a: int, b: int) -> tuple[str, str, str]:
    """The terms of a `dot_general` of so many axes, in the notation of einsum."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
    letters = iter(string.ascii_letters)
    x = [next(letters) for _ in range(a)]
    shared = dict(zip((*rhs_sum, *rhs_batch), (*lhs_sum, *lhs_batch), strict=True))
    w = [x[shared[i]] if i in shared else next(letters) for i in range(b)]
    y = [x[i] for i in lhs_batch]
    y += [x[i] for i in range(a) if i not in (*lhs_sum, *lhs_batch)]
    y += [w[i] for i in range(b) if i not in shared]
    return "".join(x), "".join(w), "".join(y)


def terms_of(eqn: Any) -> tuple[str, str, str]:
    """The letters of the operands and of the result of a product, jax's or ours."""
    if eqn.primitive is not dot_general_p:
        return terms(eqn.params["spec"])
    a, b = (v.aval.ndim for v in eqn.invars)
    return letters_of(eqn.params["dimension_numbers"], a, b)


def rows_of(letters: Sequence[str], a: Any, b: Any) -> tuple[int, int]:
    """The extents of both operands' axes that the other lacks, multiplied.

    Args:
      letters: of the operands' axes.
      a: the first operand.
      b: the second.
    """
    x, w, *_ = letters
    first, second = (
        math.prod(n for i, n in zip(term, v.shape, strict=True) if i not in other)
        for term, v, other in ((x, a, w), (w, b, x))
    )
    return first, second


def unused_letter(spec: str) -> str:
    return next(letter for letter in string.ascii_letters if letter not in spec)


@functools.lru_cache(maxsize=4096)
def order_of(
    spec: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
    operand_itemsize: int,
    result_itemsize: int,
) -> tuple[str, str, str, int]:
    """The letters in the order that costs least, and the bytes it costs."""
    native = _backends.module("cpu")
    return native.gemm_order(spec, a, b, operand_itemsize, result_itemsize)


@functools.lru_cache(maxsize=4096)
def plan_of(spec: str, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, Any] | None:
    """How it is computed in place; None if the axes do not line up for that."""
    return _backends.module("cpu").gemm_plan(spec, a, b)


def reordered(sharding: Any, axes: Sequence[int]) -> Any:
    """The sharding of an array's transpose; None of None."""
    if sharding is None:
        return None
    spec = tuple(sharding.spec) + (None,) * (len(axes) - len(sharding.spec))
    return sharding.update(spec=jax.P(*(spec[axis] for axis in axes)))


def untransposed(term: str, axes: Sequence[int]) -> str:
    """The letters of what an array with these letters is a transpose of."""
    letters = dict(zip(axes, term, strict=True))
    return "".join(letters[axis] for axis in range(len(term)))


def turned(
    place: int, axes: Sequence[int], *, spec: str, **params: Any
) -> dict[str, Any] | None:
    """The product of what an operand is a transpose of: `Op.turned`."""
    if place > 1:
        return None
    *operands, y = terms(spec)
    operands[place] = untransposed(operands[place], axes)
    return {"spec": f"{operands[0]},{operands[1]}->{y}", **params}


def written(
    axes: Sequence[int],
    a: Any,
    b: Any,
    *c: Any,
    spec: str,
    out_sharding: Any,
    **params: Any,
) -> dict[str, Any] | None:
    """The product whose result is the transpose of another's: `Op.written`."""
    x, w, y = terms(spec)
    spec = f"{x},{w}->{''.join(y[axis] for axis in axes)}"
    if c or plan_of(spec, a.shape, b.shape) is None:
        return None
    placed = reordered(out_sharding, axes)
    return {"spec": spec, "out_sharding": placed, **params}
