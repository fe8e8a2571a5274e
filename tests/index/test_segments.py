# SPDX-License-Identifier: Apache-2.0
"""segment_sum, segment_max, segment_min against jax.ops, under every transformation."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_layout as jl
from hlo import collectives, compiled, kernels

NAMES = ("segment_sum", "segment_max", "segment_min")
FLOATS = "float32 float64 bfloat16 float16".split()
INTEGERS = "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()
# Shape, number of segments: few, whose rows are summed in parts; as many as rows;
# far more; rows of one element, of odd lengths, longer than a block of sums.
CASES = [
    ((4000, 64), 3),
    ((4000, 33), 5),
    ((3000, 40), 3000),
    ((300, 129), 40_000),
    ((30_000,), 7),
    ((1000,), 1000),
    ((2000, 3), 11),
    ((40, 2500), 6),
    ((60, 2, 5), 9),
    ((1, 4), 1),
]


def array(shape, dtype="float64", seed=0):
    x = 5 * np.random.default_rng(seed).standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * x[..., ::-1]
    return jnp.asarray(np.abs(x) if dtype.startswith("u") else x).astype(dtype)


def segments(extent, count, seed=1):
    """Some of them out of range, on either side."""
    ids = np.random.default_rng(seed).integers(0, extent, count)
    ids[::17], ids[::19] = -1 - ids[::17], extent + ids[::19]
    return ids


def both(name, *operands, **options):
    return (getattr(module, name)(*operands, **options) for module in (jl, jax.ops))


@pytest.mark.parametrize("in_order", [False, True], ids=["random", "sorted"])
@pytest.mark.parametrize("mode", [None, "clip"])
@pytest.mark.parametrize("shape, extent", CASES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_as_jax(name, shape, extent, mode, in_order):
    x, ids = array(shape), segments(extent, shape[0])
    if in_order:
        ids.sort()
    ours, theirs = both(name, x, ids, extent, in_order, mode=mode)
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "complex64", "complex128"])
@pytest.mark.parametrize("shape, extent", CASES[:4], ids=str)
def test_sums_of_every_dtype(shape, extent, dtype):
    """16-bit floating point in float32, rounded once."""
    x, ids = array(shape, dtype), segments(extent, shape[0])
    ours = jl.segment_sum(x, ids, extent)
    assert ours.dtype == x.dtype
    wide = {2: np.float32, 4: np.float64}.get(x.dtype.itemsize, x.dtype)
    wide = wide if jnp.issubdtype(dtype, jnp.floating) else x.dtype
    expected = np.zeros((extent, *shape[1:]), wide)
    named = (ids >= 0) & (ids < extent)
    np.add.at(expected, ids[named], np.asarray(x).astype(wide)[named])
    if jnp.issubdtype(dtype, jnp.integer):
        np.testing.assert_array_equal(ours, expected)
    else:
        tolerance = 4 * float(jnp.finfo(dtype).eps)
        if wide == x.dtype or np.dtype(wide).itemsize == 8:
            tolerance *= shape[0]
        wider = np.complex128 if np.iscomplexobj(expected) else np.float64
        np.testing.assert_allclose(
            np.asarray(ours).astype(wider),
            expected.astype(wider),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_of_many_ones_in_16_bits(dtype):
    """Which would end at 256, or at 2048."""
    ones = jnp.ones((20_000, 8), dtype)
    sums = jl.segment_sum(ones, jnp.arange(20_000) % 2, 2)
    assert (sums == jnp.asarray(10_000, dtype)).all()


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_extremes_of_every_dtype(dtype, name):
    for shape, extent in CASES[:7]:
        x = array(shape, "float64") > 3 if dtype == "bool" else array(shape, dtype)
        ours, theirs = both(name, x, segments(extent, shape[0]), extent)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("name", NAMES[1:])
def test_extremes_of_nan_and_infinity(name):
    x = np.asarray(array((6000, 17), "float32")).copy()
    x[3], x[70], x[80] = np.nan, np.inf, -np.inf
    for extent, width in itertools.product((4, 4000), (17, 1, 2, 3, 4)):
        ours, theirs = both(name, x[:, :width], np.arange(6000) % extent, extent)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_dtypes_of_segment_ids(dtype, name):
    ids = np.array([0, 90, 7, 100, 7]).astype(dtype)
    ours, theirs = both(name, array((5, 3)), ids, 95)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_what_jax_takes_too(name):
    """Repeated rows, one row for all, buckets, no rows, as many segments as needed."""
    x, ids = array((6, 4, 3)), np.array([[0, 2, 1, 5], [3, 3, 0, -2]])
    for operands, options in [
        ((x[:4], ids, 6), {}),
        ((x, np.arange(6)), {}),
        ((x, np.arange(6), 4), {"bucket_size": 2}),
        ((x, np.arange(6), 0), {}),
        ((x[0, 0, 0], np.asarray(2), 4), {}),
        ((x[:0], np.zeros(0, int), 3), {}),
        ((x[:1], np.arange(6), 4), {}),
        ((x.astype("complex64"), np.arange(6) // 2, 3), {}),
        ((x, np.arange(6) // 2, 3), {"mode": jax.lax.GatherScatterMode.CLIP}),
        ((x, np.arange(6), 8), {"unique_indices": True, "indices_are_sorted": True}),
    ]:
        ours, theirs = both(name, *operands, **options)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_symbolic_number_of_segments(name):
    (n,) = jax.export.symbolic_shape("n")
    f = lambda x, i, like: getattr(jl, name)(x, i, like.shape[0])  # noqa: E731
    shapes = ((6, 3), "float32"), ((6,), "int32"), ((n,), "float32")
    avals = (jax.ShapeDtypeStruct(*each) for each in shapes)
    exported = jax.export.export(jax.jit(f))(*avals)
    x, ids = array((6, 3), "float32"), np.arange(6, dtype=np.int32) // 2
    theirs = getattr(jax.ops, name)(x, ids, 5)
    np.testing.assert_allclose(
        exported.call(x, ids, jnp.zeros(5, "float32")), theirs, rtol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_kernels_run(name):
    f = lambda x, i: getattr(jl, name)(x, i, 10)  # noqa: E731
    x, ids = array((640, 64), "float32"), jnp.arange(640) % 10
    assert kernels(compiled(f, x, ids)) == 1
    grads = kernels(compiled(jax.grad(lambda x, i: f(x, i).sum()), x, ids))
    assert grads == (1 if name == "segment_sum" else 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("are_sorted, unique", [(True, False), (False, True)])
def test_xla_is_told_what_is_promised(are_sorted, unique, name):
    """A GPU needs 0.9 ms of sorted rows, 57 of the same rows if it does not know."""
    x, ids = array((640, 64), "float32"), jnp.arange(640)
    f = functools.partial(
        getattr(jl, name),
        num_segments=700,
        indices_are_sorted=are_sorted,
        unique_indices=unique,
    )
    lowered = jax.jit(f).trace(x, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count(f"indices_are_sorted = {are_sorted}".lower()) == 1
    assert lowered.count(f"unique_indices = {unique}".lower()) == 1
    many = jax.vmap(f)(jnp.stack([x, 2 * x]), jnp.stack([ids, ids + 1]))
    for y, row, index in zip(many, (x, 2 * x), (ids, ids + 1), strict=True):
        np.testing.assert_array_equal(y, getattr(jax.ops, name)(row, index, 700))


def test_on_a_gpu_sums_are_xlas():
    avals = [jax.typeof(x) for x in (jnp.arange(8), array((8, 4)))]
    options = {"axis": 0, "extent": 3, "clip": False, "deterministic": True}
    kernel = jl.operators()["index_add"].kernel
    assert kernel("cuda", *avals, **options) is not None
    assert kernel("cuda", *avals, **options, wrap=False) is None


# --- derivatives


@pytest.mark.parametrize("mode", [None, "clip"])
@pytest.mark.parametrize("shape, extent", [((40, 3), 7), ((9, 2), 30)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, shape, extent, mode):
    x, ids = array(shape), segments(extent, shape[0])

    def loss(module, x):
        y = getattr(module, name)(x, ids, extent, mode=mode)
        return jnp.sin(jnp.where(jnp.isfinite(y), y, 0)).sum()

    ours, theirs = (functools.partial(loss, module) for module in (jl, jax.ops))
    check_grads(ours, (x,), order=2, modes=("fwd", "rev"))
    for derivative in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]):
        found, expected = (np.asarray(derivative(f)(x)) for f in (ours, theirs))
        # jax 0.10 divides by 0 where rows are clipped to a segment.
        finite = np.isfinite(expected)
        assert finite.all() or jax.__version_info__ < (0, 12)
        np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-12)


@pytest.mark.parametrize("name", NAMES[1:])
def test_ties_share_a_gradient(name):
    x = jnp.array([2.0, 2, 1, -1, -1, -jnp.inf, jnp.inf, 0, 2])
    ids = np.array([0, 0, 0, 1, 1, 2, 3, -1, 9])
    grads = [
        jax.grad(lambda x, f=f: jnp.where(jnp.arange(4) < 2, f(x, ids, 4), 0).sum())(x)
        for f in (getattr(jl, name), getattr(jax.ops, name))
    ]
    np.testing.assert_array_equal(*grads)
    tangents = [
        jax.jvp(lambda x, f=f: f(x, ids, 4), (x,), (jnp.ones_like(x),))[1]
        for f in (getattr(jl, name), getattr(jax.ops, name))
    ]
    np.testing.assert_array_equal(*tangents)


# --- vmap


@pytest.mark.parametrize("dims", [(0, None), (1, None), (2, None), (None, 0), (0, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_vmap(name, dims):
    x = array((4, 5) if dims[0] is None else np.insert((4, 5), dims[0], 3))
    ids = segments(6, (4, 3) if dims[1] == 1 else (3, 4))
    ids = ids[0] if dims[1] is None else ids
    ours, theirs = (
        jax.jit(jax.vmap(lambda x, i, f=f: jnp.arctan(f(x, i, 6)), dims))
        for f in (getattr(jl, name), getattr(jax.ops, name))
    )
    np.testing.assert_allclose(ours(x, ids), theirs(x, ids), rtol=1e-12)
    grads = [
        jax.jit(jax.grad(lambda x, f=f: jnp.nansum(f(x, ids))))(x)
        for f in (ours, theirs)
    ]
    np.testing.assert_allclose(*grads, rtol=1e-12)


# --- sharding


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize("spec", [P(None, "a"), P(None, ("a", "b")), P(None, None)])
@pytest.mark.parametrize("name", NAMES)
def test_sharded_columns(mesh, name, spec):
    x, ids = array((24, 16)), segments(6, 24)
    f = lambda x, i: getattr(jl, name)(x, i, 6)  # noqa: E731
    expected = np.asarray(f(x, ids))
    g = jax.grad(lambda x: jnp.sum(jnp.tanh(f(x, ids))))(x)
    x, ids = put(x, mesh, spec), put(ids, mesh, P(None))
    np.testing.assert_array_equal(jax.jit(f)(x, ids), expected)
    hlo = compiled(jax.jit(f), x, ids)
    assert collectives(hlo) == {} and kernels(hlo) == 1
    loss = jax.jit(jax.grad(lambda x, i: jnp.sum(jnp.tanh(f(x, i)))))
    np.testing.assert_allclose(loss(x, ids), g, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_sharded_rows(name):
    """Sums are added by one all-reduce; for extremes, rows are gathered."""
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("a",), types, devices=jax.devices("cpu"))
    x, ids = array((64, 16)), segments(6, 64)
    f = jax.jit(
        lambda x, i: getattr(jl, name)(x, i, 6),
        out_shardings=NamedSharding(mesh, P()),
    )
    theirs = getattr(jax.ops, name)(x, ids, 6)
    x, ids = put(x, mesh, P("a")), put(ids, mesh, P("a"))
    np.testing.assert_allclose(f(x, ids), theirs, rtol=1e-12)
    if name == "segment_sum":
        assert collectives(compiled(f, x, ids)) == {"all-reduce": 1}


@pytest.mark.parametrize("name", NAMES)
def test_shard_map(mesh, name):
    x, ids = array((24, 16)), segments(6, 24)
    expected = getattr(jax.ops, name)(x, ids, 6)
    f = jax.shard_map(
        lambda x, i: getattr(jl, name)(x, i, 6),
        mesh=mesh,
        in_specs=(P(None, "a"), P()),
        out_specs=P(None, "a"),
    )
    x, ids = put(x, mesh, P(None, "a")), put(ids, mesh, P())
    np.testing.assert_allclose(jax.jit(f)(x, ids), expected, rtol=1e-12)


# --- bad input


@pytest.mark.parametrize("name", NAMES)
def test_bad_input(name):
    f, x = getattr(jl, name), array((4, 3))
    ids = np.arange(4)
    with pytest.raises(TypeError, match=f"^{name}: data must be an array, got list"):
        f([1, 2], ids)
    with pytest.raises(TypeError, match="segment_ids must hold integers, got float64"):
        f(x, ids / 2)
    with pytest.raises(ValueError, match="num_segments must be at least 0, got -1"):
        f(x, ids, -1)
    with pytest.raises(ValueError, match="mode must be .* got 'wrap'"):
        f(x, ids, 4, mode="wrap")
    with pytest.raises(TypeError):
        f(x, ids, 2.5)
    for traced in ((x, ids), (x, ids, 4)):
        with pytest.raises(jax.errors.ConcretizationTypeError, match="num_segments"):
            jax.jit(f)(*traced)
