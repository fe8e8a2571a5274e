# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of row_major.md: python -m docs.figures.

Every number in a cell is a place in memory, and comes from `jl.MemoryFormat` or
`jl.explain_gemm`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import jax_layout as jl
from docs.themes import Theme, save

INCH = 0.36  # edge of a cell
LINE = 16  # elements of float32 in a line of a cache


def places(name: str, shape: Sequence[int]) -> np.ndarray:
    """Where each element lies in memory, by its logical index."""
    format = jl.MemoryFormat.named(name)
    physical = format.physical_shape(shape)
    return np.asarray(format.unpack(jnp.arange(np.prod(shape)).reshape(physical)))


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty picture whose unit is a cell, y downwards."""
    figure = Figure(figsize=(width * INCH, height * INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    return figure, axes


def cells(
    axes: Axes,
    theme: Theme,
    left: float,
    top: float,
    numbers: np.ndarray,
    fills: np.ndarray,
    strong: np.ndarray | None = None,
    size: float = 8,
) -> None:
    """A matrix of numbered cells: their fills, and which stand out."""
    for index, number in np.ndenumerate(numbers):
        row, column = index
        bold = strong is not None and bool(strong[index])
        axes.add_patch(
            Rectangle(
                (left + column, top + row),
                1,
                1,
                facecolor=str(fills[index]),
                edgecolor=theme.text if bold else theme.muted,
                linewidth=1.8 if bold else 0.5,
                zorder=2 if bold else 1,
            )
        )
        axes.text(
            left + column + 0.5,
            top + row + 0.53,
            str(number),
            ha="center",
            va="center",
            size=size,
            weight="bold" if bold else "normal",
            zorder=3,
        )


def images(theme: Theme) -> Figure:
    """An image of three channels, 2 by 3, in NCHW and in NHWC."""
    colors = np.array(theme.cells)
    figure, axes = canvas(21.8, 12.4)
    for row, name in enumerate(("NCHW", "NHWC")):
        top = 6.3 * row
        place = places(name, (1, 3, 2, 3))[0]
        axes.text(0.3, top + 0.9, name, size=13, weight="bold")
        what = "logical array: where each element lies"
        axes.text(3.4, top + 0.9, what, size=9, color=theme.muted)
        channels = np.indices(place.shape)[0]
        for channel, label in enumerate(("red", "green", "blue")):
            left = 3.4 + 4.2 * channel
            axes.text(left, top + 4.05, f"{label}, c = {channel}", size=8.5)
            fills = colors[channels[channel]]
            cells(axes, theme, left, top + 1.4, place[channel], fills)
        fills = colors[channels.ravel()[np.argsort(place, axis=None)]]
        axes.text(0.3, top + 5.35, "memory", size=9, color=theme.muted)
        cells(axes, theme, 3.4, top + 4.8, np.arange(18)[None], fills[None])
    return figure


def blocks(theme: Theme) -> Figure:
    """32 channels of 2 by 2 pixels, coloured by the line of the cache."""
    colors = np.array(theme.cells)
    figure, axes = canvas(36.2, 17.4)
    for panel, name in enumerate(("NCHW", "NHWC", "NCHW16c")):
        top = 0.9 + 5.6 * panel
        place = places(name, (1, 32, 2, 2)).reshape(32, 4).T
        axes.text(0.2, top + 0.15, name, size=16, weight="bold")
        for pixel in range(4):
            label = f"pixel {pixel // 2}, {pixel % 2}"
            axes.text(0.2, top + 1.15 + pixel, label, size=11, color=theme.muted)
        line = place // LINE
        cells(axes, theme, 3.9, top + 0.5, place, colors[line], line == 0, size=10)
    for channel in (0, 8, 16, 24, 31):
        axes.text(
            4.4 + channel,
            top + 5.1,
            f"c = {channel}",
            size=11,
            ha="center",
            color=theme.muted,
        )
    return figure


def buffers(theme: Theme) -> Figure:
    """Six elements, read in row-major and in column-major order."""
    figure, axes = canvas(25, 4.6)
    buffer = np.arange(6)
    colors = np.array(theme.cells)[[0, 0, 0, 2, 2, 2]]
    for left, title, numbers in (
        (0.3, "the buffer", buffer[None]),
        (8.4, "row-major, 2 x 3", buffer.reshape(2, 3)),
        (20, "column-major, 3 x 2", buffer.reshape((3, 2), order="F")),
    ):
        axes.text(left, 0.8, title, size=9, color=theme.muted)
        cells(axes, theme, left, 1.4, numbers, colors[numbers], size=10)
    axes.text(15.7, 2.5, "is the transpose of", size=10, ha="center", va="center")
    return figure


# What is computed, in JAX; the contraction; the names of its terms.
PRODUCTS = (
    ("y = x @ w.T", "mk,nk->mn", ("x", "w", "y")),
    ("dx = dy @ w", "mn,nk->mk", ("dy", "w", "dx")),
    ("dw = dy.T @ x", "mn,mk->nk", ("dy", "x", "dw")),
)
EXTENTS = {"m": 4, "n": 2, "k": 3}


def products(theme: Theme) -> Figure:
    """The three products of a linear layer, and the calls that they become."""
    figure, axes = canvas(25, 20.6)
    lefts = 0.4, 6.6, 12.8
    for panel, (title, spec, names) in enumerate(PRODUCTS):
        top = 0.3 + 6.8 * panel
        operands, result = spec.split("->")
        terms = [*operands.split(","), result]
        summed = (set(terms[0]) & set(terms[1])) - set(result)
        shapes = [tuple(EXTENTS[letter] for letter in term) for term in terms]
        plan = jl.explain_gemm(spec, shapes[0], shapes[1])
        axes.text(0.4, top + 0.9, title, size=12, weight="bold", family="monospace")
        for left, term, shape, name, color in zip(
            lefts, terms, shapes, names, (0, 2, 3), strict=True
        ):
            # The element of the result at the origin, and what it is a sum of.
            used = np.ones(shape, bool)
            for axis, letter in enumerate(term):
                if letter not in summed:
                    used &= np.indices(shape)[axis] == 0
            fills = np.where(used, theme.cells[color], "none")
            numbers = np.arange(used.size).reshape(shape)
            label = f"{name}   {term[0]}, {term[1]}"
            axes.text(left, top + 1.95, label, size=9.5, color=theme.muted)
            cells(axes, theme, left, top + 2.3, numbers, fills, used, size=9)
        for left, sign in zip(lefts[1:], ("\N{MULTIPLICATION SIGN}", "="), strict=True):
            axes.text(left - 1.7, top + 3.6, sign, size=14, ha="center", va="center")
        moved = "nothing" if not plan.permuted else ", ".join(plan.permuted)
        lines = (
            f"asked of the library: {plan.form}",
            f"leading dimensions {plan.lda}, {plan.ldb}, {plan.ldy}",
            f"moved: {moved}",
        )
        for i, line in enumerate(lines):
            weight = "bold" if i == 0 else "normal"
            axes.text(18.2, top + 2.95 + 1.05 * i, line, size=9.5, weight=weight)
    return figure


if __name__ == "__main__":
    save("images", images)
    save("blocks", blocks)
    save("buffers", buffers)
    save("products", products)
