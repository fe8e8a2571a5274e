# SPDX-License-Identifier: Apache-2.0
"""The letters of a contraction, "mk,kn->mn": its axes."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any


def terms(spec: str) -> tuple[str, str, str]:
    """The letters of both operands and of the result."""
    operands, y = spec.split("->")
    a, b = operands.split(",")
    return a, b, y


def unused_letter(spec: str) -> str:
    return next(letter for letter in string.ascii_letters if letter not in spec)


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
