# SPDX-License-Identifier: Apache-2.0
"""Times permutes: `python -m benchmarks.permute --help`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks import display, plot, profiles, runner
from benchmarks.buffers import (
    ON_GPU,
    ROTATION,
    Buffers,
    DeviceBuffers,
    always_allocate_new_pages,
    bits,
)
from benchmarks.harness import Contender, Timing, measure
from benchmarks.peers import (
    Unsupported,
    cuda_peers,
    cutensor_peer,
    jax_peers,
    native_peers,
    numpy_peer,
    onednn_peer,
    torch_peer,
)
from benchmarks.permute_cases import PermuteCase, all_cases
from benchmarks.results import CaseResult
from benchmarks.runner import Work

_LIBRARIES = (
    jax_peers,
    native_peers,
    cuda_peers,
    numpy_peer,
    torch_peer,
    onednn_peer,
    cutensor_peer,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases, shows and keeps what was measured; 1 if ours was wrong."""
    options = _parse(arguments)
    always_allocate_new_pages()
    device = jax.devices(options.device)[0]
    console = runner.console()
    on_gpu = options.device == "gpu"
    timing = runner.timing(
        options,
        rounds=15,
        sample_seconds=2e-2 if on_gpu else 2e-4,
        blocking=not on_gpu,
        settle_seconds=0.0 if on_gpu else 1e-3,
    )
    rotation = ON_GPU if on_gpu else ROTATION
    rotation = rotation // 8 if options.quick else rotation

    def work(case: PermuteCase) -> Work:
        def run(on_round: Callable[[], None]) -> CaseResult:
            given = case, device, timing, rotation, options.peers, on_round
            return _measure_case(*given)

        return Work(case.group, case.name, case.config, run)

    cases = [work(case) for case in select(options.set)]
    settings = {**dataclasses.asdict(timing), "rotation_bytes": rotation}
    report = runner.record("permute", cases, options, settings, device, console)
    display.show(report, console)
    if options.plot:
        plot.draw(report, options.plot)
    return int(runner.failed(report))


def select(group: str) -> list[PermuteCase]:
    """The cases of a set, or all."""
    groups = all_cases()
    return [c for g in groups if group in (g, "all") for c in groups[g]]


def _measure_case(
    case: PermuteCase,
    device: jax.Device,
    timing: Timing,
    rotation: int,
    peers: Sequence[str] | None,
    on_round: Callable[[], None],
) -> CaseResult:
    buffers = (
        Buffers(case, rotation)
        if device.platform == "cpu"
        else DeviceBuffers(case, device, rotation)
    )
    contenders: list[Contender] = []
    skipped: dict[str, str] = {}
    for library in _LIBRARIES:
        try:
            contenders += library.contenders(case, buffers, device)
        except Unsupported as reason:
            skipped[library.__name__.rpartition(".")[2]] = str(reason)
    contenders = [c for c in contenders if _wanted(c, peers)]
    expected = buffers.expected(case)
    for contender in list(contenders):
        buffers.poison()
        if problem := check(contender, expected):
            skipped[contender.label] = problem
            contenders.remove(contender)
    del expected
    samples = measure(contenders, timing, on_round)
    moved = 2 * case.nbytes
    return CaseResult(
        case.group, case.name, case.config, moved, tuple(samples), skipped
    )


def check(contender: Contender, expected: np.ndarray) -> str | None:
    """Why a contender must not be timed: it fails, or its result is wrong."""
    try:
        result = contender.launch(0)
        contender.wait(result)
    except Unsupported as reason:
        return str(reason)
    if contender.read is None:
        return None
    found = bits(contender.read(result))
    return None if np.array_equal(found, expected) else "wrong result"


def _wanted(contender: Contender, peers: Sequence[str] | None) -> bool:
    library = contender.family.split()[0]  # "jnp" of "jnp eager"
    return contender.role != "peer" or peers is None or library in peers


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runner.parser("permute", __doc__, seconds=8.0)
    add = parser.add_argument
    add("--set", choices=[*all_cases(), "all"], default="ml", help="which cases")
    add("--peers", nargs="*", metavar="NAME", help="only these: jnp numpy torch ...")
    add("--device", choices=["cpu", "gpu"], default="cpu")
    add("--plot", type=Path, metavar="FILE", help="draw them (PNG)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(profiles.start(main))
