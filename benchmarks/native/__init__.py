# SPDX-License-Identifier: Apache-2.0
"""C++ and CUDA that only the benchmarks need, compiled on first use."""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@functools.cache
def library(name: str, *, native: bool, kernels: Sequence[str] = ()) -> ctypes.CDLL:
    """Compiles `native/NAME.cc` once and loads it.

    Args:
      name: the source.
      native: compile for this CPU; kernels are compiled as the library does.
      kernels: globs, from the root of the repository, of more sources.
    """
    sources = [HERE / f"{name}.cc"]
    for pattern in kernels:
        sources += sorted(ROOT.glob(pattern))
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-pthread"]
    flags += [f"-I{ROOT}", *(["-march=native"] if native else [])]
    compiler = os.environ.get("CXX", "g++")
    return ctypes.CDLL(str(_compiled(name, compiler, flags, sources, "cpu")))


@functools.cache
def preload(name: str, *defines: str) -> Path:
    """Compiles `native/NAME.cc` once, for LD_PRELOAD.

    Args:
      name: the source.
      defines: macros.
    """
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", *(f"-D{x}" for x in defines)]
    compiler = os.environ.get("CXX", "g++")
    return _compiled(name, compiler, flags, [HERE / f"{name}.cc"], "cpu")


@functools.cache
def cuda_library(name: str, kernels: Sequence[str]) -> ctypes.CDLL:
    """Compiles `native/NAME.cu` and kernels for the GPU that is here, and loads it.

    Args:
      name: the source.
      kernels: from the root of the repository, of more sources.
    """
    sources = [HERE / f"{name}.cu", *(ROOT / kernel for kernel in kernels)]
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or _NVCC
    flags = ["-std=c++20", "-O3", "-arch=native", "-Xcompiler", "-fPIC", "-shared"]
    flags += [f"-I{ROOT}"]
    return ctypes.CDLL(str(_compiled(name, nvcc, flags, sources, "cuda")))


_NVCC = "/usr/local/cuda/bin/nvcc"


def _compiled(
    name: str,
    compiler: str,
    flags: Sequence[str],
    sources: Sequence[Path],
    backend: str,
) -> Path:
    fingerprint = _fingerprint([compiler, *flags], sources, backend)
    target = _cache() / f"{name}-{fingerprint}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:  # one process compiles it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            command = [compiler, *flags, *map(str, sources), "-o", str(partial)]
            # GCC keeps faults to itself, those of native/cpuid.cc too.
            uncapped = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
            subprocess.run(command, check=True, env=uncapped)
            partial.rename(target)
    return target


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "jax_layout_benchmarks"


def _fingerprint(flags: Sequence[str], sources: Sequence[Path], backend: str) -> str:
    """Changes with the flags, the sources, any header and the CPU."""
    headers = sorted(
        header
        for folder in (HERE, ROOT / "core", ROOT / backend)
        for header in (*folder.rglob("*.h"), *folder.rglob("*.cuh"))
    )
    digest = hashlib.sha256(" ".join([*flags, _cpu()]).encode())
    for file in [*sources, *headers]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return flags[0] if flags else platform.machine()
