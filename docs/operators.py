# SPDX-License-Identifier: Apache-2.0
"""Writes operators.md, the tables of all operators, from their records.

python docs/operators.py, after an operator is added or changed.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax_layout as jl

PAGE = Path(__file__).with_name("operators.md")
TEXT = """# Operators

What each operator's record says (`jl.operators()`). This page is written by
`python docs/operators.py`, and a test fails when it is stale.

## Kernels

The platforms that have some, and the dtypes that these make. Everything else, and what
is faster so, runs the fallback; so do the operators that are not in this table.

{kernels}
## Rules

- **derivative**: what the record gives. An operator with a transpose alone is linear
  in each operand, and forward mode follows.
- **batching**: whether `vmap` has a rule of its own, or goes operator by operator.
- **sharding**: whether kernels run per device of a mesh, or the fallback does.

{rules}
## Fallbacks

The same function in plain `jax.lax`, in its module of `jax_layout`.

{fallbacks}"""


def page() -> str:
    known = [op for _, op in sorted(jl.operators().items())]
    fast = [op for op in known if op.kernel is not None]
    return TEXT.format(
        kernels=table(fast, ("platforms", "dtypes"), kernels),
        rules=table(known, ("derivative", "batching", "sharding"), rules),
        fallbacks=table(known, ("function",), fallback),
    )


def table(
    ops: Iterable[jl.Op],
    columns: tuple[str, ...],
    cells: Callable[[jl.Op], Iterator[str]],
) -> str:
    lines = [("name", *columns), ("---",) * (1 + len(columns))]
    lines += [(f"`{op.name}`", *cells(op)) for op in ops]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def kernels(op: jl.Op) -> Iterator[str]:
    yield ", ".join(op.platforms)
    yield short(op.dtypes) if op.dtypes else "any"


def rules(op: jl.Op) -> Iterator[str]:
    found = {"jvp": op.jvp, "transpose": op.transpose}
    yield ", ".join(name for name, rule in found.items() if rule) or "none"
    composed = op.batch is not None and op.batch.__module__ == jl.Op.__module__
    yield "by parts" if composed else "own rule" if op.batch else "none"
    yield ("in parts" if op.in_parts else "own rule") if op.sharding else "fallback"


def fallback(op: jl.Op) -> Iterator[str]:
    module = op.lax.__module__.removeprefix("jax_layout.")
    yield f"`{module}.{op.lax.__qualname__}`"


def short(dtypes: Iterable[str]) -> str:
    """float32, float64, float8_e5m2 as float32/64, float8_e5m2."""
    kinds = itertools.groupby(dtypes, lambda name: name.rstrip("0123456789"))
    return ", ".join(
        kind + "/".join(name.removeprefix(kind) for name in names)
        for kind, names in kinds
    )


if __name__ == "__main__":
    PAGE.write_text(page())
