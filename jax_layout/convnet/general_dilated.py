# SPDX-License-Identifier: Apache-2.0
"""The convolution of jax.lax, recognised as one of the three passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.lax import ConvDimensionNumbers
from jax.typing import ArrayLike, DTypeLike

from jax_layout import _compat
from jax_layout.convnet.convolution import PASSES, move_groups
from jax_layout.convnet.passes import Convolution, Sizes, each, swap
from jax_layout.plain import jnp, lax


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """`jax.lax.conv_general_dilated`, for the layers that take one.

    Convolutions, those of a dilated lhs without strides (transposed convolutions,
    gradients of the input) and those with batch groups (gradients of the weight)
    run on the kernels here, whatever the order of their axes.

    Args:
      lhs: as in `jax.lax.conv_general_dilated`, as are all.
      rhs: array of lhs' dtype.
      window_strides: per spatial axis.
      padding: "SAME", "SAME_LOWER", "VALID" or (low, high) per spatial axis.
      lhs_dilation: per spatial axis.
      rhs_dilation: per spatial axis.
      dimension_numbers: three strings, `ConvDimensionNumbers` or None.
      feature_group_count: number of groups of channels.
      batch_group_count: number of groups of the batch.
      precision: of the products.
      preferred_element_type: dtype of the sums and the result.
      out_sharding: of the result.

    Returns:
      what `jax.lax.conv_general_dilated` does.

    Raises:
      TypeError: as `jax.lax.conv_general_dilated`.
      ValueError: as `jax.lax.conv_general_dilated`.

    >>> x, w = jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 16))
    >>> conv_general_dilated(
    ...     x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).shape
    (1, 4, 4, 16)
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    known = None
    if lhs.dtype == rhs.dtype and lhs.ndim == rhs.ndim >= 2:
        known = recognise(
            lhs.shape,
            rhs.shape,
            window_strides,
            padding,
            lhs_dilation or (1,) * (lhs.ndim - 2),
            rhs_dilation or (1,) * (lhs.ndim - 2),
            lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers),
            feature_group_count,
            batch_group_count,
        )
    if known is None:
        return lax.conv_general_dilated(
            lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation,
            dimension_numbers, feature_group_count, batch_group_count, precision,
            preferred_element_type, out_sharding,
        )  # fmt: skip
    result, conv = known
    if result == "x":
        rhs = turned(rhs, conv)
    dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    return PASSES[result](
        lhs,
        rhs,
        conv=conv,
        precision=_compat.canonical_precision(precision),
        dtype=np.dtype(dtype),
        out_sharding=out_sharding,
    )


def turned(rhs: Array, conv: Convolution) -> Array:
    """The weight of an input gradient, which reads its taps from the other end."""
    rhs = lax.rev(rhs, conv.w_order[2:])
    return move_groups(rhs, conv.w_order[1], conv.w_order[0], conv.groups)


def recognise(
    lhs: Sizes,
    rhs: Sizes,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    orders: ConvDimensionNumbers,
    feature_groups: int,
    batch_groups: int,
) -> tuple[str, Convolution] | None:
    """The pass that a convolution is, by its result; None if none, or not valid."""
    lists = (strides, lhs_dilation, rhs_dilation)
    pads = () if isinstance(padding, str) else tuple(padding)
    if not all(isinstance(p, Sequence) or getattr(p, "ndim", 0) for p in pads):
        return None  # no pair of numbers
    numbers = [feature_groups, batch_groups, *(i for each in lists for i in each)]
    sizes = [*lhs, *rhs, *numbers, *(p for low_high in pads for p in low_high)]
    if not all(isinstance(size, int | np.integer) for size in sizes):
        return None  # symbolic ones, say
    lhs_order, rhs_order, out_order = (tuple(order) for order in orders)
    n, c, *x_size = (lhs[axis] for axis in lhs_order)
    o, i, *w_size = (rhs[axis] for axis in rhs_order)
    if any(len(each) != len(x_size) for each in lists) or 0 in w_size:
        return None
    if min(numbers) < 1 or min(feature_groups, batch_groups) > 1:
        return None
    groups = max(feature_groups, batch_groups)
    if c != i * feature_groups or o % groups or n % batch_groups:
        return None
    plain = all(d == 1 for d in lhs_dilation)
    taps = each(lambda k, d: (k - 1) * d + 1, w_size, rhs_dilation)
    if isinstance(padding, str):
        if not plain:
            return None
        pads = tuple(lax.padtype_to_pads(x_size, taps, strides, padding))
    if len(pads) != len(x_size) or any(len(low_high) != 2 for low_high in pads):
        return None
    dilated = each(lambda x, d: (x - 1) * d + 1 if x else 0, x_size, lhs_dilation)
    padded = each(lambda size, low_high: size + sum(low_high), dilated, pads)
    if any(size < 0 for size in padded):
        return None
    y_size = each(lambda p, k, s: max(0, (p - k) // s + 1), padded, taps, strides)
    if 0 in y_size:
        return None  # nothing to compute
    pad_low = [low for low, _ in pads]

    def convolution(**fields: Any) -> Convolution:
        fields = {name: tuple(map(int, field)) for name, field in fields.items()}
        return Convolution(**fields, groups=int(groups))

    # The gradient of the weight as jax writes it: batch and channels have changed
    # places, and the window is the larger array.
    swapped = lhs_order[0] > lhs_order[1] and math.prod(y_size) < math.prod(w_size)
    if plain and (batch_groups > 1 or (swapped and feature_groups == 1)):
        return "w", convolution(
            x_order=swap(lhs_order), w_order=swap(out_order),
            y_order=swap(rhs_order), x_size=x_size, w_size=y_size, y_size=w_size,
            stride=rhs_dilation, dilation=strides, pad_low=pad_low,
        )  # fmt: skip
    if plain:
        return "y", convolution(
            x_order=lhs_order, w_order=rhs_order, y_order=out_order,
            x_size=x_size, w_size=w_size, y_size=y_size,
            stride=strides, dilation=rhs_dilation, pad_low=pad_low,
        )  # fmt: skip
    if batch_groups == 1 and all(s == 1 for s in strides):
        return "x", convolution(
            x_order=out_order, w_order=swap(rhs_order), y_order=lhs_order,
            x_size=y_size, w_size=w_size, y_size=x_size,
            stride=lhs_dilation, dilation=rhs_dilation,
            pad_low=each(lambda k, low: k - 1 - low, taps, pad_low),
        )  # fmt: skip
    return None
