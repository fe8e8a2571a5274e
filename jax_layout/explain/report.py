# SPDX-License-Identifier: Apache-2.0
"""What `explain` found, as a value; JSON and a chart of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from jax_layout.explain import tables


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
      module: of the program, as its scopes name it: "Net/Block_0/up"; "" if unnamed.
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
    module: str = ""

    @property
    def total_bytes(self) -> int:
        """Read and written by all its trips."""
        return self.bytes * self.trips


@dataclasses.dataclass(frozen=True)
class Conversion:
    """An array that the compiled program writes in another dtype, and no more.

    Attributes:
      op: name of the HLO instruction.
      dtype: that it is converted from, "bf16".
      shape: of the result, "f32[2048,512]".
      bytes: read and written each time.
      trips: how often it runs.
      trips_known: whether that is known; a loop of unknown length counts once.
      share: of the roofline time of the whole program.
      source: the user's "file:line", "" where XLA has lost it.
      cause: who asked for it.
      module: of the program, as its scopes name it; "" if unnamed.
    """

    op: str
    dtype: str
    shape: str
    bytes: int
    trips: int
    trips_known: bool
    share: float
    source: str
    cause: str
    module: str = ""

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
      module: of the program, as its scopes name it; "" if unnamed.
    """

    op: str
    kind: str
    implementation: str
    detail: str
    trips: int
    trips_known: bool
    source: str
    module: str = ""


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
        "grouped-convolution", "weights-relaid", "weights-converted", "16-bit-dot",
        "transposed-operand", "copied-to-update", "optimize-layout", "plan-layout",
        "made-worse".
      message: what is wrong, and what to do.
      source: the user's "file:line".
      module: of the program, as its scopes name it; "" if unnamed.
    """

    code: str
    message: str
    source: str
    module: str = ""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program spends beside its arithmetic.

    Attributes:
      moved: bytes read and written by reorders and conversions.
      temporary: bytes of memory for what is neither argument nor result.
    """

    moved: int
    temporary: int


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
      conversions: every array that is written in another dtype.
      temporary: bytes of memory for what is neither argument nor result; 0 where
        XLA does not say.
      plain: the cost of the same program as plain jax, of one that calls kernels
        of ours.
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
    conversions: tuple[Conversion, ...] = ()
    temporary: int = 0
    plain: Cost | None = None

    @property
    def cost(self) -> Cost:
        """What the compiled program spends beside its arithmetic."""
        converted = sum(c.total_bytes for c in self.conversions)
        return Cost(self.reordered_bytes() + converted, self.temporary)

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
            [tables.short(line) for line in lines],
        )
        axes.set_xlabel("MB read and written by transposes, copies and relayouts")
        axes.set_title(f"{self.function} on {self.device}", loc="left")
        axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)

    # --- as tables

    def summary(self) -> str:
        """One line: how much is moved, and its share of the program."""
        return tables.summary(self)

    def __str__(self) -> str:
        return tables.text(self)

    def __repr__(self) -> str:
        return str(self)  # a session shows the tables

    def __rich__(self) -> Any:
        return tables.rich(self)

    def _repr_html_(self) -> str:
        return tables.as_html(self)


def _report(fields: dict[str, Any]) -> Report:
    kinds: dict[str, type] = {
        "reorders": Reorder,
        "conversions": Conversion,
        "products": Product,
        "values": Value,
        "warnings": Advice,
    }
    read = {
        name: tuple(kind(**item) for item in fields[name])
        for name, kind in kinds.items()
    }
    before, plain = fields["before"], fields["plain"]
    return Report(
        **fields
        | read
        | {
            "before": None if before is None else _report(before),
            "plain": None if plain is None else Cost(**plain),
        }
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
