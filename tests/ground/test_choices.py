# SPDX-License-Identifier: Apache-2.0
"""Tables of choices: how they are looked up, and what a bad one does."""

import functools
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_layout as jl
from hlo import compiled
from jax_layout import choices
from jax_layout.measured import Table, Work

NT = "gemm float32 NT"


def content(**changed):
    here = {
        "format": choices.FORMAT,
        "profile": choices.profile(),
        "jaxlib": choices.jaxlib_minor(),
        "processor": choices.processor(),
        "threads": choices.threads(),
        "cases": {
            NT: [
                [[64, 64, 64, 1], {"oneDNN": 0.5, "OpenBLAS": 0.8}],
                [[256, 256, 256, 1], {"oneDNN": 2.0, "OpenBLAS": 1.25}],
            ],
            "permute 4": [[[4096, 64, 64], {"ours": 0.5}]],
        },
    }
    return here | changed


def write(path, **changed):
    path.write_text(json.dumps(content(**changed)))
    return path


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """No table of another test, nor one of the user's."""
    monkeypatch.setattr(choices, "_given", [None])
    caches = choices._tables, choices._gpu_tables, choices._best, choices.packaged
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def table(tmp_path):
    path = write(tmp_path / "table.json")
    jl.use_choices(path)
    return path


def doubted(doublings, points=2):
    """What the way to the nearest, and having few, takes off."""
    few = 1 / points - 1 / 16
    return math.exp(0.03 * doublings * (1 + doublings / 3) + few)


@pytest.mark.parametrize(
    "sizes, method, expected",
    [
        ((64, 64, 64, 1), "oneDNN", 0.5),
        ((256, 256, 256, 1), "oneDNN", 2.0),
        # Halfway, in logarithms, less three quarters of the deviation of 0.5 and 2, and
        # what the doublings to the nearest, and having two points, cost.
        ((128, 128, 128, 1), "oneDNN", 0.5**0.75 / doubted(3**0.5)),
        ((128, 128, 128, 1), "OpenBLAS", 0.8**0.75 / doubted(3**0.5)),
        # Beyond: towards the nearest.
        ((1024, 1024, 1024, 1), "oneDNN", 1.2366 / doubted(2 * 3**0.5)),
    ],
)
def test_ratios_are_interpolated_over_logarithms(table, sizes, method, expected):
    ratio = choices.load(table).ratio(Work(NT, sizes), method)
    assert ratio == pytest.approx(expected, rel=1e-3)


def test_what_a_table_does_not_know_has_no_ratio(table):
    loaded = choices.load(table)
    assert loaded.ratio(Work("gemm float32 NN", (64, 64, 64, 1)), "oneDNN") is None
    assert loaded.ratio(Work(NT, (64, 64, 64, 1)), "AMX") is None
    assert loaded.ratio(Work(NT, (64, 64)), "oneDNN") is None


def test_the_fastest_method_is_chosen_and_lax_where_none_is(table):
    both = ("OpenBLAS", "oneDNN")
    assert choices.choose(Work(NT, (256, 256, 256, 1)), both) == "oneDNN"
    assert choices.choose(Work(NT, (256, 256, 256, 1)), ("OpenBLAS",)) == "OpenBLAS"
    assert choices.choose(Work(NT, (64, 64, 64, 1)), both) is None
    assert choices.choose(Work(NT, (64, 64, 64, 1)), ()) is None


def contract(n):
    x = jnp.ones((n, n), jnp.float32)
    return compiled(lambda x, w: jl.einsum("mk,nk->mn", x, w), x, x)


def test_a_program_runs_what_the_table_says(table):
    assert 'method = "oneDNN"' in contract(256)
    assert "jax_layout_gemm" not in contract(64)


def test_a_permute_may_be_left_to_lax(table):
    x = jnp.ones((64, 64), jnp.float32)
    assert "jax_layout_permute" not in compiled(lambda x: jl.permute(x, (1, 0)), x)
    jl.use_choices("kernels")
    assert "jax_layout_permute" in compiled(lambda x: jl.permute(x, (1, 0)) + 0, x)


def test_no_kernel_runs_where_none_is_wanted():
    jl.use_choices("lax")
    assert "jax_layout" not in contract(256)


def test_a_method_can_be_forced():
    with choices.forced("OpenBLAS"):
        assert 'method = "OpenBLAS"' in contract(256)
    with choices.forced("lax"):
        assert "jax_layout_gemm" not in contract(256)


def test_a_method_can_be_forced_on_one_call():
    x = jnp.ones((256, 256), jnp.float32)

    def f(x):
        return jl.permute(jl.einsum("mk,nk->mn", x, x) + 1, (1, 0))

    with choices.forced("OpenBLAS", Work(NT, (256, 256, 256, 1))):
        text = compiled(f, x)
    assert 'method = "OpenBLAS"' in text and "jax_layout_permute" not in text


def test_what_is_forced_and_cannot_run_is_left_to_lax():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no file has a method's name
        with choices.forced("AMX"):
            assert "jax_layout_permute" not in compiled(
                lambda x: jl.permute(x, (1, 0)) + 0, jnp.ones((64, 64))
            )


def test_a_call_left_to_lax_is_so_with_all_that_it_is_made_of(tmp_path):
    """XLA fuses a layer whole; with a product of ours in it, it could not."""
    points = [[[256, 256, 256, 1], {"oneDNN": 2.0}]]
    slower = [[[256, 256, 256, 1], {"oneDNN": 0.9}]]
    jl.use_choices(write(tmp_path / "t", cases={NT: points, f"{NT} gelu": slower}))
    x, b = jnp.ones((256, 256), jnp.float32), jnp.ones(256, jnp.float32)
    assert "jax_layout_gemm" not in compiled(
        lambda x, b: jl.linear(x, x, b, activation="gelu"), x, b
    )
    assert "jax_layout_gemm" in contract(256)


def test_a_convolution_in_a_loop_is_ours_whatever_the_table_says(tmp_path):
    """XLA's is plain loops there, of what is not NHWC and of weights' gradients."""
    works = [f"conv {i} float32{order}" for i in "wxy" for order in ("", " NCHW")]
    points = {work: [[[1, 1, 1, 1], {"oneDNN": 0.5}]] for work in works}
    jl.use_choices(write(tmp_path / "table.json", cases=points))
    for names in (("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")):
        x = jnp.ones([{"N": 2, "C": 32}.get(axis, 16) for axis in names[0]], "float32")
        w = jnp.ones([{"H": 3, "W": 3}.get(axis, 32) for axis in names[1]], "float32")

        def gradient(x, w, names=names):
            f = functools.partial(jl.conv_general_dilated, window_strides=(1, 1))
            y = lambda w: f(x, w, padding="SAME", dimension_numbers=names).sum()  # noqa: E731
            return jax.grad(y)(w)

        def loop(x, w, gradient=gradient):
            return jax.lax.fori_loop(0, 2, lambda _, w: w + gradient(x, w), w)

        assert "jax_layout_conv" not in compiled(gradient, x, w)
        assert "jax_layout_conv" in compiled(loop, x, w)


def test_in_a_loop_a_table_says_nothing_of_what_is_far_larger_than_its_points(tmp_path):
    loops = {"segment_extreme float32 in a loop": [[[1, 8, 64, 4], {"ours": 0.2}]]}
    jl.use_choices(write(tmp_path / "table.json", cases=loops))
    chosen = {}
    for rows in (1, 64, 128, 1 << 20):
        work = Work("segment_extreme float32", (1, 8, rows, 4)).in_a_loop()
        chosen[rows] = choices.choose(work, passes=0)
    assert chosen == {1: None, 64: None, 128: None, 1 << 20: "ours"}


@pytest.mark.parametrize("others, small", [(True, None), (False, "oneDNN")])
def test_in_a_loop_other_tables_count_where_the_machines_knows_none(
    others, small, tmp_path, monkeypatch
):
    """A convolution of few operations loses in all that know it, a large one gains."""
    points = {"conv y float32": [[[64, 8, 8, 9], {"oneDNN": 3.0}]]}
    jl.use_choices(write(tmp_path / "table.json", cases=points))
    monkeypatch.setattr(choices, "packaged_path", lambda: tmp_path / "none.json")
    if not others:
        monkeypatch.setattr(choices, "packaged", list)
    for sizes, expected in (((64, 2, 2, 9), small), ((4096, 32, 32, 9), "oneDNN")):
        work = Work("conv y float32", sizes).in_a_loop()
        assert choices.choose(work, ("oneDNN",), passes=0) == expected


# What one point alone says of others in a loop is a factor of e less.
@pytest.mark.parametrize(
    "smallest, of_x, of_w", [(0.5, 0.9, 0.9), (1.5, 4.0 / math.e, None)]
)
def test_convolutions_in_a_loop_that_are_smaller_than_what_gained_lose(
    smallest, of_x, of_w
):
    """Of all cases of a dtype, also of one that the table has no points of."""
    loops = {
        "conv y float32 in a loop": {
            (4, 4, 4, 1): {"oneDNN": smallest},
            (16, 8, 8, 1): {"oneDNN": 0.9},
            (32, 8, 8, 1): {"oneDNN": 6.0},
        },
        "conv x float32 in a loop": {(64, 8, 8, 1): {"oneDNN": 4.0}},
    }
    table = Table("avx2", "0.1", "none", 1, loops)

    def ratio(case, rows):
        return table.ratio(Work(case, (rows, 8, 8, 1)).in_a_loop(), "oneDNN")

    assert ratio("conv x float32", 12) == pytest.approx(of_x, rel=0.3)
    assert ratio("conv w float32", 12) == of_w
    assert ratio("conv y float32", 16) == pytest.approx(0.9)
    assert ratio("conv y float32", 32) == pytest.approx(6.0)
    assert ratio("conv y bfloat16", 12) is None  # of which nothing was measured


def test_what_is_asked_can_be_collected():
    with choices.asked() as found:
        contract(256)
    ((work, methods),) = found
    assert work == Work(NT, (256, 256, 256, 1))
    assert set(methods) <= set(choices.methods_of("gemm"))


def test_without_a_table_every_one_that_knows_must_agree(monkeypatch):
    def table(**ratios):
        points = {NT: {(256, 256, 256, 1): ratios}}
        return Table("avx2", "0.1", "none", 1, points)

    tables = [table(oneDNN=2.0, OpenBLAS=3.0), table(oneDNN=1.1, OpenBLAS=0.9)]
    monkeypatch.setattr(choices, "packaged", lambda: tables)
    monkeypatch.setattr(choices, "_tables", lambda source: [])
    work = Work(NT, (256, 256, 256, 1))
    choose = choices._best
    assert choose(work, ("OpenBLAS", "oneDNN"), "packaged") == "oneDNN"
    assert choose(work, ("OpenBLAS",), "packaged") is None
    assert choose(work, ("AMX",), "packaged") is None  # nobody knows it
    assert choose(Work("gemm int8 NT", (1, 1, 1, 1)), ("oneDNN",), "packaged") is None


def test_a_quick_table_decides_with_the_one_after_it(monkeypatch):
    def table(quick, **ratios):
        points = {NT: {(256, 256, 256, 1): ratios}}
        return "path", Table("avx2", "0.1", "none", 1, points, quick)

    def best(*tables, m=256):
        monkeypatch.setattr(choices, "_tables", lambda source: tables)
        return choices._best.__wrapped__(Work(NT, (m, 256, 256, 1)), ("oneDNN",), "")

    faster, slower = {"oneDNN": 5.0}, {"oneDNN": 0.5}
    assert best(table(True, **faster), table(False, **faster)) == "oneDNN"
    assert best(table(True, **faster), table(False, **slower)) is None
    assert best(table(True, **slower), table(False, **faster)) is None
    assert best(table(False, **faster), table(False, **slower)) == "oneDNN"
    # Far from its points it says nothing.
    quick = table(True, **slower), table(False, **faster)
    assert [best(*quick, m=m) for m in (1024, 2048)] == [None, "oneDNN"]


def test_a_gain_within_noise_is_none(monkeypatch):
    points = {
        NT: {(256, 256, 256, 1): {"oneDNN": 1.05}, (64, 64, 64, 1): {"oneDNN": 1.1}}
    }
    table = Table("avx2", "0.1", "none", 1, points)
    monkeypatch.setattr(choices, "_tables", lambda source: [("path", table)])
    choose = choices._best.__wrapped__
    assert choose(Work(NT, (256, 256, 256, 1)), ("oneDNN",), "") is None
    assert choose(Work(NT, (256, 256, 256, 1)), ("oneDNN",), "", gain=1.0) == "oneDNN"
    assert choose(Work(NT, (64, 64, 64, 1)), ("oneDNN",), "") == "oneDNN"


@pytest.mark.parametrize(
    "changed, rule",
    [
        ({"format": 99}, "has format 99"),
        ({"format": None}, "it has no format"),
        ({"cases": {NT: [[[0, 1, 1, 1], {"oneDNN": 1.0}]]}}, "at least 1"),
        ({"cases": {NT: [[[1, 1, 1, 1], {"nothing": 1.0}]]}}, "names nothing"),
        ({"cases": {NT: [[[1, 1, 1, 1], {"oneDNN": -1.0}]]}}, "the ratio -1.0"),
        ({"cases": {NT: 5}}, "is not a table"),
        ({"profile": "vax"}, "another machine: its profile is vax"),
        ({"jaxlib": "0.1"}, "another machine: its jaxlib is 0.1"),
        ({"processor": "none"}, "another machine: its processor is none"),
        ({"threads": 999}, "another machine: its threads is 999"),
    ],
)
def test_a_bad_table_is_refused_by_name_and_rule(tmp_path, changed, rule):
    path = write(tmp_path / "table.json", **changed)
    with pytest.raises(ValueError, match=rule) as error:
        jl.use_choices(path)
    assert str(path) in str(error.value)


def test_processors_of_one_name_are_told_apart():
    zen5 = "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n"
    assert choices.processor_of(zen5) == "AMD EPYC, family 26, model 2"
    assert choices.processor_of(zen5.replace("26", "25")) != choices.processor_of(zen5)
    assert choices.processor_of("CPU part\t: 0xd40\n") == ""


def test_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot be read as a table"):
        jl.use_choices(path)
    with pytest.raises(ValueError, match="No such file"):
        jl.use_choices(tmp_path / "none.json")
    with pytest.raises(TypeError, match="use_choices: table must be"):
        jl.use_choices(3)


def test_a_bad_table_in_the_users_folder_is_one_warning(tmp_path, monkeypatch):
    path = write(tmp_path / "table.json", format=99)
    monkeypatch.setattr(choices, "user_path", lambda: path)
    monkeypatch.setenv(choices.VARIABLE, "")
    with pytest.warns(RuntimeWarning, match="has format 99.*own table") as caught:
        choices.choose(Work(NT, (256, 256, 256, 1)), ("oneDNN",))
        choices.choose(Work(NT, (512, 256, 256, 1)), ("oneDNN",))
    assert len(caught) == 1 and str(path) in str(caught[0].message)


def test_the_users_table_comes_first(tmp_path, monkeypatch):
    path = write(tmp_path / "table.json")
    monkeypatch.setattr(choices, "user_path", lambda: path)
    monkeypatch.setenv(choices.VARIABLE, "")
    assert choices.source() == str(path)
    assert choices.choose(Work(NT, (256, 256, 256, 1)), ("oneDNN",)) == "oneDNN"
    jl.use_choices("packaged")
    assert choices.source() != str(path)


def test_the_variable_names_a_table(tmp_path):
    path = write(tmp_path / "table.json")
    code = "from jax_layout import choices; print(choices.source())"
    for value in (str(path), "lax", "kernels"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {choices.VARIABLE: value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == value


def test_packaged_tables_are_sound():
    folder = Path(choices.__file__).parent / "tables"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in folder.glob("*.json"):
            table = choices.load(path)
            vendor = "-intel" if "-intel-" in path.name else ""
            assert path.name == f"{table.profile}{vendor}-jaxlib-{table.jaxlib}.json"
            assert table.cases


@pytest.mark.parametrize(
    ("gpu", "method"), [("GPU A", "ours"), ("GPU B", None), ("GPU C", None), ("", None)]
)
def test_the_table_of_a_gpu_is_asked_first(gpu, method, tmp_path, monkeypatch):
    """Of whatever jaxlib; where it has none, all tables of GPUs must agree."""
    work = Work("cuda permute 4", (4096, 64, 64))
    for name, ratio in (("a", 1.5), ("b", 0.9)):
        cases = {work.case: [[list(work.sizes), {"ours": ratio}]]}
        named = {"profile": f"gpu-{name}", "processor": f"GPU {name.upper()}"}
        path = tmp_path / f"gpu-{name}-jaxlib-0.1.json"
        write(path, jaxlib="0.1", cases=cases, **named)
    monkeypatch.setattr(choices, "_PACKAGED", tmp_path)
    monkeypatch.setattr(choices, "gpu", lambda: gpu)
    assert choices._best(work, ("ours",), "packaged") == method
    jl.use_choices("packaged")
    own = tmp_path / f"gpu-{gpu[-1:].lower()}-jaxlib-0.1.json"
    decided = choices.decided_by(work)
    assert decided == (str(own) if own.exists() else "every table that knows a call")


@pytest.mark.parametrize(
    ("jaxlib", "order"),
    [
        ("0.9", ["0.9", "0.12", "0.11"]),
        ("0.11", ["0.11", "0.12", "0.9"]),
        ("0.13", ["0.12", "0.11", "0.9"]),
    ],
)
def test_a_gpus_table_of_this_jaxlib_is_asked_first(
    jaxlib, order, tmp_path, monkeypatch
):
    """And of others the newest."""
    for version in ("0.9", "0.11", "0.12"):
        path = tmp_path / f"gpu-a-jaxlib-{version}.json"
        named = {"profile": "gpu-a", "processor": "GPU A"}
        write(path, jaxlib=version, cases={}, **named)
    monkeypatch.setattr(choices, "_PACKAGED", tmp_path)
    monkeypatch.setattr(choices, "gpu", lambda: "GPU A")
    monkeypatch.setattr(choices, "jaxlib_minor", lambda: jaxlib)
    assert [table.jaxlib for _, table in choices._gpu_tables()] == order


@pytest.mark.parametrize(
    ("vendor_id", "vendor"),
    [
        ("GenuineIntel", "intel"),
        ("AuthenticAMD", "amd"),
        ("HygonGenuine", ""),
        ("", ""),
    ],
)
def test_vendor(vendor_id, vendor):
    text = f"processor\t: 0\nvendor_id\t: {vendor_id}\ncpu family\t: 6\n"
    assert choices.vendor_of(text) == vendor


def test_the_vendor_has_its_own_table(tmp_path, monkeypatch):
    """And the class's table is for whoever has none."""
    monkeypatch.setattr(choices, "_PACKAGED", tmp_path)
    monkeypatch.setattr(choices, "vendor", lambda: "intel")
    monkeypatch.setattr(choices, "profile", lambda: "avx512_bf16")
    tail = f"jaxlib-{choices.jaxlib_minor()}.json"
    assert choices.packaged_path() == tmp_path / f"avx512_bf16-{tail}"
    own = tmp_path / f"avx512_bf16-intel-{tail}"
    own.write_text("{}")
    assert choices.packaged_path() == own
    monkeypatch.setattr(choices, "vendor", lambda: "amd")
    assert choices.packaged_path() == tmp_path / f"avx512_bf16-{tail}"
