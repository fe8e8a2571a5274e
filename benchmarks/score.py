# SPDX-License-Identifier: Apache-2.0
"""Permutes of a GPU beside what the model of it predicted.

`PYTHONPATH=tests python -m benchmarks.score permute.json`, with the report of
`benchmarks.permute --device gpu`; the model is tests/ptx/model.py.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.permute_cases import PermuteCase, all_cases
from benchmarks.results import CaseResult, Report

_HEAD = """
| case | | kernel | predicted us | measured us | ratio | predicted % | measured % |
|---|---|---|--:|--:|--:|--:|--:|"""
_ROW = (
    "| {name} | {dtype} | {kernel} | {predicted:.1f} | {measured:.1f} | {ratio:.2f} | "
    "{predicted_share:.0f} | {share:.0f} |"
)


def device_named(kind: str, names: Sequence[str]) -> str:
    """The device of the model that a driver's name of one means.

    >>> device_named("NVIDIA H100 80GB HBM3", ["H100", "H100 PCIe", "H200"])
    'H100'
    >>> device_named("NVIDIA_H100_PCIe", ["H100", "H100 PCIe", "H200"])
    'H100 PCIe'
    """
    found = [name for name in names if name in kind.replace("_", " ")]
    if not found:
        raise ValueError(f"score: the model has {', '.join(names)}, got {kind!r}.")
    return max(found, key=len)


def measured(case: CaseResult) -> tuple[float, float] | None:
    """Microseconds of the kernel, and its % of the fastest copy."""
    kernel, copy = case.sample("kernel", True), case.copy(True)
    if kernel is None or copy is None:
        return None
    return 1e6 * kernel.median, 100 * copy.median / kernel.median


def rows(
    report: Report, predict: Any, known: dict[tuple[str, str], PermuteCase]
) -> Iterator[dict[str, Any]]:
    """What the table has; `predict(case)` is microseconds, % of copy, kernel."""
    for result in report.cases:
        case = known.get((result.name, result.config["dtype"]))
        found = measured(result)
        if case is None or found is None:
            continue
        microseconds, share, kernel = predict(case)
        yield {
            "name": result.name,
            "dtype": result.config["dtype"],
            "kernel": kernel,
            "predicted": microseconds,
            "measured": found[0],
            "ratio": found[0] / microseconds,
            "predicted_share": share,
            "share": found[1],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and keeps the table; 1 if nothing could be compared."""
    parser = argparse.ArgumentParser(prog="benchmarks.score", description=__doc__)
    parser.add_argument("report", type=Path, help="of benchmarks.permute")
    parser.add_argument("--gpu", metavar="NAME", help="by default the report's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the numbers")
    options = parser.parse_args(arguments)

    from native import cuda_emulation  # of tests, as the model is
    from ptx import model, toolkit
    from ptx.predict import share_of_copy

    path = options.report
    report = Report.load(path if path.exists() else runner.partial(path))
    name = device_named(options.gpu or report.machine["gpu"], list(model.DEVICES))
    host, device = toolkit.Host(cuda_emulation()), model.DEVICES[name]

    def predict(case: PermuteCase) -> tuple[float, float, str]:
        share, found, _, kernel = share_of_copy(
            host, device, case.shape, case.axes, case.np_dtype.itemsize
        )
        return found.microseconds, 100 * share, toolkit.kernel_name(kernel)

    known = {(c.name, c.dtype): c for cases in all_cases().values() for c in cases}
    print(_HEAD)
    scored = []
    for row in rows(report, predict, known):
        print(_ROW.format(**row), flush=True)
        scored.append(row)
        if options.json:
            options.json.write_text(json.dumps(scored, indent=1) + "\n")
    if not scored:
        print("score: no case of the report has a kernel and a copy of it")
        return 1
    logs = [math.log(row["ratio"]) for row in scored]
    off = math.exp(sum(map(abs, logs)) / len(logs)) - 1
    print(f"\n{name}: off by {100 * off:.0f}% in the geometric mean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
