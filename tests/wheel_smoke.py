# SPDX-License-Identifier: Apache-2.0
"""A bit of everything, run by tests/wheel.py where only the wheel is installed."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_layout as jl

key = jax.random.key(0)
x = jax.random.normal(key, (8, 3, 64, 64))
m = jax.random.normal(key, (96, 80))


def check(what, found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=what)
    print("ok", what)


here = Path(jl.__file__).resolve().parent
assert here.is_relative_to(Path(sys.prefix).resolve()), here
assert (here / "py.typed").exists() and list(here.glob("_cpu.*.so"))
assert list(here.glob("tables/*.json")), "the tables of choices are missing"

jl.use_choices("kernels")  # however fast they are here
hlo = jax.jit(lambda x: jl.permute(x, (0, 2, 3, 1))).lower(x).compile().as_text()
assert "jax_layout_permute" in hlo, "the kernels are not used"
check("permute", jl.permute(x, (0, 2, 3, 1)), jnp.transpose(x, (0, 2, 3, 1)))
check("einsum", jl.einsum("ij,kj->ki", m, m), jnp.einsum("ij,kj->ki", m, m))
w = jax.random.normal(key, (16, 3, 3, 3))
check("conv", jl.conv(x, w), jax.lax.conv(x, w, (1, 1), "VALID"))
check(
    "gradient",
    jax.grad(lambda m: (jl.mm(m, m.T) ** 2).sum())(m),
    jax.grad(lambda m: ((m @ m.T) ** 2).sum())(m),
)
i = jnp.array([3, -1, 3])
check("index_select", jl.index_select(m, 0, i), m[i])
check("index_add", jl.index_add(m, 0, i, m[:3]), m.at[i].add(m[:3]))
y = jl.with_memory_format(x, jl.channels_last)
assert jl.is_contiguous(y, jl.channels_last), jl.memory_format(y)
print("ok memory formats of", jl.__version__)
