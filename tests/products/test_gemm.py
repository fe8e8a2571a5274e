# SPDX-License-Identifier: Apache-2.0
"""Products of matrices against NumPy in float64: values, dtypes, errors."""

import contextlib
import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_layout as jl
from hlo import compiled, count
from jax_layout import _backends, choices

FLOATS = ["float64", "float32", "bfloat16", "float16"]
COMPLEX = ["complex64", "complex128"]
TOLERANCE = {
    "float64": 1e-12, "complex128": 1e-12, "float32": 2e-5, "complex64": 2e-5,
    "float16": 4e-3, "bfloat16": 2e-2,
}  # fmt: skip


def array(shape, dtype="float64", seed=0):
    rng = np.random.default_rng([seed, *shape])
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(-8, 8, shape), dtype)
    x = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x, dtype)


def exact(x):
    kind = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    return np.asarray(x.astype(kind))


def close(ours, expected, dtype=None):
    dtype = np.dtype(dtype or ours.dtype).name
    scale = np.abs(expected).max(initial=1.0)
    tolerance = TOLERANCE.get(dtype, 0) * scale
    np.testing.assert_allclose(exact(ours), expected, rtol=0, atol=tolerance)


SIZES = [(1, 1, 1), (1, 64, 33), (37, 1, 5), (5, 7, 1), (64, 32, 96), (33, 65, 129)]


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX + ["int8", "int32"])
@pytest.mark.parametrize("transposes", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gemm(size, transposes, dtype):
    m, n, k = size
    a = array((k, m) if transposes[0] else (m, k), dtype)
    b = array((n, k) if transposes[1] else (k, n), dtype, 1)
    f = functools.partial(jl.gemm, transpose_a=transposes[0], transpose_b=transposes[1])
    y = jax.jit(f)(a, b)
    expected = (exact(a).T if transposes[0] else exact(a)) @ (
        exact(b).T if transposes[1] else exact(b)
    )
    assert y.dtype == dtype and y.shape == (m, n)
    if dtype == "int8":
        expected = expected.astype(np.int8)
    close(y, expected)


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
@pytest.mark.parametrize("alpha", [1, 2, -0.5])
@pytest.mark.parametrize("beta", [0, 1, 0.25])
def test_alpha_and_beta(alpha, beta, dtype):
    a, b, c = (
        array((40, 24), dtype),
        array((24, 56), dtype, 1),
        array((40, 56), dtype, 2),
    )
    y = jax.jit(functools.partial(jl.gemm, alpha=alpha, beta=beta))(a, b, c)
    close(y, alpha * (exact(a) @ exact(b)) + beta * exact(c))
    arrays = jax.jit(jl.gemm)(a, b, c, alpha=jnp.float32(alpha), beta=jnp.float32(beta))
    close(arrays, alpha * (exact(a) @ exact(b)) + beta * exact(c))


def test_complex_alpha_and_conjugate_transpose():
    a, b = array((24, 40), "complex64"), array((24, 56), "complex64", 1)
    y = jl.gemm(a, b, alpha=2 - 1j, transpose_a="conjugate")
    close(y, (2 - 1j) * (exact(a).conj().T @ exact(b)))
    y = jl.gemm(a.T, b.T, transpose_b="conjugate")
    close(y, exact(a).T @ exact(b).conj())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("with_c", [False, True])
def test_bias_comes_before_the_activation(with_c, activation, dtype):
    a, b, bias = (
        array((40, 24), dtype),
        array((24, 56), dtype, 1),
        array((56,), dtype, 2),
    )
    c = array((40, 56), dtype, 3) if with_c else None
    y = jl.gemm(a, b, c, alpha=0.5, beta=2, bias=bias, activation=activation)
    z = 0.5 * (exact(a) @ exact(b)) + (2 * exact(c) if with_c else 0) + exact(bias)
    expected = {
        None: z,
        "relu": np.maximum(z, 0),
        "gelu": z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    }
    close(y, expected[activation])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_batched_products(dtype):
    a, b = array((6, 17, 24), dtype), array((6, 24, 33), dtype, 1)
    product = exact(a) @ exact(b)
    close(jl.bmm(a, b), product)
    close(jl.baddbmm(array((33,), dtype, 2), a, b, beta=2, alpha=3),
          3 * product + 2 * exact(array((33,), dtype, 2)))  # fmt: skip
    c = array((17, 33), dtype, 2)
    close(jl.addbmm(c, a, b, alpha=-1), exact(c) - product.sum(0))
    close(jl.gemm(a, b), product)


@pytest.mark.parametrize("shape", [(), (56,), (1, 56), (40, 1), (40, 56)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_addmm_broadcasts_its_input(shape, dtype):
    a, b, c = array((40, 24), dtype), array((24, 56), dtype, 1), array(shape, dtype, 2)
    expected = 3 * (exact(a) @ exact(b)) + 2 * exact(c)
    close(jl.addmm(c, a, b, beta=2, alpha=3), expected)


def test_beta_zero_does_not_read_c_and_alpha_zero_not_a_and_b():
    nan = jnp.full((40, 40), jnp.nan, jnp.float32)
    x = array((40, 40), "float32")
    close(jl.addmm(nan, x, x, beta=0), exact(x) @ exact(x))
    np.testing.assert_array_equal(jl.addmm(x, nan, nan, alpha=0), x)
    np.testing.assert_array_equal(jl.addmm(x, nan, nan, alpha=0, beta=0), 0 * x)
    assert jnp.isnan(jl.mm(0 * x, nan)).all()  # 0 * nan in a product is nan


@pytest.mark.parametrize("beta", [0, 2])
def test_an_empty_sum_is_beta_c(beta):
    a, b, c = jnp.zeros((3, 0)), jnp.zeros((0, 4)), array((3, 4))
    np.testing.assert_array_equal(jl.addmm(c, a, b, beta=beta), beta * c)
    assert jl.mm(jnp.zeros((0, 5)), jnp.zeros((5, 4))).shape == (0, 4)
    assert jl.bmm(jnp.zeros((0, 2, 5)), jnp.zeros((0, 5, 4))).shape == (0, 2, 4)


def test_a_wider_result():
    a, b = array((40, 24), "bfloat16"), array((24, 56), "bfloat16", 1)
    y = jl.gemm(a, b, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    close(y, exact(a) @ exact(b))
    a, b = array((40, 24), "int8"), array((24, 56), "int8", 1)
    y = jl.gemm(a, b, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(y, np.int32(exact(a) @ exact(b)))


@pytest.mark.parametrize("precision", [None, "highest", "F32_F32_F32", "BF16_BF16_F32"])
def test_precision(precision):
    a, b = array((40, 24), "float32"), array((24, 56), "float32", 1)
    y = jl.gemm(a, b, precision=precision)
    rounded = "bfloat16" if precision == "BF16_BF16_F32" else "float32"
    close(y, exact(a) @ exact(b), rounded)


@pytest.mark.parametrize("name", ["addmm", "baddbmm", "addbmm"])
def test_torch_agrees(name):
    torch = pytest.importorskip("torch")
    lead = () if name == "addmm" else (3,)
    c, a, b = array((5, 7)), array((*lead, 5, 6)), array((*lead, 6, 7), seed=1)
    tensors = [torch.tensor(np.asarray(x)) for x in (c, a, b)]
    expected = getattr(torch, name)(*tensors, beta=0.5, alpha=3)
    close(getattr(jl, name)(c, a, b, beta=0.5, alpha=3), expected.numpy())


# --- transformations


OPERANDS = {
    "mm": lambda: (jl.mm, array((4, 5)), array((5, 3), seed=1)),
    "bmm": lambda: (jl.bmm, array((2, 4, 5)), array((2, 5, 3), seed=1)),
    "addmm": lambda: (
        functools.partial(jl.addmm, beta=0.5, alpha=-2.0),
        array((3,), seed=2), array((4, 5)), array((5, 3), seed=1),
    ),
    "gemm": lambda: (
        functools.partial(jl.gemm, transpose_b=True, alpha=0.5, activation="gelu"),
        array((4, 5)), array((3, 5), seed=1), array((4, 3), seed=2),
    ),
    "bias": lambda: (
        lambda a, b, bias: jl.gemm(a, b, bias=bias, activation="gelu"),
        array((4, 5)), array((5, 3), seed=1), array((3,), seed=2),
    ),
    "complex": lambda: (
        functools.partial(jl.gemm, alpha=1 + 2j),
        array((4, 5), "complex128"), array((5, 3), "complex128", 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_derivatives(name):
    f, *operands = OPERANDS[name]()
    check_grads(f, operands, order=2, modes=("fwd", "rev"), eps=1e-4)


@pytest.mark.parametrize("name", OPERANDS)
def test_second_derivatives_forward_over_reverse(name):
    if name == "complex":
        pytest.skip("jax.hessian wants real arguments")
    f, *operands = OPERANDS[name]()
    hessian = jax.hessian(lambda x: jnp.sum(jnp.sin(f(x, *operands[1:]))))(operands[0])
    jacobian = jax.jacrev(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, *operands[1:])))))
    np.testing.assert_allclose(hessian, jacobian(operands[0]), atol=1e-9)


@pytest.mark.parametrize("name", OPERANDS)
def test_vmap(name):
    """Over every subset of the operands, from every axis, to every axis."""
    f, *operands = OPERANDS[name]()
    rng = np.random.default_rng(0)
    for mapped in itertools.product((False, True), repeat=len(operands)):
        if not any(mapped):
            continue
        axes = [int(rng.integers(x.ndim + 1)) if m else None
                for x, m in zip(operands, mapped, strict=True)]  # fmt: skip
        batched = [
            x if axis is None else jnp.stack([x, 2 * x, x - 1], axis)
            for x, axis in zip(operands, axes, strict=True)
        ]
        out_axis = int(rng.integers(3))
        ours = jax.jit(jax.vmap(f, axes, out_axis))(*batched)
        for i in range(3):
            one = [
                x if axis is None else jnp.take(x, i, axis)
                for x, axis in zip(batched, axes, strict=True)
            ]
            np.testing.assert_allclose(jnp.take(ours, i, out_axis), f(*one), atol=1e-9)


def test_linear_transpose():
    a, b = array((4, 5)), array((5, 3), seed=1)
    (ct,) = jax.linear_transpose(lambda a: jl.mm(a, b), a)(array((4, 3), seed=2))
    np.testing.assert_allclose(ct, array((4, 3), seed=2) @ b.T, atol=1e-12)


def test_bf16_gradients_have_the_dtype_of_what_they_are_for():
    a, b = array((40, 24), "bfloat16"), array((24, 56), "bfloat16", 1)

    def loss(a, b):
        return jnp.sum(jl.gemm(a, b, preferred_element_type=jnp.float32) ** 2)

    ours = jax.grad(loss, (0, 1))(a, b)
    y = exact(a) @ exact(b)
    for g, e in zip(ours, (2 * y @ exact(b).T, exact(a).T @ (2 * y)), strict=True):
        assert g.dtype == jnp.bfloat16
        close(g, e)


def test_a_donated_addend_is_accumulated_into_without_a_copy():
    a, b, c = (
        array((256, 64), "float32"),
        array((64, 256), "float32"),
        array((256, 256), "float32"),
    )  # noqa: E501
    expected = exact(c) + exact(a) @ exact(b)
    hlo = jax.jit(jl.addmm, donate_argnums=0).lower(c, a, b).compile().as_text()
    assert count("copy", hlo) == 0 and "output_to_operand_aliasing" in hlo
    kept = compiled(jl.addmm, c, a, b)  # what the count would see
    assert count("copy", kept) == 1
    close(jl.addmm_(c, a, b), expected)
    assert c.is_deleted()


def test_a_carried_addend_is_accumulated_into_without_a_copy():
    a, b, c = (
        array((8, 256, 64), "float32"),
        array((8, 64, 256), "float32"),
        array((256, 256), "float32"),
    )  # noqa: E501

    def f(c, a, b):
        return jax.lax.scan(lambda c, x: (jl.addmm(c, *x), None), c, (a, b))[0]

    hlo = jax.jit(f, donate_argnums=0).lower(c, a, b).compile().as_text()
    assert "output_to_operand_aliasing" in hlo
    body = hlo[: hlo.index("ENTRY")]
    assert " copy(f32[256,256]" not in body
    close(jax.jit(f)(c, a, b), exact(c) + (exact(a) @ exact(b)).sum(0))


# --- bad input

M = functools.partial(jnp.zeros, dtype=jnp.float32)
BAD = [
    (lambda: jl.mm(M((2, 3)), M((4, 5))),
     ValueError, r"mm: input and mat2 shapes cannot be multiplied \(2x3 and 4x5\)"),
    (lambda: jl.addmm(M(5), M((2, 3)), M((4, 5))),
     ValueError, r"addmm: mat1 and mat2 shapes cannot be multiplied \(2x3 and 4x5\)"),
    (lambda: jl.mm(M((2, 3, 4)), M((4, 5))),
     ValueError, r"mm: input must be a 2-D array, got shape \(2, 3, 4\)"),
    (lambda: jl.bmm(M((2, 3, 4)), M((3, 4, 5))),
     ValueError, "bmm: input and mat2 must have the same batch size, got 2 and 3"),
    (lambda: jl.mm(M((2, 3)), jnp.zeros((3, 4), jnp.float64)),
     TypeError, "mm: expected input and mat2 to have the same dtype, got float32 and"),
    (lambda: jl.addmm(M(3), M((2, 3)), M((3, 4))),
     ValueError, r"addmm: input of shape \(3,\) cannot be broadcast to \(2, 4\)"),
    (lambda: jl.addmm(jnp.zeros(4, jnp.int32), M((2, 3)), M((3, 4))),
     TypeError, "addmm: input must have the dtype of the result, float32, got int32"),
    (lambda: jl.addmm(*[jnp.zeros((3, 3), jnp.int32)] * 3, alpha=0.5),
     TypeError, "addmm: for integer arrays alpha must be an integer, got 0.5"),
    (lambda: jl.addmm(*[M((3, 3))] * 3, beta=1j),
     TypeError, "addmm: for real arrays beta must be real, got 1j"),
    (lambda: jl.addmm(*[M((3, 3))] * 3, beta="2"),
     TypeError, "addmm: beta must be a number, got str"),
    (lambda: jl.addmm(*[M((3, 3))] * 3, beta=M(2)),
     ValueError, r"addmm: beta must be a number, got shape \(2,\)"),
    (lambda: jl.gemm(M((2, 3)), M((3, 4)), bias=M(3)),
     ValueError, r"gemm: bias must have shape \(4,\) and dtype float32, got \(3,\)"),
    (lambda: jl.gemm(M((2, 3)), M((3, 4)), activation="tanh"),
     ValueError, 'gemm: activation must be None, "relu", "gelu" or "gelu_erf", got '),
    (lambda: jl.gemm(M((2, 3)), M((5, 3, 4))),
     ValueError, "gemm: a and b must be matrices with the same leading axes"),
    (lambda: jl.mm([[1.0]], M((1, 1))),
     TypeError, "mm: input must be an array, got list"),
    (lambda: jl.matmul(M((2, 3)), M((4, 5))),
     ValueError, "matmul: the last axis of a and the last but one of b must agree"),
    (lambda: jl.matmul(M((2, 2, 3)), M((3, 3, 5))),
     ValueError, "matmul: leading axes must broadcast"),
    (lambda: jl.gemm(M((5, 3)), M((3, 4)), transpose_a=True),
     ValueError, r"gemm: a and b shapes .* \(5x3 transposed and 3x4\)"),
    (lambda: jl.gemm(M((3, 5)), M((3, 4)), transpose_a="T"),
     ValueError, "gemm: transpose_a must be a bool or \"conjugate\", got 'T'"),
    (lambda: jl.gemm(*[jnp.ones((3, 3), jnp.int32)] * 2, activation="gelu"),
     TypeError, "gemm: gelu is for floating point, got int32"),
    (lambda: jl.mm(np.array([["a"]]), M((1, 1))),
     TypeError, "mm: input must hold numbers, got dtype <U1"),
    (lambda: jl.addmm_(5.0, M((2, 3)), M((3, 4))),
     TypeError, "addmm_: input must be an array, got float"),
    (lambda: jl.baddbmm_(5.0, M((2, 2, 3)), M((2, 3, 4))),
     TypeError, "baddbmm_: input must be an array, got float"),
    (lambda: jl.explain_gemm("mk,kn->mn", M((2, 3)), M((3, 4))),
     TypeError, "explain_gemm: a_shape must be a sequence of integers, got"),
    (lambda: jl.explain_gemm("mk,kn->mn", (2, 3), 3),
     TypeError, "explain_gemm: b_shape must be a sequence of integers, got int"),
    (lambda: jl.explain_gemm(3, (2, 3), (3, 4)),
     TypeError, "explain_gemm: spec must be a string, got 3"),
    (lambda: jl.tune_gemms(3), TypeError, "tune_gemms: path must be a path, got 3"),
    (lambda: jl.tune_gemms(candidates=2.5),
     TypeError, "tune_gemms: candidates must be an integer, got 2.5"),
]  # fmt: skip


@pytest.mark.parametrize(("f", "error", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input(f, error, message):
    with pytest.raises(error, match=message):
        f()


def test_shapes_are_checked_when_tracing():
    with pytest.raises(ValueError, match="cannot be multiplied"):
        jax.eval_shape(jl.mm, M((2, 3)), M((4, 5)))


TRANSPOSED = {
    "right": ("mk,nk->mn", lambda a, b: jl.matmul(a, b.T)),
    "left": ("km,kn->mn", lambda a, b: jl.matmul(a.T, b)),
    "both": ("km,nk->mn", lambda a, b: jl.matmul(a.T, b.T)),
    "twice": ("mk,kn->mn", lambda a, b: jl.matmul(a, b.T.T)),
    "ours": ("mk,nk->mn", lambda a, b: jl.gemm(a, jl.permute(b, (1, 0)))),
    "a layer's": ("mk,kn->mn", lambda a, b: jl.linear(a, b.T)),
    "of a batch": ("mbk,bkn->bmn", lambda a, b: jl.matmul(jnp.swapaxes(a, 0, 1), b)),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_operands_are_read_through_transposes(name):
    spec, f = TRANSPOSED[name]
    sizes = {"m": 40, "n": 56, "k": 24, "b": 3}
    left, right = spec.split("->")[0].split(",")
    a, b = (
        array([sizes[letter] for letter in term], "float32", seed)
        for seed, term in enumerate((left, right))
    )
    hlo = compiled(f, a, b)
    assert count("transpose", hlo) == count("copy", hlo) == 0
    assert "jax_layout_gemm" in hlo and "jax_layout_permute" not in hlo
    close(jax.jit(f)(a, b), np.einsum(spec, exact(a), exact(b)))


def test_a_transpose_that_no_kernel_reads_through_is_written():
    """Two axes that are summed over, and are no neighbours in what was given."""
    a, b = array((6, 5, 4), "float32"), array((6, 4, 8), "float32", 1)
    f = lambda a, b: jl.einsum("ixj,ijn->xn", a, b)  # noqa: E731
    turned = lambda a, b: jl.einsum("xij,ijn->xn", jnp.swapaxes(a, 0, 1), b)  # noqa: E731
    expected = np.einsum("ixj,ijn->xn", exact(a), exact(b))
    close(jax.jit(f)(a, b), expected)
    close(jax.jit(turned)(a, b), expected)
    with choices.forced("lax"):
        close(jax.jit(lambda a, b: turned(a, b))(a, b), expected)
    # Of equal extents, where letters that are mistaken would go unseen.
    a, b = array((8, 8, 8), "float32"), array((8, 8, 8), "float32", 1)
    for way in ("lax", None):
        with choices.forced(way) if way else contextlib.nullcontext():
            found = jax.jit(lambda a, b: jl.einsum("abm,bna->mn", a, b))(a, b)
        close(found, np.einsum("abm,bna->mn", exact(a), exact(b)))


WEIGHT = jax.ShapeDtypeStruct((56, 24), "float32")
WRITTEN = {
    "alone": ("mk,kn->nm", lambda a, b: jl.matmul(a, b).T),
    "twice": ("mk,kn->mn", lambda a, b: jl.matmul(a, b).T.T),
    "of a transpose": ("mk,nk->nm", lambda a, b: jl.matmul(a, b.T).T),
    "of a batch": ("bmk,bkn->mbn", lambda a, b: jnp.swapaxes(jl.matmul(a, b), 0, 1)),
    "a gradient by a transpose": (
        "mk,mn->nk",
        lambda a, b: jax.linear_transpose(lambda w: jl.matmul(a, w.T), WEIGHT)(b)[0],
    ),
    "in calls": (
        "mk,kn->nm",
        lambda a, b: jax.jit(lambda a: jax.jit(jl.matmul)(a, b).T)(a),
    ),
    "in a scan": (
        "bmk,kn->bnm",
        lambda a, b: jax.lax.map(lambda one: jl.matmul(one, b).T, a),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_results_are_written_as_they_are_read(name):
    spec, f = WRITTEN[name]
    sizes = {"m": 40, "n": 56, "k": 24, "b": 3}
    a, b = (
        array([sizes[letter] for letter in term], "float32", seed)
        for seed, term in enumerate(spec.split("->")[0].split(","))
    )
    hlo = compiled(f, a, b)
    kept = 1 if name == "in calls" else 0  # whose results are their own
    assert count("transpose", hlo) == kept
    assert "jax_layout_gemm" in hlo
    close(jax.jit(f)(a, b), np.einsum(spec, exact(a), exact(b)))


def test_what_is_read_in_two_orders_is_computed_once():
    a, b = array((40, 24), "float32"), array((24, 56), "float32", 1)

    def f(a, b):
        y = jl.matmul(a, b)
        return y.T, jnp.sin(y)

    hlo = compiled(f, a, b)
    assert hlo.count('custom_call_target="jax_layout_gemm"') == 1
    expected = exact(a) @ exact(b)
    turned, sines = jax.jit(f)(a, b)
    close(turned, expected.T)
    close(sines, np.sin(expected))


def test_transposes_that_no_kernel_writes():
    """Of a sum with another array, and of axes that are no neighbours in the result."""
    a, b = array((40, 24), "float32"), array((24, 56), "float32", 1)
    c = array((40, 56), "float32", 2)
    close(jax.jit(lambda a, b, c: jl.gemm(a, b, c).T)(a, b, c),
          (exact(a) @ exact(b) + exact(c)).T)  # fmt: skip
    a = array((6, 5, 24), "float32")
    f = lambda a, b: jnp.transpose(jl.matmul(a, b), (0, 2, 1))  # noqa: E731
    close(jax.jit(f)(a, b), np.einsum("xyk,kn->xny", exact(a), exact(b)))


def test_tune_gemms(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="candidates must be at least 1, got 0"):
        jl.tune_gemms(candidates=np.int64(0))
    with pytest.raises(ValueError, match="cannot write .*: there is no "):
        jl.tune_gemms(tmp_path / "missing" / "gemms.json")
    foreign = tmp_path / "foreign.json"
    for text in ("", "[1]", '{"hello": 1}', '{"hello": "world"}', "# Notes"):
        foreign.write_text(text)
        with pytest.raises(ValueError, match="foreign.json is not a file of choices"):
            jl.tune_gemms(foreign)
        assert foreign.read_text() == text
    with pytest.raises(ValueError, match="is not a file of choices"):
        jl.tune_gemms(tmp_path)
    (tmp_path / "known.json").write_text(json.dumps({"gemm 1": "00ff" * 32}))
    jl.tune_gemms(tmp_path / "known.json")
    jl.tune_gemms(candidates=1)
    calls = []
    native = types.SimpleNamespace(tune_gemms=lambda *given: calls.append(given))
    monkeypatch.setattr(_backends, "module", {"cuda": native}.get)
    jl.tune_gemms()
    jl.tune_gemms(tmp_path / "gemms.json", candidates=1)
    assert calls == [("", 8), (str(tmp_path / "gemms.json"), 1)]
