# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of entry and exit formats on an H100, compiled without one."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from h100 import mesh
from hlo import count
from nets import make, resnet18, unet


def shapes(tree):
    sharding = NamedSharding(mesh(), P())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding), tree
    )


def moved(compiled):
    hlo = compiled.as_text()
    return count("transpose", hlo) + count("copy", hlo)


def planned(f, *args):
    plan = jl.plan_layout(f, *args, platform="cuda")
    return plan, plan.jit().lower(*args).compile()


def test_a_planned_resnet_moves_nothing():
    x = jax.ShapeDtypeStruct((8, 3, 224, 224), jnp.bfloat16)
    args = shapes((make(resnet18, x), x))
    plan, ours = planned(resnet18, *args)
    theirs = jax.jit(resnet18).lower(*args).compile()
    assert moved(ours) == 0 < moved(theirs)
    assert any(path.startswith("[0]") for path in plan.formats)
    loaded = jl.load_plan(plan.to_json(), resnet18, *args)
    assert moved(loaded.jit().lower(*args).compile()) == moved(ours)


def test_a_planned_gradient():
    """Copies that are left: zeros for a scatter, and results with the same value."""
    x = jax.ShapeDtypeStruct((8, 3, 224, 224), jnp.bfloat16)
    args = shapes((make(resnet18, x), x))

    def loss(p, x):
        return (resnet18(p, x).astype(jnp.float32) ** 2).sum()

    hlo = planned(jax.grad(loss), *args)[1].as_text()
    assert count("transpose", hlo) == 0
    assert count("copy", hlo) <= 4


def test_functions_are_left_to_xla():
    x = jax.ShapeDtypeStruct((2, 3, 32, 32), jnp.bfloat16)
    args = shapes((make(unet, x), x))
    report = jl.optimize_layout(unet, platform="cuda").layout_report(*args)
    assert not report.optimized
