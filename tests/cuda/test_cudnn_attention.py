# SPDX-License-Identifier: Apache-2.0
"""What attention is lowered to for GPUs, where neither they nor cuDNN are here."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import jax_layout as jl
from jax_layout import _backends, _compat

if not _backends.available("cuda"):
    pytest.skip("jax_layout is built without CUDA", allow_module_level=True)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    monkeypatch.setattr(_compat, "has_cudnn_attention", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def lowered(f, *shapes, dtype="bfloat16"):
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(f).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


QUERY, KEY = (2, 64, 8, 32), (2, 64, 2, 32)
FORWARD = "@__cudnn$fmhaSoftmax("
BACKWARD = "@__cudnn$fmhaSoftmaxBackward("


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_call_is_cudnns(causal, dtype):
    f = functools.partial(jl.dot_product_attention, is_causal=causal)
    text = lowered(f, QUERY, KEY, KEY, dtype=dtype)
    assert text.count(FORWARD) == 1 and "stablehlo.dot_general" not in text
    assert ("CAUSAL" in text) == causal


def test_gradients_are_cudnns():
    def loss(q, k, v):
        return jl.dot_product_attention(q, k, v).astype("float32").sum()

    text = lowered(jax.value_and_grad(loss, (0, 1, 2)), QUERY, KEY, KEY)
    assert text.count(BACKWARD) == 1 and "stablehlo.dot_general" not in text


def test_gradients_of_odd_lengths_are_xlas():
    def loss(q, k, v):
        return jl.dot_product_attention(q, k, v).astype("float32").sum()

    odd = (2, 77, 2, 32)
    text = lowered(jax.value_and_grad(loss, (0, 1, 2)), QUERY, odd, odd)
    assert "cudnn" not in text and "stablehlo.dot_general" in text


@pytest.mark.parametrize("order", ["BTNH", "BNTH"])
def test_operands_stay_where_they_are(order):
    f = functools.partial(jl.dot_product_attention, order=order)
    q, k = ([dict(zip("BTNH", x, strict=True))[i] for i in order] for x in (QUERY, KEY))
    text = lowered(f, tuple(q), tuple(k), tuple(k))
    before = text.split(FORWARD)[0]
    assert FORWARD in text and "stablehlo.transpose" not in before


@pytest.mark.parametrize(
    ("shape", "dtype", "given"),
    [
        (QUERY, "float32", {}),
        ((2, 64, 8, 36), "bfloat16", {}),
        ((2, 64, 8, 256), "bfloat16", {}),
        (QUERY, "bfloat16", {"mask": jnp.ones((64, 64), bool)}),
        (QUERY, "bfloat16", {"bias": jnp.ones((64, 64), jnp.bfloat16)}),
        (QUERY, "bfloat16", {"key_value_seq_lengths": jnp.ones(2, jnp.int32)}),
        (QUERY, "bfloat16", {"local_window_size": 3}),
        ((2, 16, 8, 32), "bfloat16", {"is_causal": True}),
    ],
)
def test_what_cudnn_does_otherwise_is_xlas(shape, dtype, given):
    f = functools.partial(jl.dot_product_attention, **given)
    key = (2, 64, 2, shape[-1])
    text = lowered(f, shape, key, key, dtype=dtype)
    assert "cudnn" not in text and "stablehlo.dot_general" in text


def test_forward_mode_and_second_derivatives_stay_plain():
    def f(q, k, v):
        return jl.dot_product_attention(q, k, v).astype("float32").sum()

    def moved(q, k, v):
        return jax.jvp(jax.grad(f), (q, k, v), (q, k, v))

    text = lowered(moved, QUERY, KEY, KEY)
    assert "stablehlo.dot_general" in text


def test_without_a_library_a_gpu_has_no_kernel(monkeypatch):
    monkeypatch.setattr(_compat, "has_cudnn_attention", lambda: False)
    text = lowered(jl.dot_product_attention, QUERY, KEY, KEY)
    assert "cudnn" not in text
