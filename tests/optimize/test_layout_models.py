# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries, in the formats that are found for them."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16, 16)), jnp.float32)


def close(ours, theirs):
    ours, theirs = (jax.tree.leaves(tree) for tree in (ours, theirs))
    scale = max(float(jnp.abs(y).max()) for y in theirs)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-3 * scale)


def check(f, *args):
    optimized = jl.optimize_layout(f)
    close(*(jax.jit(g)(*args) for g in (optimized, f)))
    return optimized.layout_report(*args)


def test_equinox():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    with jax.enable_x64(False):
        net = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0]),
                eqx.nn.GroupNorm(2, 8),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Conv2d(8, 8, 3, groups=8, key=keys[1]),
                eqx.nn.AdaptiveAvgPool2d(1),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(8, 5, key=keys[2]),
            ]
        )
        params, static = eqx.partition(net, eqx.is_inexact_array)

        def loss(params, x):
            return (jax.vmap(eqx.combine(params, static))(x) ** 2).sum()

        report = check(jax.value_and_grad(loss), params, X)
    assert report.optimized and report.planned_bytes < report.original_bytes


def test_flax():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.relu(linen.BatchNorm(False)(linen.Conv(8, (3, 3))(x)))
            x = linen.avg_pool(linen.Conv(8, (3, 3), 2)(x), (2, 2))
            return linen.Dense(5)(x.mean((1, 2)))

    x = X.transpose(0, 2, 3, 1)
    variables = Net().init(jax.random.key(0), x)

    def loss(params, x):
        rest = {**variables, "params": params}
        return (Net().apply(rest, x, mutable=["batch_stats"])[0] ** 2).sum()

    assert check(jax.value_and_grad(loss), variables["params"], x).optimized


@pytest.mark.parametrize("name", ["ResNet18", "ResNet50"])
def test_haiku(name):
    hk = pytest.importorskip("haiku", reason="pip install jax-layout[models]")
    net = hk.transform_with_state(
        lambda x: getattr(hk.nets, name)(10)(x, is_training=True)
    )
    x = X.transpose(0, 2, 3, 1)
    params, state = net.init(jax.random.key(0), x)

    def forward(params, x):
        return net.apply(params, state, None, x)[0]

    def gradient(params, x):
        return jax.grad(lambda params: (forward(params, x) ** 2).sum())(params)

    # One gradient is enough: they compile for long.
    f = gradient if name == "ResNet18" else forward
    assert check(f, params, x).optimized


@functools.cache
def keras_nets(name):
    """The network channels first and channels last, and its weights."""
    import keras

    keras.utils.set_random_seed(0)
    nets = {}
    before = keras.config.image_data_format()
    for order, shape in (("first", (3, 64, 64)), ("last", (64, 64, 3))):
        keras.config.set_image_data_format(f"channels_{order}")
        nets[order] = getattr(keras.applications, name)(weights=None, input_shape=shape)
    keras.config.set_image_data_format(before)
    # Kernels are HWIO in either.
    nets["first"].set_weights(nets["last"].get_weights())
    groups = nets["last"].trainable_variables, nets["last"].non_trainable_variables
    return nets, *([v.value for v in group] for group in groups)


@pytest.mark.parametrize("name", ["ResNet50", "MobileNetV2", "EfficientNetB0"])
@pytest.mark.parametrize("kind", ["forward", "gradient"])
def test_keras(name, kind):
    """Channels first and last, optimised, are the network channels last as it is."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="pip install jax-layout[models]")
    if keras.backend.backend() != "jax":
        pytest.skip("keras runs on another backend")
    nets, trained, rest = keras_nets(name)

    def function(order):
        def f(trained, x):
            return nets[order].stateless_call(trained, rest, x)[0]

        if kind == "forward":
            return f
        # Of a probability: at rest those of all classes are nearly the same.
        return jax.value_and_grad(lambda trained, x: jnp.log(f(trained, x))[0, 7])

    last = jnp.asarray(
        np.random.default_rng(0).normal(size=(1, 64, 64, 3)), jnp.float32
    )
    expected = jax.jit(function("last"))(trained, last)
    inputs = {"first": last.transpose(0, 3, 1, 2)}
    if kind == "forward":
        inputs["last"] = last
    for order, x in inputs.items():
        optimized = jl.optimize_layout(function(order))
        close(jax.jit(optimized)(trained, x), expected)
        assert optimized.layout_report(trained, x).optimized
