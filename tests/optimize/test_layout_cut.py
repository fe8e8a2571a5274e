# SPDX-License-Identifier: Apache-2.0
"""Conversions are where they move the fewest bytes."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8, 1, 1)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 5, 6)), jnp.float32)


def conv(x):
    """An anchor."""
    return lax.conv(x.astype(jnp.float32), W, (1, 1), "SAME")


def moved(f, *args):
    """Bytes that the plan moves, with convolutions in NHWC; the result is checked."""
    optimized = jl.optimize_layout(f, policy="NHWC")
    report = optimized.layout_report(*args)
    if report.optimized:
        ours, theirs = (jax.tree.leaves(jax.jit(g)(*args)) for g in (optimized, f))
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    return report.planned_bytes


# --- programs whose least is known, in units of one conversion of X


def _cast_before(x):
    return conv(x.astype(jnp.float32)).mean((2, 3))


def _cast_after(x):
    return lax.sort(conv(x).astype(jnp.float64), dimension=1).mean((2, 3))


def _branches_before(x):
    y = jnp.exp(x)
    return sum(conv(f(y)).mean((2, 3)) for f in (jnp.sin, jnp.cos, jnp.tanh))


def _branches_after(x):
    y = conv(x)
    return sum(lax.sort(f(y), dimension=1).mean((2, 3)) for f in (jnp.sin, jnp.cos))


def _wanted_in_both(x):
    return lax.sort(x, dimension=1).mean((2, 3)) + conv(x).mean((2, 3))


def _grows_before(x):
    return conv(jnp.pad(jnp.sin(x), ((0, 0), (0, 0), (3, 3), (3, 3)))).mean((2, 3))


def _grows_after(x):
    return lax.sort(jnp.concatenate([conv(x)] * 3, 2), dimension=1).mean((2, 3))


def _shrinks(x):
    return lax.sort(conv(x)[:, :, :, :3], dimension=1).mean((2, 3))


def _many_operands(x):
    """Cheaper row-major between the convolutions than with all operands converted."""
    y = conv(x)
    for part in (lax.sort(f(x), dimension=1) for f in (jnp.sin, jnp.cos, jnp.tan)):
        y = y * part
    return conv(y).mean((2, 3))


def _transposed(x):
    y = jnp.sin(x).transpose(0, 2, 3, 1)
    y = jnp.exp(y).transpose(0, 3, 1, 2)
    return conv(jnp.sin(y)).mean((2, 3)) + conv(jnp.cos(y)).mean((2, 3))


def _called(x):
    y = jax.jit(lambda x: [jax.nn.relu(x), jax.nn.relu(-x)])(x)
    return conv(y[0]).mean((2, 3)) + conv(y[1]).mean((2, 3))


PROGRAMS = {
    _cast_before: (jnp.int8, 0.25),
    _cast_after: (jnp.float32, 2),
    _branches_before: (jnp.float32, 1),
    _branches_after: (jnp.float32, 2),
    _wanted_in_both: (jnp.float32, 1),
    _grows_before: (jnp.float32, 1),
    _grows_after: (jnp.float32, 2),
    _shrinks: (jnp.float32, 1.5),
    _many_operands: (jnp.float32, 3),
    _transposed: (jnp.float32, 1),
    _called: (jnp.float32, 1),
}


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__.strip("_"))
def test_programs(f):
    dtype, units = PROGRAMS[f]
    assert moved(f, X.astype(dtype)) == units * 2 * X.nbytes


def test_what_a_loop_reads_is_converted_before_it():
    w, x = W.astype(jnp.bfloat16), X

    def f(w, x):
        def turn(c, _):
            kernel = jnp.tile(w, (1, 1, 3, 3)).astype(jnp.float32) / 9
            return lax.conv(c, kernel, (1, 1), "SAME"), None

        return lax.scan(turn, x, None, length=10)[0]

    once = 2 * X.nbytes + 2 * w.nbytes
    assert moved(f, w, x) <= once + 2 * X.nbytes


# --- against every placement


def _dag(seed):
    """A function of straight lines, of convolutions, sorts and what is neither."""
    r = random.Random(seed)
    choices = [
        *["conv", "sort"],
        *["unary"] * 2,
        *["binary"] * 2,
        *["wide", "narrow", "pad", "slice"],
    ]
    steps = [(r.choice(choices), r.random(), r.random()) for _ in range(9)]

    def f(x, y):
        values = [x, y]
        for name, a, b in steps:
            one = values[int(a * len(values))]
            if name == "conv":
                new = lax.conv(one.astype(jnp.float32), W, (1, 1), "SAME")
            elif name == "sort":
                new = lax.sort(one, dimension=1)
            elif name == "unary":
                new = lax.sin(one)
            elif name == "wide":
                new = lax.convert_element_type(one, jnp.float64)
            elif name == "narrow":
                new = lax.convert_element_type(one, jnp.float16)
            elif name == "pad":
                new = lax.pad(
                    one, np.zeros((), one.dtype), [(0, 0, 0)] * 3 + [(1, 1, 0)]
                )
            elif name == "slice":
                new = lax.slice_in_dim(one, 0, max(1, one.shape[3] - 2), axis=3)
            else:
                alike = [
                    v for v in values if (v.shape, v.dtype) == (one.shape, one.dtype)
                ]
                new = lax.add(one, alike[int(b * len(alike))])
            values.append(new)
        return values[-1], values[-2]

    return f


def _least(f, *args):
    """Bytes of the best of all placements: each equation in NHWC or row-major."""
    closed = jax.make_jaxpr(f)(*args)
    anchors = {"conv_general_dilated": 1, "sort": 0}
    live = _live(closed.jaxpr)
    free = [e for e in live if e.primitive.name not in anchors]
    sizes = [v for v in [*closed.jaxpr.invars, *(v for e in live for v in e.outvars)]]
    best = np.inf
    for labels in itertools.product((0, 1), repeat=len(free)):
        chosen = dict(zip(map(id, free), labels, strict=True))
        side = dict.fromkeys(closed.jaxpr.invars, 0)
        readers = {v: set() for v in sizes}
        for e in live:
            label = chosen.get(id(e), anchors.get(e.primitive.name))
            side.update(dict.fromkeys(e.outvars, label))
            for v in e.invars:
                if v.aval.ndim == 4 and v in readers:
                    readers[v].add(label)
        for v in closed.jaxpr.outvars:
            readers[v].add(0)
        best = min(
            best,
            sum(
                2 * v.aval.size * v.aval.dtype.itemsize
                for v in sizes
                if readers[v] - {side[v]}
            ),
        )
    return best


def _live(jaxpr):
    needed, live = set(jaxpr.outvars), []
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            needed |= {v for v in eqn.invars if not hasattr(v, "val")}
            live.insert(0, eqn)
    return live


@pytest.mark.parametrize("start", range(0, 100, 20))
def test_no_placement_moves_less(start):
    for seed in range(start, start + 20):
        f = _dag(seed)
        optimized = jl.optimize_layout(f, policy="NHWC")
        report = optimized.layout_report(X, X + 1)
        assert report.planned_bytes == _least(f, X, X + 1), seed
        if seed % 5 == 0:
            moved(f, X, X + 1)
