# SPDX-License-Identifier: Apache-2.0
"""What a program would be otherwise: as plain jax, or laid out for what it does."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_layout.explain.advice import NOTICED
from jax_layout.explain.report import Advice, Cost, Report
from jax_layout.explain.tables import megabytes
from jax_layout.optimize.optimize import is_array, is_formatted, optimize_layout
from jax_layout.optimize.saved_plan import plan_layout

# What counts as more: by a tenth, and by what is noticed.
_MORE = 0.1


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
    compiled: Callable[[Any, Any, Any], Cost],
) -> Iterator[Advice]:
    """Names `optimize_layout` or `plan_layout` where a program moves less with them.

    Args:
      f: the function.
      original: what `optimize_layout` was given, or None if f is not of its making.
      args: its arguments.
      kwargs: the same.
      report: of f.
      compiled: says what a function costs with arguments.
    """
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_formatted)
    if report.platform != "cpu" or any(map(is_formatted, leaves)):
        return
    if not _more(report.cost.moved, 0, report):
        return
    if original is None:
        optimized: Any = optimize_layout(f, platform="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of functions that it leaves as they are
            plan = optimized.layout_report(*args, **kwargs)
        moves_less = plan.optimized and plan.planned_bytes < plan.original_bytes
        if moves_less or plan.products:
            how = "jl.optimize_layout around the whole function"
            then = compiled(optimized, args, kwargs)
            yield from _less("optimize-layout", how, then, report)
    relaid = any(a.code == "weights-relaid" for a in report.warnings)
    if kwargs or not all(map(is_array, leaves)) or not (relaid or original):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        once = plan_layout(original or f, *args, platform="cpu")
    if number := len(once.formats):
        laid = [
            jax.eval_shape(functools.partial(once.params, argnum=i), x)
            for i, x in enumerate(args)
        ]
        how = (
            f"jl.plan_layout, {number} argument{'s' * (number > 1)} laid out once, "
            "before all calls"
        )
        then = compiled(once.jit(), laid, {})
        yield from _less("plan-layout", how, then, report)


def _less(code: str, how: str, then: Cost, report: Report) -> Iterator[Advice]:
    now = report.cost
    if _more(now.moved, then.moved, report):
        yield Advice(
            code,
            f"compiled with {how}, it moves {megabytes(then.moved)} by reorders and "
            f"conversions instead of {megabytes(now.moved)}, with "
            f"{megabytes(then.temporary)} of temporary memory instead of "
            f"{megabytes(now.temporary)}",
            "",
        )


def _more(bytes: int, than: int, report: Report) -> bool:
    return bytes - than > max(_MORE * than, NOTICED * report.bytes)
