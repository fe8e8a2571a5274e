# SPDX-License-Identifier: Apache-2.0
"""Products whose first matrix is sparse, by jax's own sparse library."""

from __future__ import annotations

import sys
from typing import Any

from jax import Array

from jax_layout.arguments import accumulator


def is_sparse(x: Any) -> bool:
    """Whether x is a BCOO or BCSR array of `jax.experimental.sparse`."""
    sparse = sys.modules.get("jax.experimental.sparse")  # else nobody has made one
    return sparse is not None and isinstance(x, sparse.BCOO | sparse.BCSR)


def sparse_product(name: str, first: tuple[str, Any], second: tuple[str, Any]) -> Array:
    """a @ b for a sparse a, summed and returned in `accumulator(a.dtype)`.

    Args:
      name: the operator, for errors.
      first: the name and value of a, shape `(m, k)`.
      second: the name and value of b, an array of shape `(k, n)`.
    """
    (a_name, a), (b_name, b) = first, second
    if is_sparse(b):
        raise TypeError(f"{name}: only {a_name} may be sparse, got a sparse {b_name}.")
    if a.ndim != 2 or a.n_batch or a.n_dense:
        raise ValueError(
            f"{name}: a sparse {a_name} must be a matrix without batch or dense axes, "
            f"got shape {a.shape}, {a.n_batch} and {a.n_dense} of them."
        )
    if b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{name}: {a_name} and {b_name} shapes cannot be multiplied "
            f"({'x'.join(map(str, a.shape))} and {'x'.join(map(str, b.shape))})"
        )
    if a.dtype != b.dtype:
        raise TypeError(
            f"{name}: expected {a_name} and {b_name} to have the same dtype, "
            f"got {a.dtype} and {b.dtype}."
        )
    wide = accumulator(a.dtype)
    coordinates = a.to_bcoo() if hasattr(a, "to_bcoo") else a
    return coordinates.astype(wide) @ b.astype(wide)
