# SPDX-License-Identifier: Apache-2.0
"""Products of few rows in a loop, which are all computed by kernels, or all by XLA.

A call in a loop's body has XLA run its own products there another way, in which those
of one row by a transpose take up to ten times as long as without the call.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core.primitives import dot_general_p, transpose_p

from jax_layout import _backends, _compat, choices, op
from jax_layout.products.as_they_lie import (
    as_they_lie,
    calls_libraries,
    is_large,
    pays_for_a_vector,
)
from jax_layout.products.letters import PRODUCTS, rows_of, terms_of
from jax_layout.rewriting import Place, has_shapes, live, rewritten

_FEW = 2  # rows


def goes_with_others(letters: Sequence[str], a: Any, b: Any) -> bool:
    """Whether a product in a loop is XLA's if another is, having so few rows."""
    rows = rows_of(letters, a, b)
    return 1 <= min(rows) <= _FEW < max(rows)


def together(_: str, closed: Any, platform: str, __: bool) -> Any:
    """A program in whose loops `gemm` and `linear` go with XLA's products."""
    ours = platform == "cpu" and _backends.available(platform)
    return rewritten(closed, _change) if ours and has_shapes(closed) else closed


def _change(eqns: Sequence[Any], results: Sequence[Any], at: Place) -> Sequence[Any]:
    if at.loop is None or choices.are_all_ours():
        return eqns
    transposes: dict[Any, Any] = {}
    ours, read = dict[int, bool](), dict[int, Any]()
    # Of operands that come from memory each product is as the tables have it.
    large = False
    made = {*at.slices}
    for place, eqn in enumerate(eqns):
        made.update(eqn.outvars)
        if eqn.primitive is transpose_p:
            transposes[eqn.outvars[0]] = eqn
        if eqn.primitive.name not in PRODUCTS:
            continue
        a, b = (v.aval for v in eqn.invars[:2])
        if not goes_with_others(terms_of(eqn), a, b):
            continue
        ours[place] = False
        large |= is_large(a, b)
        if eqn.primitive is not dot_general_p:
            read[place] = op.untransposed(eqn, transposes)
            ours[place] = op.is_ours(read[place], at.slices)
    if not ours:
        return eqns
    own = any(ours.values()) and (large or all(ours.values()))
    calls = own or calls_libraries(at.loop)
    new = [*eqns]
    for place, eqn in read.items():
        if own and ours[place]:
            continue
        if _pays(eqn, calls, made):
            new[place] = op.without_kernel(eqn)
        elif ours[place]:
            new[place] = op.without_kernel(eqns[place])
    # Beside which jax's are slower, too.
    if own or _compat.has_any(at.loop, _has_kernel):
        new = as_they_lie(new, at, calls)
    return eqns if all(map(operator.is_, new, eqns)) else live(new, results)


def _pays(eqn: Any, calls: bool, made: Collection[Any]) -> bool:
    """Whether XLA had better read what a vector's matrix is a transpose of."""
    a, b = eqn.invars[:2]
    vector, matrix = sorted((a, b), key=lambda v: v.aval.size)
    few = min(rows_of(terms_of(eqn), a.aval, b.aval))
    kept = matrix not in made
    return few == 1 and pays_for_a_vector(matrix.aval, vector.aval, calls, kept)


def _has_kernel(eqn: Any) -> bool:
    """Whether a kernel of ours computes it, if it is none that goes with others."""
    if not op.is_operator(eqn):
        return False
    if eqn.primitive.name in PRODUCTS:
        a, b = (v.aval for v in eqn.invars[:2])
        if goes_with_others(terms_of(eqn), a, b):
            return False
    return op.is_ours(eqn)


_compat.rewrite_programs(together)
