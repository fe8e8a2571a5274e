# SPDX-License-Identifier: Apache-2.0
"""index_select and index_add against NumPy and torch, under every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_layout as jl
from hlo import collectives, compiled, kernels
from jax_layout.index import index_add_p

FLOATS = "float32 float64 bfloat16 float16 complex64 complex128".split()
INTEGERS = "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()
# shape, axis, number of indices: rows of one element, of odd lengths, of a line and
# more, of more than a task; many slices and one; an index longer than a block.
CASES = [
    ((7, 5, 3), 1, 9),
    ((40,), 0, 100),
    ((5000, 3), 0, 20_000),
    ((50, 33), 0, 80),
    ((6, 2000), 0, 50),
    ((64, 8), 1, 5),
    ((3, 5, 2048), 1, 11),
    ((3, 4, 1, 70_000), 1, 4),
    ((900, 256), 0, 37),
    ((1, 1), 1, 1),
]
LARGE = ((10_000, 512), 0, 3000)  # by non-temporal stores


def array(shape, dtype="float64", seed=0):
    x = 5 * np.random.default_rng(seed).standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * x[..., ::-1]
    if dtype == "bool":
        x = x > 0
    return jnp.asarray(np.abs(x) if dtype.startswith("u") else x).astype(dtype)


def indices(extent, count, outside=0, seed=1):
    """Negative ones and duplicates too; `outside` of the range on either side."""
    low, high = -extent - outside, extent + outside
    return np.random.default_rng(seed).integers(low, high, count)


def exact(x):
    x = np.asarray(x)
    return x.astype(np.complex128) if x.dtype.kind in "fcV" else x


def equal(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(exact(a), exact(b))


def resolved(index, extent, mode):
    rows = np.where(index < 0, index + extent, index)
    inside = (rows >= 0) & (rows < extent)
    rows = np.clip(rows, 0, extent - 1)
    return rows, inside if mode == "fill" else np.ones_like(inside)


def filler(dtype):
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == "bool":
        return jnp.asarray(True)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min or limits.max, dtype)


def added(x, axis, index, source, mode="fill"):
    """In order; 16-bit floating point in float32, rounded once."""
    x, source = np.asarray(x), np.asarray(source)
    floating = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    wide = np.float32 if floating else x.dtype
    y = np.moveaxis(x.astype(wide), axis, 0).copy()
    rows, inside = resolved(index, x.shape[axis], mode)
    np.add.at(y, rows[inside], np.moveaxis(source.astype(wide), axis, 0)[inside])
    return np.moveaxis(y, 0, axis).astype(x.dtype)


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("shape, axis, count", CASES, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "uint32", "int64", "bool"])
def test_index_select(dtype, shape, axis, count, mode):
    x, index = array(shape, dtype), indices(shape[axis], count, outside=2)
    y = jl.index_select(x, axis, index, mode=mode)
    rows, inside = resolved(index, shape[axis], mode)
    expected = np.moveaxis(np.take(np.asarray(x), rows, axis), axis, 0).copy()
    expected[~inside] = np.asarray(filler(dtype))
    equal(y, jnp.moveaxis(jnp.asarray(expected), 0, axis))


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("shape, axis, count", CASES, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_index_add(dtype, shape, axis, count, mode):
    """Bit for bit, whatever the number of threads."""
    x, index = array(shape, dtype), indices(shape[axis], count, outside=2)
    source = array((*shape[:axis], count, *shape[axis + 1 :]), dtype, seed=2)
    equal(
        jl.index_add(x, axis, index, source, mode=mode, deterministic=True),
        jnp.asarray(added(x, axis, index, source, mode)),
    )
    zero = jax.jit(
        functools.partial(
            index_add_p,
            axis=axis,
            extent=shape[axis],
            clip=mode == "clip",
            deterministic=True,
        )
    )
    expected = added(jnp.zeros_like(x), axis, index, source, mode)
    equal(zero(jnp.asarray(index), source), jnp.asarray(expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large(dtype):
    test_index_select(dtype, *LARGE, "fill")
    test_index_add(dtype, *LARGE, "fill")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", [256, 2048])
def test_the_gradient_of_a_large_array(row, dtype):
    """Some of its pages, which nobody has touched, are zero without being written."""
    shape, count = (40_000_000 // row, row), 300
    index, ct = indices(shape[0] // 3, count), array((count, row), dtype)
    found = jax.jit(
        lambda ct, index: jax.linear_transpose(
            lambda x: jl.index_select(x, 0, index, deterministic=True),
            jax.ShapeDtypeStruct(shape, dtype),
        )(ct)[0]
    )(ct, index)
    expected = np.zeros(shape, np.float32)
    np.add.at(expected, np.asarray(index), np.asarray(ct, np.float32))
    equal(found, jnp.asarray(expected).astype(dtype))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_as_torch(shape, axis):
    torch = pytest.importorskip("torch")
    x = np.asarray(array((5, 6, 7)))
    index = np.random.default_rng(0).integers(0, 5, shape)
    y = jl.index_select(x, axis, index)
    theirs = torch.index_select(torch.tensor(x), axis, torch.tensor(index))
    np.testing.assert_array_equal(y, theirs.numpy())
    source = np.asarray(array(y.shape, seed=3))
    theirs = torch.index_add(
        torch.tensor(x), axis, torch.tensor(index), torch.tensor(source), alpha=-3
    )
    ours = jl.index_add(x, axis, index, source, alpha=-3)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-14)


def test_without_axes_as_torch():
    five, one = jnp.asarray(5.0), jnp.asarray(1.0)
    for axis, index in ((0, [0]), (-1, 0)):
        index = jnp.asarray(index)
        equal(jl.index_select(five, axis, index), five)
        equal(jl.index_add(five, axis, index, one), jnp.asarray(6.0))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_index_dtypes(dtype):
    x = array((200, 3))
    index = np.array([0, 199, 7, 100 if "8" in dtype else 150, 7]).astype(dtype)
    if dtype == "int8":
        index[1] = -1
    expected = np.take(np.asarray(x), index.astype(int), 0)
    np.testing.assert_array_equal(jl.index_select(x, 0, index), expected)
    source = array((5, 3), seed=1)
    equal(
        jl.index_add(x, 0, index, source, deterministic=True),
        jnp.asarray(added(x, 0, index.astype(int), source)),
    )


def test_a_large_unsigned_index_is_out_of_range():
    x = array((4, 3))
    for index in (np.array([2**32 - 1], np.uint32), np.array([2**64 - 1], np.uint64)):
        assert jnp.isnan(jl.index_select(x, 0, index)).all()
        equal(jl.index_add(x, 0, index, x[:1]), x)


@pytest.mark.parametrize("alpha", [2, -0.5, 0, jnp.asarray(3.0)], ids=str)
def test_alpha(alpha):
    x, source, index = array((6, 4)), array((3, 4), seed=1), np.array([5, 0, 5])
    expected = added(x, 0, index, float(alpha) * source)
    np.testing.assert_allclose(jl.index_add(x, 0, index, source, alpha=alpha), expected)
    f = jax.jit(lambda alpha: jl.index_add(x, 0, index, source, alpha=alpha).sum())
    np.testing.assert_allclose(jax.grad(f)(1.0), source.sum(), rtol=1e-12)


@pytest.mark.parametrize("count", [7, 200, 9000])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 16, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_short_rows(dtype, width, count):
    """In 16 bits by sums of all rows, or of those that an index names; in place too.

    Of integers, as these sums are not in order.
    """
    x, index = array((300, width), dtype), indices(300, count, outside=2)
    x, source = (y.round() for y in (x, array((count, width), dtype, seed=2)))
    expected = jnp.asarray(added(x, 0, index, source))
    add = functools.partial(jl.index_add, deterministic=True)
    equal(add(x, 0, index, source), expected)
    in_place = jax.jit(lambda x, i, s: add(x, 0, i, s), donate_argnums=0)
    equal(in_place(jnp.copy(x), jnp.asarray(index), source), expected)


def test_kernels_run():
    x, index = array((64, 256), "float32"), jnp.asarray(indices(64, 48))
    assert kernels(compiled(lambda x, i: jl.index_select(x, 0, i), x, index)) == 1
    f = lambda x, i, s: jl.index_add(x, 0, i, s)  # noqa: E731
    assert kernels(compiled(f, x, index, x[:48])) == 1
    grad = jax.grad(lambda x, i: jnp.sum(jl.index_select(x, 0, i) ** 2))
    assert kernels(compiled(grad, x, index)) == 2


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_a_donated_array_is_added_to_in_place(dtype):
    """Of 16 bits, rows that are named twice are rounded once."""
    x, source = array((512, 1300), dtype), array((12, 1300), dtype, seed=2)
    index = jnp.asarray(indices(4, 12, outside=600)).at[3:].set(jnp.arange(9) % 4 - 2)
    add = functools.partial(jl.index_add, deterministic=True)
    f = jax.jit(lambda x, i, s: add(x, 0, i, s), donate_argnums=0)
    expected = added(x, 0, np.asarray(index), source)
    address = x.unsafe_buffer_pointer()
    y = f(x, index, source)
    assert y.unsafe_buffer_pointer() == address
    equal(y, jnp.asarray(expected, dtype))


def test_what_a_loop_carries_is_added_to_in_place():
    """Also where there is so much to add that a copy would else be made on the way."""
    x, index = array((64, 256)), jnp.asarray(indices(64, 64))

    def f(x, index, source):
        add = lambda _, x: jl.index_add(x, 0, index, source)  # noqa: E731
        return jax.lax.fori_loop(0, 3, add, x)

    text = compiled(f, x, index, x)
    assert kernels(text) == 1
    assert text.count("f64[64,256]{1,0} copy(") <= 1  # of the argument
    once = jnp.asarray(added(x, 0, np.asarray(index), x))
    np.testing.assert_allclose(jax.jit(f)(x, index, x) - x, 3 * (once - x), rtol=1e-9)


# --- derivatives


@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_add_as_their_function_is_told(deterministic):
    x, index = array((8, 4)), jnp.asarray(indices(8, 6))
    f = functools.partial(
        jl.index_select, axis=0, index=index, deterministic=deterministic
    )
    for order in (f, lambda x: jax.vjp(f, x)[1](f(x))[0]):
        traced = str(jax.make_jaxpr(lambda x, f=order: jax.vjp(f, x)[1](f(x)))(x))
        assert f"deterministic={deterministic}" in traced
        assert f"deterministic={not deterministic}" not in traced


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("shape, axis, count", CASES[:2] + CASES[5:7], ids=str)
def test_gradients(shape, axis, count, mode):
    x = array(shape)
    index = indices(shape[axis], count, outside=2 if mode == "clip" else 0)
    source = array((*shape[:axis], count, *shape[axis + 1 :]), seed=2)
    select = functools.partial(jl.index_select, axis=axis, index=index, mode=mode)
    check_grads(lambda x: jnp.sin(select(x)), (x,), order=2, modes=("fwd", "rev"))

    def add(x, source):
        return jnp.sin(jl.index_add(x, axis, index, source, alpha=0.5, mode=mode))

    check_grads(add, (x, source), order=2, modes=("fwd", "rev"))


def test_each_is_the_others_transpose():
    x, index, ct = array((9, 4)), jnp.asarray(indices(9, 20, 3)), array((20, 4), seed=4)
    options = {"mode": "clip", "deterministic": True}
    (selected,) = jax.linear_transpose(
        lambda x: jl.index_select(x, 0, index, **options), x
    )(ct)
    expected = jl.index_add(jnp.zeros_like(x), 0, index, ct, **options)
    equal(selected, expected)
    _, vjp = jax.vjp(lambda s: jl.index_add(x, 0, index, s), ct)
    (dropped,) = vjp(x)
    filled = jl.index_select(x, 0, index)
    equal(dropped, jnp.where(jnp.isnan(filled), 0, filled))


def test_the_gradient_of_filled_rows_is_zero():
    x = array((4, 3))
    index = jnp.array([9, 1, -9, 1])
    g = jax.grad(lambda x: jnp.nansum(jl.index_select(x, 0, index)))(x)
    np.testing.assert_array_equal(g, np.array([0, 2, 0, 0])[:, None] * np.ones((4, 3)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_against_jax(dtype):
    x, index = array((30, 16), dtype), jnp.asarray(indices(30, 100))
    ct = array((100, 16), dtype, seed=1)
    ours = jax.vjp(lambda x: jl.index_select(x, 0, index), x)[1](ct)[0]
    theirs = jax.vjp(lambda x: jnp.take(x, index, 0), x)[1](ct)[0]
    tolerance = 2e-2 if jnp.finfo(dtype).bits == 16 else 1e-5
    np.testing.assert_allclose(exact(ours), exact(theirs), tolerance, 10 * tolerance)


# --- vmap


def loop(f, dims, *operands):
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    return jnp.stack(
        [
            f(
                *(
                    x if d is None else jnp.take(x, k, d)
                    for x, d in zip(operands, dims, strict=True)
                )
            )
            for k in range(size)
        ]
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "dims", [(0, None), (1, None), (2, None), (None, 0), (None, 1), (0, 0), (2, 1)]
)
def test_vmap_of_index_select(dims, axis):
    x = array((4, 5, 6) if dims[0] is None else np.insert((4, 5), dims[0], 3))
    x = x if dims[0] is not None else x[..., 0]
    index = jnp.asarray(indices(4, (7, 3) if dims[1] == 1 else (3, 7), outside=3))
    index = index[0] if dims[1] is None else index
    f = lambda x, i: jl.index_select(x, axis, i)  # noqa: E731
    equal(jax.vmap(f, dims)(x, index), loop(f, dims, x, index))
    g = jax.grad(lambda x, i: jnp.nansum(jnp.sin(f(x, i))))
    np.testing.assert_allclose(
        jax.jit(jax.vmap(g, dims))(x, index), loop(g, dims, x, index), rtol=1e-12
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "dims",
    [(0, None, None), (None, None, 1), (None, 0, None), (1, 1, 2), (0, None, 1)],
)
def test_vmap_of_index_add(dims, axis):
    index = jnp.asarray(indices(4, (7, 3) if dims[1] == 1 else (3, 7), outside=2))
    index = index[0] if dims[1] is None else index
    source_shape = [4, 5]
    source_shape[axis] = 7
    shapes = [
        np.insert(shape, d, 3) if d is not None else shape
        for shape, d in (((4, 5), dims[0]), (source_shape, dims[2]))
    ]
    x, source = array(shapes[0]), array(shapes[1], seed=1)
    f = lambda x, i, s: jl.index_add(x, axis, i, s, deterministic=True)  # noqa: E731
    equal(jax.vmap(f, dims)(x, index, source), loop(f, dims, x, index, source))


def test_vmap_twice():
    x, index = array((3, 2, 8, 5)), jnp.asarray(indices(8, (3, 2, 4)))
    f = lambda x, i: jl.index_select(x, 0, i)  # noqa: E731
    y = jax.vmap(jax.vmap(f))(x, index)
    equal(y, jnp.take_along_axis(x, index[..., None] % 8, 2))
    crossed = jax.vmap(jax.vmap(f, (None, 0)), (0, None))(x[:, 0], index[0])
    rows = np.asarray(index[0]) % 8
    equal(crossed, jnp.asarray(np.asarray(x[:, 0])[:, rows]))
    mapped_outside = jax.vmap(jax.vmap(f, (1, 0)), (0, None))(
        jnp.moveaxis(x, 1, 2), index[0]
    )
    equal(mapped_outside, jax.vmap(lambda x: jax.vmap(f)(x, index[0]))(x))


# --- out of range


def test_error_mode_eagerly():
    x = array((4, 3))
    with pytest.raises(Exception, match=r"index_select: indices must lie in \[-4, 4\)"):
        jl.index_select(x, 0, jnp.array([1, 4]), mode="error")
    with pytest.raises(Exception, match="index_add: .* got -5"):
        jl.index_add(x, 0, jnp.array([-5]), x[:1], mode="error")
    equal(jl.index_select(x, 0, jnp.array([-4]), mode="error"), x[:1])


def test_error_mode_under_checkify():
    x = array((4, 3))
    f = jax.jit(
        checkify.checkify(lambda x, i: jl.index_select(x, 0, i, mode="error").sum())
    )
    error, _ = f(x, jnp.array([0, -4, 3]))
    error.throw()
    error, _ = f(x, jnp.array([0, 17]))
    with pytest.raises(checkify.JaxRuntimeError, match="got 17"):
        error.throw()


# --- edges


@pytest.mark.parametrize(
    "shape, axis, count",
    [((0, 4), 1, 3), ((4, 0), 0, 3), ((4, 3), 0, 0), ((0, 3), 0, 0), ((2, 0, 3), 1, 0)],
    ids=str,
)
def test_zero_size(shape, axis, count):
    x, index = array(shape), jnp.zeros(count, np.int32)
    y = jl.index_select(x, axis, index)
    assert y.shape == (*shape[:axis], count, *shape[axis + 1 :])
    equal(jl.index_add(x, axis, index, y), x)
    g = jax.grad(lambda x: jl.index_select(x, axis, index).sum())(x)
    equal(g, jnp.zeros_like(x))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((0, [1.0]), TypeError, "index must hold integers, got float64"),
        ((0, [True]), TypeError, "index must hold integers, got bool"),
        ((2, [1]), ValueError, r"axis must lie in \[-2, 2\), got 2"),
        ((-3, [1]), ValueError, r"axis must lie in \[-2, 2\), got -3"),
        ((0.5, [1]), TypeError, "axis must be an integer, got 0.5"),
        ((0, [[1]]), ValueError, r"index must be 1-D or 0-D, got shape \(1, 1\)"),
        ((0, "one"), TypeError, "index must be an array, got str"),
    ],
    ids=str,
)
def test_bad_input_of_both(arguments, error, message):
    axis, index = arguments
    index = np.array(index) if isinstance(index, list) else index
    x = array((4, 3))
    with pytest.raises(error, match=f"^index_select: {message}"):
        jl.index_select(x, axis, index)
    with pytest.raises(error, match=f"^index_add: {message}"):
        jl.index_add(x, axis, index, x[:1])


def test_bad_input():
    x, index = array((4, 3)), jnp.array([1, 2])
    with pytest.raises(ValueError, match="mode must be .* got 'wrap'"):
        jl.index_select(x, 0, index, mode="wrap")
    with pytest.raises(ValueError, match="an empty axis has no rows"):
        jl.index_select(x[:0], 0, index)
    with pytest.raises(ValueError, match="without axes is one row, got 2 indices"):
        jl.index_select(jnp.asarray(1.0), 0, index)
    with pytest.raises(TypeError, match="dtype of x, float64, got float32"):
        jl.index_add(x, 0, index, x[:2].astype("float32"))
    with pytest.raises(
        ValueError, match=r"source must have shape \(2, 3\), .*\(3, 3\)"
    ):
        jl.index_add(x, 0, index, x[:3])
    with pytest.raises(TypeError, match="x must hold numbers, got bool"):
        jl.index_add(x > 0, 0, index, x[:2] > 0)
    with pytest.raises(TypeError, match="alpha must be an integer, got 0.5"):
        jl.index_add(x.astype(int), 0, index, x[:2].astype(int), alpha=0.5)


# --- sharding: the indexed axis is whole on every device, the others stay


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def spec_of(y):
    spec = tuple(y.sharding.spec)
    return P(*spec, *(None,) * (y.ndim - len(spec)))


@pytest.mark.parametrize(
    "spec, index_spec",
    [
        (P("a", None, "b"), P(None)),
        (P(("a", "b"), None, None), P(None)),
        (P(None, None, "a"), P("b")),
        (P(None, None, None), P("a")),
        (P(None, None, None), P(None)),
    ],
    ids=str,
)
def test_sharded_over_other_axes(mesh, spec, index_spec):
    x, index = array((16, 12, 64)), indices(12, 8, outside=1)
    y = np.asarray(jl.index_select(x, 1, index, mode="clip"))
    g = 2 * np.asarray(
        jl.index_add(jnp.zeros_like(x), 1, index, jnp.asarray(y), mode="clip")
    )
    x, index = put(x, mesh, spec), put(index, mesh, index_spec)
    f = jax.jit(lambda x, i: jl.index_select(x, 1, i, mode="clip"))
    out = f(x, index)
    np.testing.assert_array_equal(out, y)
    assert spec_of(out) == P(spec[0], index_spec[0], spec[2])
    hlo = compiled(f, x, index)
    assert collectives(hlo) == {} and kernels(hlo) == 1
    loss = jax.jit(jax.grad(lambda x, i: jnp.sum(f(x, i) ** 2)))
    np.testing.assert_allclose(loss(x, index), g, rtol=1e-12)


def test_a_sharded_index_needs_one_all_reduce():
    """The gradient of an embedding over a batch that is spread."""
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("a",), types, devices=jax.devices("cpu"))
    x, source, index = array((12, 64)), array((16, 64), seed=1), indices(12, 16)
    expected = added(x, 0, index, source)
    x, source = put(x, mesh, P()), put(source, mesh, P("a"))
    index = put(index, mesh, P("a"))
    f = jax.jit(
        lambda x, i, s: jl.index_add(x, 0, i, s), out_shardings=NamedSharding(mesh, P())
    )
    np.testing.assert_allclose(f(x, index, source), expected, rtol=1e-12)
    hlo = compiled(f, x, index, source)
    assert collectives(hlo) == {"all-reduce": 1} and kernels(hlo) == 1


def test_a_sharded_indexed_axis_is_gathered(mesh):
    x, index = array((16, 64)), indices(16, 24)
    y = np.asarray(jl.index_select(x, 0, index))
    f = lambda x: jl.index_select(x, 0, index)  # noqa: E731
    sharded = put(x, mesh, P("a", "b"))
    np.testing.assert_array_equal(jax.jit(f)(sharded), y)
    g = jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(sharded)
    np.testing.assert_allclose(g, jax.grad(lambda x: jnp.sum(f(x) ** 2))(x), rtol=1e-12)


def test_shard_map(mesh):
    x, index = array((16, 12, 64)), indices(12, 8)
    y = np.asarray(jl.index_select(x, 1, index))
    f = jax.shard_map(
        lambda x, i: jl.index_select(x, 1, i),
        mesh=mesh,
        in_specs=(P("a", None, "b"), P()),
        out_specs=P("a", None, "b"),
    )
    x, index = put(x, mesh, P("a", None, "b")), put(index, mesh, P())
    np.testing.assert_array_equal(jax.jit(f)(x, index), y)
    g = jax.jit(jax.grad(lambda x: jnp.sum(f(x, index))))(x)
    counts = np.bincount(np.asarray(index) % 12, minlength=12)
    np.testing.assert_array_equal(g, np.broadcast_to(counts[None, :, None], x.shape))


# --- what a GPU's kernel is handed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_operands_of_the_gpu_kernel(given, deterministic, dtype):
    """Sorted, stably, with the places they had; zeros where there is no x."""
    index = jnp.asarray(indices(5, 40, outside=2))
    operands = [index, array((40, 3), dtype), *[array((5, 3), dtype)] * given]
    kernel = jl.operators()["index_add"].kernel(
        "cuda",
        *map(jax.typeof, operands),
        axis=0,
        extent=5,
        clip=False,
        deterministic=deterministic,
    )
    rows, source, *places, x = kernel.prepare(*operands)
    assert kernel.aliases == {2 + len(places): 0}
    equal(x, operands[2] if given else jnp.zeros((5, 3), dtype))
    assert source is operands[1]
    assert kernel.attributes["sorted"] == bool(places)
    if not places:
        assert not deterministic and dtype == "float32" and rows is index
        return
    assert deterministic or dtype == "bfloat16"
    resolved_rows = np.where(index < 0, index + 5, index)
    resolved_rows = np.where(
        (resolved_rows < 0) | (resolved_rows > 5), 5, resolved_rows
    )
    order = np.argsort(resolved_rows, kind="stable")
    np.testing.assert_array_equal(places[0], order)
    np.testing.assert_array_equal(rows, resolved_rows[order])
