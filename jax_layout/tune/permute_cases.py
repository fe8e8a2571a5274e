# SPDX-License-Identifier: Apache-2.0
"""What is measured of permutes, and of sums of transposed matrices."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import jax_layout as jl
from jax_layout.plain import jnp
from jax_layout.tune.case import Case, Sizes, case_of
from jax_layout.tune.draw import Draw, is_drawn

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

_F32, _F16, _BF16, _U8 = "float32", "float16", "bfloat16", "uint8"
# What machine learning moves: a name, the shape, the axes, the dtype. Large arrays, of
# which a permute that is XLA's by mistake costs most.
IN_PROGRAMS: list[tuple[str, Sizes, Sizes, str]] = [
    ("matrix 2048", (2048, 2048), (1, 0), _F32),
    ("matrix 8192x4096", (8192, 4096), (1, 0), _F32),
    ("batched matrices", (16, 1024, 1024), (0, 2, 1), _F32),
    ("batched matrices", (32, 1024, 1024), (0, 2, 1), _BF16),
    ("batched matrices", (64, 1024, 1024), (0, 2, 1), _U8),
    ("odd extents", (7, 1531, 1789), (0, 2, 1), _F32),
    ("short rows, 4", (4096, 1024, 4), (1, 0, 2), _F32),
    ("short rows, 3", (4096, 4096, 3), (1, 0, 2), _U8),
    ("rows of 128", (1024, 128, 128), (1, 0, 2), _F32),
    ("wide volume to planes", (3072, 2048, 12), (2, 0, 1), _F32),
    ("NCHW to NHWC, 64", (32, 64, 112, 112), (0, 2, 3, 1), _F32),
    ("NHWC to NCHW, 64", (32, 112, 112, 64), (0, 3, 1, 2), _F32),
    ("NCHW to NHWC, 64", (32, 64, 112, 112), (0, 2, 3, 1), _BF16),
    ("NHWC to NCHW, 64", (32, 112, 112, 64), (0, 3, 1, 2), _BF16),
    ("NCHW to NHWC, 256", (32, 256, 56, 56), (0, 2, 3, 1), _BF16),
    ("NHWC to NCHW, 256", (32, 56, 56, 256), (0, 3, 1, 2), _BF16),
    ("NCHW to NHWC, RGB", (64, 3, 224, 224), (0, 2, 3, 1), _F32),
    ("NHWC to NCHW, RGB", (64, 224, 224, 3), (0, 3, 1, 2), _F32),
    ("NCHW to NHWC, RGB", (256, 3, 224, 224), (0, 2, 3, 1), _U8),
    ("NHWC to NCHW, RGB", (256, 224, 224, 3), (0, 3, 1, 2), _U8),
    ("UNet to NHWC", (8, 320, 64, 64), (0, 2, 3, 1), _F16),
    ("UNet to NCHW", (8, 64, 64, 320), (0, 3, 1, 2), _F16),
    ("attention head split", (8, 2048, 16, 64), (0, 2, 1, 3), _BF16),
    ("attention head split", (8, 2048, 16, 128), (0, 2, 1, 3), _BF16),
    ("attention head merge", (8, 16, 2048, 64), (0, 2, 1, 3), _BF16),
    ("attention K^T", (8, 2048, 16, 64), (0, 2, 3, 1), _BF16),
    ("attention QKV split", (4, 2048, 3, 16, 64), (2, 0, 3, 1, 4), _BF16),
    ("paged KV, values", (1024, 16, 8, 128), (0, 2, 1, 3), _BF16),
    ("paged KV, keys", (1024, 16, 8, 16, 8), (0, 2, 3, 1, 4), _BF16),
    ("MoE dispatch", (16, 8, 256, 512), (1, 0, 2, 3), _BF16),
    ("MoE weights", (8, 1024, 4096), (0, 2, 1), _BF16),
    ("patchify 16", (32, 14, 16, 14, 16, 3), (0, 1, 3, 2, 4, 5), _F32),
    ("patchify 16, from NCHW", (128, 3, 14, 16, 14, 16), (0, 2, 4, 3, 5, 1), _U8),
    ("pixel shuffle 2", (8, 64, 2, 2, 128, 128), (0, 1, 4, 2, 5, 3), _F32),
    ("reversal, rank 3", (256, 256, 256), (2, 1, 0), _F32),
    ("reversal, rank 6", (16, 16, 16, 16, 16, 16), (5, 4, 3, 2, 1, 0), _F32),
    ("reversal, rank 6", (15, 16, 17, 16, 15, 16), (5, 4, 3, 2, 1, 0), _BF16),
    ("reversal, rank 8", (5, 3, 2, 4, 35, 33, 37, 40), tuple(range(7, -1, -1)), _U8),
]


def permutes(quick: bool) -> Iterator[Case]:
    """Permutes, those of large arrays into memory that exists, too.

    To page in new memory takes longer than most permutes, and hides what they cost.
    """
    wanted = {"float32": 1, "bfloat16": 1, "uint8": 3, "float64": 3, "complex128": 5}
    sizes = [1 << i for i in (14, 16, 18, 20, 22, 24, 25, 27)]
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
    for _, x, axes, dtype in [] if quick else IN_PROGRAMS:
        f = functools.partial(jl.permute, axes=axes)
        kind = f"permute {','.join(map(str, axes))} in programs"
        yield case_of(kind, f, dtype, x)
        yield case_of(f"{kind}, existing memory", f, dtype, x, into=True)


_DRAWN = 600


def drawn(quick: bool, seed: int = 0, count: int = _DRAWN) -> Iterator[Case]:
    """Two to five axes in any order, into memory that exists if there is much."""
    draw = Draw(seed)
    while count and not quick:
        rank = draw.of(2, 3, 3, 4, 4, 5)
        dtype = draw.of(*3 * ["float32"], *2 * ["bfloat16"], "uint8", "float64")
        x = tuple(draw.of(draw.extent(), draw.below(64)) for _ in range(rank))
        axes, into = draw.order(rank), draw.of(True, False)
        moved = [axis for axis in axes if x[axis] != 1]
        if moved == sorted(moved) or not is_drawn(dtype, math.prod(x), x, x):
            continue
        kind = f"drawn permute {','.join(map(str, axes))}"
        into &= math.prod(x) * jnp.dtype(dtype).itemsize >= 1 << 22
        kind += ", existing memory" * into
        f = functools.partial(jl.permute, axes=axes)
        yield case_of(kind, f, dtype, x, into=into)
        count -= 1


def matrix_sums(quick: bool) -> Iterator[Case]:
    sizes = [256, 1024, 64, 512, 2048]
    dtypes = ["float32", "bfloat16", "float64", "complex64", "complex128"]
    if quick:
        sizes, dtypes = sizes[:2], dtypes[:1]
    for dtype, n, other in itertools.product(dtypes, sizes, (False, True)):
        f = functools.partial(jl.geam, beta=2.0, transpose_a=True, transpose_b=other)
        yield case_of(f"geam T{'NT'[other]}", f, dtype, (n, n), (n, n))
