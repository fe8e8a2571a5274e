# SPDX-License-Identifier: Apache-2.0
"""A report for people: text, rich and HTML, with lines that are alike as one."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_layout.explain.report import Report

Row = Sequence[str]
# Columns that are worth nothing when they are broken.
_WHOLE = frozenset("from to shape bytes times share".split())


def summary(report: Report) -> str:
    """One line: how much is moved, and its share of the program."""
    found = [r for r in report.reorders if r.stage == "hlo"]
    share = sum(r.share or 0 for r in found)
    text = (
        f"{report.function} on {report.device}: the compiled program has "
        f"{_count(len(found), 'reorder')}, {megabytes(report.reordered_bytes())} of "
        f"{megabytes(report.bytes)}, {share:.0%} of its roofline time "
        f"({_time(report.seconds)})"
    )
    if converted := report.conversions:
        size = megabytes(sum(c.total_bytes for c in converted))
        number = _count(len(converted), "conversion")
        text += f"; {number} of dtype, {size}, {sum(c.share for c in converted):.0%}"
    if report.temporary:
        text += f"; {megabytes(report.temporary)} of temporary memory"
    return text


def text(report: Report) -> str:
    """The whole report, as wide as it is."""
    parts = [summary(report), *_comparison(report)]
    for title, columns, rows in _tables(report):
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in (columns, *rows)
        ]
        parts += ["", title, *lines]
    parts += ["", *_warnings(report)]
    return "\n".join([*parts, report.roofline]).replace("\n\n\n", "\n\n")


def rich(report: Report) -> Any:
    """What rich shows, as wide as the console."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(summary(report), style="bold"), *_comparison(report)]
    for title, columns, rows in _tables(report):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in columns:
            whole = column in _WHOLE
            table.add_column(column, overflow="fold", no_wrap=whole)
        for row in rows:
            table.add_row(*map(Text, row))
        parts += ["", table]
    parts += [Text(line, style="yellow") for line in _warnings(report)]
    return Group(*parts, Text(report.roofline, style="dim"))


def as_html(report: Report) -> str:
    """What a notebook shows."""
    parts = [f"<p><b>{html.escape(summary(report))}</b></p>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in _comparison(report)]
    for title, columns, rows in _tables(report):
        parts.append(f"<table><caption>{html.escape(title)}</caption>")
        for tag, row in (("th", columns), *(("td", row) for row in rows)):
            cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</table>")
    parts += [f"<p>&#9888; {html.escape(line)}</p>" for line in _warnings(report)]
    return "\n".join([*parts, f"<p><small>{html.escape(report.roofline)}</small></p>"])


def _comparison(report: Report) -> list[str]:
    before, now = report.before, report.cost
    if before is None:
        if report.plain is None:
            return []
        then = report.plain
        return [
            f"as plain jax: {megabytes(then.moved)} of reorders and conversions, "
            f"{megabytes(now.moved)} now; {megabytes(then.temporary)} of temporary "
            f"memory, {megabytes(now.temporary)} now"
        ]
    moved = [megabytes(r.reordered_bytes()) for r in (before, report)]
    lines = [
        f"before: {summary(before)}",
        f"bytes of reorders: {moved[0]} before, {moved[1]} now",
        f"temporary memory: {megabytes(before.temporary)} before, "
        f"{megabytes(now.temporary)} now",
    ]
    if report.products or before.products:
        runs = [_implementations(r) for r in (before, report)]
        lines.append(f"products: {runs[0]} before, {runs[1]} now")
    return lines


def _implementations(report: Report) -> str:
    total: dict[str, int] = {}
    for p in report.products:
        total[p.implementation] = total.get(p.implementation, 0) + p.trips
    return " + ".join(f"{n} x {name}" for name, n in total.items()) or "none"


def _tables(report: Report) -> list[tuple[str, Row, list[Row]]]:
    compiled = [r for r in report.reorders if r.stage == "hlo"]
    asked = [r for r in report.reorders if r.stage == "jaxpr"]
    moving = "kind shape bytes times share where cause"
    found = (
        ("Reorders left in the compiled program", moving, compiled, _reorder),
        (
            "Conversions of dtype that write arrays",
            "from to bytes times share where cause",
            report.conversions,
            lambda group: (group[0].dtype, *_reorder(group)[1:]),
        ),
        ("Reorders that the program asks for", moving, asked, _reorder),
        (
            "Convolutions and GEMMs",
            "kind implementation detail times where",
            report.products,
            lambda group: (
                group[0].kind,
                group[0].implementation,
                group[0].detail,
                _times(group),
                _where(group),
            ),
        ),
        (
            "Memory formats, of arrays with two axes or more",
            "value name shape format source",
            report.values,
            lambda group: (
                _many(group) + group[0].role,
                _pattern([v.name for v in group]),
                group[0].shape,
                group[0].format,
                short(group[0].source),
            ),
        ),
    )
    return [
        (title, columns.split(), [cells(group) for group in _alike(items)])
        for title, columns, items, cells in found
        if items
    ]


def _reorder(group: Sequence[Any]) -> Row:
    first = group[0]
    shares = [r.share for r in group if r.share is not None]
    return (
        getattr(first, "kind", "") + (" (fused)" if getattr(first, "fused", 0) else ""),
        first.shape,
        megabytes(first.bytes),
        _times(group),
        f"{sum(shares):.1%}" if shares else "",
        _where(group),
        first.cause,
    )


def _warnings(report: Report) -> list[str]:
    return [
        f"warning{f' ({_many(group).strip()})' if len(group) > 1 else ''}: "
        f"{_pattern([a.message for a in group])}" + (f" ({at})" if at else "")
        for group in _alike(report.warnings)
        for at in [_where(group)]
    ]


# --- what is alike


# A number in a name: of a layer, of an element of a list.
_NUMBER = re.compile(r"(?<=[a-z_/\[.])\d+(?=[]/'_. ]|$)", re.IGNORECASE)


def _alike(items: Iterable[Any]) -> list[list[Any]]:
    """Groups what differs in the numbers of names alone, the most bytes first."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        fields = dataclasses.asdict(item)
        for name in ("op", "share"):
            fields.pop(name, None)
        for name in ("module", "name", "message"):
            fields[name] = _NUMBER.sub("*", fields.get(name, ""))
        groups.setdefault(tuple(fields.items()), []).append(item)
    return sorted(
        groups.values(), key=lambda g: -sum(getattr(i, "total_bytes", 0) for i in g)
    )


def _pattern(names: Sequence[str]) -> str:
    """Names that differ in numbers as one, with stars for these: "layers_*/up"."""
    numbers = zip(*map(_NUMBER.findall, names), strict=True)
    same = iter([n[0] if len(set(n)) == 1 else "*" for n in numbers])
    return _NUMBER.sub(lambda _: next(same), names[0])


def _many(group: Sequence[Any]) -> str:
    return f"{len(group)} x " if len(group) > 1 else ""


def _times(group: Sequence[Any]) -> str:
    """How many there are, and the trips of each: "24 x 7"."""
    return f"{_many(group)}{group[0].trips}" + ("" if group[0].trips_known else "?")


def _where(group: Sequence[Any]) -> str:
    """The module of the program and the source line, as far as known."""
    names = _pattern([item.module for item in group]), short(group[0].source)
    return " at ".join(filter(None, names))


# --- numbers and names


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


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


def short(source: str) -> str:
    """The file's name and the folder that it is in."""
    return "/".join(source.split("/")[-2:])
