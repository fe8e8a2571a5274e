# SPDX-License-Identifier: Apache-2.0
"""Networks as one writes them in NCHW, for jax with any convolution and for torch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_layout as jl

_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Ops:
    """What a network is made of; all arrays are NCHW, weights OIHW.

    Attributes:
      conv: `conv(x, w, stride, groups)`, padded with half of the kernel.
      norm: `norm(x, (scale, shift, mean, variance))`, batch normalization.
      relu: of every element.
      max_pool: over windows of 3x3, every second.
      mean: over the spatial axes.
    """

    conv: Callable[..., Any]
    norm: Callable[..., Any]
    relu: Callable[..., Any]
    max_pool: Callable[..., Any]
    mean: Callable[..., Any]


def jax_ops(conv_general_dilated: Callable[..., Any], train: bool) -> Ops:
    def conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
        half = w.shape[-1] // 2
        return conv_general_dilated(
            x, w, (stride, stride), [(half, half)] * 2, feature_group_count=groups
        )

    def norm(x: Any, p: Sequence[Any]) -> Any:
        scale, shift, mean, variance = (v.reshape(-1, 1, 1) for v in p)
        if train:
            mean = x.mean((0, 2, 3), keepdims=True)
            variance = x.var((0, 2, 3), keepdims=True)
        return (x - mean) * (scale * jax.lax.rsqrt(variance + _EPSILON)) + shift

    def max_pool(x: Any) -> Any:
        return jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2),
            [(0, 0), (0, 0), (1, 1), (1, 1)],
        )  # fmt: skip

    return Ops(conv, norm, jax.nn.relu, max_pool, lambda x: x.mean((2, 3)))


def layout_ops(train: bool) -> Ops:
    """The operators of jax_layout."""

    def conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
        return jl.conv(x, w, None, stride, w.shape[-1] // 2, groups=groups)

    def norm(x: Any, p: Sequence[Any]) -> Any:
        scale, shift, mean, variance = p
        if train:
            return jl.batch_norm(x, None, None, scale, shift, True, 0.1, _EPSILON)[0]
        return jl.batch_norm(x, mean, variance, scale, shift, False, 0.1, _EPSILON)

    return Ops(conv, norm, jl.relu, lambda x: jl.max_pool(x, 3, 2, 1),
               lambda x: x.mean((2, 3)))  # fmt: skip


def torch_ops(torch: Any, train: bool) -> Ops:
    f = torch.nn.functional

    def conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
        return f.conv2d(x, w, None, stride, w.shape[-1] // 2, 1, groups)

    def norm(x: Any, p: Sequence[Any]) -> Any:
        scale, shift, mean, variance = p
        if train:
            return f.batch_norm(x, None, None, scale, shift, True, 0.1, _EPSILON)
        return f.batch_norm(x, mean, variance, scale, shift, False, 0.1, _EPSILON)

    return Ops(conv, norm, f.relu, lambda x: f.max_pool2d(x, 3, 2, 1),
               lambda x: x.mean((2, 3)))  # fmt: skip


Convolved = tuple[int, int, int, int]  # out, in channels of a group, kernel

_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels, stride


def resnet18(ops: Ops, params: Any, x: Any) -> Any:
    """ResNet-18: from (N, 3, 224, 224) to (N, 1000)."""
    stem, blocks, (weight, bias) = params
    x = ops.max_pool(ops.relu(ops.norm(ops.conv(x, stem[0], 2), stem[1])))
    strides = [s for _, stride in _STAGES for s in (stride, 1)]
    for (first, second, *shortcut), stride in zip(blocks, strides, strict=True):
        y = ops.relu(ops.norm(ops.conv(x, first[0], stride), first[1]))
        y = ops.norm(ops.conv(y, second[0]), second[1])
        for w, p in shortcut:
            x = ops.norm(ops.conv(x, w, stride), p)
        x = ops.relu(y + x)
    return ops.mean(x) @ weight + bias


def resnet18_parameters() -> Any:
    random = np.random.default_rng(0)
    blocks, inner = [], 64
    for outer, stride in _STAGES:
        for channels in (inner, outer):
            block = [
                _layer(random, outer, channels, 3),
                _layer(random, outer, outer, 3),
            ]
            if channels != outer or (stride != 1 and channels is inner):
                block.append(_layer(random, outer, channels, 1))
            blocks.append(block)
        inner = outer
    weight = random.standard_normal((512, 1000), np.float32) / 512**0.5
    return [_layer(random, 64, 3, 7), blocks, (weight, np.zeros(1000, np.float32))]


# In channels, out channels, stride: inverted residual blocks that widen six times.
_MOBILE = ((24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 96, 1))


def mobilenet(ops: Ops, params: Any, x: Any) -> Any:
    """The middle of MobileNetV2: from (N, 24, 56, 56) to (N, 96, 14, 14)."""
    for (wide, depth, narrow), (inner, outer, stride) in zip(
        params, _MOBILE, strict=True
    ):
        y = ops.relu(ops.norm(ops.conv(x, wide[0]), wide[1]))
        y = ops.relu(ops.norm(ops.conv(y, depth[0], stride, 6 * inner), depth[1]))
        y = ops.norm(ops.conv(y, narrow[0]), narrow[1])
        x = x + y if inner == outer else y
    return x


def mobilenet_parameters() -> Any:
    random = np.random.default_rng(0)
    return [
        [
            _layer(random, 6 * inner, inner, 1),
            _layer(random, 6 * inner, 1, 3),
            _layer(random, outer, 6 * inner, 1),
        ]
        for inner, outer, _ in _MOBILE
    ]


def _layer(random: np.random.Generator, out: int, channels: int, kernel: int) -> Any:
    """The weight of a convolution, and of the normalization after it."""
    w = random.standard_normal((out, channels, kernel, kernel), np.float32)
    w *= (2 / (channels * kernel**2)) ** 0.5
    norm = (
        1 + 0.1 * random.standard_normal(out, np.float32),
        0.1 * random.standard_normal(out, np.float32),
        0.1 * random.standard_normal(out, np.float32),
        1 + 0.1 * random.random(out, np.float32),
    )
    return w, norm
