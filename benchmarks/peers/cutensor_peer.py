# SPDX-License-Identifier: Apache-2.0
"""cuTENSOR 2's permutation, through its C interface, on torch's memory.

Looks for libcutensor in the installed package `cutensor-cu13`, else in the folders
the loader knows.
"""

import ctypes
import functools
import importlib.metadata
from typing import Any

import jax

from benchmarks.buffers import Buffers
from benchmarks.harness import Contender
from benchmarks.peers import Unsupported, torch_peer
from benchmarks.permute_cases import PermuteCase

# cutensorDataType_t, as in cuda_runtime's cudaDataType.
_DTYPES = {"float32": 0, "float16": 2, "uint8": 8, "bfloat16": 14}
_IDENTITY = 1  # cutensorOperator_t
_DEFAULT_ALGO, _NO_JIT = -1, 0
_ALIGNMENT = 256  # of every CUDA allocation


def contenders(
    case: PermuteCase, buffers: Buffers, device: jax.Device
) -> list[Contender]:
    torch = torch_peer.torch
    if device.platform != "gpu" or torch is None or _library() is None:
        return []
    xs = [torch_peer.tensor(x, case.dtype) for x in buffers.x]
    ys = [torch_peer.tensor(y, case.dtype) for y in buffers.y]
    plan = _Plan(case)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def launch(i: int) -> object:
        x, y = xs[i % buffers.sets], ys[i % buffers.sets]
        plan(x.data_ptr(), y.data_ptr(), stream)
        return y

    return [
        Contender(
            family="cutensor",
            role="peer",
            launch=launch,
            wait=torch_peer.synchronize,
            read=torch_peer.host_bits,
            warm=True,
            timer=torch_peer.timer,
        )
    ]


class _Plan:
    """y[modes permuted] = 1 * x[modes]."""

    def __init__(self, case: PermuteCase) -> None:
        x_modes = tuple(range(len(case.shape)))
        x, y = (
            self._tensor(shape, case.dtype) for shape in (case.shape, case.out_shape)
        )
        operation = _create(
            "cutensorCreatePermutation",
            _handle(),
            x,
            _array(ctypes.c_int32, x_modes),
            _IDENTITY,
            y,
            _array(ctypes.c_int32, case.axes),
            ctypes.c_void_p.in_dll(_library(), "CUTENSOR_COMPUTE_DESC_32F"),
            after_handle=True,
        )
        preference = _create(
            "cutensorCreatePlanPreference",
            _handle(),
            _DEFAULT_ALGO,
            _NO_JIT,
            after_handle=True,
        )
        self.plan = _create(
            "cutensorCreatePlan",
            _handle(),
            operation,
            preference,
            ctypes.c_uint64(0),  # bytes of workspace
            after_handle=True,
        )
        _call("cutensorDestroyPlanPreference", preference)
        _call("cutensorDestroyOperationDescriptor", operation)
        _call("cutensorDestroyTensorDescriptor", x)
        _call("cutensorDestroyTensorDescriptor", y)

    def __call__(self, x: int, y: int, stream: ctypes.c_void_p) -> None:
        one = ctypes.c_float(1)
        _call(
            "cutensorPermute",
            _handle(),
            self.plan,
            ctypes.byref(one),
            ctypes.c_void_p(x),
            ctypes.c_void_p(y),
            stream,
        )

    @staticmethod
    def _tensor(shape: tuple[int, ...], dtype: str) -> ctypes.c_void_p:
        return _create(
            "cutensorCreateTensorDescriptor",
            _handle(),
            ctypes.c_uint32(len(shape)),
            _array(ctypes.c_int64, shape),
            None,  # dense, once the modes are reversed: see _array
            _DTYPES[dtype],
            ctypes.c_uint32(_ALIGNMENT),
            after_handle=True,
        )


def _array(kind: Any, values: tuple[int, ...]) -> Any:
    """Reversed: cuTENSOR's dense tensors have their first mode innermost."""
    return (kind * len(values))(*reversed(values))


@functools.cache
def _library() -> Any:
    """The loaded library, or None."""
    name = "libcutensor.so.2"
    try:
        files = importlib.metadata.files("cutensor-cu13") or []
        name = next((str(f.locate()) for f in files if f.name == name), name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


@functools.cache
def _handle() -> ctypes.c_void_p:
    return _create("cutensorCreate")


def _create(
    function: str, *args: object, after_handle: bool = False
) -> ctypes.c_void_p:
    """Calls a function that returns an object through its first argument.

    With `after_handle` that is the second, after the library's handle.
    """
    made = ctypes.c_void_p()
    pointer = ctypes.byref(made)
    if after_handle:
        _call(function, args[0], pointer, *args[1:])
    else:
        _call(function, pointer, *args)
    return made


def _call(function: str, *args: object) -> None:
    if status := getattr(_library(), function)(*args):
        raise Unsupported(f"{function}: status {status}")
