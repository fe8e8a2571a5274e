# SPDX-License-Identifier: Apache-2.0
"""Whether a function is elementwise, as its jaxpr tells.

Each axis of each value runs along an axis of the operands, or its elements are all
alike, or it is some other axis (of an array that the function closes over, or has
counted up). Values may meet where these agree, and nothing may mix the elements of
an axis of the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jax_layout import _compat

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg
    nextafter not or polygamma polynomial population_count pow pvary random_gamma_grad
    real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta
    """.split()
)
_CALLS = frozenset(
    """
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat
    remat2
    """.split()
)

_ALONG_AXES = frozenset(
    """
    argmax argmin concatenate cummax cummin cumprod cumsum reduce_and reduce_max
    reduce_min reduce_or reduce_prod reduce_sum
    """.split()
)

# Of each axis of a value: that of the operands, None for equal elements, or _OTHER.
_Axes = tuple[int | None, ...]
_OTHER = -1


def check(
    name: str,
    function: Callable[..., Any],
    logical: Sequence[Any],
    physical: Sequence[Any],
) -> None:
    """Raises a ValueError unless a function of arrays is elementwise.

    Args:
      name: of the operator that asks.
      function: of the operands, which it broadcasts.
      logical: operands.
      physical: the operands as they lie, which it is to compute on.
    """
    traced = jax.make_jaxpr(function)(*logical)
    shapes = [x.shape for x in logical]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"{name}: the function must be elementwise, and its operands broadcast; "
            f"got shapes {shapes}."
        ) from None
    given = [tuple(range(len(shape) - x.ndim, len(shape))) for x in logical]
    found = _walk(name, traced, given, shape)
    for aval, axes in zip(traced.out_avals, found, strict=True):
        in_place = all(axis in (None, i) for i, axis in enumerate(axes))
        if aval.shape != shape or not in_place:
            raise ValueError(
                f"{name}: the function must be elementwise, got one with a result of "
                f"shape {aval.shape} of operands that broadcast to {shape}, or with "
                "their axes in another order."
            )
    if all(a is b for a, b in zip(logical, physical, strict=True)):
        return
    try:
        same = _constants(traced) == _constants(jax.make_jaxpr(function)(*physical))
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"{name}: the function must not depend on the shapes of its operands, "
            f"which are {[x.shape for x in physical]} in memory; got one that does."
        )


def _constants(traced: Any) -> list[Any]:
    """The primitives, and the numbers that they are given."""
    found: list[Any] = []
    for eqn in getattr(traced, "jaxpr", traced).eqns:
        numbers = [repr(v.val) for v in eqn.invars if isinstance(v, Literal)]
        if eqn.primitive.name in _CALLS:
            found += [*numbers, *_constants(_body(eqn))]
        elif numbers or eqn.primitive.name in ELEMENTWISE:
            found.append((eqn.primitive.name, *numbers))
    return found


def _body(eqn: Any) -> Any:
    return eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]


def _walk(
    name: str, traced: Any, given: Sequence[_Axes], shape: tuple[int, ...]
) -> list[_Axes]:
    """The axes of a jaxpr's results; of random ones, `shape` has equal elements."""
    jaxpr = getattr(traced, "jaxpr", traced)
    known = {v: _without_units(_others(v.aval), v.aval) for v in jaxpr.constvars}

    def read(v: Any) -> _Axes:
        return _others(v.aval) if isinstance(v, Literal) else known[v]

    def write(variables: Sequence[Any], found: Sequence[_Axes]) -> None:
        for v, axes in zip(variables, found, strict=True):
            known[v] = _without_units(axes, v.aval)

    write(jaxpr.invars, given)
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive.name in _CALLS:
            write(eqn.outvars, _walk(name, _body(eqn), operands, shape))
        elif eqn.primitive.name == "scan":
            write(eqn.outvars, _scanned(name, eqn, operands, shape))
        else:
            write(eqn.outvars, _results(name, eqn, operands, shape))
    return [read(v) for v in jaxpr.outvars]


def _scanned(
    name: str, eqn: Any, operands: Sequence[_Axes], shape: tuple[int, ...]
) -> list[_Axes]:
    """Of a loop over rows that are not the operands', as jnp.polyval's."""
    first, count = _compat.scan_arity(eqn.params)
    carry, rows = list(operands[first : first + count]), operands[first + count :]
    if any(axes[0] not in (None, _OTHER) for axes in rows):
        raise ValueError(
            f"{name}: the function must be elementwise, got one that calls "
            f"{_described(eqn)} along an axis of its operands."
        )
    while True:
        given = [*operands[:first], *carry, *(axes[1:] for axes in rows)]
        found = _walk(name, eqn.params["jaxpr"], given, shape)
        joined = [
            tuple(b if a is None else a for a, b in zip(before, after, strict=True))
            for before, after in zip(carry, found[:count], strict=True)
        ]
        if joined == carry:
            break
        carry = joined
    if any(
        b not in (None, a)
        for before, after in zip(carry, found[:count], strict=True)
        for a, b in zip(before, after, strict=True)
    ):
        raise ValueError(
            f"{name}: the function must be elementwise, got one whose "
            f"{_described(eqn)} exchanges axes."
        )
    return [*carry, *((_OTHER, *axes) for axes in found[count:])]


def _results(
    name: str, eqn: Any, operands: Sequence[_Axes], shape: tuple[int, ...]
) -> list[_Axes]:
    primitive, params = eqn.primitive.name, eqn.params
    avals = [v.aval for v in eqn.outvars]
    if primitive == "broadcast_in_dim":
        found: list[int | None] = [None] * avals[0].ndim
        for dim, axis in zip(params["broadcast_dimensions"], operands[0], strict=True):
            found[dim] = axis
        return [tuple(found)]
    if primitive == "transpose":
        return [tuple(operands[0][axis] for axis in params["permutation"])]
    if primitive in ("reshape", "squeeze", "expand_dims"):
        before, after = eqn.invars[0].aval.shape, avals[0].shape
        if [n for n in before if n != 1] == [n for n in after if n != 1]:
            rest = iter(a for a, n in zip(operands[0], before, strict=True) if n != 1)
            return [tuple(None if n == 1 else next(rest) for n in after)]
    if primitive == "optimization_barrier":
        return list(operands)
    same_size = primitive == "bitcast_convert_type" and (
        avals[0].shape == eqn.invars[0].aval.shape
    )
    if primitive in ELEMENTWISE or same_size:
        return [_met(name, eqn, operands, len(avals[0].shape))] * len(avals)
    at = params.get("axes", (params.get("axis", params.get("dimension", 0)),))
    if primitive == "stack":
        axes = _met(name, eqn, operands, avals[0].ndim - 1)
        return [(*axes[: at[0]], _OTHER, *axes[at[0] :])]
    if primitive in _ALONG_AXES and all(
        axes[axis] in (None, _OTHER) for axes in operands for axis in at
    ):
        axes = tuple(
            _OTHER if i in at else axis
            for i, axis in enumerate(_met(name, eqn, operands, len(operands[0])))
        )
        if avals[0].ndim < len(axes):
            axes = tuple(axis for i, axis in enumerate(axes) if i not in at)
        return [axes]
    if primitive == "random_bits" and avals[0].shape == shape:
        return [tuple(range(len(shape)))]  # as good there as any others
    if avals and any(a not in (None, _OTHER) for axes in operands for a in axes):
        raise ValueError(
            f"{name}: the function must be elementwise, got one that calls "
            f"{_described(eqn)}."
        )
    return [_others(aval) for aval in avals]


def _met(name: str, eqn: Any, operands: Sequence[_Axes], rank: int) -> _Axes:
    """The axes of what is computed of these, element by element."""
    met = []
    for column in zip(*(axes for axes in operands if len(axes) == rank), strict=True):
        axes = {axis for axis in column if axis is not None}
        if len(axes) > 1:
            shapes = ", ".join(str(v.aval.shape) for v in eqn.invars)
            raise ValueError(
                f"{name}: arrays that the function needs must be operands, and no axis "
                f"of one meet another's; got {_described(eqn)} of shapes {shapes}."
            )
        met.append(axes.pop() if axes else None)
    return tuple(met)


def _described(eqn: Any) -> str:
    return _compat.describe(eqn).removesuffix(" ()")


def _others(aval: Any) -> _Axes:
    return (_OTHER,) * len(getattr(aval, "shape", ()))


def _without_units(axes: _Axes, aval: Any) -> _Axes:
    """One element along an axis is like all elements."""
    return tuple(
        None if n == 1 else axis
        for axis, n in zip(axes, getattr(aval, "shape", ()), strict=True)
    )
