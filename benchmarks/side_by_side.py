# SPDX-License-Identifier: Apache-2.0
"""Measures a machine of many processors as one of two, in parts at the same time.

A GPU's host has sixteen: seven pairs do in minutes what two processors do in an hour.
First the choices, by which then the benchmarks run. All share caches and memory, so
that ratios count and times do not: `python -m benchmarks.side_by_side --help`.
"""

import argparse
import dataclasses
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import runner
from benchmarks.all import BENCHMARKS
from benchmarks.results import Report
from jax_layout import choices
from jax_layout.tune import table
from jax_layout.tune.measure import Points, keep_least

_ROOT = Path(__file__).parent.parent
_MODULES = {each.name: each for each in BENCHMARKS}


@dataclasses.dataclass(frozen=True)
class Job:
    """A process on a pair of processors.

    Attributes:
      name: of its log.
      arguments: Python's.
    """

    name: str
    arguments: tuple[str, ...]


@dataclasses.dataclass
class Pairs:
    """The processors that may be used, two by two.

    Attributes:
      found: each pair.
      out: where logs go.
      end: by time.monotonic(): what runs then is stopped.
      failed: the jobs that were, or that failed.
    """

    found: list[tuple[int, ...]]
    out: Path
    end: float
    failed: list[str] = dataclasses.field(default_factory=list)

    def run(self, jobs: Sequence[Job], **environment: str) -> None:
        """Runs all jobs, in this order, one at a time on each pair."""
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)

        def work(pair: tuple[int, ...], scratch: str) -> None:
            # A folder for the lock, as others measure.
            own = os.environ | environment | {"TMPDIR": scratch}
            while True:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                self._run(job, pair, own)

        with (
            tempfile.TemporaryDirectory() as folder,
            ThreadPoolExecutor(len(self.found)) as pool,
        ):
            scratch = [tempfile.mkdtemp(dir=folder) for _ in self.found]
            list(pool.map(work, self.found, scratch))

    def _run(
        self, job: Job, pair: tuple[int, ...], environment: dict[str, str]
    ) -> None:
        start = time.monotonic()
        left = self.end - start
        status = "no time left"
        if left > 0:
            cores = ",".join(map(str, pair))
            command = ["taskset", "-c", cores, sys.executable, *job.arguments]
            with (self.out / f"{job.name}.log").open("w") as log:
                try:
                    ended = subprocess.run(
                        command,
                        cwd=_ROOT,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        timeout=left,
                    )
                    status = f"exit status {ended.returncode}"
                except subprocess.TimeoutExpired:
                    status = "stopped"
        if status != "exit status 0":
            self.failed.append(f"{job.name}: {status}")
        took = time.monotonic() - start
        print(f"{job.name}: {status}, {took:.0f} s on {pair}", flush=True)


def join_tables(parts: Sequence[Path], path: Path) -> None:
    """Writes one table of choices: of what several parts measured the least ratio."""
    points: Points = {}
    for part in parts:
        keep_least(points, choices.load(part).points())
    first = choices.load(parts[0])
    measured_on = {
        "profile": first.profile,
        "processor": first.processor,
        "threads": first.threads,
    }
    path.write_text(table.text(points, first.quick, measured_on))


def join_reports(parts: Sequence[Path], path: Path) -> None:
    """Writes one report of those of all parts, also of a part that was stopped.

    Raises:
      ValueError: they are not of one run.
    """
    files = [part if part.exists() else runner.partial(part) for part in parts]
    reports = [Report.load(file) for file in files if file.exists()]
    if not reports:
        return
    if len({str(runner.run_key(report)) for report in reports}) > 1:
        raise ValueError(f"{path}: its parts are not of one run.")
    # Part by part they have every n-th case.
    longest = max(len(report.cases) for report in reports)
    cases = [
        report.cases[row]
        for row in range(longest)
        for report in reports
        if row < len(report.cases)
    ]
    dataclasses.replace(reports[0], cases=tuple(cases)).save(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and joins what was; 1 if anything failed or was stopped."""
    options = _parse(arguments)
    end = time.monotonic() + 60 * options.minutes
    out = options.out.resolve()
    folder = out / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    found = [tuple(cores[i : i + 2]) for i in range(0, len(cores) - 1, 2)]
    pairs = Pairs(found or [tuple(cores)], folder, end)
    count = len(pairs.found)

    def parts(name: str, *given: str) -> list[tuple[Path, Job]]:
        """Of a benchmark or of the choices: each part's file, and who writes it."""
        files = [folder / f"{name}_{n}.json" for n in range(1, count + 1)]
        for file in files:  # of an earlier run
            file.unlink(missing_ok=True)
            runner.partial(file).unlink(missing_ok=True)
        return [
            (file, Job(file.stem, ("-m", *given, str(file), "--part", f"{n}/{count}")))
            for n, file in enumerate(files, 1)
        ]

    environment = {}
    if options.choices is not None:
        measured = parts("choices", "benchmarks.choose", *options.choices, "--output")
        pairs.run([job for _, job in measured])
        known = [file for file, _ in measured if file.exists()]
        if known:
            join_tables(known, out / "choices.json")
            environment[choices.VARIABLE] = str(out / "choices.json")
    jobs = [Job("tests", ("-m", "pytest", "-q", *options.tests))] * bool(options.tests)
    of = {}
    for name in options.only:
        benchmark = _MODULES[name]
        given = *benchmark.arguments, *benchmark.quick, *options.more, "--json"
        of[name] = parts(name, f"benchmarks.{benchmark.module}", *given)
        jobs += [job for _, job in of[name]]
    pairs.run(jobs, **environment)
    for name, written in of.items():
        join_reports([file for file, _ in written], out / f"{name}.json")
    for line in pairs.failed:
        print(f"failed: {line}")
    return int(bool(pairs.failed))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.side_by_side", description=__doc__
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="of what is measured")
    add("--minutes", type=float, required=True, metavar="N", help="stop then")
    about = "these benchmarks, in this order"
    add("--only", nargs="*", choices=_MODULES, default=[], metavar="NAME", help=about)
    for name, default, about in (
        ("choices", None, "measure choices first, with these options"),
        ("tests", [], "run pytest, with these"),
        ("more", [], "for each benchmark"),
    ):
        add(f"--{name}", type=shlex.split, default=default, help=about)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
