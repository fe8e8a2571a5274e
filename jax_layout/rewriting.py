# SPDX-License-Identifier: Apache-2.0
"""Puts other equations in the place of a program's, in calls and loops too."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_layout import _compat

_CONTROL = ("scan", "while", "cond")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where equations are.

    Attributes:
      inside: whether in a loop or a branch.
      slices: the variables of a scan's body that are other slices in each step.
    """

    inside: bool
    slices: Sequence[Any] = ()


# change(equations, results, place) -> equations
Change = Callable[[Sequence[Any], Sequence[Any], Place], Sequence[Any]]


def rewritten(closed: Any, change: Change) -> Any:
    """A program whose equations are others that compute the same.

    Args:
      closed: its jaxpr.
      change: asked of those of each jaxpr, once those of the jaxprs inside are changed.

    Returns:
      its jaxpr, the same one if nothing changed. What several equations call stays one.
    """
    return _Rewriting(change).of(closed, False)


class _Rewriting:
    def __init__(self, change: Change) -> None:
        self._change = change
        self._done: dict[Any, Any] = {}

    def of(self, value: Any, inside: bool, slices_from: int | None = None) -> Any:
        """What becomes of a jaxpr, of a tuple or list of some, or of anything else."""
        if type(value) in (tuple, list):
            parts = [self.of(part, inside) for part in value]
            return value if _same(parts, value) else type(value)(parts)
        if not isinstance(value, ClosedJaxpr | Jaxpr):
            return value
        key = id(value), inside, slices_from
        if key not in self._done:
            if isinstance(value, Jaxpr):  # which from jax 0.12 is what is closed, too
                inner = [self._equation(eqn, inside) for eqn in value.eqns]
                slices = () if slices_from is None else value.invars[slices_from:]
                eqns = self._change(inner, value.outvars, Place(inside, slices))
                new = value if _same(eqns, value.eqns) else value.replace(eqns=[*eqns])
            else:
                jaxpr = self.of(value.jaxpr, inside, slices_from)
                new = value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
            self._done[key] = new
        return self._done[key]

    def _equation(self, eqn: Any, inside: bool) -> Any:
        name = eqn.primitive.name
        first = sum(_compat.scan_arity(eqn.params)) if name == "scan" else None
        inside |= name in _CONTROL
        params = {key: self.of(v, inside, first) for key, v in eqn.params.items()}
        changed = any(params[key] is not v for key, v in eqn.params.items())
        return eqn.replace(params=params) if changed else eqn


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
