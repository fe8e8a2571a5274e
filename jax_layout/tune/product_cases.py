# SPDX-License-Identifier: Apache-2.0
"""What is measured of products: alone, in batches, in layers and in loops."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax

import jax_layout as jl
from jax_layout.plain import jnp, nn
from jax_layout.tune.case import Case, Function, Sizes, case_of, with_gradient
from jax_layout.tune.draw import Draw, is_drawn

_BATCHED = {"N": "bmk,bkn->bmn", "T": "bmk,bnk->bmn"}
_FORMS = {"NN": "mk,kn->mn", "NT": "mk,nk->mn", "TN": "km,kn->mn", "TT": "km,nk->mn"}
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
_WEIGHTS = ((4096, 4096), (1024, 1024), (256, 256), (4096, 1024), (1024, 4096))
# Of a UNet with attention, GPT-2's heads together, a GRU, a network on a graph.
_ASKED = [
    (1024, 64, 64), (1024, 64, 256), (256, 128, 128), (256, 1024, 128), (256, 128, 512),
    (2048, 2304, 768), (32, 256, 768), (8192, 64, 256),
]  # fmt: skip
_SIZES = [
    *((m, n, k) for m in _ROWS for n, k in _WEIGHTS),
    *((n, n, n) for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
    *((m, 64, 64) for m in (1, 16, 256, 2048)),
    *((2048, n, 1024) for n in (1, 4, 16, 64)),
    *((1024, 1024, k) for k in (1, 4, 16, 64)),
    *((m, n, k) for m in (128, 197) for n, k in ((768, 768), (3072, 768), (768, 3072))),
    *((m, 256, 1024) for m in (64, 512)),  # keys and values of grouped heads
    *_ASKED,
]
_QUICK_SIZES = [
    *((m, n, k) for m in (1, 8, 32, 256) for n, k in _WEIGHTS[1:4]),
    *((n, n, n) for n in (8, 32, 128, 512)),
]
# Of the operands and of the result, forms, the largest m n k, and every which of the
# sizes: a number without a divisor of five, so that all weights have their turn.
# The squares and few rows that programs have most are measured of all.
_ALWAYS = [
    *((n, n, n) for n in (64, 256, 512, 1024)),
    *((m, 4096, 4096) for m in (1, 4, 8, 16, 32, 4096)),
    *[(32, 768, 256), (32, 768, 128), (768, 32, 256)],  # of a GRU, mapped
    (8192, 64, 64),  # of a network on a graph
]
_PRODUCTS = [
    ("float32", None, "NN NT", 1 << 36, 1),
    ("bfloat16", None, "NN NT", 1 << 36, 1),
    ("float32", None, "TN", 1 << 36, 2),
    ("bfloat16", None, "TN", 1 << 36, 2),
    ("float16", None, "NN NT TN", 1 << 31, 3),
    ("float64", None, "NN NT TN", 1 << 31, 4),
    ("complex64", None, "NN NT TN TT", 1 << 30, 6),
    ("complex128", None, "NN NT TN TT", 1 << 28, 8),
    ("int8", "int32", "NN NT TN TT", 1 << 30, 6),
    ("bfloat16", "float32", "NN NT TN", 1 << 31, 4),
    ("float16", "float32", "NN NT TN", 1 << 31, 6),
    ("float32", None, "TT", 1 << 31, 6),
    ("bfloat16", None, "TT", 1 << 31, 6),
    ("float16", None, "TT", 1 << 31, 8),
    ("float64", None, "TT", 1 << 31, 8),
]


def _einsum(
    kind: str, spec: str, dtype: str, result: str | None, **extents: int
) -> Case:
    a, b, _ = spec.replace("->", ",").split(",")
    shapes = (tuple(extents[i] for i in term) for term in (a, b))
    f = functools.partial(jl.einsum, spec, preferred_element_type=result)
    return case_of(f"{kind} {spec} {result}", f, dtype, *shapes)


def products(quick: bool) -> Iterator[Case]:
    for dtype, result, forms, most, every in _PRODUCTS[: 2 if quick else None]:
        for form in forms.split():
            full = dict.fromkeys([*_SIZES[::every], *_ALWAYS])
            for m, n, k in _QUICK_SIZES if quick else full:
                if m * n * k > most:
                    continue
                if form == "TN":  # a weight's gradient sums over the rows
                    m, n, k = n, k, m
                yield _einsum("product", _FORMS[form], dtype, result, m=m, n=n, k=k)


# Steps, and the size of each.
_STEPS = [(1024, 8), (64, 32), (64, 128), (1024, 32), (64, 8), (64, 64), (16, 256)]
_BATCHES = [
    ("float32", "bmk,bkn->bmn"),
    ("bfloat16", "bmk,bkn->bmn"),
    ("float32", "bmk,bnk->bmn"),
    ("bfloat16", "bmk,bnk->bmn"),
    ("float16", "bmk,bkn->bmn"),
    ("float64", "bmk,bkn->bmn"),
    ("complex64", "bmk,bkn->bmn"),
]


def batches(quick: bool) -> Iterator[Case]:
    forms, steps = (_BATCHES[:3], _STEPS[:3]) if quick else (_BATCHES, _STEPS)
    for (dtype, spec), (b, n) in itertools.product(forms, steps):
        yield _einsum("batch", spec, dtype, None, b=b, m=n, n=n, k=n)


_DRAWN_TYPES = [
    *4 * [("float32", None)],
    *4 * [("bfloat16", None)],
    *2 * [("float16", None)],
    ("float64", None),
    ("int8", "int32"),
    ("bfloat16", "float32"),
]
_DRAWN = 1000


def drawn(quick: bool, seed: int = 0, count: int = _DRAWN) -> Iterator[Case]:
    """Products, in batches too, linear layers and these with their gradients."""
    draw = Draw(seed)
    while count and not quick:
        dtype, result = draw.of(*_DRAWN_TYPES)
        kind = draw.of(*5 * ["product"], "batch", "linear", "linear", "gradient")
        form = draw.of("NN", "NN", "NT", "NT", "TN", "TT")
        activation = draw.of(None, "gelu", "relu")
        b = draw.of(2, 4, 8, 12, 16, 32, 64) if kind == "batch" else 1
        m, n, k = draw.extent(), draw.extent(), draw.extent()
        m = draw.of(m, m, draw.below(64))
        if not is_drawn(dtype, 2 * b * m * n * k, (b, m, k), (b, k, n), (b, m, n)):
            continue
        if kind in ("product", "batch"):
            spec = _FORMS[form] if kind == "product" else _BATCHED[form[1]]
            yield _einsum(f"drawn {kind}", spec, dtype, result, b=b, m=m, n=n, k=k)
        elif result is not None or (kind == "gradient" and m < 16):
            continue
        else:
            yield _layer("drawn ", dtype, activation, m, n, k, kind == "gradient")
        count -= 1


# Batch, rows, features, heads, and the size of a head.
_TO_HEADS: list[Sizes] = [
    (8, 512, 1024, 16, 64),
    (1, 128, 768, 12, 64),
    (1, 512, 768, 12, 64),
    (1, 2048, 1024, 16, 64),
    (4, 197, 768, 12, 64),
    (8, 16, 1024, 16, 64),
]


def projections(quick: bool) -> Iterator[Case]:
    """What queries, keys and values are made by, each head's rows together."""
    forms = itertools.product(("float32", "bfloat16"), ("mhd", "hdm"), _TO_HEADS)
    for dtype, weights, sizes in [] if quick else forms:
        extents = dict(zip("bsmhd", sizes, strict=True))
        yield _einsum("product", f"bsm,{weights}->bhsd", dtype, None, **extents)


# Rows, columns of the result and of x.
_LAYERS = [
    (m, n, k)
    for m in (128, 8, 512, 1, 64, 2048)
    for n, k in ((1024, 1024), (4096, 1024), (256, 256), (1024, 4096))
]
_LAYERS += [(m, 4096, 4096) for m in (16, 32, 4)]
_LAYERS += [(m, 3072, 768) for m in (1, 8)]


def layers(quick: bool) -> Iterator[Case]:
    """Linear layers, with what is fused to their products, and their gradients."""
    wanted = [
        ("float32", None, 1), ("float32", "gelu", 1), ("bfloat16", None, 1),
        ("bfloat16", "gelu", 1), ("float32", "relu", 3), ("bfloat16", "relu", 3),
        ("float16", "gelu", 3), ("float16", "relu", 5), ("float64", "gelu", 5),
        ("float64", "relu", 5),
    ]  # fmt: skip
    if quick:
        wanted = [(dtype, activation, 4) for dtype, activation, _ in wanted[:4]]
    for dtype, activation, every in wanted:
        for m, n, k in _LAYERS[: 8 if quick else None : every]:
            yield _layer("", dtype, activation, m, n, k, False)
            if m >= 64 and m * n * k <= 1 << 31 and every < 5:
                yield _layer("", dtype, activation, m, n, k, True)


def _layer(
    kind: str,
    dtype: str,
    activation: str | None,
    m: int,
    n: int,
    k: int,
    gradient: bool,
) -> Case:
    """A linear layer, or it and its gradient."""
    f = functools.partial(jl.linear, activation=activation)
    name, operands = f"{kind}linear {activation}", ((m, k), (n, k), (n,))
    if not gradient:  # without a kernel of its own it asks about its product
        return case_of(name, f, dtype, *operands, one_call=True)
    g, kinked = with_gradient(f, 3), activation == "relu"
    return case_of(f"{name}, gradient", g, dtype, *operands, (m, n), kinked=kinked)


# Columns of the result and of x.
_DENSE = [(256, 256), (1024, 256), (256, 1024), (1024, 1024)]


def dense(quick: bool) -> Iterator[Case]:
    """Layers whose weights lie as Flax, Haiku and Keras have them."""
    rows, dtypes = (1, 4, 16, 32, 128, 512), ("float32", "bfloat16")
    kinds = itertools.product(dtypes, (None, "relu", "gelu"), rows)
    for dtype, activation, m in [] if quick else kinds:
        f = functools.partial(_layers, form="NN", activation=activation)
        for n, k in _DENSE:
            shapes = (m, k), (k, n), (n,)
            yield case_of(f"dense {activation}", f, dtype, *shapes, one_call=True)


def small_nets(quick: bool) -> Iterator[Case]:
    """Programs of four layers and no more, which XLA runs at once or elsewhere."""
    rows, widths = (1, 4, 32, 128), (16, 32, 64, 128, 256, 512)
    forms, activations = ("NN", "NT"), (None, "behind", "scaled", "relu", "gelu")
    dtypes = "float32", "bfloat16"
    kinds = itertools.product(dtypes, forms, activations, rows, widths)
    for dtype, form, activation, m, n in [] if quick else kinds:
        f = functools.partial(_layers, form=form, activation=activation)
        shapes: list[Sizes] = [(m, n), *4 * [(n, n), (n,)]]
        name = f"small net {form} {activation}"
        yield case_of(name, f, dtype, *shapes, one_call=True, whole=True)
        if form == "NN" and activation in (None, "relu") and n >= 64:
            g, y = with_gradient(f, len(shapes)), (m, n)
            whole = {"whole": True, "kinked": activation == "relu"}
            yield case_of(f"{name}, gradient", g, dtype, *shapes, y, **whole)


def _layers(x: Any, *weights: Any, form: str, activation: str | None) -> Any:
    """Layers of these weights, whose activation may be behind a call of the product."""
    for w, b in zip(weights[::2], weights[1::2], strict=True):
        if activation in ("behind", "scaled"):
            y = jl.matmul(x, w.T if form == "NT" else w)
            x = nn.relu(y + b) if activation == "behind" else nn.relu(y) / len(b)
        else:
            x = jl.linear(x, w if form == "NT" else w.T, b, activation=activation)
    return x


def gelus(quick: bool) -> Iterator[Case]:
    """Layers of jax's own operators, as transformers have them; GPT-2 as x @ w.T."""
    rows, weights = (64, 128, 197, 512, 2048), ((3072, 768), (4096, 1024), (1024, 256))
    dtypes = () if quick else ("float32", "bfloat16")
    forms = [*itertools.product(dtypes, rows, weights, ["NN"])]
    forms += itertools.product(dtypes, rows[:-1], weights[:1], ["NT"])
    for i, (dtype, m, (n, k), form) in enumerate(forms):
        shapes = (m, k), (k, n) if form == "NN" else (n, k), (n,)
        for approximate in (True, False)[: 1 if i % 2 else 2]:
            f = functools.partial(_gelu, spec=_FORMS[form], approximate=approximate)
            kind = f"{'gelu' if approximate else 'gelu_erf'} behind a product"
            yield case_of(kind, f, dtype, *shapes, operators=("dot_general",))


def _gelu(x: Any, w: Any, b: Any, *, spec: str, approximate: bool) -> Any:
    return nn.gelu(jnp.einsum(spec, x, w) + b, approximate=approximate)


def _recurrence(xs: Any, w: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        y = jl.einsum("mk,kn->mn", h, w) / w.shape[0] ** 0.5  # not chaotic
        return jnp.tanh(x + y), None

    return jax.lax.scan(step, xs[0], xs)[0]


def _gated(xs: Any, w: Any, v: Any) -> Any:
    """A recurrence whose step has four products in one, as an LSTM's.

    In both directions: XLA runs the two loops side by side.
    """

    def step(w: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        y = x + jl.einsum("mk,kn->mn", h, w) / w.shape[0] ** 0.5
        i, f, g, o = jnp.split(y, 4, -1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        return (nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros_like(xs, shape=(xs.shape[1], w.shape[0]))
    run = functools.partial(jax.lax.scan, init=(zero, zero), xs=xs)
    ends = (
        run(functools.partial(step, w))[0][0],
        run(functools.partial(step, v), reverse=True)[0][0],
    )
    return ends[0] + ends[1]


def _gru(xs: Any, w: Any) -> Any:
    """A recurrence whose step has three products in one."""

    def step(h: Any, x: Any) -> Any:
        given = jnp.split(x, 3, -1)
        y = jl.einsum("mk,kn->mn", h, w) / w.shape[0] ** 0.5
        z, r, n = jnp.split(y, 3, -1)
        z, r = nn.sigmoid(given[0] + z), nn.sigmoid(given[1] + r)
        return (1 - z) * jnp.tanh(given[2] + r * n) + z * h, None

    zero = jnp.zeros_like(xs, shape=(xs.shape[1], w.shape[0]))
    return jax.lax.scan(step, zero, xs)[0]


def recurrences(quick: bool) -> Iterator[Case]:
    """Small products in a loop, whose body XLA makes one kernel if it can."""
    rows, dtypes = [1, 16, 64, 8], ["float32", "bfloat16"]
    sizes = [64, 512, 16, 256, 1024]
    if quick:
        rows, sizes, dtypes = rows[:2], sizes[:2], dtypes[:1]
    found: list[tuple[str, Function, str, Sizes, list[Sizes]]] = [
        ("recurrence", _recurrence, dtype, (m, n), [(32, m, n), (n, n)])
        for dtype, m, n in itertools.product(dtypes, rows, sizes)
    ]
    if not quick:
        for dtype, m, n in itertools.product(dtypes, (1, 8, 32), (128, 256, 512)):
            lstm = [(32, m, 4 * n), *2 * [(n, 4 * n)]]
            gru = [(32, m, 3 * n), (n, 3 * n)]
            found += [
                ("gated recurrence", _gated, dtype, (m, n), lstm),
                ("GRU", _gru, dtype, (m, n), gru),
            ]
    for kind, f, dtype, y, given in found:
        yield case_of(kind, f, dtype, *given, whole=True)
        g = with_gradient(f, len(given))
        yield case_of(f"{kind}, gradient", g, dtype, *given, y, whole=True)
