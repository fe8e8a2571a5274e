# SPDX-License-Identifier: Apache-2.0
"""Keys and values in blocks that a table finds, as they would be without one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from hlo import collectives, compiled, count, kernels

B, M, R, N, K, H, BLOCKS = 2, 5, 8, 4, 2, 16, 13
TABLES = jnp.array([[3, 0, 12, 7, 99], [1, 2, 9, -1, 4]], np.int32)
LENGTHS = jnp.array([30, 17], np.int32)


def operands(dtype="float32", t=1):
    random = np.random.default_rng(0)
    shapes = [(B, t, N, H), (BLOCKS, R, K, H), (BLOCKS, R, K, H)]
    return [jnp.asarray(random.standard_normal(s), dtype) for s in shapes]


def gathered(x, tables=TABLES):
    """The same as one cache for each sequence."""
    x = x[jnp.clip(tables, 0, x.shape[0] - 1)]
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def paged(q, k, v, tables=TABLES, **options):
    return jl.dot_product_attention(q, k, v, block_tables=tables, **options)


def plain(q, k, v, tables=TABLES, **options):
    k, v = gathered(k, tables), gathered(v, tables)
    return jax.nn.dot_product_attention(q, k, v, **options)


def close(found, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    "t, options",
    [
        (1, {"key_value_seq_lengths": LENGTHS}),
        (20, {"key_value_seq_lengths": LENGTHS, "is_causal": True}),
        (3, {"bias": jnp.linspace(0, 1, M * R, dtype="float32"), "scale": 0.5}),
        (1, {"return_residual": True}),
    ],
    ids=str,
)
def test_as_without_blocks(dtype, tolerance, t, options):
    q, k, v = operands(dtype, t)
    f = functools.partial(paged, **options)
    options = options | {
        n: jnp.expand_dims(options[n], (0, 1, 2)) for n in ("bias",) if n in options
    }
    hlo = compiled(f, q, k, v)
    assert kernels(hlo) == 1 and not count("gather", hlo)
    assert not re.findall(rf"\[{BLOCKS},{R},\S* copy\(", hlo)
    close(jax.jit(f)(q, k, v), plain(q, k, v, **options), tolerance)


def test_orders_of_blocks():
    q, k, v = operands()
    placed = (x.transpose(2, 0, 1, 3) for x in (k, v))  # heads, blocks, rows, features
    close(paged(q, *placed, key_value_order="NBTH"), plain(q, k, v))


def test_where_there_is_no_kernel():
    x = [a.astype("float64") for a in operands()]
    f = functools.partial(paged, key_value_seq_lengths=LENGTHS)
    assert kernels(compiled(f, *x)) == 0
    close(f(*x), plain(*x, key_value_seq_lengths=LENGTHS), 1e-12)


def test_gradients():
    q, k, v = operands(t=3)

    def gradients(attend):
        def loss(*x):
            return jnp.sin(attend(*x, key_value_seq_lengths=LENGTHS)).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    close(gradients(paged), gradients(plain), 2e-5)


@pytest.mark.parametrize("dims", [(0, 0, 1, 0), (0, None, None, None), (None, 1, 0, 2)])
def test_vmap(dims):
    x = [*operands(), TABLES]
    x = [
        a if d is None else jnp.stack([a, jnp.flip(a), a], d)
        for a, d in zip(x, dims, strict=True)
    ]
    ours = jax.jit(jax.vmap(paged, dims))
    assert kernels(ours.lower(*x).compile().as_text()) == 1
    close(ours(*x), jax.vmap(plain, dims)(*x))


# Along axes that are explicit, jax's gathers are ambiguous.
@pytest.mark.parametrize("mesh", [AxisType.Auto], indirect=True)
def test_sharded_by_batch_and_heads(mesh):
    q, k, v = operands()
    q = jnp.concatenate([q, -q])
    more = jnp.array([[5, 3, 0, 1, 2], [6, 1, 1, 1, 1]], np.int32)
    tables = jnp.concatenate([jnp.clip(TABLES, 0, BLOCKS - 1), more])
    lengths = jnp.array([30, 17, 0, 1], np.int32)

    def step(q, k, v, tables):
        k = jl.update_cache(k, q[:, :, :K], lengths, block_tables=tables)
        return paged(q, k, v, tables, key_value_seq_lengths=lengths + 1)

    places = P("a", None, "b"), P(None, None, "b"), P(None, None, "b"), P("a")
    x = (q, k, v, tables)
    expected = step(*x)
    spread = [
        jax.device_put(a, NamedSharding(mesh, p))
        for a, p in zip(x, places, strict=True)
    ]
    program = jax.jit(lambda *x: paged(*x, key_value_seq_lengths=lengths + 1))
    hlo = program.lower(*spread).compile().as_text()
    assert kernels(hlo) == 1 and not collectives(hlo)
    # Blocks that several devices write to are whole on each.
    close(jax.jit(step)(*spread), expected)


# --- what is written to blocks


def written(cache, new, position, tables, axis=1):
    cache, new = (np.moveaxis(np.array(x), axis, 1) for x in (cache, new))
    for b, at in enumerate(np.broadcast_to(position, new.shape[0])):
        for i in range(new.shape[1]):
            block, row = divmod(int(at) + i, cache.shape[1])
            if 0 <= block < tables.shape[1] and 0 <= tables[b, block] < len(cache):
                cache[tables[b, block], row] = new[b, i]
    return np.moveaxis(cache, 1, axis)


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_go_where_they_belong(axis, dtype):
    random = np.random.default_rng(0)
    shapes = [[BLOCKS, K, H], [B, K, H]]
    for shape, rows in zip(shapes, (R, 11), strict=True):
        shape.insert(axis, rows)
    cache, new = (jnp.asarray(random.standard_normal(s), dtype) for s in shapes)
    f = jax.jit(functools.partial(jl.update_cache, axis=axis, block_tables=TABLES))
    position = jnp.zeros(B, np.int32)
    assert kernels(compiled(f, cache, new, position)) == 1
    for places in ([0, 6], [-3, 20], [33, 16], 5, [np.iinfo(np.int32).max] * 2):
        position = jnp.asarray(places, np.int32)
        wanted = written(cache, new, places, np.asarray(TABLES), axis)
        np.testing.assert_array_equal(f(cache, new, position), wanted)
        lax = jl.operators()["update_paged_cache"].lax
        at = jnp.broadcast_to(position, (B,))
        found = lax(cache, new, at, TABLES, first=0, axis=axis, strict=False)
        np.testing.assert_array_equal(found, wanted)


def test_a_donated_pool_stays_where_it_is():
    new, cache, _ = operands()
    f = jax.jit(jl.update_cache, donate_argnums=0)
    cache, new = cache + 0, new[:, :, :K]
    wanted = written(cache, new, LENGTHS, np.asarray(TABLES))
    hlo = f.lower(cache, new, LENGTHS, block_tables=TABLES).compile().as_text()
    assert not count("copy", hlo)
    pointer = cache.unsafe_buffer_pointer()
    out = f(cache, new, LENGTHS, block_tables=TABLES)
    assert out.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(out, wanted)


def test_pools_that_are_mapped_stay_apart():
    new, cache, _ = operands()
    cache, new = jnp.stack([cache, -cache]), new[:, :, :K]
    position = jnp.array([33, 26], np.int32)  # in blocks that are not there
    for at in (position, LENGTHS):
        f = functools.partial(jl.update_cache, block_tables=TABLES)
        found = jax.vmap(f, (0, None, None))(cache, new, at)
        wanted = [written(x, new, at, np.asarray(TABLES)) for x in cache]
        np.testing.assert_array_equal(found, np.stack(wanted))


def test_places_that_are_not_there_are_an_error_if_so_asked():
    new, cache, _ = operands()
    new = new[:, :, :K]
    f = functools.partial(jl.update_cache, block_tables=TABLES, mode="error")
    for position, words in (([0, 40], "position must"), ([0, 24], "block_tables must")):
        at = jnp.array(position, np.int32)
        with pytest.raises(ValueError, match=f"update_cache: {words}"):
            f(cache, new, at)
        with pytest.raises(Exception, match="out of the cache's range"):
            jax.jit(f)(cache, new, at).block_until_ready()
    f(cache, new, LENGTHS)
    jax.jit(f)(cache, new, LENGTHS).block_until_ready()


@pytest.mark.parametrize(
    "tables",
    [jnp.zeros((B + 1, M), np.int32), jnp.zeros((B, M), np.int64),
     jnp.zeros((B, 0), np.int32), jnp.zeros(B, np.int32)],
    ids=["batch", "dtype", "none", "axes"],
)  # fmt: skip
def test_errors(tables):
    q, k, v = operands()
    with pytest.raises(ValueError, match="^dot_product_attention: block_tables"):
        paged(q, k, v, tables)
    with pytest.raises(ValueError, match="^update_cache: block_tables"):
        jl.update_cache(k, q[:, :, :K], 0, block_tables=tables)
    with pytest.raises(ValueError, match="block_tables are for queries with a batch"):
        paged(q[0], k, v)
