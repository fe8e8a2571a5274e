# SPDX-License-Identifier: Apache-2.0
"""Times products of matrices: `python -m benchmarks.gemm --help`."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import profiles, runner, xla_program
from benchmarks.display import show_products
from benchmarks.gemm_cases import GemmCase, all_cases
from benchmarks.harness import LINGERS, Contender, Role, Timing, measure, summarise
from benchmarks.peers import peak_peer, sweep_peer
from benchmarks.peers.torch_peer import synchronize
from benchmarks.results import CaseResult
from benchmarks.runner import Work
from jax_layout import installed

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

# Operands to take turns with: a weight that is used once per step is not in the
# second-level cache.
_SETS = 3

# Peers whose first call compiles nothing. One whose call outlasts a case is called
# once, and not at all where its seconds per operation tell that it will again.
_COMPILED = "torch", "jnp onednn"
_slow: dict[tuple[str, str], float] = {}

# What a GPU may round to TF32.
_ROUNDED = "float32", "complex64"

# What jax offers for bf16 on a CPU beyond its default.
_ONEDNN: dict[str, str | bool] = {"xla_cpu_experimental_onednn_custom_call": True}


def main(
    arguments: Sequence[str] | None = None,
    name: str = "gemm",
    groups: Sequence[str] = ("square", "skinny", "attention", "tiny"),
    found: Mapping[str, Sequence[GemmCase]] | None = None,
) -> int:
    """Runs the cases, shows and keeps what was measured; 1 if ours was wrong."""
    parser = runner.parser(name, __doc__, seconds=4.0)
    add = parser.add_argument
    add("--set", choices=[*groups, "all"], default="all", help="which cases")
    add("--peers", nargs="*", metavar="NAME", help='only these: jnp torch "jnp onednn"')
    add("--device", choices=["cpu", "gpu"], default="cpu")
    add("--highest", action="store_true", help="float32 and complex64, without TF32")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)  # for the float64 cases
    if options.highest:
        jax.config.update("jax_default_matmul_precision", "highest")
    device = jax.devices(options.device)[0]
    console = runner.console()
    on_gpu = options.device == "gpu"
    timing = runner.timing(
        options,
        rounds=15,
        sample_seconds=2e-2 if on_gpu else 4e-3,
        blocking=not on_gpu,
        settle_seconds=0.0 if on_gpu else 0.01,
    )

    def work(case: GemmCase) -> Work:
        def run(on_round: Callable[[], None]) -> CaseResult:
            given = case, device, timing, options.peers, options.highest, on_round
            return _measure_case(*given)

        return Work(case.group, case.name, case.config, run)

    found = found or all_cases()
    chosen = [group for group in groups if options.set in (group, "all")]
    cases = [
        work(case)
        for group in chosen
        for case in found[group]
        if case.dtype in _ROUNDED or not options.highest
    ]
    settings = dataclasses.asdict(timing)
    if options.highest:
        settings["precision"] = "highest"
    report = runner.record(name, cases, options, settings, device, console)
    show_products(report, console)
    return int(runner.failed(report))


def _measure_case(
    case: GemmCase,
    device: jax.Device,
    timing: Timing,
    peers: Sequence[str] | None,
    highest: bool,
    on_round: Callable[[], None],
) -> CaseResult:
    limit = max(2.0, 2 * timing.seconds)
    on_gpu = device.platform == "gpu"
    operands = case.on_device(device) if on_gpu else case.operands()
    sets = [[_copied(x, device) for x in operands] for _ in range(_SETS)]
    contenders = _jax_contenders(case, sets, device)
    if torch is not None and case.torch is not None:
        contenders += _torch_contenders(case, operands, device, highest)
    contenders = [
        c for c in contenders if c.role == "ours" or peers is None or c.family in peers
    ]
    if case.swept and device.platform == "cpu":
        contenders += sweep_peer.contenders(sets)
    if case.group != "tiny" and device.platform == "cpu":
        contenders += peak_peer.contenders(case.dtype, case.flops)
    skipped = {}
    samples = []
    expected = _exact(case, operands)
    tf32 = on_gpu and not highest
    for contender in list(contenders):
        key = contender.family, case.dtype
        if (wait := case.flops * _slow.get(key, 0.0)) > limit:
            skipped[contender.label] = f"slow: about {wait:.0f} s a call"
            contenders.remove(contender)
            continue
        start = time.perf_counter()
        try:
            result = contender.launch(0)
            contender.wait(result)
        except (RuntimeError, TypeError) as error:
            problem: str | None = str(error).splitlines()[0]
        else:
            took = time.perf_counter() - start
            problem = None
            if contender.read is not None:
                found = contender.read(result)
                problem = compare(found, expected, case.dtype, tf32)
        if problem:
            skipped[contender.label] = problem
            contenders.remove(contender)
        elif took > limit and contender.family in _COMPILED:
            samples.append(summarise(contender, [took], 1, 0.0))
            contenders.remove(contender)
            _slow[key] = took / max(1, case.flops)
    samples = measure(contenders, timing, on_round) + samples
    moved = sum(x.nbytes for x in operands)
    moved += expected.size * operands[0].dtype.itemsize
    return CaseResult(
        case.group, case.name, case.config, moved, tuple(samples), skipped, case.flops
    )


def _jax_contenders(
    case: GemmCase, sets: list[list[jax.Array]], device: jax.Device
) -> list[Contender]:
    if device.platform != "cpu":
        return [_many("ours", case.ours, sets), _many("jnp", case.jnp, sets)]
    with installed(None if case.installed else ()):
        ours = jax.jit(case.ours).lower(*sets[0]).compile()
    functions = {"ours": ours, "jnp": jax.jit(case.jnp).lower(*sets[0]).compile()}
    if case.group != "tiny" and case.flops and _onednn_takes(case.dtype):
        lowered = jax.jit(case.jnp).lower(*sets[0])
        functions["jnp onednn"] = lowered.compile(compiler_options=_ONEDNN)

    def contender(family: str, f: Any) -> Contender:
        role: Role = "ours" if family == "ours" else "peer"
        return xla_program.contender(family, role, f, *sets, read=_first)

    return [contender(family, f) for family, f in functions.items()]


def _many(family: str, f: Callable[..., Any], sets: list[list[jax.Array]]) -> Contender:
    """On a GPU: many in a program, so that what is timed is the device."""
    run = xla_program.repeated(f, sets)
    return Contender(
        family,
        "ours" if family == "ours" else "peer",
        lambda i: run(),
        jax.block_until_ready,
        lambda results: _first(results[0]),
        times=xla_program.TIMES_ON_GPU,
    )


def _copied(x: Any, device: jax.Device) -> jax.Array:
    return jnp.copy(x) if isinstance(x, jax.Array) else jax.device_put(x, device)


def _onednn_takes(dtype: str) -> bool:
    """XLA asks the processor whether oneDNN takes 16 bits; capped, that then fails."""
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA")
    refused = {None: (), "AVX2": ("bfloat16", "float16")}.get(cap, ("float16",))
    return dtype not in refused


def _torch_contenders(
    case: GemmCase, operands: Sequence[Any], device: jax.Device, highest: bool
) -> list[Contender]:
    on_gpu = device.platform == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return []
    torch.backends.cuda.matmul.allow_tf32 = not highest  # as jax does

    def tensor(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return torch.from_dlpack(x).clone()
        if x.dtype == jnp.bfloat16:
            return torch.from_numpy(x.copy().view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x.copy())

    sets = [[tensor(x) for x in operands] for _ in range(_SETS)]
    assert case.torch is not None
    f = case.torch(torch)

    def launch(i: int) -> Any:
        with torch.no_grad():
            return f(*sets[i % _SETS])

    def read(result: Any) -> np.ndarray:
        tensor = result[0] if isinstance(result, tuple) else result
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    wait = synchronize if on_gpu else (lambda _: None)
    lingers = 0.0 if on_gpu else LINGERS
    return [Contender("torch", "peer", launch, wait, read, lingers=lingers)]


def _first(result: Any) -> np.ndarray:
    return np.asarray(result[0] if isinstance(result, list | tuple) else result)


def _exact(case: GemmCase, operands: Sequence[Any]) -> np.ndarray:
    """jnp's result in float32 or wider, at full precision."""
    wide = [x.astype(np.float32) if x.dtype.itemsize < 4 else x for x in operands]
    with jax.default_matmul_precision("highest"):
        return _first(jax.jit(case.jnp)(*wide))


def compare(
    found: np.ndarray, expected: np.ndarray, dtype: str, tf32: bool
) -> str | None:
    """Why a result is wrong: an error beyond a few roundings of its largest value.

    Args:
      found: the result.
      expected: the same in float32 or wider.
      dtype: of the operands.
      tf32: whether operands of float32 may be rounded to 11 bits.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        tolerance = 0.0
    elif tf32 and dtype in _ROUNDED:
        tolerance = 2.0**-9
    else:  # 16-bit results are rounded once, long sums are in float32 and wider
        eps = jnp.finfo(dtype)
        tolerance = (8 if eps.bits < 32 else 256) * float(eps.eps)
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    left, right = found.astype(wide), expected.astype(wide)
    apart = np.where(left == right, 0, left) - np.where(left == right, 0, right)
    difference = np.abs(apart).max(initial=0)  # infinities are equal, or infinitely off
    scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=0))
    if found.shape != expected.shape or not difference <= tolerance * scale:
        return f"wrong result: off by {difference:.3g} of {scale:.3g}"
    return None


if __name__ == "__main__":
    sys.exit(profiles.start(main))
