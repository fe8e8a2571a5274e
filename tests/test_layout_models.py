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


def check(f, *args):
    optimized = jl.optimize_layout(f)
    ours, theirs = (jax.tree.leaves(jax.jit(g)(*args)) for g in (optimized, f))
    scale = max(float(jnp.abs(y).max()) for y in theirs)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-3 * scale)
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


def test_haiku():
    hk = pytest.importorskip("haiku", reason="pip install jax-layout[models]")
    net = hk.transform_with_state(lambda x: hk.nets.ResNet18(10)(x, is_training=True))
    x = X.transpose(0, 2, 3, 1)
    params, state = net.init(jax.random.key(0), x)
    f = functools.partial(lambda s, p, x: net.apply(p, s, None, x)[0], state)
    assert check(f, params, x).optimized


@pytest.mark.parametrize("name", ["ResNet50", "MobileNetV2", "EfficientNetB0"])
def test_keras(name):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="pip install jax-layout[models]")
    if keras.backend.backend() != "jax":
        pytest.skip("keras runs on another backend")
    keras.config.set_image_data_format("channels_first")
    net = getattr(keras.applications, name)(weights=None, input_shape=(3, 64, 64))
    values = [
        [v.value for v in group]
        for group in (net.trainable_variables, net.non_trainable_variables)
    ]

    def f(values, x):
        return net.stateless_call(*values, x)[0]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 64, 64)), jnp.float32)
    assert check(f, values, x).optimized
