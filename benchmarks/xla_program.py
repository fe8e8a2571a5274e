# SPDX-License-Identifier: Apache-2.0
"""Programs that XLA compiled, in a form in which equal ones are equal text."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.harness import Contender, Role

# Where each instruction came from, and what its arguments are called.
_METADATA = re.compile(r",? ?metadata=\{[^{}]*\}")
_ARGUMENT = re.compile(r"[\w.\-]+: (?=\(|\w+\[)")
_NAME = re.compile(r"%[\w.\-]+")
_LAYOUT = re.compile(r"entry_computation_layout=(.*?)(?:, \w+=|$)", re.MULTILINE)


def text(compiled: Any) -> str:
    """What `jax.jit(f).lower(...).compile()` runs, less names and source lines."""
    whole = compiled.as_text()
    start = re.search(r"^(?:%|ENTRY )", whole, re.MULTILINE)
    if start is None:  # of a kind that is not known here: equal to nothing
        return ""
    layout = _LAYOUT.search(whole)
    lines = _ARGUMENT.sub("", _METADATA.sub("", whole[start.start() :]))
    names: dict[str, str] = {}
    lines = _NAME.sub(lambda m: names.setdefault(m[0], f"%{len(names)}"), lines)
    return (layout[1] if layout else "") + "\n" + lines


def contender(family: str, role: Role, compiled: Any, args: Any) -> Contender:
    """A compiled program with its arguments."""
    return Contender(
        family,
        role,
        lambda _: compiled(*args),
        jax.block_until_ready,
        program=text(compiled),
    )


# On a GPU: to start a program takes tens of microseconds, many kernels take few.
TIMES_ON_GPU = 16


def repeated(
    f: Callable[..., Any], sets: Sequence[Sequence[Any]], times: int = TIMES_ON_GPU
) -> Callable[[], Any]:
    """A compiled program that calls f again and again, each time after the last.

    Args:
      f: takes arrays.
      sets: its arguments, which take turns.
      times: how often.

    Returns:
      what starts it, and returns what each call gave.
    """

    def run(sets: Any) -> list[Any]:
        results: list[Any] = []
        for i in range(times):
            arguments = sets[i % len(sets)]
            if results:  # else XLA makes one kernel of several calls
                both = arguments, results[-1]
                arguments, _ = jax.lax.optimization_barrier(both)
            results.append(f(*arguments))
        return results

    sets = [tuple(arguments) for arguments in sets]
    compiled = jax.jit(run).lower(sets).compile()
    return lambda: compiled(sets)
