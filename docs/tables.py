# SPDX-License-Identifier: Apache-2.0
"""Tables of benchmarks/results in README.md and of docs: python -m docs.tables.

A column stands for a processor in one profile; its figures are of the newest jax that
each benchmark was recorded on there.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import (
    FAST_ENOUGH,
    PLAIN,
    RESULTS,
    CaseResult,
    Report,
    geometric_mean,
    newest,
    recorded,
)
from jax_layout import choices

README = Path(__file__).parent.parent / "README.md"
PROGRAMS = Path(__file__).with_name("programs.md")
LAYOUTS = Path(__file__).with_name("optimize_layout.md")
PRODUCTS = Path(__file__).with_name("gemm.md")
ATTENTION = Path(__file__).with_name("attention.md")
INDEX = Path(__file__).with_name("index_select.md")
FORMATS = Path(__file__).with_name("memory_formats.md")
GPU = Path(__file__).with_name("gpu.md")
GPUS = {"H200": "nvidia-h200", "H100": "nvidia-h100-80gb-hbm3"}
BEGIN, END = "<!-- figures: python -m docs.tables -->\n", "<!-- end of figures -->\n"
WITHOUT_AMX = "avx512_bf16", "avx512", "avx2"
PROFILES = {
    "amx": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512": "AVX-512",
    "avx2": "AVX2",
}

_DTYPES = {"bfloat16": "bf16", "float32": "f32", "complex64": "c64"}

# By title: the file, the case, its dtype and its group. Without a case, the geometric
# mean of all; a plus for outputs in existing memory.
_ROWS = {
    "permute into existing memory, geometric mean": "permute-ml+",
    "permute into new memory": "permute-ml",
    "bfloat16 product, 2048 square, `x @ w.T`": "gemm | 2048 NT | bf16",
    "bfloat16 linear layer, 2048x1024 to 4096": "linear | 2048x1024->4096 | bf16",
    "the same, forward and backward": "linear | 2048x1024->4096, and backward | bf16",
    "the same with GELU": "linear | 2048x1024->4096, gelu | bf16",
    "bfloat16 attention, both einsums": "gemm | both | bf16",
    "float32 attention, both einsums": "gemm | both | f32",
    "attention in one call, 2048 by 8 heads of 64, bfloat16": (
        "attention | 1x2048x8x64 of 2048, bfloat16 | bf16 | forward"
    ),
    "the same, causal, forward and backward": (
        "attention | 1x2048x8x64 of 2048, causal, bfloat16 | bf16 | backward"
    ),
    "8 rows of bfloat16 by a 4096x4096 weight": "gemm | 8 rows, NT | bf16",
    "8 rows through 8 stacked layers, bfloat16, in a `scan`": (
        "linear | 8 rows, NT, in a scan | bf16 | stacked"
    ),
    "the same, layer by layer": "linear | 8 rows, NT, one by one | bf16 | stacked",
    "plain `x @ w.T` under `install`, 512 rows by 1024 to 2048, bfloat16": (
        "linear | 512x1024, x @ w.T, installed | bf16 | transposed"
    ),
    "the same of one row": "linear | 1x1024, x @ w.T, installed | bf16 | transposed",
    "float32 product, 2048 square, `x @ w.T`": "gemm | 2048 NT | f32",
    "float32 linear layer, 2048x1024 to 4096": "linear | 2048x1024->4096 | f32",
    "complex64 product, 1024 square": "gemm | 1024 NN | c64",
    "3x3 convolution of 256 channels, NCHW": "conv | 3x3 256ch 14^2 NCHW | f32",
    "its gradients": "conv | 3x3 256ch 14^2 NCHW, gradient | f32",
    "ResNet-18, NCHW as written, batch 1": "conv | ResNet-18, batch 1 | f32",
    "batch 8, gradient, batch norm": "conv | ResNet-18, batch 8, gradient | f32",
    "MobileNetV2, NCHW as written, batch 8": "conv | MobileNetV2, batch 8 | f32",
    "its gradient": "conv | MobileNetV2, batch 8, gradient | f32",
    "lone depthwise convolution, NCHW": "conv | depthwise 64ch 56^2 NCHW | f32",
    "lone convolution of 32 groups, NCHW": "conv | 32 groups 256ch 14^2 NCHW | f32",
    "NCHW convolutions in a `scan`": "conv | scan 4x64x28^2 | f32",
    "their gradients": "conv | scan 4x64x28^2, gradient | f32",
    "pooling and norms, geometric mean": "operators",
    "8192 rows of 50000x1024 float32": "index | 50000x1024 axis 0, 8192 | f32 | select",
    "their gradient": "index | 50000x1024 axis 0, 8192 | f32 | gradient",
    "functions under `optimize_layout`, geometric mean": "layout",
    "programs of others, geometric mean": "programs",
}
_HEADLINES = (
    "NCHW convolutions in a `scan`",
    "ResNet-18, NCHW as written, batch 1",
    "bfloat16 product, 2048 square, `x @ w.T`",
    "float32 product, 2048 square, `x @ w.T`",
    "bfloat16 attention, both einsums",
    "bfloat16 linear layer, 2048x1024 to 4096",
    "permute into existing memory, geometric mean",
)

# The newest reports of a processor in a profile, by the name of the benchmark.
Column = dict[str, Report]


def columns(found: dict[str, list[Report]]) -> list[Column]:
    """Two at most: with AMX, and the best there is without; each of the newest jax.

    On two processors, as all pages have it; of a kind that is nothing less than it
    could be, if there is one.
    """
    of: dict[tuple[str, str], Column] = {}
    for name, reports in found.items():
        for place, report in newest(reports).items():
            if report.machine["cores"] == 2:
                of.setdefault(place, {})[name] = report
    chosen = []
    for profiles in (("amx",), WITHOUT_AMX):
        places = [place for place in of if place[1] in profiles]
        if places:
            chosen.append(of[max(places, key=lambda place: _rank(of[place], place[1]))])
    return chosen


def _rank(column: Column, profile: str) -> tuple[Any, ...]:
    latest = max(column.values(), key=lambda report: report.jax)
    order = -list(PROFILES).index(profile)
    whole = not latest.machine["caps"]
    return order, whole, latest.jax, len(column), latest.machine["date"]


def title(column: Column) -> str:
    """The processor, the profile and the jax of a column."""
    described = next(iter(column.values())).machine
    versions = sorted(
        {report.jax: _version(report) for report in column.values()}.items()
    )
    of = " and ".join(version for _, version in versions)
    profile = PROFILES.get(described["profile"], described["profile"])
    return f"{described['class']}, {profile}, jax {of}"


def _version(report: Report) -> str:
    return str(report.machine["versions"]["jax"])


def ratio(
    report: Report, cases: list[CaseResult], peer: str, warm: bool
) -> float | None:
    """Ours to plain JAX or to torch: the geometric mean of the cases that have both."""
    family = PLAIN[report.benchmark][0][1] if peer == "plain" else peer
    found = (case.speedup(family, warm) for case in cases)
    return geometric_mean(value for value in found if value)


def figure(value: float | None, digits: int = 1) -> str:
    if value is None:
        return ""
    if digits > 1:
        return f"{value:.{digits}f}"
    return (
        f"{value:.0f}"
        if value >= 10
        else f"{value:.1f}"
        if value >= 1
        else f"{value:.2f}"
    )


def rows() -> Iterator[tuple[str, str, bool, tuple[str, ...]]]:
    """Title, file, whether to existing memory; case, dtype and group of each row."""
    for title, source in _ROWS.items():
        file, *wanted = (part.strip() for part in source.split("|"))
        yield title, file.rstrip("+"), file.endswith("+"), tuple(wanted)


def _cells(column: Column, file: str, warm: bool, wanted: tuple[str, ...]) -> list[str]:
    report = column.get(file)
    if report is None:
        return ["", ""]
    cases = [case for case in report.cases if _is(case, wanted)]
    newest_jax = max(each.jax for each in column.values())
    of = "" if report.jax == newest_jax else f" (jax {_version(report)})"
    values = [figure(ratio(report, cases, peer, warm)) for peer in ("plain", "torch")]
    return [f"{value}{of}" if value else "" for value in values]


def _is(case: CaseResult, wanted: tuple[str, ...]) -> bool:
    dtype = case.config.get("dtype", "")
    return all(
        part == of
        for part, of in zip(
            wanted, (case.name, _DTYPES.get(dtype, dtype), case.group), strict=False
        )
    )


def table(found: dict[str, list[Report]], titles: Iterable[str] | None = None) -> str:
    """How many times as fast as plain JAX and torch, a pair of columns a processor."""
    files = {file for _, file, *_ in rows()}
    chosen = [
        {name: report for name, report in column.items() if name in files}
        for column in columns(found)
    ]
    heads = [f"{title(column)}: to plain JAX | to torch" for column in chosen]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "--:|--:|" * len(chosen)]
    for name, file, warm, wanted in rows():
        if titles is None or name in titles:
            cells = [
                cell for each in chosen for cell in _cells(each, file, warm, wanted)
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def headlines(found: dict[str, list[Report]]) -> str:
    """A table of a few rows, for the first page of the site."""
    return table(found, _HEADLINES)


def programs(found: dict[str, list[Report]]) -> str:
    """Each program in the best profile of a processor, then in its other profiles.

    Under `optimize_layout`, then under `jl.installed()`.
    """
    classes: dict[str, dict[str, Report]] = {}
    for name, words in ("programs", ""), ("programs-installed", "installed"):
        reports = newest(found.get(name, ()))
        for (where, _), report in sorted(reports.items(), key=lambda r: _rank_of(r[1])):
            profile = report.machine["profile"]
            profile = PROFILES.get(profile, profile)
            column = f"{words}, {profile}" if words else f"in {profile}"
            classes.setdefault(where, {})[column] = report
    parts = []
    for where in sorted(classes):
        for column, report in classes[where].items():
            under = ", installed" if column.startswith("installed") else ""
            heading = f"**{title({report.benchmark: report})}{under}:** "
            parts.append(heading + _share(report))
        parts.append(_programs(classes[where]))
    return "\n".join(parts) or "Nothing is recorded yet.\n"


def _rank_of(report: Report) -> int:
    """The best profile first; one that is no profile, as AArch64's, is alone."""
    profile = report.machine["profile"]
    return [*PROFILES, profile].index(profile)


def _share(report: Report) -> str:
    """How many programs there are, their mean, and how many are slower."""
    ratios = [ratio for _, ratio in report.ratios()]
    slower = sum(ratio < FAST_ENOUGH for ratio in ratios)
    failed = sum(bool(case.failures()) for case in report.cases)
    return (
        f"{len(ratios)} programs, geometric mean {figure(geometric_mean(ratios))}; "
        f"{slower} below {FAST_ENOUGH}, {failed} wrong or failed.\n"
    )


def _programs(reports: dict[str, Report]) -> str:
    """A row a program, in the order of its ratio in the first of the reports."""
    first, *_ = reports.values()
    heads = ["program", "", "jax, ms", "ours, ms", "times", *list(reports)[1:]]
    heads += ["of the peak, %", "compiled in, s", "temporary, MB", "calls"]
    aligned = "|---|---|" + "--:|" * (len(heads) - 2)
    lines = [f"| {' | '.join(heads)} |", aligned]
    for case in sorted(first.cases, key=lambda case: case.speedup("jax", False) or 0):
        dtype = case.config["dtype"]
        cells = [f"{case.group}: {case.name}", _DTYPES.get(dtype, dtype)]
        samples = [case.sample(family, False) for family in ("jax", "ours")]
        cells += [f"{1e3 * s.median:.1f}" if s else "failed" for s in samples]
        for report in reports.values():
            same = (other for other in report.cases if _same(case, other))
            value = next((other.speedup("jax", False) for other in same), None)
            cells.append(f"{value:.2f}" if value else "")
        shares = (case.share(s) for s in samples if s)
        cells.append(", ".join(f"{100 * share:.0f}" for share in shares if share))
        for key, unit in (("compile_seconds", 1.0), ("temporary_bytes", 1e6)):
            of = (case.config.get(f"{whose}{key}") for whose in ("", "our_"))
            cells.append(", ".join(f"{float(v) / unit:.1f}" for v in of if v))
        cells.append(case.config.get("our_calls", ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def _same(case: CaseResult, other: CaseResult) -> bool:
    of = (case.group, case.name, case.config["dtype"])
    return of == (other.group, other.name, other.config["dtype"])


def layouts(found: dict[str, list[Report]]) -> str:
    """A row a function: as it is, optimised, and with kernels installed.

    With AMX, and without: what was measured last.
    """
    parts = []
    last = {
        file: newest(found[file])
        for file in ("layout", "layout-models")
        if file in found
    }
    for profiles in (("amx",), WITHOUT_AMX):
        reports: list[Column] = [
            {file: of[place] for file, of in last.items() if place in of}
            for place in last.get("layout", ())
            if place[1] in profiles
        ]
        if not reports:
            continue
        best = max(reports, key=lambda of: (of["layout"].jax, _date(of["layout"])))
        parts.append(f"**{title(best)}, {_date(best['layout'])[:10]}:**\n")
        heads = "| | jax | optimised | times | installed | times |"
        lines = [heads, "|---|" + "--:|" * 5]
        for case in (case for report in best.values() for case in report.cases):
            cells = [case.name]
            plain = case.sample("jax", False)
            cells.append(figure(1e3 * plain.median, 2) if plain else "failed")
            for family in ("ours", "installed"):
                sample = case.sample(family, False)
                cells.append(figure(1e3 * sample.median, 2) if sample else "")
                times = plain.median / sample.median if plain and sample else None
                cells.append(figure(times, 2))
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("".join(f"{line}\n" for line in lines))
    return "\n".join(parts) or "Nothing is recorded yet.\n"


def bounds(found: dict[str, list[Report]], *files: str) -> str:
    """A row a product, beside what bounds it; a table a profile."""
    reports: dict[str, dict[str, list[Report]]] = {}
    for name in files:
        for report in sorted(newest(found.get(name, ())).values(), key=_rank_of):
            if any(s.role == "peak" for case in report.cases for s in case.samples):
                of_class = reports.setdefault(report.machine["class"], {})
                of_class.setdefault(report.machine["profile"], []).append(report)
    parts = []
    for profiles in reports.values():
        for of_profile in profiles.values():
            first = of_profile[0]
            parts.append(f"**{title({'': first})}, {_date(first)[:10]}:**\n")
            parts.append(_bounds(case for each in of_profile for case in each.cases))
    return "\n".join(parts) or "Nothing is recorded yet.\n"


def _bounds(cases: Iterable[CaseResult]) -> str:
    heads = "| | | GFLOP/s | % of the limit | limit | times jax | times torch |"
    lines = [heads, "|---|---|--:|--:|---|--:|--:|"]
    for case in cases:
        ours = case.sample("ours", False)
        share = case.share(ours) if ours else None
        dtype = _DTYPES.get(case.config["dtype"])
        if ours is None or share is None or dtype is None:
            continue
        copy = case.copy()
        peak = next((s for s in case.samples if s.role == "peak"), None)
        memory = copy and (peak is None or copy.median > peak.median)
        cells = [
            f"{case.group}: {case.name.removesuffix(', ' + case.config['dtype'])}",
            dtype,
            f"{case.flops / ours.median / 1e9:.0f}",
            f"{100 * share:.0f}",
            "memory" if memory else "arithmetic",
            *(figure(case.speedup(peer, False), 2) for peer in ("jnp", "torch")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def by_case(
    found: dict[str, list[Report]], file: str, table: Callable[[Report], str]
) -> str:
    """A table of each processor that `columns` chooses; then what is slower on all."""
    of_file = {file: found.get(file, [])}
    parts = []
    for column in columns(of_file):
        (report,) = column.values()
        parts += [f"**{title(column)}, {_date(report)[:10]}:**\n", table(report)]
    return "\n".join([*parts, slower(of_file)])


def slower(found: dict[str, list[Report]]) -> str:
    """What is slower than plain JAX: a line a benchmark, processor and profile."""
    lines = [f"Below {FAST_ENOUGH} times plain JAX:\n\n"]
    every = [
        (name, report)
        for name, reports in found.items()
        for report in newest(reports).values()
    ]
    every.sort(key=lambda each: (each[1].machine["class"], _rank_of(each[1])))
    for name, report in every:
        slow = [f"{case} {ratio:.2f}" for ratio, case in report.slower(FAST_ENOUGH)]
        listed = "; ".join(slow) or "none"
        if len(found) == 1:
            lines.append(f"- {title({'': report})}: {listed}.\n")
        elif slow:
            lines.append(f"- {name}, {title({'': report})}: {listed}.\n")
    return "".join(lines)


def indices(report: Report) -> str:
    """A row an indexed array: ours, and how much longer jax and torch take."""
    groups = list(dict.fromkeys(case.group for case in report.cases))
    rows: dict[str, dict[str, str]] = {}
    for case in report.cases:
        dtype = case.config["dtype"]
        sample = case.sample("ours", False)
        if sample is not None:
            cells = [f"{1e3 * sample.median:.3g} ms"]
            cells += [figure(case.speedup(of, False), 2) for of in ("jnp", "torch")]
            row = rows.setdefault(f"{case.name} {_DTYPES.get(dtype, dtype)}", {})
            row[case.group] = ", ".join(filter(None, cells))
    heads = {group: group.replace("_", " ") for group in groups}
    return _pivoted("| |", heads, rows)


def convolutions(report: Report) -> str:
    """A row a convolution, or a network: times in ms, and how many times ours."""
    families = ("ours", "lax", "torch", "torch last")
    heads = "| | | ours | lax | torch | last | to lax | to torch | to last |"
    lines = [heads, "|---|---|" + "--:|" * 7]
    for case in report.cases:
        samples = [case.sample(family, False) for family in families]
        cells = [case.name, _DTYPES.get(case.config["dtype"], case.config["dtype"])]
        cells += [figure(1e3 * s.median, 2) if s else "" for s in samples]
        cells += [figure(case.speedup(family, False)) for family in families[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def operators(report: Report) -> str:
    """A row an operator and a shape: forward and gradient, in either memory format."""
    keys = [(g, f) for f in ("NCHW", "NHWC") for g in ("forward", "gradient")]
    rows: dict[str, dict[tuple[str, str], str]] = {}
    for case in report.cases:
        *row, format = case.name.rsplit(" ", 2)
        value = figure(case.speedup("jnp", False), 2)
        rows.setdefault(" | ".join(row), {})[case.group, format] = value
    return _pivoted("| | |", {(g, f): f"{f} {g}" for g, f in keys}, rows)


def _pivoted(
    corner: str, heads: Mapping[Any, str], rows: Mapping[str, Mapping[Any, str]]
) -> str:
    """A table of figures by row and by column, empty where there is none."""
    aligned = corner.replace(" ", "---") + "--:|" * len(heads)
    lines = [f"{corner} {' | '.join(heads.values())} |", aligned]
    for name, row in rows.items():
        cells = [name, *(row.get(key, "") for key in heads)]
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def _date(report: Report) -> str:
    return str(report.machine["date"])


def gpu_permutes() -> str:
    """By GPU a row a case: ours, a copy, what was predicted, and ours beside jax's."""
    heads = "case, , MB, ours us, copy us, % of copy, predicted, in a program: ours us"
    heads += ", jax us, times jax, times torch"
    lines = []
    for gpu, name in GPUS.items():
        paths = (RESULTS / name).glob("jax-*/permute.json")
        report = max(map(Report.load, paths), key=lambda report: report.jax)
        (prediction,) = (RESULTS / name).glob("jax-*/predicted.json")
        predicted = {
            (row["name"], row["dtype"]): row["predicted_share"]
            for row in json.loads(prediction.read_text())
        }
        lines += [f"**{gpu}**, jax {_version(report)}, {_date(report)[:10]}:", ""]
        lines += [f"| {' | '.join(heads.split(', '))} |", "|---|---|" + "--:|" * 9]
        lines += [*_gpu_rows(report, predicted), ""]
    return "".join(f"{line}\n" for line in lines[:-1])


def _gpu_rows(report: Report, predicted: dict[tuple[str, str], float]) -> Iterator[str]:
    for case in report.cases:
        dtype = case.config["dtype"]
        kernel, copy = case.sample("kernel", True), case.copy(True)
        ours, theirs = (case.sample(family, False) for family in ("ours", "jnp"))
        if not (kernel and copy and ours and theirs):
            continue
        share = predicted.get((case.name, dtype))
        cells = [
            case.name,
            _DTYPES.get(dtype, dtype),
            f"{case.moved / 2e6:.0f}",
            *(f"{1e6 * s.median:.1f}" for s in (kernel, copy)),
            f"{100 * copy.median / kernel.median:.0f}",
            f"{share:.0f}" if share else "",
            *(f"{1e6 * s.median:.1f}" for s in (ours, theirs)),
            figure(theirs.median / ours.median, 2),
            figure(case.speedup("torch", False)),
        ]
        yield f"| {' | '.join(cells)} |"


def gpu_choices() -> str:
    """A row a kind of call: by table its ratios, and how many of its sizes are ours."""
    folder = Path(choices.__file__).parent / "tables"
    loaded = [
        (gpu, choices.load(path))
        for gpu, name in GPUS.items()
        for path in sorted(folder.glob(f"{name}-jaxlib-*.json"))
    ]
    tables = {f"{gpu}, jax {table.jaxlib}": table for gpu, table in loaded}
    heads = [f"{gpu}: least | largest | ours" for gpu in tables]
    lines = [f"| call | {' | '.join(heads)} |", "|---|" + "--:|" * 3 * len(tables)]
    for case in sorted({case for table in tables.values() for case in table.cases}):
        cells = []
        for table in tables.values():
            ratios = [max(of.values()) for of in table.cases.get(case, {}).values()]
            ours = sum(ratio >= choices.GAIN for ratio in ratios)
            cells += (
                [f"{min(ratios):.2f}", f"{max(ratios):.2f}", f"{ours} of {len(ratios)}"]
                if ratios
                else [""] * 3
            )
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def marks(of: str) -> tuple[str, str]:
    """What encloses the second table of a page."""
    return BEGIN.replace("figures", of), END.replace("figures", of)


def renewed(page: str, made: str, between: tuple[str, str] = (BEGIN, END)) -> str:
    """The text of a page with what stands between two marks made anew."""
    begin, end = between
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{made}\n{end}{after}"


def pages(found: dict[str, list[Report]]) -> dict[Path, str]:
    """What the pages are that have tables."""
    return {
        README: renewed(README.read_text(), table(found)),
        PROGRAMS: renewed(PROGRAMS.read_text(), programs(found)),
        LAYOUTS: renewed(LAYOUTS.read_text(), layouts(found)),
        PRODUCTS: renewed(PRODUCTS.read_text(), bounds(found, "gemm", "linear")),
        ATTENTION: renewed(ATTENTION.read_text(), bounds(found, "attention")),
        INDEX: renewed(INDEX.read_text(), by_case(found, "index", indices)),
        FORMATS: renewed(
            renewed(FORMATS.read_text(), by_case(found, "operators", operators)),
            by_case(found, "conv", convolutions),
            marks("convolutions"),
        ),
        GPU: renewed(
            renewed(GPU.read_text(), gpu_permutes()), gpu_choices(), marks("choices")
        ),
    }


if __name__ == "__main__":
    for page, text in pages(recorded()).items():
        page.write_text(text)
