# SPDX-License-Identifier: Apache-2.0
"""One call of attention in place of dot, softmax, dot, and one of each product with a
gelu, before a program is lowered.

What is behind a product is not to be seen when it is lowered. So a program that holds
some is lowered from equations with the calls in.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jax_layout import _compat
from jax_layout.optimize.attention import attended
from jax_layout.optimize.layers import CURVES, layered
from jax_layout.optimize.plan import opened

# The jaxprs, by parameter, of what repeats or chooses, and has no derivative here.
_INNER = {
    "scan": ("jaxpr",),
    "while": ("body_jaxpr",),
    "cond": ("branches",),
}


def with_calls(closed: Any) -> tuple[Any, list[Any]]:
    """A program with calls in place of each attention and layer that is worth one.

    Args:
      closed: its jaxpr.

    Returns:
      its jaxpr, the same one if there is none; and the calls, equations.
    """
    if closed.effects or not _may_gain(closed.jaxpr):
        return closed, []
    flat, captured = opened(closed)
    given = flat.invars[: len(captured)]
    values = [x.get(x.format) for x in captured]
    known = dict(zip(given, values, strict=True))
    eqns, results = attended(flat.eqns, flat.outvars, known)
    eqns, layers = layered(eqns, flat.outvars, known)
    ours = {*results, *layers}
    calls = [eqn for eqn in eqns if eqn.outvars and eqn.outvars[0] in ours]
    for i, eqn in enumerate(eqns):
        eqns[i], inner = _with_inner_calls(eqn)
        calls += inner
    if not calls:
        return closed, []

    # Put together, not traced: nothing is computed of a program but what is changed.
    jaxpr = closed.jaxpr.replace(
        constvars=given,
        invars=flat.invars[len(given) :],
        outvars=flat.outvars,
        eqns=eqns,
        debug_info=closed.jaxpr.debug_info,
    )
    return ClosedJaxpr(jaxpr, values), calls


def _with_inner_calls(eqn: Any) -> tuple[Any, list[Any]]:
    """The same of the bodies of a loop or a choice."""
    params, calls = dict(eqn.params), []
    for name in _INNER.get(eqn.primitive.name, ()):
        one = not isinstance(params[name], Sequence)
        made = []
        for body in [params[name]] if one else params[name]:
            new, inner = with_calls(body)
            if new.consts and new is not body:
                new, inner = body, []
            made.append(new)
            calls += inner
        params[name] = made[0] if one else tuple(made)
    return (eqn.replace(params=params) if calls else eqn), calls


def _may_gain(jaxpr: Any) -> bool:
    names = collections.Counter(_names(jaxpr))
    attention = names["exp"] and names["dot_general"] >= 2
    return bool(attention or names["dot_general"] and names.keys() & CURVES)


def _names(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in _compat.inner_jaxprs(eqn.params):
            yield from _names(inner)
