# SPDX-License-Identifier: Apache-2.0
"""Memory order for JAX.

>>> import jax.numpy as jnp
>>> import jax_layout as jl
>>> jl.permute(jnp.zeros((8, 3, 224, 224)), (0, 2, 3, 1)).shape
(8, 224, 224, 3)

Shapes and errors come without values, as PyTorch's meta tensors give them:

>>> import jax
>>> a, b = (jax.ShapeDtypeStruct((10**6, 10**6), "float32") for _ in "ab")
>>> jax.eval_shape(jl.mm, a, b)
ShapeDtypeStruct(shape=(1000000, 1000000), dtype=float32)
"""

from importlib.metadata import version as _version

from jax_layout.attention.attention import dot_product_attention
from jax_layout.attention.cache import update_cache
from jax_layout.choices import use_choices
from jax_layout.convnet.conv import conv, conv_transpose, conv_weight_format
from jax_layout.convnet.dropout import dropout, dropout2d
from jax_layout.convnet.elementwise import (
    add,
    divide,
    elementwise,
    gelu,
    hardswish,
    leaky_relu,
    maximum,
    minimum,
    multiply,
    relu,
    relu6,
    sigmoid,
    silu,
    subtract,
    tanh,
    where,
)
from jax_layout.convnet.general_dilated import conv_general_dilated
from jax_layout.convnet.interpolate import interpolate
from jax_layout.convnet.normalization import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    log_softmax,
    softmax,
)
from jax_layout.convnet.pooling import (
    adaptive_avg_pool,
    adaptive_max_pool,
    avg_pool,
    max_pool,
    max_unpool,
)
from jax_layout.convnet.shuffle import (
    channel_shuffle,
    concatenate,
    pad,
    pixel_shuffle,
    pixel_unshuffle,
)
from jax_layout.explain.explain import explain
from jax_layout.explain.profile import Profile, profile
from jax_layout.explain.report import Report
from jax_layout.formats.annotations import (
    FormattedArray,
    empty_like,
    full_like,
    is_contiguous,
    memory_format,
    ones_like,
    preserve,
    with_memory_format,
    zeros_like,
)
from jax_layout.formats.memory_format import MemoryFormat, channels_first, channels_last
from jax_layout.formats.serialization import load, save
from jax_layout.geam import geam
from jax_layout.index import index_add, index_select
from jax_layout.install.install import install, installed, uninstall
from jax_layout.kernel import Kernel
from jax_layout.memory import keep_memory, trim_memory
from jax_layout.op import Op, batch_of, define, jvp_of, operators
from jax_layout.optimize.optimize import LayoutReport, optimize_layout
from jax_layout.optimize.saved_plan import LayoutPlan, load_plan, plan_layout
from jax_layout.permute import (
    matrix_transpose,
    moveaxis,
    permute,
    swapaxes,
    transpose,
)
from jax_layout.products.einsum import dot_general, einsum, tensordot
from jax_layout.products.gemm import GemmPlan, explain_gemm, save_gemms, tune_gemms
from jax_layout.products.linear import linear
from jax_layout.products.matmul import (
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
from jax_layout.segments import segment_max, segment_min, segment_sum

__version__ = _version("jax-layout")

__all__ = [
    "FormattedArray",
    "GemmPlan",
    "Kernel",
    "LayoutPlan",
    "LayoutReport",
    "MemoryFormat",
    "Op",
    "Profile",
    "Report",
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "add",
    "addbmm",
    "addbmm_",
    "addmm",
    "addmm_",
    "avg_pool",
    "baddbmm",
    "baddbmm_",
    "batch_norm",
    "batch_of",
    "bmm",
    "channel_shuffle",
    "channels_first",
    "channels_last",
    "concatenate",
    "conv",
    "conv_general_dilated",
    "conv_transpose",
    "conv_weight_format",
    "define",
    "divide",
    "dot_general",
    "dot_product_attention",
    "dropout",
    "dropout2d",
    "einsum",
    "elementwise",
    "empty_like",
    "explain",
    "explain_gemm",
    "full_like",
    "geam",
    "gelu",
    "gemm",
    "group_norm",
    "hardswish",
    "index_add",
    "index_select",
    "install",
    "installed",
    "instance_norm",
    "interpolate",
    "is_contiguous",
    "jvp_of",
    "keep_memory",
    "layer_norm",
    "leaky_relu",
    "linear",
    "load",
    "load_plan",
    "log_softmax",
    "matmul",
    "matrix_transpose",
    "max_pool",
    "max_unpool",
    "maximum",
    "memory_format",
    "minimum",
    "mm",
    "moveaxis",
    "multiply",
    "ones_like",
    "operators",
    "optimize_layout",
    "pad",
    "permute",
    "pixel_shuffle",
    "pixel_unshuffle",
    "plan_layout",
    "preserve",
    "profile",
    "relu",
    "relu6",
    "save",
    "save_gemms",
    "segment_max",
    "segment_min",
    "segment_sum",
    "sigmoid",
    "silu",
    "softmax",
    "subtract",
    "swapaxes",
    "tanh",
    "tensordot",
    "transpose",
    "trim_memory",
    "tune_gemms",
    "uninstall",
    "update_cache",
    "use_choices",
    "where",
    "with_memory_format",
    "zeros_like",
]
