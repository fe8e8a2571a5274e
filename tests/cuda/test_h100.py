# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of our operators on an H100, compiled without one."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_layout as jl
from h100 import compiled, moved
from hlo import collectives, count, kernels


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 2, 3, 1), (3, 2, 1, 0)], ids=str)
def test_a_permute_is_one_kernel(axes, dtype):
    hlo = compiled(lambda x: jl.permute(x, axes), (8, 64, 16, 32), dtype=dtype)
    assert kernels(hlo) == 1 and moved(hlo) == {}


def test_the_same_transpose_in_lax_is_a_fusion_of_its_own():
    """What the count above would see if XLA did the work."""
    hlo = compiled(lambda x: jnp.transpose(x, (0, 2, 3, 1)), (8, 64, 16, 32))
    assert kernels(hlo) == 0 and moved(hlo) != {}


def test_permutes_follow_each_other_without_a_copy():
    def f(x):
        heads = jl.permute(x.reshape(8, 64, 16, 32), (0, 2, 1, 3))
        return jl.permute(heads, (0, 1, 3, 2)), jl.permute(heads, (2, 0, 1, 3))

    hlo = compiled(f, (8, 64, 512))
    assert kernels(hlo) == 3 and moved(hlo) == {}


def test_what_moves_nothing_is_a_bitcast():
    hlo = compiled(lambda x: jl.permute(x, (1, 0, 3, 2)), (1, 64, 1, 32))
    assert kernels(hlo) == 0 and count("transpose", hlo) == 0


def test_grad_and_vmap_are_one_kernel_each():
    f = functools.partial(jl.permute, axes=(1, 2, 0))
    hlo = compiled(jax.vmap(f, 1, 1), (32, 8, 64, 16))
    assert kernels(hlo) == 1 and moved(hlo) == {}
    hlo = compiled(lambda x, ct: jax.vjp(f, x)[1](ct), (32, 64, 16), (64, 16, 32))
    assert kernels(hlo) == 1 and moved(hlo) == {}


def test_four_devices_need_no_collective():
    f = functools.partial(jl.permute, axes=(2, 0, 1))
    hlo = compiled(f, (32, 64, 48), spec="a", devices=4)
    assert kernels(hlo) == 1 and moved(hlo) == {} and collectives(hlo) == {}
