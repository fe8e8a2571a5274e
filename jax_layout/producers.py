# SPDX-License-Identifier: Apache-2.0
"""What the operands of a custom call come from, in the program being lowered.

XLA writes out a transpose before a custom call, even one of an argument that lies in
memory as the call wants it; and it copies what lies otherwise than a call declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
_MOST_VISITED = 64  # operations


def through_transposes(value: Any, layout: Sequence[int]) -> tuple[Any, list[int]]:
    """What a value is a transpose of, and the layout that makes it the same memory.

    Args:
      value: operand.
      layout: its axes in the order of memory, the slowest to change first.
    """
    layout = list(layout)
    while (operation := _made_by(value, "stablehlo.transpose")) is not None:
        permutation = [int(axis) for axis in operation.attributes["permutation"]]
        layout = [permutation[axis] for axis in layout]
        value = operation.operands[0]
    return value, layout


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
            found.add(() if _row_major_argument(value) else None)
            continue
        operation = value.owner.operation
        if operation in visited:
            continue
        visited.add(operation)
        if operation.name in _ELEMENTWISE:
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


def _made_by(value: Any, name: str) -> Any:
    owner = getattr(value.owner, "operation", value.owner)
    return None if isinstance(owner, ir.Block) or owner.name != name else owner


def _row_major_argument(argument: Any) -> bool:
    function = argument.owner.owner.operation
    if function.name != "func.func" or "sym_visibility" not in function.attributes:
        return False
    if ir.StringAttr(function.attributes["sym_visibility"]).value != "public":
        return False
    if "arg_attrs" not in function.attributes:
        return True
    attributes = ir.DictAttr(function.attributes["arg_attrs"][argument.arg_number])
    if "mhlo.layout_mode" not in attributes:
        return True
    return ir.StringAttr(attributes["mhlo.layout_mode"]).value == "default"


def _order_of_result(call: Any, value: Any) -> tuple[int, ...] | None:
    if "result_layouts" not in call.attributes:
        return None
    layouts = ir.ArrayAttr(call.attributes["result_layouts"])
    layout = ir.DenseIntElementsAttr(layouts[value.result_number])
    order = tuple(int(layout[i]) for i in reversed(range(len(layout))))
    return () if order == tuple(range(len(order))) else order
