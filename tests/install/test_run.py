# SPDX-License-Identifier: Apache-2.0
"""`jax-layout run`: scripts as they are, and what is told at their end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jax_layout as jl
from jax_layout import _backends, cli

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the CPU backend is not built"
)
SCRIPT = """\
import sys
import jax, jax.numpy as jnp
import neighbour

def step(w, x):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME").sum()

w, x = (jnp.ones(s, "float32") for s in ((8, 8, 3, 3), (2, 8, 16, 16)))
print(__name__, sys.argv[1:], neighbour.NAME, jax.jit(jax.grad(step))(w, x).sum())
if "--fail" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "script_of_the_run_test.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'\n")
    monkeypatch.chdir(tmp_path)
    yield "script_of_the_run_test"
    sys.modules.pop("neighbour", None)


def test_a_script_runs_as_python_runs_it(script, capsys):
    argv, path = list(sys.argv), list(sys.path)
    assert cli.main(["run", f"{script}.py", "--epochs", "3", "-m"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("__main__ ['--epochs', '3', '-m'] neighbour ")
    assert (sys.argv, sys.path) == (argv, path)


def test_a_module_runs_as_python_does(script):
    command = [sys.executable, "-m", "jax_layout.cli", "run", "-m", script, "a"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith("__main__ ['a'] neighbour ")


def test_the_report_comes_also_if_the_script_fails(script, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["run", "--report", f"{script}.py", "--fail"])
    assert exit.value.code == 3
    assert "conv_general_dilated" in capsys.readouterr().err
    with jl.installed(()) as record:
        pass
    assert str(record) == "nothing was lowered"


def test_programs_are_compared(script, capsys):
    assert cli.main(["run", "--json", "--compare", f"{script}.py"]) == 0
    found = json.loads(capsys.readouterr().err)
    rows = found["primitives"]["conv_general_dilated"]
    assert rows["ours"] >= 1 and rows["kept_bytes"] > 0
    program = next(p for p in found["programs"] if "step" in p["program"])
    assert program["plain"] > 0 and program["ours"] > 0 and program["why_not"] == ""
    assert program["ratio"] == program["plain"] / program["ours"]


def test_only_some_primitives(script, capsys):
    assert cli.main(["run", "--json", "--only", "gather", f"{script}.py"]) == 0
    found = json.loads(capsys.readouterr().err)
    assert found["primitives"]["conv_general_dilated"]["ours"] == 0


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "expected a script or -m and a module"),
        (["nowhere.py"], "there is no file nowhere.py"),
        (["-m", "nowhere.at_all"], "there is no module nowhere.at_all"),
        (["--only", "conv", "neighbour.py"], "operators must be of conv_general"),
    ],
)
def test_what_cannot_run_is_told(script, arguments, complaint, capsys):
    assert cli.main(["run", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train_flax.py", "train_haiku.py"])
def test_training_scripts_run_unmodified_and_learn_alike(name):
    pytest.importorskip(name.split("_")[1].removesuffix(".py"))
    pytest.importorskip("optax")
    script = str(Path(__file__).with_name(name))

    def losses(*command):
        done = subprocess.run(
            [sys.executable, *command, script, "--steps", "4"],
            capture_output=True,
            text=True,
            check=True,
        )
        return [float(line.split()[-1]) for line in done.stdout.splitlines()], done

    plain, _ = losses()
    ours, done = losses("-m", "jax_layout.cli", "run", "--report")
    assert len(plain) == 4
    assert ours == pytest.approx(plain, rel=1e-3)
    assert plain[-1] < plain[0]
    assert "conv_general_dilated" in done.stderr


def test_an_example_of_jraph_runs_as_it_was_released():
    pytest.importorskip("jraph.examples.zacharys_karate_club")

    def accuracies(*command):
        module = ["-m", "jraph.examples.zacharys_karate_club", "--verbosity=0"]
        done = subprocess.run(
            [sys.executable, *command, *module],
            capture_output=True,
            text=True,
            check=True,
        )
        told = re.findall(r"step (\d+) accuracy (\S+)", done.stderr)
        return [(int(step), float(accuracy)) for step, accuracy in told], done.stderr

    plain, _ = accuracies()
    ours, report = accuracies("-m", "jax_layout.cli", "run", "--json", "--report")
    assert [step for step, _ in plain] == list(range(30))
    assert plain[-1][1] > 0.9 > plain[0][1]
    # Of 34 members; a sum in another order may turn one about.
    assert np.abs(np.subtract(ours, plain)).max() <= 1.01 / 34
    rows = json.loads(report.splitlines()[-1])["primitives"]
    for primitive in ("dot_general", "gather", "scatter_add"):
        assert rows[primitive]["ours"] > 0
