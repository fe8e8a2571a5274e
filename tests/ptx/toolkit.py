# SPDX-License-Identifier: Apache-2.0
"""What nvcc and ptxas make of the kernels, and the launches that the host plans."""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from native import ROOT
from ptx.machine import Module

ARCHITECTURES = (80, 90, 100)


@functools.cache
def nvcc():
    """CMake's choice, without CMake: a toolkit of the system, or wheels'."""
    places = [
        os.environ.get("CUDACXX"),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    try:
        import nvidia

        places += [f"{each}/cu13/bin/nvcc" for each in nvidia.__path__]
    except ImportError:
        pass
    found = next((p for p in places if p and Path(p).exists()), None)
    if not found:
        pytest.skip("needs nvcc")
    return found


@functools.cache
def text(source, architecture):
    """The PTX of a file, compiled once."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "kernel.ptx"
        command = [
            nvcc(),
            "-std=c++20",
            "-O3",
            "-ptx",
            f"-arch=sm_{architecture}",
            f"-I{ROOT}",
        ]
        subprocess.run([*command, ROOT / source, "-o", result], check=True)
        return result.read_text()


@functools.cache
def module(source, architecture):
    return Module(text(source, architecture))


@functools.cache
def resources(source, architecture):
    """By kernel: registers, bytes of static shared memory, bytes of spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(text(source, architecture))
        ptxas = Path(nvcc()).with_name("ptxas")
        said = subprocess.run(
            [ptxas, "-v", f"-arch=sm_{architecture}", path, "-o", os.devnull],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    found = {}
    for part in said.split("Compiling entry function ")[1:]:
        static = re.search(r"(\d+) bytes smem", part)
        spills = re.findall(r"(\d+) bytes spill", part)
        found[part.split("'")[1]] = (
            int(re.search(r"Used (\d+) registers", part)[1]),
            int(static[1]) if static else 0,
            sum(map(int, spills)),
        )
    return found


def plain(name):
    """A mangled name without unnamed namespaces, which compilers name differently."""
    while found := re.search(r"(\d+)(?=_GLOBAL__N_)", name):
        name = name[: found.start()] + name[found.end() + int(found[1]) :]
    return name


class Host:
    """The planners of cuda/, compiled for the host, whose launches are recorded."""

    def __init__(self, library):
        self._library = ctypes.CDLL(str(library))
        for name in (
            "permute",
            "permute_family",
            "index_select",
            "index_add",
            "recorded_launches",
        ):
            getattr(self._library, name).restype = ctypes.c_char_p
        lines = subprocess.run(
            ["nm", "--defined-only", library],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        self._names = {int(a, 16): plain(n) for a, _, n in map(str.split, lines)}

    def family(self, shape, axes, itemsize):
        """The kernel of a permute, and the widths of its accesses."""
        said = self._library.permute_family(
            *dims(shape, axes), ctypes.c_int64(itemsize), 16
        ).decode()
        return " ".join(said.split()[:4])

    def set_multiprocessors(self, count):
        self._library.set_multiprocessors(count)

    def launches(self, function, *arguments):
        """[(kernel, blocks, threads, shared bytes, arguments)] of a function."""
        self._library.record(True)
        try:
            error = getattr(self._library, function)(*arguments).decode()
            lines = self._library.recorded_launches().decode().splitlines()
        finally:
            self._library.record(False)
        assert not error, error
        split = [line.split() for line in lines]
        return [
            (
                self._names[int(k)],
                int(b),
                int(t),
                int(s),
                [bytes.fromhex(a) for a in args],
            )
            for k, b, t, s, *args in split
        ]


def dims(shape, axes):
    array = ctypes.c_int64 * len(shape)
    return array(*shape), array(*axes), len(shape)


@functools.cache
def kernels(source, architecture):
    """The mangled names of a module by their plain ones."""
    return {plain(name): name for name in module(source, architecture).kernels}


def run(source, architecture, launch, memory, **options):
    """A recorded launch in the machine."""
    name, blocks, threads, shared, arguments = launch
    return module(source, architecture).launch(
        kernels(source, architecture)[name], blocks, threads, arguments,
        shared=shared, memory=memory, **options,
    )  # fmt: skip


def kernel_name(name):
    """Of a mangled name: the family and its numbers."""
    family = re.search(r"\d([A-Z]\w*?)Kernel", name)[1]
    return " ".join([family.lower(), *re.findall(r"L[ib](\d+)E", name)])
