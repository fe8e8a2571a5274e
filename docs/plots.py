# SPDX-License-Identifier: Apache-2.0
"""Plots what benchmarks/results holds, for performance.md: python -m docs.plots."""

from collections.abc import Callable, Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.results import (
    RESULTS,
    CaseResult,
    Report,
    geometric_mean,
    newest,
    recorded,
)
from docs.tables import columns, figure, headlines, slower
from docs.themes import FOLDER, Theme, save

MARKERS = "osD^vP"
PLAIN = "jnp", "lax", "jax"  # what plain JAX is called, by benchmark
# Families of a series share its colour and marker from plot to plot.
SERIES = ("ours", "torch", "torch last", "numpy", "onednn", "jnp onednn")
LABELS = {"ours": "jax_layout", "torch last": "torch, channels last"}
SHORT = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "int8": "s8",
    "uint8": "u8",
}


Row = tuple[str, str | None]


def speed(case: CaseResult, family: str, warm: bool) -> float | None:
    """How many times as fast as plain JAX, with the same kind of output."""
    sample = case.sample(family, warm)
    plain = next(filter(None, (case.sample(name, warm) for name in PLAIN)), None)
    return plain.median / sample.median if sample and plain else None


def row_of(case: CaseResult) -> Row:
    """What a row says, and what else tells it from others that say the same."""
    return name(case), case.config.get("shape")


def name(case: CaseResult) -> str:
    dtype = case.config.get("dtype", "")
    axes = case.config.get("axes", "").replace(",", "")
    parts = case.name, f"({axes})" if axes else "", SHORT.get(dtype, dtype)
    return "  ".join(filter(None, parts))


def dots(
    reports: Sequence[Report], wanted: Callable[[CaseResult], bool] = lambda case: True
) -> Callable[[Theme], Figure]:
    """A row per case, a panel for each report and kind of output, a dot a contender."""
    of = [[case for case in report.cases if wanted(case)] for report in reports]
    rows = list(dict.fromkeys(row_of(case) for cases in of for case in cases))
    panels = [
        (report, cases, warm)
        for report, cases in zip(reports, of, strict=True)
        for warm in (False, True)
        if any(speed(case, "ours", warm) for case in cases)
    ]
    kinds = {warm for _, _, warm in panels}

    def draw(theme: Theme) -> Figure:
        height = 1.25 + 0.235 * len(rows) + 0.15 * len(reports)
        figure = Figure(figsize=(9.6 + 2.4 * max(0, len(panels) - 2), height))
        parts = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for part, (report, cases, warm) in zip(parts, panels, strict=True):
            panel(part, theme, cases, warm, rows)
            title = place(report)
            if len(kinds) > 1:
                title += f"\noutput in {'existing' if warm else 'new'} memory"
            part.set_title(title, size=9, loc="left")
        parts[0].set_yticks(range(len(rows)), [label for label, _ in rows], size=8)
        parts[0].set_ylim(len(rows) - 0.4, -0.6)
        handles = {
            label: handle
            for part in parts
            for handle, label in zip(*part.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="upper left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=len(handles),
            fontsize=9,
            frameon=False,
            columnspacing=1.2,
            handletextpad=0.2,
        )
        figure.text(
            0.995,
            0.08 / height,
            "\n".join(machine(report) for report in reports),
            size=7.5,
            ha="right",
            color=theme.muted,
        )
        bottom = (0.1 + 0.15 * len(reports)) / height
        figure.tight_layout(rect=(0, bottom, 1, 1 - 0.3 / height))
        return figure

    return draw


def place(report: Report) -> str:
    """The processor, the profile and the jax of a panel."""
    described = report.machine
    version = described["versions"]["jax"]
    return f"{described['class']}, {described['profile']}, jax {version}"


def panel(
    part: Axes, theme: Theme, cases: list[CaseResult], warm: bool, rows: list[Row]
) -> None:
    found = {
        family: [
            (rows.index(row_of(case)), at)
            for case in cases
            if (at := speed(case, family, warm))
        ]
        for family in SERIES
    }
    # One series, a setting that few need, is cut off where it would squeeze the rest.
    shown = [at for family in SERIES[:-1] for _, at in found[family]]
    low, high = min(0.8, *shown) / 1.15, max(1.3, *shown) * 1.15
    part.hlines(
        [row for row, _ in found["ours"]],
        1,
        [at for _, at in found["ours"]],
        color=theme.series[0],
        linewidth=1.6,
        alpha=0.45,
        zorder=2,
    )
    for i, family in enumerate(SERIES):
        dots = [(row, at) for row, at in found[family] if at >= low]
        if dots:
            at_rows, speeds = zip(*dots, strict=True)
            part.scatter(
                speeds,
                at_rows,
                s=22 if i else 50,
                marker=MARKERS[i],
                color=theme.series[i],
                linewidths=0,
                label=LABELS.get(family, family),
                zorder=3 if i == 0 else 4,
            )
        for row, at in found[family]:
            if at < low:
                text = f"\N{LEFTWARDS ARROW} {at:.2g}"
                part.text(low, row, text, size=7, va="center", color=theme.series[i])
    part.set_xscale("log")
    part.set_xlim(low, high)
    part.axvline(1, color=theme.muted, linewidth=1, zorder=1)
    ticks = LogLocator(subs=(1, 2, 5) if high < 100 else (1,), numticks=20)
    part.xaxis.set_major_locator(ticks)
    part.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    part.xaxis.set_minor_formatter(NullFormatter())
    part.set_xlabel("times as fast as plain JAX  (log scale)", size=8.5)
    part.tick_params(labelsize=8, length=0, which="both")
    part.grid(color=theme.grid, linewidth=0.7, zorder=0)
    part.set_axisbelow(True)
    for side in part.spines.values():
        side.set_visible(False)


def machine(report: Report) -> str:
    data = report.machine
    device = data["gpu"] or f"{data['cores']} cores of {data['cpu']}"
    device = f"{data['class']} ({device}), profile {data['profile']}"
    versions = data["versions"]
    torch = f", torch {versions['torch']}" if versions["torch"] else ""
    return f"{device}, jax {versions['jax']}{torch}, {data['date'][:10]}"


def summary(reports: Iterable[tuple[str, Report]]) -> str:
    """A table: geometric mean and range of each file, to plain JAX and to torch."""
    lines = [
        "| where | what | cases | to plain JAX | least | most "
        "| to torch | least | most |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for file, report in sorted(reports, key=lambda each: place(each[1])):
        for warm in (False, True):
            cells = []
            for families in (PLAIN, ("torch",)):
                ratios = [
                    ratio
                    for case in report.cases
                    for family in families
                    if (ratio := case.speedup(family, warm))
                ]
                mean = geometric_mean(ratios)
                cells += [mean, min(ratios, default=None), max(ratios, default=None)]
            if cells[0]:
                count = sum(bool(case.sample("ours", warm)) for case in report.cases)
                kinds = any(case.sample("ours", True) for case in report.cases)
                memory = ", existing memory" if warm else ", new memory"
                row = f"{place(report)} | {file}{memory if kinds else ''}"
                shown = " | ".join(figure(cell) for cell in cells)
                lines.append(f"| {row} | {count} | {shown} |")
    return "\n".join(lines) + "\n"


def machines(reports: Iterable[tuple[str, Report]]) -> str:
    """A list of the machines, each with the files measured on it."""
    found: dict[tuple[str, str], list[str]] = {}
    gpus = set()
    for file, report in reports:
        sets = ", ".join(report.machine["instruction_sets"])
        commit = (report.machine["commit"] or "unknown").partition("-dirty")[0]
        files = found.setdefault((machine(report), sets), [])
        files.append(f"`{file}` at commit {commit}")
        gpus |= {report.machine["gpu"]} - {None}
    lines = [
        f"- {text} ({sets}): {', '.join(files)}"
        for (text, sets), files in found.items()
    ]
    ran = (
        f"On GPUs: {', '.join(sorted(gpus))}."
        if gpus
        else "**Nothing was measured on a GPU.**"
    )
    return "\n".join(lines) + f"\n\n{ran}\n"


def main() -> None:
    found = recorded()
    chosen = columns(found)

    def of(file: str) -> list[Report]:
        return [column[file] for column in chosen if file in column]

    def grouped(*groups: str) -> Callable[[CaseResult], bool]:
        return lambda case: case.group in groups

    save("permute", dots(of("permute-ml")))
    save("gemm-square", dots(of("gemm"), grouped("square")))
    save("gemm-other", dots(of("gemm"), grouped("skinny", "attention")))
    for file in ("linear", "conv", "layout"):
        save(file, dots(of(file)))
    everything = [
        (file, report)
        for file, reports in found.items()
        for report in newest(reports).values()
    ]
    on_gpus = (path for path in RESULTS.glob("*.json") if path.stem != "latest")
    everything += [(path.stem, Report.load(path)) for path in sorted(on_gpus)]
    (FOLDER / "headlines.md").write_text(headlines(found))
    (FOLDER / "summary.md").write_text(summary(everything))
    (FOLDER / "slower.md").write_text(slower(found))
    (FOLDER / "machines.md").write_text(machines(everything))


if __name__ == "__main__":
    main()
