# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels' own tests, built for AArch64 and run under qemu.

make test-arm, with nothing but Python's standard library and the two programs below.
They compare with plain loops, at each level that the processor has.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from native import compile_program, sources

# Debian and Ubuntu: g++-aarch64-linux-gnu, qemu-user-static.
COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
LEVELS = ("portable", "neon")
CHECKS = (
    "permute depthwise grouped winograd matvec skinny blocked finish moments index "
    "geam attention pool"
).split()


def missing():
    """What has to be installed first, or None."""
    if shutil.which(COMPILER) is None:
        return f"no {COMPILER} here (package g++-aarch64-linux-gnu)"
    if not any(map(shutil.which, EMULATORS)):
        return f"no {EMULATORS[0]} here (package qemu-user-static)"
    return None


def build(folder, compiler="g++"):
    """All of cpu/, but for what Python calls; a program that checks its kernels."""
    kernels = [file for file in sources("cpu/**/*.cc") if file.name != "module.cc"]
    return compile_program(
        folder, [*kernels, *sources("tests/arm/*.cc")], compiler=compiler
    )


def emulator():
    """How a program for AArch64 is run here."""
    command = next(filter(None, map(shutil.which, EMULATORS)))
    library = subprocess.check_output([COMPILER, "-print-file-name=libc.so.6"])
    return command, "-L", str(Path(library.decode().strip()).resolve().parents[1])


def check(program, level, name, *command):
    """Runs one check at one level."""
    return subprocess.run(
        [*command, program, level, name],
        env={**os.environ, "JAX_LAYOUT_MAX_ISA": level},
        capture_output=True,
        text=True,
    )


def main():
    if reason := missing():
        sys.exit(f"test-arm: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        print(f"Compiling cpu/ with {COMPILER} ...", flush=True)
        program = build(Path(folder), COMPILER)
        command = emulator()
        cases = [(level, name) for level in LEVELS for name in CHECKS]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failed = 0
            for done in pool.map(lambda c: check(program, *c, *command), cases):
                print(done.stdout + done.stderr, end="", flush=True)
                failed += done.returncode != 0
    sys.exit(f"test-arm: {failed} of {len(cases)} failed" if failed else 0)


if __name__ == "__main__":
    main()
