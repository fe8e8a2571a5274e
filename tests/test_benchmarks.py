# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' arithmetic and one short run; nothing here depends on speed."""

import argparse
import dataclasses
import itertools
import math
import os
import platform
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import rich.console

from benchmarks import all as all_benchmarks
from benchmarks import (
    choose,
    conv,
    display,
    gemm,
    harness,
    machine,
    native,
    permute,
    profiles,
    runner,
    xla_program,
)
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
from benchmarks.peers import peak_peer, sweep_peer
from benchmarks.permute_cases import MIB, PermuteCase, all_cases
from benchmarks.results import CaseResult, Report, geometric_mean
from docs import tables

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


@pytest.mark.parametrize("by_events", [False, True])
def test_seconds_are_of_one_of_many_in_a_launch(by_events, monkeypatch):
    """A clock that a launch sets forward by eight seconds."""
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def launch(_):
        now[0] += 8.0

    def timer(start_all):
        before = now[0]
        start_all()
        return now[0] - before

    many = Contender(
        "many", "ours", launch, times=4, timer=timer if by_events else None
    )
    (found,) = measure([many], Timing(rounds=3, seconds=99.0, sample_seconds=32.0))
    assert found.best == found.median == 2.0 and found.calls == 4
    assert found.rounds == 3


def test_a_program_of_many_calls_makes_each():
    calls = []

    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(
            lambda x: (calls.append(float(x[0])), 2 * x)[1], shape, x
        )

    sets = [(jnp.full(3, value),) for value in (1.0, 5.0)]
    results = jax.block_until_ready(xla_program.repeated(f, sets, 5)())
    assert calls == [1.0, 5.0, 1.0, 5.0, 1.0]  # one after the other, and none shared
    assert [float(y[1]) for y in results] == [2.0, 10.0, 2.0, 10.0, 2.0]


def test_whose_threads_linger_comes_last_and_then_a_pause(monkeypatch):
    seen = []
    monkeypatch.setattr(harness.time, "sleep", seen.append)
    contenders = [
        Contender(name, "peer", lambda i, name=name: seen.append(name), lingers=lingers)
        for name, lingers in (("a", 0.0), ("torch", 0.5), ("b", 0.0))
    ]
    measure(contenders, Timing(rounds=5, sample_seconds=0.0))
    rounds = [["torch", 0.5] if k in (0, 4) else [0.0] for k in range(5)]
    expected = list(itertools.chain(*rounds))
    assert [e for e in seen if e not in ("a", "b")][-len(expected) :] == expected
    assert seen.index("a") < seen.index("torch") and seen[-4:] == [*"ba", "torch", 0.5]


@pytest.mark.parametrize("nbytes", [8, 4096, 1 << 20, (1 << 20) + 24])
def test_a_sweep_reads_every_word(nbytes):
    words = np.arange(nbytes // 8, dtype=np.int32)  # half of the bytes are there
    sets = [[jnp.asarray(words), jnp.asarray(words)]]
    for contender in sweep_peer.contenders(sets):
        expected = 2 * int(words[: words.size // 2 * 2].view(np.uint64).sum())
        assert contender.launch(0) % 2**64 == expected % 2**64
        assert contender.role == "copy" and contender.read is None


@pytest.mark.parametrize("slow, pairs", [(1, 2), (2, 1)])
def test_the_peak_is_that_of_the_profile(monkeypatch, slow, pairs):
    """And of bfloat16 that of pairs or of floats, whichever is more."""
    kinds = []

    class Library:
        @staticmethod
        def jax_layout_peak(kind, operations, threads):
            assert threads >= 1
            if operations == 640:
                kinds.append(kind)
            elif kind == slow:
                time.sleep(2e-3)

    monkeypatch.setattr(peak_peer, "library", lambda name, native: Library)
    for profile in ("avx2", "avx512", "avx512_bf16", "amx"):
        monkeypatch.setenv("JAX_LAYOUT_MAX_ISA", profile)
        for dtype in ("float32", "bfloat16", "float64"):
            for contender in peak_peer.contenders(dtype, 640):
                assert contender.role == "peak" and contender.read is None
                contender.launch(0)
    assert kinds == [0, 0, 1, 1, 1, pairs]


def test_the_ceiling_is_the_slower_of_memory_and_arithmetic():
    ours = sample("ours", "ours", 4e-3)
    sweeps = sample("sweep", "copy", 1e-3), sample("sweep x4", "copy", 3e-3)
    peak = sample("peak", "peak", 2e-3)

    def share(*samples):
        return CaseResult("g", "n", {}, 1, (ours, *samples)).share(ours)

    assert share() is None
    assert share(*sweeps) == 0.25 and share(peak) == 0.5
    assert share(*sweeps, peak) == 0.5 and share(sweeps[1], peak) == 0.75


def test_who_lingers_sits_out_three_rounds_of_four(monkeypatch):
    monkeypatch.setattr(harness.time, "sleep", lambda seconds: None)
    contenders = [
        Contender("a", "peer", lambda i: None),
        Contender("torch", "peer", lambda i: None, lingers=0.5),
    ]
    a, torch = measure(contenders, Timing(rounds=99, seconds=0.0, sample_seconds=0.0))
    assert (a.rounds, torch.rounds) == (9, 3)


def test_one_program_is_timed_once():
    seen = []
    contenders = [
        Contender(name, "peer", lambda i, n=name: seen.append(n), program=program)
        for name, program in (("a", "p"), ("b", "q"), ("c", "p"), ("d", ""), ("e", ""))
    ]
    samples = measure(contenders, Timing(rounds=3, sample_seconds=0.0))
    assert {*seen} == {*"abde"}
    assert [s.program_of for s in samples] == [None, None, "a", None, None]
    assert samples[2].median == samples[0].median and samples[2].family == "c"


def test_the_text_of_a_program_has_no_names():
    def one(x, y):
        return jnp.sin(x) @ y

    def other(left, right):
        return jnp.matmul(jnp.sin(left), right)

    def third(x, y):
        return jnp.cos(x) @ y

    x = jnp.ones((64, 64))
    texts = [
        xla_program.text(jax.jit(f).lower(x, x).compile()) for f in (one, other, third)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert "{1,0}" in texts[0]


def test_infinities_compare_as_equal_or_not_at_all():
    x = np.array([1.0, -np.inf], np.float32)
    assert gemm.compare(x, x, "float32", False) is None
    assert gemm.compare(x[::-1], x, "float32", False)
    assert gemm.compare(np.array([1.0, np.nan], np.float32), x, "float32", False)


def test_measure_keeps_three_rounds_when_time_is_up():
    idle = Contender("idle", "peer", lambda i: None)
    (found,) = measure([idle], Timing(rounds=9, seconds=0.0))
    assert found.rounds == 3


def test_a_call_that_compiles_is_not_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def launch(i):
        now[0] += 0.1 if i else 60.0

    contender = Contender("jit", "peer", launch)
    (found,) = measure([contender], Timing(rounds=9, seconds=3.0))
    assert found.rounds == 9 and found.median == pytest.approx(0.1)


def test_a_call_that_outlasts_the_budget_is_the_only_one(monkeypatch):
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(now))
    calls = []
    slow = Contender("slow", "peer", calls.append)
    (found,) = measure([slow], Timing(rounds=9, seconds=3.0))
    assert (found.rounds, found.median, calls) == (1, 10.0, [0, 1])


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


def test_select_by_set():
    assert len(permute.select("all")) == len(ALL_CASES)
    assert [c.group for c in permute.select("tiny")] == ["tiny"] * 4


def test_a_short_run_of_convolutions(tmp_path, capsys):
    path = tmp_path / "run.json"
    for chosen in (["single: depthwise"], ["network: MobileNetV2, batch 1"]):
        arguments = ["--case", *chosen, "--quick", "--rounds", "1", "--seconds", "0.01"]
        arguments += ["--peers", "lax", "our conv", "--json", str(path)]
        assert conv.main(arguments) == 0
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


# Flags as /proc/cpuinfo has them, by what the processor is the best at.
AVX2 = {"sse4_2", "avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
BF16 = AVX512 | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (AMX, ("amx", "avx512_bf16", "avx512", "avx2")),
        (BF16, ("avx512_bf16", "avx512", "avx2")),
        (AVX512, ("avx512", "avx2")),
        (AVX2, ("avx2",)),
        ({"asimd"}, (platform.machine(),)),
    ],
)
def test_profiles_of_a_processor(flags, names):
    assert profiles.possible(flags) == names
    assert profiles.choose(None, flags) == names[0]
    assert profiles.caps(names[0], flags) == {}
    assert all(profiles.caps(name, flags) for name in names[1:])


def test_a_profile_that_the_machine_lacks_is_refused():
    message = "profile amx: this processor lacks amx_bf16, amx_tile; it can have avx512"
    with pytest.raises(ValueError, match=message):
        profiles.choose("amx", AVX512 | {"avx512_bf16"})


@pytest.mark.parametrize(
    ("profile", "wanted"),
    [
        (
            "avx512_bf16",
            "avx512_bf16 AVX512_BF16 AVX512_CORE_BF16 avx512 AVX512_E3 Cooperlake",
        ),
        ("avx512", "avx512 AVX512 AVX512_CORE avx512 AVX512 SkylakeX"),
        ("avx2", "avx2 AVX2 AVX2 avx2 AVX2 Haswell"),
    ],
)
def test_a_profile_caps_everyone(profile, wanted):
    given = {
        "PATH": "/bin",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX --xla_other=1",
        "OPENBLAS_CORETYPE": "Zen",
        "OPENBLAS_L2_SIZE": "512",
    }
    ours, xla, onednn, torch, mkl, openblas = wanted.split()
    assert profiles.environment(profile, AMX, given) == {
        "PATH": "/bin",
        "JAX_LAYOUT_MAX_ISA": ours,
        "XLA_FLAGS": f"--xla_other=1 --xla_cpu_max_isa={xla}",
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": torch,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "OPENBLAS_CORETYPE": openblas,
    }


def test_the_best_profile_takes_stray_caps_away():
    given = {
        "PATH": "/bin",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "JAX_LAYOUT_MAX_ISA": "avx2",
        "OPENBLAS_CORETYPE": "Haswell",
        "OPENBLAS_L2_SIZE": "512",
    }
    assert profiles.environment("avx512", AVX512, given) == {"PATH": "/bin"}


def test_the_processor_answers_where_cpuid_may_fault(monkeypatch):
    asked = []
    monkeypatch.setattr(native, "preload", lambda *given: asked.append(given) or "so")
    able = AMX | {"cpuid_fault"}
    for profile, answers in [("amx", False), ("avx512_bf16", False), ("avx2", True)]:
        assert profiles.answered(profile, able) == answers
        assert not profiles.answered(profile, AMX)
        found = profiles.environment(profile, able, {}).get("LD_PRELOAD")
        assert found == ("so" if answers else None)
    assert asked == [("cpuid",)]


@pytest.mark.skipif(
    not profiles.processor_flags() >= {"cpuid_fault", *AVX512},
    reason="CPUID cannot fault, or has nothing to hide",
)
def test_who_asks_the_processor_finds_a_lesser_one():
    code = "from jax_layout import choices; print(choices.profile())"
    flags = profiles.processor_flags()
    for profile in profiles.possible(flags)[1:]:
        if not profiles.answered(profile, flags):
            continue
        environment = profiles.environment(profile, flags, os.environ)
        del environment["JAX_LAYOUT_MAX_ISA"]
        command = [sys.executable, "-c"]
        given = {"capture_output": True, "text": True, "env": environment}
        out = subprocess.run([*command, code], check=True, **given)
        assert out.stdout.split() == [profile]
        crash = "import ctypes; ctypes.string_at(0)"  # other faults stay what they are
        died = subprocess.run([*command, crash], check=False, **given)
        assert died.returncode == -signal.SIGSEGV


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_linux_refuses_amx_after_the_filter():
    """In a process of its own: the filter stays; and it outlives an exec."""
    code = "from benchmarks import profiles; print(profiles.amx_is_refused())"
    first = (
        "import os, sys; from benchmarks import profiles;"
        "print(profiles.amx_is_refused(), flush=True); profiles.refuse_amx();"
        f"os.execv(sys.executable, [sys.executable, '-c', {code!r}])"
    )
    out = subprocess.run(
        [sys.executable, "-c", first], capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["False", "True"]


def test_a_process_starts_anew_as_its_profile(monkeypatch):
    started = []
    monkeypatch.setattr(profiles, "processor_flags", lambda: BF16)
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    monkeypatch.setattr(os, "environ", {"OPENBLAS_L2_SIZE": "512"})
    assert profiles.enter("avx2") == "avx2"
    ((_, arguments, environment),) = started
    assert arguments[1:] == sys.orig_argv[1:]
    assert environment["JAX_LAYOUT_MAX_ISA"] == "avx2"
    monkeypatch.setattr(os, "environ", environment)
    assert profiles.enter("avx2") == "avx2"
    assert len(started) == 1  # it is one already


@pytest.mark.parametrize("asked", [["--help"], ["--case", "x", "--list"], []])
def test_who_asks_what_there_is_waits_for_no_measurement(monkeypatch, asked):
    def held():
        raise BlockingIOError

    monkeypatch.setattr(runner, "alone", held)
    monkeypatch.setattr(profiles, "enter", lambda profile: profile)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gemm", *asked])
    if asked:
        assert profiles.start(lambda: 7) == 7
    else:
        with pytest.raises(BlockingIOError):
            profiles.start(lambda: 7)


def test_a_table_of_several_runs_names_each_processor_once():
    assert choose.both("A; B", "C; A") == "A; B; C"


def cpuinfo(name, vendor="GenuineIntel", family=6, model=143, flags=()):
    return (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\n"
        f"model\t\t: {model}\nmodel name\t: {name}\nflags\t\t: {' '.join(flags)}\n"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (cpuinfo("Intel(R) Xeon(R) Processor", flags=AMX), "xeon-amx-2c"),
        (cpuinfo("Intel(R) Xeon(R) Processor", flags=BF16), "xeon-avx512-2c"),
        (cpuinfo("13th Gen Intel(R) Core(TM) i7", flags=AVX2), "core-avx2-2c"),
        (cpuinfo("AMD EPYC", "AuthenticAMD", 26, 2, BF16), "epyc-zen5-2c"),
        (cpuinfo("AMD EPYC 9554", "AuthenticAMD", 25, 17, BF16), "epyc-zen4-2c"),
        (cpuinfo("AMD Ryzen 9 5950X", "AuthenticAMD", 25, 33, AVX2), "ryzen-zen3-2c"),
        (cpuinfo("AMD EPYC", "AuthenticAMD", 31, 2, BF16), "epyc-avx512-2c"),
        (cpuinfo("Hygon C86 7285", "HygonGenuine", 24, 1, AVX2), "hygon-c86-avx2-2c"),
        ("", f"{machine.slug(platform.machine())}-2c"),
    ],
)
def test_class_of_a_processor(text, name):
    assert machine.processor_class(text, 2) == name


def test_a_commit_is_not_dirty_by_what_was_recorded(monkeypatch):
    asked = []

    def git(*arguments):
        asked.append(arguments)
        return "abc\n" if arguments[0] == "describe" else changed

    monkeypatch.setattr(machine, "_git", git)
    changed = ""
    assert machine.commit() == "abc"
    assert not any("results" in part or "docs" in part for part in asked[1])
    changed = "+one"
    first = machine.commit()
    changed = "+two"
    assert first.startswith("abc-dirty-") and machine.commit() != first


def options(path=None, **others):
    given = dict.fromkeys(("case", "part", "profile")) | {"json": path, "resume": True}
    return argparse.Namespace(**given | others)


def work(name, seen, group="ml", fails=False):
    def run(on_round):
        seen.append(name)
        if fails:
            raise RuntimeError("no memory\nat all")
        return dataclasses.replace(case_result(name), config={"dtype": "float32"})

    return runner.Work(group, name, {"dtype": "float32"}, run)


def record(path, *works, rounds=3):
    return runner.record(
        "permute",
        works,
        options(path),
        {"rounds": rounds},
        jax.devices("cpu")[0],
        rich.console.Console(quiet=True),
    )


def test_an_interrupted_run_goes_on(tmp_path, capsys):
    path = tmp_path / "run.json"
    seen = []

    def interrupted(on_round):
        raise KeyboardInterrupt

    stop = dataclasses.replace(work("b", seen), run=interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(path, work("a", seen), stop, work("c", seen))
    assert seen == ["a"] and not path.exists()
    assert runner.partial(path).exists()
    works = [work(name, seen) for name in "abc"]
    assert [case.name for case in record(path, *works).cases] == ["a", "b", "c"]
    assert seen == ["a", "b", "c"] and not runner.partial(path).exists()
    record(path, *works)  # of this commit: nothing is measured again
    assert seen == ["a", "b", "c"]
    record(path, *works, rounds=9)
    assert seen == ["a", "b", "c", "a", "b", "c"]


def test_what_is_slower_is_measured_once_more(tmp_path, capsys):
    path = tmp_path / "run.json"
    seen = []

    def slow(name, *medians):
        medians = list(medians)

        def run(on_round):
            seen.append(name)
            samples = sample("ours", "ours", medians.pop(0)), sample("jnp", "peer", 1.0)
            return CaseResult("ml", name, {"dtype": "float32"}, 8, samples)

        return runner.Work("ml", name, {"dtype": "float32"}, run)

    works = slow("a", 1.5, 0.5), slow("b", 0.9), slow("c", 2.0, 1.5), work("d", seen)
    found = record(path, *works)
    assert seen == ["a", "b", "c", "d", "a", "c"]
    assert [case.sample("ours", False).median for case in found.cases[:3]] == [
        0.5,
        0.9,
        1.5,
    ]
    assert [case.name for case in Report.load(path).cases] == ["a", "b", "c", "d"]
    record(path, *works)  # twice is enough
    assert len(seen) == 6


def test_a_case_that_raises_does_not_end_the_run(tmp_path, capsys):
    path = tmp_path / "run.json"
    report = record(path, work("a", [], fails=True), work("b", []))
    assert [case.skipped.get("ours") for case in report.cases] == [
        "RuntimeError: no memory",
        None,
    ]
    assert runner.failed(report) and runner.failed(Report.load(path))


def test_a_case_that_kills_its_process_is_left_out_next_time(tmp_path, capsys):
    path = tmp_path / "run.json"
    killed = dataclasses.replace(work("b", []), run=lambda on_round: sys.exit(9))
    with pytest.raises(SystemExit):
        record(path, work("a", []), killed)
    assert runner.note_crash(path, "killed by signal 11") == "ml b"
    assert runner.note_crash(path, "killed by signal 9") == "its start"
    report = record(path, work("a", []), killed, work("c", []))
    assert [case.name for case in report.cases] == ["a", "b", "c"]
    assert report.cases[1].skipped == {"ours": "killed by signal 11"}


def test_two_measurements_do_not_run_at_once(tmp_path):
    lock = tmp_path / "lock"
    with runner.alone(lock):
        second = runner.alone(lock, wait=False)
        pytest.raises(BlockingIOError, second.__enter__)
    with runner.alone(lock, wait=False):
        pass


def kept(folder, benchmark="gemm", name="gemm", place="a-2c", jax="1.0", **samples):
    """Writes a report of one case; its samples' medians by family."""
    roles = {family: "ours" if family == "ours" else "peer" for family in samples}
    found = tuple(
        sample(family, roles[family], median) for family, median in samples.items()
    )
    case = CaseResult("square", "2048 NT", {"dtype": "float32"}, 8 * MIB, found)
    given = {
        "class": place,
        "profile": "amx" if place.startswith("xeon") else "avx2",
        "caps": {},
        "cpu": "a CPU",
        "cores": 2,
        "gpu": None,
        "instruction_sets": [],
        "versions": {"jax": jax, "torch": None},
        "commit": "abc",
        "date": "2026-01-01",
    }
    report = Report(benchmark, given, {}, (case,))
    report.save(report.path(name, folder))
    return report.path(name, folder)


def test_list_of_what_became_slower(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    kept(before, jax="1.9", ours=1.0, jnp=9.0)
    kept(before, jax="1.10", ours=1.0, jnp=1.0)
    kept(before, "conv", "conv", ours=1.0, lax=1.0)
    kept(after, jax="1.11", ours=1.2, jnp=1.0)
    kept(after, "conv", "conv", jax="1.11", ours=1.05, lax=1.0)
    kept(after, place="b-2c", jax="1.11", ours=2.0, jnp=1.0)  # nothing to compare
    found = all_benchmarks.fallen(after, before)
    assert found == ["1.00 -> 0.83  gemm  square 2048 NT float32 ours"]


def test_list_of_what_is_slower(tmp_path, capsys):
    kept(tmp_path, jax="1.9", ours=2.0, jnp=1.0)
    path = kept(tmp_path, jax="1.10", ours=1.0, jnp=0.9, torch=0.1)
    kept(tmp_path, "layout", "layout", jax="1.10", ours=1.0)
    kept(tmp_path, "conv", "conv", "b-2c", ours=1.0, lax=0.98, torch=0.5)
    lines = all_benchmarks.slower(tmp_path)
    assert lines == {
        path.parent: ["0.90  gemm  square 2048 NT float32 ours"],
        tmp_path / "b-2c" / "avx2" / "jax-1.0": [],
    }
    all_benchmarks.show(rich.console.Console(quiet=True), tmp_path)
    assert (path.parent / "slower.txt").read_text().startswith("0.90  gemm")


def test_what_ours_failed_is_told_from_what_peers_did():
    skipped = {"ours eager+": "wrong", "our conv": "slow", "jnp": "wrong"}
    case = CaseResult("ml", "a", {}, 0, (), skipped)
    assert case.failures() == {"ours eager+": "wrong"}


def test_plain_jax_has_the_same_kind_of_output():
    """A donated result is compared with a donated one; eager calls with eager ones."""
    samples = (
        sample("ours", "ours", 1.0),
        sample("jnp", "peer", 2.0),
        sample("ours", "ours", 1.0, warm=True),
        sample("jnp", "peer", 0.5, warm=True),
        sample("ours eager", "ours", 1.0),
        sample("jnp eager", "peer", 0.4),
    )
    case = CaseResult("tiny", "x", {}, MIB, samples)
    assert list(report(case).slower(0.97)) == [
        (0.5, "tiny x ours+"),
        (0.4, "tiny x ours eager"),
    ]


def test_tables_have_a_column_with_amx_and_one_without(tmp_path):
    for place, version, ours in (
        ("xeon-amx-2c", "1.0", 0.5),
        ("epyc-2c", "1.0", 0.25),
        ("epyc-2c", "1.2", 2.5),
    ):
        kept(tmp_path, place=place, jax=version, ours=ours, jnp=1.0, torch=12.5)
    kept(tmp_path, "linear", "linear", "epyc-2c", "1.1", ours=1.0, jnp=1.0)
    table = tables.table(all_benchmarks.recorded(tmp_path))
    head, _, *rows = table.splitlines()
    assert head == (
        "| | xeon-amx-2c, AMX, jax 1.0: to plain JAX | to torch "
        "| epyc-2c, AVX2, jax 1.1 and 1.2: to plain JAX | to torch |"
    )
    wanted = "| float32 product, 2048 square, `x @ w.T` | 2.0 | 25 | 0.40 | 5.0 |"
    assert wanted in rows


def test_what_is_slower_is_listed_by_benchmark_and_processor(tmp_path):
    for place, ours in (("xeon-2c", 2.0), ("epyc-2c", 0.5)):
        kept(tmp_path, place=place, jax="1.0", ours=ours, jnp=1.0)
        kept(tmp_path, "linear", "linear", place, "1.0", ours=0.5, jnp=1.0)
    found = all_benchmarks.recorded(tmp_path)
    _, *rows = filter(None, tables.slower(found).splitlines())
    (row,) = rows  # of the four, one
    assert row.startswith("- gemm, xeon-2c, AMX, jax 1.0: ") and "0.50" in row
    _, *rows = filter(None, tables.slower({"gemm": found["gemm"]}).splitlines())
    assert rows[0] == "- epyc-2c, AVX2, jax 1.0: none." and "0.50" in rows[1]


def test_the_tables_of_the_pages_are_not_stale():
    found = all_benchmarks.recorded()
    for page, text in tables.pages(found).items():
        assert page.read_text() == text, f"{page.name}: run python -m docs.tables"
    for row in tables.table(found).splitlines():
        assert any(cell.strip() for cell in row.split("|")[2:]), row
