# SPDX-License-Identifier: Apache-2.0
"""Times programs of other people as they are and under `optimize_layout`.

`python -m benchmarks.programs --help`.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import profiles, runner
from benchmarks.harness import Timing
from benchmarks.programs import COLLECTIONS, missing
from benchmarks.programs.measure import run
from benchmarks.programs.program import Program
from benchmarks.results import CaseResult, Report
from benchmarks.runner import Work


def _work(group: str, program: Program, timing: Timing, installed: bool) -> Work:
    def measured(on_round: Callable[[], None]) -> CaseResult:
        try:
            return run(group, program, timing, on_round, installed)
        finally:
            jax.clear_caches()  # of the next program's memory

    return Work(group, program.name, {"dtype": program.dtype}, measured)


def _show(report: Report, console: Console) -> None:
    heads = "jax ms, ours ms, times, compiled in s, temporary MB, our calls"
    table = Table("program", *heads.split(", "))
    for case in report.cases:
        ours, jax_ = (case.sample(family, False) for family in ("ours", "jax"))
        pairs = [
            " to ".join(
                f"{float(case.config.get(f'{of}{key}', 0)) / unit:.1f}"
                for of in ("", "our_")
            )
            for key, unit in (("compile_seconds", 1), ("temporary_bytes", 1e6))
        ]
        table.add_row(
            f"{case.group}: {case.name} {case.config['dtype']}",
            *(f"{1e3 * s.median:.1f}" if s else "failed" for s in (jax_, ours)),
            f"{case.speedup('jax', False) or 0:.2f}",
            *pairs,
            case.config.get("our_calls", ""),
        )
    console.print(table)
    for case in report.cases:
        for reason in case.failures().values():
            console.print(f"{case.group}: {case.name}: {reason}", markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the programs, shows and keeps what was measured; 1 if ours was wrong."""
    parser = runner.parser("programs", __doc__, seconds=2.0)
    add = parser.add_argument
    add("--only", nargs="+", choices=COLLECTIONS, metavar="NAME", help="collections")
    add("--installed", action="store_true", help="under jl.installed(), not optimised")
    add("--list", action="store_true", help="only list the programs")
    options = parser.parse_args(arguments)
    console = runner.console()
    timing = runner.timing(options, 9, settle_seconds=0.02)
    works = []
    for group in options.only or COLLECTIONS:
        collection = COLLECTIONS[group]
        if lacking := missing(collection):
            words = f"{group}: left out, without {', '.join(lacking)}"
            console.print(f"{words}: pip install -e '.[models]'", markup=False)
        else:
            works += [
                _work(group, each, timing, options.installed)
                for each in collection.programs
            ]
    if options.list:
        for work in works:
            console.print(work.title, highlight=False, markup=False)
        return 0
    settings = dataclasses.asdict(timing)
    device = jax.devices()[0]
    report = runner.record("programs", works, options, settings, device, console)
    _show(report, console)
    return int(runner.failed(report))


if __name__ == "__main__":
    sys.exit(main() if "--list" in sys.argv else profiles.start(main))
