# SPDX-License-Identifier: Apache-2.0
"""What is measured of rows by index, and of segments."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax

import jax_layout as jl
from jax_layout.tune.case import Case, Function, Sizes, case_of
from jax_layout.tune.draw import Draw, is_drawn

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
    ((512, 512), 1, 512),
]


def _select(x: Any, i: Any, *, axis: int) -> Any:
    return jl.index_select(x, axis, i)


def _unselect(ct: Any, i: Any, *, axis: int, extent: int) -> Any:
    like = (*ct.shape[:axis], extent, *ct.shape[axis + 1 :])
    select = functools.partial(_select, i=i, axis=axis)
    return jax.linear_transpose(select, jax.ShapeDtypeStruct(like, ct.dtype))(ct)[0]


def _add(x: Any, source: Any, i: Any, *, axis: int) -> Any:
    return jl.index_add(x, axis, i, source)


def _adds(x: Any, source: Any, indices: Any, *, axis: int) -> Any:
    def add(i: Any, x: Any) -> Any:
        return jl.index_add(x, axis, indices[i], source)

    return jax.lax.fori_loop(0, len(indices), add, x)


def rows(quick: bool) -> Iterator[Case]:
    """Rows selected by index, the gradient of that, and rows added.

    Added in a loop, too, which carries what they are added to: no copy of it hides what
    the sums cost.
    """
    wanted = {"float32": 1, "bfloat16": 1, "float64": 3, "float16": 3, "uint8": 3,
              "int32": 5, "complex64": 5, "complex128": 5}  # fmt: skip
    if quick:
        wanted = {"float32": 1, "bfloat16": 2}
    for dtype, every in wanted.items():
        for shape, axis, count in _ROWS_OF[: 4 if quick else None : every]:
            for kind in _KINDS:
                if kind != "add in a loop" or dtype not in _HALF:
                    yield _picked("", kind, dtype, shape, axis, count)


_KINDS = "select", "gradient of select", "add", "add in a loop"
# Added in a loop these are ours unless a table has the like of them.
_HALF = "bfloat16", "float16"


def _picked(
    prefix: str, kind: str, dtype: str, shape: Sizes, axis: int, count: int
) -> Case:
    extent = shape[axis]
    index: Sizes = (count,)
    shapes = [(*shape[:axis], count, *shape[axis + 1 :])]
    if kind == "gradient of select":
        f: Function = functools.partial(_unselect, axis=axis, extent=extent)
    elif kind == "select":
        f, shapes = functools.partial(_select, axis=axis), [shape]
    else:
        f, shapes = functools.partial(_add, axis=axis), [shape, *shapes]
    if loop := kind == "add in a loop":
        # So many that the copy of x, before the first, is little of it.
        steps = min(max(4 * extent // count, 8), 4096)
        f, index = functools.partial(_adds, axis=axis), (steps, count)
    name = f"{prefix}{kind} axis {axis} of {extent}"
    case = case_of(name, f, dtype, *shapes, index)
    return dataclasses.replace(
        case,
        dtypes=(*case.dtypes[:-1], "int32"),
        below=(0, extent),
        whole=loop,
        unrolled=dtype in _HALF,
        shared=int(kind in ("select", "add")),
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
    ((1_000_000, 128), 1_000_000),
    ((100_000, 64), 20_000),
    ((1_000_000, 32), 100_000),
]


def segments(quick: bool) -> Iterator[Case]:
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
            yield _segment("", f, dtype, shape, extent)


def _segment(prefix: str, f: Function, dtype: str, shape: Sizes, extent: int) -> Case:
    reduce = functools.partial(f, num_segments=extent)
    kind = f"{prefix}{f.__name__} {extent}"
    case = case_of(kind, reduce, dtype, shape, shape[:1])
    return dataclasses.replace(case, dtypes=(dtype, "int32"), below=(0, extent))


_DRAWN = 600


def drawn(quick: bool, seed: int = 0, count: int = _DRAWN) -> Iterator[Case]:
    """Rows selected, the gradient of that, rows added, or those of segments."""
    if not quick:
        for _, case in itertools.islice(_drawn(Draw(seed)), count):
            yield case


def drawn_in_loops(quick: bool, seed: int = 0, count: int = _DRAWN) -> Iterator[Case]:
    """What is short of those that are added in 16 bits, in a loop."""
    if not quick:
        for kind, case in itertools.islice(_drawn(Draw(seed)), count):
            if kind != "select" and case.unrolled and case.is_short():
                name = f"{case.name}, looped"
                yield dataclasses.replace(case, name=name, unrolled=False)


def _drawn(draw: Draw) -> Iterator[tuple[str | Function, Case]]:
    """Each with what it does: one of `_KINDS`, or what segments are reduced by."""
    while True:
        kind = draw.of(*_KINDS[:3], jl.segment_sum, jl.segment_max)
        dtype = draw.of(*3 * ["float32"], *2 * ["bfloat16"], "float16", "float64")
        slices, row = draw.of((), (), (draw.below(64),)), (draw.below(4096),)
        row = draw.of((), *4 * [row])
        extent, picked = draw.below(1 << 20), draw.below(1 << 17)
        if segmented := not isinstance(kind, str):
            slices = ()
        x, rows = (*slices, extent, *row), (*slices, picked, *row)
        if not is_drawn(dtype, math.prod(rows), x, rows):
            continue
        if segmented:
            yield kind, _segment("drawn ", kind, dtype, rows, extent)
        else:
            yield kind, _picked("drawn ", kind, dtype, x, len(slices), picked)
