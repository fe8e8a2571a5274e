# SPDX-License-Identifier: Apache-2.0
"""StyleGAN2 (Karras et al., 2020) in linen: modulated convolutions, filters between."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs.program import Made, Program, filled, gradient, normal

_ORDER = ("NHWC", "HWIO", "NHWC")
_TAPS = np.outer([1, 3, 3, 1], [1, 3, 3, 1]).astype(np.float32) / 64
_WIDTHS = 128, 128, 64, 32  # of 8x8 to 64x64 pixels
_STYLE = 128


def _resample(x: Any, up: int = 1, down: int = 1) -> Any:
    """Filters every channel, between zeros for pixels that were not there."""
    channels = x.shape[-1]
    taps = jnp.asarray(np.tile((_TAPS * up**2)[:, :, None, None], channels))
    return lax.conv_general_dilated(
        x, taps.astype(x.dtype), (down, down), [(2, 1)] * 2, lhs_dilation=(up, up),
        dimension_numbers=_ORDER, feature_group_count=channels,
    )  # fmt: skip


def _modulated(x: Any, w: Any, style: Any) -> Any:
    """A convolution with weights of each image's own: as many groups as images."""
    n, height, width, channels = x.shape
    w = w[None] * style[:, None, None, :, None]
    w = w * lax.rsqrt(jnp.sum(w * w, (1, 2, 3), keepdims=True) + 1e-8)
    x = x.transpose(1, 2, 0, 3).reshape(1, height, width, n * channels)
    w = w.transpose(1, 2, 3, 0, 4).reshape(*w.shape[1:4], -1)
    y = lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=_ORDER, feature_group_count=n
    )
    return y.reshape(height, width, n, -1).transpose(2, 0, 1, 3)


def _generator() -> Any:
    from flax import linen as nn

    class Generator(nn.Module):
        @nn.compact
        def __call__(self, z: Any) -> Any:
            style = z * lax.rsqrt(jnp.mean(z * z, -1, keepdims=True) + 1e-8)
            for _ in range(4):
                style = nn.leaky_relu(nn.Dense(_STYLE)(style), 0.2)
            start = self.param("start", nn.initializers.normal(), (1, 4, 4, _WIDTHS[0]))
            x = jnp.broadcast_to(start, (len(z), *start.shape[1:]))
            image = jnp.zeros((len(z), 4, 4, 3))
            for i, width in enumerate(_WIDTHS):
                x = _resample(x, up=2)
                for j in range(2):
                    shape = 3, 3, x.shape[-1], width
                    w = self.param(f"taps_{i}{j}", nn.initializers.normal(), shape)
                    x = _modulated(x, w, 1 + nn.Dense(shape[2])(style))
                    x = nn.leaky_relu(x, 0.2)
                image = _resample(image, up=2) + nn.Conv(3, (1, 1))(x)
            return image

    return Generator()


def _discriminator() -> Any:
    from flax import linen as nn

    class Discriminator(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(_WIDTHS[-1], (1, 1))(x)
            for width in _WIDTHS[::-1]:
                skip = nn.Conv(width, (1, 1))(_resample(x, down=2))
                x = nn.leaky_relu(nn.Conv(width, (3, 3))(x), 0.2)
                x = _resample(nn.leaky_relu(nn.Conv(width, (3, 3))(x), 0.2), down=2)
                x = (x + skip) * 0.5**0.5
            return nn.Dense(1)(x.reshape(len(x), -1))

    return Discriminator()


def _draws(rows: int, learns: bool = False) -> Callable[..., Made]:
    def make(dtype: Any) -> Made:
        net, z = _generator(), normal(rows, _STYLE)
        p = filled(jax.eval_shape(net.init, jax.random.key(0), z))
        return gradient(net.apply) if learns else net.apply, (p, z)

    return make


def _judges(dtype: Any) -> Made:
    """The penalty on a discriminator's slope, learnt: a second gradient."""
    net, x = _discriminator(), normal(4, 64, 64, 3)
    p = filled(jax.eval_shape(net.init, jax.random.key(0), x))

    def steepness(p: Any, x: Any) -> Any:
        slopes = jax.grad(lambda x: net.apply(p, x).sum())(x)
        return (slopes * slopes).sum()

    return jax.grad(steepness), (p, x)


PROGRAMS = (
    Program("StyleGAN2, generator, batch 4", _draws(4)),
    Program("StyleGAN2, generator, gradient, batch 2", _draws(2, True)),
    Program("StyleGAN2, discriminator, R1 gradient, batch 4", _judges),
)
