# SPDX-License-Identifier: Apache-2.0
"""Normalisation, and softmax, in the memory format of the input.

Mean and variance come from one pass over the input, the sums of their gradients from
one over it and the cotangent: `moments.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_layout.convnet.moments import centered_affine, moments
from jax_layout.formats.memory_format import MemoryFormat
from jax_layout.formats.physical import (
    aligned,
    array,
    axes,
    flags,
    floating,
    integer,
    number,
    per_channel,
    wide,
)
from jax_layout.formats.tags import formatted, store, stored
from jax_layout.plain import jnp, lax, nn


@formatted
def batch_norm(
    x: ArrayLike,
    running_mean: ArrayLike | None,
    running_var: ArrayLike | None,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Array | tuple[Array, Array | None, Array | None]:
    """Normalises each channel over the batch: (x - mean) / sqrt(var + eps).

    Args:
      x: shape `(N, C, *spatial)`, floating dtype.
      running_mean: shape `(C,)`; None only in training.
      running_var: the same of the variance.
      weight: shape `(C,)`, what the result is multiplied by.
      bias: shape `(C,)`, added to it.
      training: whether to normalise by the mean and variance of x, and to update
        the running ones, the variance with Bessel's correction.
      momentum: the part of an update that x has.
      eps: added to the variance.

    Returns:
      shape, dtype and memory format of `x`. In training a tuple of that and the new
      running mean and variance, None where there are no old ones. Statistics of
      16- and 8-bit types are computed in float32.

    Raises:
      TypeError: if x is no floating-point array, or arguments are of the wrong kind.
      ValueError: if shapes do not fit, or a channel has but one element in training.

    Source: `torch.nn.functional.batch_norm`.

    >>> x = jnp.array([[1.0], [3.0]])
    >>> y, mean, var = batch_norm(x, jnp.zeros(1), jnp.ones(1), training=True)
    >>> print(y[:, 0].round(3), mean.round(3), var.round(3))
    [-1.  1.] [0.2] [1.1]
    """
    x = _channels("batch_norm", x, running_mean, running_var, weight, bias)
    flags("batch_norm", training=training)
    number("batch_norm", "momentum", momentum)
    number("batch_norm", "eps", eps, 0)
    physical, format = stored(x)
    over = axes(format, [0, *range(2, x.ndim)])
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError(
                "batch_norm: running_mean and running_var are needed unless training."
            )
        mean, var = (per_channel(v, format) for v in (running_mean, running_var))
        y = _normalize(
            physical, mean, var, *_per_channel(format, weight, bias), eps, over
        )
        return store(y, format)
    count = x.size // max(x.shape[1], 1)
    if count == 1:
        raise ValueError(
            "batch_norm: a channel must have more than one element in training, "
            f"got x of shape {x.shape}."
        )
    mean, var = _moments(physical, over)
    y = _normalize(physical, mean, var, *_per_channel(format, weight, bias), eps, over)
    correction = count / max(count - 1, 1)
    updated = [
        None
        if old is None
        else jnp.asarray(old) * (1 - momentum)
        + _vector(new, format).astype(jnp.asarray(old).dtype) * momentum
        for old, new in (
            (running_mean, mean),
            (running_var, var * correction),
        )
    ]
    return store(y, format), updated[0], updated[1]


@formatted
def instance_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> Array:
    """Normalises each channel of each sample.

    Args:
      x: shape `(N, C, *spatial)`, floating dtype.
      weight: shape `(C,)`, what the result is multiplied by.
      bias: shape `(C,)`, added to it.
      eps: added to the variance.

    Returns:
      shape, dtype and memory format of `x`.

    Raises:
      TypeError: if x is no floating-point array, or arguments are of the wrong kind.
      ValueError: if shapes do not fit, or a channel has but one element.

    Source: `torch.nn.functional.instance_norm`, without running statistics.

    >>> instance_norm(jnp.array([[[1.0, 3.0]]])).round(3).tolist()
    [[[-1.0, 1.0]]]
    """
    x = _channels("instance_norm", x, weight=weight, bias=bias)
    number("instance_norm", "eps", eps, 0)
    if math.prod(x.shape[2:]) == 1:
        raise ValueError(
            "instance_norm: a channel must have more than one element, "
            f"got x of shape {x.shape}."
        )
    physical, format = stored(x)
    over = axes(format, range(2, x.ndim))
    mean, var = _moments(physical, over)
    y = _normalize(physical, mean, var, *_per_channel(format, weight, bias), eps, over)
    return store(y, format)


@formatted
def group_norm(
    x: ArrayLike,
    num_groups: int,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> Array:
    """Normalises groups of adjacent channels of each sample.

    Args:
      x: shape `(N, C, *spatial)`, floating dtype.
      num_groups: a divisor of C.
      weight: shape `(C,)`, what the result is multiplied by.
      bias: shape `(C,)`, added to it.
      eps: added to the variance.

    Returns:
      shape, dtype and memory format of `x`.

    Raises:
      TypeError: if x is no floating-point array, or arguments are of the wrong kind.
      ValueError: if shapes do not fit, or C is not divisible by num_groups.

    Source: `torch.nn.functional.group_norm`.

    >>> x = jnp.array([[[1.0], [3.0], [2.0], [2.0]]])
    >>> group_norm(x, 2).ravel().round(3).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    x = _channels("group_norm", x, weight=weight, bias=bias)
    num_groups = integer("group_norm", "num_groups", num_groups, 1)
    number("group_norm", "eps", eps, 0)
    n, c = x.shape[:2]
    if c % num_groups:
        raise ValueError(
            "group_norm: channels must be divisible by num_groups, "
            f"got {c} channels and num_groups={num_groups}."
        )
    physical, format = stored(x)
    grouped = format.split(1, c // num_groups)  # N, groups, their channels, spatial
    within = axes(grouped, range(2, x.ndim + 1))
    shape = grouped.physical_shape((n, num_groups, c // num_groups, *x.shape[2:]))
    over = axes(format, range(2, x.ndim))
    if within == tuple(range(min(within), len(shape))):
        mean, var = (
            _matrix(v, grouped, n) for v in _moments(physical.reshape(shape), within)
        )
    else:
        # By way of channels: vectors of them are added faster than parts of each.
        means, variances = (
            _matrix(v, format, n).reshape(n, num_groups, c // num_groups)
            for v in _moments(physical, over)
        )
        mean = means.mean(2)
        var = (variances + jnp.square(means - mean[..., None])).mean(2)
    mean, var = (
        aligned(
            jnp.repeat(v, c // num_groups, 1).reshape(n, c, *(1,) * (x.ndim - 2)),
            format,
        )
        for v in (mean, var)
    )
    y = _normalize(physical, mean, var, *_per_channel(format, weight, bias), eps, over)
    return store(y, format)


@formatted
def layer_norm(
    x: ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> Array:
    """Normalises over the last dimensions.

    Args:
      x: shape `(..., *normalized_shape)`, floating dtype.
      normalized_shape: sizes of the dimensions to normalise over.
      weight: shape `normalized_shape`, what the result is multiplied by.
      bias: shape `normalized_shape`, added to it.
      eps: added to the variance.

    Returns:
      shape, dtype and memory format of `x`.

    Raises:
      TypeError: if x is no floating-point array, or arguments are of the wrong kind.
      ValueError: if shapes do not fit.

    Source: `torch.nn.functional.layer_norm`.

    >>> layer_norm(jnp.array([[1.0, 3.0]]), 2).round(3).tolist()
    [[-1.0, 1.0]]
    """
    x = floating("layer_norm", x)
    number("layer_norm", "eps", eps, 0)
    try:
        given = np.atleast_1d(normalized_shape).tolist()
        shape = tuple(operator.index(n) for n in given)
    except TypeError:
        raise TypeError(
            "layer_norm: normalized_shape must be an integer or a tuple of them, "
            f"got {normalized_shape!r}."
        ) from None
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(
            "layer_norm: normalized_shape must be the last dimensions of x, "
            f"got {shape} for x of shape {x.shape}."
        )
    for what, value in (("weight", weight), ("bias", bias)):
        if value is not None and jnp.shape(value) != shape:
            raise ValueError(
                f"layer_norm: {what} must have shape {shape}, got {jnp.shape(value)}."
            )
    physical, format = stored(x)
    over = axes(format, range(x.ndim - len(shape), x.ndim))
    mean, var = _moments(physical, over)
    kind = mean.dtype
    y = _normalize(physical.astype(kind), mean, var, None, None, eps, over)
    if weight is not None:
        y = y * aligned(weight, format).astype(kind)
    if bias is not None:
        y = y + aligned(bias, format).astype(kind)
    return store(y.astype(x.dtype), format)


@formatted
def softmax(x: ArrayLike, dim: int) -> Array:
    """exp(x) over its sum along a dimension, in the memory format of x.

    Args:
      x: any shape, floating dtype.
      dim: logical dimension, which may be negative.

    Returns:
      shape, dtype and memory format of `x`; computed in float32 for 16-
      and 8-bit types.

    Raises:
      TypeError: if x is no floating-point array, or arguments are of the wrong kind.
      ValueError: if x has no such dimension.

    Source: `torch.nn.functional.softmax`.

    >>> softmax(jnp.zeros((1, 4)), 1).tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    return _softmax("softmax", nn.softmax, x, dim)


@formatted
def log_softmax(x: ArrayLike, dim: int) -> Array:
    """The logarithm of `softmax(x, dim)`, without the exponentials' overflow.

    >>> log_softmax(jnp.zeros((1, 1)), 1).tolist()
    [[0.0]]
    """
    return _softmax("log_softmax", nn.log_softmax, x, dim)


def _softmax(name: str, function: Any, x: ArrayLike, dim: int) -> Array:
    x = floating(name, x)
    dim = integer(name, "dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{name}: dim must be a dimension of x, got {dim} for shape {x.shape}."
        )
    physical, format = stored(x)
    y = function(physical.astype(wide(x.dtype)), axis=format.axes(dim))
    return store(y.astype(x.dtype), format)


def _channels(name: str, x: ArrayLike, *vectors: Any, **more: Any) -> Array:
    """Checks an input with channels, and vectors with a number for each."""
    x = floating(name, x)
    if x.ndim < 2:
        raise ValueError(f"{name}: x must have shape (N, C, *spatial), got {x.shape}.")
    names = ("running_mean", "running_var", "weight", "bias")
    named = dict(zip(names, vectors, strict=False))
    for what, value in {**named, **more}.items():
        if value is not None and array(name, value, what).shape != (x.shape[1],):
            raise ValueError(
                f"{name}: {what} must have shape ({x.shape[1]},), "
                f"got {jnp.shape(value)} for x of shape {x.shape}."
            )
    return x


def _moments(physical: Array, over: Sequence[int]) -> tuple[Array, Array]:
    """Mean and variance over some axes, which are kept with size 1."""
    mean, var = moments(physical, over)
    return jnp.expand_dims(mean, over), jnp.expand_dims(var, over)


def _normalize(
    physical: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    over: Sequence[int],
) -> Array:
    """(x - mean) / sqrt(var + eps) * weight + bias, all of them physical arrays.

    All but x have size 1 along the axes `over`.
    """
    kind = wide(physical.dtype)
    mean, var = mean.astype(kind), var.astype(kind)
    factor = lax.rsqrt(var + eps)
    if weight is not None:
        factor = factor * weight.astype(kind)
    term = jnp.zeros_like(factor) if bias is None else bias.astype(kind)
    mean, factor, term = (lax.squeeze(v, over) for v in (mean, factor, term))
    return centered_affine(physical, mean, factor, term, over)


def _per_channel(
    format: MemoryFormat, weight: ArrayLike | None, bias: ArrayLike | None
) -> tuple[Array | None, Array | None]:
    return (
        None if weight is None else per_channel(weight, format),
        None if bias is None else per_channel(bias, format),
    )


def _matrix(physical: Array, format: MemoryFormat, n: int) -> Array:
    """Values per sample and channel, all other axes of size 1, as shape `(n, C)`."""
    order = axes(format, range(format.ndim))
    values = lax.transpose(physical, order)
    return values.reshape(n, values.size // max(n, 1))


def _vector(physical: Array, format: MemoryFormat) -> Array:
    return _matrix(physical, format, 1)[0]
