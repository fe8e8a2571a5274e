# SPDX-License-Identifier: Apache-2.0
"""A product, its bias and its gelu as libraries write it is one call, or left alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from hlo import compiled, count, kernels
from jax_layout import _backends, choices
from jax_layout.measured import Work
from jax_layout.tune.table import text

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the extension module is missing"
)


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


X, W, B = normal(2, 9, 16), normal(16, 24, seed=1), normal(24, seed=2)
NT = (((2,), (1,)), ((), ()))


def activations(f, *args):
    """The activation of each call of a layer in a function's equations."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "linear":
                found.append(eqn.params["activation"])
            for inner in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def becomes(f, *args, layers, tolerance=2e-6):
    """A function computes what it did, with these activations in calls of layers."""
    optimized = jl.optimize_layout(f)
    found, expected = (jax.jit(g)(*args) for g in (optimized, f))
    jax.tree.map(lambda x, y: close(x, y, tolerance), found, expected)
    assert activations(optimized, *args) == layers
    assert optimized.layout_report(*args).layers == len(layers)


def close(found, expected, tolerance):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    limit = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def by_tanh(z):
    return 0.5 * z * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def by_powers(z):  # of transformers' "gelu_new", in the dtype of z
    inner = jnp.asarray(0.7978845608, z.dtype) * (z + 0.044715 * jnp.power(z, 3.0))
    return z * (jnp.tanh(inner) + 1.0) / 2


def by_sigmoid(z):
    return z * jax.nn.sigmoid(1.5957691216 * z * (1 + 0.044715 * z * z))


def by_erf(z):
    return z * (jax.lax.erf(z / math.sqrt(2)) + 1) / 2


def by_erfc(z):
    return 0.5 * z * jax.lax.erfc(-z * math.sqrt(0.5))


TANH = [jax.nn.gelu, by_tanh, by_powers, by_sigmoid]
ERF = [lambda z: jax.nn.gelu(z, approximate=False), by_erf, by_erfc]
WRITTEN = [(f, "gelu") for f in TANH] + [(f, "gelu_erf") for f in ERF]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("gelu, name", WRITTEN)
def test_a_gelu_in_any_form(gelu, name, dtype):
    x, w, b = (v.astype(dtype) for v in (X, W, B))
    tolerance = 2e-6 if dtype == "float32" else 2e-2
    becomes(lambda x: gelu(x @ w + b), x, layers=[name], tolerance=tolerance)


def test_the_result_is_that_of_float64():
    """The two gelus differ by 5e-4, and neither is taken for the other."""
    x, w, b = (v.astype("float64") for v in (X, W, B))
    for f, name in ((by_tanh, "gelu"), (by_erfc, "gelu_erf")):
        becomes(lambda x, f=f: f(x @ w + b), x, layers=[name], tolerance=1e-13)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.nn.gelu(x @ W),
        lambda x: jax.nn.gelu(x @ W + B[None, None]),
        lambda x: jax.nn.gelu(B + (x.reshape(-1, 16) @ W).reshape(2, 9, 24)),
        lambda x: jax.nn.gelu(jnp.tensordot(x, W, 1) + 2 * B),
        lambda x: jax.nn.gelu(jax.lax.dot_general(x, W.T, NT) + B),
        lambda x: jax.jit(jax.nn.gelu)(jnp.einsum("btk,kn->btn", x, W) + B),
        lambda x: jax.nn.gelu((x @ W + B).astype("bfloat16").astype("float32")),
        lambda x: 2 * jax.nn.gelu(x[:1, :1] @ W + x[1, 1, 0] * B) + 1,
    ],
)
def test_layers_as_libraries_write_them(f):
    becomes(f, X, layers=["gelu"], tolerance=5e-3)


def test_a_layer_in_float32_of_halves_rounds_once():
    x, w, b = (v.astype("bfloat16") for v in (X, W, B))

    def wide(x):
        z = jnp.matmul(x, w, preferred_element_type="float32")
        return jax.nn.gelu(z + b.astype("float32")).astype("bfloat16")

    def narrow(x):
        z = jnp.matmul(x, w, preferred_element_type="float32").astype("bfloat16")
        return jax.nn.gelu((z + b).astype("float32")).astype("bfloat16")

    becomes(wide, x, layers=[], tolerance=0)  # its bias may not be rounded
    becomes(narrow, x, layers=["gelu"], tolerance=2e-2)


def test_what_has_a_transposed_weight_reads_it_as_it_lies():
    weight = W.T + 0

    def f(x, w):
        return jax.nn.gelu(x @ w.T + B)

    becomes(f, X, weight, layers=["gelu"])
    hlo = compiled(jl.optimize_layout(f), X, weight)
    assert kernels(hlo) == 1 and count("transpose", hlo) == count("tanh", hlo) == 0


def test_of_several_layers_each_is_one_call():
    w, v = normal(24, 16, seed=3), normal(16, 24, seed=4)

    def f(x):
        y = by_erfc(x @ W + B) @ w
        return y + (jax.nn.gelu(y @ v) @ w)

    becomes(f, X, layers=["gelu_erf", "gelu"], tolerance=2e-5)


def test_in_a_loop():
    w = normal(3, 16, 16, seed=3) / 4

    def step(x, w):
        return jax.nn.gelu(x @ w + x[0, 0]), None

    def f(x):
        return jax.lax.scan(step, x, w)[0]

    becomes(f, X, layers=["gelu"], tolerance=2e-5)


@pytest.mark.parametrize(
    "f",
    [
        lambda z: z * jax.nn.sigmoid(1.702 * z),
        jax.nn.silu,
        jax.nn.relu,
        lambda z: jnp.maximum(z, 0),
        jnp.tanh,
        lambda z: jax.nn.gelu(z + 1e-2),
        lambda z: jax.nn.gelu(z) * z,
        lambda z: jnp.where(z > 3, 0, jax.nn.gelu(z)),
        lambda z: z / 2 * (1 + jnp.tanh(0.8 * (z + 0.05 * z**3))),
        lambda z: z[..., ::-1] * jax.nn.gelu(z) / z,
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_functions_are_left_alone(f, dtype):
    w = W.astype(dtype)
    args = X.astype(dtype), B.astype(dtype)
    assert activations(jl.optimize_layout(lambda x, b: f(x @ w + b)), *args) == []


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (lambda z: (jax.nn.gelu(z), z))(x @ W + B),
        lambda x: (lambda z: jax.nn.gelu(z + B) + z)(x @ W),
        lambda x: (lambda z: (jax.nn.gelu(z), jnp.tanh(z)))(x @ W),
        jax.grad(lambda x: jax.nn.gelu(x @ W + B).sum()),
    ],
)
def test_what_others_read_stays(f):
    becomes(f, X, layers=[])


@pytest.mark.parametrize(
    "bias", [normal(2, 9, 24, seed=5), normal(9, 1, seed=6), normal(2, 1, 24, seed=7)]
)
def test_a_bias_of_other_axes_is_left_alone(bias):
    assert activations(jl.optimize_layout(lambda x: jax.nn.gelu(x @ W + bias)), X) == []


def test_two_biases_are_left_alone():
    f = jl.optimize_layout(lambda x: jax.nn.gelu(x @ W + B + B[::-1]))
    assert activations(f, X) == []


@pytest.mark.parametrize("gelu", [by_tanh, by_erfc])
def test_derivatives_of_what_was_found(gelu):
    x, w, b = (v.astype("float64") for v in (X, W, B))

    def loss(layer):
        return lambda *args: jnp.sin(layer(*args)).sum()

    def layer(x, w, b):
        return gelu(x @ w + b)

    found, expected = (
        jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))(x, w, b)
        for f in (jl.optimize_layout(layer), layer)
    )
    jax.tree.map(lambda y, z: close(y, z, 1e-12), found, expected)
    twice = [
        jax.jit(jax.hessian(lambda b, f=f: loss(f)(x[0, :2], w, b)))(b)
        for f in (jl.optimize_layout(layer), layer)
    ]
    close(*twice, 1e-11)


def test_what_has_no_gradient_keeps_none():
    def f(b, inside):
        z = X @ W + (b if inside else jax.lax.stop_gradient(b))
        return jax.nn.gelu(jax.lax.stop_gradient(z) if inside else z).sum()

    for inside, layers in ((True, []), (False, ["gelu"])):
        optimized = jl.optimize_layout(lambda b, inside=inside: f(b, inside))
        assert activations(optimized, B) == layers
        np.testing.assert_array_equal(jax.jit(jax.grad(optimized))(B), 0 * B)


def test_installed():
    def f(x):
        return jax.nn.gelu(x @ W + B, approximate=False)

    expected = jax.jit(f)(X)
    with jl.installed() as record:
        hlo = compiled(f, X)
        close(jax.jit(lambda x: f(x))(X), expected, 2e-6)
    assert kernels(hlo) == 1 and count("dot", hlo) == 0
    assert [x.runs for x, _ in record.operations()] == ["linear"] * 2


def test_what_the_tables_leave_to_xla_stays(monkeypatch):
    monkeypatch.setattr(choices, "choose", lambda *_, **__: None)
    f = jl.optimize_layout(lambda x: jax.nn.gelu(x @ W + B))
    assert activations(f, X) == []
    assert not f.layout_report(X).optimized


def test_a_call_has_the_gain_of_what_it_is_like(tmp_path):
    """Where a table lacks its own case, and in the order of the cases it names."""
    own, gelu, plain = (f"gemm no one's{name}" for name in (" gelu_erf", " gelu", ""))
    sizes = (64, 256, 256, 1)
    work = Work(own, sizes, (gelu, plain))
    assert work == Work(own, sizes) and len({work, Work(own, sizes)}) == 1
    assert work.named("cuda {}") == Work(f"cuda {own}", sizes)
    assert work.named("cuda {}").like == (f"cuda {gelu}", f"cuda {plain}")

    def chosen(**ratios):
        points = {
            Work({"own": own, "gelu": gelu, "plain": plain}[name], sizes): {"oneDNN": r}
            for name, r in ratios.items()
        }
        path = tmp_path / f"{ratios}.json"
        path.write_text(text(points))
        jl.use_choices(path)
        try:
            by = choices.decided_by(work, ("oneDNN",))
            return choices.choose(work, ("oneDNN",)), by == str(path)
        finally:
            jl.use_choices(None)

    assert chosen(plain=2.0) == ("oneDNN", True)
    assert chosen(plain=0.5, gelu=2.0) == ("oneDNN", True)
    assert chosen(plain=2.0, gelu=0.5) == (None, True)
    assert chosen(plain=2.0, gelu=2.0, own=0.5) == (None, True)
