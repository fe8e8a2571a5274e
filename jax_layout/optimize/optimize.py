# SPDX-License-Identifier: Apache-2.0
"""Finds memory formats for a whole function, and runs it in them.

`optimize_layout` traces a function to a jaxpr. Planning (plan.py) walks the
equations once: convolutions anchor channels-last, primitives that do not care follow
the largest operand that is not row-major, transposes and reshapes only rename what
lies in memory, and the rest wants row-major operands (rules.py and
convolution.py). Loops and other equations with jaxprs of their own are in
control.py.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.backend
import numpy as np
from jax import Array
from jax.extend.core import jaxpr_as_fun

from jax_layout import _compat
from jax_layout.formats.annotations import FormattedArray
from jax_layout.formats.memory_format import Channels, MemoryFormat, resolve, row_major
from jax_layout.optimize.attention import attention
from jax_layout.optimize.control import CONTROL
from jax_layout.optimize.convolution import (
    OWN_CONVOLUTIONS,
    Anchor,
    convolution,
    own_convolution,
)
from jax_layout.optimize.plan import (
    Cost,
    Equation,
    NestedRule,
    Plan,
    Planner,
    emit,
)
from jax_layout.optimize.program import (
    differentiates_weights,
    holds_channels_first,
    holds_ours,
    is_annotated,
    original_bytes,
    unsupported,
)
from jax_layout.optimize.rules import RULES, Formats, Step
from jax_layout.optimize.values import Value, of_jaxs_own
from jax_layout.products.as_they_lie import products_as_they_lie

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """What `optimize_layout` did with a function.

    Attributes:
      original_bytes: what the program's own transposes, and convolutions in another
        order than XLA's, re-order, read and written, each times its trip count;
        without the transposes that XLA fuses.
      planned_bytes: what the plan re-orders instead.
      optimized: whether the plan was taken. It is if it moves less, or as much with
        kernels of ours in place of XLA's; otherwise the function is left alone.
      conversions: number of conversions in the plan.
      barriers: how often each primitive without a rule got a converted operand.
      attentions: products and softmaxes that became a call of attention, or of its
        gradients.
      layers: products, biases and gelus that became one call.
      products: those that read what was transposed for them, plan or not.
    """

    original_bytes: int
    planned_bytes: int
    optimized: bool
    conversions: int
    barriers: dict[str, int]
    attentions: int = 0
    layers: int = 0
    products: int = 0


def _convolution(eqn: Equation, formats: Formats, planner: Planner) -> Step | None:
    asked = planner.asked.get(eqn.invars[0])
    pack = eqn.invars[1] in planner.packed
    return convolution(
        *(eqn, formats, planner.anchor, planner.weights, asked, pack, planner.plain)
    )


def _own_convolution(eqn: Equation, formats: Formats, planner: Planner) -> Step | None:
    asked = planner.asked.get(eqn.invars[0])
    pack = eqn.invars[1] in planner.packed
    return own_convolution(eqn, formats, planner.anchor, planner.weights, asked, pack)


_NESTED: dict[str, NestedRule] = {
    **CONTROL,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(OWN_CONVOLUTIONS, _own_convolution),
}

_RULES = {**RULES, **dict.fromkeys(["attention", "attention_backward"], attention)}

Policy = str | Channels | MemoryFormat | Callable[[str, tuple[int, ...], Any], Any]


# What jax calls its platforms, whether or not one of their devices is here.
_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def checked_platform(
    name: str, f: Callable[..., Any], policy: Policy, platform: str | None
) -> str:
    """The platform that a plan is for, after the errors of what it is made of."""
    if not callable(f):
        raise TypeError(f"{name}: f must be a function, got {f!r}.")
    where = jax.default_backend() if platform is None else platform
    if where not in _PLATFORMS and where not in jax.extend.backend.backends():
        raise ValueError(
            f"{name}: platform must be one of {', '.join(_PLATFORMS)}, got {where!r}."
        )
    anchor_of(policy, where)  # its errors
    return where


def anchor_of(policy: Policy, platform: str) -> Anchor | None:
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
    and weights are converted before loops, not in them. A plan that gains nothing
    is not taken: the program runs as it is.

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
      TypeError: if f is no function, or policy is none of these.
      ValueError: if a policy's format has blocks or another rank, or jax has no such
        platform.

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
    if hasattr(f, "layout_report") and hasattr(f, "__wrapped__"):
        f = f.__wrapped__  # once is enough
    where = checked_platform("optimize_layout", f, policy, platform)

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(trace(f, args, kwargs, policy, where))

    def layout_report(*args: P.args, **kwargs: P.kwargs) -> LayoutReport:
        """What the plan for these arguments, or their shapes, moves."""
        return trace(f, args, kwargs, policy, where).report

    call.layout_report = layout_report  # type: ignore[attr-defined]
    return call


@dataclasses.dataclass
class Traced:
    """A call of a function that has been traced and planned.

    Attributes:
      closed: its jaxpr.
      arrays: what it is called with.
      formats: in which these are.
      rebuild: gives the function's result from the jaxpr's.
      original: the call as it stands.
      planner: that planned it; None if there is nothing to plan.
      plan: None if the original runs.
      report: what was decided.
    """

    closed: Any
    arrays: list[Any]
    formats: list[MemoryFormat]
    rebuild: Callable[[list[Any]], Any]
    original: Callable[[], Any]
    planner: Planner | None
    plan: Plan | None
    report: LayoutReport


def run(traced: Traced, formats: Sequence[MemoryFormat] | None = None) -> Any:
    """The result of a call.

    Args:
      traced: the call.
      formats: of the arrays in its result; row-major if left out.
    """
    avals = traced.closed.out_avals
    if formats is None:
        formats = [row_major(aval.ndim) for aval in avals]
    if traced.plan is None:
        leaves = [x for x in jax.tree.leaves(traced.original()) if is_array(x)]
        values = [Value(x, row_major(x.ndim)) for x in leaves]
    else:
        values = [
            Value(x, f) for x, f in zip(traced.arrays, traced.formats, strict=True)
        ]
        values = emit(traced.plan, values)
    results = []
    for value, aval, format in zip(values, avals, formats, strict=True):
        with _compat.in_place_of(value.maker) if value.maker else nullcontext():
            x = _compat.like(value.get(format), aval)
        results.append(x if format.row_major else FormattedArray(x, format))
    return traced.rebuild(results)


def trace(
    f: Callable[..., Any],
    args: Any,
    kwargs: Any,
    policy: Policy,
    platform: str,
    weights: bool = False,
    ends: Sequence[MemoryFormat] | None = None,
) -> Traced:
    """Traces a call and plans it.

    Args:
      f: the function.
      args: its arguments; arrays, or shapes and dtypes.
      kwargs: the same.
      policy: as in `optimize_layout`.
      platform: the same, known.
      weights: as in `Planner`.
      ends: formats in which the results are wanted; row-major if left out.
    """
    anchor = anchor_of(policy, platform)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_formatted)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    formats = [
        leaf.format if is_formatted(leaf) else row_major(len(leaf.shape))
        for leaf in (leaves[i] for i in places)
    ]
    arrays = [
        leaf.physical if is_formatted(leaf) else leaf
        for leaf in (leaves[i] for i in places)
    ]
    logical = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_formatted(leaf) else leaf
        for leaf in (leaves[i] for i in places)
    ]
    out: dict[str, Any] = {}

    def function(*tracers: Array) -> list[Any]:
        filled = list(leaves)
        for i, x in zip(places, tracers, strict=True):
            filled[i] = x
        again, named = jax.tree.unflatten(tree, filled)
        out["leaves"], out["tree"] = jax.tree.flatten(f(*again, **named))
        return [x for x in out["leaves"] if is_array(x)]

    def rebuild(results: list[Any]) -> Any:
        rest = iter(results)
        whole = [next(rest) if is_array(x) else x for x in out["leaves"]]
        return jax.tree.unflatten(out["tree"], whole)

    def plain() -> list[Any]:
        return [leaf.logical() if is_formatted(leaf) else leaf for leaf in leaves]

    def original() -> Any:
        again, named = jax.tree.unflatten(tree, plain())
        return f(*again, **named)

    closed = jax.make_jaxpr(function)(*logical)
    total = original_bytes(closed)
    traced = Traced(
        closed,
        arrays,
        formats,
        rebuild,
        original,
        None,
        None,
        LayoutReport(total, total, False, 0, {}),
    )
    if anchor is None:
        return traced
    problem = unsupported(closed.jaxpr)
    if problem is not None:
        eqn, why = problem
        warnings.warn(
            f"optimize_layout: {getattr(f, '__name__', f)} is left as it is, because "
            f"an equation {why}: {_compat.describe(eqn)}.",
            stacklevel=3,
        )
        return traced
    products = 0
    if platform == "cpu":
        closed, products = products_as_they_lie(closed)
    if products:
        total = original_bytes(closed)
        traced.closed = closed
        traced.report = LayoutReport(total, total, False, 0, {}, products=products)
    # Not the function, which may take longer to trace than XLA to compile.
    traced.original = lambda: jaxpr_as_fun(closed)(*(plain()[i] for i in places))
    anchors: list[Anchor | None] = [anchor]
    if policy == "auto":
        # Kernels of ours are worth a convolution even where it keeps its order.
        anchors.append(anchor_of(Channels.FIRST, "cpu"))
    for candidate in anchors:
        assert candidate is not None
        planner = Planner(candidate, _RULES, _NESTED, weights=weights)
        if weights and not differentiates_weights(closed.jaxpr):
            planner.packed.update(planner.read_once(closed))
        if ends is None:
            ends = [row_major(aval.ndim) for aval in closed.out_avals]
        plan, cost = _planned(planner, closed, formats, ends)
        # Kernels are a gain; so are weights that are laid out once. Where neither
        # kernels nor formats of ours are, transposes are best where XLA has them.
        gain = cost.kernels > 0 or bool(planner.layers) or weights
        less = cost.bytes_moved < total and holds_ours(closed)
        scores = sum(planner.attended.values())  # that nobody writes
        better = less or (gain and cost.bytes_moved <= total + scores)
        traced.report = LayoutReport(
            total,
            cost.bytes_moved,
            better,
            cost.conversions,
            dict(cost.barriers),
            len(planner.attended) if better else 0,
            len(planner.layers) if better else 0,
            products,
        )
        if better and candidate is not anchors[-1] and not weights:
            # Kernels that read any order move less where they are.
            better = cost.bytes_moved <= original_bytes(closed, kernels=True)
        if better:
            traced.plan, traced.planner = plan, planner
            break
    return traced


def _planned(
    planner: Planner, closed: Any, formats: Formats, ends: Sequence[MemoryFormat]
) -> tuple[Plan, Cost]:
    plan = planner.plan(closed, formats, ends)
    cost = plan.total()
    cost.add(plan.result_cost(ends))
    return plan, cost


def with_channels_last(closed: Any) -> tuple[Any, int]:
    """A program for CPUs whose convolutions, and what is between, are channels-last.

    Args:
      closed: its jaxpr, without effects.

    Returns:
      the jaxpr of one of the same primitives that computes the same, and how many
      bytes it moves less; the same one and 0 if there is no convolution in another
      order, or that gains nothing.
    """
    jaxpr = closed.jaxpr
    if not holds_channels_first(jaxpr) or unsupported(jaxpr) or is_annotated(jaxpr):
        return closed, 0
    if not all(isinstance(n, int) for aval in closed.in_avals for n in aval.shape):
        return closed, 0
    formats, ends = (
        [row_major(aval.ndim) for aval in avals]
        for avals in (closed.in_avals, closed.out_avals)
    )
    anchor = anchor_of(Channels.LAST, "cpu")
    assert anchor is not None
    planner = Planner(anchor, _RULES, _NESTED, keep_products=True, plain=True)
    plan, cost = _planned(planner, closed, formats, ends)
    less = original_bytes(closed, kernels=True) - cost.bytes_moved
    if less <= 0:
        return closed, 0

    def run(*operands: Array) -> list[Any]:
        with of_jaxs_own():
            values = emit(plan, [Value(x, row_major(x.ndim)) for x in operands])
            results = [value.get(end) for value, end in zip(values, ends, strict=True)]
        return list(map(_compat.like, results, closed.out_avals))

    return jax.make_jaxpr(run)(*closed.in_avals), less


def is_formatted(leaf: Any) -> bool:
    return isinstance(leaf, FormattedArray)


def is_array(leaf: Any) -> bool:
    kinds = Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | FormattedArray
    return isinstance(leaf, kinds)
