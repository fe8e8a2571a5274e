# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels alone, without jax, for the tests that call them by ctypes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SANITIZERS = ("-fno-sanitize-recover=all", "-fsanitize=address,undefined")


def sources(*patterns):
    """The files that these globs, from the root of the repository, name."""
    return [source for pattern in patterns for source in sorted(ROOT.glob(pattern))]


def compile_library(folder, sources, *flags, optimize="-O1"):
    """Builds sources, each in a process of its own, into a shared library."""
    library = folder / "kernels.so"
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = ["g++", "-std=c++20", optimize, "-fPIC", *warnings, *flags, f"-I{ROOT}"]
    objects = [folder / f"{i}_{source.stem}.o" for i, source in enumerate(sources)]
    running = [
        subprocess.Popen([*command, "-c", source, "-o", target])
        for source, target in zip(sources, objects, strict=True)
    ]
    assert not any([process.wait() for process in running])
    subprocess.run(
        ["g++", "-shared", *flags, *objects, "-o", library, "-lpthread"], check=True
    )
    return library


def run_sanitized(*arguments, **environment):
    """What Python did with the sanitizers' runtime, which libraries built so need."""
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        env=os.environ
        | {
            "LD_PRELOAD": runtime,
            # Python itself does not free everything.
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "tests"),
        }
        | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def check_sanitized(*arguments, **environment):
    done = run_sanitized(*arguments, **environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
