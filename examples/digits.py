# SPDX-License-Identifier: Apache-2.0
"""Learns to read handwritten digits, with linear layers of ours and of jax.numpy.

    python -m examples.digits

Both networks start alike and see the same digits in the same order, in bfloat16
with float32 weights. Printed: how many held-out digits each reads right, and the
time of a training step, the two taking turns.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_layout as jl

Params = list[tuple[jax.Array, jax.Array]]
Linear = Callable[..., jax.Array]

SIZES = (64, 1024, 1024, 10)
STEPS = 60
LEARNING_RATE = 2e-3


def ours(x: jax.Array, w: jax.Array, b: jax.Array, gelu: bool) -> jax.Array:
    return jl.linear(x, w, b, activation="gelu" if gelu else None)


def plain(x: jax.Array, w: jax.Array, b: jax.Array, gelu: bool) -> jax.Array:
    z = x @ w.T.astype(x.dtype) + b.astype(x.dtype)
    return jax.nn.gelu(z) if gelu else z


def digits() -> list[jax.Array]:
    """1437 digits to learn from and 360 held out: pixels and labels of each."""
    x, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        x.astype(np.float32) / 16, labels, test_size=360, random_state=0
    )
    return [jnp.asarray(part) for part in parts]


def initial(key: jax.Array) -> Params:
    keys = jax.random.split(key, len(SIZES) - 1)
    he = jax.nn.initializers.he_normal(in_axis=1, out_axis=0)
    return [
        (he(k, (out, inner), jnp.float32), jnp.zeros(out))
        for k, inner, out in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]


def logits(params: Params, x: jax.Array, linear: Linear) -> jax.Array:
    x = x.astype(jnp.bfloat16)
    for i, (w, b) in enumerate(params):
        x = linear(x, w, b, i + 1 < len(params))
    return x.astype(jnp.float32)


def loss(params: Params, x: jax.Array, labels: jax.Array, linear: Linear) -> jax.Array:
    scores = jax.nn.log_softmax(logits(params, x, linear))
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


@functools.partial(jax.jit, static_argnums=4, donate_argnums=(0, 1))
def step(
    params: Params, moments: Any, x: jax.Array, labels: jax.Array, linear: Linear
) -> tuple[Params, Any]:
    """One step of Adam without its bias correction."""
    gradient = jax.grad(loss)(params, x, labels, linear)
    means, squares = moments
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradient)
    squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, squares, gradient)
    params = jax.tree.map(
        lambda p, m, s: p - LEARNING_RATE * m / (jnp.sqrt(s) + 1e-8),
        params,
        means,
        squares,
    )
    return params, (means, squares)


def main() -> int:
    x, x_held_out, labels, labels_held_out = digits()
    layers: dict[str, Linear] = {"ours": ours, "jnp": plain}
    states = {}
    for name in layers:
        params = initial(jax.random.key(0))
        zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
        states[name] = (params, tuple(zeros))
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(STEPS):
        for name, linear in layers.items():
            start = time.perf_counter()
            states[name] = step(*states[name], x, labels, linear)
            jax.block_until_ready(states[name])
            seconds[name].append(time.perf_counter() - start)

    table = Table(title="handwritten digits, bfloat16", box=box.SIMPLE_HEAD)
    for heading in ("linear layers", "held-out digits read", "training step"):
        table.add_column(heading, justify="right")
    right = {}
    for name, linear in layers.items():
        params, _ = states[name]
        read = jnp.argmax(logits(params, x_held_out, linear), 1)
        right[name] = float(jnp.mean(read == labels_held_out))
        median = statistics.median(seconds[name][1:])  # the first compiles
        table.add_row(name, f"{right[name]:.1%}", f"{median * 1e3:.1f} ms")
    Console().print(table)
    return 0 if right["ours"] >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
