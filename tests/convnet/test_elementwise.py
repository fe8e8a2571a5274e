# SPDX-License-Identifier: Apache-2.0
"""elementwise: what is, keeps its format; what is not, is found out when traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl

X = np.random.default_rng(0).standard_normal((2, 4, 5, 6)).astype(np.float32)
COLUMN = np.linspace(0, 1, 4, dtype=np.float32)[:, None, None]
KEY = jax.random.key(0)
OLD_KEY = jax.random.PRNGKey(0)
NUMBER = jnp.float32(3)

THREE = np.arange(3, dtype=np.float32)
ELEMENTWISE = {
    "nn": lambda x: jax.nn.gelu(jax.nn.elu(jax.nn.softplus(jax.nn.silu(x)))),
    "a closure over numbers": lambda x: x * NUMBER + np.float32(2),
    "where and clip": lambda x: jnp.where(x > 0, jnp.clip(x, 0, 1), 2),
    "select": lambda x: jnp.select([x > 0, x < -1], [x, 2 * x], 0),
    "piecewise": lambda x: jnp.piecewise(x, [x > 0], [jnp.sin, jnp.cos]),
    "a polynomial": lambda x: jnp.polyval(jnp.arange(3.0), x),
    "Horner's scheme": lambda x: jax.lax.scan(
        lambda y, a: (y * x + a, None), jnp.zeros_like(x), THREE
    )[0],
    "a checkpoint": jax.checkpoint(jnp.sin),
    "jitted": jax.jit(jnp.tanh),
    "special": lambda x: jax.scipy.special.betainc(1.0, 2.0, jax.nn.sigmoid(x)),
    "other dtypes": lambda x: x.astype(jnp.bfloat16) > 0,
    "ones like it": lambda x: x + jnp.ones_like(x) + jnp.full(x.shape, 2.0),
    "back and forth": lambda x: jnp.sin(x.T).T,
    "several results": lambda x: (x, x + 1),
}
OTHERS = {
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "reduce_sum": jnp.sum,
    "reduce_max": jax.nn.softmax,
    "slice": lambda x: x[:, :1],
    "rev": lambda x: x[..., ::-1],
    "sort": jnp.sort,
    "split": jax.nn.glu,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_are_taken(name):
    f = ELEMENTWISE[name]
    expected = f(jnp.asarray(X))
    for format in ("NCHW", "NHWC"):
        x = jl.with_memory_format(X, format)
        y = jl.elementwise(f)(x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            y,
            expected,
        )
        for leaf in jax.tree.leaves(y):
            assert str(jl.memory_format(leaf)) == format
    blocked = lambda x: jl.elementwise(f)(jl.with_memory_format(x, "NCHW4c"))  # noqa: E731
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        jax.jit(blocked)(X),
        expected,
    )


@pytest.mark.parametrize("key", [KEY, OLD_KEY], ids=["new", "old"])
def test_random_numbers_of_the_operands_shape(key):
    def noisy(x):
        a, b = jax.random.split(key)
        kept = jax.random.bernoulli(a, 0.5, x.shape)
        return jnp.where(kept, x, jax.random.normal(b, x.shape))

    x = jl.with_memory_format(X, "NHWC")
    y = jl.elementwise(noisy)(x)
    assert str(jl.memory_format(y)) == "NHWC"
    assert 0 < (y == x).sum() < x.size
    per_channel = lambda x: x * jax.random.normal(key, (*x.shape[:2], 1, 1))  # noqa: E731
    with pytest.raises(ValueError, match=r"elementwise: arrays that the function"):
        jl.elementwise(per_channel)(x)


@pytest.mark.parametrize("format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("primitive", OTHERS)
def test_other_functions_are_found_out(primitive, format):
    x = jl.with_memory_format(X, format)
    with pytest.raises(
        ValueError, match=rf"elementwise: .* one that calls {primitive}"
    ):
        jl.elementwise(OTHERS[primitive])(x)
    with pytest.raises(ValueError, match=r"elementwise: the function must be element"):
        jax.jit(jl.elementwise(OTHERS[primitive]))(X)


def test_scans_are_looked_into():
    x = jl.with_memory_format(X, "NHWC")

    def along(x):
        return jax.lax.scan(lambda y, row: (y + row, y), np.zeros_like(X[0]), x)[1]

    def inside(x):
        return jax.lax.scan(lambda y, a: (jnp.cumsum(y, 1) + a, None), x, THREE)[0]

    def exchanging(x):
        return jax.lax.scan(lambda y, a: (y.T * a, None), x, THREE)[0]

    def back_and_forth(x):
        return jax.lax.scan(lambda y, a: (y.T.T * a, None), x, THREE)[0]

    with pytest.raises(ValueError, match="calls scan .* along an axis"):
        jl.elementwise(along)(x)
    with pytest.raises(ValueError, match="scan .* exchanges axes"):
        jl.elementwise(exchanging)(np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match="calls cumsum"):
        jl.elementwise(inside)(x)
    np.testing.assert_array_equal(jl.elementwise(back_and_forth)(x), back_and_forth(X))


@pytest.mark.parametrize("format", ["NCHW", "NHWC"])
def test_arrays_are_operands(format):
    x = jl.with_memory_format(X, format)
    with pytest.raises(
        ValueError, match=r"elementwise: arrays .* got mul .* \(2, 4, 5, 6\), \(1, 4, 1"
    ):
        jl.elementwise(lambda x: x * COLUMN)(x)
    with pytest.raises(ValueError, match=r"elementwise: arrays .* got mul"):
        jl.elementwise(lambda x: x * jnp.arange(6.0))(x)
    y = jl.elementwise(lambda x, c: x * c)(x, COLUMN)
    np.testing.assert_allclose(y, X * COLUMN)


def test_places_and_shapes():
    x = jl.with_memory_format(X, "NHWC")
    square = jnp.ones((2, 4, 6, 6))
    for f, given in (
        (lambda x: x.swapaxes(2, 3), square),
        (lambda x: jnp.zeros(()), x),
        (lambda x: jnp.zeros(3), x),
    ):
        with pytest.raises(ValueError, match=r"elementwise: .* with a result of shape"):
            jl.elementwise(f)(given)
    with pytest.raises(ValueError, match=r"must not depend on the shapes"):
        jl.elementwise(lambda x: x / x.shape[1])(x)


def test_transforms_and_numbers_that_are_traced():
    x = jnp.asarray(X)

    def loss(x):
        total = x.sum()
        y = jl.with_memory_format(x, "NHWC")
        return jl.elementwise(lambda v: v * total)(y).sum()

    np.testing.assert_allclose(jax.grad(loss)(x), 2 * X.sum(), rtol=1e-4)
    y = jax.vmap(jl.elementwise(jnp.sin))(jl.with_memory_format(X, "NHWC"))
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-5, atol=1e-6)


def test_eager_calls_alike_are_traced_once():
    shapes = []

    def f(x, power):
        if isinstance(x, jax.core.Tracer):
            shapes.append(x.shape)
        return x**power

    g = jl.elementwise(f)
    for _ in range(3):
        g(jnp.ones((2, 3)), 2)
    assert shapes == [(2, 3)]
    g(jnp.ones((2, 3)), 3)
    g(jnp.ones(5), 2)
    assert shapes == [(2, 3), (2, 3), (5,)]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: jl.relu("a"), r"relu: x must be an array or a number, got 'a'"),
        (lambda: jl.relu([1.0]), r"relu: x must be an array or a number, got \[1.0\]"),
        (lambda: jl.add(X, "a"), r"add: y must be an array or a number, got 'a'"),
        (lambda: jl.add(X, y=None), r"add: y must be an array or a number, got None"),
        (lambda: jl.where(X > 0, X, [0]), r"where: y must be an array or a number"),
        (lambda: jl.elementwise(3), r"elementwise: function must be callable, got 3"),
    ],
)
def test_bad_operands(call, message):
    with pytest.raises(TypeError, match=message):
        call()
