# SPDX-License-Identifier: Apache-2.0
"""Products are those of plain jax, or ours where these are chosen; nothing is moved."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from hlo import compiled, count, kernels
from jax_layout import _backends, choices
from jax_layout.measured import Table, Work
from jax_layout.tune.table import text

needs_kernels = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the extension module is missing"
)


def normal(*shape, dtype=np.float32, seed=0):
    values = np.random.default_rng(seed).normal(size=shape) / math.sqrt(shape[-1])
    return jnp.asarray(values, dtype)


def primitives(jaxpr, found=None):
    """How often each is in a jaxpr, in all its jaxprs; of moves those of arrays."""
    found = collections.Counter() if found is None else found
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if (
            name not in ("permute", "transpose")
            or sum(n > 1 for n in eqn.invars[0].aval.shape) > 1
        ):
            found[name] += 1
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                primitives(inner, found)
    return found


def moves(f, *args):
    """Permutes and transposes of a function, which computes what it did before."""
    optimized = jl.optimize_layout(f)
    close(jax.jit(optimized)(*args), jax.jit(f)(*args))
    found = primitives(jax.make_jaxpr(optimized)(*args).jaxpr)
    return found["permute"] + found["transpose"]


def close(ours, theirs):
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        scale = float(jnp.abs(y).max()) + 1e-6
        tolerance = scale * (2e-2 if x.dtype == jnp.bfloat16 else 1e-5)
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=0, atol=tolerance
        )


# --- programs


def attention(p, x, heads=4):
    b, t, d = x.shape
    q, k, v = (
        (x @ w).reshape(b, t, heads, d // heads).transpose(0, 2, 1, 3) for w in p["qkv"]
    )
    weights = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / math.sqrt(d // heads))
    return x + (weights @ v).transpose(0, 2, 1, 3).reshape(b, t, d) @ p["o"]


def mlp(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["up"].T


def lstm(p, x):
    def turn(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ p["up"] + h @ p["up"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros_like(x[0])
    return lax.scan(turn, (zeros, zeros), x)[1]


def gradient_of(f):
    return jax.grad(lambda p, x: (f(p, x) ** 2).sum())


WEIGHTS = {
    "qkv": [normal(64, 64, seed=i) for i in range(3)],
    "o": normal(64, 64, seed=3),
    "up": normal(64, 256, seed=4),
}
X = normal(2, 32, 64, seed=5)
PROGRAMS = {
    f"{f.__name__}{kind}": g
    for f in (attention, mlp, lstm)
    for kind, g in (("", f), ("-gradient", gradient_of(f)))
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_of_xla_cost_nothing(name):
    """What runs plain is plain jax's program, fusion for fusion."""
    f = PROGRAMS[name]
    optimized = jl.optimize_layout(f)
    with choices.forced("lax"):
        assert not optimized.layout_report(WEIGHTS, X).optimized
        ours, theirs = (
            collections.Counter(
                {
                    opcode: count(opcode, hlo)
                    for opcode in ("fusion", "dot", "transpose", "copy", "custom-call")
                }
            )
            for hlo in (compiled(g, WEIGHTS, X) for g in (optimized, f))
        )
    assert ours == theirs


@needs_kernels
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_of_ours_move_nothing(name):
    """Row-major or not, each product is ours; and writes the order that is wanted."""
    f = PROGRAMS[name]
    assert moves(f, WEIGHTS, X) == 0
    found = primitives(jax.make_jaxpr(jl.optimize_layout(f))(WEIGHTS, X).jaxpr)
    assert found["gemm"] and not found["dot_general"]
    assert jl.optimize_layout(f).layout_report(WEIGHTS, X).optimized


@needs_kernels
def test_products_beside_one_of_ours_stay_as_they_are(monkeypatch):
    """One product that is ours does not change the others."""

    def one(work, methods=choices.OURS, passes=1, gain=1.0):
        return methods[0] if work.case[:4] == "gemm" and 256 in work.sizes else None

    monkeypatch.setattr(choices, "choose", one)

    def f(p, x):
        return mlp(p, attention(p, x))

    optimized = jl.optimize_layout(f)
    ours, theirs = (compiled(g, WEIGHTS, X) for g in (optimized, f))
    assert kernels(ours) == 2 and count("dot", theirs) - count("dot", ours) == 2
    assert count("transpose", ours) == count("transpose", theirs)
    assert count("fusion", ours) <= count("fusion", theirs)
    close(jax.jit(optimized)(WEIGHTS, X), jax.jit(f)(WEIGHTS, X))


@needs_kernels
@pytest.mark.parametrize(
    "rows, where, ours",
    [(2, "loop", 0), (2, "", 1), (8, "loop", 1), (2, "loop of large ones", 1)],
)
def test_products_of_few_rows_in_a_loop_go_together(rows, where, ours, monkeypatch):
    def one(work, methods=choices.OURS, passes=1, gain=1.0):
        return methods[0] if work.sizes[1:3] == (96, 64) else None

    monkeypatch.setattr(choices, "choose", one)
    if where == "loop of large ones":
        monkeypatch.setattr(choices, "level2_bytes", lambda: 4 * 96 * 64)

    def f(x, w, v):
        step = lambda h, _: (jnp.tanh(h @ w.T) @ v, None)  # noqa: E731
        return lax.scan(step, x, None, length=3)[0] if where else step(x, None)[0]

    args = normal(rows, 64), normal(96, 64, seed=1), normal(96, 64, seed=2)
    optimized = jl.optimize_layout(f)
    assert kernels(compiled(optimized, *args)) == ours
    close(jax.jit(optimized)(*args), jax.jit(f)(*args))


@needs_kernels
def test_the_gradient_of_a_loops_weights_is_written_in_their_order():
    def loss(w, x):
        turn = lambda c, x: (jnp.tanh(x @ w + c), None)  # noqa: E731
        return lax.scan(turn, jnp.zeros((16, 64)), x)[0].sum()

    assert moves(jax.grad(loss), normal(64, 64), normal(5, 16, 64)) == 0


@needs_kernels
@pytest.mark.parametrize("kind", ["dot_general", "einsum", "linear"])
def test_products_of_ours_read_through_transposes(kind):
    def f(x, w):
        if kind == "dot_general":
            return jl.dot_general(x, w.T, (((1,), (0,)), ((), ())))
        if kind == "einsum":
            return jl.einsum("mk,kn->nm", x, w.T).T
        return jl.linear(x.T, w.T.T, jnp.ones(len(w)), activation="gelu")

    x = normal(64, 16) if kind == "linear" else normal(16, 64)
    w = normal(96, 64)
    assert moves(f, x, w) == 0
    report = jl.optimize_layout(f).layout_report(x, w)
    assert report.planned_bytes == 0 and report.original_bytes >= 2 * x.nbytes
    assert report.optimized


# --- caches


def test_axes_of_size_1_have_no_order():
    """A cache that something of one row is written to is large, and stays."""

    def f(cache, q):
        k = q.transpose(0, 2, 1, 3).reshape(8, 1, 96).reshape(8, 1, 12, 8)
        u = lax.dynamic_update_slice(cache, k, (0, 3, 0, 0))
        return jnp.einsum("bqhd,bkhd->bhqk", q.transpose(0, 2, 1, 3), u), u

    args = normal(8, 32, 12, 8), normal(8, 12, 1, 8)
    assert moves(f, *args) == 0
    assert jl.optimize_layout(f).layout_report(*args).planned_bytes == 0


@pytest.mark.parametrize("kind", ["update", "concatenate", "scan"])
def test_caches_stay_in_their_format(kind):
    """What is written to them follows, not they."""
    cache, new = normal(2, 4, 64, 8), normal(2, 5, 4, 8)

    def attend(u):
        return jnp.einsum("bhqd,bhkd->bhqk", u[:, :, :2], u)

    def f(cache, new):
        rows = new.transpose(0, 2, 1, 3)
        if kind == "update":
            return attend(lax.dynamic_update_slice(cache, rows, (0, 0, 7, 0)))
        if kind == "concatenate":
            return attend(jnp.concatenate([cache, rows], 2))

        def turn(cache, i):
            cache = lax.dynamic_update_slice(
                cache, (rows * i).swapaxes(1, 2).swapaxes(1, 2), (0, 0, 5 * i, 0)
            )
            return cache, attend(cache).sum()

        return lax.scan(turn, cache, jnp.arange(3))

    optimized = jl.optimize_layout(f)
    close(jax.jit(optimized)(cache, new), jax.jit(f)(cache, new))
    jaxpr = jax.make_jaxpr(optimized)(cache, new)

    def largest(jaxpr):
        sizes = [0]
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("permute", "transpose"):
                sizes.append(eqn.invars[0].aval.size)
            if "jaxpr" in eqn.params:
                sizes.append(largest(eqn.params["jaxpr"].jaxpr))
        return max(sizes)

    assert largest(jaxpr.jaxpr) <= new.size


# --- what the report says


def test_a_function_that_is_left_alone_says_so():
    w, x = normal(16, 32), normal(8, 32)
    programs = [
        lambda x, w: jnp.sin(x) + 1,
        lambda x, w: x @ w.T,  # XLA reads w as it is,
        lambda x, w: (w @ x.T).T,  # writes what is wanted,
        lambda x, w: jnp.sin(x).T.sum(1),  # and fuses these
        lambda x, w: lax.sort(x.T).T,  # its own on both sides
    ]
    for f in programs:
        optimized = jl.optimize_layout(f)
        with choices.forced("lax"):
            report = optimized.layout_report(x, w)
            assert not report.optimized
            assert str(jax.make_jaxpr(optimized)(x, w)) == str(jax.make_jaxpr(f)(x, w))
        if f is not programs[-1]:
            assert report.original_bytes == 0


def test_no_gain_is_no_plan():
    """One convolution of ours between transposes: as many bytes either way."""
    w, x = normal(8, 8, 3, 3), normal(2, 8, 6, 6)
    f = jl.optimize_layout(lambda x: jl.conv(x, w, padding=1))
    report = f.layout_report(x)
    assert not report.optimized and report.planned_bytes == report.original_bytes > 0


@needs_kernels
def test_attention_is_xlas_where_its_fusion_is_chosen(monkeypatch):
    """Both products around a softmax stay; those before and behind are ours."""
    choose = choices.choose

    def but_attention(work, methods=choices.OURS, passes=1, gain=1.0):
        return None if work.case.startswith("attention ") else choose(work, methods)

    monkeypatch.setattr(choices, "choose", but_attention)
    monkeypatch.setattr(choices, "profile", lambda: "avx512")
    optimized = jl.optimize_layout(attention)
    found = primitives(jax.make_jaxpr(optimized)(WEIGHTS, X).jaxpr)
    assert (found["gemm"], found["dot_general"]) == (4, 2)
    close(jax.jit(optimized)(WEIGHTS, X), jax.jit(attention)(WEIGHTS, X))


def test_policies_of_checkpoints_know_their_products():
    policy = jax.checkpoint_policies.dots_saveable
    f = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w.T), policy=policy)
    g = jl.optimize_layout(jax.grad(lambda w, x: f(w, x).sum()))
    w, x = normal(32, 32), normal(8, 32)
    expected = jax.grad(lambda w, x: f(w, x).sum())(w, x)
    close(jax.jit(g)(w, x), expected)
    saved = [e for e in jax.make_jaxpr(g)(w, x).eqns if "policy" in e.params]
    assert all(e.params["policy"] is policy for e in saved)


@needs_kernels
def test_a_weight_of_few_rows_is_not_moved_for_a_faster_product(monkeypatch):
    """GPT-2 has them transposed: XLA reads those, a kernel wants them written."""
    ours, theirs = (dict.fromkeys(choices.methods_of("gemm"), r) for r in (3.0, 0.5))
    points = {(1, 512, 384, 1): ours}
    table = Table(
        *("", "", "", 1),
        {"gemm float32 NN": points, "gemm float32 NT": {(1, 512, 384, 1): theirs}},
    )
    monkeypatch.setattr(choices, "_source", lambda: "a test's, of few rows")
    monkeypatch.setattr(choices, "_tables", lambda source: [(source, table)])
    x, w, v = normal(1, 384), normal(512, 384), normal(384, 512)

    def f(x, w, v):
        return x @ w.T, x @ v

    assert moves(f, x, w, v) == 0  # XLA reads it as it lies
    found = primitives(jax.make_jaxpr(jl.optimize_layout(f))(x, w, v).jaxpr)
    assert (found["gemm"], found["dot_general"]) == (1, 1)


@needs_kernels
def test_a_small_product_in_a_loop_has_to_gain_more(tmp_path):
    x, w = normal(64, 64), normal(64, 64, seed=1)

    def once(x):
        return x @ w

    def often(x):
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]

    work = Work("gemm float32 NN", (64, 64, 64, 1))
    for ratio, ours in ((1.2, [1, 0]), (1.4, [1, 1])):
        path = tmp_path / f"{ratio}.json"
        path.write_text(text({work: {"oneDNN": ratio}}))
        jl.use_choices(path)
        try:
            jaxprs = [jax.make_jaxpr(jl.optimize_layout(f))(x) for f in (once, often)]
        finally:
            jl.use_choices(None)
        assert [primitives(jaxpr.jaxpr)["gemm"] for jaxpr in jaxprs] == ours
