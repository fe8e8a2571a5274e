# SPDX-License-Identifier: Apache-2.0
"""Memory formats: their laws, and how values keep them."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import hlo
import jax_layout as jl
from jax_layout.formats.memory_format import convert

NAMES = ("NCHW", "NHWC", "CHWN", "NCHW8c", "NCHW4c", "NHCW2n")
X = np.arange(2 * 16 * 3 * 4, dtype=np.float32).reshape(2, 16, 3, 4)
laws = settings(deadline=None, max_examples=15)


@st.composite
def formats(draw):
    """A format of three dimensions, and a shape that it fits."""
    blocks = [tuple(draw(st.lists(st.integers(1, 3), max_size=2))) for _ in range(3)]
    atoms = [(d, i) for d, b in enumerate(blocks) for i in range(len(b) + 1)]
    shape = [draw(st.integers(1, 3)) * math.prod(b) for b in blocks]
    return jl.MemoryFormat(tuple(blocks), tuple(draw(st.permutations(atoms)))), shape


def indices(shape):
    return jnp.arange(math.prod(shape)).reshape(shape)


@laws
@given(formats())
def test_pack_and_unpack_are_inverse(drawn):
    format, shape = drawn
    x = indices(shape)
    physical = format.pack(x)
    assert physical.shape == format.physical_shape(shape)
    assert format.logical_shape(physical.shape) == tuple(shape)
    np.testing.assert_array_equal(format.unpack(physical), x)


@laws
@given(formats(), st.permutations(range(3)))
def test_transposed_shares_the_memory(drawn, axes):
    format, shape = drawn
    x = indices(shape)
    moved = format.transposed(axes).pack(x.transpose(axes))
    np.testing.assert_array_equal(moved, format.pack(x))


@laws
@given(formats(), st.integers(0, 2), st.integers(1, 4), st.integers(1, 4))
def test_split_and_merge_share_the_memory(drawn, dim, outer, inner):
    format, shape = drawn
    if format.blocks[dim]:
        inner = math.prod(format.blocks[dim])
        outer = shape[dim] // inner
    else:
        shape[dim] = outer * inner
    x = indices(shape)
    split = format.split(dim, inner)
    parts = x.reshape(*shape[:dim], outer, inner, *shape[dim + 1 :])
    packed = split.pack(parts)
    np.testing.assert_array_equal(packed.ravel(), format.pack(x).ravel())
    merged = split.merge(dim, inner)
    np.testing.assert_array_equal(merged.pack(x).ravel(), packed.ravel())


@pytest.mark.parametrize("source, target", list(itertools.product(NAMES, NAMES)))
def test_convert(source, target):
    source, target = map(jl.MemoryFormat.named, (source, target))
    physical = convert(source.pack(X), source, target)
    np.testing.assert_array_equal(physical, target.pack(X))
    np.testing.assert_array_equal(target.unpack(physical), X)


def test_names():
    for name in (*NAMES, "NC", "NCW", "NWC", "NCDHW", "NDHWC"):
        assert str(jl.MemoryFormat.named(name)) == name
    assert jl.MemoryFormat.named("HWIO").permutation == (2, 3, 1, 0)
    assert jl.MemoryFormat.named("OHWI").permutation == (0, 2, 3, 1)
    assert jl.MemoryFormat.named("NCHW16c").axes(1) == (1, 4)


@pytest.mark.parametrize(
    "name", ["", "NHC", "NCHWC", "nchw", "N8cCHW", "NCHW0c", "NCHW8x"]
)
def test_bad_names(name):
    with pytest.raises(ValueError, match=r"with_memory_format: memory format: a name"):
        jl.with_memory_format(X, name)


@pytest.mark.parametrize(
    "format, error, message",
    [
        ("NWC", ValueError, r"format NWC is for arrays of 3 dimensions, got 4"),
        (
            "NCHW5c",
            ValueError,
            r"dimension 1 must be divisible by 5, got shape \(2, 16,",
        ),
        ("NCHW8c", ValueError, r"a concrete array cannot have the format NCHW8c"),
        (3, TypeError, r"a memory format is a MemoryFormat, .* got 3"),
    ],
)
def test_bad_formats(format, error, message):
    with pytest.raises(error, match=message):
        jl.with_memory_format(X, format)
    with pytest.raises(ValueError, match=r"channels_last is for arrays of 3 to 5"):
        jl.with_memory_format(X[0, 0], jl.channels_last)
    with pytest.raises(ValueError, match=r"order must hold every atom"):
        jl.MemoryFormat(((), ()), ((0, 0), (0, 0)))
    with pytest.raises(TypeError, match=r"with_memory_format: x must be an array"):
        jl.with_memory_format([1], "NCHW")


NHWC = jl.MemoryFormat.named("NHWC")


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: NHWC.pack(X[0, 0]),
            ValueError,
            r"NHWC is for arrays of 4 .*\(3, 4",
        ),
        (lambda: NHWC.unpack(X[0, 0]), ValueError, r"has 4 axes in memory, got .*3, 4"),
        (
            lambda: NHWC.split(9, 2),
            ValueError,
            r"split: NHWC has 4 dim.*, got .* 9",
        ),
        (lambda: NHWC.split(1, 0), ValueError, r"split: inner must be .* got 0"),
        (lambda: NHWC.axes(4), ValueError, r"axes: NHWC has 4 dimensions, got .* 4"),
        (lambda: NHWC.merge(3, 2), ValueError, r"merge: NHWC has 4 dimensions"),
        (
            lambda: jl.MemoryFormat.named("NCHW4c").merge(0, 2),
            ValueError,
            r"merge: dimension 1 of NCHW4c must be divisible by 4, got size 2",
        ),
        (
            lambda: NHWC.transposed((0, 1)),
            ValueError,
            r"transposed: axes must reorder the dimensions of NHWC, got \(0, 1\)",
        ),
        (lambda: jl.MemoryFormat.named(3), TypeError, r"name must be a str, got 3"),
        (
            lambda: jl.FormattedArray(jnp.ones(3), "a"),
            TypeError,
            r"FormattedArray: format must be a MemoryFormat, got 'a'",
        ),
        (
            lambda: jl.FormattedArray.pack(X, "NWC"),
            ValueError,
            r"FormattedArray.pack: memory format NWC is for arrays of 3 dim.*, got 4",
        ),
    ],
)
def test_bad_arguments_of_methods(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_formatted_arrays_take_names():
    packed = jl.FormattedArray.pack(X, "NHWC")
    assert packed.format == NHWC and packed.physical.shape == (2, 3, 4, 16)
    np.testing.assert_array_equal(packed.logical(), X)
    last = jl.FormattedArray.pack(X, jl.channels_last)
    assert last.format == NHWC
    assert NHWC.split(-3, 4) == NHWC.split(1, 4)


def test_eager_arrays_are_moved():
    x = jl.with_memory_format(X, jl.channels_last)
    assert x.shape == X.shape and str(jl.memory_format(x)) == "NHWC"
    np.testing.assert_array_equal(x, X)
    assert str(jl.memory_format(jl.with_memory_format(x, "CHWN"))) == "CHWN"
    assert jl.is_contiguous(jl.with_memory_format(x, jl.channels_first))


def test_ambiguous_formats():
    for shape in ((2, 1, 3, 4), (2, 16, 1, 1)):
        x = jnp.ones(shape)
        assert jl.is_contiguous(x, jl.channels_last)
        assert jl.is_contiguous(jl.with_memory_format(x, "NHWC"), jl.channels_first)
    assert not jl.is_contiguous(jnp.ones((2, 16, 1, 4)), jl.channels_last)


def test_like():
    x = jl.with_memory_format(X, "NHWC")
    for f in (jl.zeros_like, jl.ones_like, jl.empty_like):
        assert str(jl.memory_format(f(x))) == "NHWC"
        assert str(jl.memory_format(f(x, memory_format="CHWN"))) == "CHWN"
    y = jl.full_like(x, 2, dtype=np.int32)
    assert y.dtype == np.int32 and (y == 2).all() and y.shape == X.shape


@pytest.mark.parametrize("format", ["NHWC", "NCHW8c"])
def test_tags_in_transforms(format):
    def f(x):
        y = jl.relu(jl.with_memory_format(x, format))
        assert str(jl.memory_format(y)) == format
        return (y * y).sum()

    expected = np.square(X).sum()
    np.testing.assert_allclose(jax.jit(f)(X), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(f)(X), 2 * X)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), 2 * X)
    np.testing.assert_allclose(jax.vmap(f)(np.stack([X, X])), [expected] * 2, rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(f, (X,), (X,))[1], 2 * expected, rtol=1e-5)
    hessian = jax.jvp(jax.grad(f), (X,), (X,))[1]
    np.testing.assert_allclose(hessian, 2 * X)


def test_linear_transpose_and_scan():
    tag = lambda x: jl.with_memory_format(x, "NHWC")  # noqa: E731
    (ct,) = jax.linear_transpose(tag, X)(jnp.asarray(X))
    np.testing.assert_array_equal(ct, X)

    def step(carry, _):
        return jl.add(tag(carry), 1.0), jl.memory_format(tag(carry)).ndim

    out, ndims = jax.jit(lambda x: lax.scan(step, x, length=3))(X)
    np.testing.assert_array_equal(out, X + 3)
    assert ndims.tolist() == [4, 4, 4]


def test_shard_map():
    mesh = jax.make_mesh((2,), ("b",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    spec = PartitionSpec("b")

    def f(x):
        return jl.max_pool(jl.with_memory_format(x, "NHWC"), 2)

    g = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(g)(X), jl.max_pool(X, 2))
    grad = jax.grad(lambda x: jax.jit(g)(x).sum())(jnp.asarray(X))
    np.testing.assert_array_equal(
        grad, jax.grad(lambda x: jl.max_pool(x, 2).sum())(jnp.asarray(X))
    )


def test_two_devices():
    mesh = jax.make_mesh((2,), ("b",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("b"))
    x = jax.device_put(jnp.asarray(X), sharding)
    y = jax.jit(lambda x: jl.relu(jl.with_memory_format(x, "NHWC")))(x)
    np.testing.assert_array_equal(y, X)


def test_a_tag_alone_costs_nothing():
    big = jnp.ones((8, 64, 64, 64), np.float32)
    text = hlo.compiled(lambda x: jl.with_memory_format(x, "NHWC") + 1, big)
    assert hlo.kernels(text) == 0 and hlo.count("transpose", text) == 0


def test_eager_operators_keep_formats():
    x = jl.with_memory_format(X, jl.channels_last)
    y = jl.avg_pool(jl.relu(x), 2)
    assert jl.is_contiguous(y, jl.channels_last)
    np.testing.assert_allclose(y, jl.avg_pool(jnp.asarray(X), 2))
