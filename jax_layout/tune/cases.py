# SPDX-License-Identifier: Apache-2.0
"""What is measured: functions of ours as one writes them, and their operands."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax

import jax_layout as jl
from jax_layout.formats.tags import store, stored
from jax_layout.plain import jnp, lax, nn
from jax_layout.tune import attention_cases, pooling_cases, product_cases
from jax_layout.tune.case import (
    Case,
    Function,
    Sizes,
    case_of,
    gradient_by,
    with_gradient,
)

# --- attention, as einsum, softmax, einsum

# Batch, heads, queries, keys, and the size of a head.
_ATTENTION: list[Sizes] = [
    (1, 12, 128, 128, 64),
    (1, 8, 512, 512, 64),
    (1, 16, 1, 2048, 128),
    (1, 8, 64, 64, 64),
    (4, 12, 640, 640, 64),
    (1, 4, 2048, 2048, 64),
    (8, 16, 512, 512, 64),
    (8, 16, 1, 1024, 64),
    (8, 12, 1, 256, 64),
]
# Of queries, keys and scores.
_HEADS = ["bhsd bhtd bhst", "bshd bthd bhst"]


def _attend(q: Any, k: Any, v: Any, *, orders: str) -> Any:
    of_q, of_k, of_p = orders.split()
    p = nn.softmax(jl.einsum(f"{of_q},{of_k}->{of_p}", q, k) * q.shape[-1] ** -0.5)
    return jl.einsum(f"{of_p},{of_k}->{of_q}", p, v)


def _attention(quick: bool) -> Iterator[Case]:
    """einsum, softmax, einsum: XLA makes one fusion of them."""
    for dtype, orders, sizes in itertools.product(
        ("float32", "bfloat16"), _HEADS, _ATTENTION[: 2 if quick else None]
    ):
        extents = dict(zip("bhstd", sizes, strict=True))
        q, k, _ = (tuple(extents[i] for i in order) for order in orders.split())
        f = functools.partial(_attend, orders=orders)
        yield case_of(f"attention {orders}", f, dtype, q, k, k, together=True)


# --- convolutions

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
]
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


def _convolutions(quick: bool) -> Iterator[Case]:
    for dtype, result, last, every in _TYPES[: 2 if quick else None]:
        for size, out, kernel, stride in _CONVOLUTIONS[: 3 if quick else None : every]:
            x, w, orders = _stored(size, out, kernel, last)
            f = functools.partial(
                jl.conv_general_dilated,
                window_strides=(stride,) * len(kernel),
                padding="SAME",
                dimension_numbers=orders,
                preferred_element_type=result,
            )
            kind = f"convolution {orders[0]}, stride {stride},"
            yield case_of(kind, f, dtype, x, w)
            if result is None:
                yield from _gradients(kind, f, dtype, x, w)


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


def _transposed(quick: bool) -> Iterator[Case]:
    for dtype, result, last, every in () if quick else _TYPES:
        if result is not None:
            continue
        for size, out, kernel in _TRANSPOSED[::every]:
            x, w, orders = _stored(size, out, kernel, last)
            options: dict[str, Any] = {  # of jax.lax.conv_transpose, with "SAME"
                "window_strides": (1, 1),
                "padding": [(k - k // 2, k // 2) for k in kernel],
                "lhs_dilation": (2, 2),
                "dimension_numbers": orders,
            }
            f = functools.partial(jl.conv_general_dilated, **options)
            kind = f"transposed convolution {orders[0]},"
            yield case_of(kind, f, dtype, x, w)
            yield from _gradients(kind, f, dtype, x, w)
            theirs = functools.partial(lax.conv_general_dilated, **options)
            name = f"{kind} gradient by filters of jax's"
            operators = ("conv_general_dilated",)
            yield _gradient(name, theirs, 1, dtype, x, w, operators=operators)


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


def _gradients(
    kind: str, f: Function, dtype: str, x: Sizes, w: Sizes
) -> Iterator[Case]:
    """Each alone: of three in a program, one saves a third at most."""
    for operand, by in enumerate(("values", "filters")):
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
    return case_of(name, gradient_by(f, operand, 2), dtype, x, w, y, **options)


# --- what moves and sums

# The first axis, here 1, grows until the array has each of the sizes.
_PERMUTES: list[tuple[Sizes, Sizes]] = [
    ((1, 64), (1, 0)),
    ((1, 1024), (1, 0)),
    ((1, 64, 64), (0, 2, 1)),
    ((1, 512, 512), (0, 2, 1)),
    ((1, 32, 64), (1, 0, 2)),
    ((1, 1024, 4), (1, 0, 2)),
    ((1, 3, 64, 64), (0, 2, 3, 1)),
    ((1, 64, 64, 3), (0, 3, 1, 2)),
    ((1, 64, 28, 28), (0, 2, 3, 1)),
    ((1, 28, 28, 64), (0, 3, 1, 2)),
    ((1, 256, 14, 14), (0, 2, 3, 1)),
    ((1, 128, 8, 64), (0, 2, 1, 3)),
    ((1, 128, 8, 64), (0, 2, 3, 1)),
    ((1, 32, 32), (2, 1, 0)),
    ((1, 14, 16, 14, 16, 3), (0, 1, 3, 2, 4, 5)),
    ((1, 2, 2, 32, 32), (0, 3, 1, 4, 2)),
    ((1, 64, 112, 112), (0, 2, 3, 1)),
    ((1, 112, 112, 64), (0, 3, 1, 2)),
    ((1, 16, 8, 16, 8), (0, 2, 3, 1, 4)),
]


def _permutes(quick: bool) -> Iterator[Case]:
    """Permutes, those of large arrays into memory that exists, too.

    To page in new memory takes longer than most permutes, and hides what they cost.
    """
    wanted = {"float32": 1, "bfloat16": 1, "uint8": 3, "float64": 3, "complex128": 5}
    sizes = [1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 25, 1 << 27]
    if quick:
        wanted, sizes = {"float32": 2, "bfloat16": 4}, [1 << 16, 1 << 20, 1 << 24]
    for dtype, every in wanted.items():
        for size, (shape, axes) in itertools.product(sizes, _PERMUTES[::every]):
            row = math.prod(shape) * jnp.dtype(dtype).itemsize
            if row <= size:
                f = functools.partial(jl.permute, axes=axes)
                x = (size // row, *shape[1:])
                kind = f"permute {','.join(map(str, axes))}"
                yield case_of(kind, f, dtype, x)
                if size >= 1 << 22 and not quick:
                    yield case_of(f"{kind}, existing memory", f, dtype, x, into=True)


# Shape, axis, number of indices.
_ROWS_OF: list[tuple[Sizes, int, int]] = [
    ((30_000, 768), 0, 512),
    ((50_000, 64), 0, 8192),
    ((512, 512), 0, 512),
    ((4096, 4096), 1, 64),  # so far the quick ones
    ((50_000, 1024), 0, 8192),
    ((256, 56, 56), 0, 128),
    ((64, 100, 512), 1, 50),
    ((1024, 1000), 1, 256),
    ((100_000, 3), 0, 100_000),
    ((1_000_000,), 0, 100_000),
    ((64, 64), 0, 16),
    ((1000, 16), 0, 100),
    ((1000, 256), 0, 32),
    ((2048, 4096), 0, 1),
]


def _select(x: Any, i: Any, *, axis: int) -> Any:
    return jl.index_select(x, axis, i)


def _unselect(ct: Any, i: Any, *, axis: int, extent: int) -> Any:
    like = (*ct.shape[:axis], extent, *ct.shape[axis + 1 :])
    select = functools.partial(_select, i=i, axis=axis)
    return jax.linear_transpose(select, jax.ShapeDtypeStruct(like, ct.dtype))(ct)


def _add(x: Any, source: Any, i: Any, *, axis: int) -> Any:
    return jl.index_add(x, axis, i, source)


def _adds(x: Any, source: Any, indices: Any, *, axis: int) -> Any:
    def add(i: Any, x: Any) -> Any:
        return jl.index_add(x, axis, indices[i], source)

    return jax.lax.fori_loop(0, len(indices), add, x)


def _rows(quick: bool) -> Iterator[Case]:
    """Rows selected by index, the gradient of that, and rows added.

    Added in a loop, too, which carries what they are added to: no copy of it hides what
    the sums cost.
    """
    wanted = {"float32": 1, "bfloat16": 1, "float64": 3, "float16": 3, "uint8": 3,
              "int32": 5, "complex64": 5, "complex128": 5}  # fmt: skip
    if quick:
        wanted = {"float32": 1, "bfloat16": 2}
    for dtype, (shape, axis, count) in (
        (dtype, row)
        for dtype, every in wanted.items()
        for row in _ROWS_OF[: 4 if quick else None : every]
    ):
        extent = shape[axis]
        selected = (*shape[:axis], count, *shape[axis + 1 :])
        unselect = functools.partial(_unselect, axis=axis, extent=extent)
        # So many that the copy of x, before the first, is little of it.
        steps = min(max(4 * extent // count, 8), 4096)
        for kind, f, shapes, index in (
            ("select", functools.partial(_select, axis=axis), [shape], (count,)),
            ("gradient of select", unselect, [selected], (count,)),
            ("add", functools.partial(_add, axis=axis), [shape, selected], (count,)),
            (
                "add in a loop",
                functools.partial(_adds, axis=axis),
                [shape, selected],
                (steps, count),
            ),
        ):
            loop = kind == "add in a loop"
            if loop and dtype in ("bfloat16", "float16"):
                continue  # ours without being asked
            case = case_of(f"{kind} axis {axis} of {extent}", f, dtype, *shapes, index)
            dtypes = (*case.dtypes[:-1], "int32")
            yield dataclasses.replace(
                case, dtypes=dtypes, below=(0, extent), whole=loop
            )


# Shape of the rows, how many segments.
_SEGMENTS: list[tuple[Sizes, int]] = [
    ((100_000, 128), 100),
    ((100_000, 128), 10_000),
    ((100_000, 16), 100),  # so far the quick ones
    ((1_000_000, 128), 1000),
    ((1_000_000, 128), 10),
    ((1_000_000, 128), 1_000_000),
    ((100_000, 16), 10_000),
    ((1000, 128), 100),
    ((10_000, 64), 10_000),
    ((1_000_000,), 1000),
    ((1_000_000,), 100_000),
    ((10_000,), 100),
    ((4096, 1024), 64),
    ((1000, 16), 10),
]


# Rows that few share, or nobody.
_SPREAD: list[tuple[Sizes, int]] = [
    ((200_000, 128), 200_000),
    ((100_000, 64), 20_000),
    ((1_000_000, 32), 100_000),
]


def _segments(quick: bool) -> Iterator[Case]:
    """Rows that many indices share, or few."""
    wanted = {"float32": 1, "bfloat16": 1, "float16": 3, "float64": 3, "int32": 5}
    if quick:
        wanted = {"float32": 2, "bfloat16": 3}
    for dtype, every in wanted.items():
        found = [(jl.segment_sum, s) for s in _SEGMENTS[: 3 if quick else None : every]]
        found += [
            (jl.segment_max, s) for s in _SEGMENTS[: 1 if quick else None : 2 * every]
        ]
        found += [(jl.segment_max, s) for s in _SPREAD[: 0 if quick else None : every]]
        for f, (shape, extent) in found:
            reduce = functools.partial(f, num_segments=extent)
            case = case_of(f"{f.__name__} {extent}", reduce, dtype, shape, shape[:1])
            yield dataclasses.replace(case, dtypes=(dtype, "int32"), below=(0, extent))


def _norms(quick: bool) -> Iterator[Case]:
    """The moments of normalizations, in them, and those of their gradients."""
    wanted = {"float32": 1, "bfloat16": 1, "float16": 3, "float64": 3}
    images = [(8, 64, 56, 56), (8, 256, 14, 14), (1, 16, 8, 8), (8, 64, 14, 14),
              (2, 512, 7, 7)]  # fmt: skip
    rows = [(128, 768), (512, 1024), (1, 768), (64, 64), (4096, 1024), (16, 768),
            (25088, 64), (2048, 256), (512, 4096), (4096, 768)]  # fmt: skip
    if quick:
        wanted, images, rows = {"float32": 1}, images[:1], rows[:2]
    orders = ("NCHW", "NHWC")
    for dtype, every in wanted.items():
        listed = list(itertools.product(images, orders, (_batch_norm, _group_norm)))
        for x, order, f in listed[::every]:
            format = jl.MemoryFormat.named(order)
            kept = functools.partial(_in_memory, f, format)
            kind, shape = f"{f.__name__[1:]} {order}", format.physical_shape(x)
            yield from _norm(kind, kept, dtype, shape, (x[1],), (x[1],))
        for x in rows[::every]:
            yield from _norm("layer_norm", _layer_norm, dtype, x, x[-1:], x[-1:])
        for x in images[:2:every]:
            yield from _norm("norm of samples", _sample_norm, dtype, x)


def _batch_norm(x: Any, w: Any, b: Any) -> Any:
    return jl.batch_norm(x, None, None, w, b, training=True)[0]


def _group_norm(x: Any, w: Any, b: Any) -> Any:
    return jl.group_norm(x, min(32, x.shape[1]), w, b)


def _layer_norm(x: Any, w: Any, b: Any) -> Any:
    return jl.layer_norm(x, x.shape[-1:], w, b)


def _sample_norm(x: Any) -> Any:
    return jl.layer_norm(x, x.shape[1:])


def _in_memory(f: Function, format: jl.MemoryFormat, x: Any, *rest: Any) -> Any:
    """The function of arrays whose axes lie as in memory."""
    return stored(f(store(x, format), *rest))[0]


def _norm(
    kind: str, f: Function, dtype: str, x: Sizes, *parameters: Sizes
) -> Iterator[Case]:
    yield case_of(kind, f, dtype, x, *parameters, hot=True)
    g = with_gradient(f, 1 + len(parameters))
    both = case_of(f"{kind}, gradient", g, dtype, x, *parameters, x, hot=True)
    yield dataclasses.replace(both, together=True)  # its sums are about those moments


def _matrix_sums(quick: bool) -> Iterator[Case]:
    sizes = [256, 1024, 64, 512, 2048]
    dtypes = ["float32", "bfloat16", "float64", "complex64", "complex128"]
    if quick:
        sizes, dtypes = sizes[:2], dtypes[:1]
    for dtype, n, other in itertools.product(dtypes, sizes, (False, True)):
        f = functools.partial(jl.geam, beta=2.0, transpose_a=True, transpose_b=other)
        yield case_of(f"geam T{'NT'[other]}", f, dtype, (n, n), (n, n))


_FAMILIES = (
    product_cases.products,
    product_cases.batches,
    product_cases.projections,
    product_cases.layers,
    product_cases.gelus,
    _attention,
    attention_cases.attention,
    attention_cases.caches,
    product_cases.recurrences,
    _convolutions,
    _transposed,
    _permutes,
    _rows,
    _segments,
    _norms,
    _matrix_sums,
    pooling_cases.pooling,
)


def all_cases(quick: bool = False) -> list[Case]:
    """What a table is made of; quick, the most used of it, some of each kind first."""
    families = [list(family(quick)) for family in _FAMILIES]
    found = [(i / len(f), case) for f in families for i, case in enumerate(f)]
    if quick:
        found.sort(key=lambda entry: entry[0])
    return list({case.name: case for _, case in found}.values())
