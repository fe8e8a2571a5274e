# SPDX-License-Identifier: Apache-2.0
"""Mean and variance over some axes, and the sums that their gradients need."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.interpreters import ad

from jax_layout.choices import GAIN
from jax_layout.formats.physical import wide
from jax_layout.kernel import Kernel
from jax_layout.measured import Work
from jax_layout.op import Op, define, in_front
from jax_layout.plain import jnp, lax

_DTYPES = ("float32", "float64", "bfloat16", "float16")
# Kept axes inside of summed ones are added as vectors; few make short ones.
_MIN_INNER = 8
# So many elements tell where the mean is about.
_NEAR = 16


def moments(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    """Mean and variance over some axes; our kernel reads x from memory once.

    Args:
      x: any shape, floating dtype.
      axes: to take them over.

    Returns:
      two arrays of the shape of `x` without those axes, in float32 for 16-bit types;
      zeros if x is empty.

    >>> moments(jnp.array([[1.0, 3.0], [2.0, 2.0]]), [1])[1].tolist()
    [1.0, 0.0]
    """
    mean, var = moments_p(x, axes=tuple(sorted(axes)), differentiated=False)
    return mean, var


def centered_affine(
    x: Array, center: Array, factor: Array, term: Array, axes: Sequence[int]
) -> Array:
    """(x - center) * factor + term, of which the last three lack some of x's axes.

    Args:
      x: any shape, floating dtype.
      center: shape of `x` without `axes`, dtype of `moments(x)`.
      factor: dtype of `center`, and a shape that broadcasts to its.
      term: the same.
      axes: that they lack.

    Returns:
      shape and dtype of `x`; computed in the dtype of `center`.

    >>> one = jnp.ones(2)
    >>> centered_affine(jnp.ones((2, 1)), one, one, 5 * one, [1]).tolist()
    [[5.0], [5.0]]
    """
    vectors = jnp.broadcast_arrays(center, factor, term)
    y: Array = centered_affine_p(x, *vectors, axes=tuple(sorted(axes)))
    return y


def _moments(x: Array, *, axes: tuple[int, ...], differentiated: bool) -> list[Array]:
    x = x.astype(wide(x.dtype))
    if not x.size:
        empty = jnp.zeros([n for axis, n in enumerate(x.shape) if axis not in axes])
        return [empty.astype(x.dtype)] * 2
    cpu = functools.partial(_two_passes, axes=axes)
    others = functools.partial(_one_pass, axes=axes)
    out: list[Array] = lax.platform_dependent(x, cpu=cpu, default=others)
    return out


def _two_passes(x: Array, *, axes: tuple[int, ...]) -> list[Array]:
    # A float32 norm of 4096 rows of 768 takes 1.3 ms so, 3.1 ms with _one_pass:
    # XLA of jax 0.12 on AVX-512 (Zen 4).
    return [x.mean(axes), x.var(axes)]


def _one_pass(x: Array, *, axes: tuple[int, ...]) -> list[Array]:
    # Sums of squares cancel badly where the mean is large, so they are taken about
    # the mean of a few elements: one pass, where the loops of both sums are one, as
    # on GPUs. An axis that is spread over devices has no few elements.
    spec = jax.typeof(x).sharding.spec
    near = x
    for axis in axes if all(spec[axis] is None for axis in axes) else ():
        many = _NEAR if axis == axes[-1] else 1
        near = lax.slice_in_dim(near, 0, min(many, x.shape[axis]), axis=axis)
    point = near.mean(axes)
    mean = x.mean(axes)
    square = jnp.square(x - jnp.expand_dims(point, axes)).mean(axes)
    var = square - jnp.square(mean - point)
    return [mean, jnp.where(var < 0, jnp.zeros_like(var), var)]


def _centered_sums(
    ct: Array, x: Array, center: Array, *, axes: tuple[int, ...]
) -> list[Array]:
    ct = ct.astype(center.dtype)
    # Else what a gradient subtracts besides is written to memory, once for both.
    center = lax.optimization_barrier(center)
    apart = x.astype(center.dtype) - jnp.expand_dims(center, axes)
    return [ct.sum(axes), (ct * apart).sum(axes)]


def _centered_affine(
    x: Array, center: Array, factor: Array, term: Array, *, axes: tuple[int, ...]
) -> Array:
    center, factor, term = (jnp.expand_dims(v, axes) for v in (center, factor, term))
    y = (x.astype(center.dtype) - center) * factor + term
    return y.astype(x.dtype)


def _collapsed(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape as (kept, summed, kept, summed, kept), if it can be had so."""
    out = [1]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if (len(out) % 2 == 0) != (axis in axes):
            out.append(1)
        out[-1] *= size
    if len(out) in (2, 3):  # the one sum is that over the inner axis
        out = [out[0], 1, 1, *out[1:]]
    if len(out) > 5:
        return None
    return (*out, *[1] * (5 - len(out)))


def _kernel(
    name: str,
    platform: str,
    *avals: Any,
    axes: tuple[int, ...],
    differentiated: bool = True,
) -> Kernel | None:
    x = avals[0]
    work = f"{name} {x.dtype.name}"
    if x.dtype.name not in _DTYPES or len(axes) == x.ndim or x.size == 0:
        return None

    def in_order(order: tuple[int, ...]) -> Kernel | None:
        kept = [axis for axis in order if axis not in axes]
        summed = [place for place, axis in enumerate(order) if axis in axes]
        shape = _collapsed([x.shape[axis] for axis in order], summed)
        if shape is None or 1 < shape[-1] < _MIN_INNER or kept != sorted(kept):
            return None
        layouts = [order if v.ndim == x.ndim else range(v.ndim) for v in avals]
        known = Work(work, shape)
        gain = 0.95  # plain `lax` reads x twice, others' sums about zero once
        if not differentiated:
            known = Work(f"{work} forward", shape, like=(work,))
            if shape[1] == shape[4] == 1:  # of rows, whose norm XLA makes in one loop
                gain = GAIN
        return Kernel(
            {"shape": np.array(shape, np.int64)},
            operand_layouts=layouts,
            result_layouts=[range(len(kept))] * 2,
            work=known,
            gain=gain,
        )

    kernel = in_order(tuple(range(x.ndim)))
    return kernel and dataclasses.replace(
        kernel,
        in_order=lambda order: in_order(order) if order else None,
        ordered_by=[len(avals) // 2],  # x
    )


def _moments_jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    axes: tuple[int, ...],
    differentiated: bool,
) -> tuple[list[Array], list[Any]]:
    (x,), (tangent,) = primals, tangents
    constant = type(tangent) is ad.Zero
    # A call cuts in two what XLA may make one loop of; not where a gradient reads the
    # moments as well. Tables have both.
    mean, var = moments_p(x, axes=axes, differentiated=differentiated or not constant)
    if constant:
        zero = ad.Zero(jax.typeof(mean).to_tangent_aval())
        return [mean, var], [zero, zero]
    total, product = centered_sums_p(tangent, x, mean, axes=axes)
    count = max(math.prod(x.shape[axis] for axis in axes), 1)
    return [mean, var], [total / count, product * (2 / count)]


def _centered_sums_jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, axes: tuple[int, ...]
) -> tuple[list[Array], list[Any]]:
    ct, x, center = primals
    d_ct, d_x, d_center = tangents
    out = centered_sums_p(ct, x, center, axes=axes)
    total = product = jnp.zeros_like(center)
    if type(d_ct) is not ad.Zero:
        total, product = centered_sums_p(d_ct, x, center, axes=axes)
    if type(d_x) is not ad.Zero:
        kind = center.dtype
        product = product + (ct.astype(kind) * d_x.astype(kind)).sum(axes)
    if type(d_center) is not ad.Zero:
        product = product - out[0] * d_center
    return out, [total, product]


def _centered_sums_transpose(
    cts: Sequence[Any], ct: Any, x: Array, center: Array, *, axes: tuple[int, ...]
) -> list[Any]:
    term, factor = (ad.instantiate_zeros(c) for c in cts)
    return [centered_affine_p(x, center, factor, term, axes=axes), None, None]


def _centered_affine_jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, axes: tuple[int, ...]
) -> tuple[Array, Array]:
    x, center, factor, term = primals
    d_x, d_center, d_factor, d_term = tangents
    y = centered_affine_p(*primals, axes=axes)
    terms = []
    if type(d_center) is not ad.Zero:
        d_term = _plus(d_term, -d_center * factor)
    if not (type(d_factor) is type(d_term) is ad.Zero):
        linear = [ad.instantiate_zeros(d) for d in (d_factor, d_term)]
        terms.append(centered_affine_p(x, center, *linear, axes=axes))
    if type(d_x) is not ad.Zero:
        moved = d_x.astype(center.dtype) * jnp.expand_dims(factor, axes)
        terms.append(moved.astype(x.dtype))
    return y, sum(terms[1:], terms[0])


def _plus(tangent: Any, other: Array) -> Array:
    return other if type(tangent) is ad.Zero else tangent + other


def _centered_affine_transpose(
    ct: Any, x: Array, center: Array, factor: Any, term: Any, *, axes: tuple[int, ...]
) -> list[Any]:
    if type(ct) is ad.Zero:
        return [None, None, ct, ct]
    total, product = centered_sums_p(ct, x, center, axes=axes)
    return [
        None,
        None,
        product if ad.is_undefined_primal(factor) else None,
        total if ad.is_undefined_primal(term) else None,
    ]


def _batch_of(
    apply: Callable[[], Callable[..., Any]],
) -> Callable[..., Any]:
    """The rule of an operator that gets one more leading axis, in all operands."""

    def batch(
        operands: Sequence[Array],
        dims: Sequence[Any],
        *,
        axes: tuple[int, ...],
        **params: Any,
    ) -> Any:
        moved = tuple(axis + 1 for axis in axes)
        out = apply()(*in_front(operands, dims), axes=moved, **params)
        return out, [0] * len(out) if isinstance(out, list) else 0

    return batch


def _moments_in_parts(
    total: Any, x: Array, *, axes: tuple[int, ...], differentiated: bool
) -> list[Array]:
    mean, var = moments_p(x, axes=axes, differentiated=differentiated)
    count = jnp.full((), math.prod(x.shape[axis] for axis in axes), mean.dtype)
    whole = total(count)
    middle = total(mean * count) / whole
    return [middle, total((var + jnp.square(mean - middle)) * count) / whole]


def _sharding(*avals: Any, axes: tuple[int, ...], **_: Any) -> str:
    names = [f"a{i}" for i in range(avals[0].ndim)]
    kept = " ".join(name for i, name in enumerate(names) if i not in axes)
    whole = " ".join(names)
    operands = [whole if v.ndim == len(names) else kept for v in avals]
    return ", ".join(operands) + f" -> {kept}, {kept}"


moments_p: Any = define(
    Op(
        name="moments",
        lax=_moments,
        kernel=functools.partial(_kernel, "moments"),
        jvp=_moments_jvp,
        batch=_batch_of(lambda: moments_p),
        sharding=_sharding,
        in_parts=_moments_in_parts,
        multiple_results=True,
        platforms=("cpu",),  # a GPU's compiler makes one kernel of it
        dtypes=("float32", "float64"),
        layouts=True,
    )
)

centered_sums_p: Any = define(
    Op(
        name="centered_sums",
        lax=_centered_sums,
        kernel=functools.partial(_kernel, "centered_sums"),
        jvp=_centered_sums_jvp,
        transpose=_centered_sums_transpose,
        batch=_batch_of(lambda: centered_sums_p),
        sharding=_sharding,
        multiple_results=True,
        platforms=("cpu",),
        dtypes=("float32", "float64"),
        layouts=True,
    )
)

# The transpose of the sums, and they are its own.
centered_affine_p: Any = define(
    Op(
        name="centered_affine",
        lax=_centered_affine,
        jvp=_centered_affine_jvp,
        transpose=_centered_affine_transpose,
        batch=_batch_of(lambda: centered_affine_p),
    )
)
