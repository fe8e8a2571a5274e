# SPDX-License-Identifier: Apache-2.0
"""New rows of a cache: where they go, and that nothing else moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from hlo import compiled, count, kernels

B, S, T, K, H = 3, 10, 2, 2, 4


def expected(cache, new, position, axis=1):
    cache = np.array(cache)
    for b, at in enumerate(np.broadcast_to(position, cache.shape[0])):
        for i in range(new.shape[axis]):
            if 0 <= at + i < cache.shape[axis]:
                index = (b, *(slice(None),) * (axis - 1))
                cache[(*index, at + i)] = np.asarray(new)[(*index, i)]
    return cache


def operands(dtype="float32", axis=1):
    shapes = [[B, K, H], [B, K, H]]
    for shape, rows in zip(shapes, (S, T), strict=True):
        shape.insert(axis, rows)
    random = np.random.default_rng(0)
    return [jnp.asarray(8 * random.standard_normal(s), dtype) for s in shapes]


@pytest.mark.parametrize("axis", [1, 2, 3, -2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64", "bool"])
@pytest.mark.parametrize("position", [[0, 4, 8], [9, -1, 30], [-5, 10, -2], 3])
def test_rows_go_where_they_belong(position, dtype, axis):
    cache, new = operands(dtype, axis % 4)
    at = jnp.array(position, np.int32)
    f = jax.jit(lambda *x: jl.update_cache(*x, axis=axis))
    assert kernels(compiled(f, cache, new, at)) == 1
    np.testing.assert_array_equal(
        f(cache, new, at), expected(cache, new, position, axis % 4)
    )


def test_a_donated_cache_stays_where_it_is():
    cache, new = operands()
    at = jnp.array([0, 3, 6], np.int32)
    f = jax.jit(jl.update_cache, donate_argnums=0)
    hlo = f.lower(cache, new, at).compile().as_text()
    assert not count("copy", hlo)
    wanted = expected(cache, new, [0, 3, 6])
    cache = cache + 0
    pointer = cache.unsafe_buffer_pointer()
    out = f(cache, new, at)
    assert out.unsafe_buffer_pointer() == pointer and cache.is_deleted()
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("tables", [None, [[1, 2, 0], [3, -1, 4], [5, 6, 7]]])
def test_axes_by_letters(tables):
    random = np.random.default_rng(0)
    blocks, rows = (B, S) if tables is None else (8, 4)
    cache, new = (
        jnp.asarray(random.standard_normal((n, t, K, H)), "float32")
        for n, t in ((blocks, rows), (B, T))
    )
    tables = None if tables is None else jnp.array(tables, np.int32)
    at = jnp.array([0, 3, 6], np.int32)
    wanted = jl.update_cache(cache, new, at, block_tables=tables)
    for order in ("BTNH", "BNTH", "NBTH"):
        to = ["BTNH".index(a) for a in order]
        f = jax.jit(
            lambda *x, order=order: jl.update_cache(
                *x, block_tables=tables, order=order
            ),
            donate_argnums=0,
        )
        given = (cache.transpose(to) + 0, new.transpose(to), at)
        hlo = f.lower(*given).compile().as_text()
        assert kernels(hlo) == 1 and not count("copy", hlo)
        np.testing.assert_array_equal(f(*given), wanted.transpose(to))


def test_positions_of_64_bits():
    cache, new = operands()
    for at in (np.int64(3), np.int64(2**40), np.int64(-(2**40)), np.uint8(9)):
        found = jl.update_cache(cache, new, jnp.asarray(at))
        np.testing.assert_array_equal(found, expected(cache, new, int(at)))


def test_one_that_is_not_donated_is_not_written_to():
    cache, new = operands()
    before = np.array(cache)
    f = jax.jit(jl.update_cache)
    f(cache, new, jnp.int32(1)).block_until_ready()
    np.testing.assert_array_equal(cache, before)


def test_a_cache_that_a_loop_carries_is_not_copied():
    cache, new = operands()

    def generate(cache, q):
        def step(i, carried):
            cache, x = carried
            position = jnp.full((B,), i, np.int32)
            cache = jl.update_cache(cache, x[:, :1], position)
            lengths = position + 1
            return cache, jl.dot_product_attention(
                x, cache, cache, key_value_seq_lengths=lengths
            )

        return jax.lax.fori_loop(np.int32(0), np.int32(S), step, (cache, q))

    f = jax.jit(generate, donate_argnums=0)
    q = new[:, :1]
    hlo = f.lower(cache, q).compile().as_text()
    shape = ",".join(map(str, cache.shape))
    assert not re.findall(rf"f32\[{shape}\]\S* copy\(", hlo)
    wanted, x = np.array(cache), q
    for i in range(S):
        wanted[:, i] = x[:, 0]
        seen = jnp.asarray(wanted[:, : i + 1])
        x = jax.nn.dot_product_attention(x, seen, seen)
    out, y = f(cache, q)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)


def test_gradients():
    cache, new = operands()
    at = jnp.array([0, 9, -1], np.int32)
    ct = operands()[0] + 1
    ct_cache, ct_new = jax.vjp(lambda *x: jl.update_cache(*x, at), cache, new)[1](ct)
    ones = jnp.ones_like(new)
    there = expected(np.zeros_like(cache), ones, [0, 9, -1])
    np.testing.assert_array_equal(ct_cache, np.where(there, 0, ct))
    wanted = np.zeros_like(new)
    wanted[0], wanted[1, 0], wanted[2, 1] = ct[0, :2], ct[1, 9], ct[2, 0]
    np.testing.assert_array_equal(ct_new, wanted)


@pytest.mark.cpu
def test_places_that_are_not_there_are_an_error_if_so_asked():
    cache, new = operands()
    for at in ([0, 9, 0], [-1, 0, 0]):
        with pytest.raises(ValueError, match="update_cache: position must leave room"):
            jl.update_cache(cache, new, jnp.array(at, np.int32), mode="error")
        f = jax.jit(lambda *x: jl.update_cache(*x, mode="error"))
        with pytest.raises(Exception, match="position is out of the cache's range"):
            f(cache, new, jnp.array(at, np.int32)).block_until_ready()
    f(cache, new, jnp.array([0, 8, 3], np.int32)).block_until_ready()


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"new": jnp.zeros((B, T, K, H + 1))}, ValueError, "new"),
        ({"new": jnp.zeros((B, T, K))}, ValueError, "new"),
        ({"new": jnp.zeros((B, T, K, H), "int8")}, TypeError, "dtype"),
        ({"position": jnp.zeros(B)}, TypeError, "position"),
        ({"position": jnp.zeros(B + 1, np.int32)}, ValueError, "position"),
        ({"axis": 0}, ValueError, "axis"),
        ({"axis": 4}, ValueError, "axis"),
        ({"mode": "fill"}, ValueError, "mode"),
        ({"order": "TBNH"}, ValueError, "order"),
        ({"order": "BTH"}, ValueError, "order"),
    ],
    ids=str,
)
def test_errors(change, error, words):
    cache, new = operands("float64")
    given = {"new": new, "position": jnp.zeros(B, np.int32)} | change
    with pytest.raises(error, match=f"^update_cache: .*{words}"):
        jl.update_cache(cache, **given)
