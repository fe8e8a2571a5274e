# SPDX-License-Identifier: Apache-2.0
"""The linear layer: a product with bias and activation in its epilogue.

Differentiated, it keeps what the activation's derivative needs. Its backward is
two products: the gradient of x, and that of the weight with the bias's in the same
call. Neither writes a transpose. The rules are those of primitives, so forward
mode, second derivatives and `vmap` work as for `jax.numpy`:

  linear_p          activation(a b + bias)
  linear_tangent_p  da b + a db + dbias, the linear map that jvp needs; what is
                    fused is its transpose
  linear_grad_p     the weight's and the bias's cotangents
"""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.interpreters import ad
from jax.typing import ArrayLike, DTypeLike

from jax_layout import _compat
from jax_layout.arguments import accumulator, placement, same_kind, sent, widest
from jax_layout.kernel import Kernel
from jax_layout.op import Op, batch_of, define, jvp_of
from jax_layout.plain import jnp
from jax_layout.products.activations import (
    GELUS,
    activate,
    check_activation,
    differentiate,
)
from jax_layout.products.gemm import (
    GEMM_DTYPES,
    contract,
    cotangents,
    gemm_kernel,
)
from jax_layout.products.letters import terms, turned, unused_letter
from jax_layout.products.sparse import is_sparse, sparse_product


def linear(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = None,
    weight_grad: ArrayLike | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """activation(x @ weight.T + bias), as `torch.nn.functional.linear`.

    A float32 weight with 16-bit x (mixed precision) is rounded to x's dtype for
    the product, and its gradient is summed and returned in float32, not rounded.

    With `weight_grad`, the gradients of several batches add up in place: the
    cotangent of `weight_grad` is its own value plus the gradient of the weight,
    made by the product itself, and the weight's is zero. Take the gradient with
    respect to `weight_grad`, and carry it through the scan over the batches. This
    layer has no forward mode (`jax.jvp`).

    Args:
      x: shape `(..., in_features)`. A matrix may be a BCOO or BCSR array of
        `jax.experimental.sparse`; then weight has its dtype, and weight_grad,
        precision and out_sharding are not for it.
      weight: shape `(out_features, in_features)`, dtype of `x`, or a wider one of
        its kind of floating point.
      bias: shape `(out_features,)`, dtype of the result, or a wider one of its kind
        of floating point.
      activation: None, "relu", "gelu" (the tanh approximation, as `jax.nn.gelu`) or
        "gelu_erf" (the exact one, of the error function, as PyTorch's).
      weight_grad: shape of `weight`, floating point: the sum of the gradients so
        far.
      precision: as in `jax.lax.dot_general`. Below HIGHEST, a GPU may round
        float32 to TF32.
      preferred_element_type: dtype of the result; `x`'s if left out.
      out_sharding: as in `jax.lax.dot_general`.

    Returns:
      shape `(..., out_features)`. Sums, bias and activation are in float32 for
      16-bit types; the result is rounded once.

    Raises:
      TypeError: if an argument is not an array, or dtypes do not fit.
      ValueError: if shapes do not fit, or the activation is unknown.

    Source: `cublasLtMatmul` with CUBLASLT_EPILOGUE_GELU_AUX_BIAS and BGRADB.

    >>> w, b = jnp.ones((4, 3)), jnp.full(4, -2.0)
    >>> linear(jnp.ones((2, 5, 3)), w, b, activation="relu")[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    given: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "weight_grad": weight_grad,
    }
    for argument, value in given.items():
        optional = argument in ("bias", "weight_grad")
        if not hasattr(value, "dtype") and not (optional and value is None):
            raise TypeError(
                f"linear: {argument} must be an array, got {type(value).__name__}."
            )
    dtype = given["x"].dtype  # x may be no Array to a type checker
    dtype = jax.dtypes.canonicalize_dtype(preferred_element_type or dtype)
    if is_sparse(x):
        if not (weight_grad is None and precision is None and out_sharding is None):
            raise ValueError(
                "linear: a sparse x excludes weight_grad, precision and out_sharding."
            )
        bias = None if bias is None else jnp.asarray(bias)
        return _sparse(x, jnp.asarray(weight), bias, activation, dtype)
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear: x (..., in) and weight (out, in) must agree in the last axis, "
            f"got shapes {x.shape} and {weight.shape}."
        )
    _check_wider("weight", weight.dtype, "x's dtype", x.dtype)
    check_activation("linear", activation, dtype)
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"linear: bias must have shape {weight.shape[:1]}, got {bias.shape}."
            )
        _check_wider("bias", bias.dtype, "the result's dtype", dtype)
    lead = string.ascii_lowercase.replace("k", "").replace("n", "")[: x.ndim - 1]
    options = {
        "activation": activation,
        "precision": _compat.canonical_precision(precision),
        "dtype": dtype,
        "out_sharding": out_sharding,
    }
    spec = f"{lead}k,nk->{lead}n"
    if weight_grad is None:
        return biased_product(x, weight, bias, spec, **options)
    weight_grad = jnp.asarray(weight_grad)
    if weight_grad.shape != weight.shape or not jnp.issubdtype(
        weight_grad.dtype, jnp.floating
    ):
        raise ValueError(
            f"linear: weight_grad must be floating point of shape {weight.shape}, "
            f"got {weight_grad.dtype} of shape {weight_grad.shape}."
        )
    return _accumulating(x, weight, bias, weight_grad, spec, **options)


def _check_wider(name: str, dtype: Any, narrow_name: str, narrow: Any) -> None:
    if not same_kind(dtype, narrow) or widest(dtype, narrow) != dtype:
        raise TypeError(
            f"linear: {name} must have {narrow_name} or a wider one of its kind of "
            f"floating point, got {dtype} for {narrow}."
        )


def _sparse(
    x: Any, weight: Array, bias: Any, activation: str | None, dtype: np.dtype
) -> Array:
    if weight.ndim != 2:
        raise ValueError(f"linear: weight must be a matrix, got shape {weight.shape}.")
    out = sparse_product("linear", ("x", x), ("weight.T", weight.T))
    check_activation("linear", activation, dtype)
    if bias is not None:
        _check_wider("bias", bias.dtype, "the result's dtype", dtype)
        if bias.shape != out.shape[1:]:
            raise ValueError(
                f"linear: bias must have shape {out.shape[1:]}, got {bias.shape}."
            )
        out = out + bias.astype(out.dtype)
    return activate(out, activation).astype(dtype)


def biased_product(
    a: Array,
    b: Array,
    bias: Array | None,
    spec: str,
    *,
    activation: str | None,
    precision: Any,
    dtype: np.dtype,
    out_sharding: Any = None,
) -> Array:
    """activation(a b + bias), with the bias along the last letter of the result."""
    return linear_p(
        *((a, b) if bias is None else (a, b, bias)),
        spec=spec,
        activation=activation,
        aux=False,
        precision=precision,
        dtype=np.dtype(dtype),
        out_sharding=out_sharding,
    )[0]


# --- linear_p


def _lax(
    a: Array,
    b: Array,
    *bias: Array,
    activation: str | None,
    aux: bool,
    dtype: np.dtype,
    on_gpu: bool = False,
    **params: Any,
) -> list[Array]:
    """With the bias added in float32 for 16 bits; on a GPU as XLA fuses it, which then
    rounds once too, where of a float32 product it would write all of it."""
    if b.dtype != a.dtype or any(v.dtype != dtype for v in bias):
        bias = tuple(v.astype(dtype) for v in bias)
        return linear_p(
            a, b.astype(a.dtype), *bias, activation=activation, aux=aux, dtype=dtype,
            **params,
        )  # fmt: skip
    if not bias and activation is None and not aux:
        return [contract(a, b, dtype=dtype, **params)]
    summed_in = dtype if on_gpu and dtype.itemsize == 2 else accumulator(dtype)
    product = contract(a, b, dtype=summed_in, **params)
    return _epilogue(product, *bias, activation=activation, aux=aux, dtype=dtype)


def _epilogue(
    z: Array, *bias: Array, activation: str | None, aux: bool, dtype: np.dtype
) -> list[Array]:
    for v in bias:
        z = z + v.astype(z.dtype)
    exact = activation == "relu"  # in any dtype
    y = activate(z if exact else z.astype(accumulator(dtype)), activation).astype(dtype)
    return [y, z.astype(dtype)] if aux else [y]


def _kernel(
    platform: str, a: Any, b: Any, *bias: Any, out_sharding: Any, **params: Any
) -> Kernel | None:
    if any(v.dtype != params["dtype"] for v in bias):
        return None
    return gemm_kernel(platform, a, b, bias=bool(bias), **params)


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    activation: str | None,
    aux: bool,
    **params: Any,
) -> tuple[Any, Any]:
    a, b, *bias = primals
    keep = aux or activation in GELUS
    out = linear_p(*primals, activation=activation, aux=keep, **params)
    dz = _tangent(primals, tangents, **params)
    dy = differentiate(dz, activation, *out)
    return (out, [dy, dz]) if aux else (out[:1], [dy])


def _transpose(
    cts: Sequence[Any],
    a: Any,
    b: Any,
    *bias: Any,
    spec: str,
    activation: str | None,
    aux: bool,
    precision: Any,
    **_: Any,
) -> list[Any]:
    """As `jax.linear_transpose` asks for it: gradients are of `linear_tangent`."""
    if activation is not None or aux:
        raise NotImplementedError(
            f"linear: with activation {activation!r} it is not linear in its operands, "
            "and cannot be transposed."
        )
    (ct,) = cts
    sums = [
        _sums(ct, v.aval.dtype) if ad.is_undefined_primal(v) else None for v in bias
    ]
    return [*cotangents(ct, a, b, spec, precision=precision), *sums]


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, spec: str, **params: Any
) -> tuple[Any, Any]:
    a, b, *bias = operands
    mapped = [d is not None for d in dims]
    if any(mapped[1:]) or params["out_sharding"] is not None:
        return _batch_parts(operands, dims, spec=spec, **params)
    x, w, y = terms(spec)
    new = unused_letter(spec)
    a = jnp.moveaxis(a, dims[0], 0)
    out = linear_p(a, b, *bias, spec=f"{new}{x},{w}->{new}{y}", **params)
    return out, [0] * len(out)


def _parts(
    a: Array,
    b: Array,
    *bias: Array,
    activation: str | None,
    aux: bool,
    dtype: np.dtype,
    **params: Any,
) -> list[Array]:
    product = contract(a, b.astype(a.dtype), dtype=accumulator(dtype), **params)
    return _epilogue(product, *bias, activation=activation, aux=aux, dtype=dtype)


_batch_parts = batch_of(_parts)


def _sharding(*avals: Any, spec: str, aux: bool, **params: Any) -> str:
    x, w, y = (" ".join(term) for term in terms(spec))
    bias = [y[-1]] * (len(avals) - 2)
    return ", ".join([x, w, *bias]) + " -> " + ", ".join([y] * (1 + aux))


def _in_parts(
    total: Any,
    a: Array,
    b: Array,
    *bias: Array,
    activation: str | None,
    aux: bool,
    dtype: np.dtype,
    **params: Any,
) -> list[Array]:
    """Bias and activation come after the sum, once."""
    product = total(contract(a, b.astype(a.dtype), dtype=sent(dtype), **params))
    product = product.astype(accumulator(dtype))
    return _epilogue(product, *bias, activation=activation, aux=aux, dtype=dtype)


linear_p = define(
    Op(
        name="linear",
        lax=_lax,
        lax_on_gpu=functools.partial(_lax, on_gpu=True),
        kernel=_kernel,
        jvp=_jvp,
        transpose=_transpose,
        batch=_batch,
        sharding=_sharding,
        in_parts=_in_parts,
        layouts=True,  # weights may be parts of a stack
        turned=turned,
        multiple_results=True,
        dtypes=GEMM_DTYPES,
    )
)


# --- linear_tangent_p: operands a and b, then of da, db, dbias those that `given`
# names.


def _tangent(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Array:
    given = tuple(not isinstance(t, ad.Zero) for t in tangents)
    nonzero = [t for t, g in zip(tangents, given, strict=True) if g]
    return linear_tangent_p(*primals[:2], *nonzero, given=given, **params)


def _tangent_lax(
    a: Array,
    b: Array,
    *tangents: Array,
    spec: str,
    given: tuple[bool, ...],
    precision: Any,
    dtype: np.dtype,
    out_sharding: Any,
) -> Array:
    rest = iter(tangents)
    b = b.astype(a.dtype)
    product = functools.partial(
        contract,
        spec=spec,
        precision=precision,
        dtype=dtype,
        out_sharding=out_sharding,
    )
    out = None
    if given[0]:
        out = product(next(rest), b)
    if given[1]:
        out = product(a, next(rest).astype(a.dtype), c=out)
    if given[2:] == (True,):
        if out is None:
            out = jnp.zeros_like(product(a, b))
        out = out + next(rest).astype(dtype)
    assert out is not None  # some tangent is given
    return out


def _tangent_transpose(
    ct: Any,
    a: Any,
    b: Any,
    *tangents: Any,
    spec: str,
    given: tuple[bool, ...],
    precision: Any,
    dtype: np.dtype,
    out_sharding: Any,
) -> list[Any]:
    x, w, y = terms(spec)
    rest = iter(tangents)
    # The avals of da, db and dbias, None for those that need no cotangent.
    da, db, dbias = (
        t.aval if t is not None and ad.is_undefined_primal(t) else None
        for t in [next(rest) if g else None for g in given] + [None] * (3 - len(given))
    )
    wide = widest(ct.dtype, a.dtype)  # no rounding before the sums
    a, b, wide_ct = a.astype(wide), b.astype(wide), ct.astype(wide)

    def options(aval: Any) -> dict[str, Any]:
        return {
            "precision": precision,
            "dtype": np.dtype(aval.dtype),
            "out_sharding": placement(aval),
        }

    cts: list[Any] = [None, None, None]
    if da is not None:
        cts[0] = contract(wide_ct, b, f"{y},{w}->{x}", **options(da))
    if db is not None and dbias is not None:
        cts[1:] = linear_grad_p(wide_ct, a, spec=f"{y},{x}->{w}", **options(db))
        cts[2] = cts[2].astype(dbias.dtype)
    elif db is not None:
        cts[1] = contract(wide_ct, a, f"{y},{x}->{w}", **options(db))
    elif dbias is not None:
        cts[2] = _sums(ct, dbias.dtype)
    return [None, None, *(c for c, g in zip(cts, given, strict=False) if g)]


def _sums(ct: Array, dtype: Any) -> Array:
    wide = ct.astype(accumulator(ct.dtype))
    return jnp.sum(wide, axis=tuple(range(ct.ndim - 1))).astype(dtype)


linear_tangent_p = define(
    Op(
        name="linear_tangent",
        lax=_tangent_lax,
        jvp=jvp_of(_tangent_lax),
        transpose=_tangent_transpose,
        batch=batch_of(_tangent_lax),
    )
)


# --- linear_grad_p: the cotangents of weight and bias, from ct and a, and the sum of
# earlier ones to which the weight's is added


def _grad_lax(
    ct: Array, a: Array, *c: Array, dtype: np.dtype, **params: Any
) -> list[Array]:
    addend = c[0] if c else None
    return [contract(ct, a, c=addend, dtype=dtype, **params), _sums(ct, dtype)]


def _grad_kernel(
    platform: str, ct: Any, a: Any, *c: Any, out_sharding: Any, **params: Any
) -> Kernel | None:
    return gemm_kernel(platform, ct, a, beta=len(c), sums=True, **params)


def _grad_sharding(ct: Any, a: Any, *c: Any, spec: str, **params: Any) -> str:
    x, w, y = (" ".join(term) for term in terms(spec))
    return ", ".join([x, w] + [y] * len(c)) + f" -> {y}, {x[-1]}"


def _grad_in_parts(
    total: Any, ct: Array, a: Array, *c: Array, **params: Any
) -> list[Array]:
    dw, db = total(linear_grad_p(ct, a, **params))
    return [dw + c[0] if c else dw, db]


linear_grad_p = define(
    Op(
        name="linear_grad",
        lax=_grad_lax,
        kernel=_grad_kernel,
        jvp=jvp_of(_grad_lax),
        batch=batch_of(_grad_lax),
        sharding=_grad_sharding,
        in_parts=_grad_in_parts,
        multiple_results=True,
        dtypes=GEMM_DTYPES,
    )
)


# --- gradients that add up in place


def _accumulating(
    x: Array,
    weight: Array,
    bias: Array | None,
    weight_grad: Array,
    spec: str,
    *,
    activation: str | None,
    precision: Any,
    dtype: np.dtype,
    out_sharding: Any,
) -> Array:
    a, b, y_term = terms(spec)

    def apply(x: Array, weight: Array, bias: Array | None, aux: bool) -> Any:
        operands = (x, weight) if bias is None else (x, weight, bias)
        return linear_p(
            *operands,
            spec=spec,
            activation=activation,
            aux=aux,
            precision=precision,
            dtype=dtype,
            out_sharding=out_sharding,
        )

    @jax.custom_vjp
    def layer(x: Array, weight: Array, bias: Array | None, weight_grad: Array) -> Array:
        return apply(x, weight, bias, aux=False)[0]

    def forward(
        x: Array, weight: Array, bias: Array | None, weight_grad: Array
    ) -> tuple[Array, Any]:
        out = apply(x, weight, bias, aux=activation in GELUS)
        return out[0], (x, weight, bias, weight_grad, out)

    def backward(saved: Any, ct: Array) -> tuple[Array | None, ...]:
        x, weight, bias, weight_grad, out = saved
        dz = differentiate(ct, activation, *out).astype(x.dtype)
        dx = contract(
            dz,
            weight.astype(x.dtype),
            f"{y_term},{b}->{a}",
            precision=precision,
            out_sharding=placement(jax.typeof(x)),
        )
        dw, db = linear_grad_p(
            dz,
            x,
            weight_grad,
            spec=f"{y_term},{a}->{b}",
            precision=precision,
            dtype=weight_grad.dtype,
            out_sharding=placement(jax.typeof(weight_grad)),
        )
        return (
            dx,
            jnp.zeros_like(weight),
            None if bias is None else db.astype(bias.dtype),
            dw,
        )

    layer.defvjp(forward, backward)
    return layer(x, weight, bias, weight_grad)
