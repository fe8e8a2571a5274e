# SPDX-License-Identifier: Apache-2.0
"""The calls that a table of choices has of a GPU: large enough to fill one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax

import jax_layout as jl
from jax_layout.tune.attention_cases import of_heads
from jax_layout.tune.case import Case, Sizes, case_of, with_gradient

# Shape, axes.
_PERMUTES: list[tuple[Sizes, Sizes]] = [
    ((2048, 2048), (1, 0)),
    ((8192, 4096), (1, 0)),
    ((512, 512), (1, 0)),
    ((257, 259, 1153), (0, 2, 1)),
    ((1024, 4096, 4), (1, 0, 2)),
    ((4096, 4096, 3), (2, 0, 1)),
    ((1024, 128, 128), (1, 0, 2)),
    ((64, 48, 4096), (0, 2, 1)),
    ((32, 64, 112, 112), (0, 2, 3, 1)),
    ((32, 112, 112, 64), (0, 3, 1, 2)),
    ((32, 256, 14, 14), (0, 2, 3, 1)),
    ((64, 3, 224, 224), (0, 2, 3, 1)),
    ((64, 224, 224, 3), (0, 3, 1, 2)),
    ((8, 2048, 16, 64), (0, 2, 1, 3)),
    ((8, 16, 2048, 64), (0, 2, 1, 3)),
    ((8, 2048, 16, 64), (0, 2, 3, 1)),
    ((1, 512, 12, 64), (0, 2, 1, 3)),
    ((4, 2048, 3, 16, 64), (2, 0, 3, 1, 4)),
    ((64, 14, 16, 14, 16, 3), (0, 1, 3, 2, 4, 5)),
    ((64, 3, 14, 16, 14, 16), (0, 2, 4, 3, 5, 1)),
    ((8, 64, 2, 2, 128, 128), (0, 1, 4, 2, 5, 3)),
    ((256, 256, 512), (2, 1, 0)),
    ((16, 20, 24, 10, 12, 14), (5, 4, 3, 2, 1, 0)),
    ((256, 64, 8, 32, 4), (0, 2, 3, 1, 4)),
]

# Shape, axis, number of indices.
_ROWS: list[tuple[Sizes, int, int]] = [
    ((50_000, 1024), 0, 8192),
    ((50_000, 64), 0, 8192),
    ((30_000, 768), 0, 512),
    ((512, 512), 0, 512),
    ((1024, 1000), 1, 256),
    ((4096, 4096), 1, 64),
    ((100_000, 3), 0, 100_000),
    ((1_000_000,), 0, 1_000_000),
    ((500, 1024), 0, 65_536),
]

# Kind, subscripts, extents.
_EINSUMS: list[tuple[str, str, dict[str, int]]] = [
    ("scores", "bshd,bthd->bhst", {"b": 8, "s": 512, "t": 512, "h": 16, "d": 64}),
    ("scores", "bshd,bthd->bhst", {"b": 2, "s": 2048, "t": 2048, "h": 16, "d": 128}),
    ("weighted", "bhst,bthd->bshd", {"b": 8, "s": 512, "t": 512, "h": 16, "d": 64}),
    ("weighted", "bhst,bthd->bshd", {"b": 2, "s": 2048, "t": 2048, "h": 16, "d": 128}),
    ("to heads", "bsm,mhd->bhsd", {"b": 8, "s": 512, "m": 1024, "h": 16, "d": 64}),
    ("to heads", "bsm,mhd->bhsd", {"b": 1, "s": 2048, "m": 4096, "h": 32, "d": 128}),
    ("from heads", "bhsd,hdm->bsm", {"b": 8, "s": 512, "m": 1024, "h": 16, "d": 64}),
    ("batch", "bmk,bkn->bmn", {"b": 64, "m": 128, "n": 128, "k": 64}),
    ("other order", "mk,kn->nm", {"m": 2048, "n": 1024, "k": 4096}),
]
_PLAIN = [(512, 512, 512), (2048, 2048, 2048), (16, 4096, 4096)]
_FORMS = {"NN": "mk,kn->mn", "NT": "mk,nk->mn", "TN": "km,kn->mn"}
# Rows, columns of the result and of x.
_LAYERS = [(2048, 4096, 1024), (2048, 1024, 4096), (256, 1024, 1024), (16, 4096, 4096)]

# Batch, queries, keys, heads, heads of keys, features.
_HEADS_OF: list[Sizes] = [
    (8, 512, 512, 16, 16, 64),
    (1, 128, 128, 12, 12, 64),
    (2, 2048, 2048, 16, 16, 128),
    (32, 128, 128, 12, 12, 64),
    (4, 1024, 1024, 16, 4, 64),
    (8, 197, 197, 12, 12, 64),
    (1, 4096, 4096, 16, 16, 128),
    (1, 2048, 2048, 32, 8, 128),
    (2, 4096, 77, 8, 8, 40),
    (8, 1, 4096, 32, 8, 128),
    (1, 1, 2048, 16, 16, 64),
]


def _permutes() -> Iterator[Case]:
    every = {"float32": 1, "bfloat16": 1, "uint8": 2, "float64": 3}
    for dtype, step in every.items():
        for shape, axes in _PERMUTES[::step]:
            f = functools.partial(jl.permute, axes=axes)
            yield case_of(f"permute {','.join(map(str, axes))}", f, dtype, shape)


def _select(x: Any, i: Any, *, axis: int) -> Any:
    return jl.index_select(x, axis, i)


def _unselect(ct: Any, i: Any, *, axis: int, extent: int) -> Any:
    like = (*ct.shape[:axis], extent, *ct.shape[axis + 1 :])
    select = functools.partial(_select, i=i, axis=axis)
    return jax.linear_transpose(select, jax.ShapeDtypeStruct(like, ct.dtype))(ct)


def _rows() -> Iterator[Case]:
    for dtype, (shape, axis, count) in itertools.product(
        ("float32", "bfloat16"), _ROWS
    ):
        extent = shape[axis]
        selected = (*shape[:axis], count, *shape[axis + 1 :])
        select = functools.partial(_select, axis=axis)
        unselect = functools.partial(_unselect, axis=axis, extent=extent)
        for kind, f, x in (
            ("select", select, shape),
            ("gradient of select", unselect, selected),
        ):
            case = case_of(f"{kind} axis {axis} of {extent}", f, dtype, x, (count,))
            yield dataclasses.replace(case, dtypes=(dtype, "int32"), below=(0, extent))


def _einsum(kind: str, spec: str, dtype: str, extents: dict[str, int]) -> Case:
    a, b, _ = spec.replace("->", ",").split(",")
    shapes = (tuple(extents[i] for i in term) for term in (a, b))
    return case_of(kind, functools.partial(jl.einsum, spec), dtype, *shapes)


def _products() -> Iterator[Case]:
    for dtype, every in (("bfloat16", 1), ("float32", 1), ("float16", 2)):
        for m, n, k in _LAYERS[::every]:
            for activation in (None, "gelu", "relu"):
                f = functools.partial(jl.linear, activation=activation)
                kind, given = f"linear {activation}", ((m, k), (n, k), (n,))
                yield case_of(kind, f, dtype, *given)
                if m > 16 and activation != "relu":
                    g = with_gradient(f, 3)
                    yield case_of(f"{kind}, gradient", g, dtype, *given, (m, n))
        for kind, spec, extents in _EINSUMS[::every]:
            yield _einsum(kind, spec, dtype, extents)
        for (form, spec), (m, n, k) in itertools.product(_FORMS.items(), _PLAIN):
            yield _einsum(f"product {form}", spec, dtype, {"m": m, "n": n, "k": k})
        add = functools.partial(jl.gemm, beta=1)
        for m, n, k in _LAYERS[:2]:
            yield case_of("added", add, dtype, (m, k), (k, n), (m, n))


def _attention() -> Iterator[Case]:
    """As on a CPU: in one call, and with its gradients, which are chosen for alone."""
    for dtype, every in (("bfloat16", 1), ("float16", 3)):
        every_size = itertools.product(_HEADS_OF[::every], (False, True))
        for sizes, causal in every_size:
            if not causal or sizes[1] == sizes[2]:
                yield from of_heads(dtype, causal, sizes)


def all_cases() -> list[Case]:
    """Those of permutes and rows by index, then those of products, and attention."""
    return [*_permutes(), *_rows(), *_products(), *_attention()]
