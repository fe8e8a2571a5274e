# SPDX-License-Identifier: Apache-2.0
"""Plans of loops, branches, calls and functions with derivatives of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_layout import _compat
from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.optimize.plan import (
    UNKNOWN_TRIPS,
    Cost,
    Nested,
    NestedRule,
    Plan,
    Planner,
    definite,
    emit,
    preferred,
)
from jax_layout.optimize.rules import Equation, Formats, Step, barrier
from jax_layout.optimize.values import Value

# For how many combinations of formats a loop's carry is tried.
_TRIES = 5


def _values(arrays: Iterable[Any], formats: Formats) -> list[Value]:
    return [Value(x, f) for x, f in zip(arrays, formats, strict=True)]


def _arrays(values: Sequence[Value], formats: Formats) -> list[Any]:
    return [value.get(f) for value, f in zip(values, formats, strict=True)]


def _each(formats: Sequence[MemoryFormat]) -> list[list[MemoryFormat]]:
    return [[format] for format in formats]


def _on_arrays(
    plan: Plan, formats: Formats, given: Formats
) -> Callable[..., list[Array]]:
    """A plan as a function of physical arrays in these formats."""

    def function(*arrays: Array) -> list[Array]:
        return _arrays(emit(plan, _values(arrays, formats)), given)

    return function


def _checkpoint(eqn: Equation, formats: Formats, planner: Planner) -> Nested:
    if eqn.params["policy"] is not None:
        planner = dataclasses.replace(planner, keep_products=True)
    plan, wanted = planner.settled(eqn.params["jaxpr"], formats)
    given = definite(plan.given, eqn.outvars)
    function = _on_arrays(plan, wanted, given)

    def run(values: Sequence[Value]) -> list[Value]:
        arrays = _arrays(values, wanted)
        closed = jax.make_jaxpr(function)(*arrays)
        out = _compat.bind(
            eqn, [*closed.consts, *arrays], jaxpr=_compat.live_jaxpr(closed)
        )
        return _values(out, given)

    return Nested(_each(wanted), list(given), plan.total(), run)


# --- functions with derivatives of their own


def _differentiable(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, np.inexact)


def _no_tangent(x: Any) -> Any:
    return np.zeros(x.shape, jax.dtypes.float0)


def _custom(
    eqn: Equation,
    formats: Formats,
    planner: Planner,
    derived: Callable[..., Callable[..., list[Array]]],
) -> Nested | Step:
    """What `custom_jvp` and `custom_vjp` have in common.

    `derived(original, avals, wanted, outs, given, planner, function)` returns
    `function`, with its derivative, on physical arrays. The derivative is that of
    `original`, the equation itself, traced and planned when it is asked for.
    """
    if eqn.params.get("symbolic_zeros") or eqn.params.get("num_consts"):
        # The rule wants to see which operands move, or some of them must not.
        return barrier(eqn)
    plan, wanted = planner.settled(eqn.params["call_jaxpr"], formats)
    given = definite(plan.given, eqn.outvars)
    # The rule outlives this trace; what has been planned for it need not.
    later = dataclasses.replace(planner, known={}, asked={})
    avals = [v.aval for v in eqn.invars]
    outs = [v.aval for v in eqn.outvars]

    def original(*operands: Array) -> list[Array]:
        return _compat.bind(eqn, operands)

    def run(values: Sequence[Value]) -> list[Value]:
        function = derived(
            original, avals, wanted, outs, given, later, _on_arrays(plan, wanted, given)
        )
        return _values(function(*_arrays(values, wanted)), given)

    return Nested(_each(wanted), list(given), plan.total(), run)


def _with_jvp(
    original: Callable[..., list[Array]],
    avals: Sequence[Any],
    wanted: Sequence[MemoryFormat],
    outs: Sequence[Any],
    given: Sequence[MemoryFormat],
    planner: Planner,
    function: Callable[..., list[Array]],
) -> Callable[..., list[Array]]:
    moving = [i for i, x in enumerate(avals) if _differentiable(x)]
    moved = [i for i, x in enumerate(outs) if _differentiable(x)]

    def pushed(*operands: Array) -> list[Array]:
        xs, ts = operands[: len(avals)], operands[len(avals) :]
        tangents = [_no_tangent(x) for x in xs]
        for i, t in zip(moving, ts, strict=True):
            tangents[i] = t
        out, out_tangents = jax.jvp(original, xs, tuple(tangents))
        return [*out, *(out_tangents[i] for i in moved)]

    def jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
        start = [*wanted, *(wanted[i] for i in moving)]
        closed = jax.make_jaxpr(pushed)(*avals, *(avals[i] for i in moving))
        run = _on_arrays(
            planner.plan(closed, start), start, [*given, *(given[i] for i in moved)]
        )
        results = run(*primals, *(tangents[i] for i in moving))
        out = results[: len(given)]
        out_tangents = [_no_tangent(x) for x in out]
        for i, t in zip(moved, results[len(given) :], strict=True):
            out_tangents[i] = t
        return out, out_tangents

    custom = jax.custom_jvp(function)
    custom.defjvp(jvp)
    return custom


def _with_vjp(
    original: Callable[..., list[Array]],
    avals: Sequence[Any],
    wanted: Sequence[MemoryFormat],
    outs: Sequence[Any],
    given: Sequence[MemoryFormat],
    planner: Planner,
    function: Callable[..., list[Array]],
) -> Callable[..., list[Array]]:
    moving = [i for i, x in enumerate(avals) if _differentiable(x)]
    moved = [i for i, x in enumerate(outs) if _differentiable(x)]
    kept: dict[str, Any] = {}  # of the last forward pass: what its residuals are

    def forward(*arrays: Array) -> tuple[list[Array], list[Array]]:
        def both(*xs: Array) -> list[Array]:
            out, pullback = jax.vjp(original, *xs)
            leaves, kept["tree"] = jax.tree.flatten(pullback)
            return [*out, *leaves]

        closed = jax.make_jaxpr(both)(*avals)
        plan = planner.plan(closed, wanted)
        ends = definite(plan.given, plan.jaxpr.outvars)[len(given) :]
        kept["formats"], kept["avals"] = ends, closed.out_avals[len(given) :]
        results = _on_arrays(plan, wanted, [*given, *ends])(*arrays)
        return results[: len(given)], results[len(given) :]

    def backward(residuals: list[Array], cotangents: Sequence[Array]) -> Any:
        def pull(*arrays: Array) -> list[Array]:
            pullback = jax.tree.unflatten(kept["tree"], arrays[: len(residuals)])
            whole = [_no_tangent(x) for x in outs]
            for i, ct in zip(moved, arrays[len(residuals) :], strict=True):
                whole[i] = ct
            back = pullback(whole)
            return [back[i] for i in moving]

        start = [*kept["formats"], *(given[i] for i in moved)]
        closed = jax.make_jaxpr(pull)(*kept["avals"], *(outs[i] for i in moved))
        ends = [wanted[i] for i in moving]
        run = _on_arrays(planner.plan(closed, start), start, ends)
        back = dict(
            zip(moving, run(*residuals, *(cotangents[i] for i in moved)), strict=True)
        )
        return tuple(back.get(i) for i in range(len(avals)))

    custom = jax.custom_vjp(function)
    custom.defvjp(forward, backward)
    return custom


def _custom_jvp(eqn: Equation, formats: Formats, planner: Planner) -> Nested | Step:
    return _custom(eqn, formats, planner, _with_jvp)


def _custom_vjp(eqn: Equation, formats: Formats, planner: Planner) -> Nested | Step:
    return _custom(eqn, formats, planner, _with_vjp)


# --- loops and branches


@dataclasses.dataclass
class _Body:
    """A loop's body with the formats of its carry that cost the least."""

    plan: Plan
    carry: list[MemoryFormat]
    rest: list[MemoryFormat]
    cost: Cost  # of all turns


def _body(
    planner: Planner,
    closed: Any,
    trips: int,
    constants: Formats,
    carry: Formats,
    variables: Sequence[Any],
    rest: Formats,
) -> _Body:
    """Plans a loop's body.

    Args:
      planner: of the loop.
      closed: the body's jaxpr: of constants, carry and the rest.
      trips: how often it runs.
      constants: formats that these are in; they are converted before the loop.
      carry: formats in which it starts.
      variables: the carry's, outside of the loop.
      rest: formats of what is new in each turn.
    """
    planner = dataclasses.replace(planner, weights=True, in_loop=True)
    tried: list[tuple[int, _Body]] = []
    # Row-major, as it comes; then as the body gives it, and as the body reads it.
    plain = [row_major(v.aval.ndim) for v in variables]
    candidates = [plain, definite(carry, variables)]

    def attempt(start: list[MemoryFormat]) -> None:
        plan = planner.plan(closed, [*constants, *start, *rest])
        own = len(plan.captured) + len(constants)
        slices = definite(
            preferred(rest, plan.used[own + len(start) :]),
            plan.jaxpr.invars[own + len(start) :],
        )
        plan = planner.plan(
            closed,
            [*constants, *start, *slices],
            [*start, *[None] * (len(plan.given) - len(start))],
            len(constants),
            max(trips, 1),
        )
        given = [
            before if made is None else made
            for made, before in zip(plan.given[: len(start)], start, strict=True)
        ]
        cost, ends = Cost(), Cost()
        cost.add(plan.cost, trips)
        cost.add(plan.operand_cost(own, None), trips)
        cost.add(plan.result_cost(start), trips)
        for v, kept, first in zip(variables, start, carry, strict=True):
            ends.convert(v, first, kept)
            # What a loop carries out is wanted as it came in, as far as is known.
            ends.convert(v, kept, first or row_major(v.aval.ndim))
        ends.add(plan.operand_cost(0, own))
        total = cost.bytes_moved + ends.bytes_moved
        tried.append((total, _Body(plan, start, slices, cost)))
        read = plan.used[own : own + len(start)]
        candidates.append(given)
        candidates.append(definite(preferred(start, read), variables))

    while candidates and len(tried) < _TRIES:
        candidate = candidates.pop(0)
        if all(candidate != body.carry for _, body in tried):
            attempt(candidate)
    return min(tried, key=lambda entry: entry[0])[1]


def _invariants(
    values: Sequence[Value], formats: Formats, used: Sequence[Collection[MemoryFormat]]
) -> list[Value]:
    """Values that a loop reads, in every format that it wants, made before it."""
    made = []
    for value, format, wanted in zip(values, formats, used, strict=True):
        outside = Value(value.get(format), format)
        for other in wanted:
            outside.made[other] = value.get(other)
        made.append(outside)
    return made


def _scan(eqn: Equation, formats: Formats, planner: Planner) -> Nested:
    params = eqn.params
    consts, carries = _compat.scan_arity(params)
    known = definite(formats, eqn.invars)
    constants, xs = known[:consts], known[consts + carries :]
    planner.mark_slices(params["jaxpr"], len(xs))
    body = _body(
        planner,
        params["jaxpr"],
        params["length"],
        constants,
        formats[consts : consts + carries],
        eqn.invars[consts : consts + carries],
        [_slice_format(format) for format in xs],
    )
    plan, carry = body.plan, body.carry
    own = len(plan.captured)
    stacks = [f.batched() for f in body.rest]
    stacked = definite(plan.given[carries:], plan.jaxpr.outvars[carries:])
    cost = Cost()
    cost.add(body.cost)
    cost.add(plan.operand_cost(0, own))

    def run(values: Sequence[Value]) -> list[Value]:
        outside = _invariants(
            [*plan.captured, *values[:consts]],
            plan.formats[: own + consts],
            plan.used[: own + consts],
        )

        def turn(before: list[Array], x: list[Array]) -> Any:
            inside = [*_values(before, carry), *_values(x, body.rest)]
            out = emit(plan, [*outside[own:], *inside], outside[:own])
            return _arrays(out[:carries], carry), _arrays(out[carries:], stacked)

        last, ys = lax.scan(
            turn,
            _arrays(values[consts : consts + carries], carry),
            _arrays(values[consts + carries :], stacks),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
            _split_transpose=params.get("_split_transpose", False),
        )
        return [*_values(last, carry), *_values(ys, [f.batched() for f in stacked])]

    uses = [*plan.used[own : own + consts], *_each(carry), *_each(stacks)]
    return Nested(uses, [*carry, *(f.batched() for f in stacked)], cost, run)


def _slice_format(format: MemoryFormat) -> MemoryFormat:
    """The format of x[i], where x has this one; row-major if x[i] lies in pieces."""
    if format.order[0] == (0, 0) and not format.blocks[0]:
        order = tuple((dim - 1, atom) for dim, atom in format.order[1:])
        return MemoryFormat(format.blocks[1:], order)
    return row_major(format.ndim - 1)


def _while(eqn: Equation, formats: Formats, planner: Planner) -> Nested:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    both = first + second
    known = definite(formats, eqn.invars)
    body = _body(
        planner,
        params["body_jaxpr"],
        UNKNOWN_TRIPS,
        known[first:both],
        formats[both:],
        eqn.invars[both:],
        [],
    )
    turn, carry = body.plan, body.carry
    test = dataclasses.replace(planner, weights=True).plan(
        params["cond_jaxpr"], [*known[:first], *carry]
    )
    own, own_test = len(turn.captured), len(test.captured)
    cost = Cost()
    cost.add(body.cost)
    cost.add(turn.operand_cost(0, own))
    cost.add(test.cost, UNKNOWN_TRIPS)
    cost.add(test.operand_cost(0, own_test))
    cost.add(test.operand_cost(own_test + first, None), UNKNOWN_TRIPS)

    def run(values: Sequence[Value]) -> list[Value]:
        def before(plan: Plan, read: Sequence[Value]) -> list[Value]:
            everything = [*plan.captured, *read]
            count = len(everything)
            return _invariants(everything, plan.formats[:count], plan.used[:count])

        read_by_test = before(test, values[:first])
        read_by_body = before(turn, values[first:both])

        def proceed(state: Sequence[Array]) -> Array:
            read = [*read_by_test[own_test:], *_values(state, carry)]
            (out,) = emit(test, read, read_by_test[:own_test])
            return out.get(row_major(0))

        def advance(state: Sequence[Array]) -> list[Array]:
            read = [*read_by_body[own:], *_values(state, carry)]
            return _arrays(emit(turn, read, read_by_body[:own]), carry)

        last = lax.while_loop(proceed, advance, _arrays(values[both:], carry))
        return _values(last, carry)

    uses = [
        *test.used[own_test : own_test + first],
        *turn.used[own : own + second],
        *_each(carry),
    ]
    return Nested(uses, list(carry), cost, run)


def _cond(eqn: Equation, formats: Formats, planner: Planner) -> Nested | Step:
    branches = eqn.params["branches"]
    if eqn.params.get("branches_platforms") is not None:
        return barrier(eqn)  # each branch is for one platform alone
    known = definite(formats[1:], eqn.invars[1:])
    # Formats that some branch gives, or row-major, which others may as well.
    found = [planner.plan(branch, known).given for branch in branches]
    plain = [row_major(v.aval.ndim) for v in eqn.outvars]
    tagged = [
        next((f for f in each if f is not None and not f.row_major), row)
        for row, *each in zip(plain, *found, strict=True)
    ]

    def attempt(given: list[MemoryFormat]) -> tuple[Cost, list[Plan]]:
        plans = [planner.plan(branch, known, given) for branch in branches]
        costs = []
        for plan in plans:
            cost = plan.total()
            cost.add(plan.result_cost(given))
            costs.append(cost)
        return max(costs, key=lambda cost: (cost.bytes_moved, cost.kernels)), plans

    given, (worst, plans) = tagged, attempt(tagged)
    if tagged != plain:
        in_rows = attempt(plain)
        if in_rows[0].bytes_moved < worst.bytes_moved:
            given, (worst, plans) = plain, in_rows

    def run(values: Sequence[Value]) -> list[Value]:
        functions = [_on_arrays(plan, known, given) for plan in plans]
        index = values[0].get(row_major(0))
        results = lax.switch(index, functions, *_arrays(values[1:], known))
        return _values(results, given)

    return Nested([[row_major(0)], *_each(known)], given, worst, run)


CONTROL: dict[str, NestedRule] = {
    **dict.fromkeys(["checkpoint", "remat2"], _checkpoint),
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
