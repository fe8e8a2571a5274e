# SPDX-License-Identifier: Apache-2.0
"""Reports of functions of arrays of ones and the same dtype."""

import types

import jax
import jax.numpy as jnp

import jax_layout as jl


def explained(f, *shapes, dtype=jnp.float32, **options) -> jl.Report:
    report = jl.explain(f, **options)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    assert jl.Report.from_json(report.to_json()) == report
    return report


def optimised(f, instead):
    """`instead`, as `jl.optimize_layout(f)` returns a function."""

    def wrapper(*args):
        return instead(*args)

    home = {"__name__": "jax_layout.optimize.optimize"}
    made = types.FunctionType(wrapper.__code__, home, "f", None, wrapper.__closure__)
    made.__wrapped__ = f
    return made
