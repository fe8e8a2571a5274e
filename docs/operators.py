# SPDX-License-Identifier: Apache-2.0
"""Writes operators.md, the table of all operators, from their records.

python docs/operators.py, after an operator is added or changed.
"""

from collections.abc import Iterator
from pathlib import Path

import jax_layout as jl

PAGE = Path(__file__).with_name("operators.md")
HEAD = """# Operators

What each operator's record says (`jl.operators()`). This page is written by
`python docs/operators.py`, and a test fails when it is stale.

- **kernels**: the platforms with kernels, and the dtypes that they make. Everything
  else, and what is faster so, runs the fallback: the same function in plain
  `jax.lax`.
- **derivative**: the rules that the record gives. An operator with a transpose alone
  is linear in each operand, and forward mode follows.
- **batching**: whether `vmap` has a rule of its own, or goes operator by operator.
- **sharding**: whether kernels run per device of a mesh, or the fallback does.
- **fallback**: the function, in its module of `jax_layout`.

"""
COLUMNS = "name", "kernels", "dtypes", "derivative", "batching", "sharding", "fallback"


def page() -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [tuple(row(op)) for _, op in sorted(jl.operators().items())]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def row(op: jl.Op) -> Iterator[str]:
    kernels = op.kernel is not None
    yield f"`{op.name}`"
    yield ", ".join(op.platforms) if kernels else "none"
    yield (", ".join(op.dtypes) if op.dtypes else "any") if kernels else "-"
    rules = {"jvp": op.jvp, "transpose": op.transpose}
    yield ", ".join(name for name, rule in rules.items() if rule) or "none"
    composed = op.batch is not None and op.batch.__module__ == jl.Op.__module__
    yield "by parts" if composed else "own rule" if op.batch else "none"
    yield ("in parts" if op.in_parts else "own rule") if op.sharding else "fallback"
    module = op.lax.__module__.removeprefix("jax_layout.")
    yield f"`{module}.{op.lax.__qualname__}`"


if __name__ == "__main__":
    PAGE.write_text(page())
