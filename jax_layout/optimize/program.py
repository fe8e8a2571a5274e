# SPDX-License-Identifier: Apache-2.0
"""What a program is before it is planned: what it re-orders, and what it holds."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from jax_layout import _compat
from jax_layout.optimize.convolution import (
    OWN_CONVOLUTIONS,
    convolution_cost,
    kernels_cost,
    of_weights,
    own_convolution_cost,
)
from jax_layout.optimize.plan import UNKNOWN_TRIPS, opened
from jax_layout.optimize.products import fused_transposes
from jax_layout.optimize.rules import Equation, is_array, transpose_cost

# The jaxprs, by parameter, that are part of the program around them.
JAXPRS = ("jaxpr", "call_jaxpr", "body_jaxpr", "cond_jaxpr", "branches")
_OPENED = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "checkpoint", "remat2", "scan", "while", "cond",
}  # fmt: skip


def inner_jaxprs(eqn: Equation) -> list[Any]:
    """The jaxprs of control flow that a plan goes into."""
    return [getattr(j, "jaxpr", j) for j in _inner(eqn)]


def _inner(eqn: Equation) -> list[Any]:
    """The same, with what they captured."""
    if eqn.primitive.name not in _OPENED:
        return []
    found = [eqn.params[name] for name in JAXPRS if name in eqn.params]
    return [j for f in found for j in (f if isinstance(f, tuple | list) else [f])]


def original_bytes(
    closed: Any, kernels: bool = False, known: dict[int, int] | None = None
) -> int:
    """What a program re-orders as it stands, on CPUs, and XLA does not fuse.

    Args:
      closed: its jaxpr.
      kernels: whether kernels of ours compute its convolutions.
      known: of jaxprs by their id.
    """
    known = {} if known is None else known
    if id(closed) in known:
        return known[id(closed)]
    flat, _ = opened(closed)
    fused = fused_transposes(flat.eqns, flat.outvars)
    total = 0
    for eqn in flat.eqns:
        name = eqn.primitive.name
        if name in ("transpose", "permute"):
            total += 0 if eqn.outvars[0] in fused else transpose_cost(eqn)
        elif name == "conv_general_dilated" and kernels:
            total += kernels_cost(eqn)
        elif name == "conv_general_dilated":
            arrays = [v.aval for v in (*eqn.invars, *eqn.outvars)]
            total += convolution_cost(eqn.params["dimension_numbers"], *arrays)
        elif name in OWN_CONVOLUTIONS:
            total += own_convolution_cost(eqn, eqn.params["conv"])
        elif inner := _inner(eqn):
            costs = [original_bytes(j, kernels, known) for j in inner]
            trips = {"scan": eqn.params.get("length"), "while": UNKNOWN_TRIPS}
            once = max(costs) if name == "cond" else sum(costs)
            total += trips.get(name, 1) * once
    known[id(closed)] = total
    return total


def holds_ours(jaxpr: Any) -> bool:
    """Whether a program has operators of ours in it, or convolutions."""
    names = (*OWN_CONVOLUTIONS, "conv_general_dilated", "gemm", "linear")
    return any(
        eqn.primitive.name in (*names, "permute", "memory_format")
        or any(map(holds_ours, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def holds_channels_first(jaxpr: Any) -> bool:
    """Whether there is a convolution in a program whose last axes are spatial."""
    return any(
        any(map(holds_channels_first, inner_jaxprs(eqn)))
        if eqn.primitive.name != "conv_general_dilated"
        else _is_channels_first(eqn)
        for eqn in jaxpr.eqns
    )


def _is_channels_first(eqn: Equation) -> bool:
    """With one channel on either side both orders are the same in memory."""
    numbers = eqn.params["dimension_numbers"]
    sides = (
        (numbers.lhs_spec, eqn.invars[0].aval),
        (numbers.out_spec, eqn.outvars[0].aval),
    )
    return numbers.lhs_spec[-1] == eqn.invars[0].aval.ndim - 1 and any(
        aval.shape[spec[1]] != 1 for spec, aval in sides
    )


def is_annotated(jaxpr: Any) -> bool:
    """Whether a program says of an equation where it runs, or what XLA is to know."""
    return any(
        _compat.says_where(eqn) or any(map(is_annotated, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def differentiates_weights(jaxpr: Any) -> bool:
    """Whether there is a gradient of a convolution's weights in a program."""
    return any(
        eqn.primitive.name == "conv_weight_grad"
        or (eqn.primitive.name == "conv_general_dilated" and of_weights(eqn))
        or any(map(differentiates_weights, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


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
