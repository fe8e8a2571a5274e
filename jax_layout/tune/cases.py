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
from jax_layout.plain import jnp, nn
from jax_layout.tune import (
    attention_cases,
    convolution_cases,
    pooling_cases,
    product_cases,
)
from jax_layout.tune.case import (
    Case,
    Function,
    Sizes,
    case_of,
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
            yield dataclasses.replace(
                case,
                dtypes=(*case.dtypes[:-1], "int32"),
                below=(0, extent),
                whole=loop,
                unrolled=dtype in ("bfloat16", "float16"),
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
    product_cases.drawn,
    product_cases.batches,
    product_cases.projections,
    product_cases.layers,
    product_cases.gelus,
    _attention,
    attention_cases.attention,
    attention_cases.caches,
    product_cases.recurrences,
    convolution_cases.convolutions,
    convolution_cases.transposed,
    convolution_cases.drawn,
    convolution_cases.drawn_in_loops,
    _permutes,
    _rows,
    _segments,
    _norms,
    _matrix_sums,
    pooling_cases.pooling,
    pooling_cases.drawn,
)


def all_cases(quick: bool = False) -> list[Case]:
    """What a table is made of; quick, the most used of it, some of each kind first."""
    families = [list(family(quick)) for family in _FAMILIES]
    found = [(i / len(f), case) for f in families for i, case in enumerate(f)]
    if quick:
        found.sort(key=lambda entry: entry[0])
    return list({case.name: case for _, case in found}.values())
