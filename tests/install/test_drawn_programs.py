# SPDX-License-Identifier: Apache-2.0
"""Programs drawn at random, whose calls are ours or XLA's at random as well.

Rules look at what else is in a loop, a branch or a gradient: here it is what nobody
thought of.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from jax_layout import choices
from jax_layout.tune import draw as drawing

# Of the largest result in float32. Roots of mean squares count: single elements may be
# further off, as a rectifier's gradient jumps, and so may small results, of which some
# are differences of rounding alone.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}


class Draw(drawing.Draw):
    """Makes programs from rows to rows: each is a pytree of weights, and a function of
    it and the rows."""

    def __init__(self, seed):
        super().__init__(seed)
        self.numbers = np.random.default_rng(seed)
        self.dtype = self.of(*TOLERANCES)
        self.rows, self.width = self.of(1, 2, 3, 16), self.of(32, 64)

    def array(self, *shape):
        scale = np.prod(shape[:-1]) ** -0.5
        return jnp.asarray(self.numbers.standard_normal(shape) * scale, self.dtype)

    def program(self, depth=0):
        makers = LEAVES + LOOPS * (depth < 2)
        parts = [self.of(*makers)(self, depth + 1) for _ in range(self.of(1, 2, 3))]
        weights, functions = zip(*parts, strict=True)

        def run(weights, h):
            for w, f in zip(weights, functions, strict=True):
                h = f(w, h).astype(h.dtype)
            return h

        return weights, run


def dense(draw, _):
    inner, act = draw.of(16, 96, 256), draw.of(jnp.tanh, jax.nn.gelu, jax.nn.relu)
    weights = draw.array(draw.width, inner), draw.array(inner, draw.width)
    return weights, lambda w, h: act(h @ w[0]) @ w[1]


def turned(draw, _):
    inner = draw.of(16, 96, 256)
    weights = draw.array(inner, draw.width), draw.array(inner, draw.width)
    return weights, lambda w, h: jnp.tanh((w[0] @ h.T).T) @ w[1]


def layer(draw, _):
    weights = draw.array(draw.width, draw.width), draw.array(draw.width)
    act = draw.of(None, "relu", "gelu")
    return weights, lambda w, h: jl.linear(h, w[0], w[1], activation=act)


def convolutions(draw, _):
    weights = draw.array(3, 3, 8, 16), draw.array(1, 1, 16, 8)
    layout = "NHWC", "HWIO", "NHWC"

    def run(w, h):
        x = h.reshape(1, *h.shape[:1], -1, 8)
        for each in w:
            x = jax.nn.relu(lax.conv_general_dilated(
                x, each, (1, 1), "SAME", dimension_numbers=layout))  # fmt: skip
        return x.reshape(h.shape)

    return weights, run


def pool(draw, _):
    """Of sums: XLA has NaN for maxima behind two convolutions (docs/programs.md)."""
    zero = np.zeros((), draw.dtype)

    def run(_, h):
        x = h.reshape(1, *h.shape[:1], -1, 8)
        y = lax.reduce_window(x, zero, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        return y.reshape(h.shape) / 9

    return (), run


def attention(draw, _):
    weights = [draw.array(draw.width, draw.width) for _ in range(4)]

    def run(w, h):
        q, k, v = (jnp.reshape(h @ each, (h.shape[0], 2, -1)) for each in w[:3])
        p = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 4)
        return h + jnp.einsum("hqk,khd->qhd", p, v).reshape(h.shape) @ w[3]

    return weights, run


def norm(draw, _):
    def run(scale, h):
        about = h - h.mean(-1, keepdims=True)
        return about * lax.rsqrt(h.var(-1, keepdims=True) + 1e-2) * (1 + scale)

    return draw.array(draw.width), run


def gathered(draw, _):
    rows = jnp.asarray(draw.numbers.integers(0, draw.rows, draw.rows))
    return (), lambda _, h: h[rows] + 0.3 * jnp.zeros_like(h).at[rows].add(h)


def scanned(draw, depth):
    """Layers whose weights are stacked."""
    weights, f = draw.program(depth)
    stack = jax.tree.map(lambda w: jnp.stack([w, -w, w / 2]), weights)
    return stack, lambda w, h: lax.scan(lambda h, w: (f(w, h), None), h, w, 3)[0]


def repeated(draw, depth):
    weights, f = draw.program(depth)
    return weights, lambda w, h: lax.fori_loop(0, 2, lambda _, h: f(w, h), h)


def branched(draw, depth):
    (one, f), (two, g) = draw.program(depth), draw.program(depth)

    def run(w, h):  # the first, though XLA does not know
        known = jnp.isfinite(h).all()
        return lax.cond(known, lambda h: f(w[0], h), lambda h: g(w[1], h), h)

    return (one, two), run


def checkpointed(draw, depth):
    weights, f = draw.program(depth)
    return weights, jax.checkpoint(f)


def called(draw, depth):
    weights, f = draw.program(depth)
    return weights, jax.jit(f)


def mapped(draw, depth):
    weights, f = draw.program(depth)
    return weights, lambda w, h: jax.vmap(f, (None, 0))(w, jnp.stack([h, -h])).sum(0)


LEAVES = [dense, turned, layer, convolutions, pool, attention, norm, gathered]
LOOPS = [scanned, repeated, branched, checkpointed, called, mapped]


@pytest.mark.parametrize("way", ["installed", "optimized"])
@pytest.mark.parametrize("seed", range(24, 48))
def test_results_are_those_in_float32_whatever_is_ours(seed, way, monkeypatch):
    draw = Draw(seed)
    weights, f = draw.program()
    rows = draw.array(draw.rows, draw.width)
    if draw.of(True, False):
        value = f

        def loss(weights, rows):
            return jnp.square(value(weights, rows).astype(jnp.float32)).mean()

        f = jax.grad(loss, (0, 1))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (weights, rows))
    jl.use_choices("lax")
    expected = jax.jit(lambda *given: f(*given))(*exact)
    jl.use_choices(None)

    def choose(work, methods=choices.OURS, passes=1, gain=1.0):
        number = zlib.crc32(f"{seed} {work.case} {work.sizes}".encode())
        return methods[number // 2 % len(methods)] if number % 2 else None

    monkeypatch.setattr(choices, "choose", choose)
    if way == "optimized":
        found = jax.jit(jl.optimize_layout(lambda *given: f(*given)))(weights, rows)
    else:
        with jl.installed():
            found = jax.jit(lambda *given: f(*given))(weights, rows)
    pairs = [*zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    scale = max([1e-2, *(size(y) for _, y in pairs)])
    for x, y in pairs:
        assert x.shape == y.shape and x.dtype == draw.dtype
        assert size(x - y) <= TOLERANCES[draw.dtype] * scale


def size(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))
