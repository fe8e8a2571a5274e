# SPDX-License-Identifier: Apache-2.0
"""Figures in the colours of the site's light and of its dark pages."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("agg")

FOLDER = Path(__file__).with_name("generated")


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours.

    Attributes:
      name: the suffix of the file.
      text: of everything that is read.
      muted: of what explains.
      grid: of lines behind.
      cells: fills that a number in `text` can be read on.
      series: markers, ours first.
    """

    name: str
    text: str
    muted: str
    grid: str
    cells: tuple[str, ...]
    series: tuple[str, ...]


THEMES = (
    Theme(
        "light",
        "#26323d",
        "#66727f",
        "#e1e5ea",
        tuple(
            "#f6b3b3 #b5e0b4 #b0ccf4 #f9dc9c #d8c3ee #a9dfe0 #f6c59f #d3d8de".split()
        ),
        tuple("#d1495b #2f6fb0 #d99a1c #1d8a86 #7d55b0 #7f8790".split()),
    ),
    Theme(
        "dark",
        "#e6e9ef",
        "#9aa4b4",
        "#3a4150",
        tuple(
            "#8c3f47 #3b6f44 #3a5b90 #84692c #654a87 #2c6e72 #8a5630 #545c69".split()
        ),
        tuple("#ff7b88 #74b4f0 #f2c063 #57c9c2 #bd9cea #a3acb8".split()),
    ),
)


def save(name: str, draw: Callable[[Theme], Figure]) -> None:
    """Writes `generated/name-light.svg` and `generated/name-dark.svg`."""
    FOLDER.mkdir(exist_ok=True)
    for theme in THEMES:
        colors: dict[Any, Any] = {
            "text.color": theme.text,
            "axes.labelcolor": theme.text,
            "axes.edgecolor": theme.grid,
            "xtick.color": theme.muted,
            "ytick.color": theme.grid,
            "ytick.labelcolor": theme.text,
            "font.family": "DejaVu Sans",
            "svg.hashsalt": name,  # the same file from the same figures
        }
        with matplotlib.rc_context(colors):
            draw(theme).savefig(
                FOLDER / f"{name}-{theme.name}.svg",
                transparent=True,
                metadata={"Date": None, "Creator": None},
            )
