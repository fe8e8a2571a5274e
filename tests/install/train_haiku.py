# SPDX-License-Identifier: Apache-2.0
"""A ConvNet of Haiku learns, NCHW, with an embedding and a scan in it."""

import argparse

import haiku as hk
import jax
import jax.numpy as jnp
import optax


def network(images, words):
    x = images
    for channels in (8, 16):
        x = jax.nn.relu(hk.Conv2D(channels, 3, data_format="NCHW")(x))
    core = hk.LSTM(32)
    rows = x.mean(2).transpose(2, 0, 1)
    _, state = hk.dynamic_unroll(core, rows, core.initial_state(rows.shape[1]))
    words = hk.Embed(50, 32)(words).mean(1)
    return hk.Linear(10)(state.hidden + words)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    net = hk.without_apply_rng(hk.transform(network))
    key = jax.random.key(0)
    images = jax.random.normal(key, (16, 3, 16, 16))
    words = jax.random.randint(key, (16, 5), 0, 50)
    labels = jnp.arange(16) % 10
    params = net.init(key, images, words)
    optimiser = optax.adam(1e-2)

    def loss(params):
        logits = net.apply(params, images, words)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    state = optimiser.init(params)
    for i in range(options.steps):
        params, state, value = step(params, state)
        print(f"step {i} loss {value:.6f}")


if __name__ == "__main__":
    main()
