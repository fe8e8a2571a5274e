# SPDX-License-Identifier: Apache-2.0
"""Times convolutions: `python -m benchmarks.conv --help`.

In networks, ours is made of this package's operators; "our conv" has only its
convolution in the place of lax's.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jax_layout as jl
from benchmarks import profiles, runner, xla_program
from benchmarks.conv_cases import ConvCase, all_cases, value
from benchmarks.display import show_products
from benchmarks.harness import LINGERS, Contender, Timing, measure
from benchmarks.results import CaseResult
from benchmarks.runner import Work

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases, shows and keeps what was measured; 1 if ours was wrong."""
    parser = runner.parser("conv", __doc__, seconds=3.0)
    add = parser.add_argument
    add("--set", choices=["single", "kind", "loop", "network", "all"], default="all")
    peers = 'only these: lax "our conv" torch "torch last"'
    add("--peers", nargs="*", metavar="NAME", help=peers)
    add("--device", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args(arguments)
    console = runner.console()
    device = jax.devices(options.device)[0]
    timing = runner.timing(options, 9, sample_seconds=4e-3, settle_seconds=0.02)

    def work(case: ConvCase) -> Work:
        def run(on_round: Callable[[], None]) -> CaseResult:
            return _measure_case(case, device, timing, options.peers, on_round)

        return Work(case.group, case.name, case.config, run)

    found = all_cases()
    chosen = [group for group in found if options.set in (group, "all")]
    cases = [work(case) for group in chosen for case in found[group]]
    settings = dataclasses.asdict(timing)
    report = runner.record("conv", cases, options, settings, device, console)
    show_products(report, console)
    return int(runner.failed(report))


def _measure_case(
    case: ConvCase,
    device: jax.Device,
    timing: Timing,
    peers: Sequence[str] | None,
    on_round: Callable[[], None],
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
    samples = measure(contenders, timing, on_round)
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves((parameters, x)))
    return CaseResult(
        case.group, case.name, case.config, moved, tuple(samples), skipped
    )


def _read(contender: Contender) -> np.ndarray:
    assert contender.read is not None
    return contender.read(contender.launch(0))


def _jax_contender(family: str, case: ConvCase, f: Any, operands: Any) -> Contender:
    f = jax.jit(value(case, f)).lower(*operands).compile()
    return xla_program.contender(
        family,
        "ours" if family == "ours" else "peer",
        f,
        operands,
        read=lambda result: np.concatenate(
            [np.ravel(x).astype(np.float32) for x in jax.tree.leaves(result)]
        ),
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
            t = torch.from_numpy(np.array(a, np.float32))
            t = t.to(getattr(torch, case.dtype))
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
            family,
            "peer",
            launch,
            read=lambda result: result.detach().float().numpy(),
            lingers=LINGERS,
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


if __name__ == "__main__":
    sys.exit(profiles.start(main))
