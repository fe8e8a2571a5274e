# SPDX-License-Identifier: Apache-2.0
"""Small functional networks on NCHW images, for the tests and the benchmarks.

Each is `net(params, x)`; `params` is a flat dict of arrays, made by `make`, which
runs the network with parameters that come into being when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Params = Any


class _Making(dict):
    """Parameters that are made as they are read."""

    def __init__(self, seed: int):
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def made(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        if name not in self:
            scale = 1 / math.sqrt(max(1, math.prod(shape[1:])))
            self[name] = jnp.asarray(self.rng.normal(0, scale, shape), dtype)
        return self[name]


def make(net: Callable[..., Any], x: Any, seed: int = 0) -> dict[str, Array]:
    """The parameters of a network for inputs like x."""
    params = _Making(seed)
    jax.eval_shape(lambda x: net(params, x), x)
    return dict(params)


def _get(p: Params, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    if isinstance(p, _Making):
        with jax.ensure_compile_time_eval():
            return p.made(name, shape, dtype)
    return p[name]


def conv(
    p: Params,
    name: str,
    x: Array,
    out: int,
    size: int = 3,
    stride: int = 1,
    groups: int = 1,
) -> Array:
    shape = (out, x.shape[1] // groups, size, size)
    w = _get(p, name, shape, x.dtype)
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", feature_group_count=groups
    )


def _affine(p: Params, name: str, x: Array) -> Array:
    scale, shift = (
        _get(p, f"{name}.{i}", (x.shape[1],), x.dtype) for i in ("scale", "shift")
    )
    return x * (1 + scale[:, None, None]) + shift[:, None, None]


def batch_norm(p: Params, name: str, x: Array) -> Array:
    mean, var = (f(x, (0, 2, 3), keepdims=True) for f in (jnp.mean, jnp.var))
    return _affine(p, name, (x - mean) * lax.rsqrt(var + 1e-5))


def group_norm(p: Params, name: str, x: Array, groups: int = 8) -> Array:
    n, c, h, w = x.shape
    y = x.reshape(n, groups, c // groups, h, w)
    mean, var = (f(y, (2, 3, 4), keepdims=True) for f in (jnp.mean, jnp.var))
    y = (y - mean) * lax.rsqrt(var + 1e-5)
    return _affine(p, name, y.reshape(x.shape))


def dense(p: Params, name: str, x: Array, out: int) -> Array:
    return x @ _get(p, name, (x.shape[-1], out), x.dtype)


def max_pool(x: Array, size: int = 3, stride: int = 2) -> Array:
    window, strides = (1, 1, size, size), (1, 1, stride, stride)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")


def _residual(p: Params, name: str, x: Array, out: int, stride: int) -> Array:
    y = jax.nn.relu(
        batch_norm(p, f"{name}.n1", conv(p, f"{name}.c1", x, out, 3, stride))
    )
    y = batch_norm(p, f"{name}.n2", conv(p, f"{name}.c2", y, out))
    if stride > 1 or x.shape[1] != out:
        x = batch_norm(p, f"{name}.n3", conv(p, f"{name}.c3", x, out, 1, stride))
    return jax.nn.relu(x + y)


def _bottleneck(p: Params, name: str, x: Array, out: int, stride: int) -> Array:
    y = jax.nn.relu(batch_norm(p, f"{name}.n1", conv(p, f"{name}.c1", x, out // 4, 1)))
    y = jax.nn.relu(
        batch_norm(p, f"{name}.n2", conv(p, f"{name}.c2", y, out // 4, 3, stride))
    )
    y = batch_norm(p, f"{name}.n3", conv(p, f"{name}.c3", y, out, 1))
    if stride > 1 or x.shape[1] != out:
        x = batch_norm(p, f"{name}.n4", conv(p, f"{name}.c4", x, out, 1, stride))
    return jax.nn.relu(x + y)


def _resnet(block: Any, depths: tuple[int, ...], width: int) -> Callable[..., Array]:
    def net(p: Params, x: Array) -> Array:
        stem = width if block is _residual else width // 4
        x = max_pool(jax.nn.relu(batch_norm(p, "n0", conv(p, "c0", x, stem, 7, 2))))
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if stage and i == 0 else 1
                x = block(p, f"s{stage}.{i}", x, width << stage, stride)
        return dense(p, "head", x.mean((2, 3)), 1000)

    return net


resnet18 = _resnet(_residual, (2, 2, 2, 2), 64)
resnet50 = _resnet(_bottleneck, (3, 4, 6, 3), 256)


def tiny_resnet(p: Params, x: Array) -> Array:
    x = jax.nn.relu(batch_norm(p, "n0", conv(p, "c0", x, 16)))
    for i, (out, stride) in enumerate(((16, 1), (32, 2), (64, 2))):
        x = _residual(p, f"b{i}", x, out, stride)
    return dense(p, "head", x.mean((2, 3)), 10)


def mobilenet(p: Params, x: Array, width: int = 32) -> Array:
    """Inverted residuals with depthwise convolutions, as MobileNetV2's."""
    x = jax.nn.relu6(batch_norm(p, "n0", conv(p, "c0", x, width, 3, 2)))
    for i, (grow, stride) in enumerate(((1, 1), (2, 2), (1, 1), (2, 2), (1, 1))):
        inside, out = 4 * x.shape[1], grow * x.shape[1]
        y = jax.nn.relu6(batch_norm(p, f"{i}.n1", conv(p, f"{i}.c1", x, inside, 1)))
        y = conv(p, f"{i}.c2", y, inside, 3, stride, groups=inside)
        y = jax.nn.relu6(batch_norm(p, f"{i}.n2", y))
        y = batch_norm(p, f"{i}.n3", conv(p, f"{i}.c3", y, out, 1))
        x = x + y if y.shape == x.shape else y
    return dense(p, "head", x.mean((2, 3)), 10)


def unet(p: Params, x: Array, width: int = 32) -> Array:
    """One level down and up again, with group norms, as in diffusion models."""

    def block(name: str, x: Array, out: int) -> Array:
        y = conv(p, f"{name}.c1", jax.nn.silu(group_norm(p, f"{name}.n1", x)), out)
        y = conv(p, f"{name}.c2", jax.nn.silu(group_norm(p, f"{name}.n2", y)), out)
        return y + (x if x.shape[1] == out else conv(p, f"{name}.c3", x, out, 1))

    x = conv(p, "in", x, width)
    skip = block("a", x, width)
    y = block("b", conv(p, "down", skip, 2 * width, 3, 2), 2 * width)
    n, c, h, w = y.shape
    y = jnp.broadcast_to(y[:, :, :, None, :, None], (n, c, h, 2, w, 2))
    y = jnp.concatenate([skip, y.reshape(n, c, 2 * h, 2 * w)], 1)
    return conv(p, "out", block("c", y, width), x.shape[1])


def convnext(p: Params, x: Array) -> Array:
    """A ConvNeXt block: depthwise, layer norm over the channels, two products."""
    c = x.shape[1]
    y = conv(p, "depthwise", x, c, 7, groups=c).transpose(0, 2, 3, 1)
    mean, var = (f(y, -1, keepdims=True) for f in (jnp.mean, jnp.var))
    y = (y - mean) * lax.rsqrt(var + 1e-6)
    y = dense(p, "down", jax.nn.gelu(dense(p, "up", y, 4 * c)), c)
    return x + y.transpose(0, 3, 1, 2)


def vit(p: Params, x: Array, width: int = 64, heads: int = 4) -> Array:
    """Patches of an image and one block of a vision transformer."""
    shape = (width, x.shape[1], 4, 4)
    x = lax.conv_general_dilated(x, _get(p, "patch", shape, x.dtype), (4, 4), "VALID")
    n, c, h, w = x.shape
    x = x.reshape(n, c, h * w).transpose(0, 2, 1)

    def norm(y: Array) -> Array:
        mean, var = (f(y, -1, keepdims=True) for f in (jnp.mean, jnp.var))
        return (y - mean) * lax.rsqrt(var + 1e-6)

    y = norm(x)
    q, k, v = (
        dense(p, i, y, c).reshape(n, h * w, heads, c // heads).transpose(0, 2, 1, 3)
        for i in "qkv"
    )
    scores = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / math.sqrt(c // heads))
    x = x + dense(p, "o", (scores @ v).transpose(0, 2, 1, 3).reshape(n, h * w, c), c)
    y = dense(p, "down", jax.nn.gelu(dense(p, "up", norm(x), 4 * c)), c)
    return (x + y).mean(1)


NETS = {
    "resnet18": (resnet18, (2, 3, 64, 64)),
    "mobilenet": (mobilenet, (2, 3, 32, 32)),
    "unet": (unet, (2, 3, 16, 16)),
    "convnext": (convnext, (2, 16, 14, 14)),
    "vit": (vit, (2, 3, 32, 32)),
}
