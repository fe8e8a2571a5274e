# SPDX-License-Identifier: Apache-2.0
"""Times rows selected and added by index: `python -m benchmarks.index --help`."""

import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jax_layout as jl
from benchmarks import profiles
from benchmarks.gemm import main
from benchmarks.gemm_cases import GemmCase

# shape, axis, number of indices, the rows they fall on (few: many repeat), dtype
_CASES = [
    ((50_000, 1024), 0, 8192, 50_000, "float32"),
    ((50_000, 1024), 0, 8192, 500, "float32"),
    ((50_000, 1024), 0, 8192, 50_000, "bfloat16"),
    ((50_000, 1024), 0, 8192, 500, "bfloat16"),
    ((30_000, 768), 0, 512, 30_000, "float32"),
    ((50_000, 64), 0, 8192, 50_000, "float32"),
    ((512, 512), 0, 512, 512, "float32"),
    ((256, 56, 56), 0, 128, 256, "float32"),
    ((64, 100, 512), 1, 50, 100, "float32"),
    ((1024, 1000), 1, 256, 1000, "float32"),
    ((4096, 4096), 1, 64, 4096, "float32"),
    ((512, 512), 1, 512, 512, "float32"),
    ((100_000, 3), 0, 100_000, 100_000, "float32"),
    ((1_000_000,), 0, 1_000_000, 1_000_000, "float32"),
    ((64, 64), 0, 16, 64, "float32"),
]


def _cases(
    shape: tuple[int, ...], axis: int, count: int, used: int, dtype: str
) -> list[GemmCase]:
    """Forward; the gradient, which is a sum onto zeros; a sum onto an array."""
    selected = (*shape[:axis], count, *shape[axis + 1 :])
    at = (slice(None),) * axis
    repeats = ", repeated" if used < shape[axis] else ""
    name = f"{'x'.join(map(str, shape))} axis {axis}, {count}{repeats}"

    def ours_grad(ct: Any, i: Any) -> Any:
        like = jax.ShapeDtypeStruct(shape, ct.dtype)
        return jax.linear_transpose(lambda x: jl.index_select(x, axis, i), like)(ct)

    def jnp_grad(ct: Any, i: Any) -> Any:
        like = jax.ShapeDtypeStruct(shape, ct.dtype)
        take = functools.partial(jnp.take, indices=i, axis=axis, fill_value=0)
        return jax.linear_transpose(take, like)(ct)

    def torch_grad(torch: Any) -> Any:
        kind = getattr(torch, dtype)

        def run(ct: Any, i: Any) -> Any:
            zeros = torch.zeros(shape, dtype=kind, device=ct.device)
            return zeros.index_add_(axis, i, ct)

        return run

    return [
        GemmCase(
            "select", name, (shape,), dtype, 0,
            lambda x, i: jl.index_select(x, axis, i),
            lambda x, i: jnp.take(x, i, axis),
            lambda torch: lambda x, i: torch.index_select(x, axis, i),
            index=(used, count),
        ),
        GemmCase(
            "gradient", name, (selected,), dtype, 0,
            ours_grad, jnp_grad, torch_grad, index=(used, count),
        ),
        GemmCase(
            "add", name, (shape, selected), dtype, 0,
            lambda x, s, i: jl.index_add(x, axis, i, s),
            lambda x, s, i: x.at[(*at, i)].add(s),
            lambda torch: lambda x, s, i: torch.index_add(x, axis, i, s),
            index=(used, count),
        ),
    ]  # fmt: skip


# Rows of data, segments, dtype, whether segments are sorted.
_SEGMENTS = [
    *itertools.product(
        [(1_000_000, 128)],
        [10, 1000, 1_000_000],
        ["float32", "bfloat16"],
        [False, True],
    ),
    ((100_000, 16), 1000, "float32", False),
    ((1_000_000,), 1000, "float32", False),
]


def _segments(
    shape: tuple[int, ...], extent: int, dtype: str, in_order: bool
) -> list[GemmCase]:
    """Sums of segments; their largest."""
    order = "sorted" if in_order else "random"
    name = f"{'x'.join(map(str, shape))} into {extent}, {order}"
    to = (extent, *shape[1:])

    def torch_max(torch: Any) -> Any:
        def run(x: Any, i: Any) -> Any:
            at = i.long().reshape(-1, *(1,) * (x.ndim - 1)).expand_as(x)
            y = torch.full(to, float("-inf"), dtype=x.dtype, device=x.device)
            return y.scatter_reduce_(0, at, x, "amax")

        return run

    def torch_sum(torch: Any) -> Any:
        return lambda x, i: x.new_zeros(to).index_add_(0, i, x)

    cases = []
    for group, torch in (("segment_sum", torch_sum), ("segment_max", torch_max)):
        ours, theirs = (
            functools.partial(
                getattr(module, group),
                num_segments=extent,
                indices_are_sorted=in_order,
            )
            for module in (jl, jax.ops)
        )
        cases.append(
            GemmCase(
                group, name, (shape,), dtype, 0, ours, theirs, torch,
                index=(extent, shape[0]), in_order=in_order,
            )
        )  # fmt: skip
    return cases


def all_cases() -> dict[str, list[GemmCase]]:
    cases = [case for arguments in _CASES for case in _cases(*arguments)]
    cases += [case for arguments in _SEGMENTS for case in _segments(*arguments)]
    groups = ("select", "gradient", "add", "segment_sum", "segment_max")
    return {group: [c for c in cases if c.group == group] for group in groups}


if __name__ == "__main__":
    found = all_cases()
    run = functools.partial(main, name="index", groups=tuple(found), found=found)
    sys.exit(profiles.start(run))
