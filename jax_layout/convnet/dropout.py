# SPDX-License-Identifier: Apache-2.0
"""Dropout of elements and of channels, in the memory format of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike

from jax_layout.formats.physical import aligned, flags, floating, number
from jax_layout.formats.tags import formatted, store, stored
from jax_layout.plain import jnp


@formatted
def dropout(
    x: ArrayLike, key: ArrayLike | None, p: float = 0.5, training: bool = True
) -> Array:
    """Sets each element to zero with probability p, and scales the rest by 1/(1-p).

    The elements are drawn in the order in which they lie, so that nothing is moved:
    with one key, other elements fall out in another format.

    Args:
      x: any shape, floating dtype.
      key: of `jax.random`; None will do if not in training.
      p: the probability, from 0 to 1.
      training: if not, x is returned.

    Returns:
      shape, dtype and memory format of `x`.

    Raises:
      TypeError: if x is no floating-point array, or key no key.
      ValueError: if p is no probability.

    Source: `torch.nn.functional.dropout`.

    >>> x = jnp.ones((2, 3, 4, 4))
    >>> sorted(set(dropout(x, jax.random.key(0)).ravel().tolist()))
    [0.0, 2.0]
    """
    x = floating("dropout", x)
    _check("dropout", key, p, training)
    if not training or p == 0:
        return x
    physical, format = stored(x)
    return store(_drop(physical, key, p, physical.shape), format)


@formatted
def dropout2d(
    x: ArrayLike, key: ArrayLike | None, p: float = 0.5, training: bool = True
) -> Array:
    """The same for whole channels, the same ones in every memory format.

    Args:
      x: shape `(N, C, *spatial)` with any number of spatial dimensions.
      key: of `jax.random`; None will do if not in training.
      p: the probability, from 0 to 1.
      training: if not, x is returned.

    Returns:
      shape, dtype and memory format of `x`.

    Raises:
      TypeError: if x is no floating-point array, or key no key.
      ValueError: if p is no probability, or x has no spatial dimension.

    Source: `torch.nn.functional.dropout1d`, `dropout2d` and `dropout3d`.

    >>> y = dropout2d(jnp.ones((2, 3, 4, 4)), jax.random.key(0))
    >>> bool((y == y[:, :, :1, :1]).all())
    True
    """
    x = floating("dropout2d", x)
    _check("dropout2d", key, p, training)
    if x.ndim < 3:
        raise ValueError(
            f"dropout2d: x must have shape (N, C, *spatial), got {x.shape}."
        )
    if not training or p == 0:
        return x
    physical, format = stored(x)
    ones = jnp.ones((*x.shape[:2], *(1,) * (x.ndim - 2)), x.dtype)
    return store(physical * aligned(_drop(ones, key, p, ones.shape), format), format)


def _check(name: str, key: Any, p: float, training: bool) -> None:
    flags(name, training=training)
    kind = getattr(key, "dtype", None)
    typed = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
    fits = jnp.shape(key) == () if typed else kind == jnp.uint32 and jnp.ndim(key)
    if not fits and (training or key is not None):
        raise TypeError(
            f"{name}: key must be one of jax.random, as in {name}(x, key, p), "
            f"got {key!r}."
        )
    number(name, "p", p)
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: p must be a probability from 0 to 1, got {p}.")


def _drop(x: Array, key: Any, p: float, shape: Sequence[int]) -> Array:
    kept = jax.random.bernoulli(key, 1 - p, shape)
    return jnp.where(kept, x / (1 - p) if p < 1 else x, jnp.zeros_like(x))
