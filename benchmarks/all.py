# SPDX-License-Identifier: Apache-2.0
"""Records every benchmark in every profile of this machine: `make bench-all`.

An interrupted run goes on where it was. In the end it lists the cases in which ours
is below 0.97 of plain JAX's speed.
"""

import argparse
import dataclasses
import itertools
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine, profiles, runner
from benchmarks.results import FAST_ENOUGH, RESULTS, Report, newest, recorded

FALLEN = 0.9  # of what it was with another jax: more than runs differ
_ROOT = Path(__file__).parent.parent
_LOGS = _ROOT / "build" / "bench"
_LOCK = Path(tempfile.gettempdir()) / "jax_layout_bench_all.lock"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A file of results: its name, the module's and its arguments."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()  # how a quick run differs


def _quick(rounds: int, seconds: float, *others: str) -> tuple[str, ...]:
    return ("--rounds", str(rounds), "--seconds", str(seconds), *others)


BENCHMARKS = (
    Benchmark("linear", "linear", quick=_quick(15, 2.0)),
    Benchmark("gemm", "gemm", quick=_quick(15, 1.0)),
    Benchmark("layout", "layout", quick=_quick(9, 1.0)),
    Benchmark("layout-models", "layout", ("--set", "models"), _quick(9, 1.0)),
    Benchmark("programs", "programs", quick=_quick(7, 1.0)),
    Benchmark("programs-installed", "programs", ("--installed",), _quick(7, 1.0)),
    Benchmark("conv", "conv", quick=_quick(5, 0.7)),
    Benchmark("attention", "attention", quick=_quick(5, 1.0)),
    Benchmark("index", "index", quick=_quick(11, 0.8)),
    Benchmark("operators", "operators", quick=_quick(9, 0.6)),
    Benchmark("permute-ml", "permute", ("--set", "ml"), _quick(5, 0.5)),
    Benchmark("permute-tiny", "permute", ("--set", "tiny"), _quick(9, 1.0)),
    Benchmark("unseen", "unseen", quick=_quick(9, 0.2)),
    Benchmark("permute-ttc", "permute", ("--set", "ttc"), _quick(3, 0.3)),
)


@dataclasses.dataclass
class Run:
    """All that is asked for, and what went wrong.

    Attributes:
      quick: fewer rounds.
      end: when to stop, by time.monotonic().
      console: where to say so.
      results: where they are kept.
      troubles: what failed, a line each.
    """

    quick: bool
    end: float
    console: Console
    results: Path = RESULTS
    troubles: list[str] = dataclasses.field(default_factory=list)

    def record(self, benchmark: Benchmark, profile: str, bar: Progress) -> None:
        """Runs a benchmark in processes of the profile until it has all its cases."""
        described = machine.describe(jax.devices("cpu")[0], profile)
        report = Report(benchmark.module, described, {}, ())
        path = report.path(benchmark.name, self.results)
        title = f"{profile} {benchmark.name}"
        start = time.monotonic()
        _log(benchmark, profile).unlink(missing_ok=True)
        status = self._start(benchmark, profile, path, bar)
        crashes = 0
        while status < 0 and time.monotonic() < self.end and crashes < 9:
            crashes += 1  # the other cases go on without the one that did it
            case = runner.note_crash(path, f"killed by signal {-status}")
            self.troubles.append(f"{title}: signal {-status} in {case}")
            status = self._start(benchmark, profile, path, bar)
        if status < 0:
            self.troubles.append(f"{title}: stopped; the next run goes on from there")
        elif status > 0:
            log = _log(benchmark, profile).relative_to(_ROOT)
            self.troubles.append(f"{title}: exit status {status}, see {log}")
        took = time.monotonic() - start
        self.console.print(f"{title}: {took:.0f} s", highlight=False)

    def _start(
        self, benchmark: Benchmark, profile: str, path: Path, bar: Progress
    ) -> int:
        command = [sys.executable, "-m", f"benchmarks.{benchmark.module}"]
        command += [*benchmark.arguments, *(benchmark.quick if self.quick else ())]
        command += ["--json", str(path), "--resume"]
        if profile in profiles.PROFILES:
            command += ["--profile", profile]
        log = _log(benchmark, profile)
        log.parent.mkdir(parents=True, exist_ok=True)
        task = bar.add_task(f"{profile} {benchmark.name}", total=None)
        with (
            log.open("a", buffering=1) as file,
            subprocess.Popen(
                command,
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as child,
        ):
            left = max(0.0, self.end - time.monotonic())
            timer = threading.Timer(left, child.terminate)
            timer.daemon = True  # an interrupted run does not wait for it
            if left < math.inf:
                timer.start()
            assert child.stdout is not None
            for line in child.stdout:
                file.write(line)
                if found := re.match(r"\[(\d+)/(\d+)\] (.*)", line):
                    done, total = int(found[1]) - 1, int(found[2])
                    words = f"{profile} {benchmark.name}: {found[3]}"
                    bar.update(task, completed=done, total=total, description=words)
            status = child.wait()
            timer.cancel()
        bar.remove_task(task)
        return status


def _log(benchmark: Benchmark, profile: str) -> Path:
    return _LOGS / f"{profile}-{benchmark.name}.log"


def slower(results: Path = RESULTS) -> dict[Path, list[str]]:
    """What ours is slower in than plain JAX, by folder, of the newest jax of each."""
    found: dict[Path, list[tuple[float, str]]] = {}
    for name, reports in recorded(results).items():
        for report in newest(reports).values():
            lines = found.setdefault(report.path(name, results).parent, [])
            lines += [
                (ratio, f"{ratio:.2f}  {name}  {case}")
                for ratio, case in report.slower(FAST_ENOUGH)
            ]
            lines += [
                (0.0, f"wrong  {name}  {case.group} {case.name}: {reason}")
                for case in report.cases
                for reason in case.failures().values()
            ]
    return {place: [line for _, line in sorted(found[place])] for place in found}


def fallen(results: Path, before: Path = RESULTS) -> list[str]:
    """What has become slower beside plain JAX than what is kept of this machine."""
    known = recorded(before)
    found = []
    for name, reports in recorded(results).items():
        kept = newest(known.get(name, []))
        for place, report in newest(reports).items():
            if place not in kept:
                continue
            was = dict(kept[place].ratios())
            found += [
                (ratio / was[case], f"{was[case]:.2f} -> {ratio:.2f}  {name}  {case}")
                for case, ratio in report.ratios()
                if case in was and ratio < FALLEN * was[case]
            ]
    return [line for _, line in sorted(found)]


def show(console: Console, results: Path = RESULTS) -> None:
    """Prints that list, and keeps it beside the results."""
    for place, lines in slower(results).items():
        title = f"{place.relative_to(results)}: {len(lines)} below {FAST_ENOUGH}x"
        console.print(title, style="bold", highlight=False)
        for line in lines:
            console.print(f"  {line}", highlight=False, markup=False)
        (place / "slower.txt").write_text("".join(f"{line}\n" for line in lines))
    if results != RESULTS:
        lines = fallen(results)
        title = f"{len(lines)} slower, beside plain JAX, than what is recorded"
        console.print(title, style="bold", highlight=False)
        for line in lines:
            console.print(f"  {line}", highlight=False, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Records what is asked for; 1 if anything failed."""
    flags = profiles.processor_flags()
    options = _parse(arguments)
    console = runner.console()
    if options.list:
        show(console, options.results)
        return 0
    try:
        chosen = [profiles.choose(name, flags) for name in options.profile or ()]
    except ValueError as error:
        console.print(str(error), highlight=False)
        return 2
    chosen = chosen or list(profiles.possible(flags))
    wanted = [each for each in BENCHMARKS if each.name in (options.only or _NAMES)]
    minutes = math.inf if options.minutes is None else options.minutes
    end = time.monotonic() + 60 * minutes
    run = Run(options.quick, end, console, options.results)
    columns = (TextColumn("{task.description:<60}"), BarColumn(), TimeElapsedColumn())
    try:
        with (
            runner.alone(_LOCK, wait=False),
            Progress(*columns, console=console, transient=True) as bar,
        ):
            total = len(wanted) * len(chosen)
            task = bar.add_task("benchmarks and profiles", total=total)
            for benchmark, profile in itertools.product(wanted, chosen):
                if time.monotonic() < end:
                    run.record(benchmark, profile, bar)
                else:
                    run.troubles.append(f"{profile} {benchmark.name}: no time left")
                bar.advance(task)
    except BlockingIOError:
        console.print(f"another run holds {_LOCK}", highlight=False)
        return 2
    show(console, options.results)
    for line in run.troubles:
        console.print(f"failed: {line}", style="red", highlight=False, markup=False)
    return int(bool(run.troubles))


_NAMES = tuple(benchmark.name for benchmark in BENCHMARKS)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.all", description=__doc__)
    add = parser.add_argument
    add("--profile", nargs="+", choices=profiles.PROFILES, help="all there are")
    add("--only", nargs="+", choices=_NAMES, metavar="NAME", help="these benchmarks")
    add("--quick", action="store_true", help="fewer rounds: a quarter of an hour each")
    add("--minutes", type=float, metavar="N", help="stop then; a next run goes on")
    add("--list", action="store_true", help="only list where ours is slower")
    kept = "where they are kept, and compared with what benchmarks/results has"
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help=kept)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
