# SPDX-License-Identifier: Apache-2.0
"""Convolutions and their gradients, which read and write any order of the axes.

The three passes of a convolution are closed under differentiation: each is linear
in both of its operands, and its transposes are the other two. The public functions
are in conv.py and general_dilated.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.interpreters import ad
from jax.lax import ConvDimensionNumbers

from jax_layout.arguments import accumulator, placement, widest
from jax_layout.convnet.conv_kernel import kernel
from jax_layout.convnet.passes import OPERANDS, RESULTS, Convolution, Sizes, each, swap
from jax_layout.op import Op, batch_of, define
from jax_layout.permute import moveaxis
from jax_layout.plain import jnp, lax

# --- what the passes mean


def _lax(
    result: str,
    a: Array,
    b: Array,
    *,
    conv: Convolution,
    precision: Any,
    dtype: np.dtype,
    out_sharding: Any,
) -> Array:
    a, b = (
        _unblock(value, conv.order(name), conv.block(name))
        for name, value in zip(OPERANDS[result], (a, b), strict=True)
    )
    x, w, y = conv.x_order, conv.w_order, conv.y_order
    pads = conv.pad_low, conv.pad_high
    options: dict[str, Any]
    if result == "y":
        orders = x, w, y
        options = {
            "window_strides": conv.stride,
            "rhs_dilation": conv.dilation,
            "feature_group_count": conv.groups,
        }
    elif result == "x":
        orders = y, swap(w), x
        b = move_groups(lax.rev(b, w[2:]), w[0], w[1], conv.groups)
        pads = (
            each(lambda reach, low: reach - low, conv.reach, conv.pad_low),
            each(lambda x, low, s: x + low - s, conv.x_size, conv.pad_low, conv.span),
        )
        options = {
            "window_strides": (1,) * len(conv.stride),
            "lhs_dilation": conv.stride,
            "rhs_dilation": conv.dilation,
            "feature_group_count": conv.groups,
        }
    else:
        orders = swap(x), swap(y), swap(w)
        options = {
            "window_strides": conv.dilation,
            "rhs_dilation": conv.stride,
            "batch_group_count": conv.groups,
        }
    out = lax.conv_general_dilated(
        a,
        b,
        padding=list(zip(*pads, strict=True)),
        dimension_numbers=ConvDimensionNumbers(*orders),
        precision=precision,
        preferred_element_type=None if dtype == a.dtype else dtype,
        out_sharding=out_sharding,
        **options,
    )
    return _block(out, conv.order(result), conv.block(result))


def move_groups(w: Array, source: int, target: int, groups: int) -> Array:
    """Moves the groups, the outer part of one axis of w, to another axis."""
    if groups == 1:
        return w
    w = _split(w, source, groups)
    return _merge(w, source, target)


def _unblock(value: Array, order: Sizes, block: int) -> Array:
    """Joins the inner part of the channels, the last axis, to the outer."""
    if block == 1:
        return value
    return _merge(value, -1, order[1], inner=True)


def _block(value: Array, order: Sizes, block: int) -> Array:
    if block == 1:
        return value
    value = _split(value, order[1], value.shape[order[1]] // block)
    return moveaxis(value, order[1] + 1, -1)


def _split(value: Array, axis: int, outer: int) -> Array:
    shape = value.shape
    sizes = outer, shape[axis] // outer
    return value.reshape(*shape[:axis], *sizes, *shape[axis + 1 :])


def _merge(value: Array, axis: int, into: int, inner: bool = False) -> Array:
    """Joins an axis to another, as its outer or its inner part.

    Args:
      value: array.
      axis: the axis.
      into: the other, as numbered once the axis is gone.
      inner: whether the axis changes faster.
    """
    value = moveaxis(value, axis, into + inner)
    shape = value.shape
    return value.reshape(
        *shape[:into], shape[into] * shape[into + 1], *shape[into + 2 :]
    )


# --- the rules, of the pass with this result


def _transpose(
    result: str, ct: Any, a: Any, b: Any, *, dtype: np.dtype, **params: Any
) -> list[Any]:
    names = OPERANDS[result]
    values = dict(zip(names, (a, b), strict=True)) | {result: ct}

    def cotangent(name: str) -> Any:
        of = values[name]
        if not ad.is_undefined_primal(of):
            return None
        given = [values[operand] for operand in OPERANDS[name]]
        if any(0 in value.shape for value in given):
            return ad.Zero(of.aval)  # XLA has no windows of size 0, nor crops them
        # A float32 cotangent of 16-bit operands is not rounded before the sum.
        wide = widest(*(value.dtype for value in given))
        given = [value.astype(wide) for value in given]
        options = params | {"dtype": wide, "out_sharding": placement(of.aval)}
        return PASSES[name](*given, **options).astype(of.aval.dtype)

    return [cotangent(name) for name in names]


def _batch(
    result: str,
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    conv: Convolution,
    **params: Any,
) -> tuple[Array, int]:
    """Folds the batch into the axis that the arrays which have it share."""
    values = dict(zip(OPERANDS[result], zip(operands, dims, strict=True), strict=True))
    size = next(value.shape[d] for value, d in values.values() if d is not None)
    if size == 0:
        one = [
            jnp.zeros([n for i, n in enumerate(v.shape) if i != d], v.dtype)
            for v, d in values.values()
        ]
        out = PASSES[result](*one, conv=conv, **params)
        return jnp.zeros((0, *out.shape), out.dtype), 0
    groups = conv.groups
    # By array: the axis, n or o of w first in its order, and what stays outside.
    folds = {
        frozenset("xy"): {"x": (0, 1), "y": (0, 1)},
        frozenset("wy"): {"w": (0, groups), "y": (1, groups)},
        frozenset("xw"): {"x": (1, groups), "w": (1, 1)},
    }
    mapped = frozenset(n for n, (_, d) in values.items() if d is not None) | {result}
    fold = folds.get(mapped)
    blocked = conv.x_block > 1 or conv.y_block > 1
    if fold is None or (groups > 1 and blocked and "w" in mapped):
        fold = {"x": (1, 1), "w": (0, 1), "y": (1, 1)}
        conv = dataclasses.replace(conv, groups=groups * size)

    def folded(name: str, value: Array, dim: int | None) -> Array:
        if name not in fold:
            return value
        if dim is None:
            value, dim = jnp.broadcast_to(value, (size, *value.shape)), 0
        place, outer = fold[name]
        axis = conv.order(name)[place]
        value = moveaxis(value, dim, 0)
        if outer == 1:
            return _merge(value, 0, axis)
        value = _merge(_split(value, axis + 1, outer), 0, axis + 1)
        return _merge(value, axis, axis)

    out = PASSES[result](
        *(folded(name, *value) for name, value in values.items()), conv=conv, **params
    )
    place, outer = fold[result]
    axis = conv.order(result)[place]
    if outer == 1:
        return _split(out, axis, size), axis
    out = _split(_split(out, axis, outer), axis + 1, size)
    return _merge(out, axis, axis + 1), axis


def _axes(conv: Convolution, name: str) -> str:
    """The names of an array's axes; in capitals those that stay whole."""
    names = list({"x": "nc", "w": "oc", "y": "no"}[name])
    blocked = conv.x_block > 1 or conv.y_block > 1
    if conv.groups > 1 or blocked:
        names = [i if i == "n" else f"{name}{i}".upper() for i in names]
    order = conv.order(name)
    names += [f"{name.upper()}{i}" for i in range(len(order) - 2)]
    placed = dict(zip(order, names, strict=True))
    block = [f"{name.upper()}B"] * (conv.block(name) > 1)
    return " ".join([*(placed[axis] for axis in range(len(order))), *block])


def _sharding(
    result: str, a: Any, b: Any, *bias: Any, conv: Convolution, **params: Any
) -> str:
    operands = [_axes(conv, name) for name in OPERANDS[result]]
    if bias:
        operands.append(_axes(conv, "w").split()[conv.w_order[0]])
    return ", ".join(operands) + " -> " + _axes(conv, result)


def _in_parts(
    result: str, total: Any, a: Array, b: Array, *, dtype: np.dtype, **params: Any
) -> Array:
    """What devices add up is not rounded before."""
    return total(PASSES[result](a, b, dtype=accumulator(dtype), **params)).astype(dtype)


def _define(result: str, name: str) -> Any:
    def rule(f: Any) -> Any:
        return functools.update_wrapper(functools.partial(f, result), f)

    return define(
        Op(
            name=name,
            lax=rule(_lax),
            kernel=rule(kernel),
            transpose=rule(_transpose),
            batch=rule(_batch),
            sharding=rule(_sharding),
            in_parts=rule(_in_parts),
            platforms=("cpu",),
            dtypes=RESULTS,
            layouts=True,
        )
    )


conv_p = _define("y", "conv")
conv_input_grad_p = _define("x", "conv_input_grad")
conv_weight_grad_p = _define("w", "conv_weight_grad")
PASSES = {"y": conv_p, "x": conv_input_grad_p, "w": conv_weight_grad_p}


# --- conv_fused_p: forward, then the bias and relu


def _epilogue(y: Array, bias: Sequence[Array], conv: Convolution, relu: bool) -> Array:
    for b in bias:
        y = y + along_channels(b, y, conv.y_order, conv.y_block)
    return jnp.maximum(y, 0) if relu else y


def along_channels(bias: Array, y: Array, order: Sizes, block: int) -> Array:
    """Bias, in a shape that broadcasts to that of y."""
    shape = [1] * y.ndim
    shape[order[1]] = y.shape[order[1]]
    if block > 1:
        shape[-1] = block
    return bias.astype(y.dtype).reshape(shape)


def _fused_lax(
    x: Array, w: Array, *bias: Array, conv: Convolution, relu: bool, **params: Any
) -> Array:
    return _epilogue(_lax("y", x, w, conv=conv, **params), bias, conv, relu)


def _unfused(
    x: Array, w: Array, *bias: Array, conv: Convolution, relu: bool, **params: Any
) -> Array:
    return _epilogue(conv_p(x, w, conv=conv, **params), bias, conv, relu)


def _fused_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    conv: Convolution,
    relu: bool,
    **params: Any,
) -> tuple[Any, Any]:
    x, w, *_ = primals
    dx, dw, *db = tangents
    y = conv_fused_p(*primals, conv=conv, relu=relu, **params)
    dy = [
        conv_p(*pair, conv=conv, **params)
        for t, pair in ((dx, (dx, w)), (dw, (x, dw)))
        if not isinstance(t, ad.Zero)
    ]
    dy += [
        jnp.broadcast_to(along_channels(t, y, conv.y_order, conv.y_block), y.shape)
        for t in db
        if not isinstance(t, ad.Zero)
    ]
    total = functools.reduce(jnp.add, dy)
    return y, jnp.where(y > 0, total, 0) if relu else total


def _fused_batch(
    operands: Sequence[Any], dims: Sequence[Any], *, conv: Convolution, **params: Any
) -> tuple[Array, int]:
    x, *rest = operands
    if dims[0] is None or any(d is not None for d in dims[1:]) or 0 in x.shape:
        return batch_of(_unfused)(operands, dims, conv=conv, **params)
    # Only x has the batch: it joins n.
    axis = conv.x_order[0]
    y = conv_fused_p(_merge(x, dims[0], axis), *rest, conv=conv, **params)
    return _split(y, conv.y_order[0], x.shape[dims[0]]), conv.y_order[0]


def _fused_in_parts(
    total: Any,
    x: Array,
    w: Array,
    *bias: Array,
    conv: Convolution,
    relu: bool,
    dtype: np.dtype,
    **params: Any,
) -> Array:
    """Bias and relu come once, after the sum."""
    y = total(conv_p(x, w, conv=conv, dtype=accumulator(dtype), **params))
    return _epilogue(y, bias, conv, relu).astype(dtype)


conv_fused_p = define(
    Op(
        name="conv_fused",
        lax=_fused_lax,
        kernel=functools.partial(kernel, "y"),
        jvp=_fused_jvp,
        batch=_fused_batch,
        sharding=functools.partial(_sharding, "y"),
        in_parts=_fused_in_parts,
        platforms=("cpu",),
        dtypes=RESULTS,
        layouts=True,
    )
)
