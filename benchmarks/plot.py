# SPDX-License-Identifier: Apache-2.0
"""A picture of a report: the share of the copy that everyone reaches."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import Sample
from benchmarks.results import CaseResult, Report

matplotlib.use("agg")

_SHOWN = "ours", "peer"
_OURS = "#d1495b"
_PEERS = "#30638e #edae49 #00798c #8d96a3 #6a4c93 #3a3a3a #c38d63 #5fa55a".split()
_MARKERS = "s ^ D v P X < >".split()


def draw(report: Report, path: Path) -> None:
    """Writes a PNG: a row per case; fresh outputs left, warm ones right."""
    cases = report.cases
    kinds = [
        (warm, title)
        for warm, title in ((False, "fresh outputs"), (True, "warm outputs"))
        if any(s.warm == warm and s.role in _SHOWN for c in cases for s in c.samples)
    ]
    figure = Figure(figsize=(3.5 + 4.2 * len(kinds), 1.9 + 0.21 * len(cases)), dpi=110)
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    families = dict.fromkeys(
        s.family for c in cases for s in c.samples if s.role in _SHOWN
    )
    styles = _styles([family for family in families if family != "ours"])
    for panel, (warm, title) in zip(panels, kinds, strict=True):
        _draw_panel(panel, cases, warm, styles)
        panel.set_title(title, fontsize=10, loc="left")
    panels[0].set_yticks(range(len(cases)), [_name(c) for c in cases], fontsize=7)
    panels[0].set_ylim(len(cases) - 0.4, -0.6)
    handles = {
        name: handle
        for panel in panels
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    where = report.machine["gpu"] or f"{report.machine['cores']} cores"
    where += f", {report.machine['cpu']}, jax {report.machine['versions']['jax']}"
    figure.suptitle(f"{report.benchmark}: {where}", fontsize=10, x=0.01, ha="left")
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="upper right",
        ncols=len(handles),
        fontsize=8,
        frameon=False,
        columnspacing=0.9,
        handletextpad=0.2,
        bbox_to_anchor=(1.0, 1 - 0.28 / figure.get_figheight()),
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.42 / figure.get_figheight()))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _styles(families: list[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker each; ours is the one that stands out."""
    styles: dict[str, dict[str, Any]] = {"ours": {"color": _OURS, "s": 46, "zorder": 3}}
    return styles | {
        family: {
            "color": _PEERS[i % len(_PEERS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "s": 16,
            "alpha": 0.8,
            "zorder": 2,
        }
        for i, family in enumerate(families)
    }


def _draw_panel(
    panel: Axes,
    cases: tuple[CaseResult, ...],
    warm: bool,
    styles: dict[str, dict[str, Any]],
) -> None:
    for family, style in styles.items():
        rows, shares = [], []
        for row, case in enumerate(cases):
            sample: Sample | None = case.sample(family, warm)
            share = case.share(sample) if sample else None
            if share is not None:
                rows.append(row)
                shares.append(100 * share)
        if rows:
            panel.scatter(shares, rows, label=family, linewidths=0, **style)
    rows, shares = [], []
    for row, case in enumerate(cases):
        copy = case.copy(warm)
        share = case.share(copy) if copy else None
        if share is not None and share < 1:
            rows.append(row)
            shares.append(100 * share)
    if rows:  # a fresh output costs page faults, which a copy pays too
        label = "best copy to the same"
        panel.scatter(shares, rows, marker="|", s=70, color="#444444", label=label)
    panel.axvline(100, color="#444444", linewidth=0.8, zorder=1)
    panel.set_xlim(0, max(105, panel.get_xlim()[1]))
    panel.set_xlabel("% of the best copy of the same size", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(axis="both", color="#e6e6e6", linewidth=0.6, zorder=0)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _name(case: CaseResult) -> str:
    axes = case.config.get("axes", "").replace(",", "")
    return f"{case.name}  ({axes})  {case.config.get('dtype', '')}"
