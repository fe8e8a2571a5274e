# SPDX-License-Identifier: Apache-2.0
"""Times convolutions: `python -m benchmarks.conv --help`.

In networks, ours is made of this package's operators; "our conv" has only its
convolution in the place of lax's.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import jax_layout as jl
from benchmarks import machine
from benchmarks.conv_cases import ConvCase, all_cases, value
from benchmarks.display import show_products
from benchmarks.harness import Contender, Timing, measure
from benchmarks.results import CaseResult, Report

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases, shows and keeps what was measured; 1 if ours was wrong."""
    options = _parse(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    device = jax.devices(options.device)[0]
    timing = Timing(
        rounds=options.rounds or (3 if options.quick else 9),
        seconds=0.3 if options.quick else options.seconds,
        sample_seconds=4e-3,
        settle_seconds=0.02,
    )
    done = []
    for group, cases in all_cases().items():
        for case in cases:
            title = f"{case.group}: {case.name}"
            if options.set in (group, "all") and (
                not options.case or any(part in title for part in options.case)
            ):
                console.print(title, style="dim", highlight=False)
                done.append(_measure_case(case, device, timing, options.peers))
    settings = dataclasses.asdict(timing)
    report = Report("conv", machine.describe(device), settings, tuple(done))
    show_products(report, console)
    if options.json:
        report.save(options.json)
    return int(any("ours" in case.skipped for case in done))


def _measure_case(
    case: ConvCase, device: jax.Device, timing: Timing, peers: Sequence[str] | None
) -> CaseResult:
    parameters, x = case.operands()
    operands = jax.device_put((parameters, x), device)
    exchanged = case.jax(jl.conv_general_dilated)
    plain = case.jax(jax.lax.conv_general_dilated)
    contenders = [
        _jax_contender("ours", case, case.ours or exchanged, operands),
        _jax_contender("lax", case, plain, operands),
    ]
    if case.ours is not None:
        contenders.append(_jax_contender("our conv", case, exchanged, operands))
    if torch is not None and device.platform == "cpu":
        contenders += _torch_contenders(case, parameters, x)
    contenders = [
        c for c in contenders if peers is None or c.family in ("ours", *peers)
    ]
    first = [_read(contender) for contender in contenders[:2]]
    skipped = {}
    if contenders[1:] and (problem := _compare(first[0], first[1])):
        skipped["ours"] = problem
    samples = measure(contenders, timing)
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves((parameters, x)))
    return CaseResult(
        case.group, case.name, case.config, moved, tuple(samples), skipped
    )


def _read(contender: Contender) -> np.ndarray:
    assert contender.read is not None
    return contender.read(contender.launch(0))


def _jax_contender(family: str, case: ConvCase, f: Any, operands: Any) -> Contender:
    f = jax.jit(value(case, f))
    return Contender(
        family,
        "ours" if family == "ours" else "peer",
        lambda _: f(*operands),
        jax.block_until_ready,
        lambda result: np.concatenate([np.ravel(x) for x in jax.tree.leaves(result)]),
    )


def _torch_contenders(
    case: ConvCase, parameters: Any, x: np.ndarray
) -> list[Contender]:
    f = case.torch(torch)

    def contender(family: str, channels_last: bool) -> Contender:
        order = torch.channels_last if channels_last else torch.contiguous_format

        def tensor(a: np.ndarray, weight: bool) -> Any:
            if case.channels_last and a.ndim == 4:  # HWIO, NHWC
                a = a.transpose((3, 2, 0, 1) if weight else (0, 3, 1, 2))
            t = torch.from_numpy(np.array(a))
            t = t.contiguous(memory_format=order) if t.ndim == 4 else t.contiguous()
            return t.requires_grad_(case.gradient)

        leaves, tree = jax.tree.flatten(parameters)
        weights = [tensor(a, True) for a in leaves]
        given = jax.tree.unflatten(tree, weights)
        operand = tensor(x, False)
        wanted = weights if case.group == "network" else [*weights, operand]

        def launch(_: int) -> Any:
            with torch.set_grad_enabled(case.gradient):
                y = f(given, operand)
                if not case.gradient:
                    return y
                return torch.autograd.grad((y**2).sum(), wanted, allow_unused=True)[0]

        return Contender(
            family, "peer", launch, read=lambda result: result.detach().numpy()
        )

    if x.ndim != 4:
        return [contender("torch", False)]
    return [contender("torch", case.channels_last), contender("torch last", True)][
        : 1 if case.channels_last else 2
    ]


def _compare(found: np.ndarray, expected: np.ndarray) -> str | None:
    """Why a result is wrong. Batch statistics of a deep network lose digits."""
    difference = np.linalg.norm((found - expected).ravel().astype(np.float64))
    scale = np.linalg.norm(expected.ravel().astype(np.float64))
    if found.shape != expected.shape or not difference <= 1e-2 * scale:
        return f"wrong result: off by {difference:.3g} of {scale:.3g}"
    return None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.conv", description=__doc__)
    add = parser.add_argument
    add("--set", choices=["single", "loop", "network", "all"], default="all")
    add("--case", nargs="+", metavar="SUBSTRING", help='of "set: case"')
    add(
        "--peers",
        nargs="*",
        metavar="NAME",
        help='only these: lax "our conv" torch "torch last"',
    )
    add("--device", choices=["cpu", "gpu"], default="cpu")
    add("--rounds", type=int, metavar="N", help="samples per contender (9)")
    add("--seconds", type=float, default=3.0, help="budget of a case (3)")
    add("--quick", action="store_true", help="three rounds, small budget: a trial")
    add("--json", type=Path, metavar="FILE", help="keep the numbers")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
