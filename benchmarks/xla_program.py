# SPDX-License-Identifier: Apache-2.0
"""Programs that XLA compiled, in a form in which equal ones are equal text."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Contender, Role
from jax_layout.tune import measure

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


def contender(
    family: str,
    role: Role,
    compiled: Any,
    *sets: Any,
    read: Callable[[Any], np.ndarray] | None = None,
) -> Contender:
    """A compiled program with sets of its arguments, which take turns."""
    return Contender(
        family,
        role,
        lambda i: compiled(*sets[i % len(sets)]),
        jax.block_until_ready,
        read,
        program=text(compiled),
    )


# On a GPU.
TIMES_ON_GPU = 16


def repeated(
    f: Callable[..., Any], sets: Sequence[Sequence[Any]], times: int = TIMES_ON_GPU
) -> Callable[[], Any]:
    """A compiled program that calls f again and again, as those of `tune` do.

    Args:
      f: takes arrays.
      sets: its arguments, which take turns.
      times: how often.

    Returns:
      what starts it, and returns what each call gave.
    """
    given = [x for arguments in sets for x in arguments]
    run = measure.repeated(f, len(sets), times)
    compiled = jax.jit(run).lower(*given).compile()
    return lambda: compiled(*given)
