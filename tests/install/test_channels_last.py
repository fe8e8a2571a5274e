# SPDX-License-Identifier: Apache-2.0
"""Programs whose convolutions are channels-first, laid out while they are lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import jax_layout as jl
import nets
from hlo import count
from jax_layout import _backends
from jax_layout.optimize.program import holds_channels_first

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the CPU backend is not built"
)
rng = np.random.default_rng(0)
X = rng.standard_normal((2, 8, 12, 12)).astype(np.float32)
W = rng.standard_normal((8, 8, 3, 3)).astype(np.float32) / 9


def conv(x, w, **options):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", **options)


def scanned(w, x):
    def turn(c, _):
        y = jnp.tanh(conv(c, w))
        return y, y.mean((2, 3))

    return lax.scan(turn, x, None, length=4)


def looped(w, x):
    def turn(state):
        i, c = state
        return i + 1, jax.nn.relu(conv(c, w))

    return lax.while_loop(lambda state: state[0] < 3, turn, (0, x))[1]


def volumes(w, x):
    y = lax.conv_general_dilated(x[:, :, None], w[:, :, None], (1, 1, 1), "SAME")
    return jax.nn.relu(y).sum((2, 3, 4))


def signals(w, x):
    y = lax.conv_general_dilated(x[:, :, 0], w[:, :, 0], (1,), "SAME")
    return jax.nn.silu(y).mean(2)


def checkpointed(w, x):
    block = jax.checkpoint(lambda x: jnp.tanh(conv(x, w)))
    return block(block(x)).sum((2, 3))


def chosen(w, x):
    y = jax.nn.relu(conv(x, w))
    return lax.cond(y.mean() > 0, lambda y: conv(y, w), lambda y: y, y).sum((2, 3))


def lowered(f, *args):
    """Its text, and the record, with kernels installed."""
    with jl.installed() as record:
        return jax.jit(lambda *args: f(*args)).lower(*args), record


def check(f, *args):
    """A function and its gradient are what they are without kernels; gives both."""

    def loss(*args):
        leaves = jax.tree.leaves(f(*args))
        return sum((leaf.astype(jnp.float32) ** 2).sum() for leaf in leaves)

    for function in (f, jax.grad(loss)):
        expected = jax.jit(function)(*args)
        program, record = lowered(function, *args)
        found = program.compile()(*args)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert a.dtype == b.dtype
            scale = max(1.0, float(jnp.abs(b).max()))
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * scale)
        if function is f:
            forward = record.by_primitive().get("layout")
    return forward


@pytest.mark.parametrize(
    "f",
    [scanned, looped, volumes, signals, checkpointed, chosen],
    ids=lambda f: f.__name__,
)
def test_results_and_gradients(f):
    if f is looped:  # jax has no gradient of it
        expected = jax.jit(f)(W, X)
        with jl.installed() as record:
            found = jax.jit(lambda w, x: f(w, x))(W, X)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        row = record.by_primitive()["layout"]
    else:
        row = check(f, W, X)
    assert row["ours"] == 1
    assert row["kept_bytes"] > 0


@pytest.mark.parametrize("net", [nets.tiny_resnet, nets.mobilenet, nets.unet])
def test_networks(net):
    x = jnp.asarray(rng.standard_normal((2, 3, 16, 16)), jnp.float32)
    params = nets.make(net, x)
    assert check(net, params, x)["kept_bytes"] > 0


@pytest.mark.parametrize("f", [scanned, looped], ids=lambda f: f.__name__)
def test_a_carry_stays_channels_last(f):
    program, _ = lowered(f, W, X)
    (loop,) = [
        line for line in program.compile().as_text().splitlines() if " while(" in line
    ]
    assert "f32[2,12,12,8]" in loop
    assert "f32[2,8,12,12]" not in loop


def test_what_is_between_convolutions_is_not_moved():
    def f(w, x):
        for _ in range(5):
            x = jax.nn.relu(conv(x, w) + 1)
        return x.mean((2, 3))

    program, _ = lowered(f, W, X)
    assert count("transpose", program.as_text()) <= 1
    _, record = lowered(f, W, X)
    moved = 2 * X.nbytes
    assert record.by_primitive()["layout"]["kept_bytes"] == 5 * 2 * moved - moved


@pytest.mark.parametrize(
    "f",
    [
        lambda w, x: conv(x, w),  # as much is moved before and behind it
        lambda w, x: conv(x, w[:, :1], feature_group_count=8),  # which reads any order
        lambda w, x: conv(
            conv(x, w, dimension_numbers=("NHWC", "OIHW", "NHWC")),
            w,
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        ),
    ],
    ids=["one", "depthwise", "channels last"],
)
def test_what_gains_nothing_stays_as_it_is(f):
    x = np.moveaxis(X, 1, -1) if "NHWC" in f.__code__.co_consts.__repr__() else X
    _, record = lowered(f, W, x)
    assert "layout" not in record.by_primitive()


@pytest.mark.parametrize("out", [1, 8])
@pytest.mark.parametrize("channels", [1, 8])
def test_of_one_channel_both_orders_are_the_same(channels, out):
    """Such programs are not planned: that would take longer than to lower them."""

    def f(x, w):
        return jax.lax.map(lambda y: conv(y, w), x[None])

    jaxpr = jax.make_jaxpr(f)(X[:, :channels], W[:out, :channels]).jaxpr
    assert holds_channels_first(jaxpr) == ((channels, out) != (1, 1))


def test_what_tells_xla_more_stays_as_it_is():
    def f(w, x):
        with set_xla_metadata(mine="yes"):
            y = jnp.tanh(x)
        return conv(conv(y, w), w).sum((2, 3))

    _, record = lowered(f, W, X)
    assert "layout" not in record.by_primitive()


def test_donated_and_named_arguments_stay_in_their_places():
    def step(params, x, *, scale):
        y = jax.nn.relu(conv(x, params["w"]))
        return {"w": params["w"] - scale * y.mean()}, conv(y, params["w"])

    def run():
        f = jax.jit(step, donate_argnames=("x",))
        return f({"w": jnp.asarray(W)}, x=jnp.asarray(X), scale=0.5)

    expected = run()
    with jl.installed() as record:
        found = run()
    assert record.by_primitive()["layout"]["ours"] == 1
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_only_where_convolutions_are_asked_for():
    with jl.installed(["dot_general"]) as record:
        jax.jit(lambda w, x: scanned(w, x)).lower(W, X)
    assert "layout" not in record.by_primitive()


def test_half_and_double_precision():
    for dtype in (jnp.bfloat16, jnp.float16):
        w, x = jnp.asarray(W, dtype), jnp.asarray(X, dtype)
        with jl.installed() as record:
            found = jax.jit(lambda w, x: scanned(w, x))(w, x)
        assert record.by_primitive()["layout"]["ours"] == 1
        expected = scanned(jnp.float32(w), jnp.float32(x))
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(jnp.float32(a), b, rtol=0.05, atol=0.05)
    with jax.enable_x64(True):
        w, x = np.float64(W), np.float64(X)
        with jl.installed():
            found = jax.jit(lambda w, x: scanned(w, x))(w, x)
        expected = jax.jit(scanned)(w, x)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
