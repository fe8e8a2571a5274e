# SPDX-License-Identifier: Apache-2.0
"""Our CUDA kernel called directly, the copies that set the ceiling, and their clock."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.buffers import POISON, DeviceBuffers
from benchmarks.harness import Contender, Role
from benchmarks.native import cuda_library
from benchmarks.peers import Unsupported
from benchmarks.permute_cases import PermuteCase

KERNELS = ("cuda/permute/permute.cu",)


def contenders(
    case: PermuteCase, buffers: DeviceBuffers, device: jax.Device
) -> list[Contender]:
    if device.platform != "gpu":
        return []
    return on_device(case, buffers, cuda_library("cuda_permute", KERNELS))


def on_device(
    case: PermuteCase, buffers: DeviceBuffers, library: Any
) -> list[Contender]:
    """Those of a library that is loaded."""
    rank = len(case.shape)

    def permute(shape: tuple[int, ...], axes: tuple[int, ...]) -> Callable[..., Any]:
        new, run = (
            library.jax_layout_cuda_permute_new,
            library.jax_layout_cuda_permute,
        )
        new.restype, run.restype = ctypes.c_void_p, ctypes.c_bool
        extents = ctypes.c_int64 * rank
        itemsize = ctypes.c_int64(case.np_dtype.itemsize)
        plan = new(extents(*shape), extents(*axes), rank, itemsize)
        assert plan, case
        kernel = ctypes.c_void_p(plan)

        def launch(x: ctypes.c_void_p, y: ctypes.c_void_p) -> bool:
            return bool(run(kernel, x, y))

        weakref.finalize(launch, library.jax_layout_cuda_permute_delete, kernel)
        return launch

    copy = library.jax_layout_cuda_copy
    copy.restype = ctypes.c_bool
    size = ctypes.c_int64(case.nbytes)
    identity = tuple(range(rank))
    work: list[tuple[str, Role, Callable[..., Any]]] = [
        ("kernel", "ours", permute(case.shape, case.axes)),
        ("copy kernel", "copy", permute(case.shape, identity)),
        ("cudaMemcpyAsync", "copy", lambda x, y: copy(x, y, size)),
    ]
    return [_contender(library, buffers, *each) for each in work]


def _contender(
    library: Any, buffers: DeviceBuffers, family: str, role: Role, run: Any
) -> Contender:
    pointers = [
        [ctypes.c_void_p(a.unsafe_buffer_pointer()) for a in arrays]
        for arrays in (buffers.x, buffers.y)
    ]
    y = buffers.y[0]
    fill, fetch = library.jax_layout_cuda_fill, library.jax_layout_cuda_read
    fill.restype = fetch.restype = ctypes.c_bool
    size = ctypes.c_int64(y.nbytes)

    def launch(i: int) -> int:
        k = i % buffers.sets
        if not run(pointers[0][k], pointers[1][k]):
            raise Unsupported(f"{family}: a launch failed")
        return k

    def read(k: int) -> np.ndarray:
        """Written once more, over other bytes: another contender has been here."""
        host = np.empty(y.shape, y.dtype)
        at = pointers[1][k]
        if not (
            fill(at, POISON, size)
            and run(pointers[0][k], at)
            and fetch(at, ctypes.c_void_p(host.ctypes.data), size)
        ):
            raise Unsupported(f"{family}: cannot be read")
        return host

    return Contender(
        family=family,
        role=role,
        launch=launch,
        wait=lambda _: timer(library)(lambda: None),
        read=read if role == "ours" else None,
        warm=True,
        timer=timer(library),
    )


def timer(library: Any) -> Callable[[Callable[[], None]], float]:
    """Seconds between two events on the default stream, with the work between them."""
    start, stop = library.jax_layout_cuda_start, library.jax_layout_cuda_stop
    start.restype, stop.restype = ctypes.c_bool, ctypes.c_double

    def run(work: Callable[[], None]) -> float:
        if not start():
            raise Unsupported("cudaEventRecord failed")
        work()
        seconds = float(stop())
        if seconds < 0:
            raise Unsupported("the device reports an error")
        return seconds

    return run
