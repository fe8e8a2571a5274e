# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of our products on an H100, compiled without one."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jax_layout as jl
from h100 import compiled, moved, products
from hlo import collectives, count, kernels
from jax_layout.choices import forced
from jax_layout.explain.hlo import parse, traffic
from jax_layout.measured import Work
from jax_layout.tune.table import text

BFLOAT16 = {
    # spec: shapes of the operands
    "bshd,bthd->bhst": ((8, 512, 16, 64), (8, 512, 16, 64)),
    "bhst,bthd->bshd": ((8, 16, 512, 512), (8, 512, 16, 64)),
    "bsm,mhd->bhsd": ((8, 512, 1024), (1024, 16, 64)),
    "bsm,mhd->bshd": ((8, 512, 1024), (1024, 16, 64)),
    "bsm,nm->bsn": ((8, 512, 1024), (4096, 1024)),
    "bsn,bsm->nm": ((8, 512, 4096), (8, 512, 1024)),
    "bsn,nm->bsm": ((8, 512, 4096), (4096, 1024)),
}
BFLOAT16_HEADS = BFLOAT16["bshd,bthd->bhst"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", BFLOAT16)
def test_an_einsum_is_one_call(spec, dtype):
    hlo = compiled(functools.partial(jl.einsum, spec), *BFLOAT16[spec], dtype=dtype)
    assert kernels(hlo) == 1 and moved(hlo) == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transposes_are_read_and_written_through(dtype):
    shapes = (512, 256), (1024, 256)
    turned = lambda x, w: jl.matmul(x, w.T)  # noqa: E731
    both = lambda x, w: jax.vjp(turned, x, w)[1](jnp.ones((512, 1024), dtype))  # noqa: E731
    hlo = compiled(turned, *shapes, dtype=dtype)
    assert kernels(hlo) == 1 and moved(hlo) == {}
    hlo = compiled(both, *shapes, dtype=dtype)
    assert kernels(hlo) == 2 and count("transpose", hlo) == 0
    with forced("lax"):  # XLA's own read through them, too
        hlo = compiled(lambda x, w: turned(x, w), *shapes, dtype=dtype)
    assert (kernels(hlo), products(hlo), moved(hlo)) == (0, 1, {})


@pytest.mark.parametrize("m", ["mk", "km"])
@pytest.mark.parametrize("n", ["kn", "nk"])
@pytest.mark.parametrize("y", ["mn", "nm"])
@pytest.mark.parametrize("batch", ["", "b"])
def test_xla_moves_nothing_for_matrices(batch, m, n, y):
    """So ours have to be faster by a table, as NT of bfloat16 are on an H100."""
    extents = {"b": 8, "m": 512, "n": 1024, "k": 256}
    a, b, y = (batch + term for term in (m, n, y))
    shapes = (tuple(extents[i] for i in term) for term in (a, b))
    hlo = compiled(functools.partial(jnp.einsum, f"{a},{b}->{y}"), *shapes)
    assert (kernels(hlo), products(hlo), moved(hlo)) == (0, 1, {})


@pytest.mark.parametrize(
    ("case", "sizes", "f", "shapes"),
    [
        ("NN", (512, 1024, 256, 1), "mk,kn->mn", ((512, 256), (256, 1024))),
        ("NT inside", (512, 512, 64, 128), "bshd,bthd->bhst", BFLOAT16_HEADS),
        ("NT bias", (512, 128, 256, 1), jl.linear, ((512, 256), (128, 256), (128,))),
        ("NN beta", (64, 32, 16, 1), jl.addmm, ((64, 32), (64, 16), (16, 32))),
    ],
)
@pytest.mark.usefixtures("by_default")
def test_a_table_decides(tmp_path, case, sizes, f, shapes):
    given = (f,) if callable(f) else (jl.einsum, f)
    for ratio in (0.9, 1.2):
        path = tmp_path / f"{ratio}.json"
        path.write_text(
            text({Work(f"cuda gemm bfloat16 {case}", sizes): {"ours": ratio}})
        )
        jl.use_choices(path)
        fresh = functools.partial(*given)  # jax keeps what it lowered, by function
        assert kernels(compiled(fresh, *shapes)) == (ratio > 1)


@pytest.mark.usefixtures("by_default")
def test_what_no_table_knows_is_left_to_xla():
    assert kernels(compiled(jl.addmm, *[(64, 64)] * 3, dtype="float64")) == 0


@pytest.mark.parametrize("spec", list(BFLOAT16)[:3])
def test_what_the_count_above_sees_in_plain_jax(spec):
    hlo = compiled(functools.partial(jnp.einsum, spec), *BFLOAT16[spec])
    assert kernels(hlo) == 0 and moved(hlo) != {}


def attention(einsum, x, wq, wk, wv, wo):
    q, k, v = (einsum("bsm,mhd->bshd", x, w) for w in (wq, wk, wv))
    p = jax.nn.softmax(einsum("bshd,bthd->bhst", q, k))
    return einsum("bshd,hdm->bsm", einsum("bhst,bthd->bshd", p, v), wo)


ATTENTION = ((4, 512, 1024), *[(1024, 16, 64)] * 3, (16, 64, 1024))


def test_attention_moves_nothing():
    """QKV and output projections, scores and their use: six calls and a softmax."""
    hlo = compiled(functools.partial(attention, jl.einsum), *ATTENTION)
    assert kernels(hlo) == products(hlo) == 6
    assert count("transpose", hlo) == count("copy", hlo) == 0
    assert count("concatenate", hlo) == count("slice", hlo) == 0


def test_what_xla_would_write_beside_products_of_heads():
    """Why those are ours though XLA transposes nothing for one of them alone."""

    def projections(x, *weights):
        return [jnp.einsum("bsm,mhd->bshd", x, w) for w in weights]

    hlo = compiled(projections, *ATTENTION[:4])
    assert products(hlo) == count("concatenate", hlo) == 1 and count("slice", hlo) == 3
    hlo = compiled(functools.partial(attention, jnp.einsum), *ATTENTION)
    assert count("concatenate", hlo) == 1 and count("transpose", hlo) > 0


def test_attention_gradients_move_nothing():
    def gradient(*args):
        loss = lambda *args: attention(jl.einsum, *args).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, range(5))(*args)

    hlo = compiled(gradient, *ATTENTION)
    assert kernels(hlo) == products(hlo) == 17  # six but for the last, twelve backward
    assert count("transpose", hlo) == count("copy", hlo) == 0


LAYER = ((4096, 1024), (4096, 1024), (4096,))  # x, weight, bias


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_linear_with_its_epilogue_is_one_call(activation):
    hlo = compiled(functools.partial(jl.linear, activation=activation), *LAYER)
    assert kernels(hlo) == 1 and moved(hlo) == {}


def test_gelu_of_float64_is_xlas():
    """cuBLASLt's is of float32's precision."""
    shapes = (512, 256), (128, 256), (128,)
    f = functools.partial(jl.linear, activation="gelu")
    hlo = compiled(f, *shapes, dtype="float64")
    assert kernels(hlo) == 1 and count("tanh", hlo) == 1
    hlo = compiled(f, *shapes, dtype="float32")
    assert kernels(hlo) == 1 and count("tanh", hlo) == 0


def step(f, x, w, b, ct):
    y, vjp = jax.vjp(f, x, w, b)
    return y, vjp(ct)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_linear_forward_and_backward_is_three_calls(activation):
    """The bias's gradient is of one of them."""
    f = functools.partial(jl.linear, activation=activation)
    hlo = compiled(functools.partial(step, f), *LINEAR)
    assert products(hlo) == kernels(hlo) == 3
    assert count("transpose", hlo) == count("copy", hlo) == 0
    assert count("reduce", hlo) == 0 < count("reduce", plain_linear(activation))


@pytest.mark.usefixtures("by_default")
def test_sums_are_xlas_where_no_table_has_them_faster():
    f = functools.partial(jl.linear, activation="relu")
    hlo = compiled(functools.partial(step, f), *LINEAR)
    assert products(hlo) == 3 and count("transpose", hlo) == 0
    assert count("reduce", hlo) == count("reduce", plain_linear("relu"))


LINEAR = (4096, 1024), (4096, 1024), (4096,), (4096, 4096)


def plain_linear(activation):
    def plain(x, w, b):
        return getattr(jax.nn, activation)(x @ w.T + b)

    return compiled(functools.partial(step, plain), *LINEAR)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_of_xlas_is_no_more_than_plain_jax(activation):
    """XLA rounds a product that it adds to where it makes it, and once."""
    f = functools.partial(jl.linear, activation=activation)
    with forced("lax"):
        ours = compiled(functools.partial(step, f), *LINEAR)
    plain = plain_linear(activation)
    assert kernels(ours) == 0 and traffic_of(ours) <= traffic_of(plain)


def test_an_added_product_of_xlas_is_no_more_than_plain_jax():
    shapes = (2048, 1024), (1024, 4096), (2048, 4096)
    with forced("lax"):
        ours = compiled(functools.partial(jl.gemm, beta=2), *shapes)
    plain = compiled(lambda a, b, c: a @ b + 2 * c, *shapes)
    assert kernels(ours) == 0 and traffic_of(ours) <= traffic_of(plain)


def traffic_of(hlo):
    """Bytes that the instructions of a program read and write."""
    module = parse(hlo)
    entry = module.computations[module.entry]
    return sum(traffic(module, module.entry, i) for i in entry)


def test_a_donated_addend_is_accumulated_into():
    hlo = compiled(
        jl.addmm, (1024, 1024), (1024, 512), (512, 1024), dtype="float32", donate=0
    )
    assert kernels(hlo) == 1 and moved(hlo) == {}
    assert "output_to_operand_aliasing" in hlo and "input_output_alias" in hlo


def test_a_carried_addend_is_accumulated_into():
    def f(c, a, b):
        return jax.lax.scan(lambda c, x: (jl.addmm(c, *x), None), c, (a, b))[0]

    shapes = (1024, 1024), (8, 1024, 512), (8, 512, 1024)
    hlo = compiled(f, *shapes, dtype="float32", donate=0)
    assert kernels(hlo) == 1 and "output_to_operand_aliasing" in hlo
    assert not re.search(r"f32\[1024,1024\]\S* copy\(", hlo)  # counters may be


def test_rows_and_columns_over_four_devices():
    f = functools.partial(jl.linear, activation="gelu")
    hlo = compiled(f, *LAYER, spec="a", devices=4)  # all sharded over their first axis
    assert kernels(hlo) == 1
    assert set(collectives(hlo)) <= {"all-gather", "all-to-all"}  # one side must move


@pytest.mark.parametrize(
    ("spec", "a", "b", "dtype"),
    [
        ("mk,kn->mn", (64, 64), (64, 64), "int8"),  # cuBLASLt wants k contiguous
        ("mk,nk->mn", (64, 64), (64, 64), "float8_e5m2"),
        ("mk,kn->mn", (64, 64), (64, 64), "float8_e4m3fn"),
    ],
)
def test_what_cublaslt_lacks_is_left_to_xla(spec, a, b, dtype):
    wide = jnp.int32 if dtype == "int8" else jnp.float32
    f = functools.partial(jl.einsum, spec, preferred_element_type=wide)
    assert kernels(compiled(f, a, b, dtype=dtype)) == 0


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", "float64"])
def test_other_types_run_on_cublaslt(dtype):
    wide = {"int8": jnp.int32, "float8_e4m3fn": jnp.float32}.get(dtype)
    f = functools.partial(jl.einsum, "mk,nk->mn", preferred_element_type=wide)
    hlo = compiled(f, (64, 64), (32, 64), dtype=dtype)
    assert kernels(hlo) == 1 and moved(hlo) == {}


@pytest.mark.parametrize(("precision", "fast"), [(None, "true"), ("high", "false")])
def test_sums_of_8_bit_floats_are_fast_by_default(precision, fast):
    f = functools.partial(
        jl.einsum,
        "mk,nk->mn",
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    hlo = compiled(f, (64, 64), (32, 64), dtype="float8_e4m3fn")
    assert kernels(hlo) == 1 and f"tf32 = {fast}" in hlo


FLOAT8 = jnp.float8_e4m3fn, jnp.float8_e5m2


def scaled(result, a, b, *scales):
    names = ("scale_a", "scale_b", "scale_result")
    return jl.gemm(
        a.astype(FLOAT8[0]),
        b.astype(FLOAT8[1]),
        transpose_b=True,
        preferred_element_type=result,
        **dict(zip(names, scales, strict=False)),
    )


@pytest.mark.parametrize("result", [*FLOAT8, jnp.bfloat16], ids=str)
def test_scales_are_operands_of_one_call(result):
    shapes = ((512, 1024), (2048, 1024), (), (), ())
    hlo = compiled(functools.partial(scaled, result), *shapes, dtype=jnp.float32)
    assert kernels(hlo) == 1 and count("dot", hlo) == 0
    (call,) = re.findall(r'custom-call\(([^)]*)\), custom_call_target="jax_layout', hlo)
    assert len(call.split(", ")) == (5 if result in FLOAT8 else 4)


def test_scaled_products_of_parts_of_a_sum():
    def f(a, b):
        return scaled(jnp.bfloat16, a, b, jnp.float32(2))

    shapes = ((512, 1024), (2048, 1024))
    hlo = compiled(f, *shapes, dtype=jnp.float32, spec=(None, "a"), devices=4)
    assert kernels(hlo) == 1 and collectives(hlo) == {"all-reduce": 1}
