# SPDX-License-Identifier: Apache-2.0
"""What a compiled program does, read off its HLO."""

import re

import jax

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)


def compiled(f, *args) -> str:
    return jax.jit(f).lower(*args).compile().as_text()


def count(opcode: str, hlo: str) -> int:
    """How many instructions of the opcode the program has, in all computations."""
    return len(re.findall(rf"= [^=]*?\b{re.escape(opcode)}(?:-start)?\(", hlo))


def kernels(hlo: str) -> int:
    """How many custom calls of ours."""
    return len(re.findall(r'custom_call_target="jax_layout_\w+"', hlo))


def collectives(hlo: str) -> dict[str, int]:
    return {op: n for op in COLLECTIVES if (n := count(op, hlo))}
