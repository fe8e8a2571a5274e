# SPDX-License-Identifier: Apache-2.0
"""Which of our kernels, a library's or XLA's computes a call: looked up in tables.

A table holds what was measured on one processor class with one jaxlib: for calls of
some sizes, how many times faster than plain XLA each method was. Between these
points it is interpolated over the logarithms of the sizes. What no table of this
processor class and jaxlib knows is ours only where every table that knows it agrees.

`python -m benchmarks.choose` measures the tables of the package, `jax-layout tune`
that of a user's machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jax_layout import _backends
from jax_layout.measured import Table, Work

VARIABLE = "JAX_LAYOUT_CHOICES"
FORMAT = 1
OURS = ("ours",)  # the methods of operators that have one
_PACKAGED = Path(__file__).parent / "tables"
# The best of several methods owes part of its ratio to chance: what is ours is to gain
# more than two medians of one program often differ by.
GAIN = 1.08


# --- what is chosen


_forced: ContextVar[tuple[str, Work | None] | None] = ContextVar("forced", default=None)
_asked: ContextVar[list[Any] | None] = ContextVar("asked", default=None)
_given: list[str | None] = [None]  # what use_choices() was told


def choose(
    work: Work, methods: Sequence[str] = OURS, passes: int = 1, gain: float = GAIN
) -> str | None:
    """The method that runs a call.

    Args:
      work: the call.
      methods: those that can, in the order in which they are tried without a table.
      passes: over as much memory that it stands for. What only moves numbers, and XLA
        would have moved on the way to their reader, costs one more, as long as its own.
        0: XLA is out of the question unless a table knows the call's own case.
      gain: how many times as fast as XLA a method has to be.

    Returns:
      its name, or None for plain `jax.lax`.
    """
    asked = _asked.get()
    if asked is not None:
        asked.append((work, tuple(methods)))
    if (forced := _forced.get()) is not None:
        source, only = forced
        if only not in (None, work):
            return None
        if source != "kernels":
            return source if source in methods else None
    else:
        source = _source()
    if source == "lax" or not methods:
        return None
    if source == "kernels":
        return methods[0]
    return _best(work, tuple(methods), source, passes, gain)


def are_plain() -> bool:
    """Whether everything is to be plain `jax.lax`, also what no table knows."""
    return (_forced.get() or (_source(), None)) == ("lax", None)


def are_all_ours() -> bool:
    """Whether every kernel that can run is to run, whatever is faster."""
    return (_forced.get() or (_source(), None)) == ("kernels", None)


@contextlib.contextmanager
def forced(method: str, only: Work | None = None) -> Iterator[None]:
    """Inside, what is lowered runs a method where it can: a choice for measuring it.

    Args:
      method: its name, "lax" for plain `jax.lax`, or "kernels" for the first of ours
        that can. What cannot is plain `jax.lax`.
      only: the call that is to run it; left out, all.
    """
    token = _forced.set((method, only))
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def asked() -> Iterator[list[tuple[Work, tuple[str, ...]]]]:
    """Collects the calls that are chosen for while programs are lowered inside."""
    found: list[tuple[Work, tuple[str, ...]]] = []
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def use_choices(table: str | os.PathLike[str] | None = None) -> None:
    """Says how it is chosen from now on whether a call is ours, a library's or XLA's.

    Left alone, the table that `jax-layout tune` measured on this machine is used,
    and without it those of the package. Programs that are compiled already stay as
    they are. The environment variable `JAX_LAYOUT_CHOICES` says the same for a
    process; this call comes before it.

    Args:
      table: a file that `jax-layout tune --output` wrote; "packaged", the tables of
        the package alone; "kernels", every kernel that can run, as tests want it;
        "lax", none: all is plain JAX; None, what the variable says, or the default.

    Raises:
      TypeError: if table is none of these.
      ValueError: if the file is no table, a newer version's, or another machine's.

    >>> use_choices("packaged")
    >>> use_choices(None)
    """
    if not (table is None or isinstance(table, str | os.PathLike)):
        raise TypeError(
            f'use_choices: table must be a path, "packaged", "kernels", "lax" or '
            f"None, got {table!r}."
        )
    if table is not None:
        table = os.fspath(table)
        if table not in ("packaged", "kernels", "lax"):
            table = str(Path(table).resolve())
            check_here(load(table), table)
    _given[0] = table


def source() -> str:
    """What choices come from: "kernels", "lax", or the file of the first table."""
    where = _source()
    if where in ("kernels", "lax"):
        return where
    tables = _tables(where)
    return str(tables[0][0]) if tables else "every table that knows a call"


def decided_by(work: Work, methods: Sequence[str] = OURS) -> str:
    """What the choice of a call comes from, as `source`; the table that knows it."""
    where = _source()
    if where in ("kernels", "lax"):
        return where
    for known in work.works():
        for path, table in _tables_for(known, where):
            if any(table.ratio(known, method) is not None for method in methods):
                return str(path)
    return "every table that knows a call"


def packaged_has(work: Work, method: str) -> bool:
    """Whether the package's tables have a method of a call as faster than XLA."""
    return _best(work, (method,), "packaged") is not None


def _source() -> str:
    return _given[0] or os.environ.get(VARIABLE) or ""


@functools.lru_cache(maxsize=65536)
def _best(
    work: Work,
    methods: tuple[str, ...],
    source: str,
    passes: int = 1,
    gain: float = GAIN,
) -> str | None:
    case, known = _known(work, methods, source)
    best = max(known, key=known.__getitem__, default=None)
    if passes == 0 and case != work.case:  # which this machine's tables do not know
        lost = max(_least(packaged(), work, methods).values(), default=gain) < gain
        return None if lost else best or methods[0]
    enough = best is not None and known[best] >= max(passes, 1) * gain
    return best if enough else None


def _known(
    work: Work, methods: tuple[str, ...], source: str
) -> tuple[str, dict[str, float]]:
    """The ratio of each method that tables know, and of which case it is."""
    for each in work.works():
        tables, known = list[Table](), dict[str, float]()
        for _, table in _tables_for(each, source):
            tables.append(table)
            if (known := _least(tables, each, methods)) and not table.quick:
                break
        if known:
            return each.case, known
    for each in work.works():
        if known := _least(packaged(), each, methods):
            return each.case, known
    return "", {}


def _least(
    tables: Iterable[Table], work: Work, methods: tuple[str, ...]
) -> dict[str, float]:
    """The ratio of each method in the table that has it as the slowest."""
    known: dict[str, float] = {}
    for table in tables:  # of one that does not know a method nothing follows
        for m in methods:
            if (ratio := table.ratio(work, m)) is not None:
                known[m] = min(ratio, known.get(m, math.inf))
    return known


# --- files


def _tables_for(work: Work, source: str) -> list[tuple[Path, Table]]:
    """The tables of this machine that may know a call."""
    return [*_tables(source), *(_gpu_tables() if of_gpu(work) else ())]


@functools.cache
def _gpu_tables() -> list[tuple[Path, Table]]:
    """The package's tables of the GPU that is here: this jaxlib's, then the newest."""

    def order(found: tuple[Path, Table]) -> tuple[bool, list[int]]:
        of = found[1].jaxlib
        return of == jaxlib_minor(), [int(number) for number in of.split(".")]

    every = zip(sorted(_PACKAGED.glob("*.json")), packaged(), strict=True)
    here = [(path, table) for path, table in every if table.processor == gpu()]
    return sorted(here, key=order, reverse=True)


@functools.cache
def _tables(source: str) -> list[tuple[Path, Table]]:
    """The tables of this machine, the one that is asked first in front."""
    found = []
    if source != "packaged":
        path = Path(source) if source else user_path()
        try:
            if source or path.exists():
                table = load(path)
                check_here(table, path)
                found.append((path, table))
        except (OSError, ValueError) as error:
            warnings.warn(
                f"{error} The package's own table of choices is used.",
                RuntimeWarning,
                stacklevel=2,
            )
    path = packaged_path()
    if path.exists():
        found.append((path, load(path)))
    return found


@functools.cache
def packaged() -> list[Table]:
    """All tables of the package."""
    return [load(path) for path in sorted(_PACKAGED.glob("*.json"))]


def packaged_path() -> Path:
    """The package's table of this processor class and jaxlib, whether it exists or not.

    The vendor's if there is one: the same instructions are not as fast everywhere.
    """
    of_vendor = _PACKAGED / f"{profile()}-{vendor()}-jaxlib-{jaxlib_minor()}.json"
    return of_vendor if of_vendor.exists() else _PACKAGED / file_name()


def file_name() -> str:
    """What a table of this processor class and jaxlib is called."""
    return f"{profile()}-jaxlib-{jaxlib_minor()}.json"


def user_path() -> Path:
    """Where `jax-layout tune` keeps this machine's table."""
    import platformdirs

    return platformdirs.user_cache_path("jax_layout", appauthor=False) / file_name()


def load(path: str | os.PathLike[str]) -> Table:
    """Reads a table.

    Raises:
      ValueError: if it cannot be read, is no table, a newer version's, or names a
        kernel that does not exist.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"choices: {path} cannot be read as a table: {error}."
        ) from None
    version = content.get("format") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"choices: {path} is not a table: it has no format.")
    if version > FORMAT:
        raise ValueError(
            f"choices: {path} has format {version}, this version reads {FORMAT}."
        )
    try:
        table = Table(
            **{name: str(content[name]) for name in ("profile", "jaxlib", "processor")},
            threads=int(content["threads"]),
            quick=bool(content.get("quick", False)),
            gpu=str(content.get("gpu", "")),
            cases={
                case: {tuple(map(int, sizes)): dict(ratios) for sizes, ratios in points}
                for case, points in content["cases"].items()
            },
        )
        for case, points in table.cases.items():
            for sizes, ratios in points.items():
                _check_point(case, sizes, ratios)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"choices: {path} is not a table: {error!r}.") from None
    return table


def _check_point(
    case: str, sizes: tuple[int, ...], ratios: Mapping[str, float]
) -> None:
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes of {case} must be at least 1, got {sizes}")
    for method, ratio in ratios.items():
        if method not in methods_of(case.split()[0]):
            raise ValueError(f"{case} names {method}, which does not exist")
        if not (isinstance(ratio, int | float) and 0 < ratio < math.inf):
            raise ValueError(f"{case} {sizes}: {method} has the ratio {ratio!r}")


def check_here(table: Table, path: str | os.PathLike[str]) -> None:
    """Raises a ValueError if a table was not measured on this machine."""
    for what, here in (
        ("profile", profile()),
        ("jaxlib", jaxlib_minor()),
        ("processor", processor()),
        ("threads", threads()),
    ):
        there = getattr(table, what)
        if there != here:
            raise ValueError(
                f"choices: {path} is of another machine: its {what} is {there}, "
                f"here it is {here}."
            )
    if table.gpu and gpu() not in ("", table.gpu):
        raise ValueError(
            f"choices: {path} is of another machine: its GPU is {table.gpu}, here it "
            f"is {gpu()}."
        )


def of_gpu(work: Work) -> bool:
    """Whether a call is one of a program for GPUs."""
    return work.case.startswith("cuda ")


@functools.cache
def methods_of(operator: str) -> tuple[str, ...]:
    """The names of all methods of an operator, on this machine or not."""
    native = _backends.module("cpu")
    if native is not None and operator == "gemm":
        return tuple(native.gemm_method_names())
    if native is not None and operator == "conv":
        return tuple(native.conv_method_names())
    return OURS


# --- this machine


@functools.cache
def profile() -> str:
    """The processor class: the level of instruction sets that kernels are of."""
    native = _backends.module("cpu")
    return str(native.isa()["level"]) if native is not None else platform.machine()


@functools.cache
def jaxlib_minor() -> str:
    return ".".join(jaxlib.__version__.split(".")[:2])


@functools.cache
def processor() -> str:
    """Its name; of an x86 its family and model too: the name may tell little."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    return processor_of(text) or platform.processor() or platform.machine()


def processor_of(cpuinfo: str) -> str:
    """What a text of /proc/cpuinfo says that the processor is, "" if it does not."""
    keys = r"^(model name|cpu family|model)\s*: (.*)$"
    found = {key: value.strip() for key, value in re.findall(keys, cpuinfo, re.M)}
    labels = {"model name": "", "cpu family": "family ", "model": "model "}
    return ", ".join(labels[key] + found[key] for key in labels if key in found)


@functools.cache
def vendor() -> str:
    """Who makes the x86 processor: "amd", "intel"; "" if nobody says or it is none."""
    cpuinfo = Path("/proc/cpuinfo")
    return vendor_of(cpuinfo.read_text() if cpuinfo.exists() else "")


def vendor_of(cpuinfo: str) -> str:
    """What a text of /proc/cpuinfo says of the processor's vendor, "" if nothing."""
    found = re.search(r"^vendor_id\s*: (?:Genuine|Authentic)(\w+)$", cpuinfo, re.M)
    return found[1].lower() if found else ""


@functools.cache
def gpu() -> str:
    """The name of the GPU that programs run on, "" where there is none."""
    try:
        return str(jax.devices("cuda")[0].device_kind)
    except RuntimeError:
        return ""


def threads() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def level2_bytes() -> int:
    """What the second-level caches of these processors hold together."""
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")  # 0 or -1 where nobody knows
    except (AttributeError, OSError, ValueError):
        size = 0
    return (size if size > 0 else 1 << 20) * threads()
