# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of row_major.md: python -m docs.figures.

Every number in a cell is a place in memory, and comes from `jl.MemoryFormat` or
`jl.explain_gemm`.
"""

from collections.abc import Callable, Sequence

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
    fill: Callable[[int, int], str],
    bold: Callable[[int, int], bool] = lambda row, column: False,
    size: float = 8,
) -> None:
    """A matrix of numbered cells."""
    for (row, column), number in np.ndenumerate(numbers):
        strong = bold(row, column)
        axes.add_patch(
            Rectangle(
                (left + column, top + row),
                1,
                1,
                facecolor=fill(row, column),
                edgecolor=theme.text if strong else theme.muted,
                linewidth=1.8 if strong else 0.5,
                zorder=2 if strong else 1,
            )
        )
        axes.text(
            left + column + 0.5,
            top + row + 0.53,
            str(number),
            ha="center",
            va="center",
            size=size,
            weight="bold" if strong else "normal",
            zorder=3,
        )


def images(theme: Theme) -> Figure:
    """An image of three channels, 2 by 3, in NCHW and in NHWC."""
    shape = (1, 3, 2, 3)
    figure, axes = canvas(21.8, 12.4)
    for row, name in enumerate(("NCHW", "NHWC")):
        top = 6.3 * row
        place = places(name, shape)[0]
        axes.text(0.3, top + 0.9, name, size=13, weight="bold")
        what = "logical array: where each element lies"
        axes.text(3.4, top + 0.9, what, size=9, color=theme.muted)
        for channel, label in enumerate(("red", "green", "blue")):
            left = 3.4 + 4.2 * channel
            axes.text(left, top + 4.05, f"{label}, c = {channel}", size=8.5)
            cells(
                axes,
                theme,
                left,
                top + 1.4,
                place[channel],
                lambda *_, fill=theme.cells[channel]: fill,
            )
        channels = np.argsort(place, axis=None) // place[0].size
        axes.text(0.3, top + 5.35, "memory", size=9, color=theme.muted)
        cells(
            axes,
            theme,
            3.4,
            top + 4.8,
            np.arange(place.size)[None],
            lambda _, i, found=channels: theme.cells[found[i]],
        )
    return figure


def blocks(theme: Theme) -> Figure:
    """32 channels of 2 by 2 pixels, coloured by the line of the cache."""
    shape = (1, 32, 2, 2)
    figure, axes = canvas(36.2, 17.4)
    for panel, name in enumerate(("NCHW", "NHWC", "NCHW16c")):
        top = 0.9 + 5.6 * panel
        place = places(name, shape).reshape(32, 4).T
        axes.text(0.2, top + 0.15, name, size=16, weight="bold")
        for pixel in range(4):
            label = f"pixel {pixel // 2}, {pixel % 2}"
            axes.text(0.2, top + 1.15 + pixel, label, size=11, color=theme.muted)
        cells(
            axes,
            theme,
            3.9,
            top + 0.5,
            place,
            lambda i, j, place=place: theme.cells[place[i, j] // LINE],
            lambda i, j, place=place: bool(place[i, j] < LINE),
            size=10,
        )
        if panel == 2:
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

    def fill(number: int) -> str:
        return theme.cells[0] if number < 3 else theme.cells[2]

    def draw(left: float, title: str, numbers: np.ndarray) -> None:
        axes.text(left, 0.8, title, size=9, color=theme.muted)
        cells(
            axes, theme, left, 1.4, numbers, lambda i, j: fill(numbers[i, j]), size=10
        )

    draw(0.3, "the buffer", buffer[None])
    draw(8.4, "row-major, 2 x 3", buffer.reshape(2, 3))
    draw(20, "column-major, 3 x 2", buffer.reshape((3, 2), order="F"))
    axes.text(15.7, 2.5, "is the transpose of", size=10, ha="center", va="center")
    return figure


# What is computed, in JAX; the contraction; the names of its terms.
PRODUCTS = (
    ("y = x @ w.T", "mk,nk->mn", "xwy"),
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
        plan = jl.explain_gemm(spec, *shapes[:2])
        axes.text(0.4, top + 0.9, title, size=12, weight="bold", family="monospace")
        for left, term, shape, name, color in zip(
            lefts, terms, shapes, names, (0, 2, 3), strict=True
        ):
            # The element of the result at the origin, and what it is a sum of.
            kept = [letter not in summed for letter in term]

            def used(*index: int, kept: list[bool] = kept) -> bool:
                return not any(i and k for i, k in zip(index, kept, strict=True))

            label = f"{name}   {term[0]}, {term[1]}"
            axes.text(left, top + 1.95, label, size=9.5, color=theme.muted)
            cells(
                axes,
                theme,
                left,
                top + 2.3,
                np.arange(np.prod(shape)).reshape(shape),
                lambda i, j, used=used, color=color: (
                    theme.cells[color] if used(i, j) else "none"
                ),
                used,
                size=9,
            )
        axes.text(
            lefts[1] - 1.7,
            top + 3.6,
            "\N{MULTIPLICATION SIGN}",
            size=14,
            ha="center",
            va="center",
        )
        axes.text(lefts[2] - 1.7, top + 3.6, "=", size=14, ha="center", va="center")
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
