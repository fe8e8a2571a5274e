# SPDX-License-Identifier: Apache-2.0
"""What `jax-layout tune` and `python -m benchmarks.choose` do."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_layout import choices
from jax_layout.tune import cases as cpu_cases
from jax_layout.tune import gpu_cases
from jax_layout.tune.case import Case
from jax_layout.tune.measure import (
    ON_GPU,
    QUICK,
    Measured,
    Points,
    Timing,
    keep_least,
    measure,
    median,
)
from jax_layout.tune.table import machine, replacing, text


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
      path: the table.
      works: how many it has.
      ours: of these, how many are ours from now on.
      failures: a line for each case, or method of one, that did not run or was wrong.
      left: how many cases there was no time for.
    """

    path: str
    works: int
    ours: int
    failures: tuple[str, ...]
    left: int = 0

    def __str__(self) -> str:
        lines = [f"failed: {line}" for line in self.failures]
        lines.append(
            f"{self.works} kinds and sizes of calls: {self.ours} are ours, "
            f"{self.works - self.ours} XLA's; {len(self.failures)} failed"
        )
        if self.left:
            lines.append(f"no time for {self.left} cases: the package's table has them")
        return "\n".join([*lines, f"written to {self.path}"])


def run(
    path: Path,
    quick: bool = False,
    cases: Sequence[Case] | None = None,
    timing: Timing | None = None,
    kept: Points | None = None,
    again: bool = False,
    platform: str = "cpu",
    measured_on: Mapping[str, Any] | None = None,
    runs: int = 1,
    earlier: Sequence[Points] = (),
) -> Outcome:
    """Measures, and writes the table.

    Args:
      path: the file; it appears, or changes, when all is measured.
      quick: the most used cases only, in under a minute.
      cases: what to measure; left out, all.
      timing: how long; left out, as `quick` says.
      kept: points that are written too.
      again: one that is measured anew keeps the lesser ratio; else the new one.
      platform: jax's name of it.
      measured_on: what the table says of that; this machine if left out.
      runs: how often, from the first case to the last; the table has medians.
      earlier: what runs before this one found; each is one more of the runs, for
        what is measured now, or for all that it has if `runs` is 0.

    Raises:
      OSError: the file cannot be written; before anything is measured.
    """
    if cases is None:
        cases = (
            cpu_cases.all_cases(quick) if platform == "cpu" else gpu_cases.all_cases()
        )
    if timing is None:
        timing = ON_GPU if platform != "cpu" else QUICK if quick else Timing()
    with replacing(path) as file, _progress(runs * len(cases)) as advance:
        now = [measure(cases, timing, advance, platform) for _ in range(runs)]
        asked = {work for each in now for work in each.points}
        left = min((each.left for each in now), default=0)
        before = [
            Measured({w: r for w, r in each.items() if w in asked or not runs})
            for each in earlier
        ]
        found: Measured = dataclasses.replace(median([*now, *before]), left=left)
        points = {**(kept or {}), **found.points}
        if again:
            keep_least(found.points, kept or {})
            points = found.points
        file.write(text(points, quick, measured_on))
    failures = tuple(found.failures)
    return Outcome(str(path), len(found.points), found.ours, failures, found.left)


def tune(path: Path, quick: bool, platform: str, runs: int = 1) -> Outcome:
    """Measures this machine's CPU or its GPU; what its table has of the other stays.

    Args:
      path: the file.
      quick: as `run` has it.
      platform: likewise.
      runs: likewise.

    Raises:
      OSError: the file cannot be written.
    """
    measured_on = machine("cpu")
    kept: Points = {}
    # What is no table of this machine is of no use to it.
    with contextlib.suppress(ValueError):
        known = choices.load(path)
        choices.check_here(known, path)
        other = platform == "cpu"
        kept = {w: r for w, r in known.points().items() if choices.of_gpu(w) == other}
        measured_on["gpu"] = known.gpu
        quick = quick if platform == "cpu" else known.quick
    if platform != "cpu":
        measured_on["gpu"] = choices.gpu()
    return run(
        path, quick, kept=kept, platform=platform, measured_on=measured_on, runs=runs
    )


def heading(path: Path, quick: bool, platform: str = "cpu") -> str:
    """What a run is about to do."""
    on = machine(platform)
    return (
        f"measuring the {'most used' if quick else 'usual'} calls on "
        f"{on['processor']}, {on['threads']} threads, profile {on['profile']}, "
        f"jaxlib {choices.jaxlib_minor()}, for {path}"
    )


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[Case], None]]:
    """A bar; where no terminal is, a line for each case: the last tells of a crash."""
    rich = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    if not rich:
        numbers = iter(range(1, count + 1))
        yield lambda case: print(
            f"[{next(numbers)}/{count}] {case.name}", file=sys.stderr, flush=True
        )
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description:<50.50}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with bars.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=count)
        shown = -1

        def advance(case: Case) -> None:
            nonlocal shown
            shown += 1
            progress.update(task, description=case.name, completed=shown)

        yield advance
