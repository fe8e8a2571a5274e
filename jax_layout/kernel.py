# SPDX-License-Identifier: Apache-2.0
"""The custom call that an operator becomes, if the tables of choices have it so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.interpreters import mlir

from jax_layout import _compat, choices, producers
from jax_layout.measured import Work
from jax_layout.stacks import Parts


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The custom call that an operator becomes on one platform.

    Attributes:
      attributes: FFI attributes. Integers and floats arrive as int64 and
        float64; sequences must be NumPy arrays.
      target: FFI target; left out, `jax_layout_<name of the operator>`.
      aliases: operand -> result that is written over it.
      instead: a function of the operands that is lowered in the place of a custom call
        of ours: a library's kernel that jax has a call of.
      workspace: bytes of scratch memory, which the kernel sees as one more
        result. In XLA's hands, it is safe in a captured CUDA graph.
      operand_layouts: the axes of each operand in the order of memory, the slowest
        to change first. Left out, operands are row-major. XLA sees to it.
      result_layouts: the same of the results.
      prepare: `prepare(*operands)`: the custom call's operands, a sequence made of
        the operator's in `jax.lax`. Left out, they are the same.
      in_order: `in_order(order)`: the custom call where the operands come to lie in
        this order, the axes as in `operand_layouts`, () if row-major; or None.
      ordered_by: which operands are asked for theirs. Left out, all.
      work: what the call is in the tables of choices, which then say whether plain
        `lax` serves better. Left out, it does not.
      ours_in_loops: whether XLA is many times slower in loops and branches than the
        tables say: there they have cases of their own, and what these do not know is
        ours.
      gain: how many times as fast as plain `lax` the tables must have it.
      methods: those that can run it, what is tried first in front; the one that is
        chosen is the attribute "method". Left out, there is but one.
      parts: the operands that it reads where they lie if they are blocks of an array.
        Not together with `operand_layouts`.
    """

    attributes: Mapping[str, Any]
    target: str | None = None
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)
    instead: Callable[..., Any] | None = None
    workspace: int = 0
    operand_layouts: Sequence[Sequence[int]] | None = None
    result_layouts: Sequence[Sequence[int]] | None = None
    prepare: Callable[..., Sequence[Any]] | None = None
    in_order: Callable[[tuple[int, ...]], Kernel | None] | None = None
    ordered_by: Sequence[int] | None = None
    work: Work | None = None
    ours_in_loops: bool = False
    gain: float = choices.GAIN
    methods: Sequence[str] = choices.OURS
    parts: Parts | None = None


def placed(
    kernel: Kernel, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Kernel:
    """The kernel for the order that operands come in, or for a block of an array."""
    if kernel.parts is not None:
        gain = kernel.parts.gain_of(ctx, operands) or kernel.gain
        return dataclasses.replace(kernel, gain=gain)
    if kernel.in_order is None or not _compat.is_whole_program(ctx):
        return kernel
    asked = range(len(operands)) if kernel.ordered_by is None else kernel.ordered_by
    order = producers.order_of([operands[i] for i in asked])
    return (None if order is None else kernel.in_order(order)) or kernel


def by_choice(kernel: Kernel, passes: int = 1) -> Kernel | None:
    """The kernel with the method that the tables choose; None for plain `lax`."""
    if kernel.work is None:
        return kernel
    work = kernel.work
    if kernel.ours_in_loops and _compat.inside():
        work, passes = work.in_a_loop(), 0
    method = choices.choose(work, kernel.methods, passes, kernel.gain)
    if method is None or kernel.methods == choices.OURS:
        return kernel if method else None
    return dataclasses.replace(
        kernel, attributes={**kernel.attributes, "method": method}
    )
