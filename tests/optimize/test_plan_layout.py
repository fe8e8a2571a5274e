# SPDX-License-Identifier: Apache-2.0
"""Arguments that are laid out once."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from hlo import compiled
from jax_layout import _backends
from nets import make, tiny_resnet

X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 16, 16)), jnp.float32)
PARAMS = make(tiny_resnet, X)


def loss(p, x):
    return (tiny_resnet(p, x) ** 2).sum()


def step(p, x):
    """Of gradient descent."""
    value, g = jax.value_and_grad(loss)(p, x)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, p, g), value


def close(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        scale = max(float(jnp.abs(y).max()), 1.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-4 * scale)


def permutes(f, *args):
    """Whole arrays that a function re-orders on each call."""
    return str(jax.make_jaxpr(f)(*args)).count(" permute[")


def test_weights_are_laid_out_once():
    plan = jl.plan_layout(tiny_resnet, PARAMS, X)
    weights = [f"[0]['{name}']" for name, w in PARAMS.items() if w.ndim == 4]
    assert {path for path, f in plan.formats.items() if f.ndim == 4} == {
        *weights,
        "[1]",
    }
    laid, x = plan.params(PARAMS), plan.params(X, argnum=1)
    assert laid["c0"].format == plan.formats["[0]['c0']"]
    assert laid["c0"].shape == PARAMS["c0"].shape
    close(plan.jit()(laid, x), jax.jit(tiny_resnet)(PARAMS, X))
    close(plan.jit()(PARAMS, X), jax.jit(tiny_resnet)(PARAMS, X))
    close(plan.logical(laid), PARAMS)
    assert permutes(plan.jit(), laid, x) == 0
    assert permutes(plan.jit(), PARAMS, X) > 5
    assert plan.report.planned_bytes == 0 and plan.report.optimized
    again = plan.params(laid)  # what is laid out stays
    assert again["c0"] is laid["c0"]


def test_training_stays_in_the_plans_formats():
    plan = jl.plan_layout(step, PARAMS, X)
    run = plan.jit(donate_argnums=0)
    p = jax.tree.map(jnp.copy, PARAMS)  # the arrays that stay as they are go
    laid = plan.params(jax.tree.map(jnp.copy, PARAMS))
    assert laid["c0"].physical.shape == (3, 3, 3, 16)
    for _ in range(2):
        formats = jax.tree.structure(laid)
        laid, value = run(laid, X)
        p, expected = jax.jit(step)(p, X)
        assert jax.tree.structure(laid) == formats
    close(value, expected)
    close(plan.logical(laid), p)


def test_derivatives_of_a_planned_function():
    plan = jl.plan_layout(loss, PARAMS, X)
    laid = plan.params(PARAMS)
    g = jax.jit(jax.grad(plan.jit()))(laid, X)
    close(plan.logical(g), jax.jit(jax.grad(loss))(PARAMS, X))
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, laid, g)
    assert jax.tree.structure(moved) == jax.tree.structure(laid)


def two_layers(p, x):
    """One convolution of jax's with HWIO weights, one of ours, with bias and relu."""
    y = lax.conv_general_dilated(
        x, p["jax"], (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW")
    )
    return jl.conv(y, p["ours"], p["bias"], padding=1, activation="relu").mean((2, 3))


def weights(x=(2, 16, 9, 8), channels=32):
    rng = np.random.default_rng(2)
    shapes = {
        "jax": (3, 3, x[1], channels),
        "ours": (channels, channels, 3, 3),
        "bias": (channels,),
    }
    p = {k: jnp.asarray(rng.normal(size=s) / 9, jnp.float32) for k, s in shapes.items()}
    return p, jnp.asarray(rng.normal(size=x), jnp.float32)


def blocked(plan):
    return {path for path, f in plan.formats.items() if f.permutation is None}


def packs():
    p, x = weights()
    return jl.conv_weight_format(x, p["ours"][:, :16]).permutation is None


needs_blocks = pytest.mark.skipif(
    not _backends.available("cpu") or not packs(),
    reason="oneDNN is missing, or has no order of its own on this machine",
)


@needs_blocks
def test_weights_of_a_forward_pass_are_in_the_kernels_own_order():
    p, x = weights()
    plan = jl.plan_layout(two_layers, p, x)
    assert blocked(plan) == {"[0]['jax']", "[0]['ours']"}
    laid = plan.params(p)
    jaxpr = str(jax.make_jaxpr(plan.jit())(laid, x))
    assert jaxpr.count("conv_packed[") == 2
    hlo = compiled(plan.jit(), laid, x)
    assert hlo.count('"jax_layout_conv"') == 2 and 'w_format = ""' not in hlo
    said = str(jl.explain(plan.jit())(laid, x))
    for name in re.findall('w_format = "(.*?)"', hlo):
        assert f"w {name} 32x" in said
    close(plan.jit()(laid, x), two_layers(p, x))
    close(plan.jit()(p, x), two_layers(p, x))
    close(plan.logical(laid), p)
    # Another batch may have another kernel, which reads the weights all the same.
    for n in (1, 64):
        other = jnp.concatenate([x] * 32)[:n]
        close(plan.jit()(laid, other), two_layers(p, other))
    loaded = jl.load_plan(plan.to_json(), two_layers, p, x)
    assert loaded.arguments == plan.arguments
    g = jax.grad(lambda p: plan.jit()(p, x).sum())(laid)
    close(plan.logical(g), jax.grad(lambda p: two_layers(p, x).sum())(p))


def test_other_weights_keep_an_order_of_their_axes():
    p, x = weights()

    def twice(p, x):
        y = two_layers(p, x)
        return y + jl.conv(x, p["ours"][:, :16]).mean((2, 3))

    def scanned(p, x):
        turn = lambda y, _: (jl.conv(y, p["ours"], padding=1), None)  # noqa: E731
        return lax.scan(turn, jnp.concatenate([x, x], 1), None, length=2)[0]

    gradient = jax.grad(lambda p, x: two_layers(p, x).sum())
    plan = jl.plan_layout(gradient, p, x)
    assert not blocked(plan)
    assert "[0]['ours']" not in blocked(jl.plan_layout(twice, p, x))
    assert not blocked(jl.plan_layout(scanned, p, x))


@needs_blocks
def test_packed_weights_are_no_barrier():
    p, x = weights((2, 32, 9, 8))
    format = jl.conv_weight_format(x, p["ours"], padding=1)
    packed = jl.FormattedArray.pack(p["ours"], format)

    def f(x, w):
        y = lax.conv_general_dilated(x, p["ours"], (1, 1), "SAME")
        return jl.conv(y, w, padding=1)

    g = jl.optimize_layout(f)
    close(g(x, packed), f(x, p["ours"]))
    assert permutes(g, x, packed) == 2  # in and out
    assert g.layout_report(x, packed).barriers == {}


def test_a_formatted_array_is_its_logical_array():
    x = jl.FormattedArray(
        jl.MemoryFormat.named("NHWC").pack(X), jl.MemoryFormat.named("NHWC")
    )
    assert (x.shape, x.ndim, x.dtype) == (X.shape, 4, X.dtype)
    np.testing.assert_array_equal(jnp.sin(x), jnp.sin(X))


def test_plans_are_saved_and_loaded(tmp_path):
    plan = jl.plan_layout(step, PARAMS, X)
    plan.save(tmp_path / "plan.json")
    shapes = jax.eval_shape(lambda: (PARAMS, X))
    loaded = jl.load_plan(tmp_path / "plan.json", step, *shapes)
    assert loaded.arguments == plan.arguments and loaded.results == plan.results
    laid = loaded.params(PARAMS)
    close(loaded.jit()(laid, X), plan.jit()(laid, X))
    assert json.loads(plan.to_json())["platform"] == "cpu"


def test_a_function_that_gains_nothing_has_a_plan_all_the_same():
    plan = jl.plan_layout(lambda x, n: x * n, X, 2)
    assert plan.formats == {}
    close(plan.jit()(plan.params(X), 2), 2 * X)


def test_pooling_gradients_channels_last():
    """As they are written for a GPU's compiler."""
    from jax_layout.optimize.saved_plan import _windows_last

    def f(x, scale):
        def turn(c, _):
            y = lax.reduce_window(
                c,
                -jnp.inf,
                lax.max,
                (1, 1, 3, 2),
                (1, 1, 2, 1),
                ((0, 0),) * 3 + ((1, 0),),
            )
            return c * jax.image.resize(y, c.shape, "nearest"), y.sum() * scale

        return {"sum": lax.scan(turn, x, None, length=2)[1].sum()}

    g = jax.grad(lambda x, scale: f(x, scale)["sum"])
    close(jax.jit(_windows_last(g))(X, 2), jax.jit(g)(X, 2))
    hlo = jax.jit(_windows_last(g)).lower(X, 2).as_text()
    assert "window_dimensions = array<i64: 1, 3, 2, 1>" in hlo
    close(_windows_last(f)(X, 2), f(X, 2))


def test_bad_input():
    plan = jl.plan_layout(tiny_resnet, PARAMS, X)
    with pytest.raises(ValueError, match="one of the 2 arguments of the plan, got 2"):
        plan.params(X, argnum=2)
    with pytest.raises(ValueError, match="argument 0 must have the structure"):
        plan.params({"c0": PARAMS["c0"]})
    with pytest.raises(
        ValueError, match=r"\[1\] must have shape \(2, 3, 16, 16\), got"
    ):
        plan.params(X[:1], argnum=1)
    with pytest.raises(ValueError, match="this is no plan"):
        jl.load_plan("{}", tiny_resnet, PARAMS, X)
    with pytest.raises(ValueError, match="version must be 1, got 9"):
        jl.load_plan('{"jax_layout plan": 9}', tiny_resnet, PARAMS, X)
    with pytest.raises(ValueError, match=r"float32\(2, 3, 16, 16\) at '\[1\]', got"):
        jl.load_plan(plan.to_json(), tiny_resnet, PARAMS, X[:1])
    with pytest.raises(TypeError, match="policy is 'auto'"):
        jl.plan_layout(tiny_resnet, PARAMS, X, policy=3)
    with pytest.raises(ValueError, match="plan_layout: platform .* got 'foo'"):
        jl.plan_layout(tiny_resnet, PARAMS, X, platform="foo")
    with pytest.raises(TypeError, match="plan_layout: f must be a function, got 3"):
        jl.plan_layout(3, PARAMS, X)
    with pytest.raises(TypeError, match="load_plan: f must be a function, got 3"):
        jl.load_plan(plan.to_json(), 3, PARAMS, X)
