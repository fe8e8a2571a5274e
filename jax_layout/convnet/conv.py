# SPDX-License-Identifier: Apache-2.0
"""Convolutions of logically NCHW values, computed in the memory format of x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_layout import _compat
from jax_layout.arguments import arrays
from jax_layout.convnet.convolution import (
    along_channels,
    conv_fused_p,
    conv_input_grad_p,
    conv_p,
)
from jax_layout.convnet.packed import conv_packed_p, packed_format
from jax_layout.convnet.passes import Convolution, Sizes, each
from jax_layout.formats.annotations import FormattedArray
from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.formats.physical import sizes
from jax_layout.formats.tags import formatted, store, stored


@formatted
def conv(
    x: ArrayLike,
    weight: ArrayLike | FormattedArray,
    bias: ArrayLike | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Convolution over one to three spatial axes, with bias and relu in one pass.

    Args:
      x: logical shape `(N, C, *spatial)` or `(C, *spatial)`, in any memory format.
      weight: shape `(O, C / groups, *kernel)`, dtype of `x`; a `FormattedArray` in
        the format that `conv_weight_format` tells is not moved by the kernel.
      bias: shape `(O,)`, added to the result.
      stride: of the windows, one for all spatial axes or one for each.
      padding: zeros at both ends; "same" for a result of the size of `x`, which
        takes a stride of 1; "valid" for none.
      dilation: steps between taps.
      groups: number of groups of channels that do not mix.
      activation: "relu" or None.
      precision: as in `jax.lax.conv_general_dilated`; on a CPU, "highest" asks for
        plain sums where 3 x 3 taps are else summed by Winograd's algorithm, which
        rounds otherwise.
      preferred_element_type: dtype of the sums and the result: int32 keeps those
        of int8, float32 those of 16-bit types. The dtype of `x` if left out; the
        sums of 16-bit types are in float32 all the same.

    Returns:
      shape `(N, O, *out)`, or `(O, *out)`, in the memory format of `x`.

    Raises:
      TypeError: if dtypes differ, or arguments are of the wrong kind.
      ValueError: if shapes, strides or groups do not fit.

    Source: `torch.nn.functional.conv2d`; Lavin and Gray, "Fast Algorithms for
    Convolutional Neural Networks" (CVPR 2016).

    >>> x, weight = jnp.ones((8, 3, 32, 32)), jnp.ones((16, 3, 3, 3))
    >>> conv(x, weight, stride=2, padding=1).shape
    (8, 16, 16, 16)
    """
    x, weight, *rest = _operands("conv", x, weight, bias)
    physical, w, format, options = _problem(
        x, weight, stride, padding, dilation, groups, precision, preferred_element_type
    )
    if activation not in (None, "relu"):
        raise ValueError(
            f'conv: activation must be "relu" or None, got {activation!r}.'
        )
    given = [b.astype(options["dtype"]) for b in rest]
    relu = activation == "relu"
    if isinstance(w, FormattedArray):
        y = conv_packed_p(
            physical, w.physical, *given, w_format=w.format, relu=relu, **options
        )
    elif rest or activation:
        y = conv_fused_p(physical, w, *given, relu=relu, **options)
    else:
        y = conv_p(physical, w, **options)
    return _result(y, format, x.ndim == weight.ndim - 1)


def conv_weight_format(
    x: ArrayLike,
    weight: ArrayLike,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    preferred_element_type: DTypeLike | None = None,
) -> MemoryFormat:
    """The order in which `conv` reads these weights without moving them.

    The kernels of a CPU have an order of their own for weights, blocks as a rule,
    and bring row-major ones to it on each call. Weights that stay the same can be
    brought to it once.

    Args:
      x: as in `conv`, as are all; of arrays, only shape and dtype are read, so
        `jax.ShapeDtypeStruct` will do.
      weight: the same.
      stride: the same.
      padding: the same.
      dilation: the same.
      groups: the same.
      preferred_element_type: the same.

    Returns:
      the format; row-major where no other is any better: on GPUs, for depthwise
      and grouped convolutions, for float32 ones of 3 x 3 taps and many pixels, or if
      the kernel's blocks do not divide the channels.

    Raises:
      TypeError: as `conv`.
      ValueError: as `conv`.

    Source: weights of `format_tag::any`, oneDNN developer guide.

    >>> x, weight = jnp.ones((1, 64, 7, 7)), jnp.ones((128, 64, 3, 3))
    >>> format = conv_weight_format(x, weight, padding=1)
    >>> packed = FormattedArray.pack(weight, format)  # once
    >>> conv(x, packed, padding=1).shape
    (1, 128, 7, 7)
    """
    found = []

    def problem(x: Array, weight: Array) -> Array:
        x, weight = _operands("conv_weight_format", x, weight, None)
        physical, w, _, options = _problem(
            x, weight, stride, padding, dilation, groups, None, preferred_element_type
        )
        if jax.default_backend() == "cpu" and isinstance(w, Array):
            found.append(packed_format(physical.aval, w.aval, **options))
        return x

    jax.eval_shape(problem, x, weight)
    return found[0] if found and found[0] else row_major(len(np.shape(weight)))


def _problem(
    x: Array,
    weight: Array | FormattedArray,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    precision: Any,
    preferred_element_type: Any,
) -> tuple[Array, Array | FormattedArray, MemoryFormat, dict[str, Any]]:
    """What convolutions compute on: x and w, the result's format, and options."""
    space = weight.ndim - 2
    strides, dilations = (
        sizes("conv", name, value, space, 1)
        for name, value in (("stride", stride), ("dilation", dilation))
    )
    taps = each(lambda k, d: (k - 1) * d + 1, weight.shape[2:], dilations)
    low, high = _pads(padding, taps, strides)
    out, inner = weight.shape[:2]
    _check_groups("conv", groups, x.shape[-space - 1], inner * groups, out)
    x_size = x.shape[-space:]
    room = each(lambda n, a, b, tap: n + a + b - tap, x_size, low, high, taps)
    if any(size < 0 for size in room) or 0 in weight.shape[2:]:
        raise ValueError(
            "conv: kernel must have taps and fit into x, got kernel "
            f"{weight.shape[2:]} for x {x_size}, padding={padding}, "
            f"dilation={dilations}."
        )
    y_size = each(lambda size, step: size // step + 1, room, strides)
    physical, order, block, format = _memory("conv", x, space, out)
    w, w_order = _weight(weight, groups)
    options = {
        "conv": Convolution(
            x_order=order, w_order=w_order, y_order=order,
            x_size=x_size, w_size=weight.shape[2:], y_size=y_size,
            stride=strides, dilation=dilations, pad_low=low,
            groups=groups, x_block=block, y_block=block,
        ),
        "precision": _compat.canonical_precision(precision),
        "dtype": np.dtype(preferred_element_type or x.dtype),
        "out_sharding": None,
    }  # fmt: skip
    return physical, w, format, options


@formatted
def conv_transpose(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Transposed convolution: the gradient of `conv` with respect to its input.

    Args:
      x: logical shape `(N, C, *spatial)` or `(C, *spatial)`, in any memory format.
      weight: shape `(C, O / groups, *kernel)`, dtype of `x`.
      bias: shape `(O,)`, added to the result.
      stride: of the windows in the result.
      padding: what `conv` would have padded the result with.
      output_padding: how much larger the result is at the far end, less than
        stride or dilation: several sizes have a convolution of x's size.
      groups: number of groups of channels that do not mix.
      dilation: steps between taps.
      precision: as in `jax.lax.conv_general_dilated`.
      preferred_element_type: as in `conv`.

    Returns:
      shape `(N, O, *out)`, or `(O, *out)`, in the memory format of `x`.

    Raises:
      TypeError: if dtypes differ, or arguments are of the wrong kind.
      ValueError: if shapes, strides or groups do not fit.

    Source: `torch.nn.functional.conv_transpose2d`.

    >>> x, weight = jnp.ones((8, 16, 16, 16)), jnp.ones((16, 3, 3, 3))
    >>> conv_transpose(x, weight, stride=2, padding=1, output_padding=1).shape
    (8, 3, 32, 32)
    """
    name = "conv_transpose"
    x, weight, *rest = _operands(name, x, weight, bias, of_groups=groups)
    space = weight.ndim - 2
    strides, dilations, pads, extra = (
        sizes(name, option, value, space, least)
        for option, value, least in (
            ("stride", stride, 1),
            ("dilation", dilation, 1),
            ("padding", padding, 0),
            ("output_padding", output_padding, 0),
        )
    )
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise ValueError(
            "conv_transpose: output_padding must be smaller than stride or dilation, "
            f"got {extra} for stride={strides} and dilation={dilations}."
        )
    out = weight.shape[1] * groups
    _check_groups(name, groups, x.shape[-space - 1], weight.shape[0], out)
    x_size = x.shape[-space:]
    grown = each(
        lambda y, k, s, d, p, e: (y - 1) * s - 2 * p + (k - 1) * d + 1 + e,
        *(x_size, weight.shape[2:], strides, dilations, pads, extra),
    )
    if 0 in weight.shape[2:] or 0 in x_size or any(size < 1 for size in grown):
        raise ValueError(
            "conv_transpose: the result must not be empty, got spatial sizes "
            f"{grown} for x {x_size}, kernel {weight.shape[2:]}, padding={pads}."
        )
    physical, order, block, format = _memory(name, x, space, out)
    w, w_order = _weight(weight)
    assert isinstance(w, Array)
    dtype = np.dtype(preferred_element_type or x.dtype)
    y = conv_input_grad_p(
        physical,
        w,
        conv=Convolution(
            x_order=order, w_order=w_order, y_order=order,
            x_size=grown, w_size=weight.shape[2:], y_size=x_size,
            stride=strides, dilation=dilations, pad_low=pads,
            groups=groups, x_block=block, y_block=block,
        ),
        precision=_compat.canonical_precision(precision),
        dtype=dtype,
        out_sharding=None,
    )  # fmt: skip
    for b in rest:
        y = y + along_channels(b.astype(dtype), y, order, block)
    return _result(y, format, x.ndim == space + 1)


def _operands(
    name: str, x: Any, weight: Any, bias: Any, of_groups: int | None = None
) -> list[Array]:
    if isinstance(weight, FormattedArray):
        (x,) = arrays(name, x=x)
    else:
        x, weight = arrays(name, x=x, weight=weight)
    if not 3 <= weight.ndim <= 5 or x.ndim not in (weight.ndim, weight.ndim - 1):
        raise ValueError(
            f"{name}: weight must have one to three spatial axes and x as many, "
            f"got shapes {weight.shape} and {x.shape}."
        )
    if x.dtype != weight.dtype:
        raise TypeError(
            f"{name}: x and weight must have the same dtype, "
            f"got {x.dtype} and {weight.dtype}."
        )
    if bias is None:
        return [x, weight]
    (bias,) = arrays(name, bias=bias)
    out = weight.shape[0] if of_groups is None else weight.shape[1] * of_groups
    if bias.shape != (out,):
        raise ValueError(f"{name}: bias must have shape {(out,)}, got {bias.shape}.")
    return [x, weight, bias]


def _pads(padding: Any, taps: Sizes, strides: Sizes) -> tuple[Sizes, Sizes]:
    if padding == "same":
        if any(stride != 1 for stride in strides):
            raise ValueError(
                f'conv: padding="same" takes a stride of 1, got stride={strides}.'
            )
        low = each(lambda tap: (tap - 1) // 2, taps)
        return low, each(lambda tap, a: tap - 1 - a, taps, low)
    if isinstance(padding, str) and padding != "valid":
        raise ValueError(
            'conv: padding must be "same", "valid", an int or one per spatial axis, '
            f"got {padding!r}."
        )
    even = sizes("conv", "padding", 0 if padding == "valid" else padding, len(taps), 0)
    return even, even


def _check_groups(name: str, groups: Any, channels: int, needed: int, out: int) -> None:
    if not isinstance(groups, int) or groups < 1:
        raise ValueError(f"{name}: groups must be a positive int, got {groups!r}.")
    if channels % groups or out % groups:
        raise ValueError(
            f"{name}: channels must be divisible by groups, got {channels} and {out} "
            f"channels and groups={groups}."
        )
    if channels != needed:
        raise ValueError(
            f"{name}: weight must be for the channels of x, got weight for {needed} "
            f"and x with {channels}."
        )


def _memory(
    name: str, x: Array, space: int, out: int
) -> tuple[Array, Sizes, int, MemoryFormat]:
    """The array to compute on, its axes, its block of channels, and its format."""
    physical, format = stored(x)
    if x.ndim == space + 1:
        x, physical, format = x[None], physical[None], format.batched()
    axes = [format.axes(dim) for dim in range(space + 2)]
    block = format.blocks[1][0] if format.blocks[1] else 1
    if [len(a) for a in axes] != [1, 1 + (block > 1), *(1,) * space] or (
        block > 1 and axes[1][1] != space + 2
    ):
        # Not a format that convolutions have kernels for.
        format = MemoryFormat.of_permutation(range(space + 2))
        return x, tuple(range(space + 2)), 1, format
    if out % block:
        raise ValueError(
            f"{name}: channels of the result must be divisible by the block of the "
            f"memory format {format}, got {out}."
        )
    return physical, tuple(a[0] for a in axes), block, format


def _weight(
    weight: Array | FormattedArray, packed_groups: int = 0
) -> tuple[Array | FormattedArray, Sizes]:
    """The weights to compute with, and which of their axes are which.

    Args:
      weight: as the caller has them.
      packed_groups: of a caller that takes weights in blocks, if they are in one
        group: it gets those as a `FormattedArray`.
    """
    logical = tuple(range(weight.ndim))
    if isinstance(weight, FormattedArray):
        physical, format = weight.physical, weight.format
    else:
        physical, format = stored(weight)
    if format.permutation is not None:
        return physical, tuple(format.axes(dim)[0] for dim in logical)
    if packed_groups == 1:
        return FormattedArray(physical, format), logical
    return jnp.asarray(weight), logical


def _result(y: Array, format: MemoryFormat, alone: bool) -> Array:
    if not alone:
        return store(y, format)
    # The axis of n has size 1, wherever it lies.
    (axis,) = format.axes(0)
    rest = MemoryFormat(
        format.blocks[1:], tuple((d - 1, atom) for d, atom in format.order if d)
    )
    return store(jnp.squeeze(y, axis), rest)
