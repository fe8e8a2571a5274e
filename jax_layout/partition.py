# SPDX-License-Identifier: Apache-2.0
"""Partitions an operator over devices by its sharding rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jax_layout.plain import lax

_NO_MESH = jax.sharding.AbstractMesh((), ())


def partitioned(
    op: Any, per_device: Callable[..., Any], rule: str, params: Mapping[str, Any]
) -> Callable[..., Any]:
    """Wraps a function in `custom_partitioning`, by its sharding rule alone.

    Args:
      op: the operator's record.
      per_device: what each device computes of its parts.
      rule: as `Op.sharding` gives it.
      params: the operator's.
    """
    sides = [
        [factors.split() for factors in side.split(",")] for side in rule.split("->")
    ]
    operand_axes, result_axes = sides
    kept = {name for names in result_axes for name in names}
    # In the order of their appearance, as Shardy wants them.
    every = dict.fromkeys(n for side in sides for names in side for n in names)
    whole = [name for name in every if name.isupper()]
    reduced = [name for name in every if name not in kept and name not in whole]
    everywhere = kept.intersection(*result_axes)

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        results = list(result) if op.multiple_results else [result]

        def spread(names: list[str], value: Any) -> Iterator[tuple[str, Any]]:
            for name, axes, size in zip(names, _spec(value), value.shape, strict=True):
                # A device without a full part has anything there, to be summed.
                even = size % math.prod(mesh.shape[axis] for axis in axes) == 0
                if axes and name not in whole and (even or name in everywhere):
                    yield name, axes

        # Each axis follows the result's axis of its name.
        placed: dict[str, Any] = {}
        for names, value in zip(result_axes, results, strict=True):
            placed |= dict(spread(names, value))
        # An axis that the result lacks may stay sharded, and be summed over, as
        # long as its mesh axes are not in use.
        used = {axis for axes in placed.values() for axis in axes}
        for names, value in zip(operand_axes, args, strict=True):
            for name, axes in spread(names, value):
                if name in reduced and name not in placed and not used & set(axes):
                    placed[name] = axes
                    used |= set(axes)
        in_parts = op.in_parts is not None and any(
            name not in names for name in placed for names in result_axes
        )

        def total(value: Any, *names: str, by: Any = lax.psum) -> Any:
            axes = [axis for name in names or reduced for axis in placed.get(name, ())]
            return by(value, tuple(axes)) if axes else value

        def body(*operands: Array) -> Any:
            # What a device computes is placed already, whatever mesh is current.
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                if op.in_parts is not None and in_parts:
                    return op.in_parts(total, *operands, **params)
                return total(per_device(*operands))

        def shardings(side: list[list[str]]) -> tuple[NamedSharding, ...]:
            specs = [[placed.get(name) or None for name in names] for names in side]
            return tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)

        out = shardings(result_axes)
        return (
            mesh,
            body,
            list(out) if op.multiple_results else out[0],
            shardings(operand_axes),
        )

    function = custom_partitioning(lambda *operands: per_device(*operands))
    function.def_partition(
        partition,
        sharding_rule=rule,
        reduction_factors=tuple(reduced),
        need_replication_factors=tuple(whole),
    )
    return function


def _spec(value: Any) -> list[tuple[str, ...]]:
    """The mesh axes over which each axis of a value is sharded."""
    spec = tuple(value.sharding.spec) if value.sharding is not None else ()
    spec += (None,) * (len(value.shape) - len(spec))
    return [(a,) if isinstance(a, str) else tuple(a or ()) for a in spec]
