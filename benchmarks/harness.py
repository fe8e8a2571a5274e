# SPDX-License-Identifier: Apache-2.0
"""The timing core: interleaved rounds, medians and spread, page faults.

Every contender runs once per round, in an order that rotates from round to round,
so a slow minute of the machine falls on all of them. One whose threads go on to wait in
a loop for more work, as OpenMP's do, comes last, and a pause after it: else the same
contender would follow it in most rounds, and share its cores with them; and it sits out
three rounds of four. One index counts every launch: contenders use it to walk
through their buffers, so that no launch finds in cache what the one before it left.

Contenders of which XLA made the same program are timed once, and share the sample: what
would tell them apart is noise.
"""

import contextlib
import dataclasses
import gc
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

LINGERS = 0.2  # seconds, OpenMP's threads
_SITS_OUT = 4  # of so many rounds, one who lingers plays in one
Role = Literal["ours", "peer", "copy", "peak"]


def _nothing(result: Any) -> None:
    del result


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Attributes:
      family: who does it: `ours`, `jnp`, `torch`, ...
      role: `copy` marks a copy of the same size, the ceiling of a memory-bound case,
        and `peak` as many operations in registers, that of an arithmetic-bound one.
      launch: starts the work on buffer set `i` (modulo the number of sets).
      wait: blocks until what `launch` returned is there.
      read: gives the result on the host; None where there is nothing to check.
      warm: writes to memory that exists; otherwise each call gets a fresh output.
      lingers: seconds that its threads wait in a loop for more work.
      program: what XLA compiled for it, by `xla_program.text`; "" where it did not.
      times: how often a launch does the work, which seconds are of once.
      timer: calls a function that starts work, and gives the seconds from the first of
        it to the last by the device's own clock. Left out, this process's clock runs
        until the work is there.
    """

    family: str
    role: Role
    launch: Callable[[int], Any]
    wait: Callable[[Any], Any] = _nothing
    read: Callable[[Any], np.ndarray] | None = None
    warm: bool = False
    lingers: float = 0.0
    program: str = ""
    times: int = 1
    timer: Callable[[Callable[[], None]], float] | None = None

    @property
    def label(self) -> str:
        return label(self.family, self.warm)


def label(family: str, warm: bool) -> str:
    """Names a contender in tables: a plus marks a warm output."""
    return family + ("+" if warm else "")


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long to measure.

    Attributes:
      rounds: samples of each contender, fewer (but three) if `seconds` run out; of
        one that lingers a quarter.
      seconds: budget of a case, all its contenders together; one whose second call
        takes twice that, and a second, gives one sample.
      sample_seconds: a sample repeats a short call until it lasts about this long.
      blocking: wait for every call, as on a CPU, or once per sample: on a GPU many
        launches between two synchronisations leave the launch latency out.
      settle_seconds: how long a contender runs untimed before each sample.
    """

    rounds: int = 15
    seconds: float = 8.0
    sample_seconds: float = 2e-4
    blocking: bool = True
    settle_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Sample:
    """The seconds per call of one contender on one case, and their spread."""

    family: str
    role: Role
    warm: bool
    median: float
    q1: float
    q3: float
    best: float
    rounds: int
    calls: int  # per round
    faults: float  # minor page faults per call
    program_of: str | None = None  # the contender that was timed, of the same program

    @property
    def label(self) -> str:
        return label(self.family, self.warm)


def measure(
    contenders: Sequence[Contender],
    timing: Timing,
    on_round: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Times the contenders in interleaved rounds; warm-up calls first.

    Args:
      contenders: what to time.
      timing: how long.
      on_round: called after each round, for a progress bar.

    Returns:
      one sample per contender, in their order.
    """
    timed = [_first_of_program(contenders, k) for k in range(len(contenders))]
    seconds: list[list[float]] = [[] for _ in contenders]
    faults: list[list[float]] = [[] for _ in contenders]
    index = 0
    with _no_garbage_collection():
        calls = []
        for k, contender in enumerate(contenders):
            if timed[k] != k:
                calls.append(0)
                continue
            once, faulted = _run(contender, index, 1, timing.blocking)
            most = max(1.0, 2 * timing.seconds)
            # The first call also warms up, and may compile.
            if once < 0.05 or once > most:
                once, faulted = _run(contender, index + 1, 1, timing.blocking)
            if once > most:  # no time for more
                seconds[k].append(once)
                faults[k].append(faulted)
            launch = once * contender.times
            calls.append(calls_per_sample(launch, timing.sample_seconds))
            index += 2
        end = time.perf_counter() + timing.seconds
        turns = [k for k in sorted({*timed}) if not seconds[k]]
        lingering = any(contenders[k].lingers for k in turns)
        least = min(timing.rounds, 2 * _SITS_OUT + 1 if lingering else 3)
        for done in range(timing.rounds):
            if done >= least and time.perf_counter() > end:
                break
            order = [turns[i] for i in rotation(len(turns), done)]
            if done % _SITS_OUT:
                order = [k for k in order if not contenders[k].lingers]
            for k in sorted(order, key=lambda k: contenders[k].lingers):
                index = _settle(contenders[k], index, timing.settle_seconds)
                elapsed, faulted = _run(contenders[k], index, calls[k], timing.blocking)
                seconds[k].append(elapsed)
                faults[k].append(faulted)
                index += calls[k]
            time.sleep(max((contenders[k].lingers for k in order), default=0.0))
            on_round()
    samples = []
    for k, j in enumerate(timed):
        fault = statistics.median(faults[j])
        sample = summarise(contenders[k], seconds[j], calls[j], fault)
        known = None if j == k else contenders[j].family
        samples.append(dataclasses.replace(sample, program_of=known))
    return samples


def _first_of_program(contenders: Sequence[Contender], k: int) -> int:
    """The first contender that runs the very program of the k-th: often itself."""
    mine = contenders[k].program, contenders[k].warm
    of = ((c.program, c.warm) for c in contenders)
    return next(j for j, key in enumerate(of) if j == k or (mine[0] and key == mine))


def summarise(
    contender: Contender, seconds: Sequence[float], calls: int, faults: float
) -> Sample:
    """Reduces the seconds per call of each round to a sample."""
    q1, median, q3 = (float(q) for q in np.quantile(seconds, [0.25, 0.5, 0.75]))
    return Sample(
        family=contender.family,
        role=contender.role,
        warm=contender.warm,
        median=median,
        q1=q1,
        q3=q3,
        best=min(seconds),
        rounds=len(seconds),
        calls=calls,
        faults=faults,
    )


def calls_per_sample(once: float, sample_seconds: float) -> int:
    """How often to repeat a call of `once` seconds to fill a sample."""
    return max(1, min(10_000, math.ceil(sample_seconds / max(once, 1e-7))))


def rotation(count: int, round_number: int) -> list[int]:
    """The order of the contenders in a round: another one goes first each time."""
    return [(round_number + k) % count for k in range(count)]


def _settle(contender: Contender, index: int, seconds: float) -> int:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        contender.wait(contender.launch(index))
        index += 1
    return index


def _run(
    contender: Contender, index: int, calls: int, blocking: bool
) -> tuple[float, float]:
    """Seconds and page faults per call; a call includes releasing its output."""
    launch, wait = contender.launch, contender.wait
    if contender.timer is not None:

        def start_all() -> None:
            for i in range(index, index + calls):
                launch(i)

        return contender.timer(start_all) / (calls * contender.times), 0.0
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    result = None
    start = time.perf_counter()
    for i in range(index, index + calls):
        result = launch(i)
        if blocking:
            wait(result)
            result = None
    if not blocking:
        wait(result)
    elapsed = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    calls *= contender.times
    return elapsed / calls, faults / calls


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
