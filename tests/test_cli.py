# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, and its exit codes."""

import importlib.metadata
import json
from pathlib import Path

import pytest

import jax_layout as jl
from jax_layout import _backends, cli

MODEL = """\
import jax.numpy as jnp

def to_nhwc(x):
    return jnp.transpose(x, (0, 2, 3, 1)) + 1

class Model:
    @staticmethod
    def loss(x, w):
        return (x @ w).sum()

def net(params, x):
    return x @ params["w"]

def example():
    return {"w": jnp.ones((32, 16))}, jnp.ones((8, 32))

def table():
    return {"w": jnp.ones((32, 16))}

def total(params):
    return params["w"].sum()

not_a_function = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "model_of_the_cli_test.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return "model_of_the_cli_test"


def test_explain(model, capsys):
    assert cli.main(["explain", f"{model}:to_nhwc", "--shape", "8x3x64x64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("to_nhwc on cpu: the compiled program has 1 reorder")
    assert f"{model}.py:4" in out


def test_explain_json_and_plot(model, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--shape", "64x32:bfloat16", "--shape", "32x16:bfloat16"]
    plot = tmp_path / "bytes.svg"
    options = ["--json", "--platform", "cpu", "--plot", str(plot)]
    assert cli.main(["explain", f"{model}:Model.loss", *arguments, *options]) == 0
    report = jl.Report.from_json(capsys.readouterr().out)
    assert report.function == "loss" and report.platform == "cpu"
    assert [v.shape for v in report.values] == ["bf16[64,32]", "bf16[32,16]"]
    assert plot.exists()


def test_explain_of_a_file(model, capsys, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    command = ["explain", f"../{model}.py:to_nhwc", "--shape", "8x3x64x64"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.startswith("to_nhwc on cpu")


def test_a_file_is_loaded_once(model, capsys, tmp_path):
    (tmp_path / "loaded_once.py").write_text(f"print('LOADED')\n{MODEL}")
    command = ["explain", "loaded_once.py:net", "--arguments", "loaded_once.py:example"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.count("LOADED") == 1


@pytest.mark.parametrize(("f", "of"), [("net", "example"), ("total", "table")])
def test_explain_of_a_pytree(model, f, of, capsys):
    assert cli.main(["explain", f"{model}:{f}", "--arguments", f"{model}:{of}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{f} on cpu") and "[32,16]" in out


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("bytes.xyz", "plot: path must end in .png, .svg or .pdf, got 'bytes.xyz'"),
        ("bytes", "plot: path must end in"),
        ("nowhere/bytes.png", "plot: there is no folder 'nowhere' for 'bytes.png'"),
    ],
)
def test_a_plot_that_cannot_be_is_found_before_compiling(
    model, path, message, capsys, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cli, "_named", lambda name: pytest.fail("too late"))
    command = ["explain", f"{model}:to_nhwc", "--shape", "8x3x4x4", "--plot", path]
    assert cli.main(command) == 2
    assert message in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith(f"jax-layout {jl.__version__}, jax ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}"], "expected package.module:function or path/to/file.py:function"),
        (["{model}_gone.py:f"], "there is no file {model}_gone.py"),
        (["{model}:net", "--shape", "3x4", "--shape", "5x6"], "else, --arguments"),
        (["{model}:net", "--arguments", "{model}:no"], "has no no"),
        (["{model}:missing"], "has no missing"),
        (["{model}:not_a_function"], "is not a function"),
        (["no_such_module_at_all:f"], "No module named 'no_such_module_at_all'"),
        (["{model}:to_nhwc", "--shape", "8x"], "a shape is like 8x3x224x224:float32"),
        (["{model}:to_nhwc", "--shape", "8x3:float7"], "unknown dtype in 8x3:float7"),
        (["{model}:to_nhwc"], "missing 1 required positional argument"),
        (["{model}:to_nhwc", "--shape", "8x3"], "out of bounds"),
    ],
)
def test_explain_of_what_is_not_there(model, arguments, message, capsys):
    assert cli.main(["explain", *(a.format(model=model) for a in arguments)]) == 2
    captured = capsys.readouterr()
    assert message.format(model=model) in captured.err and captured.out == ""


def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    built = ".".join(map(str, _backends.module("cpu").ffi_api_version))
    assert f"backend cpu: loaded, XLA FFI {built}" in out and "problem" not in out
    assert "devices: cpu:0" in out


def test_doctor_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    cpu = found["backends"][0]
    assert (cpu["name"], cpu["state"], cpu["wanted"]) == ("cpu", "loaded", True)
    assert tuple(found["ffi_runtime"]) == _backends.runtime_api_version()
    assert {library["name"] for library in found["libraries"]} == {
        "oneDNN",
        "OpenBLAS",
        "cuBLASLt",
    }


def test_doctor_of_a_backend_that_is_not_built(monkeypatch, capsys):
    monkeypatch.setattr(_backends, "module", lambda name: None)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "falls back to plain jax.lax: every operator on cpu: not built" in out
    assert "problem: every operator on cpu: not built" in out
    assert "on cuda: not built" in out and "problem: every operator on cuda" not in out


def test_doctor_of_a_backend_that_does_not_load(monkeypatch, capsys):
    def broken(name):
        raise ImportError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(_backends, "module", broken)
    assert cli.main(["doctor"]) == 1
    assert "cpu: does not load: libfoo.so" in capsys.readouterr().out


def test_doctor_of_a_backend_that_is_too_new(monkeypatch, capsys):
    monkeypatch.setattr(_backends, "available", lambda name: False)
    assert cli.main(["doctor"]) == 1
    assert "newer than jaxlib's" in capsys.readouterr().out


def test_doctor_of_a_library_that_does_not_load(monkeypatch, capsys, tmp_path):
    broken = tmp_path / "libdnnl.so.3"
    broken.write_text("not a library")
    monkeypatch.setattr(_backends, "library", lambda package, name: str(broken))
    assert cli.main(["doctor"]) == 1
    assert "problem: oneDNN does not load" in capsys.readouterr().out


BENCHMARK = """\
import json, pathlib, sys
print("table", sys.argv[1:3])
if "--json" in sys.argv:
    path = sys.argv[sys.argv.index("--json") + 1]
    pathlib.Path(path).write_text(json.dumps({"cases": []}))
sys.exit(1 if "wrong" in sys.argv else 0)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository whose benchmark and demo are quick."""
    for name in ("benchmarks/permute.py", "examples/demo.py", "jax_layout/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
        (tmp_path / name).with_name("__init__.py").write_text("")
    (tmp_path / "benchmarks/permute.py").write_text(BENCHMARK)
    (tmp_path / "examples/demo.py").write_text(BENCHMARK)
    monkeypatch.setattr(jl, "__file__", str(tmp_path / "jax_layout/__init__.py"))
    return tmp_path


def test_bench_hands_its_options_on(checkout, capfd):
    assert cli.main(["bench", "permute", "--set", "tiny"]) == 0
    assert capfd.readouterr().out == "table ['--set', 'tiny']\n"
    assert cli.main(["bench", "permute", "wrong"]) == 1


def test_bench_help_is_that_of_the_benchmark(checkout, capfd):
    assert cli.main(["bench", "permute", "--help"]) == 0
    assert capfd.readouterr().out == "table ['--help']\n"


def test_bench_has_every_benchmark():
    found = {
        path.stem
        for path in (Path(__file__).parent.parent / "benchmarks").glob("*.py")
        if "__main__" in path.read_text()
    }
    # Two run the others, one writes a table of choices, one compares with predictions.
    others = {"all", "side_by_side", "choose", "score"}
    assert set(cli._BENCHMARKS) == found - others


def test_tables_in_a_pipe_are_wide(checkout, capfd, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    (checkout / "benchmarks/permute.py").write_text(
        "import os; print(os.environ.get('COLUMNS'))"
    )
    assert cli.main(["bench", "permute"]) == 0
    assert capfd.readouterr().out == "200\n"
    monkeypatch.setenv("COLUMNS", "90")
    assert cli.main(["bench", "permute"]) == 0
    assert capfd.readouterr().out == "90\n"


def test_bench_json(checkout, capfd):
    assert cli.main(["bench", "permute", "--json", "--set", "tiny"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"cases": []}
    assert captured.err == "table ['--set', 'tiny']\n"


def test_demo(checkout, capfd):
    assert cli.main(["demo"]) == 0
    assert capfd.readouterr().out.startswith("table")
    assert cli.main(["demo", "--json", "wrong"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert found == {"exit_code": 1, "output": "table ['wrong']\n"}


@pytest.mark.parametrize("command", [["bench", "gemm"], ["demo"]])
def test_what_needs_a_checkout_says_so(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jl, "__file__", str(tmp_path / "jax_layout/__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 2
    assert "run this in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-command"], ["doctor", "--fast"], ["bench"], ["bench", "sort"]],
)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert "usage: jax-layout" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "doctor", "tune", "bench", "demo"])
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert f"example:\n  jax-layout {command}" in out and "--json" in out


def test_the_command_is_installed():
    (entry,) = (
        e
        for e in importlib.metadata.entry_points(group="console_scripts")
        if e.name == "jax-layout"
    )
    assert entry.load() is cli.main
