# SPDX-License-Identifier: Apache-2.0
"""Memory order for JAX.

>>> import jax.numpy as jnp
>>> import jax_layout as jl
>>> jl.permute(jnp.zeros((8, 3, 224, 224)), (0, 2, 3, 1)).shape
(8, 224, 224, 3)
"""

from importlib.metadata import version as _version

from jax_layout.einsum import dot_general, einsum, tensordot
from jax_layout.geam import geam
from jax_layout.gemm import GemmPlan, explain_gemm, save_gemms
from jax_layout.index import index_add, index_select
from jax_layout.linear import linear
from jax_layout.matmul import (
    addbmm,
    addbmm_,
    addmm,
    addmm_,
    baddbmm,
    baddbmm_,
    bmm,
    gemm,
    matmul,
    mm,
)
from jax_layout.op import Kernel, Op, batch_of, define, jvp_of, operators
from jax_layout.permute import (
    matrix_transpose,
    moveaxis,
    permute,
    swapaxes,
    transpose,
)

__version__ = _version("jax-layout")

__all__ = [
    "GemmPlan",
    "Kernel",
    "Op",
    "addbmm",
    "addbmm_",
    "addmm",
    "addmm_",
    "baddbmm",
    "baddbmm_",
    "batch_of",
    "bmm",
    "define",
    "dot_general",
    "einsum",
    "explain_gemm",
    "geam",
    "gemm",
    "index_add",
    "index_select",
    "jvp_of",
    "linear",
    "matmul",
    "matrix_transpose",
    "mm",
    "moveaxis",
    "operators",
    "permute",
    "save_gemms",
    "swapaxes",
    "tensordot",
    "transpose",
]
