# SPDX-License-Identifier: Apache-2.0
"""Chooses where values are converted so that the fewest bytes move: a minimum cut.

A plan that follows formats converts a value where it is first wanted in another one,
as late as can be. Here each equation that can also compute in the format in which its
result is wanted further down is a node of a graph; anchors, barriers, arguments and
results have one format and are its ends. A value whose maker and readers lie on
different sides is converted once, for twice its bytes, so the smallest cut between
the ends is the best placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.optimize.rules import (
    Equation,
    Formats,
    format_of,
    moves,
    nbytes,
    regroup,
)
from jax_layout.products.letters import PRODUCTS

StepFor = Callable[[Equation, Formats, MemoryFormat | None], Any]
TRANSPOSES = ("transpose", "permute")

# Ends of the graph; the nodes of equations and values come after them.
_SOURCE, _SINK = 0, 1
# Bytes are scaled to this sum, so that flows fit in 32 bits.
_SCALE, _INFINITE = 1 << 29, 1 << 30


def least_cost(
    plan: Any,
    ends: Formats,
    shares: Sequence[float],
    movable: Callable[[Equation], bool],
    step_for: StepFor,
    staying: Callable[[Equation], Any] | None = None,
) -> list[Any] | None:
    """Steps that move the fewest bytes.

    Args:
      plan: with steps that take values as they come.
      ends: formats in which the results are wanted; None or nothing for any.
      shares: of each operand, the part of its conversion that counts.
      movable: whether an equation may compute in several formats.
      step_for: how an equation computes on operands in these formats, if its result
        is wanted in this one.
      staying: what a transpose does that stays one; left out, it is another name for
        what lies in memory.

    Returns:
      a step for each equation, or None if those of the plan are as good.
    """
    graph = _Program(plan, ends)
    if not graph.may_gain(movable):
        return None
    others = graph.alternatives(movable, step_for, staying)
    taken = _cut(*graph.terms(others, shares))
    if not taken:
        return None
    return [others[i] if i in taken else step for i, step in enumerate(plan.steps)]


class _Program:
    """A plan's values, with what makes and reads each."""

    def __init__(self, plan: Any, ends: Formats):
        self.eqns, self.steps = plan.jaxpr.eqns, plan.steps
        self.invars = plan.jaxpr.invars
        # The format in which each value comes.
        self.base = dict(zip(self.invars, plan.formats, strict=True))
        self.maker: dict[Any, tuple[int, int]] = {}
        for i, (eqn, step) in enumerate(zip(self.eqns, self.steps, strict=True)):
            self.base.update(zip(eqn.outvars, step.given, strict=True))
            self.maker.update((v, (i, k)) for k, v in enumerate(eqn.outvars))
        self.ends = [
            (v, end)
            for v, end in zip(plan.jaxpr.outvars, ends, strict=False)
            if end is not None and self._converted(v, end)
        ]

    def _converted(self, v: Any, format: MemoryFormat) -> bool:
        """Whether a value has to be converted to be in a format."""
        if isinstance(v, Literal) or self.base[v] is None:
            return False
        return moves(self.base[v], format, v.aval.shape)

    def may_gain(self, movable: Callable[[Equation], bool]) -> bool:
        """Whether a value is converted beside an equation that could move."""

        def made_by_movable(v: Any) -> bool:
            return v in self.maker and movable(self.eqns[self.maker[v][0]])

        return any(made_by_movable(v) for v, _ in self.ends) or any(
            self._converted(v, format) and (movable(eqn) or made_by_movable(v))
            for eqn, step in zip(self.eqns, self.steps, strict=True)
            for v, formats in zip(eqn.invars, step.uses, strict=True)
            for format in formats
        )

    def alternatives(
        self,
        movable: Callable[[Equation], bool],
        step_for: StepFor,
        staying: Callable[[Equation], Any] | None,
    ) -> dict[int, Any]:
        """For equations, by number, the step in the format that is wanted further down.

        Where none is, row-major: several operands may come so.
        """
        # By the steps as they are; and by what would be the steps in their place.
        wishes: dict[Any, MemoryFormat] = dict(reversed(self.ends))
        weaker: dict[Any, MemoryFormat] = {}

        def ask(wanted: dict[Any, MemoryFormat], eqn: Equation, step: Any) -> None:
            for v, formats in zip(eqn.invars, step.uses, strict=True):
                for format in formats:
                    if self._converted(v, format):
                        wanted.setdefault(v, format)

        others = {}
        for i, eqn in reversed(list(enumerate(self.eqns))):
            step = self.steps[i]
            ask(wishes, eqn, step)
            if not eqn.outvars or step.given[0] is None or not movable(eqn):
                continue
            out = eqn.outvars[0]
            wish = wishes.get(out) or weaker.get(out)
            if wish is None and self._converted(out, row_major(out.aval.ndim)):
                wish = row_major(out.aval.ndim)
            formats = None if wish is None else self._operands(eqn, wish)
            if wish is None or formats is None:
                continue
            if staying is not None and eqn.primitive.name in TRANSPOSES:
                other = staying(eqn)
            else:
                other = step_for(eqn, formats, wish)
            given = other.given[0]
            if given is not None and not moves(given, wish, out.aval.shape):
                others[i] = other
                ask(weaker, eqn, other)
        return others

    def _operands(
        self, eqn: Equation, wish: MemoryFormat
    ) -> list[MemoryFormat | None] | None:
        """Formats of operands from which the first result could come in this one."""
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        if name in TRANSPOSES:
            axes = eqn.params.get("permutation", eqn.params.get("axes"))
            return [wish.transposed(np.argsort(axes).tolist())]
        if name in PRODUCTS:
            return [format_of(v, self.base) for v in eqn.invars]
        if wish.row_major:
            return [row_major(v.aval.ndim) for v in eqn.invars]
        if name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
            before = regroup(wish, out.shape, eqn.invars[0].aval.shape)
            return None if before is None else [before]
        return [
            format_of(v, self.base)
            if isinstance(v, Literal)
            else wish
            if self.base[v] is not None and v.aval.ndim == out.ndim
            else self.base[v]
            for v in eqn.invars
        ]

    def terms(
        self, others: dict[int, Any], shares: Sequence[float]
    ) -> tuple[list[_Term], list[tuple[float, int, bool]]]:
        """What conversions cost, and what an equation costs in one of its formats."""
        terms: dict[Any, _Term] = {}
        single: list[tuple[float, int, bool]] = []
        share = dict(zip(self.invars, shares, strict=True))
        # The formats of each value: as it comes, and as it would come or is wanted.
        second: dict[Any, MemoryFormat] = {}

        def place(v: Any, format: MemoryFormat) -> int | None:
            if not self._converted(v, format):
                return 0
            known = second.setdefault(v, format)
            return None if moves(known, format, v.aval.shape) else 1

        for v, format in self.base.items():
            if format is None:
                continue
            maker: _Side = 0
            i, k = self.maker.get(v, (-1, 0))
            if i in others and others[i].given[k] is not None:
                maker = (i, False) if place(v, others[i].given[k]) else 0
            weight = 2 * nbytes(v.aval) * share.get(v, 1.0)
            terms[v] = _Term(weight, maker, [])
        for i, (eqn, step) in enumerate(zip(self.eqns, self.steps, strict=True)):
            other = others.get(i)
            if other is not None:
                extra = _inside(other) - _inside(step)
                single.append((abs(extra), i, extra > 0))
            for k, v in enumerate(eqn.invars):
                if isinstance(v, Literal) or v not in terms:
                    continue
                sides = {place(v, format) for format in step.uses[k]}
                if other is None:
                    terms[v].readers += [side for side in sides if side is not None]
                    continue
                after = {place(v, format) for format in other.uses[k]}
                if sides == after:
                    terms[v].readers += [side for side in sides if side is not None]
                elif len(sides) == len(after) == 1 and None not in sides | after:
                    terms[v].readers.append((i, 1 in sides))
                else:  # a third format costs a conversion wherever it comes from
                    for which, found in ((False, sides), (True, after)):
                        if None in found:
                            single.append((terms[v].weight, i, which))
        for v, end in self.ends:
            if (side := place(v, end)) is not None:
                terms[v].readers.append(side)
        return list(terms.values()), single


def _inside(step: Any) -> int:
    """Bytes that a step moves itself."""
    cost = getattr(step, "cost", None)
    return step.bytes_moved if cost is None else cost.bytes_moved


# Which of a value's two formats somebody takes: always this one, or (i, flip), the
# second if equation i takes its alternative, or with flip if it does not.
_Side = int | tuple[int, bool]


class _Term:
    """A conversion's cost: of a value, its maker's side and its readers'."""

    def __init__(self, weight: float, maker: _Side, readers: list[_Side]):
        self.weight, self.maker, self.readers = weight, maker, readers

    def fixed(self) -> bool:
        """Whether it costs the same whatever equations take."""
        known = {side for side in self.readers if isinstance(side, int)}
        if isinstance(self.maker, int):
            known.add(self.maker)
        sides = {self.maker, *self.readers}
        return len(known) == 2 or len(sides) == 1 or not self.weight


class _Parities:
    """Which equations take their alternatives together, and which in turns.

    Below a transpose of the program's own, "as it comes" may be what is the
    alternative above it.
    """

    def __init__(self) -> None:
        self.parent: dict[int, tuple[int, bool]] = {}

    def find(self, i: int) -> tuple[int, bool]:
        path, parity = [], False
        while i in self.parent:
            path.append((i, parity))
            i, step = self.parent[i]
            parity ^= step
        for below, before in path:
            self.parent[below] = i, before ^ parity
        return i, parity

    def joined(self, a: tuple[int, bool], b: tuple[int, bool]) -> bool:
        """Has two sides agree; False if they are known to be opposites."""
        (first, odd), (second, other) = self.find(a[0]), self.find(b[0])
        parity = odd ^ a[1] ^ other ^ b[1]
        if first != second:
            self.parent[first] = second, parity
            return True
        return not parity


def _cut(terms: Sequence[_Term], single: list[tuple[float, int, bool]]) -> set[int]:
    """The equations that take their alternatives where the terms' sum is least."""
    from scipy import sparse
    from scipy.sparse import csgraph

    parities = _Parities()
    kept = []
    for term in sorted(terms, key=lambda term: -term.weight):
        if term.fixed():
            continue
        chosen: list[_Side] = []
        first = None
        for side in (term.maker, *term.readers):
            if isinstance(side, tuple):
                first = first or side
                if not parities.joined(side, first):
                    continue  # a cut cannot say this; the plan's cost will
            chosen.append(side)
        assert first is not None
        if chosen[0] == term.maker:
            kept.append((term.weight, chosen, first))
    if not kept:
        return set()
    numbers: dict[int, int] = {}

    def vertex(side: _Side, sign: bool) -> int:
        if isinstance(side, tuple):
            return numbers.setdefault(side[0], len(numbers) + 2)
        return _SOURCE if bool(side) ^ sign else _SINK

    total = sum(weight for weight, *_ in kept) + sum(weight for weight, *_ in single)
    scale = min(1.0, _SCALE / total)
    edges: list[tuple[int, int, int]] = []
    shared = []
    for weight, chosen, first in kept:
        sign = parities.find(first[0])[1] ^ first[1]
        maker, *readers = (vertex(side, sign) for side in chosen)
        different = sorted(set(readers) - {maker})
        capacity = max(1, int(scale * weight))
        if len(different) == 1:
            edges += [(maker, r, capacity) for r in different]
            edges += [(r, maker, capacity) for r in different]
        elif different:
            shared.append((maker, different, capacity))
    for weight, i, alternative in single:
        if i in numbers and weight:
            high = alternative ^ parities.find(i)[1]
            ends = (numbers[i], _SINK) if high else (_SOURCE, numbers[i])
            edges.append((*ends, max(1, int(scale * weight))))
    count = len(numbers) + 2
    for maker, readers, capacity in shared:
        # One conversion serves all readers on the other side, whichever that is.
        edges += [(count, maker, capacity), *((r, count, _INFINITE) for r in readers)]
        count += 1
        edges += [(maker, count, capacity), *((count, r, _INFINITE) for r in readers)]
        count += 1
    useful = [edge for edge in edges if edge[1] != _SOURCE and edge[0] != _SINK]
    if not useful:
        return set()
    rows, columns, capacities = zip(*useful, strict=True)
    network = sparse.csr_matrix(
        (np.array(capacities, np.int32), (rows, columns)), shape=(count, count)
    )
    flow = csgraph.maximum_flow(network, _SOURCE, _SINK).flow
    residual = network - flow
    residual.data = np.where(residual.data > 0, 1, 0)
    residual.eliminate_zeros()
    reached = set(
        csgraph.breadth_first_order(residual, _SOURCE, return_predecessors=False)
    )
    return {i for i, n in numbers.items() if (n in reached) ^ parities.find(i)[1]}
