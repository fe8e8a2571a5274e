# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for `jax.lax.dot_general` and `jax.numpy`'s `einsum` and `tensordot`.

The result is written in the order it is asked for: `jax.numpy.einsum` computes
batch axes first and transposes afterwards.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import opt_einsum
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_layout import _compat
from jax_layout.arguments import widest
from jax_layout.plain import jnp, lax
from jax_layout.products.gemm import contract


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Drop-in for `jax.lax.dot_general`, also as `dot_general=` of Flax's layers.

    Args:
      lhs: array.
      rhs: array.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch,
        rhs_batch))`, each a sequence of axes.
      precision: as in `jax.lax.dot_general`, algorithm presets included.
      preferred_element_type: dtype of the result.
      out_sharding: as in `jax.lax.dot_general`.

    Returns:
      batch axes, then those that are left of lhs, then those of rhs.

    Raises:
      TypeError, ValueError: as `jax.lax.dot_general`.

    >>> dot_general(jnp.ones((2, 3)), jnp.ones((4, 3)), (([1], [1]), ([], []))).shape
    (2, 4)
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    try:
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
    except (TypeError, ValueError):
        raise ValueError(
            "dot_general: dimension_numbers must be ((lhs_contracting, "
            "rhs_contracting), (lhs_batch, rhs_batch)), each a sequence of axes, "
            f"got {dimension_numbers}."
        ) from None

    def plain() -> Array:
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )

    if lhs.dtype != rhs.dtype or lhs.ndim + rhs.ndim > len(string.ascii_letters):
        return plain()
    jax.eval_shape(plain)  # its errors
    x = dict(enumerate(string.ascii_letters[: lhs.ndim]))
    free = iter(string.ascii_letters[lhs.ndim :])
    w = dict(
        zip([*rhs_sum, *rhs_batch], [x[i] for i in (*lhs_sum, *lhs_batch)], strict=True)
    )
    w |= {i: next(free) for i in range(rhs.ndim) if i not in w}
    used = [x[i] for i in (*lhs_sum, *lhs_batch)]
    y = [x[i] for i in lhs_batch]
    y += [x[i] for i in range(lhs.ndim) if x[i] not in used]
    y += [w[i] for i in range(rhs.ndim) if w[i] not in used]
    lhs_term, rhs_term = ("".join(term[i] for i in range(len(term))) for term in (x, w))
    return contract(
        lhs,
        rhs,
        f"{lhs_term},{rhs_term}->{''.join(y)}",
        precision=_compat.canonical_precision(precision),
        dtype=preferred_element_type,
        out_sharding=out_sharding,
    )


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    _dot_general: Callable[..., Array] = lax.dot_general,
) -> Array:
    """Drop-in for `jax.numpy.einsum`.

    Products of two operands read both, and write the result, in the order of
    their subscripts: `einsum("bshd,bthd->bhst", q, k)` moves nothing else.

    Args:
      subscripts: as in `jax.numpy.einsum`, with `...` or without.
      operands: arrays.
      out: not supported, None.
      optimize: the order of products of three operands and more, as in
        `opt_einsum.contract_path`.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result.
      out_sharding: as in `jax.lax.dot_general`.

      _dot_general: another function for the products, as layers of Flax pass one;
        `jax.lax.dot_general` and the one here are the same.

    Returns:
      the result of the subscripts' right side.

    Raises:
      TypeError, ValueError: as `jax.numpy.einsum`.

    >>> q, k = jnp.ones((2, 5, 3, 4)), jnp.ones((2, 6, 3, 4))
    >>> einsum("bshd,bthd->bhst", q, k).shape
    (2, 3, 5, 6)
    """
    options = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }

    ours = _dot_general in (lax.dot_general, dot_general)

    def plain() -> Array:
        return jnp.einsum(
            subscripts,
            *operands,
            out=out,
            optimize=optimize,
            out_sharding=out_sharding,
            _dot_general=dot_general if ours else _dot_general,
            **options,
        )

    simple = isinstance(subscripts, str) and out is None and len(operands) > 1
    if not simple or not ours:
        return plain()
    arrays = [jnp.asarray(operand) for operand in operands]
    try:
        left, y, _ = opt_einsum.parser.parse_einsum_input(
            (subscripts, *[x.shape for x in arrays]), shapes=True
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"einsum: {error}") from None
    terms = left.split(",")
    if not _is_simple(terms, y, [x.shape for x in arrays]):
        return plain()
    dtype, result = promoted("einsum", preferred_element_type, *arrays)
    arrays = [x.astype(dtype) for x in arrays]
    if len(arrays) > 2:
        if out_sharding is not None:
            return plain()
        _, path = opt_einsum.contract_path(
            f"{left}->{y}",
            *[x.shape for x in arrays],
            shapes=True,
            optimize=optimize if optimize is not True else "optimal",
        )
        if any(len(indices) > 2 for indices, *_ in path.contraction_list):
            return plain()  # its error
        for indices, _, step, *_ in path.contraction_list:
            taken = [arrays.pop(i) for i in indices]
            arrays.append(einsum(step, *taken, **options))
        return arrays[0]
    # What is in one operand alone is summed before the product.
    for i, other in ((0, terms[1]), (1, terms[0])):
        alone = [n for n, label in enumerate(terms[i]) if label not in other + y]
        if alone:
            if widest(dtype, result) == result:  # as wide as the product's sums
                arrays = [x.astype(result) for x in arrays]
            total = jnp.any if arrays[i].dtype == bool else jnp.sum
            arrays[i] = total(arrays[i], axis=alone).astype(arrays[i].dtype)
            terms[i] = "".join(i for i in terms[i] if i in other + y)
    return contract(
        arrays[0],
        arrays[1],
        f"{terms[0]},{terms[1]}->{y}",
        precision=_compat.canonical_precision(precision),
        dtype=result,
        out_sharding=out_sharding,
    )


def _is_simple(terms: Sequence[str], y: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether this is products and sums alone: no diagonals, nothing broadcast."""
    extents: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        if len(set(term)) != len(term) or not term.isascii():
            return False
        for label, extent in zip(term, shape, strict=True):
            if extents.setdefault(label, extent) != extent:
                return False
    return True


def tensordot(
    a: ArrayLike,
    b: ArrayLike,
    axes: int | Sequence[int] | Sequence[Sequence[int]] = 2,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """Drop-in for `jax.numpy.tensordot`.

    Args:
      a: array.
      b: array.
      axes: how many of a's last and b's first axes are summed over, or the axes of
        both.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result.
      out_sharding: as in `jax.lax.dot_general`.

    Returns:
      the axes left of a, then those of b.

    Raises:
      TypeError, ValueError: as `jax.numpy.tensordot`.

    >>> tensordot(jnp.ones((2, 3, 4)), jnp.ones((3, 4, 5))).shape
    (2, 5)
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    jax.eval_shape(lambda: jnp.tensordot(a, b, axes))  # its errors
    if isinstance(axes, int | np.integer):
        a_axes = list(range(a.ndim - axes, a.ndim))
        b_axes = list(range(axes))
    else:
        a_axes, b_axes = (
            [int(i) % x.ndim for i in np.atleast_1d(np.asarray(side))]
            for x, side in zip((a, b), axes, strict=True)
        )
    dtype, result = promoted("tensordot", preferred_element_type, a, b)
    return dot_general(
        a.astype(dtype),
        b.astype(dtype),
        ((a_axes, b_axes), ((), ())),
        precision=precision,
        preferred_element_type=result,
        out_sharding=out_sharding,
    )


def promoted(name: str, preferred: Any, *arrays: Array) -> tuple[np.dtype, np.dtype]:
    """The dtype in which operands are multiplied, and the result's: jax.numpy's."""
    dtype = jnp.result_type(*arrays)
    if preferred is None:
        return dtype, dtype
    result = jax.dtypes.canonicalize_dtype(preferred)
    return dtype, np.dtype(result)
