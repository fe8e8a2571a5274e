# SPDX-License-Identifier: Apache-2.0
"""dot, softmax, dot as libraries write it is one call of attention, or left alone."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from hlo import compiled, kernels
from jax_layout import _backends, choices

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the extension module is missing"
)
B, T, S, N, H = 2, 5, 7, 4, 8


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


Q, K, V = normal(B, T, N, H), normal(B, S, N, H, seed=1), normal(B, S, N, H, seed=2)
X = normal(B, T, N * H, seed=3)
MASK = normal(B, 1, T, S, seed=4) > 0
SQUARE = normal(B, 1, T, T, seed=5) > 0
NOTHING = MASK.at[:, :, 1].set(False)  # seen by the second query


def close(found, expected, tolerance=1e-5):
    found, expected = map(jax.tree.leaves, (found, expected))
    wide = [np.asarray(x, np.float64) for x in expected]
    scale = max(np.abs(x).max() for x in wide)
    for x, y in zip(found, wide, strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float64), y, rtol=0, atol=tolerance * scale
        )


def calls(jaxpr):
    """How many calls of attention, forward and backward, and exponentials are left."""
    found = np.zeros(3, int)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        found += [name == "attention", name == "attention_backward", name == "exp"]
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += calls(inner)
    return found


def becomes(f, *args, forward=1, backward=0, left=0, tolerance=1e-5):
    """A function computes what it did, with so many calls, and exponentials left.

    Without a tolerance its numbers are not compared.
    """
    optimized = jl.optimize_layout(f)
    if tolerance is not None:
        close(jax.jit(optimized)(*args), jax.jit(f)(*args), tolerance)
    found = calls(jax.make_jaxpr(optimized)(*args).jaxpr)
    assert found.tolist() == [forward, backward, left]
    assert optimized.layout_report(*args).attentions == forward + backward


def attend(q, k, v, bias=None, mask=None, hidden=-1e30, scale=1.0):
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, hidden)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def heads_first(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    powers = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / H**0.5)
    return (powers @ v).transpose(0, 2, 1, 3)


def loss_of(f):
    return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))


# --- as written by hand, and by jax.nn


@pytest.mark.parametrize("kind", ["", "causal", "grouped", "lengths", "all"])
def test_jax_nn(kind):
    options = {"is_causal": kind in ("causal", "all")}
    operands = [Q, K, V]
    tolerance = 1e-5
    if kind == "grouped":
        operands[1:] = K[:, :, :2], V[:, :, :2]
    if kind == "lengths":
        options["key_value_seq_lengths"] = jnp.array([3, 7], np.int32)
    if kind == "all":
        operands = [x.astype(jnp.bfloat16) for x in operands]
        options |= {"mask": MASK, "bias": normal(1, N, T, S, dtype=jnp.bfloat16)}
        tolerance = 2e-2

    def f(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, **options)

    becomes(f, *operands, tolerance=tolerance)
    if kind in ("", "causal"):
        optimized = jl.optimize_layout(f)
        hlo = compiled(optimized, *operands)
        assert kernels(hlo) == 1 and f"{T},{S}]" not in hlo  # nor is there a mask


FORMS = {
    "heads first": heads_first,
    "mask": lambda q, k, v: attend(q, k, v, mask=MASK),
    "nothing is seen": lambda q, k, v: attend(q, k, v, mask=NOTHING),
    "biased by -1e9": lambda q, k, v: attend(
        100 * q, k, v, bias=jnp.where(NOTHING, 0, -1e9)
    ),
    "biased by -1e38": lambda q, k, v: attend(
        100 * q, k, v, bias=jnp.where(NOTHING, 0, -1e38)
    ),
    "causal, -inf": lambda q, k, v: attend(
        q, k, v, mask=jnp.tril(jnp.ones((T, S), bool)), hidden=-jnp.inf
    ),
    "two masks": lambda q, k, v: attend(
        q, k, v, mask=jnp.tril(jnp.ones((T, S), bool)) & MASK[:, :, :1]
    ),
    "scaled": lambda q, k, v: attend(q / 3, k, v, scale=0.3),
    "one head of keys": lambda q, k, v: jnp.einsum(
        "bnts,bsh->btnh",
        jax.nn.softmax(jnp.einsum("btnh,bsh->bnts", q, k[:, :, 0])),
        v[:, :, 0],
    ),
    "one query": lambda q, k, v: attend(q[:, :1], k, v),
    "batches of batches": lambda q, k, v: jax.vmap(
        lambda q: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    )(jnp.stack([q, 2 * q])),
    "in a loop": lambda q, k, v: jax.lax.scan(
        lambda q, _: (attend(q, k, v), None), q, None, length=2
    )[0],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    becomes(FORMS[form], Q, K, V)


@pytest.mark.parametrize("form", ["heads first", "mask", "nothing is seen", "scaled"])
def test_gradients(form):
    becomes(loss_of(FORMS[form]), Q, K, V, backward=1)


@pytest.mark.parametrize("form", ["heads first", "mask"])
def test_gradients_of_what_is_made_again(form):
    """The backward pass makes the powers, and not what they are multiplied to."""
    again = jax.checkpoint(FORMS[form])
    becomes(loss_of(again), Q, K, V, forward=2, backward=1)


def test_gradients_of_16_bits_and_shared_heads():
    operands = [x.astype(jnp.bfloat16) for x in (Q, K[:, :, :2], V[:, :, :2])]

    def f(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    becomes(loss_of(f), *operands, backward=1, tolerance=3e-2)


ALONE = {
    "powers are a result": lambda q, k, v: (
        (powers := jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))),
        jnp.einsum("bnts,bsnh->btnh", powers, v),
    ),
    "of too low scores": lambda q, k, v: attend(q, k, v, mask=MASK, hidden=-50.0),
    "not a number": lambda q, k, v: attend(q, k, v, mask=MASK, hidden=-jnp.inf),
    "capped": lambda q, k, v: jnp.einsum(
        "bnts,bsnh->btnh",
        jax.nn.softmax(jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k))),
        v,
    ),
    "over queries": lambda q, k, v: jnp.einsum(
        "bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), 2), v
    ),
    "dropout": lambda q, k, v: jnp.einsum(
        "bnts,bsnh->btnh",
        jnp.where(MASK, jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k)), 0) * 2,
        v,
    ),
    "other features": lambda q, k, v: attend(q, k, v[..., :3]),
}


@pytest.mark.parametrize("form", ALONE)
def test_is_left_alone(form):
    becomes(ALONE[form], Q, K, V.at[0].set(0), forward=0, left=1)


LEAST = float(np.finfo(np.float32).min)
PADDED = jnp.tril(jnp.ones((T, T), bool)) & (jnp.arange(T) > 1)  # as words on the left


@pytest.mark.parametrize("hidden", [-1e9, -1e38, LEAST])
@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (jnp.bfloat16, 3e-2)])
def test_gradients_with_a_bias_that_hides(hidden, dtype, tolerance):
    """Equal scores have gradients, whatever they are equal to."""
    hidden = max(hidden, float(jnp.finfo(dtype).min))

    def f(q, k, v, seen):
        return attend(q, k, v, bias=jnp.where(seen, 0, hidden).astype(dtype))

    operands = [x.astype(dtype) for x in (Q, K[:, :T], V[:, :T])]
    words = jnp.ones((B, 1, 1, T), bool).at[0].set(False)  # one of them has none
    for seen in (PADDED, words):
        becomes(loss_of(f), *operands, seen, backward=1, tolerance=tolerance)


BIASES = {
    "of heads": (lambda bias: bias, (1, N, T, S)),
    "of all": (lambda bias: bias, (B, N, T, S)),
    "of distances": (lambda bias: bias[..., 0], (T, S, 2)),
    "of keys, one each": (lambda bias: bias[:, None, None], (B, S)),
    "of heads and words": (
        lambda bias: bias + jnp.where(MASK[:, :, :1], 0, -1e10).astype(bias.dtype),
        (1, N, T, S),
    ),
    "behind a mask": (lambda bias: bias, (N, 1, 1)),
}


@pytest.mark.parametrize("form", BIASES)
def test_gradients_of_a_bias(form):
    of, shape = BIASES[form]
    mask = MASK if form == "behind a mask" else None

    def loss(q, k, v, bias):
        return (attend(q, k, v, of(bias), mask, scale=0.3) ** 2).sum()

    gradients = jax.grad(loss, (0, 1, 2, 3))
    becomes(gradients, Q, K, V, normal(*shape, seed=6), backward=1)
    narrow = [x.astype(jnp.bfloat16) for x in (Q, K, V, normal(*shape, seed=6))]
    becomes(gradients, *narrow, backward=1, tolerance=4e-2)


@pytest.mark.parametrize("what", ["scores", "powers", "bias"])
def test_what_has_no_gradient_keeps_none(what):
    stop = jax.lax.stop_gradient

    def f(q, k, v, bias):
        bias = (stop(bias) if what == "bias" else bias)[..., None, :]
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) + bias
        powers = jax.nn.softmax(stop(scores) if what == "scores" else scores)
        powers = stop(powers) if what == "powers" else powers
        return (jnp.einsum("bnts,bsnh->btnh", powers, v) ** 2).sum()

    args = Q, K, V, normal(1, N, S, seed=9)
    optimized = jl.optimize_layout(f)
    found, expected = (jax.grad(g, (0, 1, 2, 3))(*args) for g in (optimized, f))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * float(abs(y).max()))
    assert optimized.layout_report(*args).attentions == (what == "bias")


def test_gradients_of_a_bias_of_several_layers():
    def loss(q, k, v, bias):
        for _ in range(2):
            q = attend(q, k, v, bias + jnp.where(MASK, 0, -1e10))
        return (q**2).sum()

    gradients = jax.grad(loss, (0, 1, 2, 3))
    becomes(gradients, Q, K, V, normal(1, N, T, S), forward=2, backward=2)


def test_what_else_needs_gradients_of_scores_is_left_alone():
    def loss(q, k, v, factor, bias):  # of a bias and of the scores before it
        scores = factor * jnp.einsum("btnh,bsnh->bnts", q, k) + bias
        return (jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v) ** 2).sum()

    args = (Q, K, V, normal(1, N, 1, 1) ** 2, normal(1, N, T, S, seed=6))
    becomes(jax.grad(loss, (0, 1, 2, 3, 4)), *args, forward=0, left=1)


def test_a_softmax_with_a_derivative_of_its_own():
    with jax.softmax_custom_jvp(True):
        becomes(heads_first, Q, K, V, tolerance=None)
        becomes(loss_of(heads_first), Q, K, V, backward=1)


def test_tables_decide():
    with choices.forced("lax"):
        becomes(heads_first, Q, K, V, forward=0, left=1)


# --- as libraries write it


def becomes_gradient(f, *args):
    """So do its gradients by the weights, whose numbers other tests compare."""
    gradient = jax.grad(lambda *args: (f(*args) ** 2).sum())
    becomes(gradient, *args, backward=1, tolerance=None)


def test_flax():
    linen = pytest.importorskip("flax.linen")
    for dtype, tolerance in ((np.float32, 1e-5), (jnp.bfloat16, None)):
        net = linen.MultiHeadDotProductAttention(N, dtype=dtype)
        params = net.init(jax.random.key(0), X)

        def f(params, x, net=net):
            return net.apply(params, x, mask=SQUARE)

        becomes(f, params, X, tolerance=tolerance)
        becomes_gradient(f, params, X)


def test_equinox():
    eqx = pytest.importorskip("equinox")
    with jax.enable_x64(False):
        net = eqx.nn.MultiheadAttention(N, N * H, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)

    def f(params, x):
        net = eqx.combine(params, static)
        return jax.vmap(lambda x: net(x, x, x, SQUARE[0, 0]))(x)

    becomes(f, params, X)
    becomes_gradient(f, params, X)


def test_haiku():
    hk = pytest.importorskip("haiku", reason="pip install jax-layout[models]")
    draw = hk.initializers.RandomNormal()
    net = hk.without_apply_rng(
        hk.transform(
            lambda x: hk.MultiHeadAttention(N, H, w_init=draw)(x, x, x, SQUARE)
        )
    )
    params = net.init(jax.random.key(0), X)
    becomes(net.apply, params, X)
    becomes_gradient(net.apply, params, X)


def test_keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="pip install jax-layout[models]")
    if keras.backend.backend() != "jax":
        pytest.skip("keras runs on another backend")
    net = keras.layers.MultiHeadAttention(N, H)
    net(X, X)
    weights = [v.value for v in net.trainable_variables]

    def f(weights, x):
        return net.stateless_call(weights, [], x, x, attention_mask=SQUARE[:, 0])[0]

    becomes(f, weights, X)
    becomes_gradient(f, weights, X)


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=11,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=N,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_act="relu",
    )
    net = getattr(transformers, f"Flax{name}Model")(config, _do_init=False)
    words = jax.ShapeDtypeStruct((B, T), np.int32)
    with jax.enable_x64(False):
        params = jax.eval_shape(
            lambda key: net.init_weights(key, (B, T)), jax.random.key(0)
        )

    def f(params, words, seen=None):
        return net(words, seen, params=params).last_hidden_state

    becomes(f, params, words, words, tolerance=None)
    becomes_gradient(f, params, words)
    becomes_gradient(f, params, words, words)
