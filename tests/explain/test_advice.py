# SPDX-License-Identifier: Apache-2.0
"""Advice is given on conditions that hold, and on no others."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_layout as jl
from jax_layout import choices
from jax_layout.explain.tables import megabytes
from reports import explained, optimised

BF16, F32 = jnp.bfloat16, jnp.float32


def advice(report: jl.Report, code: str):
    return [a for a in report.warnings if a.code == code]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes a table of choices, and uses it alone."""
    monkeypatch.setattr(choices, "_given", [None])
    monkeypatch.setattr(choices, "_PACKAGED", tmp_path / "packaged")
    caches = (choices._tables, choices._best, choices.packaged)

    def use(**cases):
        content = {
            "format": choices.FORMAT,
            "profile": choices.profile(),
            "jaxlib": choices.jaxlib_minor(),
            "processor": choices.processor(),
            "threads": choices.threads(),
            "cases": {name.replace("_", " "): points for name, points in cases.items()},
        }
        path = tmp_path / "measured.json"
        path.write_text(json.dumps(content))
        for cache in caches:
            cache.cache_clear()
        jl.use_choices(path)
        return path

    yield use
    for cache in caches:
        cache.cache_clear()


# --- products

POINTS = {"gemm bfloat16 NN": [[[1, 512, 256, 1], {"matrix-vector": 4.0}]]}


def product(a, b):
    return a @ b


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_16_bit_products_are_recommended_where_the_table_has_them_faster(table, dtype):
    name = jnp.dtype(dtype).name
    points = [
        [[1, 512, 256, 1], {"matrix-vector": 4.0, "oneDNN": 0.3}],
        [[64, 512, 256, 1], {"oneDNN": 0.8}],
        [[1024, 512, 256, 1], {"oneDNN": 1.5}],
    ]
    table(**{f"gemm_{name}_NN": points})
    (found,) = advice(
        explained(product, (1, 256), (256, 512), dtype=dtype), "16-bit-dot"
    )
    assert "1 x 512 x 256" in found.message
    by = "matrix-vector of jl.matmul is faster here by measured.json"
    assert by in found.message
    slower = explained(product, (64, 256), (256, 512), dtype=dtype)
    assert not any("jl." in a.message for a in slower.warnings)
    (found,) = advice(
        explained(product, (1024, 256), (256, 512), dtype=dtype), "16-bit-dot"
    )
    assert "oneDNN of jl.matmul" in found.message


def test_nothing_is_recommended_that_no_table_knows(table):
    table()
    for rows in 1, 8, 256:
        report = explained(product, (rows, 256), (256, 512), dtype=BF16)
        assert not advice(report, "16-bit-dot")


def test_the_table_is_named_that_knows_the_call(table, tmp_path):
    path = table()
    other = json.loads(path.read_text()) | {"profile": "another", "cases": POINTS}
    (tmp_path / "packaged").mkdir()
    (tmp_path / "packaged" / "other.json").write_text(json.dumps(other))
    report = explained(product, (1, 256), (256, 512), dtype=BF16)
    (found,) = advice(report, "16-bit-dot")
    assert "is faster here by every table that knows a call" in found.message


def test_what_choices_are_set_to_is_said():
    (found,) = advice(
        explained(product, (256, 256), (256, 256), dtype=BF16), "16-bit-dot"
    )
    assert "choices are set to run it" in found.message
    assert not advice(explained(product, (256, 256), (256, 256)), "16-bit-dot")
    ours = explained(jl.matmul, (256, 256), (256, 256), dtype=BF16)
    assert not advice(ours, "16-bit-dot")


def scores(q, k):
    return jnp.einsum("bshd,bthd->bhst", q, k)


def test_transposed_operands_are_ours_only_where_ours_is_faster(table):
    shape = (2, 64, 4, 32)
    for ratio, ours in ((0.5, False), (2.0, True)):
        table(gemm_float32_NT=[[[64, 64, 32, 8], {"oneDNN": ratio}]])
        found = advice(explained(scores, shape, shape), "transposed-operand")
        assert len(found) == 2
        assert all(("jl.einsum" in a.message) == ours for a in found)


# --- conversions of dtype


def conversions(report: jl.Report, size: int = 1):
    return [c for c in report.conversions if c.bytes >= size]


def test_copies_of_weights_in_another_dtype_are_listed(table):
    table()
    weight = 256 * 512
    report = explained(product, (1, 256), (256, 512), dtype=BF16)
    (found,) = conversions(report, weight)
    assert (found.dtype, found.shape) == ("bf16", "f32[256,512]")
    assert (found.bytes, found.trips, found.trips_known) == ((2 + 4) * weight, 1, True)
    assert found.cause == "XLA's dtype for the gemm"
    assert found.source.endswith(f"{__name__}.py:{product.__code__.co_firstlineno + 1}")
    assert 0 < found.share <= 1
    assert report.cost.moved >= found.bytes and report.temporary >= 4 * weight
    (said,) = advice(report, "weights-converted")
    assert said.message == (
        "b (bf16) is written out as f32[256,512] on every call: keep it in f32, if "
        "there is memory for it"
    )
    text = str(report)
    assert "Conversions of dtype that write arrays" in text
    assert "conversion" in report.summary() and "XLA's dtype for the gemm" in text


def test_conversions_of_the_programs_own():
    def f(x, w):
        return x @ w.astype(BF16).astype(F32)

    def once(x, w):
        return x.astype(BF16).sum(), w.astype(BF16)

    assert not conversions(explained(jnp.add, (64, 64), (64, 64), dtype=BF16))
    (found,) = conversions(explained(once, (8, 256), (256, 512)), 256 * 512)
    assert (found.dtype, found.shape) == ("f32", "bf16[256,512]")
    assert found.cause == "the program's conversion"
    # Rounding alone changes no array's dtype.
    assert not conversions(explained(f, (8, 256), (256, 512)), 256 * 512)


def test_conversions_in_a_scan_count_its_trips():
    def f(x, stack):
        return lax.scan(lambda c, w: (c @ w, None), x, stack)[0]

    report = explained(f, (1, 256), (5, 256, 256), dtype=BF16)
    inside = [c for c in conversions(report, 6 * 256 * 256) if c.trips == 5]
    whole = [c for c in conversions(report, 5 * 6 * 256 * 256)]
    total = sum(c.total_bytes for c in (inside or whole))
    # And the index of the slice.
    assert total == pytest.approx(5 * 6 * 256 * 256, rel=1e-3)


# --- what would help, and what does not


def convolve(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def net(x, w):
    for _ in range(4):
        x = jnp.cumsum(jnp.tanh(convolve(x, w)), 0)
    return x


def test_plans_are_named_where_they_move_less():
    report = explained(net, (4, 16, 28, 28), (16, 16, 3, 3))
    (found,) = advice(report, "optimize-layout")
    better = explained(jl.optimize_layout(net), (4, 16, 28, 28), (16, 16, 3, 3))
    assert better.cost.moved < report.cost.moved
    assert not advice(better, "optimize-layout") and not advice(better, "made-worse")
    for cost in better.cost, report.cost:
        assert megabytes(cost.moved) in found.message
    (found,) = advice(better, "plan-layout")
    assert "jl.plan_layout, 2 arguments laid out once" in found.message


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA widens bfloat16 in either order"
)
def test_plans_are_named_that_read_through_a_transpose():
    shapes = (64, 256), (256, 256)
    with choices.forced("lax"):
        turned = explained(lambda x, w: x @ w.T, *shapes, dtype=BF16)
        straight = explained(lambda x, w: x @ w, *shapes, dtype=BF16)
    (found,) = advice(turned, "optimize-layout")
    assert "jl.optimize_layout around the whole function" in found.message
    assert not advice(straight, "optimize-layout")


def test_plans_are_not_named_where_nothing_moves():
    f = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    assert not explained(f, (64, 64), (64, 64)).warnings


def test_plans_are_not_named_that_leave_a_function_alone():
    """XLA transposes for its dot, which no plan of ours changes."""
    f = lambda w, x: jnp.einsum("bms,hmd->bhsd", x, w)  # noqa: E731
    report = explained(f, (4, 64, 64), (8, 64, 64))
    assert report.reordered_bytes() > 0
    for code in "optimize-layout", "plan-layout":
        assert not advice(report, code)


def turned(x):
    """Transposes that XLA makes part of the sum, and a kernel cannot."""
    return jnp.sin(jl.permute(jnp.cos(x), (0, 2, 3, 1))) + 1


def test_what_our_kernels_make_worse_is_said():
    there_and_back = lambda x: turned(x).transpose(0, 3, 1, 2)  # noqa: E731
    report = explained(there_and_back, (8, 64, 32, 32))
    size = 2 * 4 * 8 * 64 * 32 * 32
    assert (
        report.plain
        == jl.explain(lambda x: jnp.sin(jnp.cos(x)) + 1)(
            jax.ShapeDtypeStruct((8, 64, 32, 32), F32)
        ).cost
    )
    assert report.plain.moved == 0 and report.cost.moved >= size
    (found,) = advice(report, "made-worse")
    assert found.message.startswith("made worse by our kernels: ")
    assert (
        "instead of 0 B" in found.message and 'jl.use_choices("lax")' in found.message
    )
    assert "as plain jax: 0 B of reorders and conversions" in str(report)


def test_a_jitted_function_is_lowered_anew_as_plain_jax():
    """jax remembers what it lowered; the comparison would be with itself."""
    f = jax.jit(lambda x: turned(x).transpose(0, 3, 1, 2), donate_argnums=0)
    x = jax.ShapeDtypeStruct((8, 64, 32, 32), F32)
    for _ in range(2):
        report = jl.explain(f)(x)
        assert report.plain.moved == 0 < report.cost.moved


def test_what_our_kernels_do_not_make_worse():
    report = explained(jl.matmul, (256, 256), (256, 256))
    assert report.plain is not None and not advice(report, "made-worse")
    assert explained(jnp.matmul, (256, 256), (256, 256)).plain is None


def test_a_function_that_optimize_layout_made_worse():
    """Whatever it emits is compared with the function as it was."""
    f = lambda x: jnp.sin(x) + 1  # noqa: E731
    worse = optimised(f, lambda x: turned(x).transpose(0, 3, 1, 2))
    report = explained(worse, (8, 64, 32, 32))
    (found,) = advice(report, "made-worse")
    assert found.message.startswith("made worse by jl.optimize_layout: ")
    assert "leave the function as it was" in found.message
    assert "temporary memory: 0 B before" in str(report)


# --- arrays that are copied for a part of them to be written


def test_copied_to_update():
    cache, new, at = (2, 128, 4, 16), (2, 1, 4, 16), jnp.array([3, 5], "int32")

    def slice_of(c, n):
        return lax.dynamic_update_slice_in_dim(c, n, at[0], 1)

    def scattered(c, n):
        return c.at[jnp.arange(2), at].set(n[:, 0])

    def ours(c, n):
        return jl.update_cache(c, n, at)

    for f in (slice_of, scattered, ours):
        (found,) = advice(explained(f, cache, new), "copied-to-update")
        assert found.message.startswith("c (f32[2,128,4,16]) is copied on every call")
        assert "donate it" in found.message and "test_advice.py" in found.source
        donated = explained(jax.jit(f, donate_argnums=0), cache, new)
        assert not advice(donated, "copied-to-update")

    def read_later(c, n):
        return slice_of(c, n), c.sum() * slice_of(c, n).sum()

    report = explained(jax.jit(read_later, donate_argnums=0), cache, new)
    assert all("donate" not in a.message for a in advice(report, "copied-to-update"))

    def whole(c, n):  # nothing of it is left
        return lax.dynamic_update_slice(c, 2 * c[:, :100] + n, (0, 0, 0, 0))

    assert not advice(explained(whole, cache, new), "copied-to-update")


def test_copied_in_a_loop():
    cache, new = (2, 128, 4, 16), (2, 1, 4, 16)

    def row(c, n, i):
        return lax.dynamic_update_slice(c, n, (0, i, 0, 0))

    def loop(c, n, after):
        def step(i, carried):
            c, total = carried
            written = row(c, n, i)
            return written, total + (c * written if after else written).sum()

        return lax.fori_loop(0, 9, step, (c, jnp.zeros((), "float32")))

    def explain(f, *shapes):
        return advice(explained(jax.jit(f, donate_argnums=0), *shapes), found_as)

    found_as = "copied-to-update"
    assert not explain(lambda c, n: loop(c, n, False), cache, new)
    found = explain(lambda c, n: loop(c, n, True), cache, new)
    assert found and all("every pass of a loop" in a.message for a in found)
    assert all("it is read later" in a.message for a in found)

    def layers(c, n):
        def layer(n, c):
            c = jl.update_cache(c, n, 3)
            return jl.dot_product_attention(n, c, c), c

        return lax.scan(layer, n, c)

    (slices,) = explain(layers, (3, *cache), new)
    assert "a slice of a whole (f32[2,128,4,16])" in slices.message
