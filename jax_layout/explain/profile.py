# SPDX-License-Identifier: Apache-2.0
"""Counts the reorders that really run, and their time, with jax's own profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend.backend
from jax.profiler import ProfileData

from jax_layout.explain import compiled, hlo
from jax_layout.explain.places import Place, origin


@dataclasses.dataclass(frozen=True)
class Run:
    """A reorder that ran.

    Attributes:
      program: the compiled program's name, "jit_f".
      op: the HLO instruction.
      kind: as in `Reorder`: "transpose", "relayout", "copy", "permute".
      source: the user's "file:line", "" where XLA has lost it.
      count: how often.
      seconds: altogether; devices and threads that run at the same time add up. None
        inside of loops that jaxlib 0.12 runs as one kernel on a CPU.
    """

    program: str
    op: str
    kind: str
    source: str
    count: int
    seconds: float | None


@dataclasses.dataclass
class Profile:
    """What ran inside of `with profile()`; filled at its end.

    Attributes:
      runs: the reorders, the longest first.
      elapsed: seconds that the block took, with what it had started.
      calls: of compiled programs.
      page_faults: of the process: pages of memory that Linux had to make. With
        `keep_memory` there are fewer.
    """

    runs: tuple[Run, ...] = ()
    elapsed: float = 0
    calls: int = 0
    page_faults: int = 0

    @property
    def seconds(self) -> float:
        """Of all reorders that could be timed."""
        return sum(run.seconds or 0 for run in self.runs)

    def to_json(self) -> str:
        """The profile as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        lines = [
            f"{sum(run.count for run in self.runs)} reorders, "
            f"{1e3 * self.seconds:.3g} ms in {1e3 * self.elapsed:.3g} ms",
            f"{self.page_faults} page faults in {self.calls} calls",
        ]
        if self.calls:
            lines[-1] += f", {self.page_faults / self.calls:.0f} each"
        for run in self.runs:
            time = "not timed" if run.seconds is None else f"{1e3 * run.seconds:.3f} ms"
            lines.append(
                f"{time:>12}  {run.count:6d} x  {run.kind:9}  "
                f"{run.program}/{run.op}  {run.source}"
            )
        return "\n".join(lines)


@contextlib.contextmanager
def profile(directory: str | Path | None = None) -> Iterator[Profile]:
    """Records the reorders that run inside a `with` block.

    Jax's profiler traces the block, so none other may run meanwhile. The end of the
    block waits for every array; what computes a result that was thrown away may
    still be running then, and is not counted.

    Args:
      directory: where the trace stays, for XProf, TensorBoard or Perfetto, with
        every reorder named once more, by kind and source line, in a file of its own,
        `reorders.trace.json`; left out, nothing stays.

    Yields:
      the `Profile`, empty until the end of the block.

    >>> f = jax.jit(lambda x: jax.numpy.sin(x).T)
    >>> with profile() as p:
    ...     y = f(jax.numpy.ones((512, 256)))
    >>> [(run.kind, run.count) for run in p.runs]
    [('transpose', 1)]
    """
    result = Profile()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its cost would be in the times
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        before = set(Path(directory).rglob("*.xplane.pb"))
        jax.block_until_ready(jax.live_arrays())  # what runs now is not asked for
        jax.profiler.start_trace(directory, profiler_options=options)
        faults, start = _page_faults(), time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation("jax_layout.explain.profile"):
                yield result
                jax.effects_barrier()
                jax.block_until_ready(jax.live_arrays())
        finally:
            result.elapsed = time.perf_counter() - start
            result.page_faults = _page_faults() - faults
            jax.profiler.stop_trace()
        events = []
        for path in set(Path(directory).rglob("*.xplane.pb")) - before:
            events += list(_events(path))
        result.calls = len({event.run for event in events} - {0})
        programs = _programs(events)
        known = {
            (number, r.op): r for number, p in programs.items() for r in _reorders(p)
        }
        timed = [
            (event, known[event.program, event.op])
            for event in events
            if (event.program, event.op) in known
        ]
        runs = [*_runs(timed)]
        for number, program in programs.items():
            runs += _in_kernels(program, [e for e in events if e.program == number])
        result.runs = tuple(sorted(runs, key=lambda run: -(run.seconds or 0)))
        _write(Path(directory) / "reorders.trace.json", timed)


@dataclasses.dataclass(frozen=True)
class _Event:
    module: str
    program: int
    run: int  # the same for all of a call; 0 if that is not known
    op: str
    start: float  # nanoseconds
    duration: float
    track: str


def _events(path: Path) -> Iterator[_Event]:
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            if line.name == "XLA Ops":
                continue  # a GPU's kernels once more, which are there by stream
            for event in line.events:
                stats = {key: value for key, value in event.stats if key}
                if "hlo_op" in stats:
                    yield _Event(
                        str(stats.get("hlo_module", "")),
                        int(stats.get("program_id", 0)),
                        int(stats.get("run_id", 0)),
                        str(stats["hlo_op"]),
                        event.start_ns,
                        event.duration_ns,
                        f"{plane.name} {line.name}",
                    )


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _programs(events: list[_Event]) -> dict[int, hlo.Module]:
    """The compiled programs that ran, by id, as far as they are still alive."""
    names = {event.module for event in events}
    wanted = {event.program for event in events}
    found = {}
    for client in jax.extend.backend.backends().values():
        for executable in client.live_executables():
            for module in executable.hlo_modules():
                if module.name in names:
                    number = _id(module.as_serialized_hlo_module_proto())
                    if number in wanted:
                        found[number] = hlo.parse(module.to_string())
    return found


def _id(proto: bytes) -> int:
    """Field 5 of an HloModuleProto, a varint; 0 where it is left out."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = proto[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(proto):
        field, kind = divmod(varint(), 8)
        if kind == 0:
            value = varint()
            if field == 5:
                return value
        elif kind == 2:
            size = varint()
            at += size
        else:
            at += {1: 8, 5: 4}[kind]
    return 0


@dataclasses.dataclass(frozen=True)
class _Reorder:
    program: str
    op: str
    kind: str
    source: str
    computation: str


def _reorders(program: hlo.Module) -> Iterator[_Reorder]:
    for computation in program.trips:
        for i in program.computations[computation]:
            kind, _ = compiled.reorder_kind(program, computation, i)
            if kind:
                line, _ = origin(Place(program, computation, i))
                yield _Reorder(program.name, i.name, kind, line, computation)


def _runs(timed: list[tuple[_Event, _Reorder]]) -> Iterator[Run]:
    groups: dict[_Reorder, list[_Event]] = {}
    for event, reorder in timed:
        groups.setdefault(reorder, []).append(event)
    for r, group in groups.items():
        seconds = sum(event.duration for event in group) / 1e9
        yield Run(r.program, r.op, r.kind, r.source, len(group), seconds)


def _in_kernels(program: hlo.Module, events: list[_Event]) -> Iterator[Run]:
    """Reorders inside of calls that a CPU runs as one kernel, and does not time."""
    for computation, trips in program.trips.items():
        for i in program.computations[computation]:
            if 'xla_cpu_small_call="true"' not in i.attributes:
                continue
            calls = sum(event.op == i.name for event in events)
            inside = program.below(i)
            for r in _reorders(program):
                if calls and r.computation in inside:
                    times = program.trips[r.computation].times // trips.times
                    yield Run(r.program, r.op, r.kind, r.source, calls * times, None)


def _write(path: Path, timed: list[tuple[_Event, _Reorder]]) -> None:
    """A track of reorders per thread or device, in Chrome's trace format."""
    tracks = list(dict.fromkeys(event.track for event, _ in timed))
    items: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": n, "name": "thread_name", "args": {"name": track}}
        for n, track in enumerate(tracks)
    ]
    for event, r in timed:
        items.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks.index(event.track),
                "name": f"{r.kind} {r.source.rsplit('/', 1)[-1]}".strip(),
                "ts": event.start / 1e3,  # microseconds
                "dur": event.duration / 1e3,
                "args": {"op": r.op, "program": r.program, "source": r.source},
            }
        )
    path.write_text(json.dumps({"traceEvents": items}))
