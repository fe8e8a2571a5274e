# SPDX-License-Identifier: Apache-2.0
"""The list of programs, how they are checked, and one from drawing to table."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich", reason="pip install jax-layout[bench]")

from benchmarks.harness import Sample, Timing
from benchmarks.programs import COLLECTIONS, __main__, measure, missing
from benchmarks.programs.program import Program, filled
from benchmarks.results import CaseResult, Report
from docs import tables

EVERY = [(name, p) for name, of in COLLECTIONS.items() for p in of.programs]
SHORT = Timing(rounds=1, seconds=0.01)


@pytest.fixture(autouse=True)
def nothing_is_collected(monkeypatch):
    """Of what other tests left, which takes seconds each time."""
    monkeypatch.setattr(measure.gc, "collect", lambda: None)


def test_the_list_covers_what_it_should():
    titles = [f"{group}: {p.name} {p.dtype}" for group, p in EVERY]
    assert len(COLLECTIONS) >= 5 and len(titles) >= 24
    assert len(set(titles)) == len(titles)
    assert {p.dtype for _, p in EVERY} == set(measure._TOLERANCE)
    assert not any("|" in title for title in titles)  # cells of a table
    for wanted in (
        "decode, 1 row", "decode, 8 rows", "gradient", "LSTM", "GRU", "UNet",
        "StyleGAN2", "neural ODE", "ensemble", "graph", "examples, clipped", "blur",
    ):  # fmt: skip
        assert any(wanted in title for title in titles), wanted


def test_a_list_needs_no_library():
    modules = sorted({name for of in COLLECTIONS.values() for name in of.modules})
    code = (
        "import sys, benchmarks.programs.__main__;"
        f"print([name for name in {modules} if name in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_the_extras_have_what_the_programs_need():
    path = Path(__file__).parents[1] / "pyproject.toml"
    extras = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    listed = {re.split("[<>=]", each)[0] for each in extras["models"] + extras["test"]}
    named = {"haiku": "dm-haiku", "dm_pix": "dm-pix"}
    for of in COLLECTIONS.values():
        assert {named.get(module, module) for module in of.modules} <= listed


def test_weights_keep_the_variance_of_a_signal():
    shapes = {
        "kernel": jax.ShapeDtypeStruct((3, 3, 64, 128), jnp.float32),
        "scale": jax.ShapeDtypeStruct((4096,), jnp.float32),
        "bias": jax.ShapeDtypeStruct((4096,), jnp.float32),
        "steps": jax.ShapeDtypeStruct((), jnp.int32),
    }
    found = filled(shapes, jnp.bfloat16)
    assert found["kernel"].dtype == jnp.bfloat16 and found["steps"] == 0
    deviation = float(jnp.std(found["kernel"].astype(jnp.float32)))
    assert deviation == pytest.approx((3 * 3 * 64) ** -0.5, rel=0.02)
    means = [float(jnp.mean(found[name])) for name in ("scale", "bias")]
    assert means == pytest.approx([1, 0], abs=0.01)
    again = filled(shapes, jnp.bfloat16)
    assert all(np.array_equal(found[name], again[name]) for name in shapes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nudged_is_a_little_off(dtype):
    x = jnp.asarray([1.5, -3.0, 0.25] * 9, dtype)
    tree = x, jnp.arange(3)
    found = [measure.nudged(tree, 2**-7, seed) for seed in (0, 0, 1)]
    for y, kept in found:
        assert y.dtype == dtype and np.array_equal(kept, np.arange(3))
        off = abs((y - x) / x)
        assert bool(jnp.all((off > 2**-9) & (off < 2**-6)))
    first, same, another = (y for y, _ in found)
    assert np.array_equal(first, same) and not np.array_equal(first, another)


def test_a_difference_is_in_units_of_what_is_allowed():
    y = np.array([10.0, 1.0])
    assert measure.excess([y + 0.005], [y], [[y]], 1e-3) == pytest.approx(0.5)
    # Chaotic: plain jax's own is off by 0.01, so four times that will do.
    assert measure.excess([y + 0.02], [y], [[y], [y + 0.01]], 1e-3) == pytest.approx(
        0.5
    )
    # Each array by its own largest value.
    small = y / 1000
    assert measure.excess([y, small + 1e-4], [y, small], [[y, small]], 1e-3) > 9
    nans = np.array([10.0, np.nan])
    assert measure.excess([nans], [y], [[y]], 1e-3) == float("inf")
    assert measure.excess([nans], [nans], [[nans]], 1e-3) == 0
    assert measure.excess([y * 0 + 1], [y * 0], [[y * 0]], 1e-3) == float("inf")
    assert measure.excess([y[:1]], [y], [[y]], 1e-3) == float("inf")


def logistic(steps):
    def f(x):
        return jax.lax.fori_loop(0, steps, lambda _, x: 3.9 * x * (1 - x), x)

    return lambda _: (f, (jnp.linspace(0.1, 0.9, 64, dtype=jnp.float32),))


@pytest.mark.parametrize(("steps", "wrong"), [(1, True), (60, False)])
def test_a_wrong_result_is_not_timed(monkeypatch, steps, wrong):
    """What is wrong after one step is as good as any other after sixty."""

    def off(f):
        return lambda x: f(x * jnp.float32(1.001))

    monkeypatch.setattr(measure.jl, "optimize_layout", off)
    program = Program("logistic", logistic(steps))
    result = measure.run("maps", program, SHORT, lambda: None)
    assert bool(result.failures()) == wrong and bool(result.samples) != wrong


@pytest.mark.parametrize(
    ("group", "name"),
    [("Flax", "gradients of 16"), ("PIX", "blur"), ("Jraph", "attention")],
)
def test_a_program_from_drawing_to_table(group, name, tmp_path, capsys):
    if lacking := missing(COLLECTIONS[group]):
        pytest.skip(f"without {', '.join(lacking)}: pip install jax-layout[models]")
    path = tmp_path / "programs.json"
    given = ["--only", group, "--case", name, "--rounds", "1", "--seconds", "0.01"]
    with jax.enable_x64(False):
        assert __main__.main([*given, "--json", str(path)]) == 0
    (case,) = Report.load(path).cases
    assert case.speedup("jax", False) > 0
    for key in ("compile_seconds", "temporary_bytes", "error"):
        assert float(case.config[key]) >= 0
    text = tables.programs({"programs": [Report.load(path)]})
    assert text.count("\n| ") == 2  # its head, and a row


def test_a_list_of_a_collection(capsys):
    assert __main__.main(["--list", "--only", "Flax"]) == 0
    assert "Flax: L-BFGS" in capsys.readouterr().out


def result(name, ours, config=()):
    samples = tuple(
        Sample(family, "peer", False, median, median, median, median, 3, 1, 0.0)
        for family, median in (("ours", ours), ("jax", 0.01))
    )
    config = {"dtype": "float32", **dict(config)}
    return CaseResult("Flax", name, config, 1, samples)


def test_the_table_has_the_share_of_the_peak():
    peak = Sample("peak", "peak", False, *[0.004] * 4, 3, 1, 0.0)
    case = result("slow", 0.02)
    case = dataclasses.replace(case, samples=(*case.samples, peak))
    versions = {"jax": "1.2"}
    machine = {"class": "a-2c", "profile": "avx2", "versions": versions, "date": "2026"}
    text = tables.programs({"programs": [Report("programs", machine, {}, (case,))]})
    assert "| Flax: slow | f32 | 10.0 | 20.0 | 0.50 | 40, 20 |" in text


def test_the_table_has_every_profile_and_the_slowest_first():
    measured = {
        "compile_seconds": "1.25",
        "our_compile_seconds": "2",
        "temporary_bytes": "1500000",
        "our_temporary_bytes": "500000",
        "our_calls": "7",
    }
    cases = result("fast", 0.005, measured), result("slow", 0.02, measured)
    failed = dataclasses.replace(
        cases[0], name="bad", samples=(), skipped={"ours": "no"}
    )
    machine = {"class": "a-2c", "versions": {"jax": "1.2"}, "date": "2026-01-01"}
    best, lesser = (
        Report("programs", machine | {"profile": profile}, {}, of)
        for profile, of in (("avx512", (*cases, failed)), ("avx2", cases[:1]))
    )
    text = tables.programs({"programs": [lesser, best]})
    assert text == (
        "**a-2c, AVX-512, jax 1.2:** 2 programs, geometric mean 1.0; "
        "1 below 0.97, 1 wrong or failed.\n\n"
        "**a-2c, AVX2, jax 1.2:** 1 programs, geometric mean 2.0; "
        "0 below 0.97, 0 wrong or failed.\n\n"
        "| program |  | jax, ms | ours, ms | times | in AVX2 "
        "| of the peak, % | compiled in, s | temporary, MB | calls |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
        "| Flax: bad | f32 | failed | failed |  |  |  "
        "| 1.2, 2.0 | 1.5, 0.5 | 7 |\n"
        "| Flax: slow | f32 | 10.0 | 20.0 | 0.50 |  |  "
        "| 1.2, 2.0 | 1.5, 0.5 | 7 |\n"
        "| Flax: fast | f32 | 10.0 | 5.0 | 2.00 | 2.00 |  "
        "| 1.2, 2.0 | 1.5, 0.5 | 7 |\n"
    )
