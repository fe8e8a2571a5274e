# SPDX-License-Identifier: Apache-2.0
"""Sizes that nobody picked, drawn at random, the same ones every time.

Those that one thinks of lie where one thinks, and programs ask for others:
docs/choices.md has what tables without them were worth there.
"""

from __future__ import annotations

import math
import random
from typing import Any

from jax_layout.plain import jnp
from jax_layout.tune.case import Sizes

# Operations of a call, at least and at most, and bytes of its operands and results.
_OPERATIONS = 2e3, 2e9
_NBYTES = 48 << 20


class Draw:
    """Draws from a seed: by `random()`, which is the same in all versions of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def of(self, *given: Any) -> Any:
        """One of these."""
        return given[int(self._random() * len(given))]

    def below(self, most: int, step: int = 1) -> int:
        """A multiple of the step up to the most, each doubling as likely as another."""
        return step * round((most / step) ** self._random())

    def order(self, rank: int) -> tuple[int, ...]:
        """So many axes, in any order."""
        return tuple(sorted(range(rank), key=lambda _: self._random()))

    def extent(self) -> int:
        """A power of two, a multiple of one, or any number, up to 4096."""
        step = self.of(1, 8, 32, 64, 0)
        return self.below(4096, step) if step else 1 << int(3 + 10 * self._random())


def is_drawn(dtype: str, operations: int, *shapes: Sizes) -> bool:
    """Whether a call is neither tiny nor so large that it takes the time of many."""
    nbytes = sum(map(math.prod, shapes)) * jnp.dtype(dtype).itemsize
    return _OPERATIONS[0] <= operations <= _OPERATIONS[1] and nbytes <= _NBYTES
