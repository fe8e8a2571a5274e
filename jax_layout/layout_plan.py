# SPDX-License-Identifier: Apache-2.0
"""Plans in which memory formats a jaxpr computes, and evaluates such a plan.

Planning walks the equations once and asks for each one's rule; a value that is
wanted in another format than it is in is converted where that is first the case,
and once. Evaluation works on physical arrays.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal

from jax_layout import _compat
from jax_layout.layout_convolution import (
    OWN_CONVOLUTIONS,
    Anchor,
    convolution_cost,
    own_convolution_cost,
)
from jax_layout.layout_rules import (
    Equation,
    Formats,
    Rule,
    Step,
    barrier,
    is_array,
    moves,
    nbytes,
)
from jax_layout.memory_format import MemoryFormat, convert, row_major

# How often a loop runs whose length is not known.
UNKNOWN_TRIPS = 2


@dataclasses.dataclass
class Cost:
    bytes_moved: int = 0
    conversions: int = 0
    barriers: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )

    def add(self, other: Cost, times: int = 1) -> None:
        self.bytes_moved += times * other.bytes_moved
        self.conversions += other.conversions
        self.barriers.update(other.barriers)

    def convert(self, v: Any, source: MemoryFormat | None, target: Any) -> bool:
        """Counts a conversion of a variable; says whether it moves anything."""
        if source is None or not moves(source, target, v.aval.shape):
            return False
        self.bytes_moved += 2 * nbytes(v.aval)
        self.conversions += 1
        return True


class Value:
    """A value in the formats that it has been wanted in so far."""

    def __init__(
        self,
        array: Any,
        format: MemoryFormat | None,
        make: Callable[[MemoryFormat], Array] | None = None,
    ):
        self.format = format  # None: it is made where it is wanted, by `make`
        self.make = make
        self.made = {} if make else {format: array}

    def get(self, format: MemoryFormat | None) -> Any:
        """The physical array; in the format that the value has, if None."""
        if format is None:
            format = self.format
        if format not in self.made:
            if self.make is not None:
                assert format is not None
                self.made[format] = self.make(format)
            else:
                assert self.format is not None and format is not None
                base = self.made[self.format]
                self.made[format] = convert(base, self.format, format)
        return self.made[format]


@dataclasses.dataclass(frozen=True)
class Nested:
    """How an equation with jaxprs of its own computes.

    Attributes:
      uses: formats that each operand is converted to before it.
      given: formats of the results.
      cost: of all that is done inside.
      run: results from operands.
    """

    uses: Sequence[Collection[MemoryFormat]]
    given: Sequence[MemoryFormat | None]
    cost: Cost
    run: Callable[[Sequence[Value]], list[Value]]


@dataclasses.dataclass
class Plan:
    """How a jaxpr computes, given its operands in some formats.

    Attributes:
      jaxpr: its first operands are what it captured.
      captured: those, row-major.
      formats: of all operands; None for those that are made where they are wanted.
      steps: one for each equation.
      given: formats of the results.
      cost: without the conversions of operands.
      used: the formats that each operand is wanted in; what differs from its own
        is a conversion that can be made before a loop, or once for all calls.
    """

    jaxpr: Any
    captured: list[Value]
    formats: list[MemoryFormat | None]
    steps: list[Step | Nested]
    given: list[MemoryFormat | None]
    cost: Cost
    used: list[dict[MemoryFormat, None]]

    def total(self) -> Cost:
        """The cost with the conversions of operands."""
        cost = Cost()
        cost.add(self.cost)
        cost.add(self.operand_cost(0, None))
        return cost

    def operand_cost(self, start: int, stop: int | None) -> Cost:
        """The cost of the conversions of some of the operands."""
        cost = Cost()
        part = slice(start, stop)
        for v, format, used in zip(
            self.jaxpr.invars[part], self.formats[part], self.used[part], strict=True
        ):
            for other in used:
                cost.convert(v, format, other)
        return cost


NestedRule = Callable[[Equation, Formats, "Planner"], Step | Nested | None]


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans jaxprs under one policy.

    Attributes:
      anchor: the policy.
      rules: of primitives without jaxprs of their own.
      nested: of those that plan on: convolutions and control flow.
      weights: whether convolutions want their weights in the order of the fast
        kernels. Not where it is a conversion on each call, which XLA makes itself.
      keep_products: whether products stay `dot_general`, by which policies of
        `jax.checkpoint` know them.
      asked: formats that the user has asked for a value, by variable.
      known: plans and jaxprs made so far; loops ask for the same ones again.
    """

    anchor: Anchor
    rules: Mapping[str, Rule]
    nested: Mapping[str, NestedRule]
    weights: bool = False
    keep_products: bool = False
    asked: dict[Any, MemoryFormat] = dataclasses.field(default_factory=dict)
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def plan(self, closed: Any, formats: Formats) -> Plan:
        """The plan of a jaxpr, closed or not, for its operands in these formats."""
        key = (id(closed), tuple(formats), self.weights, self.keep_products)
        if key not in self.known:
            if id(closed) not in self.known:
                # What has this id stays alive as long as the key is known.
                self.known[id(closed)] = closed, _opened(closed)
            jaxpr, captured = self.known[id(closed)][1]
            self.known[key] = self._walk(jaxpr, captured, formats)
        return self.known[key]

    def _walk(self, jaxpr: Any, captured: list[Value], formats: Formats) -> Plan:
        base: dict[Any, MemoryFormat | None] = {}
        have: dict[Any, set[MemoryFormat]] = {}
        used: dict[Any, dict[MemoryFormat, None]] = {v: {} for v in jaxpr.invars}
        cost = Cost()
        start = [*(value.format for value in captured), *formats]
        for v, format in zip(jaxpr.invars, start, strict=True):
            base[v] = format
        steps: list[Step | Nested] = []
        for eqn in jaxpr.eqns:
            known = [
                _format_of(v) if isinstance(v, Literal) else base[v] for v in eqn.invars
            ]
            step = self._step(eqn, known)
            steps.append(step)
            if isinstance(step, Nested):
                cost.add(step.cost)
                wanted = step.uses
            else:
                cost.bytes_moved += step.bytes_moved
                wanted = [[] if format is None else [format] for format in step.wanted]
            converted = False
            for v, source, targets in zip(eqn.invars, known, wanted, strict=True):
                for target in targets:
                    if isinstance(v, Literal) or target == source:
                        continue
                    if v in used:
                        converted |= source is not None
                    elif target not in have.setdefault(v, set()):
                        have[v].add(target)
                        converted |= cost.convert(v, source, target)
                if not isinstance(v, Literal) and v in used:
                    used[v].update(dict.fromkeys(targets))
            name = eqn.primitive.name
            if converted and name not in self.rules and name not in self.nested:
                cost.barriers[name] += 1
            base.update(zip(eqn.outvars, step.given, strict=True))
            if name == "memory_format":
                self.asked[eqn.outvars[0]] = eqn.params["format"]
        given = [
            _format_of(v) if isinstance(v, Literal) else base[v] for v in jaxpr.outvars
        ]
        return Plan(
            jaxpr, captured, start, steps, given, cost, [used[v] for v in jaxpr.invars]
        )

    def settled(
        self, closed: Any, formats: Formats, free: bool = False
    ) -> tuple[Plan, list[MemoryFormat]]:
        """A plan for operands in the formats that they are read in.

        Args:
          closed: the jaxpr.
          formats: in which its operands are made.
          free: whether bringing them to others costs nothing.

        Returns:
          the plan, and the formats that it is for.
        """
        plan = self.plan(closed, formats)
        own = len(plan.captured)
        variables = plan.jaxpr.invars[own:]
        start = definite(formats, variables)
        read = definite(preferred(formats, plan.used[own:]), variables)
        if read == start:
            return self.plan(closed, start), start
        other = self.plan(closed, read)
        cost = other.total()
        if not free:
            for v, source, target in zip(variables, formats, read, strict=True):
                cost.convert(v, source, target)
        if cost.bytes_moved <= plan.total().bytes_moved:
            return other, read
        return self.plan(closed, start), start

    def _step(self, eqn: Equation, formats: Formats) -> Step | Nested:
        name = eqn.primitive.name
        step: Step | Nested | None = None
        if name in self.nested:
            step = self.nested[name](eqn, formats, self)
        elif name in self.rules:
            step = self.rules[name](eqn, formats)
        return barrier(eqn) if step is None else step


def preferred(
    formats: Formats, used: Sequence[Collection[MemoryFormat]]
) -> list[MemoryFormat | None]:
    """For each operand, made in some format, another one that it is read in."""
    return [
        next((format for format in wanted if format != own), own)
        for own, wanted in zip(formats, used, strict=True)
    ]


def definite(formats: Formats, variables: Sequence[Any]) -> list[MemoryFormat]:
    """The formats of values that are to be there: none that are made when wanted."""
    return [
        row_major(v.aval.ndim) if format is None else format
        for v, format in zip(variables, formats, strict=True)
    ]


def _opened(closed: Any) -> tuple[Any, list[Value]]:
    if not isinstance(closed, ClosedJaxpr):
        closed = ClosedJaxpr(closed, ())
    captured = [Value(c, row_major(np.ndim(c))) for c in closed.consts]
    return _compat.live_jaxpr(closed), captured


def emit(
    plan: Plan, operands: Sequence[Value], captured: Sequence[Value] | None = None
) -> list[Value]:
    """Evaluates a plan.

    Args:
      plan: the plan.
      operands: one for each operand of the jaxpr that was planned.
      captured: what it captured, where that has been converted already.

    Returns:
      its results.
    """
    captured = plan.captured if captured is None else captured
    env: dict[Any, Value] = dict(
        zip(plan.jaxpr.invars, [*captured, *operands], strict=True)
    )

    def read(v: Any) -> Value:
        if isinstance(v, Literal):
            return Value(v.val, _format_of(v))
        return env[v]

    for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True):
        values = [read(v) for v in eqn.invars]
        if isinstance(step, Nested):
            results = step.run(values)
        elif step.emit_in is not None:
            results = [Value(None, None, _maker(step.emit_in, values))]
        else:
            assert step.emit is not None
            arrays = [v.get(f) for v, f in zip(values, step.wanted, strict=True)]
            results = [
                Value(array, format)
                for array, format in zip(step.emit(*arrays), step.given, strict=True)
            ]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in plan.jaxpr.outvars]


def _format_of(literal: Any) -> MemoryFormat:
    return row_major(literal.aval.ndim)


def _maker(
    emit_in: Callable[..., Array], values: Sequence[Value]
) -> Callable[[MemoryFormat], Array]:
    return lambda format: emit_in(format, *values)


# The jaxprs, by parameter, that are part of the program around them.
JAXPRS = ("jaxpr", "call_jaxpr", "body_jaxpr", "cond_jaxpr", "branches")
_OPENED = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "checkpoint", "remat2", "scan", "while", "cond",
}  # fmt: skip


def inner_jaxprs(eqn: Equation) -> list[Any]:
    """The jaxprs of control flow that a plan goes into."""
    if eqn.primitive.name not in _OPENED:
        return []
    found = [eqn.params[name] for name in JAXPRS if name in eqn.params]
    flat = [j for f in found for j in (f if isinstance(f, tuple | list) else [f])]
    return [getattr(j, "jaxpr", j) for j in flat]


def original_bytes(jaxpr: Any, known: dict[int, int] | None = None) -> int:
    """What a program re-orders as it stands, on CPUs."""
    known = {} if known is None else known
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("transpose", "permute"):
            axes = eqn.params.get("permutation", eqn.params.get("axes"))
            source = row_major(len(axes))
            if moves(source.transposed(axes), source, eqn.outvars[0].aval.shape):
                total += 2 * nbytes(eqn.outvars[0].aval)
        elif name == "conv_general_dilated":
            arrays = [v.aval for v in (*eqn.invars, *eqn.outvars)]
            total += convolution_cost(eqn.params["dimension_numbers"], *arrays)
        elif name in OWN_CONVOLUTIONS:
            total += own_convolution_cost(eqn, eqn.params["conv"])
        elif inner := inner_jaxprs(eqn):
            costs = [original_bytes(j, known) for j in inner]
            trips = {"scan": eqn.params.get("length"), "while": UNKNOWN_TRIPS}
            once = max(costs) if name == "cond" else sum(costs)
            total += trips.get(name, 1) * once
    known[id(jaxpr)] = total
    return total


def unsupported(jaxpr: Any) -> tuple[Equation, str] | None:
    """The first equation that cannot be evaluated on other memory, and why."""
    for eqn in jaxpr.eqns:
        for v in (*eqn.invars, *eqn.outvars):
            if isinstance(v, Literal):
                continue
            if _compat.is_reference(v.aval):
                return eqn, "works on a mutable reference"
            if is_array(v) and _compat.is_explicitly_sharded(v.aval):
                return eqn, "has an axis sharded over an explicit mesh axis"
        for inner in inner_jaxprs(eqn):
            found = unsupported(inner)
            if found is not None:
                return found
    return None
