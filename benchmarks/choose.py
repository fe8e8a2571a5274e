# SPDX-License-Identifier: Apache-2.0
"""Measures the package's tables of choices: `python -m benchmarks.choose --help`.

One file for each profile and minor version of jaxlib, in jax_layout/tables. A second
run with --again, on this processor or another, leaves to ours what it won both times.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax_layout as jl
from benchmarks import profiles, runner
from jax_layout import choices
from jax_layout.tune import cases as cpu_cases
from jax_layout.tune import gpu_cases, table
from jax_layout.tune.command import heading, run
from jax_layout.tune.measure import ON_GPU, QUICK, Timing


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table of the profile; 1 if something failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.choose", description=__doc__)
    add = parser.add_argument
    profiles.add_argument(add)
    add("--quick", action="store_true", help="the most used cases: a trial")
    add("--output", type=Path, metavar="FILE", help="another file than the package's")
    add(
        "--only", nargs="+", metavar="WORD", help="cases with one of these; others stay"
    )
    runner.add_part(add)
    add("--device", choices=["cpu", "gpu"], default="cpu")
    add("--seconds", type=float, help="of each program of a case")
    add(
        "--total",
        type=float,
        metavar="SECONDS",
        help="of a run; begin no case after these: the table has those before",
    )
    add(
        "--again",
        action="store_true",
        help="of points that the table has, the lesser ratio of both runs stays",
    )
    add(
        "--runs",
        type=int,
        default=1,
        metavar="COUNT",
        help="measure so many times, from the first case to the last: the table has "
        "medians",
    )
    add(
        "--earlier",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="tables of earlier runs: each counts as one of the runs; with --runs 0 "
        "they are all there is",
    )
    options = parser.parse_args(arguments)
    if options.runs < (0 if options.earlier else 1):
        parser.error(f"--runs must be 1 or more, not {options.runs}")
    gpu = options.device == "gpu"
    machine = table.machine(options.device)
    name = f"{machine['profile']}-jaxlib-{choices.jaxlib_minor()}.json"
    of_gpu = Path(jl.__file__).parent / "tables" / name
    path = options.output or (of_gpu if gpu else choices.packaged_path())
    print(heading(path, options.quick, options.device), flush=True)
    try:
        tables = [choices.load(file) for file in options.earlier]
    except (OSError, ValueError) as e:
        parser.error(f"--earlier: {e}")
    kept = None
    cases = gpu_cases.all_cases() if gpu else cpu_cases.all_cases(options.quick)
    if options.only is not None:
        cases = [c for c in cases if any(word in c.name for word in options.only)]
    if options.part is not None:
        cases = cases[options.part]
    timing = ON_GPU if gpu else QUICK if options.quick else Timing()
    if options.seconds:
        timing = dataclasses.replace(timing, seconds=options.seconds)
    if options.total:
        timing = dataclasses.replace(timing, total=options.total)
    if path.exists() and (options.only is not None or options.again):
        known = choices.load(path)
        kept = known.points()
        machine["processor"] = both(known.processor, machine["processor"])
    for each in tables:
        machine["processor"] = both(each.processor, machine["processor"])
    how = {"kept": kept, "again": options.again, "platform": options.device}
    how |= {"measured_on": machine, "runs": options.runs}
    how["earlier"] = [each.points() for each in tables]
    outcome = run(path, options.quick, cases, timing, **how)
    print(outcome)
    return int(bool(outcome.failures))


def both(known: str, here: str) -> str:
    """The names of the processors that a table was measured on, and of this one."""
    return "; ".join(dict.fromkeys([*known.split("; "), *here.split("; ")]))


if __name__ == "__main__":
    sys.exit(profiles.start(main))
