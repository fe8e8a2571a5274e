# SPDX-License-Identifier: Apache-2.0
"""dot_product_attention as a function of JAX: semantics, transformations, programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from hlo import collectives, compiled, count, kernels

DTYPES = {"float32": 3e-6, "bfloat16": 2e-2}
B, T, S, N, K, H = 2, 70, 300, 6, 2, 40


def operands(dtype="float32", b=B, t=T, s=S, n=N, k=K, h=H):
    random = np.random.default_rng(0)
    shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, h), (b, t, n, h)]
    return [jnp.asarray(random.standard_normal(x), dtype) for x in shapes]


def of_scores(*shape, kind="float32"):
    random = np.random.default_rng(1)
    x = random.standard_normal(shape)
    return jnp.asarray(x > 0 if kind == "bool" else x.astype(kind))


FORMS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 9)},
    "one window": {"local_window_size": 5, "is_causal": True},
    "scale": {"scale": -0.1},
    "bias": {"bias": of_scores(1, N, T, S)},
    "bias of keys": {"bias": of_scores(B, 1, 1, S), "is_causal": True},
    "mask": {"mask": of_scores(B, 1, T, S, kind="bool")},
    "mask of heads": {"mask": of_scores(1, N, 1, 1, kind="bool")},
    "lengths": {
        "query_seq_lengths": jnp.array([70, 13], np.int32),
        "key_value_seq_lengths": jnp.array([0, 290], np.int32),
    },
}


def close(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        apart = np.abs(a - b).max(initial=0)
        assert apart <= tolerance * max(1, np.abs(b).max(initial=0)), apart


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [T, 1])
def test_as_jax(form, dtype, t):
    q, k, v, _ = operands(dtype)
    q, options = q[:, :t], dict(FORMS[form])
    for name in ("bias", "mask"):
        if name in options:
            options[name] = options[name][:, :, :t]
    ours, theirs = (
        functools.partial(f, **options)
        for f in (jl.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert kernels(compiled(ours, q, k, v)) == 1
    close(jax.jit(ours)(q, k, v), jax.jit(theirs)(q, k, v), DTYPES[dtype])
    close(ours(q, k, v), theirs(q, k, v), DTYPES[dtype])


def test_in_float64_it_is_what_it_should_be():
    q, k, v, _ = operands()
    q64, k64, v64 = (x.astype("float64") for x in (q, k, v))
    scores = jnp.einsum("btkgh,bskh->bkgts", q64.reshape(B, T, K, -1, H), k64)
    powers = jax.nn.softmax(scores / H**0.5, axis=-1)
    expected = jnp.einsum("bkgts,bskh->btkgh", powers, v64).reshape(q.shape)
    found = jl.dot_product_attention(q, k, v)
    assert np.abs(found - expected).max() < 1e-6


def test_float16_where_jax_has_none():
    q, k, v, ct = operands("float16", t=64)
    wide = [x.astype("float32") for x in (q, k, v)]
    expected, pull = jax.vjp(jax.nn.dot_product_attention, *wide)
    found, ours = jax.vjp(jax.jit(jl.dot_product_attention), q, k, v)
    close(found.astype("float32"), expected, 2e-3)
    gradients = [x.astype("float32") for x in ours(ct)]
    close(gradients, list(pull(ct.astype("float32"))), 4e-3)


def test_residual():
    q, k, v, _ = operands()
    found = jl.dot_product_attention(q, k, v, return_residual=True, is_causal=True)
    expected = jax.nn.dot_product_attention(
        q, k, v, return_residual=True, is_causal=True
    )
    close(found, expected, 3e-6)
    f = functools.partial(jl.dot_product_attention, return_residual=True, order="BNTH")
    assert f(*(x.swapaxes(1, 2) for x in (q, k, v)))[1].shape == (B, N, T)


def test_without_a_batch():
    q, k, v, _ = (x[0] for x in operands())
    found = jl.dot_product_attention(q, k, v, return_residual=True)
    close(found, jax.nn.dot_product_attention(q, k, v, return_residual=True), 3e-6)
    heads_first = jl.dot_product_attention(
        *(x.swapaxes(0, 1) for x in (q, k, v)), order="NTH"
    )
    close(heads_first.swapaxes(0, 1), found[0], 0)


@pytest.mark.parametrize(
    "order, other", [("BNTH", "BNTH"), ("BTNH", "BNTH"), ("TBNH", "NTBH")]
)
def test_orders_are_read_where_they_lie(order, other):
    q, k, v, ct = operands(s=T, t=64)
    to = ["BTNH".index(a) for a in order]
    kv = ["BTNH".index(a) for a in other]
    back, kv_back = ([o.index(a) for a in "BTNH"] for o in (order, other))

    def f(q, k, v):
        return jl.dot_product_attention(
            q, k, v, is_causal=True, order=order, key_value_order=other
        )

    placed = [q.transpose(to), k.transpose(kv), v.transpose(kv)]
    expected = jl.dot_product_attention(q, k, v, is_causal=True)
    close(f(*placed).transpose(back), expected, 0)
    pull = jax.vjp(f, *placed)[1]
    found = pull(ct.transpose(to))
    expected = jax.vjp(
        lambda *x: jl.dot_product_attention(*x, is_causal=True), q, k, v
    )[1](ct)
    wheres = (back, kv_back, kv_back)
    found = [g.transpose(axes) for g, axes in zip(found, wheres, strict=True)]
    close(found, list(expected), 0)
    hlo = compiled(lambda *x: (f(*x), jax.vjp(f, *x)[1](x[0])), *placed)
    assert kernels(hlo) >= 2 and not count("transpose", hlo) and not count("copy", hlo)


# --- transformations


def loss(attend, *x, **options):
    return jnp.sin(attend(*x, **options).astype("float32")).sum()


@pytest.mark.cpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(form, dtype):
    q, k, v, _ = operands(dtype)
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, f, **FORMS[form]), (0, 1, 2)))
        for f in (jl.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert "jax_layout_attention_backward" in ours.lower(q, k, v).as_text()
    close(ours(q, k, v), theirs(q, k, v), 2 * DTYPES[dtype])


@pytest.mark.parametrize(
    "shape, dtype",
    [((1, N, T, S), "float32"), ((B, 1, 1, S), "bfloat16"), ((1, N, 1, S), "float32")],
)
def test_gradient_by_a_bias(shape, dtype):
    q, k, v, _ = operands()
    bias = of_scores(*shape, kind=dtype)
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, f, is_causal=True), (0, 1, 2, 3)))
        for f in (jl.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert kernels(ours.lower(q, k, v, bias).compile().as_text()) == 2
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    close(ours(q, k, v, bias), theirs(q, k, v, bias), tolerance)


@pytest.mark.parametrize("t", [4, 20])
def test_gradients_where_a_bias_hides_whole_rows(t):
    q, k, v, _ = operands(t=t, s=40)
    q = q.at[:, 0].set(0)  # of equal scores powers are 1/S, however large the bias
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2, 3)))
        for f in (jl.dot_product_attention, jax.nn.dot_product_attention)
    )
    least = float(np.finfo(np.float32).min)
    for hidden, rows in ((-3e4, 1), (-1e9, 3), (-1e38, 3), (least, 3)):
        bias = of_scores(1, 1, t, 40).at[:, :, :rows].set(hidden)
        close(ours(q, k, v, bias), theirs(q, k, v, bias), 1e-5)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 1)])
@pytest.mark.parametrize("batch", [1, B])
def test_gradients_by_biases_that_are_mapped(dims, batch):
    q, k, v, _ = operands(t=9, s=20)
    bias = of_scores(batch, N, 9, 20)
    x = [
        a if d is None else jnp.stack([a, 2 * a, -a], d)
        for a, d in zip((q, bias), dims, strict=True)
    ]

    def gradients(attend):
        def each(q, bias):
            return jax.grad(functools.partial(loss, attend), 3)(q, k, v, bias)

        def of_all(q, bias):  # what all share has one gradient
            y = jax.vmap(lambda q, bias: attend(q, k, v, bias), dims)(q, bias)
            return jnp.sin(y).sum()

        return jax.jit(
            lambda q, bias: (
                jax.vmap(each, dims)(q, bias),
                jax.grad(of_all, 1)(q, bias),
            )
        )(*x)

    close(
        gradients(jl.dot_product_attention),
        gradients(jax.nn.dot_product_attention),
        1e-5,
    )


def test_cotangents_of_one_sequence_that_are_mapped():
    q, k, v, ct = operands(b=1, t=9, s=20)
    ours, theirs = (
        jax.jit(jax.vmap(jax.vjp(f, q, k, v)[1]))(jnp.stack([ct, 2 * ct]))
        for f in (jl.dot_product_attention, jax.nn.dot_product_attention)
    )
    close(ours, theirs, 1e-5)


def test_forward_mode_and_second_derivatives():
    q, k, v, ct = operands(t=9, s=11)
    for f, g in ((jl.dot_product_attention, jax.nn.dot_product_attention),):
        f, g = (functools.partial(x, is_causal=True) for x in (f, g))
        tangents = (ct, k + 1, v - 1)
        close(jax.jvp(f, (q, k, v), tangents), jax.jvp(g, (q, k, v), tangents), 1e-5)
        for outer in (jax.jvp, lambda h, x, t: jax.vjp(h, *x)[1](h(*x))):
            second = [
                outer(jax.grad(functools.partial(loss, h), (0, 1, 2)), (q, k, v),
                      tangents)
                for h in (f, g)
            ]  # fmt: skip
            close(*second, 1e-5)


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, None), (None, 3, 0)])
def test_vmap(dims):
    random = np.random.default_rng(0)
    shapes = [(B, 20, N, H), (B, 30, K, H), (B, 30, K, H)]
    q, k, v = (
        jnp.asarray(
            random.standard_normal(x if d is None else (*x[:d], 3, *x[d:])), "float32"
        )
        for x, d in zip(shapes, dims, strict=True)
    )
    lengths = jnp.array([7, 30], np.int32)

    def mapped(attend, options):
        def f(*x):
            gradients = jax.grad(functools.partial(loss, attend, **options), (0, 1, 2))
            return attend(*x, **options), gradients(*x)

        return jax.jit(jax.vmap(f, dims))

    for options in (
        {"key_value_seq_lengths": lengths},
        {"bias": of_scores(1, N, 20, 30), "mask": of_scores(B, 1, 1, 30, kind="bool")},
    ):
        ours = mapped(jl.dot_product_attention, options)
        assert kernels(ours.lower(q, k, v).compile().as_text()) == 2
        theirs = mapped(jax.nn.dot_product_attention, options)
        close(ours(q, k, v), theirs(q, k, v), 1e-5)


def test_remat_and_scan():
    q, k, v, _ = operands(s=T, n=K)

    def layers(attend):
        def layer(x, w):
            return x + attend(x * w, k, v, is_causal=True), None

        def f(x):
            ws = jnp.arange(3.0, dtype="float32")
            return jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, ws)[0]).sum()

        return jax.jit(jax.value_and_grad(f))

    close(
        layers(jl.dot_product_attention)(q),
        layers(jax.nn.dot_product_attention)(q),
        1e-4,
    )


@pytest.mark.cpu  # XLA:GPU fuses what eager calls round
def test_donation():
    q, k, v, _ = operands()
    expected = jl.dot_product_attention(q, k, v)
    f = jax.jit(jl.dot_product_attention, donate_argnums=(0,))
    close(f(q + 0, k, v), expected, 0)


# --- programs


@pytest.mark.cpu
@pytest.mark.parametrize("t", [512, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_scores_in_memory(t, dtype):
    q = jax.ShapeDtypeStruct((1, t, 8, 64), dtype)

    def with_gradients(q, k, v, ct):
        y, pull = jax.vjp(jl.dot_product_attention, q, k, v)
        return y, pull(ct)

    for f, given in ((jl.dot_product_attention, 3), (with_gradients, 4)):
        memory = jax.jit(f).lower(*[q] * given).compile().memory_analysis()
        wanted = memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert memory.temp_size_in_bytes < wanted / 10


@pytest.mark.parametrize("form", ["causal", "bias", "mask", "lengths"])
def test_sharded_by_batch_and_heads(mesh, form):
    q, k, v, ct = operands(b=4, k=2)
    options = dict(FORMS[form])
    for name, x in options.items():
        if getattr(x, "shape", (0,))[0] == B:
            options[name] = jnp.concatenate([x, x])

    def f(q, k, v, ct):
        attend = functools.partial(jl.dot_product_attention, **options)
        y, pull = jax.vjp(attend, q, k, v)
        return y, pull(ct)

    expected = jax.jit(f)(q, k, v, ct)
    spread = [
        jax.device_put(x, NamedSharding(mesh, P("a", None, "b"))) for x in (q, k, v, ct)
    ]
    program = jax.jit(f).lower(*spread).compile()
    hlo = program.as_text()
    assert kernels(hlo) == 2 and not collectives(hlo)
    close(program(*spread), expected, 1e-5)


def test_gradients_of_what_devices_share(mesh):
    q, k, v, ct = operands(b=4, k=1, t=9, s=20)
    bias = of_scores(1, 1, 9, 20)

    def f(q, k, v, bias, ct):
        return jax.vjp(jl.dot_product_attention, q, k, v, bias)[1](ct)

    expected = jax.jit(f)(q, k, v, bias, ct)
    places = (P("a", None, "b"), P("a"), P("a"), P(), P("a", None, "b"))
    spread = [
        jax.device_put(x, NamedSharding(mesh, place))
        for x, place in zip((q, k, v, bias, ct), places, strict=True)
    ]
    program = jax.jit(f).lower(*spread).compile()
    assert kernels(program.as_text()) == 2
    close(program(*spread), expected, 1e-5)


@pytest.mark.parametrize("mesh", [AxisType.Auto], indirect=True)
def test_keys_that_devices_cannot_share_evenly(mesh):
    q, k, v, _ = operands(t=9, s=42)

    def f(q, k, v):
        there = NamedSharding(mesh, P(None, "a"))
        k, v = (jax.lax.with_sharding_constraint(2 * x, there) for x in (k, v))
        return jl.dot_product_attention(q, k, v)

    expected = jl.dot_product_attention(q, 2 * k, 2 * v)
    close(jax.jit(f)(q, k, v), expected, 1e-5)


# Along axes that are explicit, jax's own function is ambiguous.
@pytest.mark.parametrize("mesh", [AxisType.Auto], indirect=True)
@pytest.mark.parametrize("form", ["plain", "lengths", "bias", "mask"])
def test_sharded_by_keys(mesh, form):
    q, k, v, ct = operands(t=9, s=40)
    options = {
        "plain": {},
        "lengths": {"key_value_seq_lengths": jnp.array([3, 27], np.int32)},
        "bias": {"bias": of_scores(1, 1, 9, 40).at[0, 0, 3].set(-1e9)},
        "mask": {"mask": of_scores(B, 1, 9, 40, kind="bool").at[0, 0, 3].set(False)},
    }[form]

    def f(q, k, v, ct):
        attend = functools.partial(
            jl.dot_product_attention, return_residual=True, **options
        )
        y, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
        return y, lse, pull(ct)

    expected = jax.jit(f)(q, k, v, ct)
    places = (P("b"), P("b", "a"), P("b", "a"), P("b"))
    spread = [
        jax.device_put(x, NamedSharding(mesh, place))
        for x, place in zip((q, k, v, ct), places, strict=True)
    ]
    program = jax.jit(f).lower(*spread).compile()
    hlo = program.as_text()
    assert kernels(hlo) == 2 and not count("all-gather", hlo)
    close(program(*spread), expected, 1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float64"},
        {"h": 264},
        {"order": "BTHN"},
        {"window": (-2, 3)},
        {"implementation": "xla"},
    ],
    ids=str,
)
def test_what_has_no_kernel_is_jax(change):
    change = dict(change)
    order, window = change.pop("order", "BTNH"), change.pop("window", None)
    implementation = change.pop("implementation", None)
    q, k, v, _ = operands(**change)
    options = {"local_window_size": window, "implementation": implementation}
    expected = jax.nn.dot_product_attention(q, k, v, **options)
    to = ["BTNH".index(a) for a in order]
    back = [order.index(a) for a in "BTNH"]

    def f(*x):
        x = (a.transpose(to) for a in x)
        return jl.dot_product_attention(*x, order=order, **options).transpose(back)

    assert kernels(compiled(f, q, k, v)) == 0
    close(f(q, k, v), expected, 1e-6)


def test_a_scale_that_is_traced():
    q, k, v, _ = operands()
    found = jax.jit(lambda s: jl.dot_product_attention(q, k, v, scale=s))(0.3)
    close(found, jl.dot_product_attention(q, k, v, scale=0.3), 3e-6)


@pytest.mark.cpu
def test_the_tables_may_choose_jax():
    q, k, v, ct = operands()

    def program(attend):
        def f(q, k, v):
            return jax.vjp(lambda *x: attend(*x, is_causal=True), q, k, v)[1](ct)

        return jax.jit(f).lower(q, k, v).as_text()

    assert "attention_backward" in program(jl.dot_product_attention)
    try:
        jl.use_choices("lax")
        assert program(jl.dot_product_attention) == program(
            jax.nn.dot_product_attention
        )
    finally:
        jl.use_choices(None)


# --- errors


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"key": (B, S, 4, H)}, ValueError, "heads"),
        ({"key": (B, S, K, H + 1)}, ValueError, "features"),
        ({"key": (B + 1, S, K, H)}, ValueError, "batch"),
        ({"value": (B, S + 1, K, H)}, ValueError, "value"),
        ({"query": (T,)}, ValueError, "query"),
        ({"mask": jnp.ones((B, 1, T, S))}, TypeError, "mask"),
        ({"mask": jnp.ones((B, 1, T, 7), bool)}, ValueError, "mask"),
        ({"bias": jnp.ones((B, N, 3, S))}, ValueError, "bias"),
        ({"query_seq_lengths": jnp.ones(3, np.int32)}, ValueError, "query_seq_lengths"),
        (
            {"key_value_seq_lengths": jnp.ones(B, np.int64)},
            ValueError,
            "key_value_seq_lengths",
        ),
        (
            {"key_value_seq_lengths": jnp.array([3, S + 1], np.int32)},
            ValueError,
            "key_value_seq_lengths",
        ),
        ({"order": "BTNX"}, ValueError, "order"),
        ({"key_value_order": "BTN"}, ValueError, "key_value_order"),
        ({"order": "TNH"}, ValueError, "the axis B"),
        ({"dtype": "bfloat16"}, TypeError, "query"),
    ],
    ids=str,
)
def test_errors(change, error, words):
    q, k, v, _ = operands()
    change = dict(change)
    if "dtype" in change:
        q = q.astype(change.pop("dtype"))
    if "query" in change:
        q = jnp.zeros(change.pop("query"), q.dtype)
    if "key" in change:
        k = v = jnp.zeros(change.pop("key"), k.dtype)
    if "value" in change:
        v = jnp.zeros(change.pop("value"), v.dtype)
    with pytest.raises(error, match=f"^dot_product_attention: .*{words}"):
        jl.dot_product_attention(q, k, v, **change)
