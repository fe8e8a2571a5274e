# SPDX-License-Identifier: Apache-2.0
"""Puts other equations in the place of a program's, in calls and loops too."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jax_layout import _compat

_CONTROL = frozenset(("scan", "while", "cond"))
_BODIES = {"scan": "jaxpr", "while": "body_jaxpr"}
# Whose operands are the arguments of what they call.
_CALLS = frozenset("jit pjit checkpoint remat2 closed_call core_call".split())


@dataclasses.dataclass(frozen=True)
class Place:
    """Where equations are.

    Attributes:
      inside: which of "scan", "while" and "cond" they are in.
      slices: the variables of a scan's body, or of what it calls, that are other
        slices in each step.
      loop: the jaxpr of the innermost loop's body; None outside of loops.
    """

    inside: frozenset[str]
    slices: Sequence[Any] = ()
    loop: Any = None


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
    return _Rewriting(change).of(closed, Place(frozenset()))


def has_shapes(closed: Any) -> bool:
    """Whether the extents of what a program is given are numbers, not symbols."""
    return all(isinstance(n, int) for aval in closed.in_avals for n in aval.shape)


class _Rewriting:
    def __init__(self, change: Change) -> None:
        self._change = change
        self._done: dict[Any, Any] = {}

    def of(self, value: Any, at: Place, sliced: Sequence[int] = ()) -> Any:
        """What becomes of a jaxpr, of a tuple or list of some, or of anything else.

        Args:
          value: that.
          at: where the equations of a jaxpr are.
          sliced: which of its arguments a scan slices.
        """
        if type(value) in (tuple, list):
            parts = [self.of(part, at) for part in value]
            return value if _same(parts, value) else type(value)(parts)
        if not isinstance(value, ClosedJaxpr | Jaxpr):
            return value
        key = id(value), at.inside, id(at.loop), sliced
        if key not in self._done:
            if isinstance(value, Jaxpr):  # which from jax 0.12 is what is closed, too
                slices = tuple(value.invars[i] for i in sliced)
                place = dataclasses.replace(at, slices=slices)
                inner = [self._equation(eqn, place) for eqn in value.eqns]
                eqns = self._change(inner, value.outvars, place)
                new = value if _same(eqns, value.eqns) else value.replace(eqns=[*eqns])
            else:
                jaxpr = self.of(value.jaxpr, at, sliced)
                new = value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
            self._done[key] = new
        return self._done[key]

    def _equation(self, eqn: Any, at: Place) -> Any:
        name, places = eqn.primitive.name, range(len(eqn.invars))
        sliced: Sequence[int] = ()
        if name in _CALLS:
            sliced = tuple(i for i in places if eqn.invars[i] in at.slices)
        if name in _CONTROL:
            if name == "scan":
                sliced = tuple(places[sum(_compat.scan_arity(eqn.params)) :])
            body = _BODIES.get(name)
            loop = at.loop if body is None else eqn.params[body]
            at = Place(at.inside | {name}, loop=loop)
        params = {key: self.of(v, at, sliced) for key, v in eqn.params.items()}
        changed = any(params[key] is not v for key, v in eqn.params.items())
        return eqn.replace(params=params) if changed else eqn


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def spliced(
    function: Callable[..., list[Any]],
    operands: Sequence[Any],
    results: Sequence[Any],
    source: Any,
) -> tuple[list[Any], list[Any]]:
    """The equations of a function of a program's variables, and its results.

    Args:
      function: on arrays.
      operands: variables.
      results: variables that its first results become.
      source: the equation in whose place it is.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    jaxpr = _compat.live_jaxpr(jax.make_jaxpr(function)(*avals))
    names = dict(zip(jaxpr.invars, operands, strict=True))
    names.update(zip(jaxpr.outvars, results, strict=False))

    def named(v: Any) -> Any:
        return v if isinstance(v, Literal) else names.get(v, v)

    eqns = [
        eqn.replace(
            invars=[named(v) for v in eqn.invars],
            outvars=[named(v) for v in eqn.outvars],
            source_info=source.source_info,
        )
        for eqn in jaxpr.eqns
    ]
    return eqns, [named(v) for v in jaxpr.outvars]


def live(eqns: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """What results need, and what has effects."""
    needed = {v for v in results if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return kept[::-1]
