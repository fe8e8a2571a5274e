# SPDX-License-Identifier: Apache-2.0
"""Each program that a script compiled, timed with kernels and without.

Programs are compiled again, both ways, and called in turns on numbers drawn anew: what
the script called them with may be gone, or given to them for good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jax_layout import _compat
from jax_layout.install.install import installed

_ROUNDS, _SECONDS, _SAMPLE = 15, 1.0, 1e-3


@dataclasses.dataclass(frozen=True)
class Times:
    """A program's times.

    Attributes:
      program: the name that jax gives it.
      calls: operations in it that are ours.
      plain: seconds of a call without kernels, the median.
      ours: the same with them.
      why_not: why it was not timed; "" if it was.
    """

    program: str
    calls: int
    plain: float = 0.0
    ours: float = 0.0
    why_not: str = ""

    @property
    def ratio(self) -> float:
        return self.plain / self.ours if self.ours else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The times as JSON has them."""
        return dataclasses.asdict(self) | {"ratio": self.ratio}

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.program}: {self.why_not}"
        return (
            f"{self.program}: {1e3 * self.plain:.3f} ms without, "
            f"{1e3 * self.ours:.3f} ms with, {self.ratio:.2f} times as fast"
        )


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, Any]]]:
    """Collects the name and the jaxpr of each program that is lowered inside."""
    found: list[tuple[str, Any]] = []
    with _compat.watch_lowerings(lambda name, jaxpr: found.append((name, jaxpr))):
        yield found


def times(
    programs: Sequence[tuple[str, Any]], operators: Sequence[str] | None = None
) -> list[Times]:
    """The times of those programs that hold a call of ours, slowest gain first."""
    found = []
    for name, jaxpr in programs:
        with installed(operators) as record:
            jax.jit(jaxpr_as_fun(jaxpr)).lower(*jaxpr.in_avals)
        calls = sum(row["ours"] for row in record.by_primitive().values())
        if not calls:
            continue
        why_not = _unfit(jaxpr)
        if why_not:
            found.append(Times(name, calls, why_not=why_not))
        else:
            found.append(Times(name, calls, *_measure(jaxpr, operators)))
    return sorted(found, key=lambda each: each.ratio)


def _unfit(jaxpr: Any) -> str:
    if any(not isinstance(aval.dtype, np.dtype) for aval in jaxpr.in_avals):
        return "not timed: an argument holds no numbers"
    if _loops(jaxpr.jaxpr):
        return "not timed: a loop that ends by its numbers"
    return ""


def _loops(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "while"
        or any(map(_loops, _compat.inner_jaxprs(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _measure(jaxpr: Any, installed_: Sequence[str] | None) -> tuple[float, float]:
    """Medians without kernels and with them, in turns."""
    arguments = [_drawn(aval, seed) for seed, aval in enumerate(jaxpr.in_avals)]

    def compiled(operators: Sequence[str] | None) -> Callable[..., Any]:
        with installed(operators):
            return jax.jit(jaxpr_as_fun(jaxpr)).lower(*arguments).compile()

    both = compiled(()), compiled(installed_)
    for call in both:
        jax.block_until_ready(call(*arguments))
    samples: tuple[list[float], list[float]] = [], []
    began = time.perf_counter()
    for turn in range(_ROUNDS):
        for i in (0, 1) if turn % 2 else (1, 0):
            samples[i].append(_seconds(both[i], arguments))
        if turn >= 2 and time.perf_counter() - began > _SECONDS:
            break
    plain, ours = map(statistics.median, samples)
    return plain, ours


def _seconds(call: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Of a call, on average if it is short."""
    count, began = 0, time.perf_counter()
    while True:
        jax.block_until_ready(call(*arguments))
        count += 1
        passed = time.perf_counter() - began
        if passed > _SAMPLE:
            return passed / count


def _drawn(aval: Any, seed: int) -> jax.Array:
    """Normal numbers; integers are 0, which names a row wherever they do."""
    if not jax.dtypes.issubdtype(aval.dtype, np.inexact):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    random = np.random.default_rng(seed)
    return jax.numpy.asarray(random.standard_normal(aval.shape), aval.dtype)
