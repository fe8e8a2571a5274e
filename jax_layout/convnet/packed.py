# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose weights lie in the kernel's own order."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from jax_layout import _backends
from jax_layout.convnet.conv_kernel import kernel, weights_format
from jax_layout.convnet.convolution import conv_fused_p
from jax_layout.convnet.passes import RESULTS, Convolution, Sizes
from jax_layout.formats.memory_format import MemoryFormat
from jax_layout.kernel import Kernel
from jax_layout.op import Op, batch_of, define, jvp_of


def _unpacked(
    x: Array, w: Array, *bias: Array, w_format: MemoryFormat, **params: Any
) -> Array:
    return conv_fused_p(x, w_format.unpack(w), *bias, **params)


def _kernel(
    platform: str, x: Any, w: Any, *bias: Any, w_format: MemoryFormat, **params: Any
) -> Kernel | None:
    logical = jax.core.ShapedArray(w_format.logical_shape(w.shape), w.dtype)
    return kernel("y", platform, x, logical, *bias, packed=w_format, **params)


def packed_format(
    x: Any, w: Any, *, conv: Convolution, **params: Any
) -> MemoryFormat | None:
    """The order of their own that the CPU's kernels have for weights, if any.

    Args:
      x: shape and dtype of the input.
      w: the same of weights `(O, I, *spatial)`.
      conv: the convolution.
      params: of `conv_p` or `conv_fused_p`.
    """
    if _backends.available("cpu"):
        found = kernel("y", "cpu", x, w, conv=conv, **params)
        if found is not None:
            name = _backends.conv_plan("cpu", found.attributes)["w_format"]
            return weights_format(name, len(conv.stride))
    return None


def _sharding(
    x: Any, w: Any, *bias: Any, conv: Convolution, w_format: MemoryFormat, **params: Any
) -> str:
    """Only the batch may be spread over devices."""

    def names(array: str, ndim: int, order: Sizes = ()) -> str:
        axes = [f"{array}{axis}" for axis in range(ndim)]
        if order:
            axes[order[0]] = "n"
        return " ".join(axes)

    operands = [names("X", x.ndim, conv.x_order), names("W", w.ndim)]
    operands += [names("B", b.ndim) for b in bias]
    return ", ".join(operands) + " -> " + names("Y", x.ndim, conv.y_order)


conv_packed_p = define(
    Op(
        name="conv_packed",
        lax=_unpacked,
        kernel=_kernel,
        jvp=jvp_of(_unpacked),
        batch=batch_of(_unpacked),
        sharding=_sharding,
        platforms=("cpu",),
        dtypes=RESULTS,
        layouts=True,
    )
)
