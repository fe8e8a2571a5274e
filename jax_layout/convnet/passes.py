# SPDX-License-Identifier: Apache-2.0
"""What the three passes of a convolution have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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
        shapes = dict(zip(OPERANDS[result], (a, b), strict=True))
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


CPU_DTYPES = ("float32", "bfloat16", "float16", "int8")  # of the operands
RESULTS = ("float32", "bfloat16", "float16", "int32")

# A pass by its result: what it is called, and what it reads.
NAMES = {"y": "forward", "x": "input_grad", "w": "weight_grad"}
OPERANDS = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}


def each(f: Any, *sizes: Sequence[Any]) -> Sizes:
    return tuple(f(*values) for values in zip(*sizes, strict=True))


def swap(order: Sizes) -> Sizes:
    return (order[1], order[0], *order[2:])
