# SPDX-License-Identifier: Apache-2.0
"""Finds memory formats for a whole function, and runs it in them.

`optimize_layout` traces a function to a jaxpr. Planning walks the equations once:
convolutions anchor channels-last, primitives that do not care follow the largest
operand that is not row-major, transposes and reshapes only rename what lies in
memory, and the rest wants row-major operands. Emission then evaluates the plan on
physical arrays; a conversion is made where a format is first wanted, and once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Literal

from jax_layout import _compat
from jax_layout.layout_rules import (
    RULES,
    Anchor,
    Equation,
    Formats,
    Step,
    barrier,
    convolution,
    convolution_cost,
    moves,
    nbytes,
)
from jax_layout.memory_format import (
    Channels,
    MemoryFormat,
    convert,
    resolve,
    row_major,
)

P = ParamSpec("P")
R = TypeVar("R")

# How often a loop runs whose length is not known.
_UNKNOWN_TRIPS = 2
# A loop's carry settles in a format after this many tries, or is row-major.
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """What `optimize_layout` did with a function.

    Attributes:
      original_bytes: what the program's own transposes and convolutions in a format
        that they are slow in re-order, read and written, each times its trip count.
      planned_bytes: what the plan's conversions re-order instead.
      optimized: whether the plan was taken; it is not if it moves more.
      conversions: number of conversions in the plan.
      barriers: how often each primitive without a rule got a converted operand.
    """

    original_bytes: int
    planned_bytes: int
    optimized: bool
    conversions: int
    barriers: dict[str, int]


@dataclasses.dataclass
class _Cost:
    bytes_moved: int = 0
    conversions: int = 0
    barriers: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )

    def add(self, other: _Cost, times: int = 1) -> None:
        self.bytes_moved += times * other.bytes_moved
        self.conversions += other.conversions
        self.barriers.update(other.barriers)


@dataclasses.dataclass
class _Plan:
    """How a jaxpr computes, given its operands in some formats."""

    jaxpr: Any
    formats: list[MemoryFormat | None]  # of the operands
    steps: list[Step]
    given: list[MemoryFormat | None]  # of the results
    cost: _Cost
    # Conversions of each operand: they can be made before a loop.
    demanded: list[set[MemoryFormat]]
    operand_cost: _Cost


class _Value:
    """A value in the formats that it has been wanted in so far."""

    def __init__(
        self,
        array: Array | None,
        format: MemoryFormat | None,
        make: Callable[[MemoryFormat], Array] | None = None,
    ):
        self.format = format
        self.made: dict[MemoryFormat, Array] = {}
        self.make = make
        if array is not None and format is not None:
            self.made[format] = array

    def get(self, format: MemoryFormat | None) -> Array:
        if format is None:
            format = self.format
        assert format is not None
        if format not in self.made:
            if self.make is not None:
                self.made[format] = self.make(format)
            else:
                assert self.format is not None
                base = self.made[self.format]
                self.made[format] = convert(base, self.format, format)
        return self.made[format]


def _is_array(v: Any) -> bool:
    return hasattr(v.aval, "shape") and hasattr(v.aval, "dtype")


def _rule(eqn: Equation, formats: Formats, anchor: Anchor) -> Step:
    special = _CONTROL.get(eqn.primitive.name)
    if special is not None:
        return special(eqn, formats, anchor)
    if eqn.primitive.name == "conv_general_dilated":
        step = convolution(eqn, formats, anchor)
        return barrier(eqn) if step is None else step
    rule = RULES.get(eqn.primitive.name)
    step = rule(eqn, formats) if rule is not None else None
    return barrier(eqn) if step is None else step


def _plan(jaxpr: Any, formats: Formats, anchor: Anchor) -> _Plan:
    base: dict[Any, MemoryFormat | None] = {}
    have: dict[Any, set[MemoryFormat]] = {}
    cost, operand_cost = _Cost(), _Cost()
    operands = dict.fromkeys(jaxpr.invars)

    def define(v: Any, format: MemoryFormat | None) -> None:
        base[v] = format
        have[v] = set() if format is None else {format}

    def want(v: Any, format: MemoryFormat | None) -> bool:
        """Notes a conversion; says whether it moves anything."""
        if format is None or isinstance(v, Literal) or format in have[v]:
            return False
        have[v].add(format)
        known = base[v]
        if known is None or not moves(known, format, v.aval.shape):
            return False
        charged = operand_cost if v in operands else cost
        charged.bytes_moved += 2 * nbytes(v.aval)
        charged.conversions += 1
        return True

    for v, format in zip(jaxpr.invars, formats, strict=True):
        define(v, format)
    steps = []
    for eqn in jaxpr.eqns:
        known = [
            row_major(v.aval.ndim) if isinstance(v, Literal) else base[v]
            for v in eqn.invars
        ]
        step = _rule(eqn, known, anchor)
        steps.append(step)
        cost.bytes_moved += step.bytes_moved
        if isinstance(step, _Nested):
            cost.add(step.cost)
        converted = [want(v, f) for v, f in zip(eqn.invars, step.wanted, strict=True)]
        if any(converted) and eqn.primitive.name not in _KNOWN:
            cost.barriers[eqn.primitive.name] += 1
        for v, format in zip(eqn.outvars, step.given, strict=True):
            define(v, format)
    given = [
        (row_major(v.aval.ndim) if isinstance(v, Literal) else base[v])
        if _is_array(v)
        else None
        for v in jaxpr.outvars
    ]
    demanded = [have[v] for v in jaxpr.invars]
    return _Plan(jaxpr, list(formats), steps, given, cost, demanded, operand_cost)


def _emit(plan: _Plan, operands: Sequence[_Value]) -> list[_Value]:
    env: dict[Any, _Value] = dict(zip(plan.jaxpr.invars, operands, strict=True))

    def read(v: Any) -> _Value:
        if isinstance(v, Literal):
            return _Value(v.val, row_major(v.aval.ndim))
        return env[v]

    for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True):
        values = [read(v) for v in eqn.invars]
        if step.emit_in is not None:
            env[eqn.outvars[0]] = _lazy(step, values)
            continue
        if isinstance(step, _Nested):
            results = step.run(values)
        else:
            assert step.emit is not None
            given = [
                value.get(format)
                for value, format in zip(values, step.wanted, strict=True)
            ]
            results = [
                _Value(array, format)
                for array, format in zip(step.emit(*given), step.given, strict=True)
            ]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in plan.jaxpr.outvars]


def _lazy(step: Step, values: Sequence[_Value]) -> _Value:
    (format,), (value,) = step.wanted, values
    emit_in = step.emit_in
    assert emit_in is not None
    return _Value(None, None, lambda wanted: emit_in(wanted, value.get(format)))


# Control flow: equations with jaxprs of their own.


@dataclasses.dataclass(frozen=True)
class _Nested(Step):
    """An equation that has its conversions, and makes them, in a plan of its own."""

    cost: _Cost = dataclasses.field(default_factory=_Cost)
    run: Callable[[Sequence[_Value]], list[_Value]] = list


def _closed(jaxpr: Any) -> Any:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _settled(formats: Formats, variables: Sequence[Any]) -> list[MemoryFormat]:
    """Formats of values that cross the border of a loop: never None."""
    return [
        row_major(v.aval.ndim) if format is None else format
        for v, format in zip(variables, formats, strict=True)
    ]


def _inlined(eqn: Equation, formats: Formats, anchor: Anchor) -> Step:
    closed = _closed(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
    constants = [row_major(np.ndim(c)) for c in closed.consts]
    plan = _plan(_compat.live_jaxpr(closed), [*constants, *formats], anchor)

    def run(values: Sequence[_Value]) -> list[_Value]:
        known = [_Value(c, row_major(np.ndim(c))) for c in closed.consts]
        return _emit(plan, [*known, *values])

    cost = _Cost()
    cost.add(plan.cost)
    cost.add(plan.operand_cost)
    return _Nested([None] * len(formats), plan.given, cost=cost, run=run)


def _function_of(eqn: Equation) -> Callable[..., Any]:
    """The equation as a function of its operands, with its derivative's rule."""

    def apply(*operands: Array) -> list[Array]:
        return _compat.bind(eqn, operands)

    return apply


def _in_formats(
    function: Callable[..., Any],
    avals: Sequence[Any],
    formats: Formats,
    given: Formats,
    anchor: Anchor,
) -> Callable[..., list[Array]]:
    """A function of logical arrays as one of physical arrays in these formats."""
    closed = jax.make_jaxpr(function)(*avals)
    constants = [row_major(np.ndim(c)) for c in closed.consts]
    plan = _plan(_compat.live_jaxpr(closed), [*constants, *formats], anchor)

    def run(*operands: Array) -> list[Array]:
        values = [_Value(c, row_major(np.ndim(c))) for c in closed.consts]
        values += [_Value(x, f) for x, f in zip(operands, formats, strict=True)]
        results = _emit(plan, values)
        return [value.get(f) for value, f in zip(results, given, strict=True)]

    return run


def _shapes(variables: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def _custom_jvp(eqn: Equation, formats: Formats, anchor: Anchor) -> Step:
    inner = _inlined(eqn, formats, anchor)
    assert isinstance(inner, _Nested)
    wanted = _settled(formats, eqn.invars)
    given = _settled(inner.given, eqn.outvars)
    original = _function_of(eqn)
    avals = _shapes(eqn.invars)

    def run(values: Sequence[_Value]) -> list[_Value]:
        @jax.custom_jvp
        def function(*operands: Array) -> list[Array]:
            known = [_Value(x, f) for x, f in zip(operands, wanted, strict=True)]
            return [
                value.get(f) for value, f in zip(inner.run(known), given, strict=True)
            ]

        @function.defjvp
        def jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
            moving = [i for i, x in enumerate(primals) if _differentiable(x)]

            def both(*operands: Array) -> list[Array]:
                xs, ts = operands[: len(avals)], list(operands[len(avals) :])
                whole = [
                    ts.pop(0) if i in moving else _no_tangent(x)
                    for i, x in enumerate(xs)
                ]
                out, out_tangents = jax.jvp(original, tuple(xs), tuple(whole))
                return [
                    *out,
                    *(
                        t
                        for x, t in zip(out, out_tangents, strict=True)
                        if _differentiable(x)
                    ),
                ]

            tangent_avals = [avals[i] for i in moving]
            outs = [
                f
                for f, v in zip(given, eqn.outvars, strict=True)
                if _differentiable(v.aval)
            ]
            physical = _in_formats(
                both,
                [*avals, *tangent_avals],
                [*wanted, *(wanted[i] for i in moving)],
                [*given, *outs],
                anchor,
            )
            results = physical(*primals, *(tangents[i] for i in moving))
            out, rest = results[: len(given)], list(results[len(given) :])
            out_tangents = [
                rest.pop(0) if _differentiable(x) else _no_tangent(x) for x in out
            ]
            return out, out_tangents

        physical = [value.get(f) for value, f in zip(values, wanted, strict=True)]
        results = function(*physical)
        return [_Value(x, f) for x, f in zip(results, given, strict=True)]

    return _Nested(list(wanted), list(given), cost=inner.cost, run=run)


def _custom_vjp(eqn: Equation, formats: Formats, anchor: Anchor) -> Step:
    inner = _inlined(eqn, formats, anchor)
    assert isinstance(inner, _Nested)
    wanted = _settled(formats, eqn.invars)
    given = _settled(inner.given, eqn.outvars)
    original = _function_of(eqn)
    avals = _shapes(eqn.invars)

    def run(values: Sequence[_Value]) -> list[_Value]:
        @jax.custom_vjp
        def function(*operands: Array) -> list[Array]:
            known = [_Value(x, f) for x, f in zip(operands, wanted, strict=True)]
            return [
                value.get(f) for value, f in zip(inner.run(known), given, strict=True)
            ]

        tree: list[Any] = []

        def forward(*operands: Array) -> tuple[list[Array], list[Array]]:
            def both(*xs: Array) -> list[Array]:
                out, pullback = jax.vjp(original, *xs)
                leaves, structure = jax.tree.flatten(pullback)
                tree[:] = [structure]
                return [*out, *leaves]

            kept = jax.eval_shape(both, *avals)[len(given) :]
            plain = [row_major(x.ndim) for x in kept]
            results = _in_formats(both, avals, wanted, [*given, *plain], anchor)(
                *operands
            )
            return results[: len(given)], results[len(given) :]

        def backward(kept: list[Array], cotangents: Sequence[Array]) -> Any:
            def pull(*arrays: Array) -> Any:
                pullback = jax.tree.unflatten(tree[0], arrays[: len(kept)])
                out = pullback(list(arrays[len(kept) :]))
                return [
                    x
                    for x, aval in zip(out, avals, strict=True)
                    if _differentiable(aval)
                ]

            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept]
            results = _in_formats(
                pull,
                [*shapes, *_shapes(eqn.outvars)],
                [*(row_major(x.ndim) for x in kept), *given],
                [f for f, a in zip(wanted, avals, strict=True) if _differentiable(a)],
                anchor,
            )(*kept, *cotangents)
            rest = list(results)
            return tuple(
                rest.pop(0) if _differentiable(aval) else None for aval in avals
            )

        function.defvjp(forward, backward)
        physical = [value.get(f) for value, f in zip(values, wanted, strict=True)]
        results = function(*physical)
        return [_Value(x, f) for x, f in zip(results, given, strict=True)]

    return _Nested(list(wanted), list(given), cost=inner.cost, run=run)


def _differentiable(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, np.inexact)


def _no_tangent(x: Any) -> Any:
    return np.zeros(x.shape, jax.dtypes.float0)


def _checkpoint(eqn: Equation, formats: Formats, anchor: Anchor) -> Step:
    inner = _inlined(eqn, formats, anchor)
    assert isinstance(inner, _Nested)
    wanted = _settled(formats, eqn.invars)
    given = _settled(inner.given, eqn.outvars)

    def body(*operands: Array) -> list[Array]:
        known = [_Value(x, f) for x, f in zip(operands, wanted, strict=True)]
        return [value.get(f) for value, f in zip(inner.run(known), given, strict=True)]

    def run(values: Sequence[_Value]) -> list[_Value]:
        again = jax.checkpoint(
            body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
        )
        physical = [value.get(f) for value, f in zip(values, wanted, strict=True)]
        results = again(*physical)
        return [_Value(x, f) for x, f in zip(results, given, strict=True)]

    return _Nested(list(wanted), list(given), cost=inner.cost, run=run)


def _carried(
    trips: int,
    jaxpr: Any,
    constants: Formats,
    carry: Formats,
    rest: Formats,
    anchor: Anchor,
) -> tuple[_Plan, list[MemoryFormat], _Cost]:
    """The loop body's plan with the formats of its carry that cost the least."""
    count = len(carry)
    variables = jaxpr.invars[len(constants) : len(constants) + count]

    def attempt(start: list[MemoryFormat]) -> tuple[int, _Plan, _Cost]:
        plan = _plan(jaxpr, [*constants, *start, *rest], anchor)
        cost = _Cost()
        cost.add(plan.cost, trips)
        # Constants are converted before the loop, what is carried in each turn.
        hoisted = _conversions(jaxpr.invars[: len(constants)], constants, plan.demanded)
        turns = _conversions(
            jaxpr.invars[len(constants) :],
            [*start, *rest],
            plan.demanded[len(constants) :],
        )
        cost.add(hoisted)
        cost.add(turns, trips)
        for v, made, kept, first in zip(
            variables, plan.given[:count], start, carry, strict=True
        ):
            if made is not None and moves(made, kept, v.aval.shape):
                cost.bytes_moved += trips * 2 * nbytes(v.aval)
                cost.conversions += 1
            if first is not None and moves(first, kept, v.aval.shape):
                cost.bytes_moved += 2 * nbytes(v.aval)
                cost.conversions += 1
            if not kept.row_major and (first is None or first.row_major):
                # What a loop carries out is wanted row-major, as far as is known.
                cost.bytes_moved += 2 * nbytes(v.aval)
        return cost.bytes_moved, plan, cost

    start = _settled(carry, variables)
    tried: list[tuple[int, int, _Plan, list[MemoryFormat], _Cost]] = []
    plain = [row_major(v.aval.ndim) for v in variables]
    for candidate in [plain, start]:
        current = candidate
        for _ in range(_TRIES):
            if any(current == other[3] for other in tried):
                break
            total, plan, cost = attempt(current)
            tried.append((total, len(tried), plan, current, cost))
            current = [
                before if made is None else made
                for made, before in zip(plan.given[:count], current, strict=True)
            ]
    _, _, plan, formats, cost = min(tried, key=lambda entry: entry[:2])
    return plan, formats, cost


def _conversions(
    variables: Sequence[Any], formats: Formats, demanded: Sequence[set[MemoryFormat]]
) -> _Cost:
    cost = _Cost()
    for v, format, wanted in zip(variables, formats, demanded, strict=False):
        for other in wanted:
            if format is not None and moves(format, other, v.aval.shape):
                cost.bytes_moved += 2 * nbytes(v.aval)
                cost.conversions += 1
    return cost


def _invariants(
    values: Sequence[_Value], formats: Formats, demanded: Sequence[set[MemoryFormat]]
) -> list[_Value]:
    """Values that a loop reads, in every format that it wants, made before it."""
    made = []
    for value, format, wanted in zip(values, formats, demanded, strict=False):
        assert format is not None
        outside = _Value(value.get(format), format)
        for other in wanted:
            outside.made[other] = value.get(other)
        made.append(outside)
    return made


def _scan(eqn: Equation, formats: Formats, anchor: Anchor) -> Step:
    params = eqn.params
    body = _compat.live_jaxpr(params["jaxpr"])
    captured = [_Value(c, row_major(np.ndim(c))) for c in params["jaxpr"].consts]
    consts, carries = _compat.scan_arity(params)
    known = _settled(formats, eqn.invars)
    constants = [*(v.format for v in captured), *known[:consts]]
    carry = list(formats[consts : consts + carries])
    slices: list[MemoryFormat | None] = []
    wanted: list[MemoryFormat | None] = [None] * (consts + carries)
    for format in known[consts + carries :]:
        inner = _slice_format(format)
        slices.append(inner)
        wanted.append(inner.batched())
    plan, carry_formats, cost = _carried(
        params["length"], body, constants, carry, slices, anchor
    )
    results = body.outvars[carries:]
    stacked = _settled(plan.given[carries:], results)

    def run(values: Sequence[_Value]) -> list[_Value]:
        outside = _invariants([*captured, *values[:consts]], constants, plan.demanded)
        init = [
            value.get(format)
            for value, format in zip(
                values[consts : consts + carries], carry_formats, strict=True
            )
        ]
        xs = [
            value.get(format)
            for value, format in zip(
                values[consts + carries :], wanted[consts + carries :], strict=True
            )
        ]

        def turn(carry: list[Array], x: list[Array]) -> Any:
            inside = [_Value(a, f) for a, f in zip(carry, carry_formats, strict=True)]
            inside += [_Value(a, f) for a, f in zip(x, slices, strict=True)]
            out = _emit(plan, [*outside, *inside])
            carry = [v.get(f) for v, f in zip(out, carry_formats, strict=False)]
            ys = [v.get(f) for v, f in zip(out[carries:], stacked, strict=True)]
            return carry, ys

        last, ys = lax.scan(
            turn,
            init,
            xs,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        given = [_Value(a, f) for a, f in zip(last, carry_formats, strict=True)]
        return given + [
            _Value(a, f.batched()) for a, f in zip(ys, stacked, strict=True)
        ]

    given = [*carry_formats, *(f.batched() for f in stacked)]
    return _Nested(wanted, list(given), cost=cost, run=run)


def _slice_format(format: MemoryFormat) -> MemoryFormat:
    """The format of x[i], where x has this one; row-major if x[i] lies in pieces."""
    if format.order[0] == (0, 0) and not format.blocks[0]:
        order = tuple((dim - 1, atom) for dim, atom in format.order[1:])
        return MemoryFormat(format.blocks[1:], order)
    return row_major(format.ndim - 1)


def _while(eqn: Equation, formats: Formats, anchor: Anchor) -> Step:
    params = eqn.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    test_jaxpr, body_jaxpr = _compat.live_jaxpr(test), _compat.live_jaxpr(body)
    test_captured = [_Value(c, row_major(np.ndim(c))) for c in test.consts]
    body_captured = [_Value(c, row_major(np.ndim(c))) for c in body.consts]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    known = _settled(formats, eqn.invars)
    test_formats = [*(v.format for v in test_captured), *known[:first]]
    constants = [
        *(v.format for v in body_captured),
        *known[first : first + second],
    ]
    plan, carry_formats, cost = _carried(
        _UNKNOWN_TRIPS,
        body_jaxpr,
        constants,
        list(formats[first + second :]),
        [],
        anchor,
    )
    test_plan = _plan(test_jaxpr, [*test_formats, *carry_formats], anchor)
    cost.add(test_plan.cost, _UNKNOWN_TRIPS)
    cost.add(test_plan.operand_cost, _UNKNOWN_TRIPS)

    def run(values: Sequence[_Value]) -> list[_Value]:
        read_by_test = _invariants(
            [*test_captured, *values[:first]], test_formats, test_plan.demanded
        )
        read_by_body = _invariants(
            [*body_captured, *values[first : first + second]],
            constants,
            plan.demanded,
        )
        init = [
            value.get(format)
            for value, format in zip(
                values[first + second :], carry_formats, strict=True
            )
        ]

        def inside(carry: Sequence[Array]) -> list[_Value]:
            return [_Value(a, f) for a, f in zip(carry, carry_formats, strict=True)]

        def proceed(carry: Sequence[Array]) -> Array:
            (out,) = _emit(test_plan, [*read_by_test, *inside(carry)])
            return out.get(row_major(0))

        def turn(carry: Sequence[Array]) -> list[Array]:
            out = _emit(plan, [*read_by_body, *inside(carry)])
            return [v.get(f) for v, f in zip(out, carry_formats, strict=True)]

        last = lax.while_loop(proceed, turn, init)
        return [_Value(a, f) for a, f in zip(last, carry_formats, strict=True)]

    return _Nested([None] * len(formats), list(carry_formats), cost=cost, run=run)


def _cond(eqn: Equation, formats: Formats, anchor: Anchor) -> Step:
    branches = eqn.params["branches"]
    known = _settled(formats[1:], eqn.invars[1:])
    plans = []
    for branch in branches:
        captured = [row_major(np.ndim(c)) for c in branch.consts]
        plans.append(_plan(_compat.live_jaxpr(branch), [*captured, *known], anchor))
    given: list[MemoryFormat] = []
    for i, v in enumerate(eqn.outvars):
        found = [p.given[i] for p in plans]
        tagged = [f for f in found if f is not None and not f.row_major]
        given.append(tagged[0] if tagged else row_major(v.aval.ndim))
    cost = _Cost()
    for plan in plans:
        branch_cost = _Cost()
        branch_cost.add(plan.cost)
        branch_cost.add(plan.operand_cost)
        for v, made, kept in zip(eqn.outvars, plan.given, given, strict=True):
            if made is not None and moves(made, kept, v.aval.shape):
                branch_cost.bytes_moved += 2 * nbytes(v.aval)
                branch_cost.conversions += 1
        if branch_cost.bytes_moved >= cost.bytes_moved:
            cost = branch_cost

    def run(values: Sequence[_Value]) -> list[_Value]:
        index = values[0].get(row_major(0))
        operands = [v.get(f) for v, f in zip(values[1:], known, strict=True)]

        def function(plan: _Plan, branch: Any) -> Callable[..., list[Array]]:
            def apply(*arrays: Array) -> list[Array]:
                inside = [_Value(c, row_major(np.ndim(c))) for c in branch.consts]
                inside += [_Value(a, f) for a, f in zip(arrays, known, strict=True)]
                out = _emit(plan, inside)
                return [v.get(f) for v, f in zip(out, given, strict=True)]

            return apply

        functions = [function(p, b) for p, b in zip(plans, branches, strict=True)]
        results = lax.switch(index, functions, *operands)
        return [_Value(a, f) for a, f in zip(results, given, strict=True)]

    return _Nested([None] * len(formats), list(given), cost=cost, run=run)


_CONTROL: dict[str, Callable[[Equation, Formats, Anchor], Step]] = {
    "jit": _inlined,
    "pjit": _inlined,
    "closed_call": _inlined,
    "core_call": _inlined,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


_KNOWN = {*RULES, *_CONTROL, "conv_general_dilated"}


def _original_bytes(jaxpr: Any) -> int:
    """What a program re-orders as it stands."""
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("transpose", "permute"):
            axes = eqn.params.get("permutation", eqn.params.get("axes"))
            source = row_major(len(axes))
            shape = eqn.outvars[0].aval.shape
            if moves(source.transposed(axes), source, shape):
                total += 2 * nbytes(eqn.outvars[0].aval)
        elif name == "conv_general_dilated":
            total += convolution_cost(eqn)
        elif name == "cond":
            total += max(_original_bytes(b.jaxpr) for b in eqn.params["branches"])
        else:
            trips = {"scan": eqn.params.get("length", 1), "while": _UNKNOWN_TRIPS}
            inner = sum(
                _original_bytes(_closed(value).jaxpr)
                for key, value in eqn.params.items()
                if key in ("jaxpr", "call_jaxpr", "body_jaxpr", "cond_jaxpr")
            )
            total += trips.get(name, 1) * inner
    return total


Policy = str | Channels | MemoryFormat | Callable[[str, tuple[int, ...], Any], Any]


def _anchor(policy: Policy, platform: str) -> Anchor | None:
    """What a policy says of each convolution; None if it leaves all as they are."""
    name = "optimize_layout"
    if isinstance(policy, str) and policy == "auto":
        # Other compilers than XLA:CPU assign the formats of convolutions themselves.
        if platform != "cpu":
            return None
        policy = Channels.LAST
    if callable(policy) and not isinstance(policy, Channels | MemoryFormat):
        chosen = policy

        def ask(shape: tuple[int, ...], dtype: Any) -> MemoryFormat | None:
            format = chosen("conv_general_dilated", shape, dtype)
            return None if format is None else resolve(name, format, len(shape))

        return _without_blocks(ask)
    fixed = policy
    if not isinstance(fixed, str | Channels | MemoryFormat):
        raise TypeError(
            f"{name}: policy is 'auto', a memory format or a function, got {policy!r}."
        )
    if not isinstance(fixed, Channels) and fixed not in (
        "channels_first",
        "channels_last",
    ):
        # Names are of one rank; convolutions of another are left as they are.
        known = MemoryFormat.named(fixed) if isinstance(fixed, str) else fixed
        return _without_blocks(
            lambda shape, dtype: known if known.ndim == len(shape) else None
        )
    return _without_blocks(lambda shape, dtype: resolve(name, fixed, len(shape)))


def _without_blocks(
    ask: Callable[[tuple[int, ...], Any], MemoryFormat | None],
) -> Anchor:
    def anchor(shape: tuple[int, ...], dtype: Any) -> MemoryFormat | None:
        format = ask(shape, dtype)
        if format is not None and format.permutation is None:
            raise ValueError(
                "optimize_layout: a policy's formats must be orders of the axes, "
                f"without blocks, got {format}."
            )
        return format

    return anchor


def optimize_layout(
    f: Callable[P, R], *, policy: Policy = "auto", platform: str | None = None
) -> Callable[P, R]:
    """Runs a function in the memory formats that re-order the fewest bytes.

    The result has the signature, the results and the derivatives of `f`. Inside,
    convolutions compute channels-last and on this package's kernels, what lies
    between them stays in that format, transposes of the program's own become names
    for what lies in memory already, products read their operands where they are,
    and weights are converted before loops, not in them. If the plan would re-order
    more bytes than the program does, the program runs as it is.

    Args:
      f: function of pytrees of arrays. Arguments that are not arrays are static.
      policy: "auto" (channels-last convolutions on CPUs; on other platforms XLA
        assigns their formats itself, and f is left alone), a memory format for
        every convolution, or a function of the operator's name, the logical shape
        `(N, C, *spatial)` of its input and the dtype, that returns one or None.
        Formats asked for with `with_memory_format` come first.
      platform: "cpu", "cuda", ...; the default backend's if left out.

    Returns:
      the function. Its `__wrapped__` is `f`, `layout_report(*args)` says what the
      plan moves.

    Raises:
      TypeError: if policy is none of these.
      ValueError: if a policy's format has blocks or another rank.

    Source: the JIT part of PyTorch's RFC #19092; layout optimisers of TensorFlow
    (grappler), ONNX Runtime and TVM Relax.

    >>> import jax.numpy as jnp
    >>> def net(x, w):
    ...     y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")  # NCHW
    ...     return jax.nn.relu(y).mean((2, 3))
    >>> x, w = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
    >>> jax.jit(optimize_layout(net))(x, w).shape
    (2, 4)
    """
    wrapped = getattr(f, "__wrapped__", None)
    if wrapped is not None and hasattr(f, "layout_report"):
        f = wrapped  # once is enough
    anchor = _anchor(policy, platform or jax.default_backend())

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if anchor is None:
            return f(*args, **kwargs)
        traced = _trace(f, args, kwargs, anchor)
        if traced.plan is None:
            return f(*args, **kwargs)
        return traced.run()

    def layout_report(*args: P.args, **kwargs: P.kwargs) -> LayoutReport:
        """What the plan for these arguments, or their shapes, moves."""
        if anchor is None:
            jaxpr = _flat(f, args, kwargs)[0].jaxpr
            total = _original_bytes(jaxpr)
            return LayoutReport(total, total, False, 0, {})
        return _trace(f, args, kwargs, anchor).report

    call.layout_report = layout_report  # type: ignore[attr-defined]
    return call


@dataclasses.dataclass
class _Traced:
    plan: _Plan | None
    report: LayoutReport
    run: Callable[[], Any]


def _flat(
    f: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, list[Any], list[Any]]:
    """The jaxpr of a call, the arrays it is called with, its result's structure."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
    ]
    structure: list[Any] = []

    def function(*arrays: Array) -> list[Any]:
        filled = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        again, named = jax.tree.unflatten(tree, filled)
        out, shape = jax.tree.flatten(f(*again, **named))
        structure[:] = [shape]
        return out

    arrays = [leaves[i] for i in places]
    return jax.make_jaxpr(function)(*arrays), arrays, structure


def _trace(f: Callable[..., Any], args: Any, kwargs: Any, anchor: Anchor) -> _Traced:
    closed, arrays, structure = _flat(f, args, kwargs)
    original = _original_bytes(closed.jaxpr)
    stateful = [e for e in closed.jaxpr.eqns if _has_references(e)]
    if stateful:
        warnings.warn(
            "optimize_layout: the function is left as it is, because of an equation "
            f"that works on a mutable reference: {stateful[0].primitive.name}.",
            stacklevel=3,
        )
        return _Traced(None, LayoutReport(original, original, False, 0, {}), dict)
    consts = closed.consts
    formats = [row_major(np.ndim(c)) for c in [*consts, *arrays]]
    plan = _plan(_compat.live_jaxpr(closed), formats, anchor)
    cost = _Cost()
    cost.add(plan.cost)
    cost.add(plan.operand_cost)
    for v, given in zip(plan.jaxpr.outvars, plan.given, strict=True):
        if given is not None and moves(given, row_major(v.aval.ndim), v.aval.shape):
            cost.bytes_moved += 2 * nbytes(v.aval)
            cost.conversions += 1
    better = cost.bytes_moved <= original
    report = LayoutReport(
        original, cost.bytes_moved, better, cost.conversions, dict(cost.barriers)
    )

    def run() -> Any:
        values = [
            _Value(x, format)
            for x, format in zip([*consts, *arrays], formats, strict=True)
        ]
        out = [
            value.get(row_major(v.aval.ndim)) if _is_array(v) else value.get(None)
            for v, value in zip(plan.jaxpr.outvars, _emit(plan, values), strict=True)
        ]
        return jax.tree.unflatten(structure[0], out)

    return _Traced(plan if better else None, report, run)


def _has_references(eqn: Equation) -> bool:
    return any(
        not _is_array(v) or type(v.aval).__name__ == "AbstractRef" for v in eqn.invars
    )
