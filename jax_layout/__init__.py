# SPDX-License-Identifier: Apache-2.0
"""Memory order for JAX.

>>> import jax.numpy as jnp
>>> import jax_layout as jl
>>> jl.permute(jnp.zeros((8, 3, 224, 224)), (0, 2, 3, 1)).shape
(8, 224, 224, 3)
"""

from importlib.metadata import version as _version

from jax_layout.conv import conv, conv_transpose
from jax_layout.conv_general_dilated import conv_general_dilated
from jax_layout.einsum import dot_general, einsum, tensordot
from jax_layout.geam import geam
from jax_layout.gemm import GemmPlan, explain_gemm, save_gemms
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
from jax_layout.memory_format import (
    FormattedArray,
    MemoryFormat,
    channels_first,
    channels_last,
    empty_like,
    full_like,
    is_contiguous,
    memory_format,
    ones_like,
    preserve,
    with_memory_format,
    zeros_like,
)
from jax_layout.op import Kernel, Op, define
from jax_layout.optimize import LayoutReport, optimize_layout
from jax_layout.permute import (
    matrix_transpose,
    moveaxis,
    permute,
    swapaxes,
    transpose,
)
from jax_layout.plan_layout import LayoutPlan, load_plan, plan_layout

__version__ = _version("jax-layout")

__all__ = [
    "FormattedArray",
    "GemmPlan",
    "Kernel",
    "LayoutPlan",
    "LayoutReport",
    "MemoryFormat",
    "Op",
    "addbmm",
    "addbmm_",
    "addmm",
    "addmm_",
    "baddbmm",
    "baddbmm_",
    "bmm",
    "channels_first",
    "channels_last",
    "conv",
    "conv_general_dilated",
    "conv_transpose",
    "define",
    "dot_general",
    "einsum",
    "empty_like",
    "explain_gemm",
    "full_like",
    "geam",
    "gemm",
    "is_contiguous",
    "linear",
    "load_plan",
    "matmul",
    "matrix_transpose",
    "memory_format",
    "mm",
    "moveaxis",
    "ones_like",
    "optimize_layout",
    "permute",
    "plan_layout",
    "preserve",
    "save_gemms",
    "swapaxes",
    "tensordot",
    "transpose",
    "with_memory_format",
    "zeros_like",
]
