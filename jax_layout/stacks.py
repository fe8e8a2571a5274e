# SPDX-License-Identifier: Apache-2.0
"""Blocks of an array, a layer's weights of a stack, that a kernel reads where they lie.

XLA writes a slice out before a custom call, and before its own products too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jax_layout import _compat, choices, producers

ir = mlir.ir

# Of what is smaller, XLA makes a slice in one loop with what is around.
_SLICED_BYTES = 512 << 10
# To write a slice that no cache holds, or one to new memory, as outside of loops, takes
# as long as a product of so few rows: so much of XLA's speed is then enough.
_FEW_ROWS, _GAIN_OF_FEW = 64, 0.8

_are_sliced: ContextVar[bool] = ContextVar("are_sliced", default=False)


@dataclasses.dataclass(frozen=True)
class Block:
    """One of the equal blocks of an array along its first axis.

    The `at`-th of `of` that a block of them has, whose number is known or computed.

    Attributes:
      array: a value of the program.
      number: an integer, or an int32 or int64 of the program, which may be out of
        range, where the nearest is meant.
      of: blocks.
      at: from 0.
    """

    array: Any
    number: Any
    of: int = 1
    at: int = 0

    def is_known(self) -> bool:
        """Whether it is the same one each time."""
        return isinstance(self.number, int)

    def within(self, of: int, at: int) -> Block:
        """The `at`-th of `of` blocks that it has itself."""
        return Block(self.array, self.number, of * self.of, of * self.at + at)

    def position(self, blocks: int) -> Any:
        """Its number among so many, a value of the program."""
        if self.is_known():
            return mlir.ir_constant(np.int32(self.number * self.of + self.at))
        if self.of == 1:
            return self.number
        kind = np.dtype(f"int{_width(self.number)}")
        last, of, at = (
            mlir.ir_constant(kind.type(n))
            for n in (blocks // self.of - 1, self.of, self.at)
        )
        inside = stablehlo.clamp(mlir.ir_constant(kind.type(0)), self.number, last)
        return stablehlo.add(stablehlo.multiply(inside, of), at)


def _width(integer: Any) -> int:
    return int(integer.type.element_type.width)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Which operands of a kernel may be a block, and what reading it in place is worth.

    Attributes:
      names: operands -> bool attributes. Where such an operand is one of the equal
        blocks of an array along its first axis, the kernel gets that array instead and,
        behind all operands, the number of the block: one int32 or int64, which may be
        out of range, where the nearest is meant. The attribute tells that it did.
      gain: how many times as fast as plain `lax` the tables must have a call whose
        largest operand is a block.
      gain_of_known: likewise outside of loops, of a block whose number is known.
    """

    names: Mapping[int, str]
    gain: float = choices.GAIN
    gain_of_known: float = choices.GAIN

    @classmethod
    def of_product(cls, names: Sequence[str], size: int, rows: int) -> Parts:
        """Those of a product.

        Args:
          names: the attributes of its first operands.
          size: bytes of the larger one.
          rows: of the smaller one.
        """
        places = dict(enumerate(names))
        if size < _SLICED_BYTES:
            return cls(places)
        if rows > _FEW_ROWS:
            return cls(places, 1.0, 1.0)
        is_large = size > choices.level2_bytes()
        return cls(places, _GAIN_OF_FEW if is_large else 1.0, _GAIN_OF_FEW)

    def gain_of(self, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> float:
        """What is asked of a call of these operands; 0 if nothing but its usual."""
        avals: Sequence[Any] = ctx.avals_in
        largest = max(self.names, key=lambda place: avals[place].size)
        part = part_of(operands[largest], ctx)
        if part is None:
            return 0
        if not part.is_known():
            return self.gain
        # Before a loop, XLA slices what all steps read.
        return 0 if _compat.inside() else self.gain_of_known

    def read(
        self, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
    ) -> tuple[mlir.LoweringRuleContext, tuple[Any, ...], dict[str, bool]]:
        """The operands that a kernel gets, with their context, and the attributes."""
        given, avals = list(operands), list[Any](ctx.avals_in)
        found = {}
        for place, name in self.names.items():
            part = part_of(operands[place], ctx)
            if part is None:
                continue
            shape = part.array.type.shape
            number = part.position(math.prod(shape) // avals[place].size)
            given[place] = part.array
            avals[place] = ShapedArray(shape, avals[place].dtype)
            given.append(number)
            avals.append(ShapedArray((), np.dtype(f"int{_width(number)}")))
            found[name] = True
        return ctx.replace(avals_in=avals), tuple(given), found


def part_of(value: Any, ctx: mlir.LoweringRuleContext) -> Block | None:
    """Which of the equal blocks of an array a value is, None if it is none.

    As layers have them that are stacked, of which a scan, or an index, slices one; a
    scan that is unrolled slices several, and then each of these. Only of an array that
    keeps its place and its values: an argument of the program that is not donated, or
    of the loop that stays what it is. Of what is overwritten after it was read, XLA
    would have to keep a copy of all blocks.

    Args:
      value: operand.
      ctx: where it is lowered.
    """
    if _are_sliced.get():
        return None
    operation, calls = _made_by(value, ctx.module_context.symbol_table)
    if operation is None or not _cuts_first_axis(operation):
        return None
    size = operation.results[0].type.shape[0]
    array = _argument(operation.operands[0], calls)
    if array is None:
        return None
    if operation.name == "stablehlo.slice":
        count, left = divmod(array.type.shape[0], size)
        number, rest = divmod(int(operation.attributes["start_indices"][0]), size)
        if left or rest:
            return None
        if _stays(array):
            return Block(array, number)
        outer = part_of(array, ctx)
        return outer.within(count, number) if outer is not None else None
    first = _argument(operation.operands[1], calls)
    if first is None or size != 1 or not _stays(array):
        return None
    signed = str(first.type.element_type) in ("i32", "i64")
    return Block(array, first) if signed else None


def is_large_block(value: Any, ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a value is a block, on a CPU, that takes XLA a while to slice."""
    on_cpu = _compat.lowering_platform(ctx) == "cpu"
    if not (on_cpu and isinstance(value.type, ir.RankedTensorType)):
        return False
    bits = math.prod(value.type.shape) * getattr(value.type.element_type, "width", 0)
    return bits >= 8 * _SLICED_BYTES and part_of(value, ctx) is not None


@contextlib.contextmanager
def are_sliced() -> Iterator[None]:
    """Inside, kernels get slices: what is measured in a loop over stacks of operands is
    to hold for arrays of their own too."""
    token = _are_sliced.set(True)
    try:
        yield
    finally:
        _are_sliced.reset(token)


def _made_by(value: Any, table: Any) -> tuple[Any, list[Any]]:
    """What makes the elements of a value, in this order, in this function or another.

    Returns:
      the operation, None if there is none, and the calls that lead into its function,
      the outermost first.
    """
    calls = list[Any]()
    while (operation := producers.maker(value)) is not None:
        name, function = operation.name, None
        if name == "func.call":
            function = producers.called(operation, table)
        if name == "stablehlo.reshape":
            value = operation.operands[0]
        elif name == "stablehlo.optimization_barrier":
            # As the gradient of what is not kept has it, to compute that once more.
            value = operation.operands[ir.OpResult(value).result_number]
        elif function is not None:
            calls.append(operation)
            last = list(function.regions[0].blocks[0].operations)[-1].operation
            value = last.operands[ir.OpResult(value).result_number]
        else:
            return operation, calls
        while isinstance(value.owner, ir.Block) and calls:
            value = calls.pop().operands[ir.BlockArgument(value).arg_number]
    return None, calls


def _argument(value: Any, calls: Sequence[Any]) -> Any:
    """What the outermost of these calls is given as a value of the innermost function.

    The value itself without calls; None if it is computed in a function.
    """
    for call in reversed(calls):
        if not isinstance(value.owner, ir.Block):
            return None
        value = call.operands[ir.BlockArgument(value).arg_number]
    return value


def _cuts_first_axis(operation: Any) -> bool:
    """Whether it is a slice of whole rows that lie side by side."""
    if operation.name not in ("stablehlo.slice", "stablehlo.dynamic_slice"):
        return False
    shape, sliced = (v.type.shape for v in (operation.operands[0], *operation.results))
    if not shape or min(shape) < 1 or list(shape[1:]) != list(sliced[1:]):
        return False
    if operation.name == "stablehlo.dynamic_slice":
        return True
    return all(int(step) == 1 for step in operation.attributes["strides"])


def _stays(value: Any) -> bool:
    """Whether nothing is written over an array while what reads it is running."""
    if not isinstance(value.owner, ir.Block):
        return False
    region = value.owner.owner.operation
    if region.name == "stablehlo.while":
        kinds = [str(argument.type) for argument in value.owner.arguments]
        tokens = kinds.count("!stablehlo.token")  # the first arguments
        place = ir.BlockArgument(value).arg_number - tokens
        return 0 <= place < _compat.loop_constants()
    return producers.is_row_major_argument(value) and not producers.is_donated(value)
