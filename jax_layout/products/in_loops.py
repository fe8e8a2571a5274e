# SPDX-License-Identifier: Apache-2.0
"""Products of few rows in a loop, which are all computed by kernels, or all by XLA.

A call in a loop's body has XLA run its own products there another way, in which those
of one row by a transpose take up to ten times as long as without the call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core.primitives import dot_general_p, transpose_p

from jax_layout import _backends, _compat, choices, op
from jax_layout.products.letters import PRODUCTS, terms_of
from jax_layout.rewriting import Place, has_shapes, live, rewritten

_FEW = 2  # rows
_LOOPS = frozenset(("scan", "while"))


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


def goes_with_others(letters: Sequence[str], a: Any, b: Any) -> bool:
    """Whether a product in a loop is XLA's if another is, having so few rows."""
    rows = rows_of(letters, a, b)
    return 1 <= min(rows) <= _FEW < max(rows)


def is_large(*arrays: Any) -> bool:
    """Whether a core's second-level cache does not hold an operand.

    Each product of a loop with one is as the tables have it, which tell of operands
    that come from memory.
    """
    largest = max(v.size * v.dtype.itemsize for v in arrays)
    return largest > choices.level2_bytes() / choices.threads()


def together(_: str, closed: Any, platform: str, __: bool) -> Any:
    """A program in whose loops `gemm` and `linear` go with XLA's products."""
    ours = platform == "cpu" and _backends.available(platform)
    return rewritten(closed, _change) if ours and has_shapes(closed) else closed


def _change(eqns: Sequence[Any], results: Sequence[Any], at: Place) -> Sequence[Any]:
    if not at.inside & _LOOPS or choices.are_all_ours():
        return eqns
    transposes: dict[Any, Any] = {}
    ours, read = dict[int, bool](), dict[int, Any]()
    large = []
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
        if is_large(a, b):
            large.append(place)
        if eqn.primitive is not dot_general_p:
            read[place] = op.through_transposes(eqn, transposes)
            ours[place] = op.is_ours(read[place], at.slices)
    if not read or all(ours.values()):
        return eqns
    new = [*eqns]
    for place, eqn in read.items():
        if not large and ours[place]:
            new[place] = op.without_kernel(eqns[place])
        elif place in large and not ours[place] and _is_of_kept(eqn, made):
            new[place] = op.without_kernel(eqn)
    return live(new, results)


def _is_of_kept(eqn: Any, made: Collection[Any]) -> bool:
    """Whether a product is of a vector by a matrix that no step makes first."""
    matrix = max(eqn.invars[:2], key=lambda v: v.aval.size)
    few = min(rows_of(terms_of(eqn), *(v.aval for v in eqn.invars[:2])))
    return few == 1 and matrix not in made


_compat.rewrite_programs(together)
