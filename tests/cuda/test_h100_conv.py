# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of our convolutions on an H100, compiled without one: cuDNN calls."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_layout as jl
from h100 import compiled
from hlo import count

X, W = (8, 64, 28, 28), (64, 64, 3, 3)


def cudnn(hlo):
    return hlo.count('custom_call_target="__cudnn$conv')


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format", ["NCHW", "NHWC"])
def test_three_passes_are_three_cudnn_calls(format, dtype):
    def step(x, w, ct):
        x = jl.with_memory_format(x, format)
        y, vjp = jax.vjp(functools.partial(jl.conv, padding=1, stride=2), x, w)
        return y, vjp(ct)

    hlo = compiled(step, X, W, (8, 64, 14, 14), dtype=dtype)
    assert cudnn(hlo) == 3 and count("convolution", hlo) == 0


def test_transposed_convolutions_are_cudnn_calls_too():
    f = functools.partial(jl.conv_transpose, stride=2, padding=1, output_padding=1)
    hlo = compiled(f, X, W)
    assert cudnn(hlo) == 1 and count("reverse", hlo) == 0

    def as_lax(x, w):
        return jl.conv_general_dilated(
            x, w, (1, 1), [(1, 2), (1, 2)], lhs_dilation=(2, 2)
        )

    assert cudnn(compiled(as_lax, X, W)) == 1


def test_bias_and_relu_join_the_call():
    f = functools.partial(jl.conv, padding=1, activation="relu")
    hlo = compiled(f, X, W, (64,), dtype=jnp.float16)
    assert 'custom_call_target="__cudnn$convBiasActivationForward"' in hlo
