# SPDX-License-Identifier: Apache-2.0
"""Products of few rows in a loop are all computed by kernels, or all by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from jax_layout import _backends, choices
from jax_layout.products import as_they_lie, in_loops

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the extension module is missing"
)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def by_transpose(product, x, w):
    return product(x, w.T)


def row_by_row(product, x, w):
    return jl.linear(x, w, activation="relu") if product is jl.matmul else by_relu(x, w)


def by_relu(x, w):
    return jax.nn.relu(x @ w.T)


def scanned(step, x):
    return lax.scan(lambda h, _: (step(h), None), x, None, length=3)[0]


def repeated(step, x):
    _, x = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1])), (0, x))
    return x


def unrolled(step, x):
    for _ in range(3):
        x = step(x)
    return x


def calls(f, *args):
    return jax.jit(f).lower(*args).as_text().count("@jax_layout_")


# The rows; which of two products the tables have as ours; how the first is written, and
# the loop; whether an operand is large; how many calls there are.
@pytest.mark.parametrize("rows, ours, first, loop, large, expected", [
    (1, "both", by_transpose, scanned, False, 2),
    (1, "first", by_transpose, scanned, False, 0),
    (2, "second", by_transpose, scanned, False, 0),
    (2, "first", row_by_row, scanned, False, 0),
    (2, "both", row_by_row, repeated, False, 2),
    (2, "second", row_by_row, repeated, False, 0),
    (8, "first", by_transpose, scanned, False, 1),
    (1, "first", by_transpose, scanned, True, 1),
    (2, "first", by_transpose, repeated, True, 1),
    (2, "first", by_transpose, unrolled, False, 3),
])  # fmt: skip
def test_they_go_together(rows, ours, first, loop, large, expected, monkeypatch):
    def choose(work, methods=choices.OURS, passes=1, gain=1.0):
        columns = {"first": 96, "second": 64, "both": work.sizes[1]}[ours]
        mine = columns == max(work.sizes[:2]) and not choices.are_plain()
        return methods[0] if mine else None

    monkeypatch.setattr(choices, "choose", choose)
    monkeypatch.setattr(choices, "are_all_ours", lambda: False)
    monkeypatch.setattr(in_loops, "is_large", lambda *_: large)
    x, w, v = array(rows, 64), array(96, 64, seed=1) / 8, array(96, 64, seed=2) / 9

    def f(product):
        return lambda x, w, v: loop(lambda h: product(first(product, h, w), v), x)

    assert calls(f(jl.matmul), x, w, v) == expected
    found, plain = (jax.jit(f(p))(x, w, v) for p in (jl.matmul, jnp.matmul))
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5 * abs(plain).max())


def beside_a_product(product, h, w):
    y = product(h, w.T)
    many = jnp.broadcast_to(h, (8, 64)) @ w.T  # which a library computes
    return y + 1e-3 * many.sum(0, keepdims=True)


# In loops that have no products but XLA's.
@pytest.mark.parametrize("rows, large, step, transposes", [
    (1, True, by_transpose, 0),
    (2, True, by_transpose, 1),
    (1, False, by_transpose, 1),
    (1, False, beside_a_product, 1 + int(jax.__version_info__ < (0, 11))),
])  # fmt: skip
def test_xla_reads_a_vectors_matrix_as_it_lies(
    rows, large, step, transposes, monkeypatch
):
    monkeypatch.setattr(choices, "choose", lambda *_: None)
    monkeypatch.setattr(choices, "are_all_ours", lambda: False)
    for module in (in_loops, as_they_lie):
        monkeypatch.setattr(module, "is_large", lambda *_: large)
    x, w = array(rows, 64), array(256, 64, seed=1) / 8

    def f(product):
        def turn(h):
            return jnp.tanh(step(product, h, w)[:, :64])

        return lambda x, w: scanned(turn, x)

    lowered = jax.jit(f(jl.matmul)).lower(x, w)
    assert lowered.as_text().count("stablehlo.transpose") == transposes
    plain = jax.jit(f(jnp.matmul))(x, w)
    found = lowered.compile()(x, w)
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows, ours, calls", [
    (8, True, 1), (8, False, 0), (1, True, 0)
])  # fmt: skip
def test_jaxs_vector_reads_its_matrix_as_it_lies_beside_calls(
    rows, ours, calls, monkeypatch
):
    """A call of ours changes how XLA runs what is around it."""

    def choose(work, methods=choices.OURS, passes=1, gain=1.0):
        return methods[0] if ours and not choices.are_plain() else None

    monkeypatch.setattr(choices, "choose", choose)
    monkeypatch.setattr(choices, "are_all_ours", lambda: False)
    x, w, z = array(1, 128), array(128, 128, seed=1) / 12, array(rows, 64)
    v = array(64, 64, seed=2) / 8

    def f(x, w, z, v):
        def step(s):
            h, z = s
            return jnp.tanh(h @ w.T), jl.matmul(z, v)

        return scanned(step, (x, z))

    lowered = jax.jit(f).lower(x, w, z, v).as_text()
    assert lowered.count("@jax_layout_") == calls
    reads = calls > 0 and jax.__version_info__ >= (0, 11)
    assert ("stablehlo.transpose" in lowered) != reads
