# SPDX-License-Identifier: Apache-2.0
"""The sum of two matrices, either of them transposed, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.interpreters import ad
from jax.typing import ArrayLike

from jax_layout.arguments import accumulator, arrays, scalar
from jax_layout.kernel import Kernel
from jax_layout.measured import Work
from jax_layout.op import Op, define, in_front, jvp_of
from jax_layout.plain import jnp

_CPU_DTYPES = ("float32", "float64", "bfloat16", "complex64", "complex128")


def geam(
    a: ArrayLike,
    b: ArrayLike,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 1,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Array:
    """alpha * op(a) + beta * op(b), each array read or written once.

    Args:
      a: shape `(..., m, n)`, or `(..., n, m)` if transposed.
      b: shape `(..., m, n)`, or `(..., n, m)` if transposed; dtype of `a`.
      alpha: number, or array of shape `()`.
      beta: number, or array of shape `()`.
      transpose_a: whether op(a) is the transpose of a.
      transpose_b: the same for b.

    Returns:
      shape `(..., m, n)`, dtype of `a`; computed in float32 for 16-bit types.

    Raises:
      TypeError: if dtypes differ, or alpha or beta do not fit an integer dtype.
      ValueError: if shapes do not fit.

    Source: `cublas<t>geam` in the cuBLAS manual. On a GPU, XLA makes one kernel of
    the plain sum.

    >>> geam(jnp.ones((2, 3)), jnp.ones((3, 2)), 2, -1, transpose_b=True)[0].tolist()
    [1.0, 1.0, 1.0]
    """
    a, b = arrays("geam", a=a, b=b)
    if a.dtype != b.dtype:
        raise TypeError(
            f"geam: a and b must have the same dtype, got {a.dtype} and {b.dtype}."
        )
    shapes = [
        (*x.shape[:-2], *x.shape[-2:][:: -1 if transposed else 1])
        for x, transposed in ((a, transpose_a), (b, transpose_b))
    ]
    if a.ndim < 2 or shapes[0] != shapes[1]:
        raise ValueError(
            "geam: op(a) and op(b) must be matrices of one shape, "
            f"got {shapes[0]} and {shapes[1]}."
        )
    alpha = scalar("geam", "alpha", alpha, a.dtype)
    beta = scalar("geam", "beta", beta, a.dtype)
    transposes = bool(transpose_a), bool(transpose_b)
    if isinstance(alpha, Array) or isinstance(beta, Array):
        return _sum(a, b, alpha, beta, transposes)
    return geam_p(a, b, alpha=alpha, beta=beta, transposes=transposes)


def _sum(
    a: Array, b: Array, alpha: Any, beta: Any, transposes: tuple[bool, bool]
) -> Array:
    wide = accumulator(a.dtype)
    left, right = (
        (jnp.matrix_transpose(x) if transposed else x).astype(wide)
        for x, transposed in zip((a, b), transposes, strict=True)
    )
    return (alpha * left + beta * right).astype(a.dtype)


def _lax(
    a: Array, b: Array, *, alpha: Any, beta: Any, transposes: tuple[bool, bool]
) -> Array:
    return _sum(a, b, alpha, beta, transposes)


def _kernel(
    platform: str,
    a: Any,
    b: Any,
    *,
    alpha: complex,
    beta: complex,
    transposes: tuple[bool, bool],
) -> Kernel | None:
    if not any(transposes) or a.size == 0:
        return None  # XLA makes one loop of it
    return Kernel(
        {
            "alpha": np.array([alpha.real, alpha.imag], np.float64),
            "beta": np.array([beta.real, beta.imag], np.float64),
            "transpose_a": transposes[0],
            "transpose_b": transposes[1],
        },
        work=Work(f"geam {a.dtype.name}", a.shape[-2:]),
    )


def _transpose(
    ct: Array,
    a: Any,
    b: Any,
    *,
    alpha: complex,
    beta: complex,
    transposes: tuple[bool, bool],
) -> list[Any]:
    def cotangent(x: Any, factor: complex, transposed: bool) -> Any:
        if not ad.is_undefined_primal(x):
            return None
        return factor * (jnp.matrix_transpose(ct) if transposed else ct)

    return [cotangent(a, alpha, transposes[0]), cotangent(b, beta, transposes[1])]


def _batch(
    operands: Sequence[Array], dims: Sequence[Any], **params: Any
) -> tuple[Array, int]:
    return geam_p(*in_front(operands, dims), **params), 0


def _sharding(a: Any, b: Any, *, transposes: tuple[bool, bool], **params: Any) -> str:
    lead = [f"b{i}" for i in range(a.ndim - 2)]
    terms = [
        " ".join([*lead, *("nm" if transposed else "mn")]) for transposed in transposes
    ]
    return ", ".join(terms) + " -> " + " ".join([*lead, "m", "n"])


geam_p = define(
    Op(
        name="geam",
        lax=_lax,
        kernel=_kernel,
        jvp=jvp_of(_lax),
        transpose=_transpose,
        batch=_batch,
        sharding=_sharding,
        platforms=("cpu",),  # a GPU's compiler makes one kernel of it
        dtypes=_CPU_DTYPES,
    )
)
