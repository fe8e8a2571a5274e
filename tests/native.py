# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels alone, without jax, for the tests that call them by ctypes."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SANITIZERS = ("-fno-sanitize-recover=all", "-fsanitize=address,undefined", "-g")


def sources(*patterns):
    """The files that these globs, from the root of the repository, name."""
    return [source for pattern in patterns for source in sorted(ROOT.glob(pattern))]


def compile_objects(sources, *flags, optimize="-O1", compiler="g++", tiles=False):
    """Objects of sources, as many at a time as cores, in build/objects.

    Those of files that have not changed since are there: several tests, in processes of
    their own, compile the same kernels. With `tiles`, AMX's are in software where the
    processor has none.
    """
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = [compiler, "-std=c++20", optimize, *warnings, *flags, f"-I{ROOT}"]

    def compiled(source):
        return compile_object(source, [*command, *(amx_flags(source) if tiles else ())])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compiled, sources))


def compile_object(source, command):
    name = hashlib.sha256(" ".join(command).encode()).hexdigest()[:12]
    target = ROOT / "build" / "objects" / name / f"{source.relative_to(ROOT)}.o"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(target):
            made = ["-MMD", "-MF", f"{target}.d", "-o", f"{target}.new"]
            subprocess.run([*command, "-c", source, *made], check=True)
            os.replace(f"{target}.new", target)
    return target


def is_current(target):
    """Whether an object is newer than all that it was compiled from."""
    if not target.exists():
        return False
    _, _, files = Path(f"{target}.d").read_text().partition(":")
    made = target.stat().st_mtime
    read = [Path(file) for file in files.replace("\\\n", " ").split()]
    return all(file.exists() and file.stat().st_mtime < made for file in read)


def compile_library(folder, sources, *flags, optimize="-O1", tiles=False):
    """A shared library of sources; `tiles` as in `compile_objects`."""
    library = folder / "kernels.so"
    objects = compile_objects(sources, "-fPIC", *flags, optimize=optimize, tiles=tiles)
    subprocess.run(
        ["g++", "-shared", *flags, *objects, "-o", library, "-lpthread"], check=True
    )
    return library


def processor_flags():
    """The instruction sets, as Linux names them."""
    info = Path("/proc/cpuinfo")
    return set(info.read_text().split()) if info.exists() else set()


def has_vnni():
    """Whether oneDNN sums products of int8 exactly, as is asked of it."""
    flags = processor_flags()
    return platform.machine() != "x86_64" or bool({"avx512_vnni", "avx_vnni"} & flags)


def amx_flags(source):
    """What compiles a source that has to do with AMX where the processor has none."""
    if {"amx_tile", "amx_bf16"} <= processor_flags():
        return ()
    text = source.read_text()
    if "amx" not in text and "tiles_at_rest" not in text:
        return ()
    return "-include", str(ROOT / "tests" / "tiles_on_host.h")


def compile_sanitized(folder, sources, tiles=False):
    """A library that AddressSanitizer and UndefinedBehaviorSanitizer watch.

    Not optimised: that would take four times as long as what runs saves, and leave
    less to be seen.
    """
    return compile_library(folder, sources, *SANITIZERS, optimize="-O0", tiles=tiles)


def compile_program(folder, sources, compiler="g++"):
    """A program of sources, for the processor that the compiler makes them for."""
    program = folder / "program"
    objects = compile_objects(sources, "-fPIC", compiler=compiler)
    subprocess.run([compiler, *objects, "-o", program, "-lpthread", "-ldl"], check=True)
    return program


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


def cuda_emulation(sanitized=False):
    """The CUDA kernels and their planners, compiled for the host: a library."""
    import pytest

    cmake = shutil.which("cmake")
    if not cmake or not shutil.which("g++"):
        pytest.skip("building the emulation needs cmake and g++")
    build = (
        ROOT / "build" / ("cuda_emulation_sanitized" if sanitized else "cuda_emulation")
    )
    build.mkdir(parents=True, exist_ok=True)
    with open(build / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            [
                cmake,
                "-S",
                ROOT / "tests" / "cuda" / "emulation",
                "-B",
                build,
                "-DCMAKE_CXX_COMPILER=g++",
                f"-DJAX_LAYOUT_SANITIZE={'ON' if sanitized else 'OFF'}",
            ],
            [cmake, "--build", build, "--parallel", "2"],
        ):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return build / "libcuda_emulation.so"
