# SPDX-License-Identifier: Apache-2.0
"""Every use of a private jax module, so that jax's churn has one home."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core, dispatch, sharding_impls
from jax._src.lax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

ShardingTypeError = core.ShardingTypeError
apply_primitive = dispatch.apply_primitive


def needs_devices_to_lower(primitive: Primitive) -> None:
    """Has jax resolve the devices before it lowers the primitive.

    Without it a `custom_partitioning` inside the lowering rule would not know
    the device assignment.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which x varies, inside `jax.shard_map`."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def is_unreduced(aval: Any) -> bool:
    """Whether the value still owes a sum over some mesh axis."""
    spec = aval.sharding.spec
    if getattr(spec, "unreduced", ()) or getattr(spec, "reduced", ()):
        return True
    manual = getattr(aval, "manual_axis_type", None)
    return bool(manual is not None and (manual.unreduced or manual.reduced))


def partitioning(ctx: mlir.LoweringRuleContext) -> str:
    """How the program being lowered is spread over devices.

    Returns:
      "none" for one device, or inside a fully manual `jax.shard_map`, where the
      code is per device already; "mesh" where XLA partitions it over a mesh
      that `custom_partitioning` can name; "unknown" for other partitioned
      programs, such as a `jax.shard_map` over some of the axes.
    """
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, sharding_impls.SPMDAxisContext):
        manual = set(axis_context.manual_axes) == set(axis_context.mesh.axis_names)
        return "none" if manual else "unknown"
    if isinstance(axis_context, sharding_impls.ShardingContext):
        if axis_context.num_devices == 1:
            return "none"
        named = axis_context.abstract_mesh is not None
        return "mesh" if named and axis_context.device_assignment else "unknown"
    return "none"


def canonical_precision(precision: Any) -> Any:
    """What `jax.lax.dot_general` makes of a precision and of jax's default for it."""
    return lax.canonicalize_precision(precision)
