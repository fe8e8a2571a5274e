"""The table in the terminal and the summary below it."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness import Sample
from benchmarks.results import CaseResult, Report, geometric_mean

# Below this many bytes moved a call measures its dispatch: microseconds say more.
SMALL = 2 << 20


def show(report: Report, console: Console) -> None:
    """Prints a table per group of cases, then the summary."""
    for group in dict.fromkeys(case.group for case in report.cases):
        cases = [case for case in report.cases if case.group == group]
        console.print(table(group, cases))
    console.print(
        "GB/s read + written, microseconds (u) below 1 MiB; copy: the fastest of the "
        "same size; +: output into memory that exists, else freshly allocated; "
        "green: the fastest with that kind of output.",
        style="dim",
    )
    for line in summary(report):
        console.print(line, highlight=False)


def table(group: str, cases: list[CaseResult]) -> Table:
    """One row per case: the ceiling, then every contender but the copies."""
    labels = dict.fromkeys(
        s.label for case in cases for s in case.samples if s.role != "copy"
    )
    grid = Table(title=group, title_justify="left", header_style="bold", box=None)
    grid.add_column("case", no_wrap=True)
    for heading in ("axes", "dtype", "MiB", "copy", *labels, "% copy", "x jnp"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        grid.add_row(*_row(case, list(labels)))
    return grid


def _row(case: CaseResult, labels: list[str]) -> Iterator[str | Text]:
    yield case.name
    yield case.config.get("axes", "").replace(",", "")
    yield case.config.get("dtype", "")
    yield f"{case.moved / 2 / (1 << 20):.3g}"
    copy = case.copy()
    yield _speed(case, copy) if copy else "-"
    by_label = {sample.label: sample for sample in case.samples}
    fastest = {
        warm: min(
            (s.median for s in case.samples if s.warm == warm and s.role != "copy"),
            default=0.0,
        )
        for warm in (False, True)
    }
    for name in labels:
        sample = by_label.get(name)
        if sample is None:
            yield "-"
        else:
            best = sample.median == fastest[sample.warm]
            yield Text(_speed(case, sample), style="bold green" if best else "")
    ours = case.sample("ours", True) or case.sample("ours", False)
    share = case.share(ours) if ours else None
    speedup = case.speedup("jnp", ours.warm) if ours else None
    yield f"{100 * share:.0f}" if share else "-"
    yield Text(
        f"{speedup:.2f}" if speedup else "-",
        style="red" if speedup and speedup < 1 else "",
    )


def _speed(case: CaseResult, sample: Sample) -> str:
    if case.moved < SMALL:
        return f"{sample.median * 1e6:.3g}u"
    speed = case.gb_per_s(sample)
    return f"{speed:.0f}" if speed >= 99.5 else f"{speed:.1f}"


def summary(report: Report) -> Iterator[str]:
    """Geometric means, then each case where ours is not the fastest."""
    large = [case for case in report.cases if case.moved >= SMALL]
    for warm, kind in ((False, "fresh"), (True, "warm")):
        ours = [(case, case.sample("ours", warm)) for case in large]
        shares = [case.share(sample) for case, sample in ours if sample]
        mean = geometric_mean(share for share in shares if share)
        if mean is None:
            continue
        speedups = {case.name: case.speedup("jnp", warm) for case in large}
        known = [speedup for speedup in speedups.values() if speedup]
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
        for warm, kind in ((False, "fresh"), (True, "warm")):
            ours, peer = case.sample("ours", warm), case.best_peer(warm)
            if ours and peer and peer.median < ours.median:
                ratio = ours.median / peer.median
                yield (
                    f"slower than a peer: {_title(case)}, {kind}: "
                    f"{peer.label} {ratio:.2f}x faster"
                )


def _title(case: CaseResult) -> str:
    return " ".join([case.group, case.name, *list(case.config.values())[1:]])
