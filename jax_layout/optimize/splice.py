# SPDX-License-Identifier: Apache-2.0
"""Puts equations of functions in the place of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jax_layout import _compat
from jax_layout.optimize.rules import Equation


def spliced(
    function: Callable[..., list[Any]],
    operands: Sequence[Any],
    results: Sequence[Any],
    source: Equation,
) -> tuple[list[Equation], list[Any]]:
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


def live(eqns: Sequence[Equation], results: Sequence[Any]) -> list[Equation]:
    """What results need, and what has effects."""
    needed = {v for v in results if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return kept[::-1]
