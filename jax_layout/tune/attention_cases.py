# SPDX-License-Identifier: Apache-2.0
"""What is measured of attention, in one call or written out, and of caches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jax_layout as jl
from jax_layout.plain import nn
from jax_layout.tune.case import Case, Sizes, case_of, with_gradient
from jax_layout.tune.draw import Draw, is_drawn

# --- as einsum, softmax, einsum

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
_ORDERS = ["bhsd bhtd bhst", "bshd bthd bhst"]


def _attend(q: Any, k: Any, v: Any, *, orders: str) -> Any:
    of_q, of_k, of_p = orders.split()
    p = nn.softmax(jl.einsum(f"{of_q},{of_k}->{of_p}", q, k) * q.shape[-1] ** -0.5)
    return jl.einsum(f"{of_p},{of_k}->{of_q}", p, v)


def written_out(quick: bool) -> Iterator[Case]:
    """einsum, softmax, einsum: XLA makes one fusion of them."""
    for dtype, orders, sizes in itertools.product(
        ("float32", "bfloat16"), _ORDERS, _ATTENTION[: 2 if quick else None]
    ):
        extents = dict(zip("bhstd", sizes, strict=True))
        q, k, _ = (tuple(extents[i] for i in order) for order in orders.split())
        f = functools.partial(_attend, orders=orders)
        yield case_of(f"attention {orders}", f, dtype, q, k, k, together=True)


# --- in one call

# Batch, queries, keys, heads, heads of keys, features.
_HEADS_OF: list[Sizes] = [
    (1, 512, 512, 8, 8, 64),
    (8, 1, 512, 32, 8, 128),
    (1, 1, 2048, 8, 8, 64),  # so far the quick ones
    (4, 640, 640, 12, 12, 64),
    (1, 2048, 2048, 8, 8, 64),
    (1, 16, 16, 4, 4, 16),
    (8, 32, 32, 4, 4, 32),
    (1, 77, 77, 12, 12, 64),
    (8, 128, 128, 12, 12, 64),
    (8, 197, 197, 12, 12, 64),
    (1, 512, 512, 8, 8, 128),
    (2, 1024, 1024, 16, 4, 64),
    (1, 1024, 77, 8, 8, 40),
    (1, 2048, 2048, 8, 8, 128),
    (1, 4096, 4096, 4, 4, 64),
    (1, 1, 128, 8, 8, 64),
    (1, 1, 8192, 8, 8, 128),
    (1, 1, 4096, 32, 8, 128),
    (8, 1, 3000, 4, 4, 128),
    (8, 1, 3000, 32, 4, 128),
    (1, 16, 2048, 8, 8, 64),
    (1, 128, 4096, 8, 8, 64),
    (1, 1, 256, 12, 12, 64),
    (8, 1, 256, 12, 12, 64),
]


def attention(quick: bool) -> Iterator[Case]:
    """Attention in one call, and with its gradients, which are chosen for alone."""
    dtypes = ("float32", "bfloat16")
    for dtype, causal, sizes in itertools.product(
        dtypes, (False, True), _HEADS_OF[: 3 if quick else None]
    ):
        if not causal or sizes[1] > 1:
            yield from of_heads(dtype, causal, sizes)


def of_heads(
    dtype: str, causal: bool, sizes: Sizes, prefix: str = ""
) -> Iterator[Case]:
    """A call, and of more than one query another with its gradients.

    Args:
      dtype: of all operands.
      causal: whether a query sees keys up to its own alone.
      sizes: batch, queries, keys, heads, heads of keys, features.
      prefix: of the cases' names.
    """
    b, t, s, n, k, h = sizes
    f = functools.partial(jl.dot_product_attention, is_causal=causal)
    q, keys = (b, t, n, h), (b, s, k, h)
    kind = f"{prefix}dot_product_attention{', causal' if causal else ''}"
    yield case_of(kind, f, dtype, q, keys, keys)
    if t > 1:
        g = with_gradient(f, 3)
        yield case_of(f"{kind}, gradient", g, dtype, q, keys, keys, q, together=True)


_DRAWN = 200


def drawn(quick: bool, seed: int = 0, count: int = _DRAWN) -> Iterator[Case]:
    """A call each, or one with its gradients."""
    draw = Draw(seed)
    while count and not quick:
        dtype = draw.of("float32", "bfloat16")
        b, k = draw.of(1, 1, 2, 4, 8, 16), draw.of(1, 2, 4, 8, 12, 16, 32)
        group = draw.of(1, 1, 1, 2, 4, 8)
        h = draw.of(16, 32, 40, 64, 64, 64, 80, 96, 128)
        s = draw.extent()
        t = draw.of(1, s, s, draw.extent())
        causal, which = draw.of(True, False) and t > 1, draw.of(0, 0, 1) and t > 1
        sizes = b, t, s, k * group, k, h
        q, keys = (b, t, k * group, h), (b, s, k, h)
        if s > 1 and is_drawn(dtype, 4 * math.prod(q) * s, q, keys, keys, q):
            count -= 1
            yield list(of_heads(dtype, causal, sizes, "drawn "))[which]


# --- caches

# Batch, rows, new rows, what a row has.
_CACHES: list[tuple[int, int, int, Sizes]] = [
    (1, 2048, 1, (8, 128)),
    (8, 512, 1, (8, 128)),
    (8, 4096, 1, (4, 64)),
    (8, 1024, 16, (8, 64)),
    (1, 4096, 128, (8, 128)),
    (64, 128, 1, (4, 64)),
]
_WRITTEN = 32


def _generate(cache: Any, new: Any, position: Any) -> Any:
    """Rows written in a loop that carries the cache, as one who generates has it."""

    def step(i: Any, cache: Any) -> Any:
        return jl.update_cache(cache, new, position + i)

    return jax.lax.fori_loop(np.int32(0), np.int32(_WRITTEN), step, cache)


def caches(quick: bool) -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        for b, rows, count, row in _CACHES[: 2 if quick else None]:
            shapes = (b, rows, *row), (b, count, *row), (b,)
            case = case_of("rows of a cache", _generate, dtype, *shapes)
            below = (0, rows - count - _WRITTEN)
            dtypes = (dtype, dtype, "int32")
            yield dataclasses.replace(case, dtypes=dtypes, below=below, whole=True)
