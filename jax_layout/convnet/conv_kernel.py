# SPDX-License-Identifier: Apache-2.0
"""The FFI calls that convolutions become (core/conv/ffi.cc, core/gemm/ffi.cc)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jax_layout import _backends, _compat
from jax_layout.convnet.passes import (
    CPU_DTYPES,
    NAMES,
    OPERANDS,
    Convolution,
    Sizes,
    each,
    swap,
)
from jax_layout.formats.memory_format import MemoryFormat
from jax_layout.kernel import Kernel, by_choice
from jax_layout.measured import Work
from jax_layout.products.gemm import gemm_kernel


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
    if platform != "cpu" or a.dtype != b.dtype or a.dtype.name not in CPU_DTYPES:
        return None
    if dtype.name not in (*CPU_DTYPES, "int32") or not 1 <= len(conv.stride) <= 3:
        return None
    given = [*OPERANDS[result], result]
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
            "pass_": NAMES[result],
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
            ours_in_loops=not _is_fast_in_loops(result, conv),
            methods=plan["methods"],
            operand_layouts=[memory[i] for i in given[:2]] + [(0,)] * len(bias),
            result_layouts=[memory[result]],
        )
        return kernel, plan

    memory = {name: conv.memory(name) for name in given}
    if packed is None:
        product = _product(result, platform, a, b, memory, conv, precision, dtype,
                           bool(bias), relu)  # fmt: skip
        if product is not None:
            return product
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


def _product(
    result: str,
    platform: str,
    a: Any,
    b: Any,
    memory: dict[str, Sizes],
    conv: Convolution,
    precision: Any,
    dtype: np.dtype,
    bias: bool,
    relu: bool,
) -> Kernel | None:
    """A convolution of one tap as a matrix product, where that is chosen."""
    ones, zeros = (1,) * len(conv.stride), (0,) * len(conv.stride)
    one_tap = conv.w_size == conv.stride == ones and conv.pad_low == zeros
    blocked = conv.x_block > 1 or conv.y_block > 1
    if not one_tap or conv.x_size != conv.y_size or conv.groups > 1 or blocked:
        return None
    o, i = (memory["w"].index(axis) for axis in conv.w_order[:2])
    terms = {"x": "pi", "y": "po", "w": "oi" if o < i else "io"}
    shapes = conv.shapes(result, a.shape, b.shape)
    sizes = {
        "p": math.prod(conv.x_size) * shapes["x"][conv.x_order[0]],
        "i": shapes["x"][conv.x_order[1]],
        "o": shapes["y"][conv.y_order[1]],
    }
    left, right = OPERANDS[result]
    found = gemm_kernel(
        platform,
        *(
            jax.ShapeDtypeStruct([sizes[axis] for axis in terms[name]], of.dtype)
            for name, of in ((left, a), (right, b))
        ),
        spec=f"{terms[left]},{terms[right]}->{terms[result]}",
        precision=precision,
        dtype=dtype,
        activation="relu" if relu else None,
        bias=bias,
    )
    if found is None or found.work is None:
        return None
    # What it is faster than is XLA's convolution, not its product.
    work = found.work.named("{} convolution")
    slow = not _is_fast_in_loops(result, conv)
    found = by_choice(dataclasses.replace(found, work=work, ours_in_loops=slow))
    if found is None:
        return None
    return dataclasses.replace(
        found,
        work=None,
        parts=None,
        operand_layouts=[memory[left], memory[right]] + [(0,)] * bias,
        result_layouts=[memory[result]],
    )


def _work(
    result: str, dtype: np.dtype, conv: Convolution, shapes: dict[str, Sizes]
) -> Work | None:
    """In the tables of choices: points, channels in and out, taps; None if not asked.

    XLA takes loops of its own for groups, hundreds of times slower, so these are always
    ours, and so are blocks of channels, which it does not know.
    """
    if conv.groups > 1 or conv.x_block > 1 or conv.y_block > 1:
        return None
    last = tuple(range(1, len(conv.stride) + 1))
    nhwc = (0, len(conv.stride) + 1, *last)
    order = "" if {conv.x_order, conv.y_order} == {nhwc} else " NCHW"
    n, o = (shapes["y"][axis] for axis in conv.y_order[:2])
    points = n * math.prod(conv.y_size)
    sizes = points, shapes["x"][conv.x_order[1]], o, math.prod(conv.w_size)
    case = f"conv {result} {dtype.name}{order}"
    like: tuple[str, ...] = ()
    if math.prod(conv.stride) > 1:
        case = f"{case} strided"
    elif sizes[-1] == 1:  # to XLA a product, in loops too
        case, like = f"{case} one tap", (case,)
    return Work(case, sizes, like) if all(sizes) else None


def _is_fast_in_loops(result: str, conv: Convolution) -> bool:
    """Whether a loop of XLA's has this pass as fast as the entry computation.

    It lays convolutions out there alone. In a loop, gradients of weights, and what is
    not NHWC and HWIO, are loops of its own, hundreds of times slower. An input gradient
    is to it a convolution with weights whose channels have changed places, no matter
    whether it is called so, or as a convolution.
    """
    rank = len(conv.stride)
    nhwc = (0, rank + 1, *range(1, rank + 1))
    order = swap(conv.w_order) if result == "x" else conv.w_order
    hwio = order == (rank + 1, rank, *range(rank))
    return result != "w" and {conv.x_order, conv.y_order} == {nhwc} and hwio


def weights_format(name: str, rank: int) -> MemoryFormat | None:
    """The format that a plan of `conv_plan` calls by this name, if it has one."""
    if not name:
        return None
    return MemoryFormat.named(name.translate({ord(i): None for i in "DHW"[: 3 - rank]}))
