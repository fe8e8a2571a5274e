# SPDX-License-Identifier: Apache-2.0
"""Our CPU kernel called directly, and the copies that set the ceiling."""

import ctypes
import os
import weakref

import jax
import numpy as np

from benchmarks.buffers import Buffers
from benchmarks.harness import Contender
from benchmarks.native import library
from benchmarks.permute_cases import PermuteCase

# Pages that a non-temporal copy keeps open at a time, by the name of the copy.
_STREAMS = {"memcpy": 0, "stream": 1, "stream x4": 4}


def contenders(
    case: PermuteCase, buffers: Buffers, device: jax.Device
) -> list[Contender]:
    if device.platform != "cpu":
        return []
    threads = len(os.sched_getaffinity(0))
    copies = [_copy(buffers, "memcpy x1", 0, 1)]
    copies += [_copy(buffers, name, n, threads) for name, n in _STREAMS.items()]
    copies.append(_fresh_copy(buffers, "memcpy", threads, huge_pages=False))
    copies.append(_fresh_copy(buffers, "memcpy huge", threads, huge_pages=True))
    return [_kernel(case, buffers, threads), *copies]


def _kernel(case: PermuteCase, buffers: Buffers, threads: int) -> Contender:
    lib = library("permute", native=False, kernels=("cpu/permute/*.cc", "cpu/isa.cc"))
    new, run = lib.jax_layout_permute_new, lib.jax_layout_permute
    new.restype, run.restype = ctypes.c_void_p, ctypes.c_bool
    extents = ctypes.c_int64 * len(case.shape)
    itemsize = ctypes.c_int64(case.np_dtype.itemsize)
    plan = new(extents(*case.shape), extents(*case.axes), len(case.shape), itemsize)
    assert plan, case
    kernel = ctypes.c_void_p(plan)

    def launch(i: int) -> np.ndarray:
        x, y = buffers.x[i % buffers.sets], buffers.y[i % buffers.sets]
        assert run(kernel, _pointer(x), _pointer(y), threads)
        return y

    weakref.finalize(launch, lib.jax_layout_permute_delete, kernel)
    return Contender(
        family="kernel", role="ours", launch=launch, read=np.asarray, warm=True
    )


def _copy(buffers: Buffers, family: str, streams: int, threads: int) -> Contender:
    copy = library("copy", native=True).jax_layout_copy

    def launch(i: int) -> None:
        x, y = buffers.x[i % buffers.sets], buffers.y[i % buffers.sets]
        size, pages = ctypes.c_int64(x.nbytes), ctypes.c_int64(streams)
        copy(_pointer(y), _pointer(x), size, threads, pages)

    return Contender(family=family, role="copy", launch=launch, warm=True)


def _fresh_copy(
    buffers: Buffers, family: str, threads: int, *, huge_pages: bool
) -> Contender:
    copy = library("copy", native=True).jax_layout_copy_fresh
    copy.restype = ctypes.c_bool

    def launch(i: int) -> None:
        x = buffers.x[i % buffers.sets]
        size = ctypes.c_int64(x.nbytes)
        assert copy(_pointer(x), size, threads, ctypes.c_bool(huge_pages))

    return Contender(family=family, role="copy", launch=launch)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
