# SPDX-License-Identifier: Apache-2.0
"""Memory order for JAX.

>>> import jax.numpy as jnp
>>> import jax_layout as jl
>>> jl.permute(jnp.zeros((8, 3, 224, 224)), (0, 2, 3, 1)).shape
(8, 224, 224, 3)
"""

from importlib.metadata import version as _version

from jax_layout.op import Op, define
from jax_layout.permute import (
    matrix_transpose,
    moveaxis,
    permute,
    swapaxes,
    transpose,
)

__version__ = _version("jax-layout")

__all__ = [
    "Op",
    "define",
    "matrix_transpose",
    "moveaxis",
    "permute",
    "swapaxes",
    "transpose",
]
