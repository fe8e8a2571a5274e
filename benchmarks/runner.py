# SPDX-License-Identifier: Apache-2.0
"""What every benchmark does with its cases: options, progress, files, one at a time."""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks import machine, profiles
from benchmarks.harness import Timing
from benchmarks.results import FAST_ENOUGH, CaseResult, Report

_LOCK = Path(tempfile.gettempdir()) / "jax_layout_benchmarks.lock"


@dataclasses.dataclass(frozen=True)
class Work:
    """A case to be measured.

    Attributes:
      group: its set.
      name: within the set, with `config` unique.
      config: what defines it.
      run: measures it; called after each round is what it is given.
    """

    group: str
    name: str
    config: dict[str, str]
    run: Callable[[Callable[[], None]], CaseResult]

    @property
    def title(self) -> str:
        return f"{self.group}: {self.name} {self.config.get('dtype', '')}".strip()

    def gave(self, result: CaseResult) -> bool:
        """Whether the result is this case's."""
        return (self.group, self.name) == (result.group, result.name) and (
            self.config.items() <= result.config.items()
        )

    def failed(self, reason: str) -> CaseResult:
        return CaseResult(
            self.group, self.name, self.config, 0, (), skipped={"ours": reason}
        )


@contextlib.contextmanager
def alone(lock: Path = _LOCK, wait: bool = True) -> Iterator[None]:
    """Holds the machine: two measurements never run at once.

    Raises:
      BlockingIOError: another holds it, and `wait` is false.
    """
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            print(f"waiting for another measurement, which holds {lock}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parser(name: str, about: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=about)
    add = parser.add_argument
    add("--case", nargs="+", metavar="SUBSTRING", help='of "set: case dtype"')
    profiles.add_argument(add)
    add("--rounds", type=int, metavar="N", help="samples per contender")
    add("--seconds", type=float, default=seconds, help=f"budget of a case ({seconds})")
    add("--quick", action="store_true", help="three rounds, small budget: a trial")
    add_part(add)
    add("--json", type=Path, metavar="FILE", help="keep the numbers")
    add("--resume", action="store_true", help="keep what FILE has of this very run")
    return parser


def add_part(add: Callable[..., Any]) -> None:
    """The option that leaves the other cases to other processes."""
    add("--part", type=_part, metavar="I/N", help="every N-th case, from the I-th on")


def _part(text: str) -> slice:
    first, _, every = text.partition("/")
    if not (first.isdigit() and every.isdigit() and 1 <= int(first) <= int(every)):
        raise argparse.ArgumentTypeError(f"must be I/N, 1 <= I <= N, got {text!r}")
    return slice(int(first) - 1, None, int(every))


def timing(options: argparse.Namespace, rounds: int, **others: Any) -> Timing:
    """As the options say; `rounds` unless they do."""
    return Timing(
        rounds=options.rounds or (3 if options.quick else rounds),
        seconds=min(0.3, options.seconds) if options.quick else options.seconds,
        **others,
    )


def console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 120
    return console


def record(
    benchmark: str,
    cases: Sequence[Work],
    options: argparse.Namespace,
    settings: dict[str, Any],
    device: jax.Device,
    console: Console,
) -> Report:
    """Measures the cases, and saves after each what a later run can go on from.

    A case that raises is reported as one that ours failed. In the end those in which
    ours was slower than plain JAX are measured once more, and that stands: the least of
    hundreds of ratios would otherwise be that of whom a neighbour disturbed most.
    """
    described = machine.describe(device, options.profile)
    report = Report(benchmark, described, settings, ())
    console.print(f"{benchmark}: {heading(described)}", highlight=False)
    chosen = [
        work
        for work in cases
        if not options.case or any(part in work.title for part in options.case)
    ]
    if options.case and not chosen:
        wanted = " or ".join(options.case)
        raise SystemExit(f"{benchmark}: no case has {wanted} in its title")
    if options.part is not None:
        chosen = chosen[options.part]
    known = resumable(options.json, report) if options.json and options.resume else ()
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        rounds = settings["rounds"]
        task = progress.add_task("", total=len(chosen) * rounds)

        def measure(number: int) -> CaseResult:
            work = chosen[number]
            progress.update(task, description=work.title)
            if not console.is_terminal:
                print(f"[{number + 1}/{len(chosen)}] {work.title}", flush=True)
            found = next((result for result in known if work.gave(result)), None)
            if found is None:
                save_partial(options.json, report, work)
                try:
                    found = work.run(lambda: progress.advance(task))
                except Exception as error:  # one case does not end a run
                    reason = (str(error) or repr(error)).splitlines()[0]
                    found = work.failed(f"{type(error).__name__}: {reason}")
            return found

        for number in range(len(chosen)):
            report = dataclasses.replace(report, cases=(*report.cases, measure(number)))
            progress.update(task, completed=(number + 1) * rounds)
        results = list(report.cases)
        for number, result in enumerate(report.cases):
            slow = any(ratio < FAST_ENOUGH for _, ratio in result.ratios(benchmark))
            if slow and result not in known:
                results[number] = measure(number)
        report = dataclasses.replace(report, cases=tuple(results))
    if options.json:
        report.save(options.json)
        partial(options.json).unlink(missing_ok=True)
    return report


def heading(described: dict[str, Any]) -> str:
    """Where and as what a report was measured."""
    settings = described["caps"].items()
    held = ", ".join(f"{name}={value}" for name, value in settings)
    versions = described["versions"]
    return (
        f"{described['class']}, profile {described['profile']} "
        f"({held or 'nothing capped'}), jax {versions['jax']}"
    )


def partial(path: Path) -> Path:
    """What a run that is under way keeps beside its file."""
    return path.with_suffix(".partial")


def save_partial(path: Path | None, report: Report, running: Work) -> None:
    if path is not None:
        data = report.to_json() | {"running": dataclasses.asdict(running.failed(""))}
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(data))
        new.replace(partial(path))  # whole, whenever this process is killed


def note_crash(path: Path, reason: str) -> str:
    """Has a run go on after the case that killed its process; says which."""
    file = partial(path)
    if not file.exists():
        return "its start"
    running = json.loads(file.read_text()).get("running")
    if running is None:  # it was on its way to the first case after such a one
        return "its start"
    case = CaseResult(**running | {"samples": (), "skipped": {"ours": reason}})
    report = Report.load(file)
    report = dataclasses.replace(report, cases=(*report.cases, case))
    file.write_text(json.dumps(report.to_json()))
    return f"{case.group} {case.name}"


def resumable(path: Path, report: Report) -> tuple[CaseResult, ...]:
    """The cases that a file, or an interrupted run, has of the same run as this."""
    for file in (partial(path), path):
        if file.exists():
            found = Report.load(file)
            if run_key(found) == run_key(report):
                return found.cases
    return ()


def run_key(report: Report) -> tuple[Any, ...]:
    """What two runs have in common whose cases may stand in one file."""
    described = report.machine
    return (
        report.benchmark,
        report.settings,
        *(described.get(key) for key in ("class", "profile", "caps", "commit")),
        described["versions"],
    )


def failed(report: Report) -> bool:
    """Whether ours was wrong, or failed."""
    return any(case.failures() for case in report.cases)
