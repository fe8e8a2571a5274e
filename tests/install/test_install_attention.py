# SPDX-License-Identifier: Apache-2.0
"""dot, softmax, dot of programs as they are, lowered to one call of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from hlo import compiled
from jax_layout import _backends

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the extension module is missing"
)
random = np.random.default_rng(0)
Q, K, V = (jnp.asarray(random.normal(size=(2, t, 4, 8)), np.float32) for t in (5, 7, 7))


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def layers(q, k, v):
    return jax.lax.scan(lambda q, _: (q + attend(q, k, v), None), q, None, length=2)[0]


def learns(q, k, v):
    return jax.grad(lambda q: (attend(q, k, v) ** 2).sum())(q)


@pytest.mark.parametrize("f, calls", [(attend, 1), (layers, 1), (learns, 2)])
def test_is_one_call(f, calls):
    expected = jax.jit(f)(Q, K, V)
    with jl.installed(["dot_general"]) as record:
        f = jax.jit(f)
        np.testing.assert_allclose(f(Q, K, V), expected, rtol=1e-4, atol=1e-5)
        hlo = compiled(f, Q, K, V)
    assert hlo.count('custom_call_target="jax_layout_attention') == calls
    found = [each.runs for each, _ in record.operations() if "attention" in each.runs]
    assert found == ["attention", "attention_backward"][:calls]
    assert "jax_layout_attention" not in compiled(f, Q, K, V)


def test_is_left_alone_where_it_is_not_asked_for():
    with jl.installed(["transpose"]):
        assert "jax_layout_attention" not in compiled(attend, Q, K, V)
    with jl.installed():
        exported = jax.export.export(jax.jit(attend))(Q, K, V)
    assert "jax_layout" not in exported.mlir_module()
