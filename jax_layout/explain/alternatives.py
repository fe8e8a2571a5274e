# SPDX-License-Identifier: Apache-2.0
"""What a program would be otherwise: as plain jax, or laid out for what it does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_layout.explain.report import Advice, Cost, Report
from jax_layout.explain.tables import megabytes
from jax_layout.optimize.optimize import is_formatted, optimize_layout
from jax_layout.optimize.saved_plan import plan_layout

# What counts as more: by a tenth, and by a hundredth of all that the program reads and
# writes.
_MORE, _NOTICED = 0.1, 0.01


def worse(report: Report) -> Iterator[Advice]:
    """Warns of a program that costs more than it would without this package."""
    now, what = report.cost, "our kernels"
    if report.before is not None:
        then, what = report.before.cost, "jl.optimize_layout"
    elif report.plain is not None:
        then = report.plain
    else:
        return
    facts = []
    for before, after, name in (
        (then.moved, now.moved, "reorders and conversions"),
        (then.temporary, now.temporary, "temporary memory"),
    ):
        if _more(after, before, report):
            facts.append(f"{megabytes(after)} of {name} instead of {megabytes(before)}")
    if facts:
        advice = (
            "measure both, and leave the function as it was if it is slower"
            if report.before is not None
            else 'measure both: jl.use_choices("lax") runs it as plain jax'
        )
        message = f"made worse by {what}: {' and '.join(facts)}; {advice}"
        yield Advice("made-worse", message, "")


def laid_out(
    f: Any,
    original: Any,
    args: Any,
    kwargs: Any,
    report: Report,
    compiled: Callable[[Any], Cost],
) -> Iterator[Advice]:
    """Names `optimize_layout` or `plan_layout` where a program moves less with them.

    Args:
      f: the function.
      original: what `optimize_layout` was given, or None if f is not of its making.
      args: its arguments.
      kwargs: the same.
      report: of f.
      compiled: says what a function costs with these arguments.
    """
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_formatted)
    moved = report.reordered_bytes()
    if report.platform != "cpu" or any(map(is_formatted, leaves)):
        return
    if not _more(moved, 0, report):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that it leaves as they are
        optimized: Any = optimize_layout(original or f, platform="cpu")
        plan = optimized.layout_report(*args, **kwargs)
        planned = _planned(plan)
        if original is None and planned < plan.original_bytes:
            yield from _optimized(report, compiled(optimized))
        relaid = any(a.code == "weights-relaid" for a in report.warnings)
        if kwargs or not (relaid or original):
            return
        once = plan_layout(original or f, *args, platform="cpu")
    laid = planned if once.report is None else _planned(once.report)
    if once.formats and _more(min(moved, planned), laid, report):
        number = len(once.formats)
        yield Advice(
            "plan-layout",
            f"jl.plan_layout lays out {number} argument{'s' * (number > 1)} once, "
            f"before all calls: its plan re-orders {megabytes(laid)} on each, that of "
            f"jl.optimize_layout {megabytes(planned)}",
            "",
        )


def _optimized(report: Report, then: Cost) -> Iterator[Advice]:
    now = report.cost
    grown = _more(then.temporary, now.temporary, report)
    if _more(now.moved, then.moved, report) and not grown:
        yield Advice(
            "optimize-layout",
            "compiled with jl.optimize_layout around the whole function, it moves "
            f"{megabytes(then.moved)} by reorders and conversions instead of "
            f"{megabytes(now.moved)}, with {megabytes(then.temporary)} of temporary "
            f"memory instead of {megabytes(now.temporary)}",
            "",
        )


def _more(bytes: int, than: int, report: Report) -> bool:
    return bytes - than > max(_MORE * than, _NOTICED * report.bytes)


def _planned(report: Any) -> int:
    return report.planned_bytes if report.optimized else report.original_bytes
