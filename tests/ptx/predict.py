# SPDX-License-Identifier: Apache-2.0
"""Predicted times of permutes at their full size; `python -m ptx.predict` prints them."""

import ctypes
import math
import struct
import sys

from benchmarks.permute_cases import all_cases
from native import cuda_emulation
from ptx import Virtual, model, toolkit

SOURCE = "cuda/permute/permute.cu"
SAMPLES = 8  # blocks


def zeros(offset):
    return offset * 0


def launched(host, shape, axes, itemsize):
    """The launch of a permute, and the memory that it needs."""
    size = math.prod(shape) * itemsize
    memory = [Virtual(size, 8, zeros), Virtual(size, 9, store=lambda at, raw: None)]
    at = [ctypes.c_void_p(m.address) for m in memory]
    dims = toolkit.dims(shape, axes)
    (launch,) = host.launches("permute", *at, *dims, ctypes.c_int64(itemsize), 0)
    return launch, memory


def predict(host, device, shape, axes, itemsize):
    """(prediction, counters of some blocks, kernel)."""
    launch, memory = launched(host, shape, axes, itemsize)
    name, blocks, threads, shared, arguments = launch
    if "PackedKernel" in name:  # a wave of blocks, on this device
        tiles = struct.unpack_from("<I", arguments[0], 16)[0]
        blocks = min(
            tiles,
            blocks // 132 * device.multiprocessors if blocks >= 132 * 3 else blocks,
        )
    some = sorted({blocks * k // SAMPLES for k in range(SAMPLES)})
    launch = name, blocks, threads, shared, arguments
    counters = toolkit.run(SOURCE, device.architecture, launch, memory, blocks=some)
    mangled = toolkit.kernels(SOURCE, device.architecture)[name]
    registers, static, _ = toolkit.resources(SOURCE, device.architecture)[mangled]
    found = model.predict(device, counters, blocks, threads, registers, static + shared)
    return found, counters, name


def share_of_copy(host, device, shape, axes, itemsize):
    copy, *_ = predict(host, device, (math.prod(shape),), (0,), itemsize)
    found, counters, name = predict(host, device, shape, axes, itemsize)
    return copy.microseconds / found.microseconds, found, counters, name


def main(*names):
    host = toolkit.Host(cuda_emulation())
    devices = [model.DEVICES[n] for n in names or ("H100",)]
    for device in devices:
        print(
            f"\n{device.name}\n\n| case | | kernel | us | GB/s | % of copy | bound | in flight | conflicts |"
        )
        print("|---|---|---|--:|--:|--:|---|--:|--:|")
        for c in all_cases()["ml"]:
            share, p, counters, name = share_of_copy(
                host, device, c.shape, c.axes, c.np_dtype.itemsize
            )
            kernel = toolkit.kernel_name(name)
            lost = sum(counters.bank_conflicts.values()) / max(
                1, counters.shared_passes
            )
            rate = 2 * c.nbytes / p.microseconds / 1e3
            print(
                f"| {c.name} | {c.dtype} | {kernel} | {p.microseconds:.0f} | {rate:.0f} | {100 * share:.0f} | {p.bound} | {p.in_flight >> 10} KB | {100 * lost:.0f}% |"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
