# SPDX-License-Identifier: Apache-2.0
"""Arrays in a memory format, as a user asks for them and about them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.typing import ArrayLike, DTypeLike

from jax_layout.formats.memory_format import (
    FormatLike,
    MemoryFormat,
    channels_first,
    convert,
    resolve,
    row_major,
)
from jax_layout.formats.tags import (
    format_of,
    format_of_array,
    remember,
    stored,
)
from jax_layout.op import Op, define
from jax_layout.plain import jnp, lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FormattedArray:
    """An array of plain jax kept in a memory format, as `plan_layout` lays it out.

    A node of a tree, whose leaf is the physical array: `jax.tree.map`, optimizers
    and derivatives work on that. Functions of `jax.numpy` take it for the logical
    array, which they make.

    Attributes:
      physical: row-major array of what lies in memory.
      format: in which order that is.

    >>> x = FormattedArray(jnp.zeros((2, 32, 32, 3)), MemoryFormat.named("NHWC"))
    >>> x.shape, x.logical().shape
    ((2, 3, 32, 32), (2, 3, 32, 32))
    """

    physical: Array
    format: MemoryFormat = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        if not isinstance(self.format, MemoryFormat):
            raise TypeError(
                "FormattedArray: format must be a MemoryFormat, "
                f"got {self.format!r}; FormattedArray.pack takes names too."
            )

    @classmethod
    def pack(cls, x: ArrayLike, format: FormatLike) -> FormattedArray:
        """A plain array, brought to a format: see `with_memory_format`."""
        x = _array("FormattedArray.pack", x)
        wanted = resolve("FormattedArray.pack", format, x.ndim)
        return cls(wanted.pack(x), wanted)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.format.logical_shape(self.physical.shape)

    @property
    def ndim(self) -> int:
        """Number of logical dimensions."""
        return self.format.ndim

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.physical.dtype

    def logical(self) -> Array:
        """The row-major array with the logical shape."""
        return self.format.unpack(self.physical)

    __jax_array__ = logical


@functools.lru_cache(maxsize=512)
def _in_format(format: MemoryFormat, placement: Any) -> Callable[[Array], Array]:
    """Writes concrete arrays, whatever format they are in, in this one."""
    order = format.permutation
    assert order is not None

    def relayout(x: Array) -> Array:
        return lax.transpose(format.pack(x), np.argsort(order))

    out = Format(Layout(order), placement)
    compiled = jax.jit(relayout, out_shardings=out)

    def call(x: Array) -> Array:
        # Ours permutes row-major arrays; XLA reads the others as they lie.
        if format_of_array(x).row_major:
            return compiled(x)
        return jax.device_put(x, out)

    return call


def with_memory_format(x: ArrayLike, memory_format: FormatLike) -> Array:
    """The same values in another memory format.

    A concrete array is moved in memory, and keeps its format as jax's own
    `Format(Layout(...))`; its shape stays logical, NCHW. Inside a trace the result
    is tagged: the operators of this package compute in the tag's format and hand it
    on, in the forward pass and in the gradient; other functions, and the borders of
    `jit`, `scan`, `while_loop` and `cond`, take the plain logical values.

    Args:
      x: logical shape `(N, C, *spatial)`, or `(O, I, *spatial)` of a weight.
      memory_format: `channels_last`, `channels_first`, a name such as "NHWC",
        "NCHW16c" or "HWIO", or a `MemoryFormat`.

    Returns:
      values, shape and dtype of `x`.

    Raises:
      TypeError: if x is not an array, or memory_format no format.
      ValueError: if the format's rank or blocks do not fit the shape, or a format
        with blocks, which jax has no layout for, is asked of a concrete array.

    Source: `Tensor.to(memory_format=...)` of PyTorch; the soft tag of its RFC #19092.

    >>> x = with_memory_format(jnp.zeros((8, 3, 32, 32)), "channels_last")
    >>> x.shape, is_contiguous(x, "NHWC")
    ((8, 3, 32, 32), True)
    """
    x = _array("with_memory_format", x)
    format = resolve("with_memory_format", memory_format, x.ndim)
    try:
        format.physical_shape(x.shape)
    except ValueError as error:
        raise ValueError(f"with_memory_format: {error}") from error
    if isinstance(x, jax.core.Tracer):
        physical, current = stored(x)
        y = memory_format_p(x, format=format)
        remember(y, convert(physical, current, format), format)
        return y
    if format.permutation is None:
        raise ValueError(
            f"with_memory_format: a concrete array cannot have the format {format}, "
            "which has blocks; convert inside jit, or keep format.pack(x)."
        )
    return _in_format(format, x.sharding)(x)


def memory_format(x: ArrayLike) -> MemoryFormat:
    """The memory format of an array, or the tag of a traced value.

    >>> memory_format(jnp.zeros((8, 3, 32, 32)))
    MemoryFormat(NCHW)
    """
    return format_of(_array("memory_format", x))


def is_contiguous(x: ArrayLike, memory_format: FormatLike = channels_first) -> bool:
    """Whether the elements of x lie in memory as the format says.

    Axes of size 1 have no place in memory: with one channel, or one pixel, an
    array is contiguous in NCHW and in NHWC, as in PyTorch.

    Args:
      x: array or traced value, shape `(N, C, *spatial)`.
      memory_format: as in `with_memory_format`.

    >>> x = jnp.zeros((8, 3, 32, 32))
    >>> is_contiguous(x), is_contiguous(x, "channels_last")
    (True, False)
    >>> is_contiguous(x[:, :1], "channels_last")
    True
    """
    x = _array("is_contiguous", x)
    if memory_format is channels_first:
        wanted = row_major(x.ndim)
    else:
        wanted = resolve("is_contiguous", memory_format, x.ndim)
    return wanted.without_units(x.shape) == format_of(x).without_units(x.shape)


Preserve = Literal["preserve"]
preserve: Preserve = "preserve"


def full_like(
    x: ArrayLike,
    fill_value: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    memory_format: FormatLike = preserve,
) -> Array:
    """An array of one value, with the shape and, unless said otherwise, format of x.

    Args:
      x: shape `(N, C, *spatial)`, any dtype.
      fill_value: number, or array that broadcasts to the shape of `x`.
      dtype: of the result; `x`'s if left out.
      memory_format: `preserve`, or as in `with_memory_format`.

    >>> x = with_memory_format(jnp.zeros((8, 3, 32, 32)), "channels_last")
    >>> is_contiguous(full_like(x, 2.0), "channels_last")
    True
    """
    return _like("full_like", x, fill_value, dtype, memory_format)


def zeros_like(
    x: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    memory_format: FormatLike = preserve,
) -> Array:
    """`full_like` with zeros."""
    return _like("zeros_like", x, 0, dtype, memory_format)


def ones_like(
    x: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    memory_format: FormatLike = preserve,
) -> Array:
    """`full_like` with ones."""
    return _like("ones_like", x, 1, dtype, memory_format)


def empty_like(
    x: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    memory_format: FormatLike = preserve,
) -> Array:
    """`full_like` with values that do not matter: zeros, as in `jax.numpy`."""
    return _like("empty_like", x, 0, dtype, memory_format)


def _like(
    name: str, x: ArrayLike, value: ArrayLike, dtype: Any, format: FormatLike
) -> Array:
    x = _array(name, x)
    if isinstance(format, str) and format == preserve:
        wanted = format_of(x)
    else:
        wanted = resolve(name, format, x.ndim)
    y = jnp.full_like(x, value, dtype=dtype)
    return y if wanted.row_major else with_memory_format(y, wanted)


def _array(name: str, x: Any) -> Array:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: x must be an array, got {type(x).__name__}.")
    # A copy of a traced value, as asarray makes some, would be without its tag.
    return x if isinstance(x, Array) else jnp.asarray(x)


def _transpose(ct: Array, x: Any, *, format: MemoryFormat) -> list[Any]:
    # Concrete ones stay as they lie: jax.vmap, which may be at work, has no layouts.
    if not isinstance(ct, jax.core.Tracer):
        return [ct]
    return [with_memory_format(ct, format)]


def _batch(
    operands: Sequence[Array], dims: Sequence[int], *, format: MemoryFormat
) -> tuple[Array, int]:
    (x,), (dim,) = operands, dims
    return memory_format_p(jnp.moveaxis(x, dim, 0), format=format.batched()), 0


def _sharding(x: Any, *, format: MemoryFormat) -> str:
    axes = " ".join(f"a{i}" for i in range(x.ndim))
    return f"{axes} -> {axes}"


memory_format_p = define(
    Op(
        name="memory_format",
        lax=lambda x, *, format: x,
        transpose=_transpose,
        batch=_batch,
        sharding=_sharding,
    )
)
