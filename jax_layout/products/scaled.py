# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit floats that stand for more: each array has a factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_layout.kernel import Kernel
from jax_layout.op import Op, batch_of, define, jvp_of
from jax_layout.products.gemm import contract, gemm_kernel
from jax_layout.products.letters import terms, turned, unused_letter

_FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))


def is_float8(dtype: Any) -> bool:
    return np.dtype(dtype) in _FLOAT8


def scaled_product(
    a: Array,
    b: Array,
    scale_a: Array,
    scale_b: Array,
    scale_result: Array | None,
    spec: str,
    dtype: np.dtype,
) -> Array:
    """scale_result * (scale_a * a)(scale_b * b), rounded once.

    Args:
      a: array of 8-bit floats.
      b: array of 8-bit floats.
      scale_a: float32, shape `()`; and so are the others.
      scale_b: see scale_a.
      scale_result: see scale_a, or None.
      spec: the contraction, as for `contract`.
      dtype: of the result.
    """
    scales = [scale_a, scale_b]
    if scale_result is not None and is_float8(dtype):
        scales.append(scale_result)
    elif scale_result is not None:
        scales[0] = scale_a * scale_result
    return scaled_gemm_p(a, b, *scales, spec=spec, dtype=dtype)


def rounded(x: Array, dtype: np.dtype) -> Array:
    """What is out of an 8-bit float's range becomes its largest, as on a GPU."""
    if is_float8(dtype):
        bound = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -bound, bound)
    return x.astype(dtype)


def _lax(a: Array, b: Array, *scales: Array, spec: str, dtype: np.dtype) -> Array:
    # 8-bit floats are exact in every format that multiplies them.
    out = contract(a.astype(jnp.float32), b.astype(jnp.float32), spec)
    out = out * (scales[0] * scales[1])
    for scale in scales[2:]:
        out = out * scale
    return rounded(out, dtype)


def _kernel(
    platform: str, a: Any, b: Any, *scales: Any, spec: str, dtype: np.dtype
) -> Kernel | None:
    return gemm_kernel(
        platform, a, b, spec=spec, precision=None, dtype=dtype, scales=len(scales)
    )


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, spec: str, dtype: np.dtype
) -> tuple[Any, int]:
    if any(d is not None for d in dims[2:]):
        return batch_of(_lax)(operands, dims, spec=spec, dtype=dtype)
    new = unused_letter(spec)
    x, w, y = terms(spec)
    if dims[0] is not None:
        x = x[: dims[0]] + new + x[dims[0] :]
    if dims[1] is not None:
        w = w[: dims[1]] + new + w[dims[1] :]
    return scaled_gemm_p(*operands, spec=f"{x},{w}->{new}{y}", dtype=dtype), 0


def _sharding(*avals: Any, spec: str, **params: Any) -> str:
    x, w, y = (" ".join(term) for term in terms(spec))
    return ", ".join([x, w] + [""] * (len(avals) - 2)) + " -> " + y


def _in_parts(
    total: Any, a: Array, b: Array, *scales: Array, spec: str, dtype: np.dtype
) -> Array:
    """Parts are summed before they are rounded."""
    wide = np.dtype(np.float32)
    out = total(scaled_gemm_p(a, b, *scales[:2], spec=spec, dtype=wide))
    for scale in scales[2:]:
        out = out * scale
    return rounded(out, dtype)


scaled_gemm_p = define(
    Op(
        name="scaled_gemm",
        lax=_lax,
        kernel=_kernel,
        jvp=jvp_of(_lax),
        batch=_batch,
        sharding=_sharding,
        in_parts=_in_parts,
        layouts=True,  # weights may be parts of a stack
        turned=turned,
        platforms=("cuda",),
    )
)
