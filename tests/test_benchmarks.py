# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' arithmetic and one short run; nothing here depends on speed."""

import math

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import conv, display, permute
from benchmarks.buffers import Buffers
from benchmarks.harness import (
    Contender,
    Sample,
    Timing,
    calls_per_sample,
    measure,
    rotation,
    summarise,
)
from benchmarks.permute_cases import MIB, PermuteCase, all_cases
from benchmarks.results import CaseResult, Report, geometric_mean

ALL_CASES = [case for cases in all_cases().values() for case in cases]


def sample(family, role, median, warm=False):
    return Sample(
        family=family,
        role=role,
        warm=warm,
        median=median,
        q1=median,
        q3=median,
        best=median,
        rounds=3,
        calls=1,
        faults=0.0,
    )


def case_result(name="a case", moved=8 * MIB):
    samples = (
        sample("ours", "ours", 2e-3),
        sample("jnp", "peer", 3e-3),
        sample("torch", "peer", 1.6e-3),
        sample("torch", "peer", 1.5e-3, warm=True),
        sample("memcpy", "copy", 1e-3, warm=True),
        sample("memcpy", "copy", 4e-3),
    )
    config = {"shape": "2x3", "axes": "1,0", "dtype": "float32"}
    return CaseResult("ml", name, config, moved, samples, {"onednn+": "why"})


def report(*cases):
    machine = {"cpu": "a CPU", "cores": 2, "gpu": None, "versions": {"jax": "1"}}
    return Report("permute", machine, {"rounds": 3}, cases)


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None


def test_summarise_takes_quartiles():
    idle = Contender("idle", "peer", lambda i: None)
    found = summarise(idle, [5.0, 1.0, 2.0, 4.0, 3.0], calls=7, faults=0.5)
    assert (found.q1, found.median, found.q3, found.best) == (2.0, 3.0, 4.0, 1.0)
    assert (found.rounds, found.calls, found.faults) == (5, 7, 0.5)


@pytest.mark.parametrize(
    ("once", "seconds", "calls"),
    [(1.0, 2e-4, 1), (2e-4, 2e-4, 1), (1e-5, 2e-4, 20), (0.0, 1.0, 10_000)],
)
def test_calls_fill_a_sample(once, seconds, calls):
    assert calls_per_sample(once, seconds) == calls


def test_rotation_lets_everyone_go_first():
    orders = [rotation(4, r) for r in range(4)]
    assert sorted(order[0] for order in orders) == list(range(4))
    assert all(sorted(order) == list(range(4)) for order in orders)


def test_measure_interleaves_and_counts_launches():
    seen = []
    contenders = [
        Contender(name, "peer", lambda i, name=name: seen.append((name, i)))
        for name in "abc"
    ]
    rounds = []
    timing = Timing(rounds=4, sample_seconds=0.0)
    samples = measure(contenders, timing, lambda: rounds.append(len(seen)))
    assert [s.family for s in samples] == ["a", "b", "c"]
    assert {s.rounds for s in samples} == {4} and len(rounds) == 4
    assert [i for _, i in seen] == sorted({i for _, i in seen})
    names = [name for name, _ in seen[-12:]]
    assert names == [*"abc", *"bca", *"cab", *"abc"]


def test_measure_keeps_three_rounds_when_time_is_up():
    idle = Contender("idle", "peer", lambda i: None)
    (found,) = measure([idle], Timing(rounds=9, seconds=0.0))
    assert found.rounds == 3


def test_ratios_compare_like_with_like():
    case = case_result()
    ours = case.sample("ours", warm=False)
    assert case.copy() == case.sample("memcpy", warm=True)
    assert case.share(ours) == pytest.approx(0.5)
    assert case.gb_per_s(ours) == pytest.approx(8 * MIB / 2e-3 / 1e9)
    assert case.speedup("jnp", warm=False) == pytest.approx(1.5)
    assert case.speedup("jnp", warm=True) is None
    assert case.best_peer(warm=False).family == "torch"


def test_summary_names_what_is_slower():
    lines = list(display.summary(report(case_result(), case_result("small", MIB))))
    assert lines[0] == (
        "fresh outputs, 1 cases of >= 1 MiB: geometric mean 50.0% of the best copy, "
        "1.50x jnp; 0 below 1x jnp"
    )
    assert "slower than a peer: ml a case (1,0) f32, fresh: torch is 1.25x" in lines[1]
    assert lines[-1] == "skipped: ml small (1,0) f32: onednn+: why"


def test_report_survives_json(tmp_path):
    wanted = report(case_result())
    wanted.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == wanted
    (case,) = wanted.to_json()["cases"]
    assert case["samples"][0]["gb_per_s"] == pytest.approx(4.194)


def test_sets_of_cases():
    assert len(all_cases()["ttc"]) == 57
    names = [(c.group, c.name, c.shape, c.axes, c.dtype) for c in ALL_CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda c: f"{c.group}-{c.name}")
def test_case_is_a_permute(case):
    assert sorted(case.axes) == list(range(len(case.shape)))
    assert math.prod(case.out_shape) == math.prod(case.shape) > 0
    assert 0 < case.nbytes < 500 * MIB


def test_oneflow_sizes():
    sizes = {case.nbytes // MIB for case in all_cases()["oneflow"]}
    assert sizes == {16, 32, 64, 128}


def test_buffers_are_distinct_and_not_zero():
    case = PermuteCase("ml", "small", (512, 1024), (1, 0), "float32")
    buffers = Buffers(case, rotation=10 * MIB)
    assert buffers.sets == 3
    assert len({a.ctypes.data for a in buffers.x + buffers.y}) == 6
    assert all(x.all() for x in buffers.x)
    assert all(y.shape == (1024, 512) for y in buffers.y)


def test_check_finds_a_wrong_result():
    expected = np.arange(4, dtype="u4")
    for result, reason in ((expected, None), (expected + 1, "wrong result")):
        contender = Contender("x", "peer", lambda i, r=result: r, read=np.asarray)
        assert permute.check(contender, expected) == reason


def test_select_by_set_and_name():
    assert len(permute.select("all", None)) == len(ALL_CASES)
    assert [c.group for c in permute.select("tiny", None)] == ["tiny"] * 4
    assert {c.name for c in permute.select("all", ["K^T"])} == {"attention K^T"}


def test_a_short_run_of_convolutions(tmp_path, capsys):
    path = tmp_path / "run.json"
    for chosen in (["single: depthwise"], ["network: MobileNetV2, batch 1"]):
        arguments = ["--case", *chosen, "--quick", "--rounds", "1", "--seconds", "0.01"]
        assert conv.main([*arguments, "--json", str(path)]) == 0
        capsys.readouterr()
        cases = Report.load(path).cases
        assert len(cases) in (2, 4) and not any(case.skipped for case in cases)
        families = {sample.label for case in cases for sample in case.samples}
        assert {"ours", "lax"} <= families


def test_a_short_run(tmp_path, capsys):
    json, plot = tmp_path / "run.json", tmp_path / "run.png"
    arguments = ["--set", "tiny", "--case", "64x64", "--quick"]
    assert permute.main([*arguments, "--json", str(json), "--plot", str(plot)]) == 0
    assert "tiny, warm outputs" in capsys.readouterr().out
    (case,) = Report.load(json).cases
    assert case.config == {"shape": "64x64", "axes": "1,0", "dtype": "float32"}
    assert {"ours", "ours+", "jnp", "numpy+"} <= {s.label for s in case.samples}
    assert not [name for name in case.skipped if "ours" in name]
    assert plot.read_bytes().startswith(b"\x89PNG")
