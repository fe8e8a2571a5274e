# SPDX-License-Identifier: Apache-2.0
"""What is measured: functions of ours as one writes them, and their operands."""

from __future__ import annotations

from jax_layout.tune import (
    attention_cases,
    convolution_cases,
    norm_cases,
    permute_cases,
    pooling_cases,
    product_cases,
    row_cases,
)
from jax_layout.tune.case import Case

# What is drawn, by kind, each kind from a seed.
DRAWN = {
    "products": product_cases.drawn,
    "convolutions": convolution_cases.drawn,
    "convolutions in loops": convolution_cases.drawn_in_loops,
    "pooling": pooling_cases.drawn,
    "attention": attention_cases.drawn,
    "norms": norm_cases.drawn,
    "permutes": permute_cases.drawn,
    "rows by index": row_cases.drawn,
}
_FAMILIES = (
    product_cases.products,
    product_cases.drawn,
    product_cases.batches,
    product_cases.projections,
    product_cases.layers,
    product_cases.dense,
    product_cases.small_nets,
    product_cases.gelus,
    attention_cases.written_out,
    attention_cases.attention,
    attention_cases.drawn,
    attention_cases.caches,
    product_cases.recurrences,
    convolution_cases.convolutions,
    convolution_cases.transposed,
    convolution_cases.few_channels,
    convolution_cases.drawn,
    convolution_cases.drawn_in_loops,
    convolution_cases.one_tap_in_loops,
    convolution_cases.strided_in_loops,
    permute_cases.permutes,
    permute_cases.drawn,
    row_cases.rows,
    row_cases.segments,
    row_cases.drawn,
    row_cases.drawn_in_loops,
    norm_cases.norms,
    norm_cases.drawn,
    permute_cases.matrix_sums,
    pooling_cases.pooling,
    pooling_cases.drawn,
)


def all_cases(quick: bool = False) -> list[Case]:
    """What a table is made of; quick, the most used of it, some of each kind first."""
    families = [list(family(quick)) for family in _FAMILIES]
    found = [(i / len(f), case) for f in families for i, case in enumerate(f)]
    if quick:
        found.sort(key=lambda entry: entry[0])
    return list({case.name: case for _, case in found}.values())
