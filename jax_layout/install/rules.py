# SPDX-License-Identifier: Apache-2.0
"""What lowers convolutions, and rows that are gathered and added to.

A rule gets what jax's own gets, and returns its results, or None to leave it to jax's.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jax.lax import GatherScatterMode

from jax_layout import _compat, choices, op, producers
from jax_layout.convnet.general_dilated import recognise, turned
from jax_layout.index import fill_value as fill_value_of
from jax_layout.install.record import Lowered, Record, logger
from jax_layout.kernel import Kernel
from jax_layout.optimize.convolution import convolution_cost

Context = Any  # mlir.LoweringRuleContext, whose avals are arrays' here
Rule = Callable[..., Sequence[Any] | None]


@dataclasses.dataclass
class Program:
    """A module that is being lowered.

    Attributes:
      record: of what becomes of its operations.
      verbose: whether each is logged.
      products: by the operation that stands for it, each product of ours.
      with_products_of_xla: bodies of loops whose products of few rows are XLA's.
      with_large_products: those in which each is ours or XLA's on its own.
    """

    record: Record
    verbose: bool
    products: dict[Any, Any] = dataclasses.field(default_factory=dict)
    with_products_of_xla: list[Any] = dataclasses.field(default_factory=list)
    with_large_products: list[Any] = dataclasses.field(default_factory=list)

    def log(
        self, primitive: str, ctx: Context, runs: str, kept_bytes: int = 0
    ) -> Lowered:
        """Records an operation."""
        module = ctx.module_context.module.operation.attributes
        lowered = Lowered(
            program=mlir.ir.StringAttr(module["sym_name"]).value,
            primitive=primitive,
            arrays=_arrays(ctx),
            runs=runs,
            kept_bytes=kept_bytes,
        )
        self.add(lowered)
        return lowered

    def add(self, lowered: Lowered) -> None:
        """Records what is known of an operation."""
        self.record._add(lowered)
        if self.verbose or logger.isEnabledFor(logging.DEBUG):
            logger.log(
                logging.WARNING if self.verbose else logging.DEBUG,
                "%s: %s %s: %s",
                *(lowered.program, lowered.primitive, lowered.arrays, lowered.runs),
            )

    def instead(self, lowered: Lowered, other: Lowered) -> None:
        """Takes back an operation, in whose place there is another."""
        self.record._add(lowered, -1)
        self.record._add(other)
        if other != lowered:
            logger.debug("%s %s: %s after all", other.primitive, other.arrays,
                         other.runs)  # fmt: skip

    def left(
        self, primitive: str, plain: Callable[..., Any], ctx: Context, *operands: Any
    ) -> Any:
        """Leaves an operation to jax's own rule."""
        self.log(primitive, ctx, "XLA")
        if primitive in ("dot_general", "conv_general_dilated"):
            operands = tuple(map(producers.for_xla, operands))
        return plain(ctx, *operands)


def stays_in_cache(ctx: Context) -> bool:
    """Whether an operation of a loop finds its arrays in the second-level caches.

    The tables do not tell of it: there operands come from memory. In a loop on little,
    what XLA fuses with the operation counts for more than the operation itself.
    """
    if choices.are_all_ours():
        return False
    arrays = *ctx.avals_in, *ctx.avals_out
    size = sum(aval.size * aval.dtype.itemsize for aval in arrays)
    # What a loop goes through in each step drives out what it had before.
    step = _compat.inside().get("while", math.inf)
    return max(size, step) <= choices.level2_bytes()


def _arrays(ctx: Context) -> str:
    def text(aval: Any) -> str:
        return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"

    given = ", ".join(map(text, ctx.avals_in))
    return f"{given} -> {', '.join(map(text, ctx.avals_out))}"


def array(shape: Sequence[int], dtype: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(tuple(shape), np.dtype(dtype))


def method(kernel: Kernel) -> str:
    return str(kernel.attributes.get("method") or "ours")


# --- convolutions

_CONVOLUTIONS = {"y": "conv", "x": "conv_input_grad", "w": "conv_weight_grad"}


def convolution(
    program: Program,
    plain: Callable[..., Any],
    ctx: Context,
    lhs: Any,
    rhs: Any,
    *,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: Any,
    **params: Any,
) -> Sequence[Any] | None:
    """One of the three passes, if that is what it is."""
    (a, b), (out,) = ctx.avals_in, ctx.avals_out
    if a.dtype != b.dtype:
        return None
    known = recognise(
        a.shape,
        b.shape,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
    )
    if known is None:
        return None
    result, conv = known
    name = _CONVOLUTIONS[result]
    if result == "x":
        weight = jax.eval_shape(lambda w: turned(w, conv), b)
        turned_ctx = ctx.replace(avals_in=(a, array(weight.shape, b.dtype)))
    else:
        turned_ctx = ctx
    options = {
        "conv": conv,
        "precision": precision,
        "dtype": np.dtype(out.dtype),
        "out_sharding": None,
    }
    kernel = op.chosen_kernel(name, "cpu", turned_ctx, lhs, rhs, **options)
    if kernel is None:
        return None
    if result == "x":
        to_turn = ctx.replace(avals_in=(b,), avals_out=(turned_ctx.avals_in[1],))
        (rhs,) = mlir.lower_fun(lambda w: turned(w, conv), False)(to_turn, rhs)
    program.log(
        "conv_general_dilated",
        ctx,
        method(kernel),
        convolution_cost(dimension_numbers, a, b, out),
    )
    return op.custom_call(name, kernel, turned_ctx, lhs, rhs)


# --- rows

_MODES = GatherScatterMode
_MODES_OF_ROWS = (_MODES.FILL_OR_DROP, _MODES.CLIP, _MODES.PROMISE_IN_BOUNDS)


def gather(
    program: Program,
    plain: Callable[..., Any],
    ctx: Context,
    x: Any,
    index: Any,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    mode: Any,
    fill_value: Any,
    **params: Any,
) -> Sequence[Any] | None:
    """Whole rows along one axis."""
    (aval, indices), (out,) = ctx.avals_in, ctx.avals_out
    numbers = dimension_numbers
    if mode not in _MODES_OF_ROWS or stays_in_cache(ctx):
        return None
    axis = _axis(
        aval.shape, indices, numbers.collapsed_slice_dims, numbers.start_index_map
    )
    if axis is None or numbers.operand_batching_dims:
        return None
    whole = tuple(1 if i == axis else n for i, n in enumerate(aval.shape))
    batch = indices.ndim - 1
    windows = [i for i in range(out.ndim) if not axis <= i < axis + batch]
    if tuple(slice_sizes) != whole or list(numbers.offset_dims) != windows:
        return None
    count = math.prod(indices.shape)
    rows = _rows(aval, axis, count)
    kind = _fill_mode(aval.dtype, fill_value) if mode == _MODES.FILL_OR_DROP else "clip"
    if kind is None:
        return None
    flat = _flat(indices)
    inner = ctx.replace(avals_in=(aval, flat), avals_out=(rows,))
    options = {"axis": axis, "mode": kind, "wrap": False}
    kernel = op.chosen_kernel(
        "index_select", "cpu", inner, x, index, passes=2, **options
    )
    if kernel is None:
        return None
    (index,) = _reshape(ctx, index, indices, flat)
    program.log("gather", ctx, method(kernel))
    (found,) = op.custom_call("index_select", kernel, inner, x, index)
    return _reshape(ctx, found, rows, out)


def scatter_add(
    program: Program,
    plain: Callable[..., Any],
    ctx: Context,
    x: Any,
    index: Any,
    source: Any,
    *,
    dimension_numbers: Any,
    mode: Any,
    **params: Any,
) -> Sequence[Any] | None:
    """Whole rows along one axis, added in their order."""
    (aval, indices, updates), (out,) = ctx.avals_in, ctx.avals_out
    numbers = dimension_numbers
    axis = _axis(
        aval.shape,
        indices,
        numbers.inserted_window_dims,
        numbers.scatter_dims_to_operand_dims,
    )
    if axis is None or numbers.operand_batching_dims or mode not in _MODES_OF_ROWS:
        return None
    if stays_in_cache(ctx):
        return None
    batch = indices.ndim - 1
    windows = [i for i in range(updates.ndim) if not axis <= i < axis + batch]
    whole = (*aval.shape[:axis], *indices.shape[:-1], *aval.shape[axis + 1 :])
    if list(numbers.update_window_dims) != windows or updates.shape != whole:
        return None
    count = math.prod(indices.shape)
    rows = _rows(aval, axis, count)
    flat = _flat(indices)
    options = {
        "axis": axis,
        "extent": aval.shape[axis],
        "clip": mode == _MODES.CLIP,
        "wrap": False,
        "deterministic": False,
    }
    # Few rows are added in place, to zeros that XLA writes.
    many = 2 * updates.size >= aval.size
    added = () if many and producers.is_zeros(x) else (x,)
    avals = (flat, rows, *[aval] * len(added))
    inner = ctx.replace(avals_in=avals, avals_out=(out,))
    kernel = op.chosen_kernel(
        "index_add", "cpu", inner, index, source, *added, **options
    )
    if kernel is None:
        return None
    (index,) = _reshape(ctx, index, indices, flat)
    (source,) = _reshape(ctx, source, updates, rows)
    program.log("scatter_add", ctx, method(kernel))
    return op.custom_call("index_add", kernel, inner, index, source, *added)


def _axis(
    shape: Sequence[int], indices: Any, dropped: Sequence[int], named: Sequence[int]
) -> int | None:
    """The axis whose rows indices name, one each; None if it is not as simple."""
    if len(dropped) != 1 or tuple(dropped) != tuple(named) or indices.shape[-1] != 1:
        return None
    if indices.dtype not in (np.int32, np.int64) or 0 in (*shape, *indices.shape):
        return None
    return int(dropped[0])


def _fill_mode(dtype: np.dtype, value: Any) -> str | None:
    """The mode of `index_select` that fills with a value; None if there is none."""
    for mode in ("fill", "zero"):
        known = fill_value_of(dtype, mode)
        if value is None or np.asarray(value, dtype).tobytes() == known.tobytes():
            return mode
    return None


def _rows(x: Any, axis: int, count: int) -> Any:
    return array((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype)


def _flat(indices: Any) -> Any:
    return array((math.prod(indices.shape),), indices.dtype)


def _reshape(ctx: Context, value: Any, given: Any, wanted: Any) -> Sequence[Any]:
    if given.shape == wanted.shape:
        return [value]
    to_reshape = ctx.replace(avals_in=(given,), avals_out=(wanted,))
    return mlir.lower_fun(lambda x: x.reshape(wanted.shape), False)(to_reshape, value)
