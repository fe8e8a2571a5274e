# SPDX-License-Identifier: Apache-2.0
"""What is measured of convolutions: transposed ones too, and their gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax

import jax_layout as jl
from jax_layout.plain import jnp, lax
from jax_layout.tune.case import Case, Function, Sizes, case_of, gradient_by
from jax_layout.tune.draw import Draw, is_drawn

# Of x (n, *spatial, c): channels out, kernel, stride. What is in groups is ours
# without being asked.
_CONVOLUTIONS: list[tuple[Sizes, int, Sizes, int]] = [
    ((8, 14, 14, 256), 256, (3, 3), 1),
    ((1, 56, 56, 64), 64, (3, 3), 1),
    ((8, 56, 56, 64), 256, (1, 1), 1),  # so far the quick ones
    ((1, 14, 14, 96), 576, (1, 1), 1),
    ((1, 224, 224, 3), 32, (3, 3), 2),
    ((8, 56, 56, 128), 256, (3, 3), 2),
    ((8, 56, 56, 64), 64, (3, 3), 1),
    ((8, 28, 28, 128), 128, (3, 3), 1),
    ((8, 7, 7, 512), 512, (3, 3), 1),
    ((1, 28, 28, 128), 128, (3, 3), 1),
    ((1, 14, 14, 256), 256, (3, 3), 1),
    ((1, 7, 7, 512), 512, (3, 3), 1),
    ((1, 8, 8, 32), 32, (3, 3), 1),
    ((1, 149, 149, 32), 64, (3, 3), 1),
    ((1, 35, 35, 288), 384, (3, 3), 2),
    ((8, 224, 224, 3), 64, (7, 7), 2),
    ((8, 224, 224, 3), 384, (16, 16), 16),
    ((1, 35, 35, 48), 64, (5, 5), 1),
    ((1, 17, 17, 160), 192, (1, 7), 1),
    ((8, 14, 14, 256), 1024, (1, 1), 1),
    ((8, 14, 14, 1024), 256, (1, 1), 1),
    ((1, 17, 17, 768), 192, (1, 1), 1),
    ((1, 8, 8, 2048), 320, (1, 1), 1),
    ((1, 56, 56, 24), 144, (1, 1), 1),
    ((8, 56, 56, 256), 128, (1, 1), 2),
    ((4, 256, 256, 1), 1, (5, 5), 1),
    ((1, 256, 256, 3), 3, (3, 3), 1),
    ((8, 1024, 64), 64, (3,), 1),
    ((1, 16000, 1), 64, (10,), 5),
    ((1, 16, 32, 32, 16), 32, (3, 3, 3), 1),
    ((1, 64, 64, 128), 128, (3, 3), 1),
    ((1, 2048, 256), 256, (9,), 1),
    ((1, 7, 7, 2048), 512, (1, 1), 1),
    ((1, 5, 5, 2048), 512, (1, 1), 1),
    ((1, 7, 7, 512), 2048, (1, 1), 1),
    ((1, 14, 14, 1024), 256, (1, 1), 1),
    ((1, 28, 28, 128), 512, (1, 1), 1),
    ((1, 7, 7, 1024), 2048, (1, 1), 2),
    ((1, 32, 32, 32, 1), 32, (3, 3, 3), 1),
    ((4, 2048, 256), 256, (9,), 1),
    ((8, 56, 56, 24), 144, (1, 1), 1),
    ((8, 56, 56, 144), 24, (1, 1), 1),
    ((8, 28, 28, 32), 192, (1, 1), 1),
    ((8, 28, 28, 192), 32, (1, 1), 1),
    ((1, 56, 56, 64), 256, (1, 1), 1),
    ((1, 56, 56, 256), 64, (1, 1), 1),
    ((1, 16, 16, 16, 32), 64, (3, 3, 3), 1),
    ((1, 8, 8, 8, 64), 64, (3, 3, 3), 1),
    ((1, 32, 32, 64), 64, (3, 3), 2),
    ((1, 128, 128, 32), 3, (3, 3), 1),
    ((1, 32, 32, 192), 64, (1, 1), 1),
    ((32, 20, 20, 32), 64, (4, 4), 2),
]
_OPERANDS = "values", "filters"
# Of the operands and of the result, channels last or not, every which of them.
_TYPES = [
    ("float32", None, True, 1),
    ("bfloat16", None, True, 1),
    ("float16", None, True, 2),
    ("int8", "int32", True, 4),
    ("float32", None, False, 1),
    ("bfloat16", None, False, 2),
    ("float16", None, False, 4),
]


def convolutions(quick: bool) -> Iterator[Case]:
    for dtype, result, last, every in _TYPES[: 2 if quick else None]:
        for size, out, kernel, stride in _CONVOLUTIONS[: 3 if quick else None : every]:
            x, w, orders = _stored(size, out, kernel, last)
            f, kind = _strided(stride, kernel, orders, preferred_element_type=result)
            yield from _passes(kind, f, dtype, x, w)


# As decoders and generators have them, of stride 2: x (n, h, w, c), channels out,
# kernel. JAX's own gradient by filters has an image for its window.
_TRANSPOSED: list[tuple[Sizes, int, Sizes]] = [
    ((4, 16, 16, 64), 64, (4, 4)),
    ((4, 32, 32, 64), 3, (4, 4)),
    ((8, 8, 8, 256), 128, (4, 4)),
    ((8, 16, 16, 128), 64, (3, 3)),
    ((2, 32, 32, 64), 32, (2, 2)),
    ((1, 16, 16, 256), 128, (2, 2)),
    ((1, 64, 64, 64), 32, (3, 3)),
    ((1, 4, 4, 512), 256, (4, 4)),
]


def transposed(quick: bool) -> Iterator[Case]:
    for dtype, result, last, every in () if quick else _TYPES:
        if result is not None:
            continue
        for size, out, kernel in _TRANSPOSED[::every]:
            x, w, orders = _stored(size, out, kernel, last)
            f, kind = _dilated(jl.conv_general_dilated, kernel, orders)
            yield from _passes(kind, f, dtype, x, w)
            theirs, _ = _dilated(lax.conv_general_dilated, kernel, orders)
            name = f"{kind} gradient by filters of jax's"
            operators = ("conv_general_dilated",)
            yield _gradient(name, theirs, 1, dtype, x, w, operators=operators)


# As maps of one or three channels are made or read: x (n, h, w, c), channels out.
_FEW_CHANNELS: list[tuple[Sizes, int]] = [
    ((4, 128, 128, 3), 1),
    ((8, 56, 56, 64), 1),
    ((1, 64, 64, 3), 32),
]


def few_channels(quick: bool) -> Iterator[Case]:
    """One tap each, which a product of few columns computes, also in a loop."""
    if not quick:
        yield from _few_channels("few channels")
        yield from _in_loops(_few_channels("few channels, looped"))


def _few_channels(kind: str) -> Iterator[Case]:
    for dtype, result, last, _ in _TYPES:
        for size, out in _FEW_CHANNELS if result is None else ():
            x, w, orders = _stored(size, out, (1, 1), last)
            f, name = _strided(1, (1, 1), orders)
            yield from _passes(f"{kind}: {name}", f, dtype, x, w)


_CHANNELS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320,
             384, 512, 640, 768, 1024)  # fmt: skip
_SPACE = (4, 5, 7, 8, 10, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 112, 128, 160,
          224, 256, 400, 512, 1000, 1024, 2048, 4096, 8192)  # fmt: skip
_MOST = {1: 8192, 2: 224, 3: 40}  # of the extents in space, by how many there are
_DRAWN, _DRAWN_IN_LOOPS, _MORE_IN_LOOPS = 1000, 800, 150
_OWN_SEED = 2  # what is tried on the tables has 1


def drawn(quick: bool, seed: int = 0, count: int = _DRAWN) -> Iterator[Case]:
    """One pass each, in one to three axes."""
    if not quick:
        yield from itertools.islice(_drawn(Draw(seed), "drawn"), count)


def drawn_in_loops(
    quick: bool, seed: int = 0, count: int = _DRAWN_IN_LOOPS
) -> Iterator[Case]:
    """Short ones in a loop, where XLA lays none out. What is long is ours there."""
    if not quick:
        yield from _in_loops(_drawn(Draw(seed), "drawn, looped"), count)


def one_tap_in_loops(quick: bool) -> Iterator[Case]:
    """More of those that a product computes, of which few are drawn."""
    if not quick:
        cases = _drawn(Draw(_OWN_SEED), "drawn, looped, one tap:", (1,), (1,))
        yield from _in_loops(cases, _MORE_IN_LOOPS)


def strided_in_loops(quick: bool) -> Iterator[Case]:
    """More of those that leave points out, or zeros in, of which few are drawn."""
    if not quick:
        cases = _drawn(Draw(_OWN_SEED), "drawn, looped, strided:", strides=(2,))
        yield from _in_loops(cases, _MORE_IN_LOOPS)


def _in_loops(cases: Iterator[Case], count: int | None = None) -> Iterator[Case]:
    for case in itertools.islice((c for c in cases if c.is_short()), count):
        yield dataclasses.replace(case, unrolled=False)


def _drawn(
    draw: Draw,
    kind: str,
    taps: Sizes = (1, 3, 3, 3, 5, 7, 2, 4),
    strides: Sizes = (1, 1, 1, 2),
) -> Iterator[Case]:
    while True:
        rank = draw.of(1, 1, 2, 2, 2, 2, 2, 3, 3)
        dtype = draw.of("float32", "float32", "bfloat16", "bfloat16", "float16")
        last, stride = draw.of(True, True, False), draw.of(*strides)
        n, c, out = draw.of(1, 1, 2, 4, 8, 16, 32), *(draw.of(*_CHANNELS) for _ in "io")
        kernel = (draw.of(*taps),) * rank
        extents = (draw.of(*(s for s in _SPACE if s <= _MOST[rank])),) * rank
        dilates, which = draw.of(True, False, False), draw.of("y", "y", "x", "w")
        dilates &= stride == 2
        x, w, orders = _stored((n, *extents, c), out, kernel, last)
        ends = [s * stride if dilates else -(-s // stride) for s in extents]
        y = (n, *ends, out)
        points = n * max(math.prod(extents), math.prod(ends)) // stride**rank
        operations = 2 * points * math.prod(w)
        if extents[0] < kernel[0] or not is_drawn(dtype, operations, x, w, y):
            continue
        if dilates:
            f, name = _dilated(jl.conv_general_dilated, kernel, orders)
        else:
            f, name = _strided(stride, kernel, orders)
        if which == "y":
            yield _case(f"{kind} {name}", f, dtype, x, w)
        else:
            operand = "xw".index(which)
            by = f"{kind} {name} gradient by {_OPERANDS[operand]}"
            yield _gradient(by, f, operand, dtype, x, w)


def _strided(
    stride: int, kernel: Sizes, orders: tuple[str, str, str], **options: Any
) -> tuple[Function, str]:
    """A convolution, and what it is called."""
    f = functools.partial(
        jl.conv_general_dilated,
        window_strides=(stride,) * len(kernel),
        padding="SAME",
        dimension_numbers=orders,
        **options,
    )
    return f, f"convolution {orders[0]}, stride {stride},"


def _dilated(
    convolution: Function, kernel: Sizes, orders: tuple[str, str, str]
) -> tuple[Function, str]:
    """What `jax.lax.conv_transpose` makes of stride 2 and "SAME", and its name."""
    f = functools.partial(
        convolution,
        window_strides=(1,) * len(kernel),
        padding=[(k - k // 2, k // 2) for k in kernel],
        lhs_dilation=(2,) * len(kernel),
        dimension_numbers=orders,
    )
    return f, f"transposed convolution {orders[0]},"


def _stored(
    size: Sizes, out: int, kernel: Sizes, last: bool
) -> tuple[Sizes, Sizes, tuple[str, str, str]]:
    """Shapes of x and of the weights, channels last or not, and their orders."""
    n, *extents, c = size
    space = "DHW"[-len(kernel) :]
    if last:
        orders = f"N{space}C", f"{space}IO", f"N{space}C"
        return size, (*kernel, c, out), orders
    orders = f"NC{space}", f"OI{space}", f"NC{space}"
    return (n, c, *extents), (out, c, *kernel), orders


def _passes(kind: str, f: Function, dtype: str, x: Sizes, w: Sizes) -> Iterator[Case]:
    """A convolution, and of floats its gradients, alone: one saves a third at most."""
    yield _case(kind, f, dtype, x, w)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        for operand, by in enumerate(_OPERANDS):
            yield _gradient(f"{kind} gradient by {by}", f, operand, dtype, x, w)


def _gradient(
    name: str,
    f: Function,
    operand: int,
    dtype: str,
    x: Sizes,
    w: Sizes,
    **options: Any,
) -> Case:
    like = (jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w))
    y = jax.eval_shape(f, *like).shape
    return _case(name, gradient_by(f, operand, 2), dtype, x, w, y, **options)


def _case(name: str, f: Function, dtype: str, *shapes: Sizes, **options: Any) -> Case:
    return case_of(name, f, dtype, *shapes, one_call=True, unrolled=True, **options)
