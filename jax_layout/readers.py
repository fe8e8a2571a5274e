# SPDX-License-Identifier: Apache-2.0
"""What reads the results of operators, in a program that is yet to be lowered.

XLA writes out a transpose behind a custom call, of which nothing is known yet when the
call is lowered: as the gradient of `x @ w.T` by w has it, a transpose of that by `w.T`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.extend.core.primitives import transpose_p

from jax_layout.rewriting import Place, rewritten

Written = Callable[[Any, Sequence[int]], dict[str, Any] | None]


def without_transposes(closed: Any, written: Written) -> Any:
    """A program in which results that are only transposed are written so at once.

    Args:
      closed: its jaxpr.
      written: `written(equation, axes)`: the parameters with which the equation's
        primitive has the transpose of its result, by these axes, for result; None if
        it cannot.

    Returns:
      its jaxpr, the same one if nothing changed.
    """

    def change(eqns: Sequence[Any], results: Sequence[Any], _: Place) -> list[Any]:
        read = [v for eqn in eqns for v in eqn.invars] + [*results]
        times = collections.Counter(v for v in read if not isinstance(v, Literal))
        new: list[Any] = []
        makers: dict[Any, int] = {}
        for eqn in eqns:
            if eqn.primitive is transpose_p and times.get(eqn.invars[0]) == 1:
                place = makers.get(eqn.invars[0])
                axes = eqn.params["permutation"]
                params = None if place is None else written(new[place], axes)
                if place is not None and params is not None:
                    new[place] = new[place].replace(params=params, outvars=eqn.outvars)
                    makers[eqn.outvars[0]] = place
                    continue
            if len(eqn.outvars) == 1:
                makers[eqn.outvars[0]] = len(new)
            new.append(eqn)
        return new

    return rewritten(closed, change)
