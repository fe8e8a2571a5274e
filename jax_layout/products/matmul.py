# SPDX-License-Identifier: Apache-2.0
"""Matrix products: BLAS's gemm and PyTorch's addmm family, and jax.numpy's matmul."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_layout import _compat
from jax_layout.arguments import accumulator, arrays, scalar
from jax_layout.plain import jnp, lax
from jax_layout.products.activations import activate, check_activation
from jax_layout.products.einsum import promoted
from jax_layout.products.gemm import contract
from jax_layout.products.linear import biased_product
from jax_layout.products.scaled import is_float8, rounded, scaled_product
from jax_layout.products.sparse import is_sparse, sparse_product

Scalar = ArrayLike
Transpose = bool | Literal["conjugate"]


def gemm(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: Scalar = 1,
    beta: Scalar = 1,
    transpose_a: Transpose = False,
    transpose_b: Transpose = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    scale_result: ArrayLike | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """activation(alpha * op(a) @ op(b) + beta * c + bias), as BLAS's gemm.

    alpha, beta, bias and activation apply, in this order, to sums in float32 for
    16-bit and smaller types; the result is rounded once. As in BLAS, a and b are
    not read if alpha is the number 0, and c is not read if beta is the number 0.

    Args:
      a: shape `(..., m, k)`, or `(..., k, m)` if transposed.
      b: shape `(..., k, n)`, or `(..., n, k)` if transposed; dtype and leading
        axes of `a`.
      c: shape that broadcasts to `(..., m, n)`, dtype of the result. Donated or
        carried by a loop, it is accumulated into without a copy.
      alpha: number, or array of shape `()`.
      beta: number, or array of shape `()`.
      transpose_a: whether op(a) is the transpose of a; "conjugate" for the
        conjugate transpose.
      transpose_b: the same for b.
      bias: shape `(n,)`, dtype of the result.
      activation: None, "relu", "gelu" (the tanh approximation) or "gelu_erf" (the
        exact one).
      scale_a: for a of float8_e4m3fn or float8_e5m2: float32 of shape `()`, by which
        a is multiplied. With any of the scales, b may be of the other 8-bit dtype.
      scale_b: the same for b.
      scale_result: the same for the result, before it is rounded; a result of 8-bit
        floats is bounded by the largest of them.
      precision: as in `jax.lax.dot_general`. Below HIGHEST, a GPU may round
        float32 to TF32.
      preferred_element_type: dtype of the result; `a`'s if left out.

    Returns:
      shape `(..., m, n)`.

    Raises:
      TypeError: if dtypes differ, alpha or beta do not fit an integer dtype, or
        scales are given for other than 8-bit floats.
      ValueError: if shapes do not fit, or the activation is unknown.

    Source: BLAS (Dongarra et al., 1990), `cublasLtMatmul` in the cuBLAS manual.

    >>> x, w = jnp.ones((2, 3)), jnp.ones((4, 3))
    >>> gemm(x, w, transpose_b=True, alpha=2, bias=jnp.ones(4))[0, 0].item()
    7.0
    """
    a, b = arrays("gemm", a=a, b=b)
    if a.ndim < 2 or b.ndim != a.ndim or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            "gemm: a and b must be matrices with the same leading axes, "
            f"got shapes {a.shape} and {b.shape}."
        )
    for argument, transposed in ("a", transpose_a), ("b", transpose_b):
        if not isinstance(transposed, bool | np.bool_) and transposed != "conjugate":
            raise ValueError(
                f'gemm: transpose_{argument} must be a bool or "conjugate", '
                f"got {transposed!r}."
            )
    lead = "abcdefghijlopqrstuvwxyz"[: a.ndim - 2]
    a_term, b_term = "mk", "kn"
    if transpose_a:
        a_term = "km"
        a = jnp.conj(a) if transpose_a == "conjugate" else a
    if transpose_b:
        b_term = "nk"
        b = jnp.conj(b) if transpose_b == "conjugate" else b
    return _product(
        "gemm",
        ("a", a),
        ("b", b),
        f"{lead}{a_term},{lead}{b_term}->{lead}mn",
        ("c", c),
        alpha,
        beta,
        bias=bias,
        activation=activation,
        scales=(scale_a, scale_b, scale_result),
        precision=precision,
        dtype=preferred_element_type,
    )


def mm(input: ArrayLike, mat2: ArrayLike) -> Array:
    """The product of two matrices, as `torch.mm`.

    Args:
      input: shape `(m, k)`; may be a BCOO or BCSR array of `jax.experimental.sparse`.
      mat2: shape `(k, n)`, dtype of `input`.

    Returns:
      shape `(m, n)`, dtype of `input`; accumulated in float32 for 16-bit types.

    Raises:
      TypeError: if dtypes differ.
      ValueError: if shapes do not fit.

    >>> mm(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    if is_sparse(input):
        return _sparse("mm", ("input", input), ("mat2", mat2))
    first, second = _pair("mm", "input", input, "mat2", mat2, 2)
    return _product("mm", first, second, "mk,kn->mn")


def bmm(input: ArrayLike, mat2: ArrayLike) -> Array:
    """Products of matrices over one batch axis, as `torch.bmm`.

    Args:
      input: shape `(batch, m, k)`.
      mat2: shape `(batch, k, n)`, dtype of `input`.

    Returns:
      shape `(batch, m, n)`, dtype of `input`.

    Raises:
      TypeError: if dtypes differ.
      ValueError: if shapes do not fit.

    >>> bmm(jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))).shape
    (2, 3, 5)
    """
    first, second = _pair("bmm", "input", input, "mat2", mat2, 3)
    return _product("bmm", first, second, "bmk,bkn->bmn")


def addmm(
    input: ArrayLike,
    mat1: ArrayLike,
    mat2: ArrayLike,
    *,
    beta: Scalar = 1,
    alpha: Scalar = 1,
) -> Array:
    """beta * input + alpha * mat1 @ mat2, as `torch.addmm`.

    Donated, or carried by a loop, `input` is accumulated into without a copy.

    Args:
      input: shape that broadcasts to `(m, n)`, dtype of `mat1`. Not read if beta
        is the number 0.
      mat1: shape `(m, k)`; may be a BCOO or BCSR array of `jax.experimental.sparse`.
      mat2: shape `(k, n)`, dtype of `mat1`.
      beta: number, or array of shape `()`.
      alpha: number, or array of shape `()`; if it is the number 0, mat1 and mat2
        are not read.

    Returns:
      shape `(m, n)`, dtype of `mat1`.

    Raises:
      TypeError: if dtypes differ, or alpha or beta do not fit an integer dtype.
      ValueError: if shapes do not fit.

    >>> addmm(jnp.ones(4), jnp.ones((2, 3)), jnp.ones((3, 4)), beta=2)[0, 0].item()
    5.0
    """
    if is_sparse(mat1):
        first, second = ("mat1", mat1), ("mat2", mat2)
        return _sparse("addmm", first, second, ("input", input), alpha, beta)
    first, second = _pair("addmm", "mat1", mat1, "mat2", mat2, 2)
    return _product("addmm", first, second, "mk,kn->mn", ("input", input), alpha, beta)


def baddbmm(
    input: ArrayLike,
    batch1: ArrayLike,
    batch2: ArrayLike,
    *,
    beta: Scalar = 1,
    alpha: Scalar = 1,
) -> Array:
    """beta * input + alpha * batch1 @ batch2 for a batch, as `torch.baddbmm`.

    Args:
      input: shape that broadcasts to `(batch, m, n)`, dtype of `batch1`.
      batch1: shape `(batch, m, k)`.
      batch2: shape `(batch, k, n)`, dtype of `batch1`.
      beta: as in `addmm`.
      alpha: as in `addmm`.

    Returns:
      shape `(batch, m, n)`, dtype of `batch1`.

    Raises:
      TypeError: if dtypes differ, or alpha or beta do not fit an integer dtype.
      ValueError: if shapes do not fit.

    >>> baddbmm(jnp.ones(5), jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))).shape
    (2, 3, 5)
    """
    first, second = _pair("baddbmm", "batch1", batch1, "batch2", batch2, 3)
    addend = ("input", input)
    return _product("baddbmm", first, second, "bmk,bkn->bmn", addend, alpha, beta)


def addbmm(
    input: ArrayLike,
    batch1: ArrayLike,
    batch2: ArrayLike,
    *,
    beta: Scalar = 1,
    alpha: Scalar = 1,
) -> Array:
    """beta * input + alpha * (the sum of batch1 @ batch2), as `torch.addbmm`.

    Args:
      input: shape that broadcasts to `(m, n)`, dtype of `batch1`.
      batch1: shape `(batch, m, k)`.
      batch2: shape `(batch, k, n)`, dtype of `batch1`.
      beta: as in `addmm`.
      alpha: as in `addmm`.

    Returns:
      shape `(m, n)`, dtype of `batch1`.

    Raises:
      TypeError: if dtypes differ, or alpha or beta do not fit an integer dtype.
      ValueError: if shapes do not fit.

    >>> addbmm(jnp.ones(5), jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))).shape
    (3, 5)
    """
    first, second = _pair("addbmm", "batch1", batch1, "batch2", batch2, 3)
    addend = ("input", input)
    return _product("addbmm", first, second, "bmk,bkn->mn", addend, alpha, beta)


def _in_place(function: Callable[..., Array]) -> Callable[..., Array]:
    """Eagerly too the result is written over the addend, which is gone afterwards."""
    donating = jax.jit(function, donate_argnums=0, static_argnames=("alpha", "beta"))

    @functools.wraps(function)
    def call(input: Array, *matrices: ArrayLike, **factors: Any) -> Array:
        arrays(f"{function.__name__}_", input=input)  # a number has no memory to give
        return donating(input, *matrices, **factors)

    return call


addmm_, baddbmm_, addbmm_ = map(_in_place, (addmm, baddbmm, addbmm))


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """Drop-in for `jax.numpy.matmul`.

    Args:
      a: shape `(..., m, k)` or `(k,)`.
      b: shape `(..., k, n)` or `(k,)`; leading axes broadcast.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result.
      out_sharding: as in `jax.lax.dot_general`.

    Returns:
      shape `(..., m, n)`, without m or n for a vector.

    Raises:
      TypeError: if an argument is not an array.
      ValueError: if shapes do not fit.

    >>> matmul(jnp.ones((7, 2, 3)), jnp.ones((3, 4))).shape
    (7, 2, 4)
    """
    a, b = arrays("matmul", a=a, b=b)
    m, k = ("", "k") if a.ndim == 1 else ("m", "k")
    n = "" if b.ndim == 1 else "n"
    inner = b.shape[0 if b.ndim == 1 else -2] if b.ndim else None
    if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != inner:
        raise ValueError(
            "matmul: the last axis of a and the last but one of b must agree, "
            f"got shapes {a.shape} and {b.shape}."
        )
    a_lead, b_lead = a.shape[: -1 - len(m)], b.shape[: -1 - len(n)]
    try:
        lead = np.broadcast_shapes(a_lead, b_lead)
    except ValueError:
        raise ValueError(
            f"matmul: leading axes must broadcast, got shapes {a.shape} and {b.shape}."
        ) from None
    letters = "abcdefghijlopqrstuvwxyz"[: len(lead)]

    def term(lead_shape: tuple[int, ...]) -> tuple[str, list[int]]:
        """Letters of the axes that are not broadcast, and where those are that are."""
        offset = len(lead) - len(lead_shape)
        unit = [i for i, n in enumerate(lead_shape) if n == 1 and lead[offset + i] != 1]
        kept = [letters[offset + i] for i in range(len(lead_shape)) if i not in unit]
        return "".join(kept), unit

    a_term, a_unit = term(a_lead)
    b_term, b_unit = term(b_lead)
    dtype = promoted("matmul", preferred_element_type, a, b)
    return contract(
        lax.squeeze(a, a_unit).astype(dtype[0]),
        lax.squeeze(b, b_unit).astype(dtype[0]),
        f"{a_term}{m}{k},{b_term}{k}{n}->{letters}{m}{n}",
        precision=_compat.canonical_precision(precision),
        dtype=dtype[1],
        out_sharding=out_sharding,
    )


Named = tuple[str, Any]


def _pair(
    name: str, first: str, a: Any, second: str, b: Any, ndim: int
) -> tuple[Named, Named]:
    a, b = arrays(name, **{first: a, second: b})
    for argument, x in ((first, a), (second, b)):
        if x.ndim != ndim:
            raise ValueError(
                f"{name}: {argument} must be a {ndim}-D array, got shape {x.shape}."
            )
    if ndim == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(
            f"{name}: {first} and {second} must have the same batch size, "
            f"got {a.shape[0]} and {b.shape[0]}."
        )
    return (first, a), (second, b)


def _product(
    name: str,
    first: Named,
    second: Named,
    spec: str,
    addend: Named = ("", None),
    alpha: Any = 1,
    beta: Any = 1,
    *,
    bias: Any = None,
    activation: str | None = None,
    scales: tuple[Any, Any, Any] = (None, None, None),
    precision: Any = None,
    dtype: Any = None,
) -> Array:
    (a_name, a), (b_name, b) = first, second
    scaled = any(scale is not None for scale in scales)
    if scaled and not (is_float8(a.dtype) and is_float8(b.dtype)):
        raise TypeError(
            f"{name}: scales are for 8-bit floats, got {a.dtype} and {b.dtype}."
        )
    if a.dtype != b.dtype and not scaled:
        raise TypeError(
            f"{name}: expected {a_name} and {b_name} to have the same dtype, "
            f"got {a.dtype} and {b.dtype}."
        )
    terms = spec.split("->")[0].split(",")
    extents = [a.shape[terms[0].index("k")], b.shape[terms[1].index("k")]]
    if extents[0] != extents[1]:
        shapes = [
            "x".join(map(str, x.shape)) + " transposed" * term.endswith(last)
            for x, term, last in ((a, terms[0], "km"), (b, terms[1], "nk"))
        ]
        raise ValueError(
            f"{name}: {a_name} and {b_name} shapes cannot be multiplied "
            f"({shapes[0]} and {shapes[1]})"
        )
    dtype = jax.dtypes.canonicalize_dtype(a.dtype if dtype is None else dtype)
    check_activation(name, activation, dtype)
    sizes = dict(zip("".join(terms), a.shape + b.shape, strict=True))
    shape = tuple(sizes[label] for label in spec.split("->")[1])
    c = _addend(name, *addend, dtype, shape)
    if bias is not None:
        (bias,) = arrays(name, bias=bias)
        if bias.shape != shape[-1:] or bias.dtype != dtype:
            raise ValueError(
                f"{name}: bias must have shape {shape[-1:]} and dtype {dtype}, "
                f"got {bias.shape} and {bias.dtype}."
            )
    alpha = scalar(name, "alpha", alpha, dtype)
    beta = scalar(name, "beta", beta, dtype)
    precision = _compat.canonical_precision(precision)
    wide = accumulator(dtype)
    if scaled:
        scale_a, scale_b, scale_result = (_scale(name, s) for s in scales)
        if not _is(alpha, 1):
            scale_a = scale_a * alpha
        if _is(alpha, 0):  # a and b are not read
            a, b = jnp.zeros_like(a), jnp.zeros_like(b)
        if c is None and bias is None and activation is None:
            last = None if scales[2] is None else scale_result
            return scaled_product(a, b, scale_a, scale_b, last, spec, dtype)
        float32 = np.dtype(np.float32)
        out = scaled_product(a, b, scale_a, scale_b, None, spec, float32)
        if c is not None and not _is(beta, 0):
            out = out + beta * c.astype(float32)
        if bias is not None:
            out = out + bias.astype(float32)
        return rounded(activate(out, activation) * scale_result, dtype)

    if c is None and _is(alpha, 1) and (bias is not None or activation is not None):
        return biased_product(
            a, b, bias, spec, activation=activation, precision=precision, dtype=dtype
        )
    fused = not isinstance(alpha, Array) and not isinstance(beta, Array)
    plain = bias is None and activation is None
    out = contract(
        a,
        b,
        spec,
        c=jnp.broadcast_to(c, shape) if c is not None and fused and plain else None,
        alpha=alpha if fused else 1,
        beta=beta if fused else 1,
        precision=precision,
        dtype=dtype if fused and plain else wide,
    )
    if not fused:
        out = out * alpha
    if c is not None and not (fused and plain) and not _is(beta, 0):
        out = out + beta * c.astype(wide)
    if bias is not None:
        out = out + bias.astype(wide)
    return activate(out, activation).astype(dtype)


def _scale(name: str, scale: Any) -> Array:
    if scale is None:
        return jnp.ones((), jnp.float32)
    (scale,) = arrays(name, scale=scale)
    if scale.shape != () or scale.dtype != jnp.float32:
        raise TypeError(
            f"{name}: scales must be float32 of shape (), "
            f"got {scale.dtype} of shape {scale.shape}."
        )
    return scale


def _sparse(
    name: str,
    first: Named,
    second: Named,
    addend: Named = ("", None),
    alpha: Any = 1,
    beta: Any = 1,
) -> Array:
    if not is_sparse(second[1]):
        second = second[0], arrays(name, **dict([second]))[0]
    product = sparse_product(name, first, second)
    dtype = first[1].dtype
    c = _addend(name, *addend, dtype, product.shape)
    alpha = scalar(name, "alpha", alpha, dtype)
    beta = scalar(name, "beta", beta, dtype)
    out = jnp.zeros_like(product) if _is(alpha, 0) else alpha * product
    if c is not None and not _is(beta, 0):
        out = out + beta * c.astype(out.dtype)
    return out.astype(dtype)


def _is(scalar: Any, value: int) -> bool:
    return not isinstance(scalar, Array) and scalar == value


def _addend(
    name: str, argument: str, c: Any, dtype: np.dtype, shape: tuple[int, ...]
) -> Array | None:
    if c is None:
        return None
    (c,) = arrays(name, **{argument: c})
    if c.dtype != dtype:
        raise TypeError(
            f"{name}: {argument} must have the dtype of the result, {dtype}, "
            f"got {c.dtype}."
        )
    try:
        fits = np.broadcast_shapes(c.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name}: {argument} of shape {c.shape} cannot be broadcast to {shape}."
        )
    return c
