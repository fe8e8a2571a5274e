# SPDX-License-Identifier: Apache-2.0
"""The linear layer: values, derivatives, what it becomes, sharding, libraries."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_layout as jl
from hlo import collectives, compiled, count

gelu = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS = {
    None: lambda z: z,
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
}


def operands(x=(8, 16), out=24, dtype=jnp.float64, bias=True):
    rng = np.random.default_rng(0)
    arrays = (
        rng.standard_normal(x),
        rng.standard_normal((out, x[-1])),
        rng.standard_normal(out),
    )
    return [jnp.asarray(a, dtype) for a in arrays[: 2 + bias]]


def plain(x, w, bias=None, *, activation=None):
    z = x @ w.T
    return ACTIVATIONS[activation](z if bias is None else z + bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "x", [(16,), (1, 16), (8, 16), (2, 3, 16), (2, 0, 16)], ids=str
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_linear(x, bias, activation, dtype):
    args = operands(x, dtype=dtype, bias=bias)
    ours = jax.jit(functools.partial(jl.linear, activation=activation))(*args)
    expected = plain(*[a.astype(jnp.float64) for a in args], activation=activation)
    assert ours.dtype == dtype and ours.shape == expected.shape
    tolerance = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 5e-2}[dtype]
    np.testing.assert_allclose(
        ours.astype(jnp.float64), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("x", [(16,), (3, 16), (2, 3, 16)], ids=str)
def test_derivatives(x, bias, activation):
    f = functools.partial(jl.linear, activation=activation)
    args = operands(x, 5, bias=bias)
    check_grads(f, args, order=2, modes=("fwd", "rev"), eps=1e-4)
    for argnums in itertools.chain.from_iterable(
        itertools.combinations(range(len(args)), n) for n in (1, 2)
    ):
        loss, like = (
            lambda *a, f=f: jnp.sum(jnp.sin(f(*a)))
            for f in (f, functools.partial(plain, activation=activation))
        )
        ours, expected = jax.grad(loss, argnums)(*args), jax.grad(like, argnums)(*args)
        jax.tree.map(
            lambda o, e: np.testing.assert_allclose(o, e, atol=1e-10), ours, expected
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_hessian(activation):
    x, w, b = operands((3, 4), 5)
    ours = jax.hessian(
        lambda w: jnp.sum(jl.linear(x, w, b, activation=activation) ** 2)
    )(w)
    expected = jax.hessian(
        lambda w: jnp.sum(plain(x, w, b, activation=activation) ** 2)
    )(w)
    np.testing.assert_allclose(ours, expected, atol=1e-9)


@pytest.mark.parametrize(
    "mapped", list(itertools.product((None, 0, 1), (None, 0, 1), (None, 0))), ids=str
)
def test_vmap_and_its_gradient(mapped):
    if mapped == (None, None, None):
        return
    args = operands((3, 4), 5)
    args = [
        a if axis is None else jnp.stack([a, 2 * a], axis)
        for a, axis in zip(args, mapped, strict=True)
    ]

    def loss(f, *args):
        return jnp.sum(jnp.sin(jax.vmap(f, mapped)(*args)))

    ours, expected = (
        jax.value_and_grad(
            functools.partial(loss, functools.partial(f, activation="gelu")), (0, 1, 2)
        )(*args)
        for f in (jl.linear, plain)
    )
    jax.tree.map(
        lambda o, e: np.testing.assert_allclose(o, e, atol=1e-10), ours, expected
    )


def test_float32_master_weights_get_gradients_that_were_never_rounded():
    x, w, b = operands((512, 16), dtype=jnp.float32)
    x = x.astype(jnp.bfloat16)

    def loss(w, b):
        return jnp.sum(jl.linear(x, w, b).astype(jnp.float32))

    y, (dw, db) = jax.value_and_grad(loss, (0, 1))(w, b)
    assert dw.dtype == db.dtype == jnp.float32
    expected = jnp.broadcast_to(jnp.sum(x.astype(jnp.float64), 0), w.shape)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-4)
    rounded = expected.astype(jnp.bfloat16).astype(jnp.float32)
    assert np.abs(rounded - expected).max() > 1e-2
    np.testing.assert_allclose(db, jnp.full(24, 512.0))


def test_gradients_of_microbatches_add_up_in_place():
    """In a scan over batches of a step of mixed precision, and by its HLO."""
    x, w, b = operands((4, 64, 128), 256, jnp.float32)
    x = x.astype(jnp.bfloat16)

    def loss(layer):
        return lambda g, x: jnp.sum(layer(x, g).astype(jnp.float32) ** 2)

    gelu_layer = functools.partial(jl.linear, activation="gelu")
    ours = jax.grad(loss(lambda x, g: gelu_layer(x, w, b, weight_grad=g)))
    run = jax.jit(
        lambda g, x: jax.lax.scan(lambda g, x: (ours(g, x), None), g, x)[0],
        donate_argnums=0,
    )
    expected = sum(jax.grad(loss(lambda x, w: gelu_layer(x, w, b)))(w, i) for i in x)
    hlo = run.lower(w, x).compile().as_text()
    assert "output_to_operand_aliasing" in hlo
    assert not re.search(r"f32\[256,128\]\S* (copy|add)\(", hlo)
    found = run(jnp.ones_like(w), x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected + 1, rtol=1e-3, atol=1e-2)


def test_accumulated_gradients_of_the_other_arguments():
    x, w, b = operands((3, 4), 5)
    g = jnp.ones_like(w)

    def loss(x, w, b, g):
        return jnp.sum(jnp.sin(jl.linear(x, w, b, activation="gelu", weight_grad=g)))

    dx, dw, db, dg = jax.grad(loss, (0, 1, 2, 3))(x, w, b, g)
    like = lambda *a: jnp.sum(jnp.sin(plain(*a, activation="gelu")))  # noqa: E731
    ex, ew, eb = jax.grad(like, (0, 1, 2))(x, w, b)
    for found, expected in ((dx, ex), (dw, 0 * w), (db, eb), (dg, g + ew)):
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_forward_is_one_call_and_backward_two():
    x, w, b = operands((64, 256), 256, jnp.float32)
    f = functools.partial(jl.linear, activation="gelu")
    assert calls(compiled(f, x, w, b)) == 1
    y, vjp = jax.vjp(f, x, w, b)
    hlo = compiled(lambda ct: vjp(ct), y)
    assert calls(hlo) == 2
    assert count("transpose", hlo) == count("dot", hlo) == count("reduce", hlo) == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_linear_transpose(place, dtype):
    given = operands((3, 8, 24), 16, dtype)
    plain = lambda x, w, b: x @ w.T + b  # noqa: E731

    def transposed(f):
        def of(v):
            return f(*given[:place], v, *given[place + 1 :])

        if place == 2:  # else what is added is no part of what is linear
            return jax.linear_transpose(lambda v: of(v) - of(0 * v), given[2])
        return jax.linear_transpose(of, given[place])

    ct = jl.linear(*given)
    (found,), (expected,) = (transposed(f)(ct) for f in (jl.linear, plain))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_allclose(
        *(np.asarray(v, np.float32) for v in (found, expected)),
        rtol=2e-2 if dtype == jnp.bfloat16 else 1e-5,
        atol=abs(expected).max().astype(np.float32) * 1e-2,
    )


def test_what_is_not_linear_is_not_transposed():
    x, w, b = operands((8, 24), 16, jnp.float32)
    f = functools.partial(jl.linear, weight=w, activation="relu")
    with pytest.raises(NotImplementedError, match="linear: with activation 'relu'"):
        jax.linear_transpose(f, x)(jl.linear(x, w))


def calls(hlo):
    return hlo.count('custom_call_target="jax_layout_gemm"')


def test_remat_policy_saves_products():
    x, w, b = operands((64, 256), 256, jnp.float32)

    def loss(policy):
        def block(x, w, b):
            return jnp.sin(jl.linear(jnp.sin(jl.linear(x, w, b)), w, b)).sum()

        return jax.grad(jax.checkpoint(block, policy=policy), (0, 1))

    def products(policy):
        jaxpr = str(jax.make_jaxpr(loss(policy))(x, w, b))
        return (
            jaxpr.count("= linear[")
            + jaxpr.count("= linear_grad[")
            + jaxpr.count("= gemm[")
        )

    assert products(jl.save_gemms) < products(jax.checkpoint_policies.dots_saveable)


# --- sharding

LAYOUTS = {
    "data": (P("a", None), P(), P()),
    "columns": (P(), P("b", None), P("b")),
    "rows": (P(None, "b"), P(None, "b"), P()),
    "data and columns": (P("a", None), P("b", None), P("b")),
    "data and rows": (P("a", "b"), P(None, "b"), P()),
    "fully sharded": (P(("a", "b"), None), P(("a", "b"), None), P(("a", "b"))),
}


@pytest.fixture
def auto_mesh():
    types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("a", "b"), types, devices=jax.devices("cpu"))


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_on_an_auto_mesh(auto_mesh, layout, activation):
    args = operands((64, 64), 64)
    placed = [
        jax.device_put(a, NamedSharding(auto_mesh, s))
        for a, s in zip(args, LAYOUTS[layout], strict=True)
    ]

    def loss(f, *args):
        return jnp.sum(jnp.sin(f(*args, activation=activation)))

    ours = jax.jit(jax.value_and_grad(functools.partial(loss, jl.linear), (0, 1, 2)))(
        *placed
    )
    expected = jax.value_and_grad(functools.partial(loss, plain), (0, 1, 2))(*args)
    jax.tree.map(
        lambda o, e: np.testing.assert_allclose(o, e, atol=1e-9), ours, expected
    )


COLLECTIVES = {
    "data": {},
    "columns": {},
    "rows": {"all-reduce": 1},
    "data and columns": {},
    "data and rows": {"all-reduce": 1},
}


@pytest.mark.parametrize("layout", COLLECTIVES)
def test_only_the_collectives_that_the_mathematics_needs(auto_mesh, layout):
    args = [
        jax.device_put(a, NamedSharding(auto_mesh, s))
        for a, s in zip(operands((64, 64), 64), LAYOUTS[layout], strict=True)
    ]
    hlo = compiled(functools.partial(jl.linear, activation="gelu"), *args)
    assert collectives(hlo) == COLLECTIVES[layout] and calls(hlo) == 1


def test_the_bias_is_added_once(auto_mesh):
    x, w, b = operands((64, 64), 64)
    spec = NamedSharding(auto_mesh, P(None, ("a", "b")))
    ours = jax.jit(jl.linear)(jax.device_put(x, spec), jax.device_put(w, spec), b)
    np.testing.assert_allclose(ours, plain(x, w, b), atol=1e-10)
    c = jnp.ones((64, 64))
    ours = jax.jit(jl.addmm)(c, jax.device_put(x, spec), jax.device_put(w, spec).T)
    np.testing.assert_allclose(ours, plain(x, w) + c, atol=1e-10)


def test_an_explicit_mesh():
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("a", "b"), types, devices=jax.devices("cpu"))
    x, w, b = operands((64, 64), 64)

    def loss(f, *args):
        return jnp.sum(jnp.sin(f(*args, activation="gelu")))

    expected = jax.grad(functools.partial(loss, plain), (0, 1, 2))(x, w, b)
    with jax.set_mesh(mesh):
        x, w, b = (
            jax.device_put(v, NamedSharding(mesh, s))
            for v, s in zip((x, w, b), LAYOUTS["data and columns"], strict=True)
        )
        y = jax.jit(jl.linear)(x, w, b)
        assert jax.typeof(y).sharding.spec == P("a", "b")
        ours = jax.jit(jax.grad(functools.partial(loss, jl.linear), (0, 1, 2)))(x, w, b)
    for o, e, v in zip(ours, expected, (x, w, b), strict=True):
        np.testing.assert_allclose(o, e, atol=1e-10)
        assert jax.typeof(o).sharding.spec == jax.typeof(v).sharding.spec


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(auto_mesh, check_vma):
    """Data parallel, columns and rows, as one writes them by hand."""
    x, w, b = operands((64, 64), 64)
    f = functools.partial(jl.linear, activation="gelu")

    def shards(body, *specs, out):
        return jax.shard_map(
            body, mesh=auto_mesh, in_specs=specs, out_specs=out, check_vma=check_vma
        )

    def loss(g):
        return jax.jit(
            jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(g(*a))), (0, 1, 2))
        )(x, w, b)

    expected = loss(functools.partial(plain, activation="gelu"))
    data = shards(f, P("a"), P(), P(), out=P("a"))
    columns = shards(f, P(), P("b"), P("b"), out=P(None, "b"))
    rows = shards(
        lambda x, w, b: gelu(jax.lax.psum(jl.linear(x, w), "b") + b),
        P(None, "b"), P(None, "b"), P(), out=P(),
    )  # fmt: skip
    for g in (data, columns, rows) if check_vma else (data, columns):
        jax.tree.map(
            lambda o, e: np.testing.assert_allclose(o, e, atol=1e-9), loss(g), expected
        )


# --- bad input

BAD = [
    (
        ((2, 3), (4, 5)),
        {},
        ValueError,
        r"must agree in the last axis, got shapes \(2, 3\) and \(4, 5\)",
    ),
    (
        ((2, 3), (4, 3), (3,)),
        {},
        ValueError,
        r"linear: bias must have shape \(4,\), got \(3,\)",
    ),
    (((), (4, 3)), {}, ValueError, "linear: x"),
    (
        ((2, 3), (4, 3)),
        {"activation": "swish"},
        ValueError,
        "linear: activation must be None",
    ),
]


@pytest.mark.parametrize(("shapes", "options", "error", "message"), BAD)
def test_bad_shapes(shapes, options, error, message):
    with pytest.raises(error, match=message):
        jl.linear(*[jnp.ones(s) for s in shapes], **options)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        ("int32", "float32", None),
        ("bool", "float32", None),
        ("int8", "int32", None),
        ("float32", "complex64", None),
        ("int32", "int32", "float32"),
        ("int8", "int8", "int32"),
        ("float32", "float32", "complex64"),
    ],
)
def test_no_number_is_cast_to_another_kind(x, weight, bias):
    a, w = jnp.ones((5, 3), x), jnp.full((4, 3), 0.5).astype(weight)
    b = None if bias is None else jnp.full(4, 0.5).astype(bias)
    at_fault = "weight" if bias is None else "bias"
    with pytest.raises(TypeError, match=f"linear: {at_fault} must have .* dtype or"):
        jl.linear(a, w, b)


def test_gelu_of_integers_is_refused():
    x = jnp.ones((3, 3), "int32")
    with pytest.raises(TypeError, match="linear: gelu is for floating point"):
        jl.linear(x, x, activation="gelu")


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_linear_of_integers_of_less_than_a_byte(dtype, activation):
    x = jnp.arange(6).reshape(2, 3).astype(dtype)
    ours = jl.linear(x, x, jnp.ones(2, dtype), activation=activation)
    assert ours.dtype == dtype
    wide = x.astype("int32")
    expected = (wide @ wide.T + 1).astype(dtype)
    np.testing.assert_array_equal(ours.astype(int), expected.astype(int))


@pytest.mark.cpu
@pytest.mark.parametrize(("platform", "k", "wide"), [
    ("cuda", 3, True), ("cuda", 33, True), ("cuda", 20, False), ("cpu", 3, False)
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_int8_of_few_terms_is_widened_on_gpus(dtype, platform, k, wide):
    """XLA:GPU gives twice the product there."""
    x, bias = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, k), (2,)))
    traced = jax.jit(jl.linear).trace(x, x, bias)
    try:
        jl.use_choices("lax")
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    finally:
        jl.use_choices(None)
    (types,) = re.findall(r"dot_general.* : (.*)", text)
    assert re.findall(r"x(i\d+)>", types) == ["i32" if wide else "i8"] * 2 + ["i32"]


def test_bad_types():
    x, w, b = operands(dtype=jnp.float32)
    with pytest.raises(
        TypeError, match="linear: weight must have x's dtype or a wider"
    ):
        jl.linear(x, w.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="linear: bias must have the result's dtype"):
        jl.linear(x, w, b.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="linear: weight must be an array, got list"):
        jl.linear(x, [[1.0]])
