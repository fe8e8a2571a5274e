# SPDX-License-Identifier: Apache-2.0
"""Measures the package's tables of choices: `python -m benchmarks.choose --help`.

One file for each profile and minor version of jaxlib, in jax_layout/tables. A second
run with --again leaves to ours what it won both times.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax_layout as jl
from benchmarks import profiles
from jax_layout import choices
from jax_layout.tune.cases import all_cases
from jax_layout.tune.command import heading, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table of the profile; 1 if something failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.choose", description=__doc__)
    add = parser.add_argument
    profiles.add_argument(add)
    add("--quick", action="store_true", help="the most used cases: a trial")
    add("--output", type=Path, metavar="FILE", help="another file than the package's")
    add("--only", metavar="WORD", help="cases with this in their name; others stay")
    add(
        "--again",
        action="store_true",
        help="of points that the table has, the lesser ratio of both runs stays",
    )
    options = parser.parse_args(arguments)
    name = f"{choices.profile()}-jaxlib-{choices.jaxlib_minor()}.json"
    packaged = Path(jl.__file__).parent / "tables" / name
    path = options.output or packaged
    print(heading(path, options.quick), flush=True)
    cases, kept = None, None
    if options.only is not None:
        cases = [case for case in all_cases(options.quick) if options.only in case.name]
    if options.only is not None or options.again:
        kept = choices.load(path).points() if path.exists() else None
    outcome = run(path, options.quick, cases, kept=kept, again=options.again)
    print(outcome)
    return int(bool(outcome.failures))


if __name__ == "__main__":
    sys.exit(profiles.start(main))
