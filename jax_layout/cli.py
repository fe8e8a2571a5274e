# SPDX-License-Identifier: Apache-2.0
"""The command `jax-layout`.

Exit codes: 0, all is well; 1, something that was asked for is wrong or failed (a
backend does not load, a benchmark's or the demo's result is wrong); 2, the command
cannot run as given (an unknown function or shape, a package that is not installed).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_layout.install.run import NoScript, add_options, start

_EXAMPLES = """\
examples:
  jax-layout explain mypackage.model:loss --shape 8x3x224x224:float32
  jax-layout explain train:step --shape 64x128 --shape 128x256:bfloat16 --json
  jax-layout explain train.py:step --shape 64x128 --platform cuda --plot bytes.png
  jax-layout explain train:step --arguments train:example
  jax-layout doctor
  jax-layout tune --quick
  jax-layout run --report train.py --epochs 3
  jax-layout bench permute --set tiny
  jax-layout demo

exit codes: 0 all is well; 1 a check failed; 2 the command cannot run as given
"""
_BENCHMARKS = "permute gemm linear attention conv index layout operators unseen".split()


class _Wrong(Exception):
    """The command cannot run as given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: without the program's name; those of the process if left out.

    Returns:
      the exit code, see above.
    """
    options, rest = _parser().parse_known_args(arguments)
    if rest and options.run not in (_bench, _demo):
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return options.run(options, rest)
    except (_Wrong, ImportError) as error:
        print(f"jax-layout: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jax-layout",
        description="Memory order of JAX programs: what it costs, and what runs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(
        name: str,
        run: Callable[..., int],
        text: str,
        example: str,
        add_help: bool = True,
    ) -> Any:
        added = commands.add_parser(
            name,
            add_help=add_help,
            help=text,
            description=text,
            epilog=f"example:\n  jax-layout {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run, parser=added)
        added.add_argument("--json", action="store_true", help="print JSON")
        return added

    explain = command(
        "explain",
        _explain,
        "report transposes, copies and relayouts of a function, without running it",
        "explain mypackage.model:loss --shape 8x3x224x224:float32",
    )
    explain.add_argument(
        "function", help="package.module:function, or path/to/file.py:function"
    )
    given = explain.add_mutually_exclusive_group()
    given.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="8x3x32x32:float32",
        help="of an argument, in order; float32 if no dtype is given, () for a scalar",
    )
    given.add_argument(
        "--arguments",
        metavar="FUNCTION",
        help="what returns the arguments, of any structure: a tuple of all of them, or "
        "the only one; arrays, or jax.ShapeDtypeStruct",
    )
    explain.add_argument("--platform", choices=("cpu", "cuda"))
    explain.add_argument(
        "--plot",
        metavar="FILE",
        help="draw bytes by source line, to .png, .svg or .pdf",
    )
    command(
        "doctor",
        _doctor,
        "tell devices, backends, libraries, and what falls back to plain jax.lax",
        "doctor --json",
    )
    tune = command(
        "tune",
        _tune,
        "measure here whose kernels run what fastest, and go by that from now on",
        "tune --quick",
    )
    tune.add_argument("--quick", action="store_true", help="under a minute, not ten")
    tune.add_argument(
        "--platform", choices=("cpu", "cuda"), default="cpu", help="a GPU takes three"
    )
    tune.add_argument(
        "--runs",
        type=int,
        default=1,
        metavar="COUNT",
        help="measure so many times, and go by medians: where others use the machine",
    )
    tune.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="another file than that of the user's cache folder, which is the one used",
    )
    run = command(
        "run",
        _script,
        "run a script as it is, with jax's own operations on kernels of this package",
        "run --report train.py --epochs 3",
    )
    add_options(run)
    bench = command(
        "bench",
        _bench,
        "run benchmarks, in a checkout; further options are theirs",
        "bench permute --set tiny --quick",
        add_help=False,  # what follows a name is the benchmark's
    )
    bench.add_argument("name", nargs="?", choices=_BENCHMARKS)
    bench.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="show this help; after a name, that benchmark's",
    )
    command("demo", _demo, "run the demo, in a checkout", "demo")
    return parser


def _version() -> str:
    import jax

    import jax_layout

    return (
        f"jax-layout {jax_layout.__version__}, jax {jax.__version__}, "
        f"Python {platform.python_version()}"
    )


@contextlib.contextmanager
def _working(text: str) -> Iterator[None]:
    """Shows on the terminal that something is going on, if rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield
        return
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        progress.add_task(text, total=None)
        yield


def _print(value: Any) -> None:
    """To a terminal in colours, if rich is installed."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console

            return Console().print(value)
        except ImportError:
            pass
    print(value)


# --- explain


def _explain(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.platform == "cuda":
        # Without a GPU jax's plugin compiles too, unless it looks for the libraries.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax_layout.explain.explain import explain
    from jax_layout.explain.report import check_plot

    if options.plot:
        try:
            check_plot(options.plot)  # before the time that it takes to compile
        except ValueError as error:
            raise _Wrong(str(error)) from error
    function = _named(options.function)
    arguments = tuple(_argument(text) for text in options.shape)
    if options.arguments:
        made = _named(options.arguments)()
        arguments = made if type(made) is tuple else (made,)
    try:
        with _working(f"compiling {options.function}"):
            report = explain(function, platform=options.platform)(*arguments)
    except (RuntimeError, ValueError) as error:
        raise _Wrong(f"{options.function}: {error}") from error
    except (AttributeError, LookupError, TypeError) as error:
        hint = "of arrays, --shape says what they are; of anything else, --arguments"
        raise _Wrong(f"{options.function}: {error}\n({hint})") from error
    if options.plot:
        try:
            report.plot(options.plot)
        except OSError as error:
            raise _Wrong(f"plot: {error}") from error
    if options.json:
        print(report.to_json())
    else:
        _print(report)
    return 0


def _named(name: str) -> Callable[..., Any]:
    """The function of a name: package.module:function, or file.py:function."""
    module_name, _, attribute = name.rpartition(":")
    if not (module_name and attribute):
        raise _Wrong(
            "explain: expected package.module:function or path/to/file.py:function, "
            f"got {name}"
        )
    value = _module(module_name)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise _Wrong(f"explain: {module_name} has no {attribute}")
        value = getattr(value, part)
    if not callable(value):
        raise _Wrong(f"explain: {name} is not a function")
    return value


def _module(name: str) -> Any:
    file = Path(name)
    if file.suffix != ".py":
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as python -m does
        return importlib.import_module(name)
    if not file.is_file():
        raise _Wrong(f"explain: there is no file {name}")
    return _of_file(file.resolve())


@functools.cache  # the function and what makes its arguments are of one module
def _of_file(file: Path) -> Any:
    sys.path.insert(0, str(file.parent))  # as python file.py does
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def _argument(text: str) -> Any:
    import jax
    import jax.numpy as jnp

    shape, _, dtype = text.partition(":")
    if not re.fullmatch(r"\(\)|\d+(x\d+)*", shape):
        raise _Wrong(f"explain: a shape is like 8x3x224x224:float32, got {text}")
    try:
        known = jnp.dtype(dtype or "float32")
    except TypeError as error:
        raise _Wrong(f"explain: unknown dtype in {text}") from error
    return jax.ShapeDtypeStruct(tuple(map(int, re.findall(r"\d+", shape))), known)


# --- doctor


def _doctor(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from jax_layout import doctor

    with _working("looking around"):
        found = doctor.diagnose()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print(doctor.text(found))
    return 1 if found["problems"] else 0


# --- tune


def _tune(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from jax_layout import _backends, choices
    from jax_layout.tune.command import heading, tune

    on = options.platform
    if not _backends.available(on) or (on == "cuda" and not choices.gpu()):
        raise _Wrong("tune: there are no kernels of ours here; see jax-layout doctor")
    if on == "cuda" and options.quick:
        raise _Wrong("tune: --quick is for CPUs; a GPU takes three minutes")
    if options.runs < 1:
        raise _Wrong(f"tune: --runs must be 1 or more, not {options.runs}")
    path = options.output or choices.user_path()
    print(heading(path, options.quick, on), file=sys.stderr)
    try:
        outcome = tune(path, options.quick, on, options.runs)
    except OSError as error:
        print(f"jax-layout tune: {path} cannot be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"jax-layout tune: interrupted, {path} is as it was", file=sys.stderr)
        return 1
    print(json.dumps(dataclasses.asdict(outcome)) if options.json else outcome)
    return 1 if outcome.failures else 0


def _script(options: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        return start(options)
    except NoScript as error:
        raise _Wrong(str(error)) from error


# --- what a checkout has


def _run(module: str, arguments: Sequence[str], **options: Any) -> Any:
    """Runs a module of benchmarks/ or examples/, which are not in the wheel."""
    import jax_layout

    file = Path(*module.split(".")).with_suffix(".py")
    for root in (Path(jax_layout.__file__).parents[1], Path.cwd()):
        if (root / file).exists():
            paths = [str(root), os.environ.get("PYTHONPATH", "")]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            if not sys.stdout.isatty():
                env.setdefault("COLUMNS", "200")  # a file or pipe cuts no table
            return subprocess.run(
                [sys.executable, "-P", "-m", module, *arguments],
                env=env,
                check=False,
                **options,
            )
    raise _Wrong(
        f"{module} is not in the package: run this in a checkout of the repository "
        "that has it, installed with pip install -e '.[bench,demo]'"
    )


def _bench(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.name is None and options.help:
        options.parser.print_help()
        options.parser.exit()
    if options.name is None:
        options.parser.error("the following arguments are required: name")
    module = f"benchmarks.{options.name}"
    if options.help:
        return _run(module, ["--help"]).returncode
    if not options.json:
        return _run(module, rest).returncode
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        # Tables and the progress bar make room for the numbers.
        done = _run(module, [*rest, "--json", str(path)], stdout=sys.stderr)
        if path.exists():
            print(path.read_text())
    return done.returncode


def _demo(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if not options.json:
        return _run("examples.demo", rest).returncode
    done = _run("examples.demo", rest, stdout=subprocess.PIPE, text=True)
    print(json.dumps({"exit_code": done.returncode, "output": done.stdout}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
