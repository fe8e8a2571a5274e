# SPDX-License-Identifier: Apache-2.0
"""Small integers, where XLA's product of them is wrong or missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_layout.plain import jnp, lax

# XLA:GPU (jax 0.11.2, H100 and H200) gives twice the product of int8 in int32 where
# Triton multiplies: where k is no multiple of 4, of 2, 3, 5, 6, 7 and 33, and of almost
# all k under --xla_gpu_autotune_level=0. cuBLAS, which it prefers otherwise, is right.
# So is XLA:CPU, ten times as fast as with int32.
_K = 4


def product(
    dot: Callable[[Array, Array], Array], a: Array, b: Array, dtype: np.dtype, k: int
) -> Array:
    """dot(a, b), in types that XLA can multiply.

    Args:
      dot: `jax.lax.dot_general`, with all but its operands.
      a: array of numbers.
      b: array of a's dtype, or of another.
      dtype: of the sums, as dot has it.
      k: how many products are summed.
    """
    if _less_than_a_byte(a.dtype) and a.dtype != dtype:
        # XLA multiplies these into no other type.
        whole = np.uint8 if jnp.issubdtype(a.dtype, jnp.unsignedinteger) else np.int8
        a, b = a.astype(whole), b.astype(whole)
    if not (a.dtype == b.dtype == np.int8 and dtype == np.int32 and k % _K):
        return dot(a, b)

    def widened(a: Array, b: Array) -> Array:
        return dot(a.astype(np.int32), b.astype(np.int32))

    return lax.platform_dependent(a, b, cuda=widened, default=dot)


def _less_than_a_byte(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and jax.dtypes.itemsize_bits(dtype) < 8
