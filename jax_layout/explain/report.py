# SPDX-License-Identifier: Apache-2.0
"""What `explain` found, as a value: text, rich, HTML, JSON and a chart of it."""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Reorder:
    """A transpose, copy or relayout.

    Attributes:
      stage: "jaxpr", as the program says it, or "hlo", as it is compiled.
      op: name of the primitive or of the HLO instruction.
      kind: "transpose", "relayout" (a copy to another order), "copy" (to the same),
        or "permute", a custom call of ours.
      shape: of the result, "f32[8,56,56,64]".
      bytes: read and written each time, by the fusion that it is part of.
      trips: how often it runs.
      trips_known: whether that is known; a loop of unknown length counts once.
      fused: whether arithmetic shares the pass over memory.
      share: of the roofline time of the whole program; None in the jaxpr.
      source: the user's "file:line", "" where XLA has lost it.
      cause: who asked for it.
    """

    stage: str
    op: str
    kind: str
    shape: str
    bytes: int
    trips: int
    trips_known: bool
    fused: bool
    share: float | None
    source: str
    cause: str

    @property
    def total_bytes(self) -> int:
        """Read and written by all its trips."""
        return self.bytes * self.trips


@dataclasses.dataclass(frozen=True)
class Product:
    """A convolution or a product of matrices in the compiled program.

    Attributes:
      op: name of the HLO instruction.
      kind: "gemm" or "convolution".
      implementation: what runs it.
      detail: sizes, formats of the operands, fused epilogue, as far as known.
      trips: how often it runs.
      trips_known: whether that is known.
      source: the user's "file:line".
    """

    op: str
    kind: str
    implementation: str
    detail: str
    trips: int
    trips_known: bool
    source: str


@dataclasses.dataclass(frozen=True)
class Value:
    """An array whose memory format is known.

    Attributes:
      role: "argument", "result", or "tag" of `with_memory_format`.
      name: of an argument, as XLA knows it.
      shape: logical, "f32[8,3,32,32]".
      format: "row-major", or "NHWC" and the like, of a logically NCHW array.
      source: the user's "file:line" of a tag.
    """

    role: str
    name: str
    shape: str
    format: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Advice:
    """A warning.

    Attributes:
      code: "format-dropped", "convolution-in-loop", "nhwc-gradient-in-loop",
        "grouped-convolution", "weights-relaid", "16-bit-dot", "transposed-operand".
      message: what is wrong, and what to do.
      source: the user's "file:line".
    """

    code: str
    message: str
    source: str


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """Where memory order costs time in a program; see `explain`.

    Attributes:
      function: its name.
      platform: "cpu", "cuda".
      device: what it is compiled for.
      reorders: every transpose, copy and relayout.
      products: every convolution and GEMM.
      values: memory formats of arguments, results and tagged values.
      warnings: what to change.
      bytes: read and written by the whole compiled program.
      flops: of its convolutions and GEMMs.
      bandwidth: bytes per second of a copy.
      peak: flops per second of a GEMM.
      roofline: where these two come from.
      before: the report of the original, of a function that was optimised.
    """

    function: str
    platform: str
    device: str
    reorders: tuple[Reorder, ...]
    products: tuple[Product, ...]
    values: tuple[Value, ...]
    warnings: tuple[Advice, ...]
    bytes: int
    flops: int
    bandwidth: float
    peak: float
    roofline: str
    before: Report | None = None

    @property
    def seconds(self) -> float:
        """Roofline time of the program: max(flops / peak, bytes / bandwidth)."""
        return max(self.flops / self.peak, self.bytes / self.bandwidth)

    def reordered_bytes(self, stage: str = "hlo") -> int:
        """Read and written by all reorders of a stage."""
        return sum(r.total_bytes for r in self.reorders if r.stage == stage)

    def by_source(self, stage: str = "hlo") -> dict[str, int]:
        """Bytes of the reorders of each source line, the most first."""
        total: dict[str, int] = {}
        for r in self.reorders:
            if r.stage == stage:
                source = r.source or "unknown line"
                total[source] = total.get(source, 0) + r.total_bytes
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def to_json(self) -> str:
        """The report as JSON; `Report.from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The inverse of `to_json`."""
        return _report(json.loads(text))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the reorders' bytes by source line, to a PNG, SVG or PDF.

        Raises:
          ImportError: if matplotlib is not installed.
          ValueError: if path ends otherwise, or its folder does not exist.
        """
        check_plot(path)
        from matplotlib.figure import Figure

        stages = {"compiled": self.by_source("hlo"), "jaxpr": self.by_source("jaxpr")}
        lines = list(dict.fromkeys(line for s in stages.values() for line in s))
        figure = Figure(figsize=(9, 1.5 + 0.5 * len(lines)), layout="constrained")
        axes = figure.add_subplot()
        for i, (name, total) in enumerate(stages.items()):
            at = [len(lines) - n - 0.2 - 0.4 * i for n in range(len(lines))]
            axes.barh(at, [total.get(s, 0) / 1e6 for s in lines], 0.38, label=name)
        axes.set_yticks(
            [len(lines) - n - 0.4 for n in range(len(lines))],
            [_short(line) for line in lines],
        )
        axes.set_xlabel("MB read and written by transposes, copies and relayouts")
        axes.set_title(f"{self.function} on {self.device}", loc="left")
        axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)

    # --- as tables

    def summary(self) -> str:
        """One line: how much is moved, and its share of the program."""
        found = [r for r in self.reorders if r.stage == "hlo"]
        share = sum(r.share or 0 for r in found)
        return (
            f"{self.function} on {self.device}: the compiled program has {len(found)} "
            f"reorder{'s' * (len(found) != 1)}, {megabytes(self.reordered_bytes())} of "
            f"{megabytes(self.bytes)}, {share:.0%} of its roofline time "
            f"({_time(self.seconds)})"
        )

    def __str__(self) -> str:
        parts = [self.summary(), *self._comparison()]
        for title, columns, rows in self._tables():
            widths = [
                max(map(len, column)) for column in zip(columns, *rows, strict=True)
            ]
            lines = [
                "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
                for row in (columns, *rows)
            ]
            parts += ["", title, *lines]
        parts += ["", *(f"warning: {a.message}{_at(a.source)}" for a in self.warnings)]
        return "\n".join([*parts, self.roofline]).replace("\n\n\n", "\n\n")

    def __repr__(self) -> str:
        return str(self)  # a session shows the tables

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = [Text(self.summary(), style="bold"), *self._comparison()]
        for title, columns, rows in self._tables():
            table = Table(title=title, title_justify="left", box=None, pad_edge=False)
            for column in columns:
                table.add_column(column, overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            parts += ["", table]
        for a in self.warnings:
            parts.append(Text(f"warning: {a.message}{_at(a.source)}", style="yellow"))
        return Group(*parts, Text(self.roofline, style="dim"))

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(self.summary())}</b></p>"]
        parts += [f"<p>{html.escape(line)}</p>" for line in self._comparison()]
        for title, columns, rows in self._tables():
            parts.append(f"<table><caption>{html.escape(title)}</caption>")
            for tag, row in (("th", columns), *(("td", row) for row in rows)):
                cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
                parts.append(f"<tr>{cells}</tr>")
            parts.append("</table>")
        warnings = (html.escape(a.message + _at(a.source)) for a in self.warnings)
        parts += [f"<p>&#9888; {text}</p>" for text in warnings]
        return "\n".join(
            [*parts, f"<p><small>{html.escape(self.roofline)}</small></p>"]
        )

    def _comparison(self) -> list[str]:
        if self.before is None:
            return []
        moved = [megabytes(r.reordered_bytes()) for r in (self.before, self)]
        lines = [
            f"before: {self.before.summary()}",
            f"bytes of reorders: {moved[0]} before, {moved[1]} now",
        ]
        if self.products or self.before.products:
            runs = [r._implementations() for r in (self.before, self)]
            lines.append(f"products: {runs[0]} before, {runs[1]} now")
        return lines

    def _implementations(self) -> str:
        total: dict[str, int] = {}
        for p in self.products:
            total[p.implementation] = total.get(p.implementation, 0) + p.trips
        return " + ".join(f"{n} x {name}" for name, n in total.items()) or "none"

    def _tables(self) -> list[tuple[str, Sequence[str], list[Sequence[str]]]]:
        tables: list[tuple[str, Sequence[str], list[Sequence[str]]]] = []
        for stage, title in (
            ("hlo", "Reorders left in the compiled program"),
            ("jaxpr", "Reorders that the program asks for"),
        ):
            rows: list[Sequence[str]] = [
                (
                    r.op,
                    r.kind + (" (fused)" if r.fused else ""),
                    r.shape,
                    megabytes(r.bytes),
                    f"{r.trips}" + ("" if r.trips_known else "?"),
                    "" if r.share is None else f"{r.share:.1%}",
                    _short(r.source),
                    r.cause,
                )
                for r in sorted(self.reorders, key=lambda r: -r.total_bytes)
                if r.stage == stage
            ]
            columns = "op kind shape bytes trips share source cause".split()
            if rows:
                tables.append((title, columns, rows))
        if self.products:
            rows = [
                (
                    p.op,
                    p.kind,
                    p.implementation,
                    p.detail,
                    f"{p.trips}" + ("" if p.trips_known else "?"),
                    _short(p.source),
                )
                for p in self.products
            ]
            columns = "op kind implementation detail trips source".split()
            tables.append(("Convolutions and GEMMs", columns, rows))
        if self.values:
            rows = [
                (v.role, v.name, v.shape, v.format, _short(v.source))
                for v in self.values
            ]
            columns = "value name shape format source".split()
            title = "Memory formats, of arrays with two axes or more"
            tables.append((title, columns, rows))
        return tables


def _report(fields: dict[str, Any]) -> Report:
    kinds: dict[str, type] = {
        "reorders": Reorder,
        "products": Product,
        "values": Value,
        "warnings": Advice,
    }
    lists = {
        name: tuple(kind(**item) for item in fields[name])
        for name, kind in kinds.items()
    }
    before = fields["before"]
    return Report(
        **(fields | lists | {"before": None if before is None else _report(before)})
    )


def check_plot(path: str | os.PathLike[str]) -> None:
    """The errors of `Report.plot`, which are known before there is a report."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("Report.plot: needs matplotlib: pip install matplotlib")
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"plot: path must end in .png, .svg or .pdf, got {str(path)!r}."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"plot: there is no folder {str(path.parent)!r} for {path.name!r}."
        )


def megabytes(count: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _short(source: str) -> str:
    """The file's name and the folder that it is in."""
    return "/".join(source.split("/")[-2:])


def _at(source: str) -> str:
    return f" ({_short(source)})" if source else ""
