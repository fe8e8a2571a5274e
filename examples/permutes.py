# SPDX-License-Identifier: Apache-2.0
"""Permutes of two photographs and of a tensor of an attention layer.

    python -m examples.permutes [--png FILE]

Each permute runs under `jax.jit`, its result is compared bit by bit with NumPy's,
its gradient with that of `jax.numpy.transpose`, and its speed with jnp's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images

import jax_layout as jl

Permute = Callable[[jax.Array, tuple[int, ...]], jax.Array]
Example = tuple[str, np.ndarray, tuple[int, ...]]

PATCH = 16


def photographs() -> np.ndarray:
    """Two photographs, cropped to whole patches: (2, 416, 640, 3), uint8."""
    images = np.stack(load_sample_images().images)
    _, height, width, _ = images.shape
    return images[:, : height // PATCH * PATCH, : width // PATCH * PATCH]


def in_patches(images: np.ndarray) -> np.ndarray:
    """Names the axes of the patches; nothing moves yet."""
    n, height, width, channels = images.shape
    rows, columns = height // PATCH, width // PATCH
    return images.reshape(n, rows, PATCH, columns, PATCH, channels)


def examples() -> list[Example]:
    """A name, an array, and the axes to permute."""
    # Sixteen of each photograph make a batch such as a network is fed.
    batch = np.tile(photographs(), (16, 1, 1, 1))
    planes = np.ascontiguousarray(batch.transpose(0, 3, 1, 2))
    scaled = batch.astype(np.float32) / 255
    random = np.random.default_rng(0)
    attention = random.standard_normal((8, 2048, 16, 64), np.float32)
    tokens = attention.astype(jnp.bfloat16)
    heads = np.ascontiguousarray(tokens.transpose(0, 2, 1, 3))
    return [
        ("NHWC to NCHW, u8", batch, (0, 3, 1, 2)),
        ("NCHW to NHWC, u8", planes, (0, 2, 3, 1)),
        ("NHWC to NCHW, f32", scaled, (0, 3, 1, 2)),
        ("NCHW to NHWC, f32", planes.astype(np.float32), (0, 2, 3, 1)),
        ("patchify 16, u8", in_patches(batch), (0, 1, 3, 2, 4, 5)),
        ("patchify 16, f32", in_patches(scaled), (0, 1, 3, 2, 4, 5)),
        ("head split, bf16", tokens, (0, 2, 1, 3)),
        ("head merge, bf16", heads, (0, 2, 1, 3)),
    ]


def same(a: jax.Array, b: np.ndarray | jax.Array) -> bool:
    """Equal in shape, dtype and every bit."""
    x, y = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return (x.shape, x.dtype) == (y.shape, y.dtype) and x.tobytes() == y.tobytes()


def same_values(x: np.ndarray, axes: tuple[int, ...]) -> bool:
    """Under jit, against NumPy."""
    y = jax.jit(lambda x: jl.permute(x, axes))(x)
    return same(y, x.transpose(axes))


def same_gradient(x: np.ndarray, axes: tuple[int, ...]) -> bool:
    """Under grad, of a function that tells every element of y apart."""

    def loss(x: jax.Array, permute: Permute) -> jax.Array:
        y = permute(x, axes)
        weights = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)
        return jnp.sum(weights * y * y)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    small = jnp.asarray(x[:2], jnp.float32)  # a gradient needs floating point
    return same(gradient(small, jl.permute), gradient(small, jnp.transpose))


def speeds(x: np.ndarray, axes: tuple[int, ...], rounds: int = 9) -> list[float]:
    """GB/s read and written, ours and jnp's, taking turns."""
    permutes: list[Permute] = [jl.permute, jnp.transpose]
    compiled = [jax.jit(lambda x, f=f: f(x, axes)) for f in permutes]
    x_on_device = jax.device_put(x)
    seconds: list[list[float]] = [[] for _ in compiled]
    for _ in range(rounds + 1):
        for times, f in zip(seconds, compiled, strict=True):
            start = time.perf_counter()
            f(x_on_device).block_until_ready()
            times.append(time.perf_counter() - start)
    # The first round compiles.
    return [2 * x.nbytes / statistics.median(times[1:]) / 1e9 for times in seconds]


def put_together(image: np.ndarray) -> jax.Array:
    """Patchifies an image and undoes it: this permute is its own inverse."""
    axes = (0, 1, 3, 2, 4, 5)
    patches = jl.permute(in_patches(image), axes)
    return jl.permute(patches, axes).reshape(image.shape)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, help="write a photograph put together")
    options = parser.parse_args(arguments)

    table = Table(title="GB/s read + written, under jax.jit", box=box.SIMPLE_HEAD)
    table.add_column("permute", no_wrap=True)
    for heading in ("axes", "MB", "ours", "jnp", "speed-up", "values", "grad"):
        table.add_column(heading, justify="right", no_wrap=True)
    all_same = True
    for name, x, axes in examples():
        values, gradient = same_values(x, axes), same_gradient(x, axes)
        ours, jnps = speeds(x, axes)
        all_same &= values and gradient
        table.add_row(
            name,
            "".join(map(str, axes)),
            f"{x.nbytes / 1e6:.0f}",
            f"{ours:.1f}",
            f"{jnps:.1f}",
            f"{ours / jnps:.2f}",
            "equal" if values else "[red]differ[/]",
            "equal" if gradient else "[red]differ[/]",
        )
    Console().print(table)

    image = photographs()[:1]
    whole = put_together(image)
    all_same &= same(whole, image)
    if options.png:
        Image.fromarray(np.asarray(whole[0])).save(options.png)
    print("All results are equal." if all_same else "SOME RESULTS DIFFER.")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
