# SPDX-License-Identifier: Apache-2.0
"""Measures cases: each method that a program's kernels can run, against plain jax.

A method is a program of its own. All programs of a case take turns, each round in
another order, so that a slow moment of the machine falls on all of them; a ratio is
that of lower quartiles: what else runs only adds time, and a call for which a thread
comes too late takes twice as long, which it may be in half of all rounds. A short
call is timed in a loop inside of one program, over stacked operands, where it pays
what it pays in a program: no dispatch from Python, operands that are not in the
first-level cache, and XLA's freedom to make one kernel of the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jax_layout import choices, stacks
from jax_layout.install.install import installed
from jax_layout.measured import Work
from jax_layout.plain import jnp
from jax_layout.tune.case import Case

# Work -> method -> XLA's time over the method's.
Points = dict[Work, dict[str, float]]

# A short case runs in a loop, over so many bytes of operands and results.
_STACK = 8 << 20
_STEPS = 4, 64
_UNROLLED = 16  # at most, where there is no loop
# A program below this is slower than plain jax by more than a few rounds are off.
_LOSES = 0.95
# Of a GPU's programs: how often each calls, and of how many cases they are compiled
# before one is timed. Not several at once: XLA times its kernels on the GPU meanwhile,
# and takes a slow one where another program's ran between.
_CALLS = 16
_AT_ONCE = 8
# Of sets of operands that take turns, how many at most, and of how many bytes: a weight
# that is used once per step of a program is not in the second-level cache, and its
# pages are not in a buffer of addresses (docs/choices.md has what that changes).
_SETS = 8
_SETS_NBYTES = 96 << 20
# What was just computed is in a cache, of arrays that have fewer bytes together.
_HOT_NBYTES = 16 << 20
# Of a GPU, bytes: two sets at least, or a kernel that leaves the second-level cache
# alone finds its operand there from one call to the next.
_SETS_NBYTES_ON_GPU = 256 << 20
# By dtype, how far results may be apart, of the largest of them.
_TOLERANCES = {
    "bfloat16": 2e-2,
    "float16": 4e-3,
    "float32": 2e-4,
    "complex64": 2e-4,
    "float64": 1e-11,
    "complex128": 1e-11,
}


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long to measure.

    Attributes:
      seconds: of each program of a case; three rounds in any case, one of calls that
        take as long as this four times over.
      rounds: at most.
      sample: seconds that a sample lasts, about, of calls that are shorter.
      total: seconds after which no other case is begun.
      doubts: whether what the package has as ours is XLA's only if a second measurement
        says so too: few rounds are often wrong, and take a whole kind of calls along.
    """

    seconds: float = 0.05
    rounds: int = 15
    sample: float = 1e-3
    total: float = math.inf
    doubts: bool = False


QUICK = Timing(seconds=0.02, rounds=9, sample=5e-4, total=54.0, doubts=True)
# A sample of many programs, between two of which nobody waits.
ON_GPU = Timing(seconds=0.13, rounds=9, sample=8e-3)


@dataclasses.dataclass
class Measured:
    """What was measured.

    Attributes:
      points: of every work that a case asked about. One that several cases asked
        about has the least ratio of each method: whoever asks is not to lose.
      among: of works that cases asked about among others, and that lost nothing there:
        a part of a program is measured less exactly than the whole, and these are
        points only of what no case asks about alone.
      failures: a line for each case, or method of one, that did not run or was wrong.
      left: how many cases there was no time for.
    """

    points: Points = dataclasses.field(default_factory=dict)
    among: Points = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    left: int = 0

    def add(self, other: Measured) -> None:
        keep_least(self.points, other.points)
        keep_least(self.among, other.among)
        self.failures += other.failures

    def settle(self) -> None:
        """Makes points of what no case asked about alone."""
        for work, ratios in self.among.items():
            self.points[work] = ratios | self.points.get(work, {})

    @contextlib.contextmanager
    def failing(self, case: Case) -> Iterator[None]:
        """What fails in it is a failure of the case."""
        try:
            yield
        except Exception as error:  # one case does not end a run
            reason = (str(error) or repr(error)).splitlines()[0]
            self.failures.append(f"{case.name}: {type(error).__name__}: {reason}")

    @property
    def ours(self) -> int:
        """The works that some method of ours does faster than XLA."""
        return sum(
            max(ratios.values()) >= choices.GAIN for ratios in self.points.values()
        )


def keep_least(points: Points, others: Points) -> None:
    """Adds others, of what both have the least."""
    for work, ratios in others.items():
        known = points.setdefault(work, {})
        for method, ratio in ratios.items():
            known[method] = min(ratio, known.get(method, math.inf))


def median(runs: Sequence[Measured]) -> Measured:
    """What several runs come to: of each point the median, the lower one of two.

    On a machine that others use too, programs take up to twice as long in one run as in
    another, however many rounds a run has: XLA's more often than ours.
    """
    seen: dict[Work, dict[str, list[float]]] = {}
    for run in runs:
        for work, ratios in run.points.items():
            for method, ratio in ratios.items():
                seen.setdefault(work, {}).setdefault(method, []).append(ratio)
    points = {
        work: {m: statistics.median_low(each) for m, each in methods.items()}
        for work, methods in seen.items()
    }
    failures = dict.fromkeys(line for run in runs for line in run.failures)
    return Measured(points, {}, [*failures], min(run.left for run in runs))


def measure(
    cases: Iterable[Case],
    timing: Timing,
    on_case: Callable[[Case], None] = lambda case: None,
    platform: str = "cpu",
) -> Measured:
    """Measures cases one after the other.

    Args:
      cases: what to measure.
      timing: how long.
      on_case: called before each.
      platform: jax's name of it.

    Returns:
      the points; a case that fails is one of its failures, and ends nothing.
    """
    found = Measured()
    end = time.monotonic() + timing.total
    rest = iter(cases)
    while batch := [*itertools.islice(rest, 1 if platform == "cpu" else _AT_ONCE)]:
        if time.monotonic() >= end:
            found.left = len(batch) + sum(1 for _ in rest)
            break
        trials = []
        with _compilers(platform) as pool:
            for case in batch:
                on_case(case)
                with found.failing(case), precision(case):
                    trials.append(_trial(case, platform, pool))
        while trials:
            trial = trials.pop(0)
            with found.failing(trial.case), precision(trial.case):
                found.add(trial.measured(timing))
    found.settle()
    return found


def measure_case(
    case: Case, timing: Timing, platform: str = "cpu"
) -> tuple[Points, list[str]]:
    """The points of a case, and what is wrong with the results of its methods."""
    with _compilers(platform) as pool:
        trial = _trial(case, platform, pool)
    found = trial.measured(timing)
    found.settle()
    return found.points, found.failures


def _compilers(platform: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(None if platform == "cpu" else 1)


def precision(case: Case) -> contextlib.AbstractContextManager[Any]:
    """Inside, jax has the dtypes of a case."""
    return jax.enable_x64(bool({"float64", "complex128"} & {*case.dtypes}))


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A case whose programs are being compiled.

    Attributes:
      case: the case.
      sets: operands, which take turns.
      plain: the program that is XLA's.
      variants: by method, and the one work that runs it: the program; what ran it.
      works: how many a program asks about.
      blocking: whether every call is waited for; else programs call many times.
    """

    case: Case
    sets: list[list[Any]]
    plain: Future[Any]
    variants: dict[tuple[str, Work | None], tuple[Future[Any], list[Work]]]
    works: int
    blocking: bool

    def measured(self, timing: Timing) -> Measured:
        """Its points, and what is wrong with the results of its methods."""
        found = Measured()
        if not self.variants:
            return found
        plain = self.plain.result()
        expected = self._first(plain(*self.sets[0]))
        runs = {}
        for key, (variant, _) in self.variants.items():
            compiled = variant.result()
            result = self._first(compiled(*self.sets[0]))
            # A GPU may round float32 to TF32 before it multiplies.
            rounding = 1 if self.blocking else 10
            if apart := difference(result, expected, rounding, self.case.kinked):
                found.failures.append(f"{self.case.name}: {key[0]}: {apart}")
            else:
                runs[key] = compiled
        ratios = self._ratios(plain, runs, timing)
        # So much noise as would count against a work is rare, and hardly comes twice.
        doubted = {
            key: runs[key]
            for key, ratio in ratios.items()
            if (key[1] is not None and ratio < _LOSES)
            or (timing.doubts and self._turns(key, ratio))
        }
        for key, ratio in self._ratios(plain, doubted, timing).items():
            ratios[key] = max(ratio, ratios[key])
        for (method, work), ratio in ratios.items():
            points = found.points
            if work is not None and not self.case.one_call:
                points = points if ratio < _LOSES else found.among
                ratio = undiluted(ratio, self.works)
            ran = self.variants[method, work][1]
            keep_least(points, {each: {method: ratio} for each in ran})
        return found

    def _turns(self, key: tuple[str, Work | None], ratio: float) -> bool:
        """Whether a ratio leaves to XLA what is ours by the package's tables."""
        works = self.variants[key][1]
        return ratio < choices.GAIN and any(
            choices.packaged_has(work, key[0]) for work in works
        )

    def _ratios(
        self, plain: Any, runs: dict[tuple[str, Work | None], Any], timing: Timing
    ) -> dict[tuple[str, Work | None], float]:
        """The time of XLA's program over that of each other."""
        if not runs:
            return {}
        programs = [plain, *runs.values()]
        times = _times(programs, self.sets, timing, self.blocking)
        return {k: times[0] / t for k, t in zip(runs, times[1:], strict=True)}

    def _first(self, results: Any) -> Any:
        """On the host: a copy, as a call may write its result where this one is."""
        first = results if self.blocking else results[0]
        return jax.tree.map(np.array, first)


def _trial(case: Case, platform: str, pool: ThreadPoolExecutor) -> _Trial:
    """A case whose programs a pool compiles."""
    program, sets = program_of(case, platform)
    memory = jax.eval_shape(program, *sets[0]) if case.into else None
    lowered_with = functools.partial(_lowered, case.operators, program, sets[0], memory)
    baseline, works = lowered_with("lax")
    if case.operators:  # which are not asked about where all is to be plain
        _, works = lowered_with("kernels")
    variants: dict[tuple[str, Work | None], tuple[Any, list[Work]]] = {}

    def compiled(lowered: Any) -> Future[Any]:
        # Made here: threads of the pool have not this one's precision.
        own = None if memory is None else jnp.zeros_like(memory)
        return pool.submit(_compiled, lowered, own)

    methods = {work: known for work, known in works}
    every = dict.fromkeys(m for known in methods.values() for m in known)
    wanted: list[tuple[str, Work | None]] = [(method, None) for method in every]
    if not case.together and len(methods) > 1:
        wanted = [(m, work) for work, known in methods.items() for m in known]
    for method, work in wanted:
        lowered, asked = lowered_with(method, work)
        if lowered.as_text() != baseline.as_text():
            ran = [w for w, known in asked if method in known and work in (None, w)]
            variants[method, work] = compiled(lowered), ran
    plain = compiled(baseline)
    return _Trial(case, sets, plain, variants, len(methods), platform == "cpu")


def _compiled(lowered: Any, memory: jax.Array | None) -> Any:
    compiled = lowered.compile()
    return compiled if memory is None else _Into(compiled, memory)


@dataclasses.dataclass
class _Into:
    """A program whose result takes the place of the last one.

    Attributes:
      compiled: the program, to which memory is donated.
      memory: what it wrote last.
    """

    compiled: Any
    memory: jax.Array

    def __call__(self, *given: Any) -> jax.Array:
        self.memory = self.compiled(*given, self.memory)
        return self.memory


def program_of(case: Case, platform: str) -> tuple[Callable[..., Any], list[list[Any]]]:
    """What is timed of a case, and sets of its operands."""
    device = jax.devices(platform)[0]

    def put(stack: tuple[int, ...] = ()) -> list[Any]:
        return [jax.device_put(x, device) for x in case.operands(stack)]

    def copies(number: int) -> list[list[Any]]:
        first = put()
        return [first] + [[jnp.copy(x) for x in first] for _ in range(number - 1)]

    nbytes = case.nbytes()
    if platform != "cpu":
        sets = min(_CALLS, max(2, _SETS_NBYTES_ON_GPU // nbytes))
        return repeated(case.f, sets, _CALLS), [list(itertools.chain(*copies(sets)))]
    if not case.is_short():
        is_hot = case.hot and nbytes < _HOT_NBYTES
        sets = 1 if is_hot else max(1, min(_SETS, _SETS_NBYTES // nbytes))
        return case.f, copies(sets)
    steps = min(max(_STACK // nbytes, _STEPS[0]), _STEPS[1])
    if case.unrolled:
        steps = min(steps, _UNROLLED)
        return _unrolled(case.f, steps, case.shared), [put((steps,))]

    def loop(*given: Any) -> Any:
        shared, stacked = given[: case.shared], given[case.shared :]

        def step(_: None, each: Any) -> Any:
            return None, case.f(*shared, *each)

        return jax.lax.scan(step, None, stacked)[1]

    return loop, [put((steps,))]


def _unrolled(
    f: Callable[..., Any], steps: int, shared: int
) -> Callable[..., list[Any]]:
    """The steps of such a loop, each after the last, of a function of one result."""

    def run(*given: Any) -> list[Any]:
        results: list[Any] = []
        i = jnp.int32(0)
        for _ in range(steps):
            results.append(f(*given[:shared], *(x[i] for x in given[shared:])))
            unlikely = results[-1].ravel()[0] == 12345
            i += 1 + unlikely.astype(jnp.int32)  # the next waits for it
        return results

    return run


def repeated(f: Callable[..., Any], sets: int, calls: int) -> Callable[..., list[Any]]:
    """A function that calls f again and again, each time after the last.

    For GPUs: to start a program takes longer than most kernels.

    Args:
      f: takes arrays.
      sets: how many sets of arguments are given, one after the other; they take turns.
      calls: how often.

    Returns:
      the function, which returns what each call gave.
    """

    def run(*given: Any) -> list[Any]:
        call = jax.jit(lambda *arguments: f(*arguments))  # is lowered once
        each = len(given) // sets
        results: list[Any] = []
        for i in range(calls):
            at = i % sets * each
            arguments = given[at : at + each]
            if results:  # else XLA makes one kernel of several calls
                both = arguments, results[-1]
                arguments, _ = jax.lax.optimization_barrier(both)
            results.append(call(*arguments))
        return results

    return run


def _lowered(
    operators: Sequence[str],
    program: Callable[..., Any],
    operands: Sequence[Any],
    memory: jax.ShapeDtypeStruct | None,
    method: str,
    work: Work | None = None,
) -> tuple[Any, list[tuple[Work, tuple[str, ...]]]]:
    """The program with a method, and what it asked about.

    With memory, it takes that as well, and XLA gives it to the result.
    """
    donated = () if memory is None else (memory,)

    def fresh(*given: Any) -> Any:  # jax keeps what it lowered, by function
        return program(*given[: len(operands)])

    last = len(operands) if donated else ()
    jitted = jax.jit(fresh, donate_argnums=last, keep_unused=bool(donated))
    with (
        installed(operators),
        choices.forced(method, work),
        stacks.are_sliced(),
        choices.asked() as asked,
    ):
        return jitted.lower(*operands, *donated), asked


def undiluted(ratio: float, works: int) -> float:
    """The ratio of one work, from that of a program which has a method for it alone.

    The works are taken to have equal shares of XLA's time, all of it: a work with less
    gains, and loses, more than this says.

    Args:
      ratio: XLA's time over the program's.
      works: how many there are.

    Returns:
      the ratio, at most 10.

    >>> round(undiluted(1.2, 3), 2)  # a sixth is saved: half of the work's time
    2.0
    """
    saved = 1 - 1 / ratio
    return 1 / max(1 - works * saved, 0.1)


def difference(
    found: Any, expected: Any, times: float = 1, kinked: bool = False
) -> str | None:
    """How results are apart, if by more than rounding.

    Args:
      found: a pytree of arrays.
      expected: its like.
      times: how often as much as rounding does no harm.
      kinked: single numbers may be: it is the root of the mean square that counts,
        not the largest.
    """

    def size(x: np.ndarray) -> np.floating[Any]:
        if kinked:
            return np.sqrt(np.mean(np.square(x, dtype=float)))
        return np.abs(x).max(initial=0)

    for y, like in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        y, like = np.asarray(y), np.asarray(like)
        if y.shape != like.shape or y.dtype != like.dtype:
            return f"{y.dtype}{list(y.shape)} for {like.dtype}{list(like.shape)}"
        if y.tobytes() == like.tobytes():
            continue
        if like.dtype.name not in _TOLERANCES:
            if not np.array_equal(y, like):
                return "wrong result"
            continue
        tolerance = times * _TOLERANCES[like.dtype.name]
        if like.dtype.itemsize == 2:
            y, like = y.astype(np.float32), like.astype(np.float32)
        same = (y == like) & np.isinf(like)  # the maximum of nothing
        y, like = np.where(same, 0, y), np.where(same, 0, like)
        finite = like[np.isfinite(like)]
        apart, scale = size(y - like), size(finite)
        if not apart <= tolerance * scale:
            return f"wrong result, off by {apart:.3g} of {scale:.3g}"
    return None


def _times(
    programs: Sequence[Callable[..., Any]],
    sets: Sequence[Any],
    timing: Timing,
    blocking: bool = True,
) -> list[float]:
    """Seconds per call: lower quartiles of rounds."""
    seconds: list[list[float]] = [[] for _ in programs]
    calls = [0] * len(programs)
    turn = 0
    start = time.perf_counter()
    for done in range(timing.rounds):
        spent = time.perf_counter() - start
        if done and spent > timing.seconds * len(programs) * (4 if done < 3 else 1):
            break
        for k in range(len(programs)):
            i = (k + done) % len(programs)
            if not calls[i]:
                once = _sample(programs[i], sets, turn, 1, blocking)
                calls[i] = max(1, min(1000, math.ceil(timing.sample / once)))
            sampled = _sample(programs[i], sets, turn, calls[i], blocking)
            seconds[i].append(sampled)
            turn += calls[i]
    return [sorted(each)[len(each) // 4] for each in seconds]


def _sample(
    program: Callable[..., Any],
    sets: Sequence[Any],
    turn: int,
    calls: int,
    blocking: bool,
) -> float:
    start = time.perf_counter()
    for i in range(turn, turn + calls):
        result = program(*sets[i % len(sets)])
        if blocking:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls
