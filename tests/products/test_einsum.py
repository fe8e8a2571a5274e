# SPDX-License-Identifier: Apache-2.0
"""einsum, tensordot, dot_general and matmul are drop-ins."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_layout as jl
from hlo import compiled, count, kernels
from jax_layout import choices

SUBSCRIPTS = [
    "ij,jk->ik", "ij,jk", "ij,kj->ik", "ji,jk->ki", "ij,kl->ijkl", "i,j->ij", "i,i->",
    "ij,j->i", "ij,ij->", "ij,ij->ij", "ij,ij->i", "bij,bjk->bik", "bij,bjk->ik",
    "bshd,bthd->bhst", "bhst,bthd->bshd", "bsm,mhd->bhsd", "bhsd,hdm->bsm",
    "...ij,...jk->...ik", "...ij,jk", "ij,jk,kl->il", "ij,jk,kl,lm->im", "ij->ji",
    "ij->", "ii->i", "ii,ij->j", "ijk,jl->l", "ij,k->i", "ij , jk -> ki", "ab,ba->",
]  # fmt: skip
EXTENTS = dict(zip("abcdefghijklmst", range(2, 17), strict=True))


def operands(subscripts, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    terms = subscripts.replace(" ", "").split("->")[0].split(",")
    shapes = [[EXTENTS[i] for i in t.replace("...", "ab")] for t in terms]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("subscripts", SUBSCRIPTS)
def test_einsum(subscripts):
    x = operands(subscripts)
    ours = jax.jit(functools.partial(jl.einsum, subscripts))(*x)
    expected = np.einsum(subscripts, *x)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, atol=1e-10)


def sums_one_letter(subscripts):
    """Operands with more of them are brought into one order first."""
    terms, _, result = subscripts.replace(" ", "").partition("->")
    left, *right = (set(term.strip(".")) for term in terms.split(","))
    return len(right) == 1 and len((left & right[0]) - set(result)) < 2


@pytest.mark.parametrize("subscripts", filter(sums_one_letter, SUBSCRIPTS))
def test_what_is_left_to_xla_is_as_jax_has_it(subscripts):
    """The order of operands and transposes that XLA is quick with."""

    def products(einsum):
        x = operands(subscripts, jnp.bfloat16)
        with choices.forced("lax"):
            text = jax.jit(lambda *x: einsum(subscripts, *x)).lower(*x).as_text()
        return re.findall("dot_general .*: (.*)", text), "transpose" in text

    assert products(jl.einsum) == products(jnp.einsum)


def test_a_number_is_a_cotangent():
    x = jnp.arange(3.0)
    _, pull = jax.vjp(lambda x: jl.einsum("i,i->", x, x), x)
    np.testing.assert_array_equal(pull(1.0)[0], 2 * x)


def test_einsum_broadcasts_and_takes_lists_of_axes():
    a, b = jnp.ones((1, 3)), jnp.ones((4, 3))
    np.testing.assert_array_equal(
        jl.einsum("ij,ij->ij", a, b), jnp.einsum("ij,ij->ij", a, b)
    )
    ours = jl.einsum(a, [0, 1], b, [2, 1], [2, 0])
    np.testing.assert_array_equal(ours, np.einsum("ij,kj->ki", a, b))


@pytest.mark.parametrize(
    "dtypes",
    list(itertools.product(["float32", "bfloat16", "int32"], repeat=2)),
    ids=str,
)
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_dtypes_promote_as_in_jax_numpy(dtypes, preferred):
    a, b = (x.astype(d) for x, d in zip(operands("ij,jk"), dtypes, strict=True))
    for f, g in (
        (functools.partial(jl.einsum, "ij,jk"), functools.partial(jnp.einsum, "ij,jk")),
        (jl.matmul, jnp.matmul),
        (
            functools.partial(jl.tensordot, axes=1),
            functools.partial(jnp.tensordot, axes=1),
        ),
    ):
        try:
            expected = g(a, b, preferred_element_type=preferred)
        except jax.errors.JaxRuntimeError:
            assert jax.default_backend() != "cpu"
            pytest.skip("XLA:GPU 0.11.2 has no product of int32 in float32")
        ours = f(a, b, preferred_element_type=preferred)
        assert ours.dtype == expected.dtype
        np.testing.assert_allclose(
            ours.astype(float), expected.astype(float), rtol=2e-2, atol=0.1
        )


@pytest.mark.parametrize(
    "name", ["bshd,bthd->bhst", "bhst,bthd->bshd", "bsm,mhd->bhsd"]
)
def test_einsum_derivatives(name):
    check_grads(functools.partial(jl.einsum, name), operands(name), order=2, eps=1e-4)


HEADS = {
    "bshd,bthd->bhst": ((2, 64, 4, 32), (2, 64, 4, 32)),
    "bhst,bthd->bshd": ((2, 4, 64, 64), (2, 64, 4, 32)),
    "bsm,mhd->bhsd": ((2, 64, 128), (128, 4, 32)),
}


@pytest.mark.parametrize("subscripts", HEADS)
def test_heads_are_read_in_place(subscripts):
    a, b = (jnp.ones(shape, jnp.float32) for shape in HEADS[subscripts])
    hlo = compiled(functools.partial(jl.einsum, subscripts), a, b)
    assert kernels(hlo) == 1 and count("transpose", hlo) == count("copy", hlo) == 0
    plain = compiled(functools.partial(jnp.einsum, subscripts), a, b)
    assert count("transpose", plain) + count("copy", plain) > 0


DOTS = [
    ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    ((2, 3, 4), (2, 5, 4), (((2,), (2,)), ((0,), (0,)))),
    ((3, 2, 4), (5, 4, 2), (((2,), (1,)), ((1,), (2,)))),
    ((2, 3, 4, 5), (4, 2, 6), (((2,), (0,)), ((0,), (1,)))),
    ((2, 3), (4, 5), (((), ()), ((), ()))),
    ((4,), (4,), (((0,), (0,)), ((), ()))),
]


@pytest.mark.parametrize(("a", "b", "dims"), DOTS, ids=str)
def test_dot_general(a, b, dims):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(s)) for s in (a, b))
    np.testing.assert_allclose(
        jl.dot_general(a, b, dims), jax.lax.dot_general(a, b, dims), atol=1e-12
    )


@pytest.mark.parametrize("precision", [None, "highest", "F32_F32_F32", "BF16_BF16_F32"])
def test_dot_general_takes_precisions(precision):
    a, b = jnp.ones((3, 4), jnp.float32), jnp.ones((4, 5), jnp.float32)
    dims = (((1,), (0,)), ((), ()))
    np.testing.assert_allclose(
        jl.dot_general(a, b, dims, precision=precision),
        jax.lax.dot_general(a, b, dims, precision=precision),
    )


@pytest.mark.parametrize("axes", [0, 2, ((1, 2), (0, 1)), ((-1,), (1,)), (2, 1)])
def test_tensordot(axes):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 4, 5)), rng.standard_normal((4, 5, 6))
    np.testing.assert_allclose(
        jl.tensordot(a, b, axes), np.tensordot(a, b, axes), atol=1e-12
    )


MATMULS = [
    ((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)),
    ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((1, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (7, 4, 5)), ((7, 2, 3, 4), (4,)), ((4,), (2, 4, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), MATMULS, ids=str)
def test_matmul(a, b):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(a), rng.standard_normal(b)
    ours, expected = jax.jit(jl.matmul)(a, b), a @ b
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, atol=1e-12)


BAD = [
    (lambda: jl.einsum("ij,jk->il", jnp.ones((2, 3)), jnp.ones((3, 4))),
     ValueError, "einsum: .*'l'"),
    (lambda: jl.einsum("ij,jk", jnp.ones((2, 3))), ValueError, "einsum"),
    (lambda: jl.einsum("ij,jk", jnp.ones((2, 3)), jnp.ones((4, 5))), Exception, "Size"),
    (lambda: jl.dot_general(
        jnp.ones((2, 3)), jnp.ones((4, 5)), (((1,), (0,)), ((), ()))),
     TypeError, "contracting dimensions to have the same shape"),
    (lambda: jl.tensordot(jnp.ones((2, 3)), jnp.ones((4, 5)), 1), TypeError, "shape"),
]  # fmt: skip


@pytest.mark.parametrize(("f", "error", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_input(f, error, message):
    with pytest.raises(error, match=message):
        f()


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool", "bfloat16", "float32"])
@pytest.mark.parametrize("preferred", [None, "int32", "float32"])
@pytest.mark.parametrize("subscripts", ["...ik, ...j -> ij", "ba,b->", "ij,jk->i"])
def test_sums_before_the_product_have_its_dtype(subscripts, dtype, preferred):
    shapes = {".": [(5, 2, 3), (5, 4)], "b": [(5, 3), (5,)], "i": [(2, 3), (3, 5)]}
    operands = [jnp.full(shape, 9, dtype) for shape in shapes[subscripts[0]]]
    options = {"preferred_element_type": preferred}
    expected = jnp.einsum(subscripts, *operands, **options)
    ours = jl.einsum(subscripts, *operands, **options)
    assert ours.dtype == expected.dtype
    np.testing.assert_allclose(ours.astype(float), expected.astype(float), rtol=1e-2)


def test_einsum_refuses_the_paths_that_jax_numpy_refuses():
    x = [jnp.ones((2, n)) for n in (3, 4, 5)]
    with pytest.raises(NotImplementedError, match="3 or more operands"):
        jl.einsum("ij,ik,il->jkl", *x, optimize=[(0, 1, 2)])
    with pytest.raises(KeyError, match="not found"):
        jl.einsum("ij,ik,il->jkl", *x, optimize="unknown")


def test_jaxprs_show_the_dtype_of_a_product():
    x = jnp.ones((2, 2), "bfloat16")
    f = functools.partial(jl.einsum, "ij,jk", preferred_element_type="float32")
    (eqn,) = jax.make_jaxpr(f)(x, x).eqns
    assert eqn.params["preferred_element_type"] == jnp.float32


@pytest.mark.parametrize("numbers", [((0,), (1,)), 3, None])
def test_dot_general_names_what_its_dimension_numbers_are(numbers):
    with pytest.raises(ValueError, match="dot_general: dimension_numbers must be"):
        jl.dot_general(jnp.ones((2, 3)), jnp.ones((3, 4)), numbers)


def test_second_derivative_of_a_product_of_numbers():
    f = jax.remat(lambda x: jl.dot_general(x, x, (([], []), ([], []))))
    assert jax.hessian(f)(1.0) == 2


@jax.numpy_dtype_promotion("strict")
def test_gradients_where_jax_is_told_to_promote_nothing():
    a, b = jnp.ones((5, 3), "bfloat16"), jnp.ones((3, 4), "bfloat16")
    for f in (
        functools.partial(jl.matmul, preferred_element_type="float32"),
        lambda a, b: jl.linear(a, b.T.astype("float32"), activation="gelu"),
        lambda a, b: jl.linear(a, b.T, preferred_element_type="float32"),
    ):
        da, db = jax.grad(lambda a, b, f=f: f(a, b).sum(), (0, 1))(a, b)
        assert da.dtype == db.dtype == "bfloat16"
        assert jnp.all(da > 3.9) and jnp.all(db > 4.9)
