# SPDX-License-Identifier: Apache-2.0
"""Predicted times of permutes at their full size.

PYTHONPATH=tests python -m ptx.predict H100 prints those of the benchmark's cases.
"""

import ctypes
import math
import sys

from benchmarks.permute_cases import all_cases
from native import cuda_emulation
from ptx import Virtual, model, toolkit

SOURCE = "cuda/permute/permute.cu"
PLANTED = "tests/ptx/planted.cu"
SAMPLES = 8  # blocks
# GB/s of 32768^2 floats on an H100, as github.com/yencal/gpu-matrix-transpose has them;
# the last is of tiles with 16-byte accesses, as ours are.
PUBLISHED = {
    "Naive": 475,
    "Unpadded": 996,
    "Padded": 1693,
    "Coarsened": 2772,
    "tile 4 16 64 256": 2940,
}


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
    size = math.prod(shape) * itemsize
    host.set_multiprocessors(device.multiprocessors)
    launch, memory = launched(host, shape, axes, itemsize)
    name, blocks, threads, shared, _ = launch
    some = sorted({blocks * k // SAMPLES for k in range(SAMPLES)})
    counters = toolkit.run(SOURCE, device.architecture, launch, memory, blocks=some)
    mangled = toolkit.kernels(SOURCE, device.architecture)[name]
    registers, static, _ = toolkit.resources(SOURCE, device.architecture)[mangled]
    found = model.predict(
        device, counters, size, blocks, threads, registers, static + shared
    )
    return found, counters, name


def share_of_copy(host, device, shape, axes, itemsize):
    copy, *_ = predict(host, device, (math.prod(shape),), (0,), itemsize)
    found, counters, name = predict(host, device, shape, axes, itemsize)
    return copy.microseconds / found.microseconds, found, counters, name


def textbook(host, name, n=32768):
    """Of a transpose in planted.cu, or of our own."""
    device = model.DEVICES["H100"]
    if name not in toolkit.module(PLANTED, 90).kernels:
        found, _, kernel = predict(host, device, (n, n), (1, 0), 4)
        assert toolkit.kernel_name(kernel) == name
        return found
    threads = (32, 8 if name == "Coarsened" else 32)
    size, blocks = 4 * n * n, (n // 32) ** 2
    memory = [Virtual(size, 8, zeros), Virtual(size, 9, store=lambda at, raw: None)]
    some = [blocks * k // SAMPLES for k in range(SAMPLES)]
    counters = toolkit.module(PLANTED, 90).launch(
        name, (n // 32, n // 32), threads, [*memory, n], blocks=some
    )
    registers, shared, _ = toolkit.resources(PLANTED, 90)[name]
    return model.predict(
        device, counters, size, blocks, math.prod(threads), registers, shared
    )


HEAD = """
{}

| case | | kernel | us | GB/s | % of copy | bound by | in flight | conflicts |
|---|---|---|--:|--:|--:|---|--:|--:|"""
ROW = (
    "| {case.name} | {case.dtype} | {kernel} | {p.microseconds:.0f} | {p.rate:.0f} | "
    "{share:.0f} | {p.bound} | {flight} KB | {lost:.0f}% |"
)


def main(*names):
    host = toolkit.Host(cuda_emulation())
    for name, rate in PUBLISHED.items():
        found = textbook(host, name)
        print(f"| {name} | {rate} | {found.rate:.0f} | {found.bound} |")
    for device in [model.DEVICES[n] for n in names or ("H100",)]:
        print(HEAD.format(device.name))
        for case in all_cases()["ml"]:
            share, p, counters, name = share_of_copy(
                host, device, case.shape, case.axes, case.np_dtype.itemsize
            )
            conflicts = sum(counters.bank_conflicts.values())
            row = ROW.format(
                case=case,
                kernel=toolkit.kernel_name(name),
                p=p,
                share=100 * share,
                flight=p.in_flight >> 10,
                lost=100 * conflicts / max(1, counters.shared_passes),
            )
            print(row)


if __name__ == "__main__":
    main(*sys.argv[1:])
