# SPDX-License-Identifier: Apache-2.0
"""Names of axes, and what equations make of them; axes of size 1 have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_layout.products.letters import letters_of

Names = tuple[str | None, ...]


class Unknown(Exception):
    """An equation that makes nothing of what is known here."""


def letters_of_sides(eqn: Any) -> tuple[Names, Names]:
    """The letters of a product's operands; of axes of size 1 none."""
    a, b = (v.aval for v in eqn.invars)
    x, w, _ = letters_of(eqn.params["dimension_numbers"], a.ndim, b.ndim)
    return _without_units(x, a.shape), _without_units(w, b.shape)


def result_names(eqn: Any) -> Names:
    a, b = (v.aval.ndim for v in eqn.invars)
    y = letters_of(eqn.params["dimension_numbers"], a, b)[2]
    return _without_units(y, eqn.outvars[0].aval.shape)


def _without_units(letters: str, shape: Sequence[int]) -> Names:
    return tuple(None if n == 1 else i for i, n in zip(letters, shape, strict=True))


def renamed(eqn: Any, names: Names) -> Names:
    """The names of the axes of what orders, adds or drops some."""
    params, shape = eqn.params, eqn.outvars[0].aval.shape
    before = eqn.invars[0].aval.shape
    if eqn.primitive.name == "transpose":
        return tuple(names[axis] for axis in params["permutation"])
    if eqn.primitive.name == "broadcast_in_dim":
        axes = params["broadcast_dimensions"]
        return tuple(
            names[axes.index(i)] if i in axes else None for i in range(len(shape))
        )
    if [n for n in before if n != 1] != [n for n in shape if n != 1]:
        raise Unknown
    rest = iter(name for name, n in zip(names, before, strict=True) if n != 1)
    return tuple(None if n == 1 else next(rest) for n in shape)


def renamed_from(eqn: Any, names: Names) -> Names:
    """The names of the operand's axes, from those of the result's."""
    params, before = eqn.params, eqn.invars[0].aval.shape
    shape = eqn.outvars[0].aval.shape
    if eqn.primitive.name == "transpose":
        axes = list(params["permutation"])
        return tuple(names[axes.index(i)] for i in range(len(axes)))
    if eqn.primitive.name == "broadcast_in_dim":
        return tuple(names[i] for i in params["broadcast_dimensions"])
    rest = iter(name for name, n in zip(names, shape, strict=True) if n != 1)
    return tuple(None if n == 1 else next(rest) for n in before)


def met(one: Names, other: Names) -> Names:
    """The names of what is computed of two values, element by element."""
    if len(one) != len(other):
        raise Unknown
    if any(a != b and None not in (a, b) for a, b in zip(one, other, strict=True)):
        raise Unknown
    return tuple(b if a is None else a for a, b in zip(one, other, strict=True))


def reduced(names: Names, eqn: Any) -> tuple[str | None, Names]:
    """What a reduction is over, and the names that are left."""
    axes, shape = eqn.params["axes"], eqn.invars[0].aval.shape
    gone = [names[axis] for axis in axes if shape[axis] != 1]
    if len(gone) > 1 or None in gone:
        raise Unknown
    left = tuple(name for i, name in enumerate(names) if i not in axes)
    return (gone[0] if gone else None), left
