# SPDX-License-Identifier: Apache-2.0
"""What the operands of a custom call come from, in the program being lowered.

XLA writes out a transpose before a custom call, even one of an argument that lies in
memory as the call wants it; and it copies what lies otherwise than a call declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

ir = mlir.ir

# Operations whose result lies as their operands do.
_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs add and clamp compare convert cosine divide exponential logistic maximum "
        "minimum multiply negate not or power rsqrt select sign sine sqrt subtract tanh"
    ).split()
)
_ANYWHERE = frozenset(
    f"stablehlo.{name}" for name in ("constant", "iota", "broadcast_in_dim")
)
_SMALL = _ELEMENTWISE | _ANYWHERE | {"stablehlo.reshape"}
_OF_SOFTMAX = frozenset(("stablehlo.exponential", "stablehlo.reduce"))
_MOST_VISITED = 64  # operations
# Operations whose results are written before anything else reads them.
_WRITTEN = frozenset(
    "stablehlo.while stablehlo.case stablehlo.gather stablehlo.scatter "
    "stablehlo.sort stablehlo.reduce_window stablehlo.fft".split()
)


def through_transposes(value: Any, layout: Sequence[int]) -> tuple[Any, list[int]]:
    """What a value is a transpose of, and the layout that makes it the same memory.

    Args:
      value: operand.
      layout: its axes in the order of memory, the slowest to change first.
    """
    layout = list(layout)
    while (operation := maker(value)) and operation.name == "stablehlo.transpose":
        permutation = [int(axis) for axis in operation.attributes["permutation"]]
        layout = [permutation[axis] for axis in layout]
        value = operation.operands[0]
    return value, layout


def maker(value: Any) -> Any:
    """The operation whose result a value is; None of an argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else getattr(owner, "operation", owner)


def permuted(value: Any) -> list[int] | None:
    """The axes of what a value is a transpose of, by XLA or a kernel.

    None if it is not, or of one that moves nothing, which may stand for its operand.
    """
    operation = maker(value)
    if operation is None:
        return None
    if operation.name == "stablehlo.transpose":
        axes = [int(axis) for axis in operation.attributes["permutation"]]
        return None if axes == sorted(axes) else axes
    if calls(operation, "jax_layout_permute"):
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        order = ir.DenseIntElementsAttr(config["axes"])
        return [int(order[i]) for i in range(len(order))]
    return None


def called(call: Any, table: Any) -> Any:
    """The function that a `func.call` calls, None if the table does not have it."""
    name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    return table[name].operation if name in table else None


def calls(operation: Any, target: str) -> bool:
    """Whether an operation is a custom call of this target."""
    if operation.name != "stablehlo.custom_call":
        return False
    return ir.StringAttr(operation.attributes["call_target_name"]).value == target


def for_xla(value: Any) -> Any:
    """A value as XLA has it best, which reads through transposes of its own."""
    operation = maker(value)
    if operation is None or not calls(operation, "jax_layout_permute"):
        return value
    axes = permuted(value) or ()
    return stablehlo.transpose(operation.operands[0], ir.DenseI64ArrayAttr.get(axes))


def widened_from(value: Any) -> Any:
    """What a float32 value is, widened from 16 bits; None if it is not."""
    operation = maker(value)
    if operation is None or operation.name != "stablehlo.convert":
        return None
    names = [str(ir.RankedTensorType(v.type).element_type)
             for v in (operation.operands[0], value)]  # fmt: skip
    return operation.operands[0] if names in (["bf16", "f32"], ["f16", "f32"]) else None


def is_zeros(value: Any) -> bool:
    """Whether a value is the number 0, repeated."""
    operation = maker(value)
    if operation is None or operation.name != "stablehlo.broadcast_in_dim":
        return False
    return _is_zero(operation.operands[0])


def padded(value: Any) -> tuple[Any, list[int], list[int], list[int]] | None:
    """What a value is, padded with zeros between its elements; None if it is not.

    Returns:
      that, and for each axis the zeros in front, behind and between.
    """
    operation = maker(value)
    if operation is None or operation.name != "stablehlo.pad":
        return None
    low, high, between = (
        [int(n) for n in operation.attributes[name]]
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    found = any(between) and _is_zero(operation.operands[1])
    return (operation.operands[0], low, high, between) if found else None


def _is_zero(value: Any) -> bool:
    operation = maker(value)
    if operation is None or operation.name != "stablehlo.constant":
        return False
    if "complex" in str(value.type):  # whose constants Python cannot read
        return False
    constant = operation.attributes["value"]
    # Only of one number, repeated, is the text short.
    if not getattr(constant, "is_splat", False):
        return False
    return str(constant).startswith(("dense<0.000000e+00>", "dense<0>"))


def is_fused(value: Any) -> bool:
    """Whether XLA may compute a value in one loop with the transpose that reads it.

    Or lay it out as the transpose wants it, so that nothing moves.
    """
    while (operation := maker(value)) and operation.name == "stablehlo.reshape":
        value = operation.operands[0]
    if operation is None:
        return not _is_written_argument(value)
    if operation.name == "stablehlo.custom_call":
        return _order_of_result(operation, operation.results[0]) != ()
    return operation.name not in _WRITTEN


def is_computed(value: Any) -> bool:
    """Whether a value is elementwise, or a concatenation: what XLA need not write."""
    operation = maker(value)
    return operation is not None and (
        operation.name in _ELEMENTWISE or operation.name == "stablehlo.concatenate"
    )


def through_softmax(values: Sequence[Any], called: Callable[[Any], Any]) -> list[Any]:
    """What a softmax was made of, before these values: results of products, say.

    Args:
      values: operands of a product.
      called: `called(call)`: the names of operations in what a `func.call` calls.

    Returns:
      results, neither of elementwise operations nor of calls, that kept their size on
      their way, on which were an exponential and something that is summed up over an
      axis, or the largest there: an exponential alone is a sigmoid's.
    """
    pending = [(value, frozenset[str]()) for value in values]
    visited: set[tuple[Any, frozenset[str]]] = set()
    found = []
    while pending and len(visited) < 2 * _MOST_VISITED:
        value, behind = pending.pop()
        operation = maker(value)
        if operation is None or (value, behind) in visited:
            continue
        visited.add((value, behind))
        name = operation.name
        if name in _ELEMENTWISE or name in ("func.call", "stablehlo.reshape"):
            names = {name} if name != "func.call" else set(called(operation))
            if any(map(_is_reduced, operation.operands)):
                names.add("stablehlo.reduce")
            behind |= names & _OF_SOFTMAX
            size = _size(value)
            pending += [(v, behind) for v in operation.operands if _size(v) == size]
        elif behind == _OF_SOFTMAX:
            found.append(value)
    return found


def _is_reduced(value: Any) -> bool:
    """Whether a value is a sum or a maximum, repeated along the axis it is of."""
    operation = maker(value)
    if operation is None or operation.name not in _ANYWHERE:
        return False
    pending, visited = [value], 0
    while pending and visited < _MOST_VISITED:
        operation = maker(pending.pop())
        visited += 1
        if operation is not None and operation.name == "stablehlo.reduce":
            return True
        if operation is not None and operation.name in _SMALL:
            pending += operation.operands
    return False


def _size(value: Any) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)


def order_of(values: Sequence[Any]) -> tuple[int, ...] | None:
    """The order in which XLA has these values in memory if nothing else asks for one.

    It follows arguments of the program and results of custom calls through what is
    elementwise.

    Returns:
      the axes, the slowest to change first, () if row-major; None where that is not
      known, or not the same of all.
    """
    pending, visited = list(values), set()
    found: set[tuple[int, ...] | None] = set()
    while pending:
        value = pending.pop()
        if isinstance(value.owner, ir.Block):
            found.add(() if is_row_major_argument(value) else None)
            continue
        operation = value.owner.operation
        if operation in visited:
            continue
        visited.add(operation)
        same = operation.name == "stablehlo.transpose" and permuted(value) is None
        if same or operation.name in _ELEMENTWISE:
            pending.extend(operation.operands)
        elif operation.name == "stablehlo.custom_call":
            found.add(_order_of_result(operation, value))
        elif operation.name not in _ANYWHERE:
            return None
        if len(visited) > _MOST_VISITED:
            return None
    if len(found) > 1:
        return None
    return found.pop() if found else ()


def _is_written_argument(argument: Any) -> bool:
    """Whether it is one of the program's or of a loop, and of no call."""
    region = argument.owner.owner.operation
    return region.name == "stablehlo.while" or _is_public(region)


def _is_public(function: Any) -> bool:
    if function.name != "func.func" or "sym_visibility" not in function.attributes:
        return False
    return ir.StringAttr(function.attributes["sym_visibility"]).value == "public"


def is_row_major_argument(argument: Any) -> bool:
    """Whether it is one of the program's, which has it row-major."""
    if not _is_public(argument.owner.owner.operation):
        return False
    attributes = _attributes(argument)
    if "mhlo.layout_mode" not in attributes:
        return True
    return ir.StringAttr(attributes["mhlo.layout_mode"]).value == "default"


def is_donated(argument: Any) -> bool:
    """Whether an argument's memory may become a result's."""
    attributes = _attributes(argument)
    return "tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes


def _attributes(argument: Any) -> Any:
    """Those of a function's argument."""
    function = argument.owner.owner.operation
    if "arg_attrs" not in function.attributes:
        return {}
    return ir.DictAttr(function.attributes["arg_attrs"][argument.arg_number])


def _order_of_result(call: Any, value: Any) -> tuple[int, ...] | None:
    if "result_layouts" not in call.attributes:
        return None
    layouts = ir.ArrayAttr(call.attributes["result_layouts"])
    layout = ir.DenseIntElementsAttr(layouts[value.result_number])
    order = tuple(int(layout[i]) for i in reversed(range(len(layout))))
    return () if order == tuple(range(len(order))) else order
