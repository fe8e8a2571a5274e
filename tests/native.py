# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels alone, without jax, for the tests that call them by ctypes."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
