# SPDX-License-Identifier: Apache-2.0
"""Predicted times of permutes at their full size.

PYTHONPATH=tests python -m ptx.predict H100 prints those of the benchmark's cases.
"""

import ctypes
import math
import sys

import numpy as np

from benchmarks.permute_cases import all_cases
from native import cuda_emulation
from ptx import Buffer, Virtual, model, toolkit

SOURCE, INDEX = "cuda/permute/permute.cu", "cuda/index/index.cu"
PLANTED = "tests/ptx/planted.cu"
SAMPLES = 8  # blocks
# GB/s of 32768^2 floats on an H100, as github.com/yencal/gpu-matrix-transpose has them;
# the last is of tiles with 16-byte accesses, as ours are.
PUBLISHED = {
    "Naive": 475,
    "Unpadded": 996,
    "Padded": 1693,
    "Coarsened": 2772,
    "tile 4 16 16 64 256": 2940,
}
# What each family is asked for: shape, axes, itemsize; and what a reading of the
# kernels, before there was a machine or a model, expected in percent of a copy.
FAMILIES = [
    ("copies", (1 << 26,), (0,), 1, "98-100"),
    ("rows, 16 bytes", (1024, 128, 128), (1, 0, 2), 4, "92-96"),
    ("rows, 16 bytes, chunks of 64", (32, 2048, 16, 32), (0, 2, 1, 3), 2, "82-90"),
    ("rows, 4 bytes", (1024, 128, 129), (1, 0, 2), 4, "85-90"),
    ("rows of odd halves", (2048, 128, 129), (1, 0, 2), 2, "60-75"),
    ("rows of odd bytes", (4096, 128, 129), (1, 0, 2), 1, "30-45"),
    ("tiles of 16 bytes", (4, 1024, 1024), (0, 2, 1), 16, "92-96"),
    ("tiles of 8 bytes", (8, 1024, 1024), (0, 2, 1), 8, "92-96"),
    ("tiles of 4 bytes", (16, 1024, 1024), (0, 2, 1), 4, "92-96"),
    ("tiles of 2 bytes", (32, 1024, 1024), (0, 2, 1), 2, "84-91"),
    ("tiles of 1 byte", (64, 1024, 1024), (0, 2, 1), 1, "80-90"),
    ("tiles of 4 bytes, odd", (16, 1021, 1023), (0, 2, 1), 4, "75-88"),
    ("tiles of 2 bytes in words", (32, 1022, 1026), (0, 2, 1), 2, "75-88"),
    ("tiles of 1 byte in words", (64, 1020, 1028), (0, 2, 1), 1, "75-88"),
    ("tiles of 2 bytes, odd", (32, 1021, 1023), (0, 2, 1), 2, "50-65"),
    ("tiles of 1 byte, odd", (64, 1021, 1023), (0, 2, 1), 1, "25-40"),
    ("tiles of 2 bytes, x odd", (32, 1024, 1023), (0, 2, 1), 2, ""),
    ("tiles of 2 bytes, y odd", (32, 1023, 1024), (0, 2, 1), 2, ""),
    ("tiles of 1 byte, x odd", (64, 1024, 1023), (0, 2, 1), 1, ""),
    ("tiles of 1 byte, y odd", (64, 1023, 1024), (0, 2, 1), 1, ""),
    ("boxes of 16 bytes", (1024, 16, 16, 16, 8), (0, 2, 3, 1, 4), 2, ""),
    ("boxes of 4 bytes", (64, 3, 512, 224), (0, 2, 3, 1), 4, "70-88"),
    ("boxes of 2 bytes", (128, 3, 512, 224), (0, 2, 3, 1), 2, "50-70"),
    ("boxes of 1 byte", (256, 3, 512, 224), (0, 2, 3, 1), 1, "50-70"),
    ("boxes of 2 bytes, odd", (3001, 4001, 3), (1, 0, 2), 2, "35-55"),
    ("boxes of 1 byte, odd", (6001, 4001, 3), (1, 0, 2), 1, "35-55"),
]
# The same of rows by index: type and whether the index is sorted.
INDEXED = [
    ("index_select", None, False, "80-90"),
    ("index_add, sorted", "float32", True, "75-85"),
    ("index_add, atomic", "float32", False, "40-60"),
]


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


def indexed(host, device, kind, sort, rows=1 << 17, inner=128):
    """(share of a copy, prediction) of float32 rows, each once, in no order."""
    size = 4 * rows * inner
    shuffled = np.random.default_rng(0).permutation(rows).astype(np.int32)
    arrays = (np.arange(rows, dtype=np.int32), shuffled) if sort else (shuffled,)
    arrays = [Buffer(a, 10 + k, writable=False) for k, a in enumerate(arrays)]
    x = Virtual(size, 8, zeros)
    y = Virtual(size, 9, zeros, lambda at, raw: None)
    index, order = (ctypes.c_void_p(a.address) for a in (arrays[0], arrays[-1]))
    x_at, y_at = (ctypes.c_void_p(m.address) for m in (x, y))
    dims = (ctypes.c_int64 * 9)(1, 1, rows, rows, inner, 4, False, False, True)
    if kind is None:
        fill = (ctypes.c_uint8 * 4)()
        (launch,) = host.launches("index_select", x_at, index, fill, y_at, dims, 0)
    else:
        order = order if sort else None
        (launch,) = host.launches("index_add", index, order, x_at, y_at, 0, dims, 0)
    name, blocks, threads, _, _ = launch
    some = [blocks * k // SAMPLES for k in range(SAMPLES)]
    memory = [x, y, *arrays]
    counters = toolkit.run(INDEX, device.architecture, launch, memory, blocks=some)
    mangled = toolkit.kernels(INDEX, device.architecture)[name]
    registers, _, _ = toolkit.resources(INDEX, device.architecture)[mangled]
    moved = size if kind is None else 3 * size // 2  # y is read as well
    found = model.predict(device, counters, moved, blocks, threads, registers, 0)
    copy, *_ = predict(host, device, (moved,), (0,), 1)
    return copy.microseconds / found.microseconds, found


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
        print(device.name)
        for family, *case, before in FAMILIES:
            share, p, _, name = share_of_copy(host, device, *case)
            name = toolkit.kernel_name(name)
            print(
                f"| {family} | {name} | {100 * share:.0f} | {100 * p.achievable:.0f} "
                f"| {p.bound} | {before} |"
            )
        for family, kind, sort, before in INDEXED:
            share, p = indexed(host, device, kind, sort)
            print(f"| {family} | | {100 * share:.0f} | | {p.bound} | {before} |")
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
