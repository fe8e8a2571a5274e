# SPDX-License-Identifier: Apache-2.0
"""A small network of Flax learns, as Flax's own examples are written."""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, kernel_size=(3, 3))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape((x.shape[0], -1))))
        return nn.Dense(10)(x)


@jax.jit
def train_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        one_hot = jax.nn.one_hot(labels, 10)
        return optax.softmax_cross_entropy(logits, one_hot).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    key = jax.random.key(0)
    images = jax.random.normal(key, (32, 28, 28, 1))
    labels = jnp.arange(32) % 10
    cnn = CNN()
    state = train_state.TrainState.create(
        apply_fn=cnn.apply,
        params=cnn.init(key, images)["params"],
        tx=optax.sgd(0.1, momentum=0.9),
    )
    for step in range(options.steps):
        state, loss = train_step(state, images, labels)
        print(f"step {step} loss {loss:.6f}")


if __name__ == "__main__":
    main()
