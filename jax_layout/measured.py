# SPDX-License-Identifier: Apache-2.0
"""What was measured of calls: between the points of a table it is interpolated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Of so many points around, each by the inverse of its distance to this power.
_NEIGHBOURS, _POWER = 16, 3
# Where these disagree, so much of their deviation is taken off, and so much for each
# doubling of a size on the way to the nearest, twice as much of the fourth: of 2003
# calls whose sizes were drawn, 37 ran below 0.95 of XLA so, and 60 with half of the
# deviation, which had a tenth more of the gain.
_DEVIATION, _DISTANCE, _FAR = 0.75, 0.03, 3.0
# One point alone does not deviate: where there are not all these neighbours, so much is
# taken off besides, by their number, and always in a loop, where they are up to a
# hundred apart. Of AMX's points, each left out once, 93 of 2565 ran below 0.97 of XLA
# so, and 107 of 2652 without. A quick table has few, and another beside it.
_FEW = 1.0
# More doublings of sizes away from all of its points, a quick table says nothing; and
# none does of a larger call in a loop, where XLA may be many times slower.
_QUICK_REACH, _LOOP_REACH = 2.0, 4.0
_IN_A_LOOP = " in a loop"


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call is, in the terms of a table.

    Attributes:
      case: what calls have in common that differ in their sizes alone, the name of
        the operator first: "gemm float32 NT".
      sizes: at least 1 each, as many as other works of the case have.
      like: other cases, of which a call has at least the gain. The first that is
        known counts where the call's own case is not.
    """

    case: str
    sizes: tuple[int, ...]
    like: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def named(self, form: str) -> Work:
        """The call as one of other cases, "cuda {}" of those that it has."""
        return Work(form.format(self.case), self.sizes, (*map(form.format, self.like),))

    def in_a_loop(self) -> Work:
        """The call in a loop or a branch, where XLA is slower with it."""
        return Work(self.case + _IN_A_LOOP, self.sizes, (self.case, *self.like))

    def works(self) -> list[Work]:
        """The call, and what it is like, in the order in which tables are asked."""
        return [Work(case, self.sizes) for case in (self.case, *self.like)]


Points = Mapping[tuple[int, ...], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Table:
    """What was measured: by case and sizes, how often a method is as fast as XLA.

    Attributes:
      profile: the processor class: a level of instruction sets.
      jaxlib: "0.12".
      processor: its name.
      threads: that took part.
      cases: case -> sizes -> method -> XLA's time over the method's.
      quick: it has so few points that the package's table counts beside it.
      gpu: that calls of GPUs were measured on, where a user's table has some.
    """

    profile: str
    jaxlib: str
    processor: str
    threads: int
    cases: Mapping[str, Points]
    quick: bool = False
    gpu: str = ""
    _known: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def ratio(self, work: Work, method: str) -> float | None:
        """How many times faster than XLA a method is, None if that is not known.

        Between points it is rather less than more: what one knows is in its favour.
        """
        size = math.prod(work.sizes)  # of a convolution, its multiplications
        most, lost = self._lost_in_loops(work.case)
        if size <= most:
            return lost
        points = self._points(work.case, method)
        if points is None:
            return None
        places, logs = points
        if places.shape[1] != len(work.sizes):
            return None
        distance = np.linalg.norm(places - np.log2(work.sizes), axis=1)
        nearest = np.argsort(distance, kind="stable")[:_NEIGHBOURS]
        if distance[nearest[0]] == 0:
            return float(math.exp(logs[nearest[0]]))
        is_larger = size > 2 ** places[nearest[0]].sum()
        reach = math.inf
        if self.quick:
            reach = _QUICK_REACH
        elif is_larger and work.case.endswith(_IN_A_LOOP):
            reach = _LOOP_REACH
        if distance[nearest[0]] > reach:
            return None
        weights = distance[nearest] ** -_POWER
        mean = np.average(logs[nearest], weights=weights)
        variance = np.average((logs[nearest] - mean) ** 2, weights=weights)
        way = distance[nearest[0]]
        doubt = _DEVIATION * math.sqrt(variance) + _DISTANCE * way * (1 + way / _FAR)
        if work.case.endswith(_IN_A_LOOP):
            doubt += _FEW / len(nearest)
        elif not self.quick:
            doubt += _FEW / len(nearest) - _FEW / _NEIGHBOURS
        return float(math.exp(mean - doubt))

    def points(self) -> dict[Work, dict[str, float]]:
        """All of them, by the call."""
        return {
            Work(case, sizes): dict(ratios)
            for case, points in self.cases.items()
            for sizes, ratios in points.items()
        }

    def _lost_in_loops(self, case: str) -> tuple[int, float]:
        """The largest convolution in a loop that lost, as all smaller ones did."""
        if not (case.startswith("conv ") and case.endswith(_IN_A_LOOP)):
            return 0, 0.0
        if (dtype := case.split()[2]) not in self._known:
            points = [
                (math.prod(sizes), max(ratios.values()))
                for known, of in self.cases.items()
                if known.startswith("conv ") and known.endswith(_IN_A_LOOP)
                if known.split()[2] == dtype
                for sizes, ratios in of.items()
            ]
            gained = min((size for size, r in points if r >= 1), default=math.inf)
            lost = [point for point in points if point[0] < gained]
            self._known[dtype] = max(lost, default=(0, 0.0))
        return self._known[dtype]

    def _points(self, case: str, method: str) -> tuple[np.ndarray, np.ndarray] | None:
        if (case, method) not in self._known:
            found = [
                (sizes, ratios[method])
                for sizes, ratios in self.cases.get(case, {}).items()
                if method in ratios
            ]
            places, ratios = zip(*found, strict=True) if found else ((), ())
            logs = (np.log2(places), np.log(ratios)) if found else None
            self._known[case, method] = logs
        return self._known[case, method]
