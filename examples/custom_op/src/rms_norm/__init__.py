# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation as an operator of jax_layout's table, with a fused backward."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

import jax_layout as jl
from rms_norm import _cpu


def rms_norm(x, w, eps=1e-6):
    """x / sqrt(mean(x^2) + eps) * w along the last axis: x (..., n), w (n,)."""
    return rms_norm_p(x, w, eps=float(eps))


def _kernel(platform, x, w, *rest, eps):
    return jl.Kernel({"eps": np.float64(eps)}) if x.size else None


def _lax(x, w, *, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w


def _jvp(primals, tangents, *, eps):
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    y = rms_norm_p(*primals, eps=eps)
    return y, rms_norm_tangent_p(*primals, *tangents, eps=eps)


def _tangent_lax(x, w, dx, dw, *, eps):
    return jax.jvp(lambda x, w: _lax(x, w, eps=eps), (x, w), (dx, dw))[1]


def _tangent_transpose(ct, x, w, dx, dw, *, eps):
    return None, None, *rms_norm_grad_p(x, w, ct, eps=eps)  # the fused kernel


def _grad_lax(x, w, ct, *, eps):
    return list(jax.vjp(lambda x, w: _lax(x, w, eps=eps), x, w)[1](ct))


def _rows(x):  # capitals: the normalised axis is whole on every device
    return " ".join([*(f"b{i}" for i in range(x.ndim - 1)), "N"])


def _grad_in_parts(total, x, w, ct, *, eps):  # dw is a sum over all rows
    dx, dw = rms_norm_grad_p(x, w, ct, eps=eps)
    return [dx, total(dw, *_rows(x).split()[:-1]) if x.ndim > 1 else dw]


rms_norm_p = jl.define(
    jl.Op(
        name="rms_norm",
        lax=_lax,
        kernel=_kernel,
        jvp=_jvp,
        batch=jl.batch_of(_lax),
        sharding=lambda x, w, eps: f"{_rows(x)}, N -> {_rows(x)}",
        dtypes=("float32",),
    ),
    handlers={"cpu": _cpu.forward},
)
rms_norm_tangent_p = jl.define(
    jl.Op(
        name="rms_norm_tangent",
        lax=_tangent_lax,
        jvp=jl.jvp_of(_tangent_lax),
        transpose=_tangent_transpose,
        batch=jl.batch_of(_tangent_lax),
    )
)
rms_norm_grad_p = jl.define(
    jl.Op(
        name="rms_norm_grad",
        lax=_grad_lax,
        kernel=_kernel,
        jvp=jl.jvp_of(_grad_lax),
        batch=jl.batch_of(_grad_lax),
        sharding=lambda x, w, ct, eps: f"{_rows(x)}, N, {_rows(x)} -> {_rows(x)}, N",
        in_parts=_grad_in_parts,
        multiple_results=True,
        dtypes=("float32",),
    ),
    handlers={"cpu": _cpu.backward},
)
