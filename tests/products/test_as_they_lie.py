# SPDX-License-Identifier: Apache-2.0
"""Products that stay XLA's read what their operands are transposes of."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import jax_layout as jl
from hlo import compiled, count
from jax_layout import _backends, choices
from jax_layout.products.as_they_lie import calls_libraries, products_as_they_lie

needs_kernels = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the extension module is missing"
)
# Before, XLA computed a vector by a transpose in one loop, and widened all of bfloat16.
WRITES_TRANSPOSES = jax.__version_info__ >= (0, 11)
needs_writes = pytest.mark.skipif(not WRITES_TRANSPOSES, reason="XLA widens all")
BF16, F32 = "bfloat16", "float32"


def array(*shape, dtype=F32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(ours, theirs):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        atol = (2e-2 if jax.tree.leaves(ours)[0].dtype == BF16 else 1e-5) * abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def contracted(x, w, i, j, **options):
    return lax.dot_general(x, w, (((i,), (j,)), ((), ())), **options)


def matrix(x, w):
    return x @ w.T


def by_rows(x, w):
    return contracted(x, w.T, 1, 1)


def beside(x, w):
    turned = w.T
    return x @ turned, turned + 1


def steps(x, w):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(contracted(h, w.T, 1, 1)), x)


def dots(x, w):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w.T / len(w)), x)


def reduced(x, w):
    """The scores of a long line beside a product, in each step."""

    def step(h, w):
        scores = jax.nn.softmax(jnp.arange(4096, dtype=h.dtype) * h[0, 0])
        return jnp.tanh(h @ w.T + scores[:1]), None

    return lax.scan(step, x, w)[0]


def multiplied(x, w):
    """A product that a library computes beside one that none does, in each step."""

    def step(_, s):
        h, other = s
        turned = CALLED(h, w * h[0, 0])
        return jnp.tanh(turned), jnp.tanh(other @ other)

    return lax.fori_loop(0, 3, step, (x, jnp.ones((8, 8), x.dtype)))


def long(x, w):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h + (h @ w.T).sum()), x)


CALLED = jax.jit(matrix)
LARGE = math.isqrt(int(choices.level2_bytes() / choices.threads()) // 4) + 16
# Shapes and dtype of operands, and how many products read through a transpose.
READ = {
    "a weight": (matrix, (8, 24), (16, 24), BF16, 1),
    "of images": (matrix, (2, 3, 24), (16, 24), BF16, 1),
    "both": (lambda x, w: x.T @ w.T, (24, 8), (16, 24), BF16, 1),
    "twice": (lambda x, w: x @ w.T.T.T, (8, 24), (16, 24), BF16, 1),
    "to float32": (
        lambda x, w: contracted(x, w.T, 1, 0, preferred_element_type=F32),
        *((8, 24), (16, 24), BF16, 1),
    ),
    "a gradient": (
        jax.grad(lambda x, w: matrix(x, w).astype(F32).sum(), (0, 1)),
        *((8, 24), (16, 24), BF16, 2),
    ),
    "read elsewhere": (beside, (8, 24), (16, 24), BF16, 1),
    "two axes that are summed over": (
        lambda x, w: lax.dot_general(
            x, jnp.transpose(w, (2, 0, 1)), (((1, 2), (0, 2)), ((), ()))
        ),
        *((8, 4, 6), (16, 6, 4), BF16, 1),
    ),
    "a batch": (
        lambda x, w: jnp.matmul(x, jnp.swapaxes(w, 2, 3)),
        *((3, 2, 8, 24), (3, 2, 16, 24), BF16, 1),
    ),
    "in a call": (
        lambda x, w: CALLED(x, w) + CALLED(2 * x, w),
        *((8, 24), (16, 24), BF16, 1),
    ),
    "in a loop": (steps, (16, 24), (24, 24), BF16, 1),
    "a stack in a scan": (
        lambda x, w: lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, w)[0],
        *((8, 24), (3, 24, 24), BF16, 1),
    ),
    "a stack in a call in a scan": (
        lambda x, w: lax.scan(lambda h, w: (jnp.tanh(CALLED(h, w)), None), x, w)[0],
        *((8, 24), (3, 24, 24), BF16, 1),
    ),
    "a stack in a checkpoint in a scan": (
        lambda x, w: lax.scan(
            jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.T), None)), x, w
        )[0],
        *((8, 24), (3, 24, 24), BF16, 1),
    ),
    "a vector": (matrix, (1, 24), (16, 24), F32, int(WRITES_TRANSPOSES)),
    "a vector and a matrix's rows": (by_rows, (1, 128), (128, 128), F32, 1),
    "a vector in a loop": (steps, (1, 128), (128, 128), F32, 1),
    "a dot of rows of a large matrix in a loop": (
        dots, (1, LARGE), (LARGE, LARGE), F32, 1
    ),
    "a dot of rows of a stack beside a reduction": (
        reduced, (1, 128), (3, 128, 128), F32, int(WRITES_TRANSPOSES)
    ),
    "a dot of rows of what a loop computes beside a product": (
        multiplied, (1, 128), (128, 128), F32, int(WRITES_TRANSPOSES)
    ),
    "a dot of long rows in a loop": (
        long, (1, 4096), (4, 4096), F32, int(WRITES_TRANSPOSES)
    ),
    # What XLA does as well, or better, as it is.
    "float32": (matrix, (8, 24), (16, 24), F32, 0),
    "few rows in a loop": (steps, (8, 24), (24, 24), BF16, 0),
    "a small matrix in a loop": (steps, (1, 64), (64, 64), F32, 0),
    "a dot of rows in a loop": (dots, (1, 128), (128, 128), F32, 0),
    "a dot of few rows beside a reduction": (
        reduced, (1, 64), (3, 64, 64), F32, 0
    ),
    "a dot of rows of a stack in a scan": (
        lambda x, w: lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, w)[0],
        *((1, LARGE), (2, LARGE, LARGE), F32, 0),
    ),
    "a dot of rows of what a loop computes": (
        lambda x, w: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ (w / (i + 1)).T), x),
        *((1, LARGE), (LARGE, LARGE), F32, 0),
    ),
    "a batch within": (
        lambda x, w: jnp.matmul(x, jnp.transpose(w, (1, 2, 0))),
        *((3, 8, 24), (16, 3, 24), BF16, 0),
    ),
    "a batch of vectors": (
        lambda x, w: jnp.matmul(x, jnp.swapaxes(w, 1, 2)),
        *((3, 1, 24), (3, 16, 24), F32, 0),
    ),
    "another order of the result": (
        lambda x, w: contracted(x, jnp.transpose(w, (2, 1, 0)), 1, 0),
        *((8, 24), (16, 3, 24), BF16, 0),
    ),
    "an algorithm": (
        lambda x, w: contracted(
            x, w.T, 1, 0, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
            preferred_element_type=F32,
        ),
        *((8, 24), (16, 24), F32, 0),
    ),
}  # fmt: skip


def names(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from names(inner)


@pytest.mark.parametrize("case", READ)
def test_which_products_read_through_transposes(case):
    f, x, w, dtype, products = READ[case]
    x, w = array(*x, dtype=dtype), array(*w, dtype=dtype, seed=1)
    closed = jax.make_jaxpr(f)(x, w)
    found, changed = products_as_they_lie(closed)
    assert changed == products
    before, after = ([*names(j.jaxpr)].count("transpose") for j in (closed, found))
    assert (after < before) == (products > 0 and case != "read elsewhere")
    assert products > 0 or found is closed
    if case != "an algorithm":  # which CPUs do not have
        close(jax.jit(jaxpr_as_fun(found))(x, w), jax.jit(f)(x, w))


CALLS = {
    "convert": pytest.param(matrix, 64, BF16, "convert", marks=needs_writes),
    "transpose": pytest.param(by_rows, 1, F32, "transpose"),
}


@pytest.mark.parametrize("f, rows, dtype, moved", CALLS.values(), ids=CALLS)
def test_optimize_layout_has_xla_read_weights_as_they_lie(f, rows, dtype, moved):
    x, w = array(rows, 256, dtype=dtype), array(256, 256, dtype=dtype, seed=1)
    optimized = jl.optimize_layout(f)
    with choices.forced("lax"):
        report = optimized.layout_report(x, w)
        assert report.products == 1 and not report.optimized
        ours, theirs = (compiled(g, x, w) for g in (optimized, f))
    assert count(moved, ours) == 0 < count(moved, theirs)
    close(optimized(x, w), f(x, w))
    gradient = jax.grad(lambda w, g: g(x, w).astype(F32).sum())
    close(gradient(w, optimized), gradient(w, f))


def test_formatted_arrays_reach_a_program_that_keeps_its_order():
    x, w = array(8, 24, dtype=BF16), array(16, 24, dtype=BF16, seed=1)
    image = array(2, 3, 4, 4)
    f = lambda image, x, w: (image + 1, x @ w.T)  # noqa: E731
    last = jl.with_memory_format(image, jl.channels_last)
    with choices.forced("lax"):
        close(jl.optimize_layout(f)(last, x, w), f(image, x, w))


@needs_kernels
@pytest.mark.parametrize("f, rows, dtype, moved", CALLS.values(), ids=CALLS)
def test_install_has_xla_read_weights_as_they_lie(f, rows, dtype, moved, monkeypatch):
    x, w = array(rows, 256, dtype=dtype), array(256, 256, dtype=dtype, seed=1)
    monkeypatch.setattr(choices, "choose", lambda *_: None)

    def moves(operators):
        with jl.installed(operators):
            return count(moved, compiled(lambda x, w: f(x, w), x, w))

    assert moves(None) == 0 < moves(["transpose"]) == moves(())


@needs_kernels
@pytest.mark.parametrize("rows, dtype, moved", [
    pytest.param(64, BF16, "convert", marks=needs_writes),
    pytest.param(1, F32, "transpose", marks=needs_writes),
])  # fmt: skip
def test_ours_has_xla_read_weights_as_they_lie(rows, dtype, moved, monkeypatch):
    x, w = array(rows, 256, dtype=dtype), array(256, 256, dtype=dtype, seed=1)
    monkeypatch.setattr(choices, "choose", lambda *_: None)
    assert count(moved, compiled(lambda x, w: jl.matmul(x, w.T), x, w)) == 0
    assert count(moved, compiled(lambda x, w: jnp.matmul(x, w.T), x, w)) > 0
    looped = lambda x, w: lax.fori_loop(0, 3, lambda _, h: jl.matmul(h, w.T), x)  # noqa: E731
    plain = lambda x, w: lax.fori_loop(0, 3, lambda _, h: h @ w.T, x)  # noqa: E731
    ours, theirs = (count(moved, compiled(f, x, w)) for f in (looped, plain))
    assert ours == theirs


# What a step computes of some numbers beside a product of one row.
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA compiles loops otherwise"
)
@pytest.mark.parametrize("beside, dtype", [
    (lambda z: z[0], F32),
    (jnp.sum, F32),
    (lambda z: jnp.sum(z[:2048]), F32),
    (lambda z: jnp.sum(z, dtype=z.dtype), BF16),
    (jnp.prod, F32),
    (jnp.max, BF16),
    (jnp.min, F32),
    (jnp.max, jnp.int32),
    (jnp.max, jnp.int8),
    (jnp.min, jnp.uint8),
    (lambda z: jnp.sum(z, dtype=z.dtype), jnp.int8),
    (jnp.sort, F32),
    (lambda z: jax.nn.softmax(z)[0], F32),
    (lambda z: (z[:64].reshape(8, 8) @ z[64:128].reshape(8, 8))[0], F32),
])  # fmt: skip
def test_xla_compiles_a_loop_to_one_function_where_it_calls_none(beside, dtype):
    def f(x, w, z):
        def step(carry, z):
            x, y = carry
            return (jnp.tanh(x @ w.T), y + jnp.ravel(beside(z))[0].astype(F32)), None

        return lax.scan(step, (x, jnp.zeros((), F32)), z)[0]

    avals = [jax.ShapeDtypeStruct(*a) for a in (
        ((1, 32), F32), ((32, 32), F32), ((3, 1 << 14), dtype)
    )]  # fmt: skip
    (loop,) = [e for e in jax.make_jaxpr(f)(*avals).eqns if e.primitive.name == "scan"]
    is_one_function = "small_call" in compiled(f, *avals)
    assert calls_libraries(loop.params["jaxpr"].jaxpr) != is_one_function
