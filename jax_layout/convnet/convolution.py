# SPDX-License-Identifier: Apache-2.0
"""Convolutions and their gradients, which read and write any order of the axes.

The three passes of a convolution are closed under differentiation: each is linear
in both of its operands, and its transposes are the other two. The public functions
are in conv.py and general_dilated.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.interpreters import ad
from jax.lax import ConvDimensionNumbers

from jax_layout import _backends, _compat
from jax_layout.arguments import accumulator, placement, widest
from jax_layout.choices import Work
from jax_layout.formats.memory_format import MemoryFormat
from jax_layout.op import Kernel, Op, batch_of, define
from jax_layout.permute import moveaxis
from jax_layout.plain import jnp, lax

Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Convolution:
    """What the three passes of a convolution have in common.

    With i = s * stride + t * dilation - pad_low, per spatial axis,

      forward      y[n, o, s] = sum over c, t of x[n, c, i] * w[o, c, t]
      input_grad   x[n, c, i] = sum over o, s, t of y[n, o, s] * w[o, c, t]
      weight_grad  w[o, c, t] = sum over n, s of x[n, c, i] * y[n, o, s]

    Batch and channels are read off the operands: vmap and sharding change them.

    Attributes:
      x_order: the axes of x that are n, c and the spatial ones.
      w_order: the axes of w that are o, c and the spatial ones.
      y_order: the axes of y that are n, o and the spatial ones.
      x_size: spatial sizes of x.
      w_size: spatial sizes of w.
      y_size: spatial sizes of y.
      stride: per spatial axis.
      dilation: per spatial axis; 1: taps side by side.
      pad_low: per spatial axis; negative: x is cropped.
      groups: w has the channels of one of so many groups of x.
      x_block: over 1, x has one more, last, axis: the inner part of the channels.
      y_block: the same of y.
    """

    x_order: Sizes
    w_order: Sizes
    y_order: Sizes
    x_size: Sizes
    w_size: Sizes
    y_size: Sizes
    stride: Sizes
    dilation: Sizes
    pad_low: Sizes
    groups: int = 1
    x_block: int = 1
    y_block: int = 1

    @property
    def reach(self) -> Sizes:
        """From the first tap to the last."""
        return each(lambda k, d: (k - 1) * d, self.w_size, self.dilation)

    @property
    def span(self) -> Sizes:
        """Of the first taps: from the first window to after the last."""
        return each(lambda y, s: (y - 1) * s + 1 if y else 0, self.y_size, self.stride)

    @property
    def pad_high(self) -> Sizes:
        """As much as the last window reads; too little for one if y is empty."""
        return each(
            lambda x, low, reach, span: reach + span - x - low,
            *(self.x_size, self.pad_low, self.reach, self.span),
        )

    def order(self, name: str) -> Sizes:
        return getattr(self, f"{name}_order")

    def block(self, name: str) -> int:
        return getattr(self, f"{name}_block", 1)

    def memory(self, name: str) -> Sizes:
        """The axes of an array in the order that the kernels want in memory.

        The channels of x and y last. XLA then lays out what lies between two
        convolutions alike, so that NCHW values are moved where they enter and leave
        a network, and not around each convolution.
        """
        order, block = self.order(name), self.block(name)
        if name == "w" or block > 1:
            return tuple(range(len(order) + (block > 1)))
        return (order[0], *order[2:], order[1])

    def shapes(self, result: str, a: Sizes, b: Sizes) -> dict[str, Sizes]:
        """The shapes of all three arrays, of which one is the result."""
        shapes = dict(zip(_OPERANDS[result], (a, b), strict=True))
        outer = {  # batch and channels, or both channels
            name: [
                shape[axis] * block
                for axis, block in zip(
                    self.order(name)[:2], (1, self.block(name)), strict=True
                )
            ]
            for name, shape in shapes.items()
        }
        if result == "y":
            outer["y"] = [outer["x"][0], outer["w"][0]]
        elif result == "x":
            outer["x"] = [outer["y"][0], outer["w"][1] * self.groups]
        else:
            outer["w"] = [outer["y"][1], outer["x"][1] // self.groups]
        order, block = self.order(result), self.block(result)
        shape = [0] * len(order)
        sizes = *outer[result], *getattr(self, f"{result}_size")
        for axis, size in zip(order, sizes, strict=True):
            shape[axis] = size
        if block > 1:
            shape[order[1]] //= block
            shape.append(block)
        return shapes | {result: tuple(shape)}


_CPU_DTYPES = ("float32", "bfloat16", "float16", "int8")  # of the operands
RESULTS = ("float32", "bfloat16", "float16", "int32")

# A pass by its result: what it is called, and what it reads.
_NAMES = {"y": "forward", "x": "input_grad", "w": "weight_grad"}
_OPERANDS = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}


def each(f: Any, *sizes: Sequence[Any]) -> Sizes:
    return tuple(f(*values) for values in zip(*sizes, strict=True))


def swap(order: Sizes) -> Sizes:
    return (order[1], order[0], *order[2:])


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
        for name, value in zip(_OPERANDS[result], (a, b), strict=True)
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


def kernel(
    result: str,
    platform: str,
    a: Any,
    b: Any,
    *bias: Any,
    conv: Convolution,
    precision: Any,
    dtype: np.dtype,
    out_sharding: Any,
    relu: bool = False,
    packed: MemoryFormat | None = None,
) -> Kernel | None:
    if platform != "cpu" or a.dtype != b.dtype or a.dtype.name not in _CPU_DTYPES:
        return None
    if dtype.name not in (*_CPU_DTYPES, "int32") or not 1 <= len(conv.stride) <= 3:
        return None
    given = [*_OPERANDS[result], result]
    shapes = conv.shapes(result, a.shape, b.shape)

    def call(memory: dict[str, Sizes], w_format: str = "") -> tuple[Kernel, Any]:
        sizes = {
            "stride": conv.stride,
            "dilation": conv.dilation,
            "pad_low": conv.pad_low,
            "pad_high": conv.pad_high,
        }
        for i in given:
            sizes[f"{i}_shape"] = tuple(shapes[i][axis] for axis in memory[i])
            sizes[f"{i}_order"] = each(memory[i].index, conv.order(i))
        attributes = {
            "pass_": _NAMES[result],
            "type": a.dtype.name,
            "result": dtype.name,
            "groups": conv.groups,
            "bias": bool(bias),
            "relu": relu,
            "x_block": conv.x_block,
            "y_block": conv.y_block,
            "w_format": w_format,
            "winograd": _compat.is_default_precision(precision),
            "method": "",
        } | {name: np.array(value, np.int64) for name, value in sizes.items()}
        plan = _backends.conv_plan(platform, attributes)
        kernel = Kernel(
            attributes,
            target="jax_layout_conv",
            workspace=plan["workspace"],
            work=_work(result, a.dtype, conv, shapes),
            methods=plan["methods"],
            operand_layouts=[memory[i] for i in given[:2]] + [(0,)] * len(bias),
            result_layouts=[memory[result]],
        )
        return kernel, plan

    memory = {name: conv.memory(name) for name in given}
    found, plan = call(memory)
    if not plan["supported"]:
        return None
    if packed is not None:
        if weights_format(plan["w_format"], len(conv.stride)) == packed:
            found, _ = call(memory, plan["w_format"])
            x_layout, _, *rest = found.operand_layouts or ()
            layouts = [x_layout, range(len(packed.order)), *rest]
            return dataclasses.replace(found, operand_layouts=layouts)
        # Packed for another machine, or for other arrays than these.
        unpack = packed.unpack
        return dataclasses.replace(
            found, prepare=lambda x, w, *bias: (x, unpack(w), *bias)
        )
    plain = {name: tuple(range(len(memory[name]))) for name in given}
    if conv.groups > 1 and plain != memory:
        row_major, plan = call(plain)
        if plan["implementation"].endswith(("depthwise", "grouped")):
            # These kernels read both orders, and XLA's copies take longer than they.
            return dataclasses.replace(
                found, in_order=lambda order: None if order else row_major
            )
    return found


def _work(
    result: str, dtype: np.dtype, conv: Convolution, shapes: dict[str, Sizes]
) -> Work | None:
    """In the tables of choices: points, channels in and out, taps; None if not asked.

    XLA lays convolutions out in the entry computation alone. What is neither NHWC nor
    in one group, and gradients of weights, take loops of its own where they stand in
    a loop, hundreds of times slower, so these are always ours.
    """
    last = tuple(range(1, len(conv.stride) + 1))
    nhwc = (0, len(conv.stride) + 1, *last)
    if result == "w" or conv.groups > 1 or {conv.x_order, conv.y_order} != {nhwc}:
        return None
    n, o = (shapes["y"][axis] for axis in conv.y_order[:2])
    points = n * math.prod(conv.y_size)
    sizes = points, shapes["x"][conv.x_order[1]], o, math.prod(conv.w_size)
    strided = " strided" if math.prod(conv.stride) > 1 else ""
    return Work(f"conv {result} {dtype.name}{strided}", sizes) if all(sizes) else None


def weights_format(name: str, rank: int) -> MemoryFormat | None:
    """The format that a plan of `conv_plan` calls by this name, if it has one."""
    if not name:
        return None
    return MemoryFormat.named(name.translate({ord(i): None for i in "DHW"[: 3 - rank]}))


def _transpose(
    result: str, ct: Any, a: Any, b: Any, *, dtype: np.dtype, **params: Any
) -> list[Any]:
    names = _OPERANDS[result]
    values = dict(zip(names, (a, b), strict=True)) | {result: ct}

    def cotangent(name: str) -> Any:
        of = values[name]
        if not ad.is_undefined_primal(of):
            return None
        given = [values[operand] for operand in _OPERANDS[name]]
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
    values = dict(zip(_OPERANDS[result], zip(operands, dims, strict=True), strict=True))
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
    operands = [_axes(conv, name) for name in _OPERANDS[result]]
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
