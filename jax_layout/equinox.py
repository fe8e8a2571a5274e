# SPDX-License-Identifier: Apache-2.0
"""Equinox layers; import them where Equinox is installed."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
from jax import Array
from jax.typing import DTypeLike

import jax_layout as jl


class Linear(eqx.Module):
    """`equinox.nn.Linear` with any leading axes and a fused activation.

    >>> layer = Linear(3, 4, activation="relu", key=jax.random.key(0))
    >>> layer(jax.numpy.ones((2, 5, 3), "float32")).shape
    (2, 5, 4)
    """

    weight: Array
    bias: Array | None
    activation: str | None = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        use_bias: bool = True,
        dtype: DTypeLike = jax.numpy.float32,
        *,
        activation: str | None = None,
        key: Any,
    ) -> None:
        """Draws weight and bias as `equinox.nn.Linear` does.

        Args:
          in_features: size of the last axis of the argument.
          out_features: size of the last axis of the result.
          use_bias: whether a bias is added.
          dtype: of weight and bias.
          activation: as in `jax_layout.linear`.
          key: a `jax.random.key`.
        """
        layer = eqx.nn.Linear(in_features, out_features, use_bias, dtype, key=key)
        self.weight, self.bias, self.activation = layer.weight, layer.bias, activation

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """The layer applied to `(..., in_features)`; key is not used."""
        return jl.linear(x, self.weight, self.bias, activation=self.activation)


class Conv(eqx.nn.Conv):
    """`equinox.nn.Conv` on the kernels of this package.

    >>> layer = Conv(2, 3, 8, kernel_size=3, key=jax.random.key(0))
    >>> jax.vmap(layer)(jax.numpy.ones((4, 3, 10, 10))).shape
    (4, 8, 8, 8)
    """

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """The layer applied to `(in_channels, *spatial)`; key is not used."""
        if x.ndim != self.num_spatial_dims + 1 or self.padding_mode != "ZEROS":
            return super().__call__(x, key=key)
        y = jl.conv_general_dilated(
            x[None],
            self.weight,
            self.stride,
            self.padding,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
        )[0]
        return y if self.bias is None else y + self.bias
