# SPDX-License-Identifier: Apache-2.0
"""Times calls of sizes that no table has: `python -m benchmarks.unseen --help`.

They are drawn at random as some of a table's are, with another seed: what the choice
between our kernels and XLA is worth where it has to be guessed.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import profiles, runner, xla_program
from benchmarks.display import show_products
from benchmarks.harness import Timing, measure
from benchmarks.results import FAST_ENOUGH, CaseResult, Report, geometric_mean
from benchmarks.runner import Work
from jax_layout import choices, stacks
from jax_layout.install.install import installed
from jax_layout.tune.case import Case
from jax_layout.tune.cases import DRAWN
from jax_layout.tune.measure import difference, precision, program_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases, shows and keeps what was measured; 1 if results differed."""
    parser = runner.parser("unseen", __doc__, seconds=0.3)
    add = parser.add_argument
    add("--seed", type=int, default=1, help="that of the tables is 0")
    add("--count", type=int, default=100, help="of each kind")
    options = parser.parse_args(arguments)
    if options.seed == 0:
        parser.error("--seed 0 draws what the tables have points of")
    console = runner.console()
    timing = runner.timing(options, rounds=15, sample_seconds=2e-3)
    cases = [
        Work(kind, case.name, _config(case), _runner(kind, case, timing))
        for kind, drawn in DRAWN.items()
        for case in drawn(False, options.seed, options.count)
    ]
    settings = dataclasses.asdict(timing) | {"seed": options.seed}
    device = jax.devices("cpu")[0]
    report = runner.record("unseen", cases, options, settings, device, console)
    show_products(report, console)
    for kind in DRAWN:
        console.print(_summary(report, kind), highlight=False)
    return int(runner.failed(report))


def _summary(report: Report, kind: str) -> str:
    found = [case for case in report.cases if case.group == kind]
    ratios = [ratio for case in found for _, ratio in case.ratios("unseen")]
    if not ratios:
        return f"{kind}: none"
    slow = sum(ratio < FAST_ENOUGH for ratio in ratios)
    return (
        f"{kind}: {len(ratios)} cases, {geometric_mean(ratios):.2f} times plain JAX's "
        f"speed in the geometric mean, least {min(ratios):.2f}, {slow} below "
        f"{FAST_ENOUGH}; {ratios.count(1.0)} are XLA's own"
    )


def _config(case: Case) -> dict[str, str]:
    return {"dtype": case.dtypes[0]}


def _runner(
    kind: str, case: Case, timing: Timing
) -> Callable[[Callable[[], None]], CaseResult]:
    def run(on_round: Callable[[], None]) -> CaseResult:
        with precision(case):
            return _measure(kind, case, timing, on_round)

    return run


def _measure(
    kind: str, case: Case, timing: Timing, on_round: Callable[[], None]
) -> CaseResult:
    program, sets = program_of(case, "cpu")

    def compiled() -> Any:  # anew: jax keeps what it lowered, by function
        fresh = jax.jit(lambda *given: program(*given))
        with installed(case.operators), stacks.are_sliced():
            return fresh.lower(*sets[0]).compile()

    ours = compiled()
    with choices.forced("lax"):
        plain = compiled()
    found = CaseResult(kind, case.name, _config(case), case.nbytes(), ())
    expected = jax.device_get(plain(*sets[0]))
    if apart := difference(
        jax.device_get(ours(*sets[0])), expected, kinked=case.kinked
    ):
        return dataclasses.replace(found, skipped={"ours": apart})
    contenders = [
        xla_program.contender("ours", "ours", ours, *sets),
        xla_program.contender("jnp", "peer", plain, *sets),
    ]
    return dataclasses.replace(
        found, samples=tuple(measure(contenders, timing, on_round))
    )


if __name__ == "__main__":
    sys.exit(profiles.start(main))
