# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of our operators on an H100, compiled without one.

Needs the CUDA plugin of jax and our CUDA backend; `.ci/run` has both. Counts
only: nothing runs, so there are no timings.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from hlo import collectives, count, kernels
from jax_layout import _backends

pytest.importorskip("jax_plugins.xla_cuda13")
pytestmark = pytest.mark.skipif(
    not _backends.available("cuda"), reason="jax_layout is built without CUDA"
)


@functools.cache
def mesh(devices: int = 1) -> Mesh:
    target = Path(__file__).with_name("h100_sxm.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "h100", platform="cuda", target_config=target, topology=f"1x1x{devices}"
    )
    return Mesh(np.array(topology.devices), ("a",))


def compiled(f, *shapes, dtype=jnp.bfloat16, spec=(), devices=1):
    sharding = NamedSharding(mesh(devices), P(*spec))
    avals = [jax.ShapeDtypeStruct(s, dtype, sharding=sharding) for s in shapes]
    return jax.jit(f).trace(*avals).lower().compile().as_text()


def moved(hlo):
    """Instructions that write an array out again in another order."""
    return {op: n for op in ("transpose", "copy", "fusion") if (n := count(op, hlo))}


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
