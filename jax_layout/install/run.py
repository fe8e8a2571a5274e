# SPDX-License-Identifier: Apache-2.0
"""`jax-layout run`: a script or module as it is, with kernels installed."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from jax_layout.install import compare
from jax_layout.install.install import OPERATORS, install, uninstall
from jax_layout.install.record import Record, readable


class NoScript(Exception):
    """There is nothing to run by that name."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command `jax-layout run` understands."""
    add = parser.add_argument
    add("--report", action="store_true", help="tell what ran as what")
    add(
        "--compare",
        action="store_true",
        help="time each compiled program with kernels and without, at the end",
    )
    add(
        "--only",
        metavar="PRIMITIVE,...",
        help=f"of {', '.join(OPERATORS)}",
    )
    add("--verbose", action="store_true", help="log each operation that is lowered")
    add("-m", dest="module", action="store_true", help="a module's name follows")
    add(
        "target",
        nargs=argparse.REMAINDER,
        metavar="script.py ...",
        help="a script, and its own arguments",
    )


def start(options: argparse.Namespace) -> int:
    """Runs a script as `python` does, and tells at its end what ran as what.

    What the script raises, also `SystemExit`, is raised here, after the report.

    Args:
      options: as `add_options` has them parsed.

    Returns:
      the exit code of a script that ends by itself, 0.

    Raises:
      NoScript: if there is no such script or module, or a primitive is unknown.
    """
    if not options.target:
        raise NoScript("run: expected a script or -m and a module, and its arguments")
    name, *_ = options.target
    missing = not (_is_module(name) if options.module else Path(name).exists())
    if missing:
        kind = "module" if options.module else "file"
        raise NoScript(f"run: there is no {kind} {name}")
    operators = None if options.only is None else options.only.split(",")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_main(options.target, options.module))
        programs = stack.enter_context(compare.watched()) if options.compare else []
        try:
            record = install(operators, verbose=options.verbose)
        except ValueError as error:
            raise NoScript(str(error)) from error
        stack.callback(uninstall)
        try:
            if options.module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        finally:
            report = options.report or options.json
            if report or options.compare:
                times = compare.times(list(programs), operators)
                sys.stdout.flush()
                tell(record, times, report, options.json, sys.stderr)
    return 0


def _is_module(name: str) -> bool:
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
    finally:
        sys.path.remove(os.getcwd())


@contextlib.contextmanager
def _as_main(target: Sequence[str], module: bool) -> Iterator[None]:
    """What `python` sets for a script, undone at the end."""
    name, *arguments = target
    folder = os.getcwd() if module else str(Path(name).resolve().parent)
    argv, path = sys.argv, list(sys.path)
    sys.argv = [name, *arguments]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def tell(
    record: Record,
    times: Sequence[compare.Times],
    report: bool,
    as_json: bool,
    to: TextIO,
) -> None:
    """Prints what was lowered, and the times of programs."""
    if as_json:
        found: dict[str, Any] = record.to_dict() if report else {}
        if times:
            found["programs"] = [each.to_dict() for each in times]
        print(json.dumps(found), file=to)
        return
    try:
        _show(record, times, report, to)
    except ImportError:  # rich
        if report:
            print(record, file=to)
        for each in times:
            print(each, file=to)


def _show(
    record: Record, times: Sequence[compare.Times], report: bool, to: TextIO
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=to, width=None if to.isatty() else 120)
    if report:
        table = Table("primitive", title="what was lowered to what")
        for head in ("ours", "XLA", "not moved"):
            table.add_column(head, justify="right")
        for name, row in record.by_primitive().items():
            kept = readable(row["kept_bytes"])
            table.add_row(name, str(row["ours"]), str(row["XLA"]), kept)
        console.print(table)
    if times:
        table = Table("program", title="each program, with kernels and without")
        for head in ("ours", "without ms", "with ms", "times as fast"):
            table.add_column(head, justify="right")
        for each in times:
            cells = [f"{1e3 * each.plain:.3f}", f"{1e3 * each.ours:.3f}"]
            cells.append(f"{each.ratio:.2f}")
            if each.why_not:
                cells = [each.why_not, "", ""]
            table.add_row(each.program, str(each.calls), *cells)
        console.print(table)
