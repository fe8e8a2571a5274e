# SPDX-License-Identifier: Apache-2.0
"""Every use of a private jax module, so that jax's churn has one home."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import (
    core,
    dispatch,
    sharding_impls,
    source_info_util,
    state,
    xla_bridge,
)
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters import mlir as lowerings
from jax._src.interpreters import partial_eval
from jax._src.lax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun, primitives
from jax.interpreters import mlir

_nowhere: Mapping[str, int] = types.MappingProxyType({})
_inside: ContextVar[Mapping[str, int]] = ContextVar("inside", default=_nowhere)
_constants: ContextVar[int] = ContextVar("constants", default=0)
ShardingTypeError = core.ShardingTypeError
apply_primitive = dispatch.apply_primitive


def needs_devices_to_lower(primitive: Primitive) -> None:
    """Has jax resolve the devices before it lowers the primitive.

    Without it a `custom_partitioning` inside the lowering rule would not know
    the device assignment.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def wrap_lowerings(
    primitive: Primitive, wrap: Callable[[Any], Any], wrapped_now: Callable[[], bool]
) -> None:
    """Puts wrap(rule) in the place of each rule that lowers a primitive of jax.

    A program for several platforms is then split among them as it was before.

    Args:
      primitive: jax's.
      wrap: makes a rule of one.
      wrapped_now: whether it may differ from jax's. Then equations are lowered one by
        one, as what operands come from differs between equal ones; otherwise equal ones
        are lowered once, as by jax alone.
    """
    _wrap_rules(primitive, wrap)
    known = lowerings._uncacheable_primitives
    if not isinstance(known, _Uncacheable):
        known = lowerings._uncacheable_primitives = _Uncacheable(known)
        lowerings.lower_per_platform = functools.partial(
            _lower_per_platform, lowerings.lower_per_platform
        )
    known.sometimes[primitive] = wrapped_now


def _wrap_rules(primitive: Primitive, wrap: Callable[[Any], Any]) -> None:
    by_platform = lowerings._platform_specific_lowerings.values()
    for rules in (lowerings._lowerings, *by_platform):
        if primitive in rules:
            entry = rules[primitive]
            rules[primitive] = dataclasses.replace(entry, rule=wrap(entry.rule))


def mark_loops(
    sees_slices: Callable[[Primitive], bool],
    is_slice: Callable[[Any, mlir.LoweringRuleContext], bool],
) -> None:
    """Has `inside` know when the bodies of loops, and branches, are lowered.

    Args:
      sees_slices: whether a primitive, not jax's, wants to know of an operand that a
        scan slices it. Scans with one in their bodies, and those with a primitive whose
        rule is wrapped now, are lowered without a function for the body, and so are
        calls that are given a slice.
      is_slice: whether an operand of a call, where that is lowered, is such a one.
    """

    def marked(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
            sizes = [_nbytes(aval) for aval in ctx.avals_in]
            places = dict(_inside.get())
            if name == "scan":  # which becomes a while, also of all its slices
                places[name] = sum(sizes[: sum(scan_arity(params))])
            else:
                places[name] = places.pop("scan", sum(sizes))
            token, before = _inside.set(places), _constants.get()
            if name == "while":
                _constants.set(params["cond_nconsts"] + params["body_nconsts"])
            try:
                return rule(ctx, *operands, **params)
            finally:
                _inside.reset(token)
                _constants.set(before)

        return lower

    for primitive in (primitives.scan_p, primitives.while_p, primitives.cond_p):
        _wrap_rules(primitive, functools.partial(marked, primitive.name))

    def is_wanted(eqn: Any) -> bool:
        return sees_slices(eqn.primitive) or _is_wrapped_now(eqn.primitive)

    def opened(rule: Callable[..., Any]) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
            (body,) = inner_jaxprs(params)
            place = mlir.ir.InsertionPoint.current.block.owner.operation.name
            # A body that a loop was given, or a call of the program's.
            is_open = "call_jaxpr" in params and place == "stablehlo.while"
            if not is_open and is_plain_call(params) and not body.effects:
                is_open = any(is_slice(v, ctx) for v in operands)
            if not (is_open and has_any(body, is_wanted)):
                return rule(ctx, *operands, **params)
            closed: Any = params.get("call_jaxpr", params.get("jaxpr"))
            if not isinstance(closed, ClosedJaxpr):
                closed = ClosedJaxpr(closed, ())
            if "name" in params:
                stack = ctx.name_stack.extend(f"jit({params['name']})")
                ctx = ctx.replace(name_stack=stack)
            return mlir.lower_fun(jaxpr_as_fun(closed))(ctx, *operands)

        return lower

    # Before jax 0.11 there is no eval_jaxpr, later closed_call is another name of it.
    called = getattr(core, "eval_jaxpr_p", core.closed_call_p)
    for primitive in (called, primitives.jit_p):
        _wrap_rules(primitive, opened)
    # Lowered elsewhere first, to be put in their places, they would not see any.
    elsewhere = primitives.remat_p, primitives.scan_p, primitives.cond_p
    lowerings._uncacheable_primitives.update(elsewhere)


def _is_wrapped_now(primitive: Primitive) -> bool:
    known = lowerings._uncacheable_primitives
    return isinstance(known, _Uncacheable) and known.is_wrapped_now(primitive)


def inside() -> Mapping[str, int]:
    """What is lowered now is in these, "while" and "cond", or was first called there.

    With each, how many bytes it is given, those that a scan slices left aside.
    """
    return {name: size for name, size in _inside.get().items() if name != "scan"}


def fuses_transposes() -> bool:
    """Whether XLA computes a vector by a matrix's transpose in one loop.

    In loops and branches, with what is around, and everywhere before jax 0.11; later
    ones write the transpose out.
    """
    return bool(inside()) or jax.__version_info__ < (0, 11)


def loop_constants() -> int:
    """How many arguments of the innermost loop, the first, stay what they are."""
    return _constants.get()


def _nbytes(aval: Any) -> int:
    shape = getattr(aval, "shape", ())
    known = all(isinstance(n, int) for n in shape)
    dtype = getattr(aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0) if known else 0


class _Uncacheable(set[Primitive]):
    """Primitives whose equations are each lowered on their own, some only sometimes."""

    def __init__(self, always: Iterable[Primitive]) -> None:
        super().__init__(always)
        self.sometimes: dict[Primitive, Callable[[], bool]] = {}

    def __contains__(self, primitive: object) -> bool:
        return super().__contains__(primitive) or self.is_wrapped_now(primitive)

    def is_wrapped_now(self, primitive: Any) -> bool:
        now = self.sometimes.get(primitive)
        return now is not None and now()


def _lower_per_platform(original: Any, ctx: Any, *args: Any, **params: Any) -> Any:
    """jax 0.12 adds avals_out to a list, and has a tuple of them."""
    inner = ctx.replace(avals_out=list(ctx.avals_out))
    results = original(inner, *args, **params)
    if inner.tokens_out is not None:  # of what has effects, in their order
        ctx.set_tokens_out(inner.tokens_out)
    return results


def lowering_platform(ctx: mlir.LoweringRuleContext) -> str | None:
    """The platform that is lowered for; None if there are several, or part of it."""
    names = ctx.platforms or ctx.module_context.platforms
    return names[0] if len(ctx.module_context.platforms) == len(names) == 1 else None


def is_export(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program is lowered by `jax.export`."""
    return ctx.module_context.lowering_parameters.for_export


def is_annotated(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a program says where an operation runs, or what XLA is to know of it."""
    equation = ctx.jaxpr_eqn_ctx
    return bool(equation and (equation.compute_type or equation.xla_metadata))


@functools.cache
def _at_programs() -> tuple[list[Any], list[Any]]:
    """What is called with each program that is lowered, and what rewrites it."""
    original: Any = lowerings.lower_jaxpr_to_module
    watchers: list[Callable[[str, Any], None]] = []
    rewriters: list[Callable[[str, Any, Mapping[str, Any]], Any]] = []

    def lower(name: str, jaxpr: Any, **options: Any) -> Any:
        for call in tuple(watchers):
            call(name, jaxpr)
        for rewrite in rewriters:
            jaxpr = rewrite(name, jaxpr, options)
        return original(name, jaxpr, **options)

    lowerings.lower_jaxpr_to_module = lower  # type: ignore[assignment]
    return watchers, rewriters


@contextlib.contextmanager
def watch_lowerings(call: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside, call(name, closed jaxpr) is called for each program that is lowered."""
    watchers, _ = _at_programs()
    watchers.append(call)
    try:
        yield
    finally:
        watchers.remove(call)


def rewrite_programs(rewrite: Callable[[str, Any, str, bool], Any]) -> None:
    """Has programs be lowered as another says that computes the same.

    Args:
      rewrite: `rewrite(name, closed jaxpr, platform, for_export)` -> closed jaxpr. It
        is asked of programs for one device of one platform, without effects.
    """

    def ask(name: str, jaxpr: Any, options: Mapping[str, Any]) -> Any:
        context, platforms = options["axis_context"], options["platforms"]
        alone = (
            isinstance(context, sharding_impls.ShardingContext)
            and context.num_devices == len(platforms) == 1
            and not options.get("num_const_args")
        )
        if not alone or jaxpr.effects:
            return jaxpr
        for_export = options["lowering_parameters"].for_export
        return rewrite(name, jaxpr, platforms[0], for_export)

    _at_programs()[1].append(ask)


def says_where(eqn: Any) -> bool:
    """Whether an equation says where it runs, or what XLA is to know of it."""
    return bool(eqn.ctx.compute_type or eqn.ctx.xla_metadata)


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    return core.jaxprs_in_params(params)


def has_any(jaxpr: Any, asked: Callable[[Any], bool]) -> bool:
    """Whether any equation of a jaxpr, or of those inside, is what is asked for."""
    return any(
        asked(eqn) or any(has_any(j, asked) for j in inner_jaxprs(eqn.params))
        for eqn in jaxpr.eqns
    )


def of_module(ctx: mlir.LoweringRuleContext, make: Callable[[], Any]) -> Any:
    """What is kept of the module that is being lowered, made when first asked for."""
    kept = ctx.module_context.cached_primitive_lowerings
    if "jax_layout" not in kept:
        kept["jax_layout"] = make()
    return kept["jax_layout"]


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which x varies, inside `jax.shard_map`."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def is_unreduced(aval: Any) -> bool:
    """Whether the value still owes a sum over some mesh axis."""
    spec = aval.sharding.spec
    if getattr(spec, "unreduced", ()) or getattr(spec, "reduced", ()):
        return True
    manual = getattr(aval, "manual_axis_type", None)
    return bool(manual is not None and (manual.unreduced or manual.reduced))


def partitioning(ctx: mlir.LoweringRuleContext) -> str:
    """How the program being lowered is spread over devices.

    Returns:
      "none" for one device, or inside a fully manual `jax.shard_map`, where the
      code is per device already; "mesh" where XLA partitions it over a mesh
      that `custom_partitioning` can name; "unknown" for other partitioned
      programs, such as a `jax.shard_map` over some of the axes.
    """
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, sharding_impls.SPMDAxisContext):
        manual = set(axis_context.manual_axes) == set(axis_context.mesh.axis_names)
        return "none" if manual else "unknown"
    if isinstance(axis_context, sharding_impls.ShardingContext):
        if axis_context.num_devices == 1:
            return "none"
        named = axis_context.abstract_mesh is not None
        return "mesh" if named and axis_context.device_assignment else "unknown"
    return "none"


def is_whole_program(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program being lowered is for one device, and no part of another."""
    axis_context = ctx.module_context.axis_context
    return (
        isinstance(axis_context, sharding_impls.ShardingContext)
        and axis_context.num_devices == 1
    )


def canonical_precision(precision: Any) -> Any:
    """What `jax.lax.dot_general` makes of a precision and of jax's default for it."""
    return lax.canonicalize_precision(precision)


def is_default_precision(precision: Any) -> bool:
    """Whether that asks for nothing in particular."""
    given = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, lax.Precision.DEFAULT) for p in given)


def bind(eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Applies the primitive of a jaxpr's equation to other operands.

    Args:
      eqn: the equation.
      operands: one for each operand of the equation.
      changed: parameters that differ from the equation's.

    Returns:
      the results; their source line is the equation's.
    """
    primitive = eqn.primitive
    found = primitive.get_bind_params({**eqn.params, **changed})
    functions, params = found if isinstance(found, tuple) else ((), found)
    with in_place_of(eqn), eqn.ctx.manager:
        out = primitive.bind(*functions, *operands, **params)
    return list(out) if primitive.multiple_results else [out]


def in_place_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """In which what is traced has the source line and the name of an equation."""
    source = eqn.source_info
    if source_info_util.current().traceback is source.traceback:
        return contextlib.nullcontext()  # it has them already
    stack = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=stack)


def inlined_source(call: Any, source: Any) -> Any:
    """The source of an equation in the body of a call, once it takes the call's place.

    Args:
      call: the call's source.
      source: the equation's; often without a line of the user's.
    """
    known = bool(source_info_util.summarize(source))
    return source.replace(
        traceback=source.traceback if known else call.traceback,
        name_stack=call.name_stack + source.name_stack,
    )


def scan_arity(params: Mapping[str, Any]) -> tuple[int, int]:
    """Number of constants and of carried values of a scan equation."""
    if "ft_in" in params:  # from jax 0.11
        constants, carried, _ = params["ft_in"].unpack()
        return len(list(constants)), len(list(carried))
    return params["num_consts"], params["num_carry"]


def live_jaxpr(closed: Any) -> Any:
    """A closed jaxpr's jaxpr, constants first, without what its results do not need."""
    jaxpr = partial_eval.convert_constvars_jaxpr(closed.jaxpr)
    needed = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, needed, instantiate=True)[0]


def is_plain_call(params: Mapping[str, Any]) -> bool:
    """Whether a call equation is its body alone, without placement or options."""
    places = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    given = [entry for name in places for entry in params.get(name, ())]
    unspecified = sharding_impls.UnspecifiedValue
    return not params.get("compiler_options_kvs") and all(
        entry is None or isinstance(entry, unspecified) for entry in given
    )


def is_reference(aval: Any) -> bool:
    return isinstance(aval, state.AbstractRef)


def is_explicitly_sharded(aval: Any) -> bool:
    """Whether the type of a value says over which mesh axes it is spread."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and any(axis is not None for axis in sharding.spec)


def like(x: Any, aval: Any) -> Any:
    """An array with the weak or strong type of an abstract one."""
    if getattr(jax.typeof(x), "weak_type", False) == aval.weak_type:
        return x
    return lax._convert_element_type(x, aval.dtype, aval.weak_type)


def describe(eqn: Any) -> str:
    """The name of an equation's primitive, and its source line."""
    return f"{eqn.primitive.name} ({source_info_util.summarize(eqn.source_info)})"


@functools.cache
def has_cudnn_attention() -> bool:
    """Whether jax finds cuDNN, and a GPU that its attention runs on (Ampere)."""
    try:
        return cudnn.check_cudnn_version() > 0 and cudnn.check_compute_capability("8.0")
    except RuntimeError:  # no library, or no GPU
        return False


def cudnn_attention(
    query: Any, key: Any, value: Any, *, scale: float, causal: bool, order: str
) -> Any:
    """cuDNN's attention.

    Args:
      query: four axes, of float16 or bfloat16.
      key: likewise, of heads that divide the query's.
      value: as key.
      scale: of the scores.
      causal: whether query t sees keys up to the t-th alone.
      order: "BTNH" or "BNTH", of the axes of all.

    Returns:
      the result, and the logarithms of softmax's sums: float32, of batch, heads and
      queries.
    """
    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    return cudnn.dot_product_attention(
        *(query, key, value),
        scale=scale,
        mask_type=mask,
        qkv_layout=order,
        return_residual=True,
    )


def backends_have_started() -> bool:
    """Whether jax has a backend, and so threads of its own."""
    return bool(xla_bridge.backends_are_initialized())
