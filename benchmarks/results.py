# SPDX-License-Identifier: Apache-2.0
"""What a run found: cases, samples, their ratios, and the file that keeps them."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Sample, label

RESULTS = Path(__file__).with_name("results")
FAST_ENOUGH = 0.97  # of plain JAX's speed

# What stands for plain JAX, by benchmark: ours, and jax.numpy's or jax.lax's, which
# gives the same kind of output. Where a case is a gradient, both are differentiated.
PLAIN = {
    "permute": (("ours", "jnp"), ("ours eager", "jnp eager")),
    "gemm": (("ours", "jnp"),),
    "linear": (("ours", "jnp"),),
    "attention": (("ours", "jnp"),),
    "index": (("ours", "jnp"),),
    "operators": (("ours", "jnp"),),
    "conv": (("ours", "lax"), ("our conv", "lax")),
    "layout": (("ours", "jax"), ("installed", "jax")),
    "programs": (("ours", "jax"),),
    "unseen": (("ours", "jnp"),),
}


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
        """The share of the ceiling that a contender reaches.

        Where both are known, that is the slower of the fastest copy and the peak of the
        arithmetic.
        """
        copies = self.copy(), *(s for s in self.samples if s.role == "peak")
        bounds = [s.median for s in copies if s]
        return max(bounds) / sample.median if bounds else None

    def speedup(self, over: str, warm: bool, ours_is: str = "ours") -> float | None:
        """Ours against a peer, like with like; above 1 ours is faster."""
        ours, peer = self.sample(ours_is, warm), self.sample(over, warm)
        return peer.median / ours.median if ours and peer else None

    def best_peer(self, warm: bool) -> Sample | None:
        """The fastest peer with the same kind of output."""
        peers = [s for s in self.samples if s.role == "peer" and s.warm == warm]
        return min(peers, key=lambda s: s.median, default=None)

    def ratios(self, benchmark: str) -> Iterator[tuple[str, float]]:
        """Each contender of ours, and how many times plain JAX's speed it has."""
        for ours, plain in PLAIN[benchmark]:
            for warm in (False, True):
                ratio = self.speedup(plain, warm, ours)
                if ratio is not None:
                    yield label(ours, warm), ratio

    def failures(self) -> dict[str, str]:
        """Why ours was wrong or did not run, by contender: "ours", "ours eager+"."""
        return {
            name: reason
            for name, reason in self.skipped.items()
            if name.partition(" ")[0].rstrip("+") == "ours"
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """A run: where, when, how, and each case."""

    benchmark: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    cases: tuple[CaseResult, ...]

    @property
    def jax(self) -> tuple[int, ...]:
        """jax's version, in order."""
        version = self.machine["versions"]["jax"]
        return tuple(int(part) for part in re.findall(r"\d+", version))

    def path(self, name: str, results: Path = RESULTS) -> Path:
        """Where a recorded benchmark of this name is kept."""
        place = self.machine["class"], self.machine["profile"]
        version = f"jax-{self.machine['versions']['jax']}"
        return results.joinpath(*place, version, f"{name}.json")

    def ratios(self) -> Iterator[tuple[str, float]]:
        """Each case of ours, and how many times plain JAX's speed it has."""
        for case in self.cases:
            given = (case.config.get(key) for key in ("axes", "dtype"))
            words = " ".join(filter(None, (case.group, case.name, *given)))
            for contender, ratio in case.ratios(self.benchmark):
                yield f"{words} {contender}", ratio

    def slower(self, than: float) -> Iterator[tuple[float, str]]:
        """The cases of ours that are below so many times plain JAX's speed."""
        return ((ratio, case) for case, ratio in self.ratios() if ratio < than)

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
        data.pop("running", None)
        for case in data["cases"]:
            for fields in case["samples"]:
                del fields["gb_per_s"]  # follows from the bytes and the median
            case["samples"] = tuple(Sample(**fields) for fields in case["samples"])
        data["cases"] = tuple(CaseResult(**case) for case in data["cases"])
        return cls(**data)


def recorded(results: Path = RESULTS) -> dict[str, list[Report]]:
    """Every report that is kept, by the name of its benchmark."""
    found: dict[str, list[Report]] = {}
    for path in sorted(results.glob("*/*/jax-*/*.json")):
        found.setdefault(path.stem, []).append(Report.load(path))
    return found


def newest(reports: Iterable[Report]) -> dict[tuple[str, str], Report]:
    """The reports of the newest jax, by class and profile, of one benchmark."""
    found: dict[tuple[str, str], Report] = {}
    for report in reports:
        place = report.machine["class"], report.machine["profile"]
        if place not in found or found[place].jax < report.jax:
            found[place] = report
    return found


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
