# SPDX-License-Identifier: Apache-2.0
"""What was lowered while kernels were installed, and by whom it is computed."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from typing import Any

logger = logging.getLogger("jax_layout.install")


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One operation of a program, as it was lowered.

    Attributes:
      program: the name that jax gives what it compiles, "jit_step".
      primitive: jax's name of the operation.
      arrays: dtypes and shapes of operands and result.
      runs: what computes it: the name of a method, "ours" where there is but one, or
        "XLA".
      kept_bytes: re-orderings, read and written, that XLA would have made and nobody
        makes.
    """

    program: str
    primitive: str
    arrays: str
    runs: str
    kept_bytes: int = 0


class Record:
    """What was lowered, as `str` tells it.

    >>> print(Record())
    nothing was lowered
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[Lowered] = collections.Counter()

    def _add(self, lowered: Lowered, count: int = 1) -> None:
        with self._lock:
            self._counts[lowered] += count

    def operations(self) -> list[tuple[Lowered, int]]:
        """Each operation that was lowered, and how often, in the order of the first."""
        with self._lock:
            return [(lowered, n) for lowered, n in self._counts.items() if n > 0]

    def by_primitive(self) -> dict[str, dict[str, int]]:
        """How many of each primitive are ours and XLA's, and what that kept in place.

        >>> Record().by_primitive()
        {}
        """
        found: dict[str, dict[str, int]] = {}
        for lowered, count in self.operations():
            row = found.setdefault(
                lowered.primitive, {"ours": 0, "XLA": 0, "kept_bytes": 0}
            )
            row["XLA" if lowered.runs == "XLA" else "ours"] += count
            row["kept_bytes"] += count * lowered.kept_bytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON has it."""
        return {
            "primitives": self.by_primitive(),
            "operations": [
                dataclasses.asdict(lowered) | {"count": count}
                for lowered, count in self.operations()
            ],
        }

    def __str__(self) -> str:
        rows = self.by_primitive()
        if not rows:
            return "nothing was lowered"
        lines = [f"{'':24}{'ours':>8}{'XLA':>8}{'not moved':>14}"]
        lines += [
            f"{name:24}{row['ours']:8}{row['XLA']:8}{readable(row['kept_bytes']):>14}"
            for name, row in rows.items()
        ]
        return "\n".join(lines)


def readable(size: int) -> str:
    """A number of bytes, in units of them.

    >>> readable(12_345_678)
    '12.3 MB'
    """
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
