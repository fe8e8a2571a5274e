# SPDX-License-Identifier: Apache-2.0
"""Parts of benchmarks and of choices: what they are, how they run, what joins them."""

import dataclasses
import json
import os
import sys

import pytest

pytest.importorskip("rich")

from benchmarks import choose, runner, side_by_side
from benchmarks.results import CaseResult, Report
from jax_layout import choices
from jax_layout.measured import Work
from jax_layout.tune import table
from jax_layout.tune.cases import all_cases
from jax_layout.tune.command import Outcome


@pytest.fixture
def pairs(tmp_path):
    core = min(os.sched_getaffinity(0))
    # One pair twice: threads take turns at the jobs, wherever the test runs.
    return side_by_side.Pairs([(core,), (core,)], tmp_path, float("inf"))


def script(name, text):
    return side_by_side.Job(name, ("-c", text))


def report(*names, profile="amx"):
    machine = {"class": "a", "profile": profile, "caps": {}, "commit": "c"}
    cases = [CaseResult("ml", name, {}, 8, ()) for name in names]
    return Report("gemm", machine | {"versions": {"jax": "1.0"}}, {}, tuple(cases))


def test_parts_are_all_cases_once():
    parser = runner.parser("gemm", None, 1.0)
    cases = list(range(17))
    parts = [cases[parser.parse_args(["--part", f"{n}/5"]).part] for n in range(1, 6)]
    assert sorted(sum(parts, [])) == cases
    assert [len(part) for part in parts] == [4, 4, 3, 3, 3]


@pytest.mark.parametrize("wrong", ["0/2", "3/2", "1", "a/b", "1/-2", "1.5/2"])
def test_a_part_that_does_not_exist(wrong, capsys):
    with pytest.raises(SystemExit):
        runner.parser("gemm", None, 1.0).parse_args(["--part", wrong])
    assert f"must be I/N, 1 <= I <= N, got '{wrong}'" in capsys.readouterr().err


def test_parts_of_the_choices(monkeypatch, tmp_path):
    measured = []

    def run(path, quick, cases, timing, **how):
        measured.append([case.name for case in cases])
        return Outcome(str(path), 0, 0, ())

    monkeypatch.setattr(choose, "run", run)
    for part in ("1/2", "2/2"):
        choose.main(["--quick", "--output", str(tmp_path / "t"), "--part", part])
    first, second = measured
    assert first and second
    both = [name for pair in zip(first, second, strict=False) for name in pair]
    assert both == [case.name for case in all_cases(True)][: len(both)]
    assert len(first) + len(second) == len(all_cases(True))


def test_choices_are_measured_at_least_once(capsys):
    with pytest.raises(SystemExit):
        choose.main(["--runs", "0"])
    assert "--runs must be 1 or more, not 0" in capsys.readouterr().err


def test_tables_of_earlier_runs_become_one_with_their_medians(tmp_path, capsys):
    works = [Work("permute fake", (4, n)) for n in (1, 2)]
    files = [tmp_path / name for name in "abc"]
    for file, ratio in zip(files, (1.5, 0.9, 2.0), strict=True):
        file.write_text(table.text(dict.fromkeys(works, {"ours": ratio}), False))
    to = tmp_path / "table.json"
    how = ["--runs", "0", "--output", str(to), "--earlier"]
    assert choose.main([*how, *map(str, files)]) == 0
    assert choices.load(to).points() == dict.fromkeys(works, {"ours": 1.5})
    files[1].write_text("{}")
    with pytest.raises(SystemExit):
        choose.main([*how, *map(str, files)])
    assert f"{files[1]} is not a table" in capsys.readouterr().err


def test_jobs_run_on_their_pair_with_a_folder_of_their_own(pairs, tmp_path, capsys):
    text = "import os; print(len(os.sched_getaffinity(0)), os.environ['TMPDIR'])"
    jobs = [script(name, f"{text}; print(os.environ['MORE'])") for name in "abc"]
    pairs.run(jobs, MORE="more")
    said = [(tmp_path / f"{name}.log").read_text().split() for name in "abc"]
    assert all(cores == "1" and more == "more" for cores, _, more in said)
    assert 1 <= len({folder for _, folder, _ in said}) <= 2
    assert not any(os.path.exists(folder) for _, folder, _ in said)
    assert not pairs.failed


def test_what_fails_or_is_stopped_is_told(pairs, tmp_path, capsys):
    pairs.run([script("bad", "raise SystemExit(3)"), script("good", "")])
    assert pairs.failed == ["bad: exit status 3"]
    ends = dataclasses.replace(pairs, end=0.0, failed=[])
    ends.run([script("late", "")])
    assert ends.failed == ["late: no time left"]
    assert "bad: exit status 3" in capsys.readouterr().out


def test_joined_reports_have_the_cases_in_order(tmp_path):
    parts = [tmp_path / f"{n}.json" for n in (1, 2, 3)]
    report("a", "d", "g").save(parts[0])
    report("b", "e").save(parts[1])
    # The third was stopped at its second case.
    work = runner.Work("ml", "f", {}, lambda on_round: None)
    runner.save_partial(parts[2], report("c"), work)
    side_by_side.join_reports(parts, tmp_path / "all.json")
    joined = Report.load(tmp_path / "all.json")
    assert [case.name for case in joined.cases] == ["a", "b", "c", "d", "e", "g"]


def test_reports_of_different_runs_are_not_joined(tmp_path):
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    report("a").save(parts[0])
    report("b", profile="avx2").save(parts[1])
    with pytest.raises(ValueError, match=r"all\.json: its parts are not of one run"):
        side_by_side.join_reports(parts, tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


def test_a_joined_table_has_the_least_ratio(tmp_path):
    permute, moments = Work("permute 4", (8, 8)), Work("moments float32", (8,))
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    parts[0].write_text(table.text({permute: {"ours": 2.0}, moments: {"ours": 3.0}}))
    parts[1].write_text(table.text({permute: {"ours": 1.5}}))
    side_by_side.join_tables(parts, tmp_path / "all.json")
    joined = choices.load(tmp_path / "all.json")
    assert joined.points() == {permute: {"ours": 1.5}, moments: {"ours": 3.0}}
    choices.check_here(joined, tmp_path / "all.json")


def test_what_was_measured_is_what_the_benchmarks_choose_by(
    monkeypatch, tmp_path, capsys
):
    """The whole run, of which every process is a stand-in that writes what it got."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"""#!{sys.executable}
import json, os, sys, shutil
words = sys.argv[1:]
print(words)
if "pytest" in words:
    sys.exit("a test failed")
file = words[words.index("--json" if "--json" in words else "--output") + 1]
if "--json" in words:
    assert os.environ["JAX_LAYOUT_CHOICES"] == {str(tmp_path / "out/choices.json")!r}
    assert words[-6:-4] == ["--case", "4 rows, NT"], words
shutil.copy("{tmp_path}/" + ("report" if "--json" in words else "table"), file)
"""
    )
    stand_in.chmod(0o755)
    (tmp_path / "table").write_text(
        table.text({Work("permute 4", (8,)): {"ours": 2.0}})
    )
    report("a").save(tmp_path / "report")
    report("old").save(tmp_path / "out/parts/gemm_1.json")  # of an earlier run
    monkeypatch.setattr(sys, "executable", str(stand_in))
    words = "--minutes 5 --only gemm conv --choices=--quick --tests tests/x".split()
    words = ["--out", str(tmp_path / "out"), *words, "--more=--case '4 rows, NT'"]
    assert side_by_side.main(words) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "failed: tests: exit status 1"
    for name in ("gemm", "conv"):
        found = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert {case["name"] for case in found["cases"]} == {"a"}
    assert list(choices.load(tmp_path / "out/choices.json").points().values()) == [
        {"ours": 2.0}
    ]
