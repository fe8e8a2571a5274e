# SPDX-License-Identifier: Apache-2.0
"""The table in the terminal and the summary below it."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness import Sample
from benchmarks.results import CaseResult, Report, geometric_mean

# Below this many bytes moved a call measures its dispatch: microseconds say more.
SMALL = 2 << 20
# Below this, or where flops do not count, products are given in microseconds.
_FEW_FLOPS = 1e7
_KINDS = {False: "fresh", True: "warm"}


def show(report: Report, console: Console) -> None:
    """Prints a table per group of cases and kind of output, then the summary."""
    for group in dict.fromkeys(case.group for case in report.cases):
        cases = [case for case in report.cases if case.group == group]
        for warm in (False, True):
            if families := _families(cases, warm):
                console.print(table(group, cases, warm, families))
    console.print(
        "GB/s read + written (us: microseconds, below 1 MiB); copy: the fastest of "
        "the same size (new copy: to new memory); green: the fastest; ratios are of "
        "ours; faults: page faults per call, ours/jnp.",
        style="dim",
    )
    for line in summary(report):
        console.print(line, highlight=False)


def table(
    group: str, cases: list[CaseResult], warm: bool, families: list[str]
) -> Table:
    """One row per case: the ceiling, every contender but the copies, ratios."""
    grid = Table(
        title=f"\n{group}, {_KINDS[warm]} outputs",
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
    )
    grid.add_column("case", no_wrap=True)
    ceilings = ["copy"] if warm else ["copy", "new copy"]
    ratios = ["% copy", "x jnp", "x best", *([] if warm else ["faults"])]
    headings = ["axes", "dtype", "MiB", *ceilings, *families, *ratios]
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        grid.add_row(*_row(case, warm, families))
    return grid


def _families(cases: list[CaseResult], warm: bool) -> list[str]:
    found = dict.fromkeys(
        s.family
        for case in cases
        for s in case.samples
        if s.warm == warm and s.role in ("ours", "peer")
    )
    return list(found)


def _row(case: CaseResult, warm: bool, families: list[str]) -> Iterator[str | Text]:
    yield case.name
    yield case.config.get("axes", "").replace(",", "")
    yield _short(case.config.get("dtype", ""))
    yield f"{case.moved / 2 / (1 << 20):.3g}"
    for copy in [case.copy()] if warm else [case.copy(), case.copy(warm)]:
        yield _speed(case, copy) if copy else "-"
    samples = {family: case.sample(family, warm) for family in families}
    fastest = min((s.median for s in samples.values() if s), default=0.0)
    for sample in samples.values():
        if sample is None:
            yield "-"
        else:
            won = sample.median == fastest
            yield Text(_speed(case, sample), style="bold green" if won else "")
    ours, peer = case.sample("ours", warm), case.best_peer(warm)
    share = case.share(ours) if ours else None
    yield f"{100 * share:.0f}" if share else "-"
    yield _ratio(case.speedup("jnp", warm))
    yield _ratio(peer.median / ours.median if ours and peer else None)
    if not warm:
        yield "/".join(_faults(s) for s in (ours, case.sample("jnp", warm)) if s)


def _faults(sample: Sample) -> str:
    faults = sample.faults
    return f"{faults / 1000:.0f}k" if faults >= 999.5 else f"{faults:.0f}"


def _ratio(value: float | None) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.2f}", style="red" if value < 1 else "")


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "f").replace("uint", "u")


def _speed(case: CaseResult, sample: Sample) -> str:
    if case.moved < SMALL:
        return f"{sample.median * 1e6:.3g}us"
    speed = case.gb_per_s(sample)
    return f"{speed:.0f}" if speed >= 99.5 else f"{speed:.1f}"


def summary(report: Report) -> Iterator[str]:
    """Geometric means, then each case where ours is not the fastest."""
    large = [case for case in report.cases if case.moved >= SMALL]
    for warm, kind in _KINDS.items():
        ours = [(case, case.sample("ours", warm)) for case in large]
        shares = [case.share(sample) for case, sample in ours if sample]
        mean = geometric_mean(share for share in shares if share)
        if mean is None:
            continue
        speedups = [case.speedup("jnp", warm) for case in large]
        known = [speedup for speedup in speedups if speedup]
        over_jnp = geometric_mean(known)
        slow = sum(speedup < 1 for speedup in known)
        yield (
            f"{kind} outputs, {len(shares)} cases of >= 1 MiB: geometric mean "
            f"{100 * mean:.1f}% of the best copy"
            + (f", {over_jnp:.2f}x jnp; {slow} below 1x jnp" if over_jnp else "")
        )
    yield from _defeats(report)
    for case in report.cases:
        for name, reason in case.skipped.items():
            yield f"skipped: {_title(case)}: {name}: {reason}"


def _defeats(report: Report) -> Iterator[str]:
    for case in report.cases:
        for warm, kind in _KINDS.items():
            ours, peer = case.sample("ours", warm), case.best_peer(warm)
            if ours and peer and peer.median < ours.median:
                ratio = ours.median / peer.median
                yield (
                    f"slower than a peer: {_title(case)}, {kind}: "
                    f"{peer.family} is {ratio:.2f}x faster"
                )


def _title(case: CaseResult) -> str:
    axes, dtype = case.config.get("axes", ""), case.config.get("dtype", "")
    return f"{case.group} {case.name} ({axes}) {_short(dtype)}"


def show_products(report: Report, console: Console) -> None:
    """Prints a table per group of products, then where ours is not faster."""
    for group in dict.fromkeys(case.group for case in report.cases):
        cases = [case for case in report.cases if case.group == group]
        families = _families(cases, warm=False)
        grid = Table(
            title=f"\n{group}",
            title_justify="left",
            title_style="bold",
            header_style="bold",
            box=None,
            padding=(0, 1, 0, 0),
        )
        grid.add_column("case", no_wrap=True)
        peers = [family for family in families if family != "ours"]
        for heading in ("dtype", *families, *(f"x {peer}" for peer in peers)):
            grid.add_column(heading, justify="right", no_wrap=True)
        bounded = any(s.role in ("copy", "peak") for c in cases for s in c.samples)
        if bounded:
            grid.add_column("% limit", justify="right", no_wrap=True)
        for case in cases:
            samples = [case.sample(family, False) for family in families]
            speeds = [_flops(case, sample) if sample else "-" for sample in samples]
            ratios = [_ratio(case.speedup(peer, False)) for peer in peers]
            mine = case.sample("ours", False)
            share = case.share(mine) if mine else None
            shares = [f"{100 * share:.0f}" if share else "-"] if bounded else []
            row = case.name, _short(case.config["dtype"])
            grid.add_row(*row, *speeds, *ratios, *shares)
        console.print(grid)
    unit = "us: microseconds"
    if any(case.flops >= _FEW_FLOPS for case in report.cases):
        unit = "GFLOP/s (us: microseconds, below 10 MFLOP)"
    limit = "limit: a sweep over the operands, or the arithmetic alone"
    console.print(f"{unit}; ratios are of ours; {limit}", style="dim")
    for case in report.cases:
        for name, reason in case.skipped.items():
            title = f"{case.group} {case.name} {_short(case.config['dtype'])}"
            console.print(f"skipped: {title}: {name}: {reason}", highlight=False)


def _flops(case: CaseResult, sample: Sample) -> str:
    if case.flops < _FEW_FLOPS:
        return f"{sample.median * 1e6:.0f}us"
    return f"{case.flops / sample.median / 1e9:.4g}"
