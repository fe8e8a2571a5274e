# SPDX-License-Identifier: Apache-2.0
"""Turns a declarative record into a JAX primitive.

The record says what an operator means, as a plain `jax.lax` function, and what
is known beyond that: the kernel's attributes, the derivative, the batching and
the sharding rule. Shape, dtype, sharding and varying axes of the result are read
off the `lax` function, so they are jax's own on every jax version; platforms
without a kernel run it as it stands.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend import source_info_util
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

from jax_layout import _backends, _compat, choices, producers, readers, stacks
from jax_layout.kernel import Kernel, by_choice, placed
from jax_layout.partition import partitioned
from jax_layout.plain import jnp, lax

_PLATFORMS = ("cpu", "cuda")
_GPUS = ("cuda", "rocm")

# An operation's source line is the user's, not one of ours.
source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)


@dataclasses.dataclass(frozen=True)
class Op:
    """What `define` needs to know of an operator.

    Every rule gets the operator's parameters as keyword arguments: static,
    hashable values.

    Attributes:
      name: the primitive's name.
      lax: `lax(*operands, **params)`: the meaning of the operator, in `jax.lax`.
      kernel: `kernel(platform, *avals, **params)`: the custom call for a platform,
        or None where plain `lax` serves better. Left out, it always does.
      jvp: `jvp(primals, tangents, **params)`, as in `jax.interpreters.ad`. Left
        out, the operator must be linear in each operand, and `transpose` given.
      transpose: `transpose(ct, *operands, **params)`: the cotangents, None for
        operands that are not `ad.UndefinedPrimal`.
      batch: `batch(operands, dims, **params)`: the result and its batch axis.
      sharding: `sharding(*avals, **params)`: names every axis, in the notation of
        Shardy's rules ("m k, k n -> m n"). An axis the result lacks is summed
        over; one named in capitals must be whole on every device. Without a rule,
        programs over several devices run the `lax` function.
      in_parts: `in_parts(total, *operands, **params)`: the result on devices that
        each hold a part of an axis that some result lacks. `total(value)` sums over
        the devices along all axes that every result lacks, `total(value, *names)`
        along those named, and `by(value, axes)` may be another collective than
        `lax.psum`. Left out, the results of each are so summed.
      multiple_results: whether the operator returns a sequence.
      platforms: jax's names of the platforms that `kernel` is asked for.
      dtypes: names of the dtypes of the first result that kernels can make; others
        run the `lax` function. Left out, it can be any.
      layouts: whether kernels declare layouts, choose by them or read parts of arrays.
        They then read through transposes, and must not read the shape of a buffer.
      turned: `turned(place, axes, **params)`: the parameters of the operator on what
        its operand at this place is a transpose of, by these axes; None if it has none.
        Kernels then read through transposes.
      written: `written(axes, *avals, **params)`: the parameters of the operator whose
        result is the transpose, by these axes, of its own; None if it has none. Kernels
        then write what is only transposed so.
      lax_on_gpu: `lax` in the form that XLA compiles best for GPUs, where that is
        another.
    """

    name: str
    lax: Callable[..., Any]
    kernel: Callable[..., Kernel | None] | None = None
    jvp: Callable[..., Any] | None = None
    transpose: Callable[..., Sequence[Any]] | None = None
    batch: Callable[..., Any] | None = None
    sharding: Callable[..., str] | None = None
    in_parts: Callable[..., Any] | None = None
    multiple_results: bool = False
    platforms: Sequence[str] = ("cpu", "cuda")
    dtypes: Sequence[str] | None = None
    layouts: bool = False
    turned: Callable[..., dict[str, Any] | None] | None = None
    written: Callable[..., dict[str, Any] | None] | None = None
    lax_on_gpu: Callable[..., Any] | None = None


_RULES = ("kernel", "jvp", "transpose", "batch", "sharding", "in_parts")

_operators: dict[str, Op] = {}
_records: dict[Primitive, Op] = {}
_without_kernels: dict[Primitive, Primitive] = {}  # primitive -> another, always `lax`

# For Kernel.ours_in_loops and Kernel.parts.
_compat.mark_loops(
    lambda p: p in _records and _records[p].layouts, stacks.is_large_block
)


def _as_read(_: str, jaxpr: Any, platform: str, __: bool) -> Any:
    """A program in which results are written as they are read: see `Op.written`."""

    def written(eqn: Any, axes: Sequence[int]) -> dict[str, Any] | None:
        op = _records.get(eqn.primitive)
        if op is None or op.written is None:
            return None
        return op.written(axes, *(v.aval for v in eqn.invars), **eqn.params)

    if platform not in _PLATFORMS or not _backends.available(platform):
        return jaxpr
    return readers.without_transposes(jaxpr, written)


_compat.rewrite_programs(_as_read)


def operators() -> Mapping[str, Op]:
    """The records of all operators that are defined, by name.

    >>> sorted(operators()["permute"].platforms)
    ['cpu', 'cuda']
    """
    return types.MappingProxyType(_operators)


def define(op: Op, handlers: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Makes the primitive of a record.

    Args:
      op: the record.
      handlers: jax's name of a platform, "cpu" or "cuda", -> the handler of the
        operator's FFI target, as `jax.ffi.register_ffi_target` takes it: a capsule,
        or a dictionary of them by stage. On platforms without one the operator is
        its `lax` function. Left out, the handlers are those of this package.

    Returns:
      the function that applies the operator: `f(*operands, **params)`.

    Raises:
      TypeError: if `op` is no record, or `lax` or a rule of it no function.
      ValueError: if its name is no identifier or taken, or a platform is unknown.

    >>> def f(x): return 2 * jax.lax.sin(x)
    >>> twice_sin = define(Op(name="twice_sin", lax=f, jvp=jvp_of(f)))
    >>> round(float(jax.grad(twice_sin)(0.0)), 3)
    2.0
    """
    if not isinstance(op, Op):
        raise TypeError(f"define: op must be an Op, got {type(op).__name__}.")
    if not isinstance(op.name, str) or not op.name.isidentifier():
        raise ValueError(f"define: name must be an identifier, got {op.name!r}.")
    for field in ("lax", *_RULES):
        rule = getattr(op, field)
        if not callable(rule) and (field == "lax" or rule is not None):
            raise TypeError(
                f"define: {field} of {op.name} must be a function, got {rule!r}."
            )
    if op.name in _operators:
        raise ValueError(f"define: there is an operator named {op.name!r} already.")
    for platform, handler in (handlers or {}).items():
        if platform not in _PLATFORMS:
            raise ValueError(
                f"define: {op.name} has handlers for {', '.join(_PLATFORMS)} at most, "
                f"got one for {platform!r}."
            )
        _backends.register_handler(f"jax_layout_{op.name}", handler, platform)
    _operators[op.name] = op

    primitive = Primitive(op.name)
    primitive.multiple_results = op.multiple_results
    _records[primitive] = op

    def apply(*operands: Any, **params: Any) -> Any:
        return primitive.bind(*_vary_alike(operands), **params)

    primitive.def_impl(functools.partial(_compat.apply_primitive, primitive))
    primitive.def_abstract_eval(functools.partial(_abstract_eval, op))

    lowers = functools.partial(mlir.lower_fun, multiple_results=op.multiple_results)
    plain, on_gpu = lowers(op.lax), lowers(op.lax_on_gpu or op.lax)
    mlir.register_lowering(primitive, plain)
    for platform in _GPUS if op.lax_on_gpu else ():
        mlir.register_lowering(primitive, on_gpu, platform=platform)
    for platform in op.platforms if op.kernel is not None else ():
        fallback = on_gpu if platform in _GPUS else plain
        ours = handlers is None and _backends.available(platform)
        if ours or platform in (handlers or {}):
            rule = functools.partial(_lower, op, apply, fallback, platform)
            if ours:
                rule = functools.partial(_lower_if_usable, rule, fallback, platform)
            # What operands come from differs between equal equations.
            mlir.register_lowering(
                primitive, rule, platform=platform, cacheable=not op.layouts
            )
        elif handlers is None and _backends.module(platform) is None:
            rule = functools.partial(_lower_without, fallback, platform)
            mlir.register_lowering(primitive, rule, platform=platform)
    _compat.needs_devices_to_lower(primitive)
    without_kernel = Primitive(op.name)
    without_kernel.multiple_results = op.multiple_results
    without_kernel.def_abstract_eval(functools.partial(_abstract_eval, op))
    mlir.register_lowering(without_kernel, functools.partial(_lower_plainly, plain))
    _without_kernels[primitive] = without_kernel

    jvp = op.jvp
    if jvp is None and op.transpose is not None:
        jvp = functools.partial(_multilinear_jvp, apply)
    jvp = jvp or _missing(op, "jvp", "differentiated")
    transpose = op.transpose or _missing(op, "transpose", "transposed")
    batch = op.batch or _missing(op, "batch", "mapped by vmap")
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jvp(
        _arrays(primals), tangents, **params
    )
    ad.primitive_transposes[primitive] = lambda *values, **params: transpose(
        *_arrays(values), **params
    )
    batching.primitive_batchers[primitive] = lambda operands, dims, **params: batch(
        _arrays(operands), dims, **params
    )
    return apply


def _arrays(operands: Sequence[Any]) -> list[Any]:
    """The operands, with arrays for numbers: literals of a jaxpr, users' cotangents."""
    return [
        jnp.asarray(x, getattr(x, "dtype", None))
        if isinstance(x, int | float | complex)
        else x
        for x in operands
    ]


def _missing(op: Op, rule: str, what: str) -> Callable[..., Any]:
    def complain(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{op.name}: cannot be {what}, as its record has no {rule!r} rule."
        )

    return complain


def jvp_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """The `jvp` rule of an operator that equals `f`, made of other operators."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(f, **params), tuple(primals), tuple(tangents))

    return rule


def batch_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """The `batch` rule of an operator that equals `f`, made of other operators."""

    def rule(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        out = jax.vmap(functools.partial(f, **params), tuple(dims))(*operands)
        return out, [0] * len(out) if isinstance(out, list | tuple) else 0

    return rule


def in_front(operands: Sequence[Any], dims: Sequence[Any]) -> list[Array]:
    """Operands of a `batch` rule, all with the batch as first axis.

    Args:
      operands: the operator's.
      dims: the batch axis of each; None for one that has none, which is repeated.
    """
    pairs = list(zip(operands, dims, strict=True))
    size = next(x.shape[dim] for x, dim in pairs if dim is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape))
        if dim is None
        else jnp.moveaxis(x, dim, 0)
        for x, dim in pairs
    ]


def _vary_alike(operands: Sequence[Any]) -> Sequence[Any]:
    """Marks operands as varying over every mesh axis that any of them varies over.

    Inside `jax.shard_map`. The mark's transpose is the sum over the axis that
    the gradient of a replicated operand needs.
    """
    axes = [_compat.varying_axes(x) for x in operands]
    union = frozenset().union(*axes)
    return [
        lax.pcast(x, tuple(sorted(union - mine)), to="varying") if mine < union else x
        for x, mine in zip(operands, axes, strict=True)
    ]


def _abstract_eval(op: Op, *avals: Any, **params: Any) -> Any:
    try:
        out = jax.make_jaxpr(functools.partial(op.lax, **params))(*avals).out_avals
    except _compat.ShardingTypeError as error:
        raise ValueError(f"{op.name}: unsupported sharding: {error}") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{op.name}: {error}") from error
    return out if op.multiple_results else out[0]


def _multilinear_jvp(
    apply: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    out = apply(*primals, **params)
    terms = [
        apply(*primals[:i], tangent, *primals[i + 1 :], **params)
        for i, tangent in enumerate(tangents)
        if not isinstance(tangent, ad.Zero)
    ]
    return out, functools.reduce(ad.add_jaxvals, terms)


def _lower_if_usable(
    rule: Callable[..., Any],
    fallback: Callable[..., Any],
    platform: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Any:
    chosen = rule if _backends.usable(platform) else fallback
    return chosen(ctx, *operands, **params)


def _lower_plainly(
    plain: Callable[..., Any],
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Any:
    with choices.forced("lax"):  # the operators that it is made of, too
        return plain(ctx, *operands, **params)


def _lower_without(
    fallback: Callable[..., Any],
    platform: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Any:
    _backends.warn_not_built(platform)
    return fallback(ctx, *operands, **params)


def _lower(
    op: Op,
    apply: Callable[..., Any],
    fallback: Callable[..., Any],
    platform: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Any:
    spread = _compat.partitioning(ctx)
    inner, read, turned = ctx, operands, params
    if spread == "none" and op.turned is not None:
        inner, read, turned = _untransposed(op.turned, ctx, operands, params)
    kernel = _kernel(op, platform, inner.avals_in, inner.avals_out, turned)
    if kernel is None and read != operands:
        inner, read, turned = ctx, operands, params
        kernel = _kernel(op, platform, ctx.avals_in, ctx.avals_out, params)
    if kernel is None:
        return fallback(ctx, *operands, **params)
    if spread == "none":
        chosen = by_choice(placed(kernel, inner, read))
        if chosen is None:
            if platform != "cpu" or _compat.fuses_transposes():
                inner, read, turned = ctx, operands, params  # XLA reads through them
            return _lower_plainly(fallback, inner, *read, **turned)
        return custom_call(op, chosen, inner, *read)
    if spread == "unknown" or op.sharding is None:
        return fallback(ctx, *operands, **params)
    rule = op.sharding(*ctx.avals_in, **params)
    split = partitioned(op, functools.partial(apply, **params), rule, params)
    return mlir.lower_fun(split, op.multiple_results)(ctx, *operands)


def _untransposed(
    turned: Callable[..., dict[str, Any] | None],
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    params: dict[str, Any],
) -> tuple[mlir.LoweringRuleContext, tuple[Any, ...], dict[str, Any]]:
    """The operator of what its operands are transposes of: see `Op.turned`."""
    read, avals = list(operands), list[Any](ctx.avals_in)
    for place in range(len(read)):
        while (axes := producers.permuted(read[place])) is not None:
            before = turned(place, axes, **params)
            if before is None:
                break
            read[place], params = producers.maker(read[place]).operands[0], before
            shape = read[place].type.shape
            avals[place] = jax.core.ShapedArray(shape, avals[place].dtype)
    return ctx.replace(avals_in=avals), tuple(read), params


def _kernel(
    op: Op,
    platform: str,
    avals: Sequence[Any],
    results: Sequence[Any],
    params: Mapping[str, Any],
) -> Kernel | None:
    if op.kernel is None:
        return None
    if op.dtypes is not None and results[0].dtype.name not in op.dtypes:
        return None
    # XLA sums unreduced operands where it pleases; only lax knows to leave them.
    if any(map(_compat.is_unreduced, avals)):
        return None
    kernel = op.kernel(platform, *avals, **params)
    if kernel is None or kernel.work is None or platform == "cpu":
        return kernel
    return dataclasses.replace(kernel, work=kernel.work.named(f"{platform} {{}}"))


def untransposed(eqn: Any, transposes: Mapping[Any, Any]) -> Any:
    """An operator's equation on what its operands are transposes of.

    Args:
      eqn: of a program that is yet to be lowered.
      transposes: variable -> the transpose whose result it is.
    """
    read, params, turned = [*eqn.invars], eqn.params, _records[eqn.primitive].turned
    for place, v in enumerate(read):
        while not isinstance(v, Literal) and v in transposes:
            axes = transposes[v].params["permutation"]
            before = None if turned is None else turned(place, axes, **params)
            if before is None:
                break
            (v,), params = transposes[v].invars, before
        read[place] = v
    return eqn.replace(invars=read, params=params)


def is_operator(eqn: Any) -> bool:
    """Whether an equation is one of an operator's."""
    return eqn.primitive in _records


def is_ours(eqn: Any, slices: Sequence[Any] = ()) -> bool:
    """Whether an operator's equation will have a kernel in a program for CPUs.

    Args:
      eqn: which reads through transposes.
      slices: variables that a loop slices out of an array.
    """
    avals, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
    kernel = _kernel(_records[eqn.primitive], "cpu", avals, results, eqn.params)
    if kernel is None:
        return False
    if kernel.parts is not None:
        largest = max(kernel.parts.names, key=lambda place: avals[place].size)
        if any(eqn.invars[largest] is v for v in slices):
            kernel = dataclasses.replace(kernel, gain=kernel.parts.gain)
    return by_choice(kernel) is not None


def without_kernel(eqn: Any) -> Any:
    """An equation of an operator that is lowered as plain `lax`."""
    return eqn.replace(primitive=_without_kernels[eqn.primitive])


def chosen_kernel(
    name: str,
    platform: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    passes: int = 1,
    **params: Any,
) -> Kernel | None:
    """The custom call that an operator would be, in the place of what jax lowers.

    Args:
      name: the operator's.
      platform: jax's name of it.
      ctx: whose avals are those of the operator's operands and results.
      operands: values of the program that is being lowered.
      passes: as in `choices.choose`.
      params: the operator's.

    Returns:
      the kernel, with the method that the tables choose; None for plain `lax`, also
      where XLA is to partition the program.
    """
    op = _operators[name]
    if platform not in op.platforms or not _backends.available(platform):
        return None
    if _compat.partitioning(ctx) != "none":
        return None
    kernel = _kernel(op, platform, ctx.avals_in, ctx.avals_out, params)
    return kernel and by_choice(placed(kernel, ctx, operands), passes)


def custom_call(
    op: Op | str, kernel: Kernel, ctx: mlir.LoweringRuleContext, *operands: Any
) -> Any:
    """Lowers to the custom call of a kernel, of an operator or one of this name."""
    op = _operators[op] if isinstance(op, str) else op
    if kernel.instead is not None:
        return mlir.lower_fun(kernel.instead, op.multiple_results)(ctx, *operands)
    results = len(ctx.avals_out)
    operand_layouts, result_layouts = kernel.operand_layouts, kernel.result_layouts
    if kernel.prepare is not None:
        prepared = jax.make_jaxpr(kernel.prepare)(*ctx.avals_in).out_avals
        operands = mlir.lower_fun(kernel.prepare)(ctx, *operands)
        ctx = ctx.replace(avals_in=prepared)
    if op.layouts and operand_layouts is not None:
        read = list(map(producers.through_transposes, operands, operand_layouts))
        operands, operand_layouts = zip(*read, strict=True)
        avals: Any = zip(operands, ctx.avals_in, strict=True)
        avals = [jax.core.ShapedArray(v.type.shape, aval.dtype) for v, aval in avals]
        ctx = ctx.replace(avals_in=avals)
    attributes = dict(kernel.attributes)
    if kernel.parts is not None:
        ctx, operands, found = kernel.parts.read(ctx, operands)
        attributes |= found
    if kernel.workspace:
        if result_layouts is not None:
            result_layouts = [*result_layouts, (0,)]
        scratch = jax.core.ShapedArray((kernel.workspace,), np.dtype(np.uint8))
        ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    lowering = jax.ffi.ffi_lowering(
        kernel.target or f"jax_layout_{op.name}",
        operand_output_aliases=dict(kernel.aliases),
        operand_layouts=_fastest_first(operand_layouts),
        result_layouts=_fastest_first(result_layouts),
    )
    return lowering(ctx, *operands, **attributes)[:results]


def _fastest_first(
    layouts: Sequence[Sequence[int]] | None,
) -> list[tuple[int, ...]] | None:
    return None if layouts is None else [tuple(axes)[::-1] for axes in layouts]
