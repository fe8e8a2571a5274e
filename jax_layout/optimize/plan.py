# SPDX-License-Identifier: Apache-2.0
"""Plans in which memory formats a jaxpr computes, and evaluates such a plan.

Planning walks the equations once and asks for each one's rule for the formats that
its operands come in; cut.py then moves conversions to where they cost least.
A value is converted to each format once. Evaluation works on physical arrays.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal, Var

from jax_layout import _compat
from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.optimize.attention import attended
from jax_layout.optimize.convolution import Anchor
from jax_layout.optimize.cut import TRANSPOSES, least_cost
from jax_layout.optimize.layers import layered
from jax_layout.optimize.products import (
    attention,
    dot_general,
    fused_transposes,
    own_product,
)
from jax_layout.optimize.rules import (
    Equation,
    Formats,
    Rule,
    Step,
    barrier,
    format_of,
    is_array,
    moves,
    nbytes,
    transpose_cost,
    without_units,
)
from jax_layout.optimize.values import Value
from jax_layout.products.as_they_lie import is_large
from jax_layout.products.in_loops import goes_with_others
from jax_layout.products.letters import PRODUCTS, terms_of

# How often a loop runs whose length is not known.
UNKNOWN_TRIPS = 2


@dataclasses.dataclass
class Cost:
    bytes_moved: int = 0
    conversions: int = 0
    kernels: int = 0  # of ours, for what was XLA's
    barriers: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )

    def add(self, other: Cost, times: int = 1) -> None:
        self.bytes_moved += times * other.bytes_moved
        self.conversions += other.conversions
        self.kernels += other.kernels
        self.barriers.update(other.barriers)

    def convert(self, v: Any, source: MemoryFormat | None, target: Any) -> bool:
        """Counts a conversion of a variable; says whether it moves anything."""
        if source is None or not moves(source, target, v.aval.shape):
            return False
        self.bytes_moved += 2 * nbytes(v.aval)
        self.conversions += 1
        return True


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


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr in which the bodies of plain calls stand in their place.

    Attributes:
      invars: its first are what it captured.
      eqns: none is a call that does nothing but call.
      outvars: the results.
    """

    invars: list[Any]
    eqns: list[Equation]
    outvars: list[Any]


@dataclasses.dataclass
class Plan:
    """How a jaxpr computes, given its operands in some formats.

    Attributes:
      jaxpr: with calls inlined; its first operands are what it captured.
      captured: those, row-major.
      formats: of all operands; None for those that are made where they are wanted.
      steps: one for each equation.
      given: formats of the results.
      cost: without the conversions of operands.
      used: the formats that each operand is wanted in; what differs from its own
        is a conversion that can be made before a loop, or once for all calls.
      have: other formats that each value is in, for one equation or another.
    """

    jaxpr: Flat
    captured: list[Value]
    formats: list[MemoryFormat | None]
    steps: list[Step | Nested]
    given: list[MemoryFormat | None]
    cost: Cost
    used: list[dict[MemoryFormat, None]]
    have: dict[Any, set[MemoryFormat]]

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

    def result_cost(self, ends: Formats) -> Cost:
        """The cost of the results' conversions, without those made for an equation."""
        cost = Cost()
        made = {v: set(formats) for v, formats in self.have.items()}
        for v, given, end in zip(self.jaxpr.outvars, self.given, ends, strict=False):
            if end is None or isinstance(v, Literal):
                continue
            if end not in made.setdefault(v, set()):
                made[v].add(end)
                cost.convert(v, given, end)
        return cost

    def whole(self, ends: Formats, shares: Sequence[float]) -> float:
        """Bytes moved, with operands' conversions by share and those of results."""
        total = float(self.cost.bytes_moved + self.result_cost(ends).bytes_moved)
        for i, share in enumerate(shares):
            total += share * self.operand_cost(i, i + 1).bytes_moved
        return total


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
      plain: whether convolutions stay jax's own, which kernels of ours lower when
        they are next.
      in_loop: whether what is planned is a loop's, or in one.
      asked: formats that the user has asked for a value, by variable.
      known: plans and jaxprs made so far; loops ask for the same ones again.
      packed: variables that are wanted in the own order of the kernels that read
        them as weights.
      fused: results of transposes that XLA writes for nothing.
      theirs: results of products that XLA fuses with what lies between them.
      kept: results of transposes beside products of XLA's, which it has there already.
      attended: results of calls of attention that were products and softmaxes, with
        the bytes of scores that are not written and read.
      layers: results of calls that were products, biases and gelus.
      sliced: what a loop slices out of a stack, or is a transpose of that.
    """

    anchor: Anchor
    rules: Mapping[str, Rule]
    nested: Mapping[str, NestedRule]
    weights: bool = False
    keep_products: bool = False
    plain: bool = False
    in_loop: bool = False
    asked: dict[Any, MemoryFormat] = dataclasses.field(default_factory=dict)
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)
    packed: set[Any] = dataclasses.field(default_factory=set)
    fused: set[Any] = dataclasses.field(default_factory=set)
    theirs: set[Any] = dataclasses.field(default_factory=set)
    kept: set[Any] = dataclasses.field(default_factory=set)
    attended: dict[Any, int] = dataclasses.field(default_factory=dict)
    layers: set[Any] = dataclasses.field(default_factory=set)
    sliced: set[Any] = dataclasses.field(default_factory=set)

    def plan(
        self,
        closed: Any,
        formats: Formats,
        ends: Formats | None = None,
        constants: int = 0,
        trips: int = 1,
    ) -> Plan:
        """The plan of a jaxpr, closed or not, for its operands in these formats.

        Args:
          closed: the jaxpr.
          formats: of its operands.
          ends: in which its results are wanted; None for those that are in any.
          constants: how many operands, the first, are converted before its loop.
          trips: how often the loop runs.
        """
        ends = () if ends is None else tuple(ends)
        options = self.weights, self.keep_products, self.in_loop
        key = (id(closed), tuple(formats), ends, constants, trips, *options)
        if key not in self.known:
            jaxpr, captured = self._opened(closed)
            if self.in_loop:
                self.theirs.update(self._mixed(jaxpr.eqns))
            start = [*(value.format for value in captured), *formats]
            plan = _assembled(jaxpr, captured, start, self._follow(jaxpr, start))
            hoisted = [1 / trips] * (len(captured) + constants)
            shares = hoisted + [1.0] * (len(formats) - constants)
            transposes = any(eqn.primitive.name in TRANSPOSES for eqn in jaxpr.eqns)
            for staying in (None, self.staying)[: 1 + transposes]:
                steps = least_cost(plan, ends, shares, self.movable, self.step, staying)
                if steps is not None:
                    other = _assembled(jaxpr, captured, start, steps)
                    if other.whole(ends, shares) < plan.whole(ends, shares):
                        plan = other
            self.known[key] = plan
        return self.known[key]

    def _opened(self, closed: Any) -> tuple[Flat, list[Value]]:
        if id(closed) not in self.known:
            # What has this id stays alive as long as the key is known.
            flat, captured = opened(closed, self.plain)
            if not self.keep_products:
                flat = self._with_calls(flat, captured)
            self.known[id(closed)] = closed, (flat, captured)
            self.theirs.update(attention(flat.eqns))
            fused = fused_transposes(flat.eqns, flat.outvars)
            self.fused.update(fused)
            self.kept.update(v for v, near in fused.items() if self._keeps(near))
        return self.known[id(closed)][1]

    def _with_calls(self, flat: Flat, captured: Sequence[Value]) -> Flat:
        """A jaxpr with calls in place of each attention and layer that is worth one."""
        first = flat.invars[: len(captured)]
        values = zip(first, (x.get(x.format) for x in captured), strict=True)
        known = {v: x for v, x in values if not isinstance(x, jax.core.Tracer)}
        eqns, calls = attended(flat.eqns, flat.outvars, known)
        self.attended.update(calls)
        eqns, layers = layered(eqns, flat.outvars, known)
        self.layers.update(layers)
        return dataclasses.replace(flat, eqns=eqns)

    def _keeps(
        self, products: Sequence[tuple[Equation, Sequence[MemoryFormat]]]
    ) -> bool:
        """Whether products are XLA's, whether or not they read through a transpose."""
        return bool(products) and not any(
            self._product(eqn, formats).ours
            for eqn, read in products
            for formats in (read, [row_major(f.ndim) for f in read])
        )

    def _product(
        self, eqn: Equation, formats: Formats, wish: MemoryFormat | None = None
    ) -> Step:
        stays = self.keep_products or eqn.outvars[0] in self.theirs
        largest = max(eqn.invars, key=lambda v: v.aval.size)
        sliced = isinstance(largest, Var) and largest in self.sliced
        return dot_general(
            eqn, formats, stays, wish, in_loop=self.in_loop, sliced=sliced
        )

    def _mixed(self, eqns: Sequence[Equation]) -> list[Any]:
        """The results of a loop's products that are to be XLA's, as others are."""
        axes = {eqn.outvars[0]: eqn.params["permutation"]
                for eqn in eqns if eqn.primitive.name == "transpose"}  # fmt: skip
        ours = {}
        for eqn in eqns:
            if eqn.primitive.name != "dot_general":
                continue
            arrays: list[Any] = [v.aval for v in eqn.invars]
            if goes_with_others(terms_of(eqn), *arrays):
                if is_large(*arrays):
                    return []
                formats = [
                    row_major(aval.ndim).transposed(axes[v])
                    if isinstance(v, Var) and v in axes
                    else row_major(aval.ndim)
                    for v, aval in zip(eqn.invars, arrays, strict=True)
                ]
                ours[eqn.outvars[0]] = self._product(eqn, formats).ours
        return [] if all(ours.values()) else [*ours]

    def mark_slices(self, closed: Any, count: int) -> None:
        """Notes that so many operands of a loop's body, the last, are of a stack."""
        jaxpr, _ = self._opened(closed)
        self.sliced.update(jaxpr.invars[len(jaxpr.invars) - count :])
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in TRANSPOSES:
                (x,) = eqn.invars
                if isinstance(x, Var) and x in self.sliced:
                    self.sliced.update(eqn.outvars)

    def read_once(self, closed: Any) -> list[Any]:
        """The operands of a jaxpr that one equation reads, and nothing else."""
        jaxpr, _ = self._opened(closed)
        reads = [v for eqn in jaxpr.eqns for v in eqn.invars] + jaxpr.outvars
        times = collections.Counter(v for v in reads if not isinstance(v, Literal))
        return [v for v in jaxpr.invars if times[v] == 1]

    def _follow(self, jaxpr: Flat, formats: Formats) -> list[Step | Nested]:
        """Steps that take values in the formats in which they come."""
        base = dict(zip(jaxpr.invars, formats, strict=True))
        steps: list[Step | Nested] = []
        for eqn in jaxpr.eqns:
            known = [format_of(v, base) for v in eqn.invars]
            step = self.step(eqn, known)
            steps.append(step)
            base.update(zip(eqn.outvars, step.given, strict=True))
            if eqn.primitive.name == "memory_format":
                self.asked[eqn.outvars[0]] = eqn.params["format"]
        return steps

    def movable(self, eqn: Equation) -> bool:
        """Whether an equation may have several formats to compute in."""
        name = eqn.primitive.name
        return name in self.rules or name in PRODUCTS or name in _DERIVED

    def staying(self, eqn: Equation) -> Step:
        """A transpose that stays one, as XLA fuses it or our kernel writes it."""
        free = eqn.outvars[0] in self.fused
        return dataclasses.replace(
            barrier(eqn), bytes_moved=0 if free else transpose_cost(eqn)
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

    def step(
        self, eqn: Equation, formats: Formats, wish: MemoryFormat | None = None
    ) -> Step | Nested:
        """How an equation computes on operands in these formats.

        Args:
          eqn: the equation.
          formats: of its operands.
          wish: the format in which its result is wanted, for those that may choose.
        """
        name = eqn.primitive.name
        step: Step | Nested | None = None
        formats = [
            without_units(f, v.aval.shape) if is_array(v) else f
            for f, v in zip(formats, eqn.invars, strict=True)
        ]
        if name == "dot_general":
            step = self._product(eqn, formats, wish)
        elif name in PRODUCTS:
            step = own_product(eqn, formats, wish)
        elif name == "transpose" and wish is None and eqn.outvars[0] in self.kept:
            plain = formats[0] is not None and formats[0].row_major
            step = self.staying(eqn) if plain else self.rules[name](eqn, formats)
        elif name in self.nested:
            step = self.nested[name](eqn, formats, self)
        elif name in self.rules:
            step = self.rules[name](eqn, formats)
        else:
            return barrier(eqn, unknown=True)
        if eqn.outvars and eqn.outvars[0] in self.attended:
            assert isinstance(step, Step)
            step = dataclasses.replace(step, ours=True)
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


def _assembled(
    jaxpr: Flat,
    captured: list[Value],
    formats: list[MemoryFormat | None],
    steps: list[Step | Nested],
) -> Plan:
    """The plan of these steps, one for each equation, and its cost."""
    base = dict(zip(jaxpr.invars, formats, strict=True))
    have: dict[Any, set[MemoryFormat]] = {}
    used: dict[Any, dict[MemoryFormat, None]] = {v: {} for v in jaxpr.invars}
    made: dict[Any, tuple[Equation, Step]] = {}  # where they are wanted
    cost = Cost()

    def want(v: Any, target: MemoryFormat) -> bool:
        """Has a value in a format; says whether a conversion is new for it."""
        if isinstance(v, Literal):
            return False
        if v in used:
            used[v][target] = None
            return base[v] is not None and base[v] != target
        if target == base[v] or target in have.setdefault(v, set()):
            return False
        have[v].add(target)
        if v in made:
            eqn, step = made[v]
            assert step.needs is not None
            pairs = zip(eqn.invars, step.needs(target), strict=True)
            return any([want(operand, format) for operand, format in pairs])
        return cost.convert(v, base[v], target)

    for eqn, step in zip(jaxpr.eqns, steps, strict=True):
        if isinstance(step, Nested):
            cost.add(step.cost)
        else:
            cost.bytes_moved += step.bytes_moved
            cost.kernels += step.ours
            if step.emit_in is not None:
                made[eqn.outvars[0]] = eqn, step
        pairs = zip(eqn.invars, step.uses, strict=True)
        converted = [want(v, format) for v, formats in pairs for format in formats]
        if any(converted) and isinstance(step, Step) and step.unknown:
            cost.barriers[eqn.primitive.name] += 1
        base.update(zip(eqn.outvars, step.given, strict=True))
    given = [format_of(v, base) for v in jaxpr.outvars]
    reads = [used[v] for v in jaxpr.invars]
    have.update((v, set(formats)) for v, formats in used.items())
    return Plan(jaxpr, captured, formats, steps, given, cost, reads, have)


_CALLS = ("jit", "pjit", "closed_call", "core_call")
_DERIVED = ("custom_jvp_call", "custom_vjp_call")


def opened(closed: Any, last: bool = False) -> tuple[Flat, list[Value]]:
    """A jaxpr without the calls that only call, and all that it has captured.

    Args:
      closed: the jaxpr.
      last: whether nothing differentiates it any more, so that functions with
        derivatives of their own only call, too.
    """
    calls = (*_CALLS, *_DERIVED) if last else _CALLS
    eqns: list[Equation] = []
    captured: dict[Var, Value] = {}

    def inlined(closed: Any, operands: Sequence[Any], call: Any = None) -> list[Any]:
        if not isinstance(closed, ClosedJaxpr):
            closed = ClosedJaxpr(closed, ())
        constants = []
        for value in closed.consts:
            constants.append(Var(jax.typeof(value)))
            captured[constants[-1]] = Value(value, row_major(np.ndim(value)))
        jaxpr = _compat.live_jaxpr(closed)
        env = dict(zip(jaxpr.invars, [*constants, *operands], strict=True))

        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            invars = [read(v) for v in eqn.invars]
            source = eqn.source_info
            if call is not None:
                source = _compat.inlined_source(call, source)
            if eqn.primitive.name in calls and _compat.is_plain_call(eqn.params):
                body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                results = inlined(body, invars, source)
            else:
                results = [Var(v.aval) for v in eqn.outvars]
                eqns.append(
                    eqn.replace(invars=invars, outvars=results, source_info=source)
                )
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    given = getattr(closed, "jaxpr", closed).invars
    operands = [Var(v.aval) for v in given]
    outvars = inlined(closed, operands)
    flat = Flat([*captured, *operands], eqns, outvars)
    return flat, list(captured.values())


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
            return Value(v.val, row_major(np.ndim(v.val)))
        return env[v]

    for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True):
        values = [read(v) for v in eqn.invars]
        with _compat.in_place_of(eqn):
            results = _applied(step, values)
        for value in results:
            value.maker = eqn
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in plan.jaxpr.outvars]


def _applied(step: Step | Nested, values: Sequence[Value]) -> list[Value]:
    if isinstance(step, Nested):
        return step.run(values)
    if step.emit_in is not None:
        return [Value(None, None, _maker(step, values))]
    assert step.emit is not None
    arrays = [v.get(f) for v, f in zip(values, step.wanted, strict=True)]
    made = step.emit(*arrays)
    return [Value(array, f) for array, f in zip(made, step.given, strict=True)]


def _maker(step: Step, values: Sequence[Value]) -> Callable[[MemoryFormat], Array]:
    def make(format: MemoryFormat) -> Array:
        assert step.emit_in is not None and step.needs is not None
        operands = zip(values, step.needs(format), strict=True)
        return step.emit_in(format, *(v.get(f) for v, f in operands))

    return make
