# SPDX-License-Identifier: Apache-2.0
"""What a run found: cases, samples, their ratios, and the file that keeps them."""

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import Sample, label


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The samples of one case.

    Attributes:
      group: the set of cases it belongs to.
      name: the case.
      config: what defines it: shape, axes, dtype, ...
      moved: the fewest bytes it can move: each input read once, each output written
        once.
      samples: one per contender.
      skipped: contenders that could not run or were wrong, and why.
      flops: additions and multiplications, 0 where only bytes count.
    """

    group: str
    name: str
    config: dict[str, str]
    moved: int
    samples: tuple[Sample, ...]
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    flops: int = 0

    def sample(self, family: str, warm: bool) -> Sample | None:
        wanted = label(family, warm)
        return next((s for s in self.samples if s.label == wanted), None)

    def copy(self, warm: bool | None = None) -> Sample | None:
        """The fastest copy of the same size, the ceiling; or of one kind of output."""
        copies = [
            s for s in self.samples if s.role == "copy" and warm in (None, s.warm)
        ]
        return min(copies, key=lambda s: s.median, default=None)

    def gb_per_s(self, sample: Sample) -> float:
        """Gigabytes read and written per second."""
        return self.moved / sample.median / 1e9

    def share(self, sample: Sample) -> float | None:
        """The share of the ceiling that a contender reaches."""
        copy = self.copy()
        return copy.median / sample.median if copy else None

    def speedup(self, over: str, warm: bool) -> float | None:
        """Ours against a peer, like with like; above 1 ours is faster."""
        ours, peer = self.sample("ours", warm), self.sample(over, warm)
        return peer.median / ours.median if ours and peer else None

    def best_peer(self, warm: bool) -> Sample | None:
        """The fastest peer with the same kind of output."""
        peers = [s for s in self.samples if s.role == "peer" and s.warm == warm]
        return min(peers, key=lambda s: s.median, default=None)


@dataclasses.dataclass(frozen=True)
class Report:
    """A run: where, when, how, and each case."""

    benchmark: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    cases: tuple[CaseResult, ...]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for case, entry in zip(self.cases, data["cases"], strict=True):
            for sample, fields in zip(case.samples, entry["samples"], strict=True):
                fields["gb_per_s"] = round(case.gb_per_s(sample), 3)
        return data

    @classmethod
    def load(cls, path: Path) -> "Report":
        data = json.loads(path.read_text())
        for case in data["cases"]:
            for fields in case["samples"]:
                del fields["gb_per_s"]  # follows from the bytes and the median
            case["samples"] = tuple(Sample(**fields) for fields in case["samples"])
        data["cases"] = tuple(CaseResult(**case) for case in data["cases"])
        return cls(**data)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
