# SPDX-License-Identifier: Apache-2.0
"""Convolutions of two photographs, and a convolutional network that reads digits.

    python -m examples.images [--png FILE]

The filter bank blurs each channel and takes its derivatives, by depthwise
convolutions in NCHW and in NHWC memory; results are compared with `jax.lax`'s. The
network learns handwritten digits in both formats from the same start: the losses
must agree. Printed beside them: the time that `jax.lax` takes for the same.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images

import jax_layout as jl
from examples.digits import digits

Params = dict[str, jax.Array]
Convolution = Callable[..., jax.Array]

FORMATS = {"NCHW": jl.channels_first, "NHWC": jl.channels_last}
STEPS = 60
LEARNING_RATE = 0.1


def filters() -> np.ndarray:
    """Gaussian blur and Sobel's two derivatives: (3, 5, 5)."""
    binomial = np.array([1, 4, 6, 4, 1]) / 16
    smooth, slope = np.array([0, 1, 2, 1, 0]) / 4, np.array([0, -1, 0, 1, 0]) / 2
    return np.stack(
        [
            np.outer(a, b)
            for a, b in ((binomial, binomial), (smooth, slope), (slope, smooth))
        ]
    )


def bank() -> jax.Array:
    """The filters of each of the three colours: (9, 1, 5, 5)."""
    return jnp.asarray(np.tile(filters()[:, None], (3, 1, 1, 1)), jnp.float32)


def lax_conv(
    x: jax.Array, w: jax.Array, bias: Any = None, *, padding: int = 0, groups: int = 1
) -> jax.Array:
    """As most programs have it: NCHW, OIHW."""
    y = lax.conv_general_dilated(
        x, w, (1, 1), [(padding, padding)] * 2, feature_group_count=groups
    )
    return y if bias is None else y + bias[:, None, None]


def photographs() -> jax.Array:
    """Eight of each of two photographs: (16, 3, 427, 640), float32 in [0, 1]."""
    images = np.stack(load_sample_images().images).astype(np.float32) / 255
    return jnp.asarray(np.tile(images.transpose(0, 3, 1, 2), (8, 1, 1, 1)))


def median_seconds(
    calls: dict[str, Callable[[], Any]], rounds: int = 7
) -> dict[str, float]:
    """Of each call, in turns; the first round compiles and is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def filter_bank(png: Path | None) -> bool:
    x, w = photographs(), bank()
    calls: dict[str, Callable[[], Any]] = {}
    results = {}
    for name, memory_format in FORMATS.items():
        image = jl.with_memory_format(x, memory_format)
        ours = functools.partial(jl.conv, padding=2, groups=3)
        calls[name] = functools.partial(ours, image, w)
        results[name] = calls[name]()
    plain = jax.jit(functools.partial(lax_conv, padding=2, groups=3))
    calls["lax"] = functools.partial(plain, x, w)
    expected = plain(x, w)
    right = {
        name: bool(jnp.allclose(y, expected, atol=1e-5))
        and jl.is_contiguous(y, FORMATS[name])
        for name, y in results.items()
    }
    seconds = median_seconds(calls)
    table = Table(
        title="blur and derivatives of 16 photographs, depthwise 5x5",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("memory format", "equal to lax", "ms", "x lax"):
        table.add_column(heading, justify="right")
    for name in FORMATS:
        table.add_row(
            name,
            "yes" if right[name] else "NO",
            f"{seconds[name] * 1e3:.1f}",
            f"{seconds['lax'] / seconds[name]:.1f}",
        )
    Console().print(table)
    if png is not None:
        _save(png, np.array(results["NCHW"][0]))
        print(f"wrote {png}: the photograph blurred, and its derivatives")
    return all(right.values())


def _save(png: Path, planes: np.ndarray) -> None:
    """The nine planes of a photograph, three of each colour, as three pictures."""
    pictures = planes.reshape(3, 3, *planes.shape[1:]).transpose(1, 2, 3, 0)
    pictures[1:] = np.abs(pictures[1:]) * 2
    side_by_side = np.concatenate(list(np.clip(pictures, 0, 1)), axis=1)
    Image.fromarray((side_by_side * 255).astype(np.uint8)).save(png)


def initial(key: jax.Array) -> Params:
    he = jax.nn.initializers.he_normal
    keys = jax.random.split(key, 4)
    return {
        "first": he(1, 0)(keys[0], (32, 9), jnp.float32).reshape(32, 1, 3, 3),
        "depthwise": he(1, 0)(keys[1], (32, 9), jnp.float32).reshape(32, 1, 3, 3),
        "pointwise": he(1, 0)(keys[2], (64, 32), jnp.float32)[..., None, None],
        "head": he(1, 0)(keys[3], (10, 64 * 4 * 4), jnp.float32),
        "bias": jnp.zeros(10),
    }


def logits(params: Params, x: jax.Array, conv: Convolution) -> jax.Array:
    x = jl.relu(conv(x, params["first"], padding=1))
    x = jl.relu(conv(x, params["depthwise"], padding=1, groups=32))
    x = jl.max_pool(x, 2)
    x = jl.relu(conv(x, params["pointwise"]))
    return jl.linear(x.reshape(len(x), -1), params["head"], params["bias"])


@functools.partial(jax.jit, static_argnums=(3, 4))
def step(
    params: Params,
    x: jax.Array,
    labels: jax.Array,
    conv: Convolution,
    memory_format: Any,
) -> tuple[Params, jax.Array]:
    """One step of gradient descent; the loss before it."""

    def loss(params: Params) -> jax.Array:
        images = jl.with_memory_format(x, memory_format)
        scores = jax.nn.log_softmax(logits(params, images, conv))
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))

    value, gradient = jax.value_and_grad(loss)(params)
    params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradient)
    return params, value


def network() -> bool:
    x, x_held_out, labels, labels_held_out = digits()
    images, held_out = (a.reshape(-1, 1, 8, 8) for a in (x, x_held_out))
    contenders: dict[str, tuple[Convolution, Any]] = {
        name: (jl.conv, memory_format) for name, memory_format in FORMATS.items()
    }
    contenders["lax"] = (lax_conv, jl.channels_first)
    states = {name: initial(jax.random.key(0)) for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(STEPS):
        for name, (conv, memory_format) in contenders.items():
            start = time.perf_counter()
            states[name], loss = step(states[name], images, labels, conv, memory_format)
            losses[name].append(float(loss))
            seconds[name].append(time.perf_counter() - start)
    table = Table(
        title="handwritten digits, convolutional network", box=box.SIMPLE_HEAD
    )
    for heading in (
        "convolutions",
        "last loss",
        "held-out digits read",
        "training step",
    ):
        table.add_column(heading, justify="right")
    for name, (conv, _) in contenders.items():
        read = jnp.argmax(logits(states[name], held_out, conv), 1)
        table.add_row(
            name if name == "lax" else f"ours, {name}",
            f"{losses[name][-1]:.4f}",
            f"{float(jnp.mean(read == labels_held_out)):.1%}",
            f"{statistics.median(seconds[name][1:]) * 1e3:.1f} ms",
        )
    Console().print(table)
    return all(
        np.allclose(losses[name], losses["lax"], rtol=1e-2, atol=1e-3)
        for name in FORMATS
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.images")
    parser.add_argument("--png", type=Path, help="write the filtered photograph here")
    options = parser.parse_args(arguments)
    fine = filter_bank(options.png)
    return 0 if network() and fine else 1


if __name__ == "__main__":
    sys.exit(main())
