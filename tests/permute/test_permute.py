# SPDX-License-Identifier: Apache-2.0
"""What the permutes return, and what they refuse."""

import functools
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_layout as jl
from hlo import compiled, count, kernels

DTYPES = [
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("int64", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "int2", "uint2", "float4_e2m1fn"),
    *("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e3m4", "float8_e4m3", "float8_e8m0fnu"),
]
DTYPES = [dtype for dtype in DTYPES if hasattr(jnp, dtype)]  # this jax's


def values(shape, dtype, seed=0):
    """Random bits of a dtype; NaNs and their payloads included."""
    dtype = jnp.dtype(dtype)
    bits = jax.dtypes.itemsize_bits(dtype)
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if bits < 8:
        small = rng.integers(0, 1 << bits, shape, np.uint8)
        return small.view(dtype) if dtype.kind != "i" else small.astype(dtype)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def assert_same(y, expected):
    """Equal bit for bit, so that a NaN equals itself only."""
    y, expected = np.asarray(y), np.asarray(expected)
    assert y.shape == expected.shape and y.dtype == expected.dtype
    bytes_of = [np.frombuffer(a.tobytes(), np.uint8) for a in (y, expected)]
    np.testing.assert_array_equal(*bytes_of)


def big_enough(shape, dtype):
    """Scales a shape's first axis until a kernel, not XLA, permutes it."""
    first = math.ceil((32 << 10) / (math.prod(shape[1:]) * jnp.dtype(dtype).itemsize))
    return (max(shape[0], first), *shape[1:])


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))), ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
def test_permute_equals_numpy(dtype, axes):
    x = values(big_enough((2, 17, 9, 33), dtype), dtype)
    assert_same(jax.jit(lambda x: jl.permute(x, axes))(x), np.transpose(x, axes))
    assert_same(jl.permute(x, axes), np.transpose(x, axes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (16, 64, 33)])
def test_every_dtype(shape, dtype):
    x = jnp.asarray(values(shape, dtype))
    assert x.dtype == jnp.dtype(dtype)
    for axes in itertools.permutations(range(3)):
        expected = np.transpose(np.asarray(x), axes)
        assert_same(jax.jit(lambda x, axes=axes: jl.permute(x, axes))(x), expected)


def test_prng_keys():
    keys = jax.random.split(jax.random.key(0), 6).reshape(2, 3)
    data = jax.random.key_data(jl.permute(keys, (1, 0)))
    np.testing.assert_array_equal(data, jax.random.key_data(keys).transpose(1, 0, 2))


SHAPES = [(), (1,), (7,), (1, 1), (0, 3), (3, 0, 2), (1, 31, 1, 1024), (1009, 31)]
SHAPES += [(33, 1, 32, 31), (2,) * 14, (1, 2, 1, 3, 1, 5, 1, 7, 1, 11), (4096, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(shape):
    x = values(shape, "float32")
    rng = np.random.default_rng(1)
    for axes in [range(len(shape))[::-1], rng.permutation(len(shape))]:
        axes = tuple(int(axis) for axis in axes)
        assert_same(
            jax.jit(lambda x, axes=axes: jl.permute(x, axes))(x), x.transpose(axes)
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_permute(data):
    shape = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    while math.prod(shape) > 1 << 18:
        shape.pop()
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    x = values(tuple(shape), data.draw(st.sampled_from(["uint8", "int16", "float64"])))
    assert_same(jax.jit(lambda x: jl.permute(x, axes))(x), np.transpose(x, axes))


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))), ids=str)
def test_permute_inverse_is_identity(axes):
    x = values((31, 64, 33), "float32")
    assert_same(jl.permute(jl.permute(x, axes), np.argsort(axes)), x)


def test_permutes_compose():
    x = values((8, 31, 16, 33), "float32")
    for p, q in itertools.product([(2, 0, 3, 1), (3, 2, 1, 0)], [(1, 3, 0, 2)]):
        both = tuple(p[axis] for axis in q)
        assert_same(jl.permute(jl.permute(x, p), q), jl.permute(x, both))


def test_negative_axes_count_from_the_last():
    x = values((31, 64, 33), "float32")
    assert_same(jl.permute(x, (-1, 0, -2)), x.transpose(2, 0, 1))


def test_more_than_2_31_elements():
    rows, columns = 46349, 46351  # primes; 2^31 + 838,411 elements
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.uint8, (rows, columns))
    x = jax.jit(lambda: iota(0) * 7 + iota(1))()
    assert x.size > 2**31
    y = np.asarray(jax.jit(jl.matrix_transpose)(x))
    row = np.arange(rows).astype(np.uint8) * np.uint8(7)
    for column in range(columns):
        expected = row + np.uint8(column % 256)
        assert np.array_equal(y[column], expected), column


CALLS = {
    "transpose": [(), (None,), ((2, 0, 1),), ((-1, 0, 1),)],
    "matrix_transpose": [()],
    "swapaxes": [(0, 2), (-1, 1), (1, 1)],
    "moveaxis": [(0, -1), (2, 0), ((0, 1), (1, 2)), ([2, -3], [0, 1]), (1, 1)],
}


@pytest.mark.parametrize(
    ("name", "args"), [(name, args) for name in CALLS for args in CALLS[name]], ids=str
)
def test_drop_ins_equal_jnp(name, args):
    x = jnp.asarray(values((31, 64, 33), "float32"))
    for f in (getattr(jl, name), jax.jit(lambda x: getattr(jl, name)(x, *args))):
        given = args if f is getattr(jl, name) else ()
        assert_same(f(x, *given), np.asarray(getattr(jnp, name)(x, *args)))


@pytest.mark.parametrize("name", list(CALLS))
def test_drop_ins_have_the_signature_of_jnp(name):
    ours = inspect.signature(getattr(jl, name)).parameters
    theirs = inspect.signature(getattr(jnp, name)).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


def test_numpy_arrays_and_scalars():
    assert isinstance(jl.permute(np.ones((2, 3)), (1, 0)), jax.Array)
    assert jl.transpose(3.0).shape == ()
    assert jl.permute(np.ones((2, 3)), (0, 1)).shape == (2, 3)
    assert jl.moveaxis(np.ones((2, 3)), jnp.int32(0), np.array(1)).shape == (3, 2)


# --- what becomes of a permute in the compiled program


def test_one_kernel_and_nothing_beside_it():
    x = jnp.ones((64, 128, 32), jnp.float32)
    hlo = compiled(lambda x: jl.permute(x, (2, 0, 1)), x)
    assert kernels(hlo) == 1
    assert count("transpose", hlo) == count("copy", hlo) == 0


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((64, 128, 32), (0, 1, 2)),
        ((64, 1, 128, 32), (1, 0, 2, 3)),
        ((1, 128, 1, 1024), (1, 3, 0, 2)),
    ],
    ids=str,
)
def test_what_moves_nothing_costs_no_kernel(shape, axes):
    hlo = compiled(lambda x: jnp.sin(jl.permute(jnp.cos(x), axes)), jnp.ones(shape))
    assert kernels(hlo) == count("transpose", hlo) == 0
    assert count("fusion", hlo) == 1  # one pass over memory


def test_what_moves_nothing_costs_no_copy_between_kernels():
    def f(x):
        x = jl.permute(x, (3, 0, 2, 1))
        x = jl.permute(x, (0, 2, 1, 3))  # moves the axis of extent 1 only
        return jl.permute(x, (2, 0, 1, 3))

    hlo = compiled(f, jnp.ones((64, 128, 1, 256), jnp.float32))
    assert kernels(hlo) == 2
    assert count("fusion", hlo) == count("copy", hlo) == count("transpose", hlo) == 0


def test_identity_returns_x_itself():
    x = jnp.ones((64, 128))
    assert jl.permute(x, (0, 1)) is x


@pytest.mark.parametrize("platform", ["tpu", "rocm", "METAL"])
def test_other_platforms_run_plain_lax(platform):
    x = jax.ShapeDtypeStruct((64, 128, 32), jnp.float32)
    traced = jax.jit(lambda x: jl.permute(x, (2, 0, 1))).trace(x)
    text = traced.lower(lowering_platforms=(platform.lower(),)).as_text()
    assert "stablehlo.transpose" in text
    assert "custom_call" not in text


# --- bad input


@pytest.mark.parametrize(
    "axes", [(0, 0, 1), (0, 1), (0, 1, 2, 3), (0, 1, 3), (0, 1, -4), ()], ids=str
)
def test_permute_rejects_what_does_not_reorder(axes):
    x = jnp.ones((2, 3, 4))
    message = (
        rf"^permute: axes must reorder the axes of x, got axes=\({str(axes)[1:-1]}\) "
        r"for x of shape \(2, 3, 4\)\.(\n|$)"
    )
    with pytest.raises(ValueError, match=message):
        jl.permute(x, axes)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: jl.permute(x, axes)).trace(x)


@pytest.mark.parametrize("axes", [(0, 1.5), ("a", 0), (0, None), 2.0, None], ids=str)
def test_permute_rejects_axes_that_are_not_integers(axes):
    with pytest.raises(TypeError, match=r"^permute: axes must be integers, got .*\.$"):
        jl.permute(jnp.ones((2, 3)), axes)


def test_axes_can_be_an_array():
    x = np.arange(6).reshape(2, 3)
    for axes in (np.array([1, 0]), jnp.array([1, 0]), jnp.array([-1, 0], "int8")):
        np.testing.assert_array_equal(jl.permute(x, axes), x.T)
        np.testing.assert_array_equal(jl.transpose(x, axes), x.T)


@pytest.mark.parametrize(
    "x", [np.array(["a"]), np.array([object()])], ids=["text", "objects"]
)
def test_arrays_of_no_numbers_are_refused(x):
    with pytest.raises(TypeError, match="^permute: x must hold numbers, got dtype"):
        jl.permute(x, (0,))


@pytest.mark.parametrize("x", [[[1, 2], [3, 4]], "ab", None, {"x": 1}], ids=str)
@pytest.mark.parametrize("name", ["permute", *CALLS])
def test_what_is_not_an_array_is_refused(name, x):
    args = {"permute": ((1, 0),), "swapaxes": (0, 1), "moveaxis": (0, 1)}.get(name, ())
    rule = rf"^{name}: x must be an array, got {type(x).__name__}\.$"
    with pytest.raises(TypeError, match=rule):
        getattr(jl, name)(x, *args)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: jl.transpose(x, (0, 0, 1)),
            r"^transpose: axes must reorder the axes",
        ),
        (
            lambda x: jl.swapaxes(x, 0, 3),
            r"^swapaxes: axes must lie in \[-3, 3\), got 3",
        ),
        (
            lambda x: jl.moveaxis(x, -4, 0),
            r"^moveaxis: axes must lie in \[-3, 3\), got -4",
        ),
        (
            lambda x: jl.moveaxis(x, (0, 0), (1, 2)),
            r"^moveaxis: axes must not repeat, got",
        ),
        (
            lambda x: jl.moveaxis(x, (0, 1), 2),
            r"^moveaxis: source and destination must",
        ),
        (
            lambda x: jl.matrix_transpose(x[0, 0]),
            r"^matrix_transpose: x must have at least",
        ),
    ],
)
def test_drop_ins_name_operator_rule_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((2, 3, 4)))
