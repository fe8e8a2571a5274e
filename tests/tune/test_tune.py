# SPDX-License-Identifier: Apache-2.0
"""What measures tables of choices: which works, right results, files, the command."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from jax_layout import choices, cli
from jax_layout.measured import Work
from jax_layout.tune import cases, command
from jax_layout.tune.case import Case, gradient_by
from jax_layout.tune.command import run
from jax_layout.tune.measure import (
    QUICK,
    Measured,
    Timing,
    difference,
    measure,
    measure_case,
    median,
    program_of,
)
from jax_layout.tune.table import replacing, text

all_cases = functools.cache(cases.all_cases)  # thousands
MEASURED_BY = "jax_layout.tune.measure._times"
SHORT = Timing(seconds=0.0, rounds=1, sample=0.0)


def product(x):
    """A call that two methods can run, one of which is wrong."""
    method = choices.choose(Work("gemm fake", x.shape), ("oneDNN", "OpenBLAS"))
    if method == "OpenBLAS":
        return x + 1
    return jnp.square(x) / x if method else x * 1


def moved(x):
    return -x if choices.choose(Work("permute fake", x.shape)) else 0 - x


def case(f, *shapes, dtype="float32", **options):
    return Case(f.__name__, f, shapes, (dtype,) * len(shapes), **options)


TINY = [case(product, (8,)), case(moved, (4, 4))]


def measured(start):
    """The points and failures of the one case whose name starts so."""
    (one,) = (c for c in all_cases(False) if c.name.startswith(start))
    return measure_case(one, SHORT)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The command with two cases, and a cache folder of its own."""
    monkeypatch.setattr(command.cpu_cases, "all_cases", lambda quick: TINY)
    monkeypatch.setattr(choices, "user_path", lambda: tmp_path / "cache" / "table.json")
    return tmp_path


def test_infinity_is_itself_alone():
    x = np.array([1, -np.inf, np.inf], np.float32)
    assert difference(x, x) is None
    for wrong in (-x, np.nan_to_num(x), np.where(x == 1, np.inf, x)):
        assert "wrong result" in difference(wrong.astype(np.float32), x)
    assert "wrong result" in difference(x, np.ones(3, np.float32))


def test_beyond_a_rectifiers_edge_single_numbers_may_be_off():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    off = x.copy()
    off[3, 5] += 0.005  # 8e-5 of what all are
    assert "off by" in difference(off, x) and difference(off, x, kinked=True) is None
    off[3] += 0.005
    assert "off by" in difference(off, x, kinked=True)
    (gradient,) = {c.kinked for c in all_cases(False) if "relu, gradient" in c.name}
    assert gradient and not any(c.kinked for c in all_cases(True))


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("", "y float32|NN"),
        (" gradient by values", "x float32|NT"),
        (" gradient by filters", "w float32|TN"),
    ],
)
def test_a_case_of_a_convolution_is_one_pass_and_compared_with_xlas(kind, of):
    start = f"convolution NHWC, stride 1,{kind} float32 1x14x14x96, 1x1x96x576"
    points, failures = measured(start)
    conv, product = of.split("|")
    asked = {f"conv {conv} one tap", f"gemm float32 {product} convolution"}
    assert {work.case for work in points} == asked and not failures


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("", "conv x float32 strided"),
        (" gradient by filters", "conv w float32 strided"),
        (" gradient by filters of jax's", "conv x float32 NCHW strided"),
    ],
)
def test_the_window_of_jaxs_gradient_by_filters_is_an_image(kind, asked):
    start = f"transposed convolution NHWC,{kind} float32 1x4x4x512, 4x4x512x256"
    points, failures = measured(start)
    (work,) = points
    assert work.case == asked and not failures
    assert work.sizes[-1] == (8 * 8 if "jax" in kind else 4 * 4)


def test_a_run_writes_a_table_that_loads(tmp_path):
    path = tmp_path / "new" / "table.json"
    outcome = run(path, cases=TINY, timing=SHORT)
    cases = choices.load(path).cases
    assert set(cases) == {"gemm fake", "permute fake"}
    assert set(cases["gemm fake"][8,]) == {"oneDNN"}
    assert set(cases["permute fake"][4, 4]) == {"ours"}
    assert (outcome.path, outcome.works) == (str(path), 2)
    choices.check_here(choices.load(path), path)
    assert json.loads(path.read_text())["jax"] == jax.__version__


def test_points_that_are_kept_stay_but_for_those_measured_anew(tmp_path):
    path = tmp_path / "table.json"
    old, other = Work("permute fake", (4, 4)), Work("permute fake", (9, 9))
    run(
        path, cases=TINY[1:], timing=SHORT, kept={old: {"ours": 77}, other: {"ours": 3}}
    )
    points = choices.load(path).points()
    assert points[other] == {"ours": 3} and points[old]["ours"] != 77


def test_a_second_run_keeps_the_lesser_ratio(tmp_path):
    path = tmp_path / "table.json"
    old, other = Work("permute fake", (4, 4)), Work("permute fake", (9, 9))
    kept = {old: {"ours": 0.001}, other: {"ours": 3}}
    run(path, cases=TINY[1:], timing=SHORT, kept=kept, again=True)
    points = choices.load(path).points()
    assert points[other] == {"ours": 3} and points[old]["ours"] == 0.001
    run(path, cases=TINY[1:], timing=SHORT, kept={old: {"ours": 1e9}}, again=True)
    assert choices.load(path).points()[old]["ours"] < 1e6


def test_runs_of_before_count_as_runs(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    work, other = Work("permute fake", (4, 4)), Work("permute fake", (9, 9))
    earlier = [{work: {"ours": 1.5}, other: {"ours": 3.0}}, {work: {"ours": 9.0}}]
    monkeypatch.setattr(MEASURED_BY, lambda *_: [2.0, 1.0])
    run(path, cases=TINY[1:], timing=SHORT, earlier=earlier)
    assert choices.load(path).points() == {work: {"ours": 2.0}}
    run(path, cases=TINY[1:], timing=SHORT, earlier=earlier, runs=0)
    assert choices.load(path).points() == {work: {"ours": 1.5}, other: {"ours": 3.0}}


def test_a_method_with_a_wrong_result_is_reported_and_not_in_the_table(tmp_path):
    outcome = run(tmp_path / "table.json", cases=TINY, timing=SHORT)
    (failure,) = outcome.failures
    assert failure.startswith("product: OpenBLAS: wrong result, off by 1")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y.at[3].add(1e-2),  # a single one
        lambda y: y.at[3].set(jnp.nan),
        lambda y: y.astype("float16"),
        lambda y: y[:-1],
    ],
)
def test_a_result_that_is_off_in_one_element_is_wrong(wrong):
    def f(x):
        return wrong(x) if choices.choose(Work("permute fake", x.shape)) else x

    points, failures = measure_case(case(f, (1 << 12,)), SHORT)
    assert not points and len(failures) == 1


def test_rounding_is_not_wrong():
    def f(x):
        ours = choices.choose(Work("permute fake", x.shape))
        return x * (1 + 2**-22) if ours else x

    points, failures = measure_case(case(f, (64,)), SHORT)
    assert set(points) == {Work("permute fake", (64,))} and not failures


def test_a_call_among_others_gains_on_its_share(monkeypatch):
    works = [Work("permute fake", (64 * i,)) for i in (1, 2, 3)]

    def f(x):
        for work in works:
            x = x * (1 + 2**-22) if choices.choose(work) else x
        return x

    seconds = iter([[1.2, 1.0, 1.2, 1.5], [1.2, 1.5]])  # the loss is measured again
    monkeypatch.setattr(MEASURED_BY, lambda *_: next(seconds))
    points, failures = measure_case(case(f, (64,)), SHORT)
    # A sixth is saved, or nothing, or lost a quarter.
    found = [points[work]["ours"] for work in works]
    assert not failures and found == pytest.approx([2, 1, 1 / 1.75])
    seconds = iter([[1.2, 1.0, 1.2, 1.5], [1.2, 1.2]])  # which was noise
    points, _ = measure_case(case(f, (64,)), SHORT)
    assert [points[work]["ours"] for work in works] == pytest.approx([2, 1, 1])
    together = dataclasses.replace(case(f, (64,)), together=True)
    monkeypatch.setattr(MEASURED_BY, lambda *_: [1.2, 1.0])
    points, _ = measure_case(together, SHORT)
    assert [points[work]["ours"] for work in works] == pytest.approx([1.2] * 3)


@pytest.mark.parametrize(
    "packaged, again, kept",
    [(True, 1.4, 1.4), (True, 0.85, 0.9), (False, 1.4, 0.9)],
    ids=["noise", "a loss", "XLA's there too"],
)
def test_a_few_rounds_alone_take_nothing_from_the_packages_table(
    packaged, again, kept, monkeypatch
):
    monkeypatch.setattr(choices, "packaged_has", lambda *_: packaged)
    seconds = iter([[0.9, 1.0], [again, 1.0]])
    monkeypatch.setattr(MEASURED_BY, lambda *_: next(seconds))
    quick = dataclasses.replace(SHORT, doubts=True)
    points, _ = measure_case(case(moved, (4,)), quick)
    assert points == {Work("permute fake", (4,)): {"ours": kept}}
    assert len([*seconds]) == (not packaged)


def test_what_the_package_has():
    path = choices.packaged_path()
    if not path.exists():
        pytest.skip(f"the package has no {path.name}")
    table = choices.load(path)
    had = {
        choices.packaged_has(work, method) == (ratio >= choices.GAIN)
        for work, ratios in table.points().items()
        if not choices.of_gpu(work)
        for method, ratio in ratios.items()
    }
    assert had == {True}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("into", [False, True])
def test_a_case_writes_its_result_where_its_last_one_was(monkeypatch, into, dtype):
    def places(programs, sets, *_):
        for program in programs:
            first = program(*sets[0])
            at = first.unsafe_buffer_pointer()
            reused = program(*sets[0]).unsafe_buffer_pointer() == at
            assert reused == first.is_deleted() == into
        return [1.0] * len(programs)

    monkeypatch.setattr(MEASURED_BY, places)
    large = case(moved, (1 << 10, 1 << 8), dtype=dtype, into=into)
    found = measure([large], SHORT)
    assert list(found.points) == [Work("permute fake", large.shapes[0])]
    assert not found.failures


def test_a_case_that_raises_is_reported_and_the_next_one_measured():
    def broken(x):
        raise RuntimeError("no\nmore")

    found = measure([case(broken, (2,)), case(moved, (2,))], SHORT)
    assert found.failures == ["broken: RuntimeError: no"]
    assert set(found.points) == {Work("permute fake", (2,))}


def test_calls_take_ours_one_at_a_time_unless_they_are_one_pattern(monkeypatch):
    first, second = Work("geam fake", (4,)), Work("permute fake", (4,))

    def both(x):
        y = x if choices.choose(first) else 0 + x
        return -y if choices.choose(second) else 0 - y

    def tried(**options):
        forced = []
        before = choices.forced
        with monkeypatch.context() as patch:
            spy = lambda *given: forced.append(given) or before(*given)  # noqa: E731
            patch.setattr(choices, "forced", spy)
            points, _ = measure_case(case(both, (4,), **options), SHORT)
        assert set(points) == {first, second}
        return forced

    assert tried() == [("lax", None), ("ours", first), ("ours", second)]
    assert tried(together=True) == [("lax", None), ("ours", None)]


def test_ways_to_make_one_call_have_the_whole_gain_each(monkeypatch):
    """As a convolution of one tap, and the product that it is."""
    monkeypatch.setattr(MEASURED_BY, lambda programs, *_: [3.0, 2.0, 1.5])

    def either(x):
        return moved(x) if choices.choose(Work("permute way", x.shape)) is None else -x

    points, failures = measure_case(case(either, (4, 4), one_call=True), SHORT)
    assert sorted(r["ours"] for r in points.values()) == [1.5, 2.0] and not failures


def test_what_changes_nothing_is_not_a_point():
    def f(x):
        choices.choose(Work("permute fake", x.shape))
        return x + 1

    assert measure_case(case(f, (4,)), SHORT) == ({}, [])


@pytest.mark.parametrize("unrolled", [False, True])
def test_short_calls_are_in_a_loop_or_one_after_the_other(unrolled):
    """In a loop XLA does not lay out convolutions: those are cases of their own."""
    shapes = (2, 9, 8, 16), (3, 3, 16, 16)
    f = functools.partial(
        jl.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    short = case(gradient_by(f, 1, 2), *shapes, shapes[0], unrolled=unrolled)
    program, (operands,) = program_of(short, "cpu")
    text = jax.jit(program).lower(*operands).as_text()
    assert ("stablehlo.while" in text) != unrolled
    results = program(*operands)
    assert 4 <= len(results) == len(operands[0])
    for result, *given in zip(results, *operands, strict=True):
        np.testing.assert_allclose(result, short.f(*given), rtol=1e-5, atol=1e-4)
    points, failures = measure_case(short, SHORT)
    (work,) = points
    of = "conv w float32" if unrolled else "conv w float32 in a loop"
    assert work.case == of and not failures


def test_the_least_ratio_of_all_who_ask_counts():
    found, work = Measured(), Work("gemm fake", (1,))
    found.add(Measured({work: {"oneDNN": 2.0, "OpenBLAS": 0.5}}))
    found.add(Measured({work: {"oneDNN": 0.9}}))
    found.add(Measured({Work("permute fake", (1,)): {"ours": 1.5}}))
    assert found.points[work] == {"oneDNN": 0.9, "OpenBLAS": 0.5}
    assert found.ours == 1


def test_a_part_of_a_program_counts_where_nobody_asks_about_it_alone():
    found, work, part = Measured(), Work("gemm fake", (1,)), Work("gemm fake", (2,))
    found.add(Measured({work: {"oneDNN": 1.5}}, {work: {"oneDNN": 1.1}}))
    found.add(Measured(among={part: {"oneDNN": 1.4}}))
    found.add(Measured(among={part: {"oneDNN": 1.2}, work: {"OpenBLAS": 1.3}}))
    found.settle()
    assert found.points[work] == {"oneDNN": 1.5, "OpenBLAS": 1.3}
    assert found.points[part] == {"oneDNN": 1.2}


def test_of_several_runs_the_median_counts():
    work, once = Work("gemm fake", (1,)), Work("gemm fake", (2,))
    runs = [
        Measured({work: {"oneDNN": 1.5}}, failures=["a"], left=2),
        Measured({work: {"oneDNN": 0.4, "OpenBLAS": 2.0}}, failures=["a"]),
        Measured({work: {"oneDNN": 1.2, "OpenBLAS": 1.0}, once: {"oneDNN": 3.0}}),
    ]
    found = median(runs)
    assert found.points[work] == {"oneDNN": 1.2, "OpenBLAS": 1.0}  # of two the lesser
    assert found.points[once] == {"oneDNN": 3.0}
    assert found.failures == ["a"] and found.left == 0


def test_a_table_is_sorted_with_a_point_to_a_line():
    points = {
        Work("permute 4", (64, 8)): {"ours": 1.23456},
        Work("gemm x", (2,)): {"oneDNN": 1.0, "AMX": 2.0},
        Work("permute 4", (8, 64)): {"ours": 0.5},
    }
    lines = text(points).splitlines()
    assert lines[-9:] == [
        '  "gemm x": [',
        '   [[2], {"AMX": 2.0, "oneDNN": 1.0}]',
        "  ],",
        '  "permute 4": [',
        '   [[8, 64], {"ours": 0.5}],',
        '   [[64, 8], {"ours": 1.235}]',
        "  ]",
        " }",
        "}",
    ]
    assert text(dict(reversed(points.items()))) == text(points)


def test_the_same_file_gives_the_same_choices(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    run(path, cases=TINY, timing=SHORT)
    table = choices.load(path)
    again = tmp_path / "again.json"
    again.write_text(path.read_text())
    work = Work("gemm fake", (16,))
    ratio = choices.load(again).ratio(work, "oneDNN")
    assert ratio == table.ratio(work, "oneDNN") is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_the_file_as_it_was(tmp_path, error):
    path = tmp_path / "table.json"
    path.write_text("before")
    with pytest.raises(error), replacing(path) as file:
        file.write("half")
        raise error
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]


def test_every_kernel_of_ours_is_measured():
    """By the operators that the quick cases are made of; the rest is always ours."""
    wanted = {
        name
        for name, op in jl.operators().items()
        if op.kernel is not None
        and "cpu" in op.platforms
        # Not those that other tests define.
        and getattr(op.kernel, "func", op.kernel).__module__.startswith("jax_layout.")
    }
    found = set()
    for each in all_cases(quick=True):
        pairs = zip(each.shapes, each.dtypes, strict=True)
        given = [jax.ShapeDtypeStruct(*pair) for pair in pairs]
        found |= {
            eqn.primitive.name for eqn in equations(jax.make_jaxpr(each.f)(*given))
        }
    # Asked about as conv_y, attention and update_cache are.
    fused = {"conv_fused", "conv_packed", "paged_attention", "update_paged_cache"}
    # Always ours, one of them for windows that are asked about as jax's are.
    never = {"conv_w", "pool"}
    assert wanted - found <= fused | never
    assert wanted >= fused


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(value, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                yield from equations(value)


def test_cases_have_names_of_their_own_and_the_quick_ones_are_few():
    names = [each.name for each in all_cases()]
    assert len(set(names)) == len(names)
    assert len(all_cases(quick=True)) < len(names) / 4


# --- the command


def test_tune_writes_where_it_is_read(tiny, capsys):
    assert cli.main(["tune", "--quick"]) == 1  # one method is wrong
    path = tiny / "cache" / "table.json"
    table = choices.load(path)
    assert set(table.cases) == {"gemm fake", "permute fake"} and table.quick
    printed = capsys.readouterr()
    assert f"profile {choices.profile()}" in printed.err
    assert "[2/2] moved" in printed.err
    assert "failed: product: OpenBLAS: wrong result" in printed.out
    assert f"written to {path}" in printed.out
    assert "2 kinds and sizes of calls" in printed.out


def test_tune_measures_as_often_as_it_is_told(tiny, capsys, monkeypatch):
    ratios = iter([[1.0, 0.5], [3.0, 1.0], [4.0, 1.0]])  # 2, 3 and 4
    monkeypatch.setattr(command.cpu_cases, "all_cases", lambda quick: TINY[1:])
    monkeypatch.setattr(MEASURED_BY, lambda *_: next(ratios))
    assert cli.main(["tune", "--runs", "3"]) == 0
    assert "[3/3] moved" in capsys.readouterr().err
    points = choices.load(tiny / "cache" / "table.json").points()
    assert points == {Work("permute fake", (4, 4)): {"ours": 3.0}}
    assert cli.main(["tune", "--runs", "0"]) == 2
    assert "--runs must be 1 or more, not 0" in capsys.readouterr().err


def test_tune_begins_no_case_after_its_time(tiny, capsys, monkeypatch):
    monkeypatch.setattr(command, "QUICK", dataclasses.replace(QUICK, total=0.0))
    assert cli.main(["tune", "--quick"]) == 0
    assert "no time for 2 cases" in capsys.readouterr().out
    assert choices.load(tiny / "cache" / "table.json").points() == {}


def test_tune_json_and_output(tiny, capsys, monkeypatch):
    monkeypatch.setattr(command.cpu_cases, "all_cases", lambda quick: TINY[1:])
    path = tiny / "mine.json"
    assert cli.main(["tune", "--json", "--output", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(path) and found["works"] == 1
    assert found["failures"] == []
    jl.use_choices(path)
    jl.use_choices(None)


def test_tune_says_what_cannot_be_written_before_it_measures(tiny, capsys, monkeypatch):
    (tiny / "file").write_text("")
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("measured"))
    path = tiny / "file" / "table.json"
    assert cli.main(["tune", "--output", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(f"jax-layout tune: {path} cannot be written")


def test_tune_that_is_interrupted_leaves_no_file(tiny, capsys, monkeypatch):
    def interrupted(x):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        command.cpu_cases, "all_cases", lambda quick: [case(interrupted, (2,))]
    )
    assert cli.main(["tune"]) == 1
    assert "interrupted" in capsys.readouterr().err
    assert not list((tiny / "cache").iterdir())


def test_programs_of_a_gpu_call_many_times(monkeypatch):
    """The same on a CPU's device: a case that is wrong, two that are not."""
    monkeypatch.setattr(jax, "devices", lambda platform: jax.local_devices()[:1])
    called = []

    def counted(x):
        called.append(x)
        return moved(x)

    found = measure([case(counted, (4,)), *TINY], SHORT, platform="gpu")
    assert set(found.points) >= {Work("permute fake", s) for s in ((4,), (4, 4))}
    assert len(called) == 3  # for its result's shape, and once in each of two programs
    (failure,) = found.failures
    assert failure.startswith("product: OpenBLAS: wrong result, off by 1")


def test_a_cpu_and_its_gpu_share_a_table(tiny, monkeypatch):
    monkeypatch.setattr(command.cpu_cases, "all_cases", lambda quick: TINY[1:])
    path = choices.user_path()
    assert cli.main(["tune"]) == 0
    of_cpu = choices.load(path).points()
    work = Work("cuda permute 4", (64, 8, 8))
    monkeypatch.setattr(choices, "gpu", lambda: "NVIDIA A100")
    with monkeypatch.context() as patch:
        measured = Measured({work: {"ours": 1.5}})
        patch.setattr(command, "measure", lambda *given: measured)
        outcome = command.tune(path, False, "cuda")
    table = choices.load(path)
    assert (outcome.works, table.gpu, table.quick) == (1, "NVIDIA A100", False)
    assert table.points() == of_cpu | measured.points
    assert cli.main(["tune", "--quick"]) == 0
    table = choices.load(path)
    assert work in table.points() and (table.gpu, table.quick) == ("NVIDIA A100", True)

    monkeypatch.setattr(choices, "gpu", lambda: "NVIDIA H200")
    with pytest.raises(ValueError, match="its GPU is NVIDIA A100, here it is NVIDIA H"):
        choices.check_here(table, path)


def test_tune_of_a_gpu_needs_one(tiny, capsys):
    assert cli.main(["tune", "--platform", "cuda"]) == 2
    assert "tune: there are no kernels of ours here" in capsys.readouterr().err


def test_doctor_names_the_choices(capsys):
    assert cli.main(["doctor"]) == 0
    assert "choices: kernels" in capsys.readouterr().out
