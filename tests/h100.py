# SPDX-License-Identifier: Apache-2.0
"""Compiles for an H100 without one. Counts only: nothing runs, so no timings.

Needs the CUDA plugin of jax and our CUDA backend; `.ci/run` has both.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlo import count, kernels
from jax_layout import _backends

pytest.importorskip("jax_plugins.xla_cuda13")
if not _backends.available("cuda"):
    pytest.skip("jax_layout is built without CUDA", allow_module_level=True)


@functools.cache
def topology(shape: str):
    """Devices that are not there: slices x hosts x devices of a host."""
    target = (
        Path(_backends.__file__).parent / "explain" / "h100_sxm.txtpb"
    ).read_text()
    return topologies.get_topology_desc(
        "h100", platform="cuda", target_config=target, topology=shape
    ).devices


@functools.cache
def mesh(devices: int = 1) -> Mesh:
    return Mesh(np.array(topology(f"1x1x{devices}")), ("a",))


# On a device XLA times cuBLAS and Triton; without one it would take Triton, whose
# products look like any fusion. Layouts are the same.
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def compiled(f, *shapes, dtype=jnp.bfloat16, spec=(), devices=1, donate=()):
    sharding = NamedSharding(mesh(devices), P(*spec))
    avals = [jax.ShapeDtypeStruct(s, dtype, sharding=sharding) for s in shapes]
    lowered = jax.jit(f, donate_argnums=donate).trace(*avals).lower()
    return lowered.compile(CUBLAS).as_text()


def products(hlo):
    """Calls of ours, and XLA's of cuBLAS."""
    return kernels(hlo) + len(re.findall(r'custom_call_target="__cublas', hlo))


def moved(hlo):
    """Instructions that write an array out again in another order."""
    return {op: n for op in ("transpose", "copy", "fusion") if (n := count(op, hlo))}
