# SPDX-License-Identifier: Apache-2.0
"""Operands that are one of a stack of matrices: read where they lie, not sliced."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from hlo import compiled
from jax_layout import _backends, choices, stacks
from jax_layout.measured import Table
from jax_layout.tune import measure
from jax_layout.tune.case import case_of

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the CPU backend is not built"
)
LAYERS, WIDE = 5, 48


def arrays(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (7, WIDE), (LAYERS, WIDE, WIDE)
    return [jnp.asarray(rng.standard_normal(s) / 7, dtype) for s in shapes]


def layer(h, w):
    return jnp.tanh(jl.matmul(h, w))


def scanned(h, stack, step=layer, **options):
    return lax.scan(lambda h, w: (step(h, w), None), h, stack, **options)[0]


def one_by_one(h, stack, step=layer):
    for w in np.asarray(stack):
        h = step(h, jnp.asarray(w))
    return h


def slices(hlo):
    """How many matrices of the stack the program slices out of it."""
    shape = rf"{WIDE},{WIDE}|1,{WIDE * WIDE}"
    return len(re.findall(rf"(?:{shape})\]\S* (?:dynamic-)?slice\(", hlo))


def close(found, expected):
    tolerance = 2e-2 if expected.dtype == jnp.bfloat16 else 1e-5
    found, expected = (np.asarray(v, np.float32) for v in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "step",
    [
        layer,
        lambda h, w: jnp.tanh(jl.gemm(h, w, transpose_b=True)),
        lambda h, w: jl.linear(h, w, h[0], activation="gelu"),
        lambda h, w: jl.einsum("nk,mk->mn", w, h),
        lambda h, w: jl.gemm(h, w, h, alpha=0.5),
        lambda h, w: layer(h, jl.matmul(w, w)),
    ],
    ids=["NN", "NT", "linear", "left", "addend", "both"],
)
def test_a_scan_over_layers_slices_no_weight(step, dtype):
    h, stack = arrays(dtype)
    f = functools.partial(scanned, step=step)
    hlo = compiled(f, h, stack)
    assert "b_part = true" in hlo or "a_part = true" in hlo
    assert slices(hlo) == 0
    close(jax.jit(f)(h, stack), one_by_one(h, stack, step))


WAYS = {
    "jit": (jax.jit(layer), {}),
    "checkpoint": (jax.checkpoint(layer), {}),
    "both": (jax.checkpoint(jax.jit(layer)), {}),
    "called twice": (lambda h, w: jax.jit(layer)(jax.jit(layer)(h, w), w), {}),
    "two at a time": (layer, {"unroll": 2}),
    "two at a time, of jit": (jax.jit(layer), {"unroll": 2}),
    "all at once": (layer, {"unroll": True}),
    "in a branch": (
        lambda h, w: lax.cond(h[0, 0] < 9, layer, lambda h, w: h - layer(h, w), h, w),
        {},
    ),
}


@pytest.mark.parametrize("step, options", WAYS.values(), ids=WAYS)
def test_bodies_that_call_or_are_unrolled(step, options, monkeypatch):
    monkeypatch.setattr(stacks, "_SLICED_BYTES", 0)
    h, stack = arrays()
    stack = stack[:4]
    f = functools.partial(scanned, step=step, **options)
    assert slices(compiled(f, h, stack)) == 0
    close(jax.jit(f)(h, stack), one_by_one(h, stack, step))

    def gradients():
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1))

    hlo = compiled(gradients(), h, stack)
    assert hlo.count("b_part = true") >= 2
    # Before jax 0.12 the gradient of a branch is handed slices.
    if step is not WAYS["in a branch"][0] or jax.__version_info__ >= (0, 12):
        assert slices(hlo) == 0
    ours = jax.jit(gradients())(h, stack)
    with choices.forced("lax"):
        lowered = jax.jit(gradients()).lower(h, stack)
    assert "jax_layout_gemm" not in lowered.as_text()
    for found, expected in zip(ours, lowered.compile()(h, stack), strict=True):
        close(found, expected)


@pytest.mark.parametrize("kept", [jax.checkpoint, jax.jit, lambda step: step])
def test_gradients_of_two_stacks_that_are_reshaped(kept, monkeypatch):
    """What stands behind a barrier is one of several values."""
    monkeypatch.setattr(stacks, "_SLICED_BYTES", 0)
    h, stack = arrays()
    flat = stack.reshape(LAYERS, -1)

    @kept
    def step(h, pair):
        for w in pair:
            h = layer(h, w.reshape(WIDE, WIDE))
        return h

    def loss(first, second, h):
        return (scanned(h, (first, second), step) ** 2).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    assert slices(compiled(loss, flat, 2 * flat, h)) == 0
    # Of what is not computed again, jax keeps each weight as it was reshaped.
    of_jax = 0 if kept is jax.checkpoint else 2
    assert slices(compiled(gradient, flat, 2 * flat, h)) == of_jax
    found = jax.jit(gradient)(flat, 2 * flat, h)
    with choices.forced("lax"):
        expected = jax.jit(lambda *a: jax.grad(loss, (0, 1, 2))(*a))(flat, 2 * flat, h)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("large", [True, False])
def test_a_function_called_with_weights_of_a_stack_and_with_others(large, monkeypatch):
    monkeypatch.setattr(stacks, "_SLICED_BYTES", 4 * WIDE * WIDE + 1 - large)
    h, stack = arrays()
    step = jax.jit(layer)

    def f(h, stack, w):
        return step(step(step(h, stack[1]), w), stack[3])

    lowered = jax.jit(f).lower(h, stack, stack[2])
    # What is sliced soon stays a call of one function.
    assert lowered.as_text().count("b_part = true") == 2 * large
    assert lowered.as_text().count("@jax_layout_gemm") == 1 + 2 * large
    close(lowered.compile()(h, stack, stack[2]), one_by_one(h, stack[1:4]))


def test_names_and_effects_of_what_is_called_stay(monkeypatch):
    monkeypatch.setattr(stacks, "_SLICED_BYTES", 0)
    h, stack = arrays()
    seen = []

    @jax.jit
    def told(h, w):
        jax.debug.callback(lambda x: seen.append(float(x)), h[0, 0])
        return layer(h, w)

    f = jax.jit(functools.partial(scanned, step=told))
    close(f(h, stack), one_by_one(h, stack))
    jax.effects_barrier()
    assert len(seen) == LAYERS
    hlo = compiled(functools.partial(scanned, step=jax.jit(layer)), h, stack)
    (call,) = (line for line in hlo.splitlines() if "jax_layout_gemm" in line)
    assert "/jit(layer)/" in call


def test_a_block_of_several_out_of_range():
    h, stack = arrays()
    stack = stack[:4].reshape(2, 2, WIDE, WIDE)

    def f(h, stack, i):
        pair = lax.dynamic_index_in_dim(
            stack, i, keepdims=False, allow_negative_indices=False
        )
        return jl.matmul(h, pair[0]), jl.matmul(h, pair[1])

    for index, named in ((-3, 0), (0, 0), (1, 1), (9, 1)):
        i = jnp.asarray(index, np.int32)
        assert slices(compiled(f, h, stack, i)) == 0
        for found, w in zip(jax.jit(f)(h, stack, i), stack[named], strict=True):
            close(found, h @ w)


def test_from_the_last_to_the_first_and_its_gradient():
    h, stack = arrays()
    f = functools.partial(scanned, reverse=True)
    close(jax.jit(f)(h, stack), one_by_one(h, stack[::-1]))
    loss = lambda step: lambda *args: (scanned(*args, step=step) ** 2).sum()  # noqa: E731
    plain = jax.grad(loss(lambda h, w: jnp.tanh(h @ w)), (0, 1))(h, stack)
    ours = jax.grad(loss(layer), (0, 1))
    for found, expected in zip(jax.jit(ours)(h, stack), plain, strict=True):
        close(found, expected)


@pytest.mark.parametrize("turned", [False, True])
def test_products_of_jax_too(turned):
    h, stack = arrays()
    step = lambda h, w: jnp.tanh(h @ (w.T if turned else w))  # noqa: E731
    f = functools.partial(scanned, step=step)
    with jl.installed():
        installed = compiled(lambda *args: f(*args), h, stack)
    for hlo in (installed, compiled(jl.optimize_layout(f), h, stack)):
        assert "jax_layout_gemm" in hlo and slices(hlo) == 0


@pytest.mark.parametrize("index", [0, 3, LAYERS - 1, LAYERS + 9, -2, -LAYERS - 9])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_indices_out_of_range_are_the_nearest(index, dtype):
    h, stack = arrays()

    def f(h, stack, i):
        return jl.matmul(
            h,
            lax.dynamic_index_in_dim(
                stack, i, keepdims=False, allow_negative_indices=False
            ),
        )

    i = jnp.asarray(index, dtype)
    assert slices(compiled(f, h, stack, i)) == 0
    close(jax.jit(f)(h, stack, i), h @ stack[min(max(index, 0), LAYERS - 1)])


@pytest.mark.parametrize("dtype", [np.uint32, np.int8])
def test_other_indices_slice(dtype):
    h, stack = arrays()

    def f(h, stack, i):
        return jl.matmul(h, lax.dynamic_index_in_dim(stack, i, keepdims=False))

    i = jnp.asarray(2, dtype)
    assert "b_part = true" not in compiled(f, h, stack, i)
    close(jax.jit(f)(h, stack, i), h @ stack[2])


def test_stacks_without_a_loop():
    h, stack = arrays()
    rows = stack.reshape(-1, WIDE)

    def f(h, stack, rows):
        return [
            jl.matmul(h, stack[2]),
            jl.matmul(h, rows[WIDE : 2 * WIDE]),
            jl.matmul(stack[4], h.T),
            jl.einsum("mk,bkn->bmn", h, stack.reshape(1, *stack.shape)[0]),
        ]

    assert slices(compiled(f, h, stack, rows)) == 0
    expected = [h @ stack[2], h @ stack[1], stack[4] @ h.T, h @ stack]
    for found, wanted in zip(jax.jit(f)(h, stack, rows), expected, strict=True):
        close(found, wanted)


SLICED = {
    "columns": lambda h, s: jl.matmul(h, s.reshape(WIDE, -1)[:, :WIDE]),
    "every other row": lambda h, s: jl.matmul(h, s.reshape(-1, WIDE)[: 2 * WIDE : 2]),
    "from within a block": lambda h, s: jl.matmul(h, s.reshape(-1, WIDE)[5 : 5 + WIDE]),
    "of what is computed": lambda h, s: jl.matmul(h, (2 * s)[1]),
}


@pytest.mark.parametrize("name", SLICED)
def test_other_slices_are_right(name):
    h, stack = arrays()
    with jax.disable_jit():
        expected = SLICED[name](h, stack)
    hlo = compiled(SLICED[name], h, stack)
    assert "b_part = true" not in hlo
    close(jax.jit(SLICED[name])(h, stack), expected)


def test_what_is_donated_or_carried_is_sliced():
    h, stack = arrays()

    def updated(h, stack):
        return stack.at[1].add(1), jl.matmul(h, stack[1])

    expected = h @ stack[1]
    donated = jax.jit(updated, donate_argnums=1)
    assert "b_part = true" not in donated.lower(h, stack).compile().as_text()
    close(donated(h, jnp.copy(stack))[1], expected)

    def step(i, carry):
        h, stack = carry
        w = stack[i]
        return layer(h, w), stack.at[i].set(2 * w)

    carried = lambda h, stack: lax.fori_loop(0, LAYERS, step, (h, stack))  # noqa: E731
    assert "b_part = true" not in compiled(carried, h, stack)
    found = jax.jit(carried)(h, stack)
    close(found[0], one_by_one(h, stack))
    close(found[1], 2 * stack)


def test_loops_in_loops_branches_and_maps():
    h, stack = arrays()
    stacks = jnp.stack([stack, 2 * stack])

    def twice(h, stacks):
        return lax.scan(lambda h, stack: (scanned(h, stack), None), h, stacks)[0]

    expected = one_by_one(one_by_one(h, stack), 2 * stack)
    close(jax.jit(twice)(h, stacks), expected)

    def branch(h, w):
        return lax.cond(h[0, 0] > 0, layer, lambda h, w: h - layer(h, w), h, w)

    close(
        jax.jit(functools.partial(scanned, step=branch))(h, stack),
        one_by_one(h, stack, branch),
    )
    mapped = jax.jit(jax.vmap(scanned))(jnp.stack([h, 2 * h]), stacks)
    close(mapped[1], one_by_one(2 * h, 2 * stack))


@pytest.mark.parametrize("ratio", [0.7, 0.9, 1.05])
@pytest.mark.parametrize("rows, wide", [(8, 1024), (8, 512), (128, 1024), (8, 64)])
def test_a_saved_copy_counts(rows, wide, ratio, monkeypatch):
    """As much as the product, of large matrices and few rows; a little of others."""
    points = {(rows, wide, wide, 1): dict.fromkeys(choices.methods_of("gemm"), ratio)}
    transposed = {(wide, rows, wide, 1): points[rows, wide, wide, 1]}
    cases = {f"gemm float32 {order}": points | transposed for order in ("NN", "NT")}
    table = Table("", "", "", 1, cases)
    monkeypatch.setattr(choices, "_source", lambda: f"a test's, {rows} {wide} {ratio}")
    monkeypatch.setattr(choices, "_tables", lambda source: [(source, table)])
    monkeypatch.setattr(choices, "level2_bytes", lambda: 2 << 20)
    h, stack = jnp.ones((rows, wide), np.float32), jnp.ones((3, wide, wide), np.float32)
    few, size = rows <= 64, 4 * wide * wide
    in_a_loop = few and size > 2 << 20 and ratio > 0.8 or size > 512 << 10 and ratio > 1
    alone = few and size > 512 << 10 and ratio > 0.8 or size > 512 << 10 and ratio > 1
    f = functools.partial(scanned, step=jl.matmul)
    assert ("jax_layout_gemm" in compiled(f, h, stack)) == in_a_loop
    f = functools.partial(scanned, step=jnp.matmul)
    assert ("jax_layout_gemm" in compiled(jl.optimize_layout(f), h, stack)) == in_a_loop
    one = lambda h, stack: jl.matmul(h, stack[1])  # noqa: E731
    assert ("jax_layout_gemm" in compiled(one, h, stack)) == alone
    # Of what is no block, nothing is saved.
    assert "jax_layout_gemm" not in compiled(jl.matmul, h, stack[1])


def test_what_is_measured_of_a_call_is_not_what_a_stack_saves():
    h, stack = arrays()
    with stacks.are_sliced():
        hlo = compiled(lambda *args: scanned(*args), h, stack)
    assert "b_part = true" not in hlo and slices(hlo) == 1
    case = case_of("product", jl.matmul, "float32", h.shape, stack.shape[1:])
    program, (operands, *_) = measure.program_of(case, "cpu")
    assert operands[1].ndim == 3  # of a stack
    lowered, _ = measure._lowered((), program, operands, None, "skinny")
    text = lowered.as_text()
    assert "jax_layout_gemm" in text and "b_part = true" not in text


def gemm_call(operands, **attributes):
    given = {
        "spec": "mk,kn->mn",
        "a_shape": np.array([7, WIDE]),
        "b_shape": np.array([WIDE, WIDE]),
        "operand_type": "float32",
        "result_type": "float32",
        "alpha": np.array([1.0, 0.0]),
        "beta": np.array([0.0, 0.0]),
        "activation": "none",
        "derivative": "none",
        **dict.fromkeys(("bias", "aux", "sums", "workspace", "tf32"), False),
        "scales": np.int64(0),
        "method": "",
        "a_part": False,
        "b_part": True,
    }
    result = jax.ShapeDtypeStruct((7, WIDE), np.float32)
    call = jax.ffi.ffi_call("jax_layout_gemm", result)
    return jax.jit(lambda *args: call(*args, **given, **attributes))(*operands)


def test_the_handler_checks_what_it_is_given():
    h, stack = arrays()
    one = jnp.asarray(1, np.int32)
    close(gemm_call([h, stack, one]), h @ stack[1])
    with pytest.raises(Exception, match="gemm: operand b must have 2304 elements"):
        gemm_call([h, stack[:, :40], one])
    with pytest.raises(Exception, match="one int32 or int64"):
        gemm_call([h, stack, jnp.zeros(2, np.int32)])
    with pytest.raises(Exception, match="one int32 or int64"):
        gemm_call([h, stack, jnp.float32(1)])
    with pytest.raises(Exception, match="gemm: operand 2 is missing"):
        gemm_call([h, stack])
