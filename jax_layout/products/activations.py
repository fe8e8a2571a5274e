# SPDX-License-Identifier: Apache-2.0
"""Activations in the epilogue of a product, and their derivatives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from jax import Array

from jax_layout.arguments import accumulator
from jax_layout.plain import jnp, lax, nn

_ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
    None: lambda z: z,
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=True),
    "gelu_erf": functools.partial(nn.gelu, approximate=False),
}
GELUS = ("gelu", "gelu_erf")


def check_activation(name: str, activation: Any, dtype: Any) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f'{name}: activation must be None, "relu", "gelu" or "gelu_erf", '
            f"got {activation!r}."
        )
    if activation in GELUS and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"{name}: {activation} is for floating point, got {dtype}.")


def activate(z: Array, activation: str | None) -> Array:
    return _ACTIVATIONS[activation](z)


def differentiate(dz: Array, activation: str | None, y: Array, *z: Array) -> Array:
    """dz times the derivative of the activation, symmetric in tangents and cotangents.

    Relu's follows from its result alone, gelu's needs its argument.
    """
    if activation in GELUS:
        slope = _gelu_derivative if activation == "gelu" else _gelu_erf_derivative
        return dz * slope(z[0]).astype(dz.dtype)
    if activation == "relu":
        return jnp.where(y > 0, dz, jnp.zeros_like(dz))
    return dz


def _gelu_derivative(z: Array) -> Array:
    """The derivative of z/2 (1 + tanh(c (z + 0.044715 z^3))), c = sqrt(2/pi)."""
    z = z.astype(accumulator(z.dtype))
    c, d = math.sqrt(2 / math.pi), 0.044715
    t = jnp.tanh(c * (z + d * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 3 * d * z * z)


def _gelu_erf_derivative(z: Array) -> Array:
    """The derivative of z P(z), the normal distribution's: P(z) + z P'(z)."""
    z = z.astype(accumulator(z.dtype))
    below = 0.5 * lax.erfc(-z * math.sqrt(0.5))
    return below + z * jnp.exp(-0.5 * z * z) * math.sqrt(0.5 / math.pi)
