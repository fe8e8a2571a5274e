# SPDX-License-Identifier: Apache-2.0
"""oneDNN's reorder, through its C interface.

Looks for libdnnl in the installed package `onednn-cpu-gomp`, else in the folders
the loader knows.
"""

import ctypes
import functools
import importlib.metadata

import jax
import numpy as np

from benchmarks.buffers import Buffers
from benchmarks.harness import Contender
from benchmarks.peers import Unsupported
from benchmarks.permute_cases import PermuteCase

_MAX_RANK = 12
_DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "uint8": 6}  # dnnl_data_type_t
_CPU, _IN_ORDER = 1, 1
_ARG_FROM, _ARG_TO = 1, 17

_Dims = ctypes.c_int64 * _MAX_RANK


class _ExecArg(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_int), ("memory", ctypes.c_void_p)]


def contenders(
    case: PermuteCase, buffers: Buffers, device: jax.Device
) -> list[Contender]:
    if device.platform != "cpu" or _library() is None:
        return []
    if len(case.shape) > _MAX_RANK or case.dtype not in _DTYPES:
        raise Unsupported(f"onednn: no rank {len(case.shape)} {case.dtype}")
    reorder = _Reorder(case)

    def launch(i: int) -> np.ndarray:
        x, y = buffers.x[i % buffers.sets], buffers.y[i % buffers.sets]
        reorder(x, y)
        return y

    return [
        Contender(
            family="onednn", role="peer", launch=launch, read=np.asarray, warm=True
        )
    ]


class _Reorder:
    """Reads x through permuted strides, writes y dense."""

    def __init__(self, case: PermuteCase) -> None:
        self.engine = _create("dnnl_engine_create", _CPU, ctypes.c_size_t(0))
        self.stream = _create("dnnl_stream_create", self.engine, _IN_ORDER)
        x_strides = _strides(case.shape)
        permuted = tuple(x_strides[axis] for axis in case.axes)
        x, y = (
            _create(
                "dnnl_memory_desc_create_with_strides",
                len(case.shape),
                _Dims(*case.out_shape),
                _DTYPES[case.dtype],
                _Dims(*strides),
            )
            for strides in (permuted, _strides(case.out_shape))
        )
        engine = self.engine
        desc = _create("dnnl_reorder_primitive_desc_create", x, engine, y, engine, None)
        self.primitive = _create("dnnl_primitive_create", desc)
        self.x = _create("dnnl_memory_create", x, engine, None)
        self.y = _create("dnnl_memory_create", y, engine, None)
        _call("dnnl_primitive_desc_destroy", desc)
        _call("dnnl_memory_desc_destroy", x)
        _call("dnnl_memory_desc_destroy", y)
        self.args = (_ExecArg * 2)(
            _ExecArg(_ARG_FROM, self.x), _ExecArg(_ARG_TO, self.y)
        )

    def __call__(self, x: np.ndarray, y: np.ndarray) -> None:
        for memory, array in ((self.x, x), (self.y, y)):
            handle = ctypes.c_void_p(array.ctypes.data)
            _call("dnnl_memory_set_data_handle", memory, handle)
        _call("dnnl_primitive_execute", self.primitive, self.stream, 2, self.args)
        _call("dnnl_stream_wait", self.stream)

    def __del__(self) -> None:
        for kind, handle in (
            ("memory", self.x),
            ("memory", self.y),
            ("primitive", self.primitive),
            ("stream", self.stream),
            ("engine", self.engine),
        ):
            _call(f"dnnl_{kind}_destroy", handle)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return tuple(strides)


@functools.cache
def _library() -> ctypes.CDLL | None:
    name = "libdnnl.so.3"
    try:
        files = importlib.metadata.files("onednn-cpu-gomp") or []
        name = next((str(f.locate()) for f in files if f.name == name), name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _create(function: str, *args: object) -> ctypes.c_void_p:
    """Calls a function that returns a handle through its first argument."""
    handle = ctypes.c_void_p()
    _call(function, ctypes.byref(handle), *args)
    return handle


def _call(function: str, *args: object) -> None:
    if status := getattr(_library(), function)(*args):
        raise Unsupported(f"{function}: status {status}")
