# SPDX-License-Identifier: Apache-2.0
"""Every CUDA kernel as nvcc emits it, in the machine, launched as the host plans it.

Bit for bit; what is out of bounds, unwritten, raced for or spilled is an error.
"""

import ctypes
import math
import re
import struct

import ml_dtypes
import numpy as np
import pytest

from benchmarks.permute_cases import all_cases
from native import cuda_emulation
from ptx import Buffer, Virtual, model, toolkit

PERMUTE, INDEX = "cuda/permute/permute.cu", "cuda/index/index.cu"
X, Y, INDICES, ORDER = 8, 9, 10, 11  # slots
LARGE = 1 << 20  # bytes from which kernels of large arrays run

ran = set()  # (source, architecture, kernel)


@pytest.fixture(scope="session")
def host():
    return toolkit.Host(cuda_emulation())


@pytest.fixture(params=toolkit.ARCHITECTURES[1:], ids=lambda a: f"sm_{a}")
def architecture(request):
    """sm_80's PTX is sm_90's, as a test below sees."""
    toolkit.nvcc()
    return request.param


def run(source, architecture, launches, memory, **options):
    assert launches
    for launch in launches:
        ran.add((source, architecture, launch[0]))
        toolkit.run(source, architecture, launch, memory, counters=False, **options)


@pytest.mark.parametrize("source", [PERMUTE, INDEX])
def test_ptx_of_ampere_is_that_of_hopper(source):
    texts = [toolkit.text(source, a).replace(f"sm_{a}", "") for a in (80, 90)]
    unnamed = [re.sub(r"__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}", "", t) for t in texts]
    assert unnamed[0] == unnamed[1]


@pytest.mark.parametrize("architecture", toolkit.ARCHITECTURES)
@pytest.mark.parametrize("source", [PERMUTE, INDEX])
def test_nothing_is_spilled(source, architecture):
    found = toolkit.resources(source, architecture)
    assert len(found) >= 39
    assert {k: r for k, r in found.items() if r[2]} == {}


# -- permutes ------------------------------------------------------------------


def permute(host, shape, axes, itemsize, architecture, offsets=(0, 0)):
    raw = np.random.default_rng(0).integers(
        0, 256, math.prod(shape) * itemsize, np.uint8
    )
    kind = f"u{itemsize}" if itemsize < 16 else "c16"
    want = raw.view(kind).reshape(shape).transpose(axes)
    y = np.full_like(raw, 0xCB)
    memory = [Buffer(raw, X, offsets[0], writable=False), Buffer(y, Y, offsets[1])]
    addresses = [ctypes.c_void_p(m.address) for m in memory]
    dims = toolkit.dims(shape, axes)
    launches = host.launches("permute", *addresses, *dims, ctypes.c_int64(itemsize), 0)
    run(PERMUTE, architecture, launches, memory)
    np.testing.assert_array_equal(
        y, np.ascontiguousarray(want).reshape(-1).view(np.uint8)
    )
    return [launch[0] for launch in launches]


def reduced(host, shape, axes, itemsize):
    """A shape of a megabyte or two that the same kernel moves."""
    family = host.family(shape, axes, itemsize)
    while math.prod(shape) * itemsize > 2 * LARGE:
        for axis in sorted(range(len(shape)), key=lambda d: -shape[d]):
            extent = shape[axis] // 32 * 16 + shape[axis] % 16
            if shape[axis] < 32:  # as even as it was
                extent = max(2, shape[axis] // 4 * 2 + shape[axis] % 2)
            smaller = (*shape[:axis], extent, *shape[axis + 1 :])
            if (
                extent < shape[axis]
                and math.prod(smaller) * itemsize >= LARGE
                and host.family(smaller, axes, itemsize) == family
            ):
                shape = smaller
                break
        else:
            break
    return shape


CASES = [c for group in ("ml", "ttc") for c in all_cases()[group]]


def test_cases_are_reduced(host):
    assert len(CASES) == 38 + 57
    sizes = [
        math.prod(reduced(host, c.shape, c.axes, size)) * size
        for c in CASES
        for size in [c.np_dtype.itemsize]
    ]
    # What moves in patches has at least so many boxes of 16 KB.
    assert max(sizes) <= 2 * LARGE + (512 << 14)
    assert sum(size > 2 * LARGE for size in sizes) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.group} {c.name} {c.dtype}")
def test_benchmark_case(host, case, architecture):
    itemsize = case.np_dtype.itemsize
    shape = reduced(host, case.shape, case.axes, itemsize)
    permute(host, shape, case.axes, itemsize, architecture)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "shape, axes",
    [
        ((1031,), (0,)),
        ((129, 127), (1, 0)),
        ((132, 140), (1, 0)),
        ((96, 64), (1, 0)),
        ((96, 97), (1, 0)),  # wide accesses on one side
        ((97, 96), (1, 0)),
        ((96, 100), (1, 0)),
        ((2, 34, 66), (0, 2, 1)),
        ((37, 53, 5), (2, 1, 0)),
        ((640, 3), (1, 0)),
        ((5, 37, 3), (1, 0, 2)),
        ((3, 5, 7, 67), (2, 1, 0, 3)),
        ((2, 3, 700), (1, 0, 2)),
        ((7, 5, 64), (1, 0, 2)),
        ((7, 5, 8), (1, 0, 2)),
        ((4,) * 6, (5, 4, 3, 2, 1, 0)),
        ((2,) * 12, tuple(range(11, -1, -1))),
    ],
    ids=str,
)
def test_small_and_odd(host, shape, axes, itemsize, architecture):
    step = min(itemsize, 8)
    for offsets in [(0, 0), (step, 0), (step, 3 * step)]:
        permute(host, shape, axes, itemsize, architecture, offsets)


@pytest.mark.parametrize(
    "shape, offsets, threads",
    [
        ((5, 3, 2, 4, 5, 9, 37, 40), (0, 0), 256),  # patches of 8 bytes of x
        ((5, 3, 2, 4, 5, 9, 37, 40), (4, 4), 256),  # from anywhere
        ((5, 3, 2, 4, 5, 9, 37, 40), (0, 4), 256),
        ((5, 3, 2, 4, 5, 9, 37, 40), (1, 0), 512),  # x and y have one alignment
        ((48, 17, 101, 3, 32), (0, 0), 256),  # of vectors
        ((4, 33, 2, 4, 17, 9, 37, 8), (0, 0), 256),
        ((5, 3, 2, 4, 5, 9, 37, 40), (1, 3), 512),  # from anywhere
        ((5, 3, 2, 4, 7, 7, 37, 41), (0, 0), 512),  # and to words
    ],
    ids=str,
)
def test_large_blocks(host, shape, offsets, threads, architecture):
    axes = tuple(reversed(range(len(shape))))
    (kernel,) = permute(host, shape, axes, 1, architecture, offsets)
    assert toolkit.kernel_name(kernel) == f"packed 1 {threads}"


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(
    "shape, axes",
    [
        ((601, 701, 3), (1, 0, 2)),
        ((37, 301, 5, 7, 3), (1, 0, 3, 2, 4)),
        ((9, 11, 13, 17, 19, 3), (4, 3, 2, 1, 0, 5)),
    ],
    ids=str,
)
def test_triples(host, shape, axes, itemsize, architecture):
    for offsets in [(0, 0), (itemsize, 3 * itemsize)]:
        (kernel,) = permute(host, shape, axes, itemsize, architecture, offsets)
        assert toolkit.kernel_name(kernel) == f"packed {3 * itemsize} 128"


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_large_with_odd_extents(host, itemsize, architecture):
    n = math.isqrt(LARGE // itemsize) | 1
    for shape, axes in [((n, n + 2), (1, 0)), ((n, n // 6, 7), (1, 0, 2))]:
        permute(host, shape, axes, itemsize, architecture)
    permute(host, (n // 4 * 4, n // 4 * 4 + 4), (1, 0), itemsize, architecture)


@pytest.mark.parametrize("multiprocessors", [78, 132])
def test_boxes_make_one_wave_of_the_device(host, multiprocessors):
    host.set_multiprocessors(multiprocessors)
    try:
        dims = toolkit.dims((64, 3, 224, 224), (0, 2, 3, 1))
        pointers = [ctypes.c_void_p(16 << 40)] * 2
        (launch,) = host.launches("permute", *pointers, *dims, ctypes.c_int64(4), 0)
    finally:
        host.set_multiprocessors(132)
    name, blocks, threads, shared, _ = launch
    registers, _, _ = toolkit.resources(PERMUTE, 90)[toolkit.kernels(PERMUTE, 90)[name]]
    device = model.DEVICES["H100"]
    assert blocks == multiprocessors * 4
    assert model.resident(device, threads, registers, shared) == 4


def byte(offset):
    """What stands at an offset of an array larger than any memory."""
    hashed = offset.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (hashed >> np.uint64(56) ^ hashed >> np.uint64(33)).astype(np.uint8)


def source_of(offset, shape, axes, itemsize):
    index, place = offset // itemsize, offset % itemsize
    for axis in reversed(axes):
        place += index % shape[axis] * math.prod(shape[axis + 1 :]) * itemsize
        index //= shape[axis]
    return place


@pytest.mark.parametrize("alignment", [16, 1])
@pytest.mark.parametrize(
    "shape, axes, itemsize",
    [
        ((1 << 33,), (0,), 1),
        ((70000, 70000), (1, 0), 1),
        ((70000, 70000), (1, 0), 4),
        ((1 << 17, 1 << 18), (1, 0), 2),
        # Boxes of gigabytes.
        *((((1 << 33) + 1, 3), (1, 0), n) for n in (1, 2, 4, 8, 16)),
        ((1 << 18, 5, 1 << 17), (2, 1, 0), 8),
        ((50000, 50000, 3), (1, 0, 2), 4),
        ((1 << 16, 1 << 16, 8), (1, 0, 2), 8),  # more rows than 32 bits count
        ((1 << 16, 1 << 16, 9), (1, 0, 2), 16),
        ((1 << 16, 1 << 16, 9), (1, 0, 2), 8),
        ((1 << 16, 1 << 16, 17), (1, 0, 2), 4),
        ((1 << 16, 1 << 16, 33), (1, 0, 2), 2),
        ((1 << 16, 1 << 16, 65), (1, 0, 2), 1),
        ((1 << 16, 1 << 16, 4), (1, 0, 2), 16),
        ((1 << 16, 1 << 16, 71), (1, 0, 2), 8),
        ((40000, 3, 64, 1000), (2, 0, 1, 3), 4),
        # More tiles too.
        *((((1 << 31) - (1 << 15), 32, 32), (0, 2, 1), n) for n in (2, 4, 8, 16)),
        ((2,) * 36, tuple(range(35, -1, -1)), 1),
    ],
    ids=str,
)
def test_beyond_32_bits(host, shape, axes, itemsize, alignment, architecture):
    """Some blocks of arrays of gigabytes and terabytes, of which no byte is there."""
    size, stored = math.prod(shape) * itemsize, 0

    def store(at, raw):
        nonlocal stored
        np.testing.assert_array_equal(raw, byte(source_of(at, shape, axes, itemsize)))
        stored += raw.size

    offset = 0 if alignment == 16 else min(itemsize, 8)
    memory = [
        Virtual(size, X, byte, offset=offset),
        Virtual(size, Y, store=store, offset=offset),
    ]
    addresses = [ctypes.c_void_p(m.address) for m in memory]
    dims = toolkit.dims(shape, axes)
    (launch,) = host.launches("permute", *addresses, *dims, ctypes.c_int64(itemsize), 0)
    name, blocks, threads, shared, arguments = launch
    if "PackedKernel" in name:  # its blocks walk over tiles: a block for each
        blocks = struct.unpack_from("<I", arguments[0], 16)[0]
    some = {
        0,
        blocks - 1,
        *np.random.default_rng(blocks).integers(0, blocks, 4).tolist(),
    }
    launch = name, blocks, threads, shared, arguments
    run(PERMUTE, architecture, [launch], memory, blocks=some)
    assert stored > 0


# -- index_select and index_add ------------------------------------------------

VIEWS = [
    # batch, outer, extent, count, inner
    (1, 1, 50, 70, 32),
    (1, 3, 7, 5, 1),
    (1, 1, 300, 1000, 1),
    (2, 3, 5, 7, 6),
    (3, 1, 4, 9, 16),
    (1, 40, 9, 11, 1),
    (2, 5, 33, 4, 12),
    (1, 2, 6, 9, 24),
]
SUMS = "float32 float64 bfloat16 float16 int8 int16 int32 int64".split()
ATOMIC = "float32 float64 int32 int64".split()


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def int64s(*values):
    return (ctypes.c_int64 * len(values))(*map(int, values))


def indices(view, wide, clip, wrap=True):
    batch, _, extent, count, _ = view
    kind = np.int64 if wide else np.int32
    index = np.random.default_rng(count).integers(
        -extent - 2, extent + 2, (batch, count)
    )
    rows = np.where((index < 0) & wrap, index + extent, index)
    inside = (rows >= 0) & (rows < extent)
    if clip:
        rows, inside = np.clip(rows, 0, extent - 1), np.ones_like(inside)
    return index.astype(kind), rows, inside


@pytest.mark.parametrize("wide, clip, wrap", [(0, 0, 1), (1, 1, 1), (1, 0, 0)], ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_index_select(host, view, wide, clip, wrap, architecture):
    batch, outer, extent, count, inner = view
    index, rows, inside = indices(view, wide, clip, wrap)
    for itemsize in (1, 2, 4, 8, 16):
        raw = np.random.default_rng(0).integers(
            0, 256, (batch, outer, extent, inner * itemsize), np.uint8
        )
        x = raw.view(f"V{itemsize}")
        fill = np.arange(1, itemsize + 1, dtype=np.uint8)
        want = np.empty((batch, outer, count, inner), x.dtype)
        for b in range(batch):
            want[b] = x[b][:, np.where(inside[b], rows[b], 0)]
            want[b][:, ~inside[b]] = fill.view(x.dtype)[0]
        y = np.zeros(want.shape[:-1] + (inner * itemsize,), np.uint8)
        memory = [
            Buffer(raw, X, writable=False),
            Buffer(index, INDICES, writable=False),
            Buffer(y, Y),
        ]
        at = [ctypes.c_void_p(m.address) for m in memory]
        dims = int64s(*view, itemsize, wide, clip, wrap)
        launches = host.launches(
            "index_select",
            at[0],
            at[1],
            fill.ctypes.data_as(ctypes.c_void_p),
            at[2],
            dims,
            0,
        )
        run(INDEX, architecture, launches, memory)
        np.testing.assert_array_equal(y, want.view(np.uint8).reshape(y.shape))


def add(host, architecture, name, memory, dims):
    """memory: index, order (or None), source, y."""
    at = [ctypes.c_void_p(m.address) if m else None for m in memory]
    launches = host.launches(
        "index_add", at[0], at[1], at[2], at[3], SUMS.index(name), dims, 0
    )
    run(INDEX, architecture, launches, [m for m in memory if m])


@pytest.mark.parametrize("wide, clip", [(False, False), (True, True)])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_index_add(host, view, name, wide, clip, architecture):
    """Rows meet in their order, 16 bits in float32, rounded once."""
    batch, outer, extent, count, inner = view
    element = dtype_of(name)
    index, rows, inside = indices(view, wide, clip)
    rng = np.random.default_rng(1)
    y = (30 * rng.standard_normal((batch, outer, extent, inner))).astype(element)
    source = (30 * rng.standard_normal((batch, outer, count, inner))).astype(element)
    want = y.astype("f4" if element.itemsize == 2 and "f" in name else element)
    for b in range(batch):
        for i in np.flatnonzero(inside[b]):
            want[b][:, rows[b, i]] += source[b][:, i].astype(want.dtype)
    key = np.where(inside, rows, extent)
    order = np.argsort(key, axis=1, kind="stable").astype(np.int32)
    ordered = np.take_along_axis(key, order, 1).astype(index.dtype)
    dims = int64s(*view, element.itemsize, wide, clip, True)
    inputs = [
        Buffer(a, slot, writable=False)
        for a, slot in ((ordered, INDICES), (order, ORDER), (source, X))
    ]
    add(host, architecture, name, [*inputs, Buffer(y, Y)], dims)
    np.testing.assert_array_equal(y.view(np.uint8), want.astype(element).view(np.uint8))


@pytest.mark.parametrize("name", ATOMIC)
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_index_add_atomically(host, view, name, architecture):
    batch, outer, extent, count, inner = view
    index, rows, inside = indices(view, False, False)
    rng = np.random.default_rng(1)
    y = rng.integers(-99, 99, (batch, outer, extent, inner)).astype(name)
    source = rng.integers(-99, 99, (batch, outer, count, inner)).astype(name)
    want = y.copy()
    for b in range(batch):
        for i in np.flatnonzero(inside[b]):
            want[b][:, rows[b, i]] += source[b][:, i]
    dims = int64s(*view, y.itemsize, False, False, True)
    inputs = [
        Buffer(index, INDICES, writable=False),
        None,
        Buffer(source, X, writable=False),
    ]
    add(host, architecture, name, [*inputs, Buffer(y, Y)], dims)
    np.testing.assert_array_equal(y, want)


class Elements:
    """Small integers of a type, at any offset."""

    def __init__(self, dtype, factor):
        self.dtype, self.factor = np.dtype(dtype), factor

    def at(self, element):
        return (element * self.factor >> 7) % 31

    def __call__(self, offset):
        values = self.at(offset // self.dtype.itemsize).astype(self.dtype)
        raw = values[..., None].view(np.uint8)
        return np.take_along_axis(raw, (offset % self.dtype.itemsize)[..., None], -1)[
            ..., 0
        ]


def huge(unit):
    """batch, outer, extent, count, bytes of a row: more than 2^31 units."""
    row = 3 * unit if unit < 16 else 48
    return 1, -(-(1 << 31) // (3 * 64)) + 5, 40, 64, row


def check(view, got, want):
    """A callback for stores of elements, whose offsets it takes apart."""
    batch, outer, rows, inner, dtype = view

    def store(at, raw):
        values = np.ascontiguousarray(raw).view(dtype)
        element = at[:, :: dtype.itemsize] // dtype.itemsize
        column, row = element % inner, element // inner % rows
        slices = element // inner // rows
        np.testing.assert_array_equal(values.astype("f8"), want(slices, row, column))
        got.append(at.size)

    return store


SOME = 6


def some(blocks):
    return {0, blocks - 1, *np.random.default_rng(0).integers(0, blocks, SOME).tolist()}


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_index_select_beyond_32_bits(host, unit, architecture):
    batch, outer, extent, count, row = huge(unit)
    index = np.random.default_rng(0).integers(-extent, extent, count).astype(np.int32)
    x, got = Elements(np.uint8, 40503), []

    def want(slices, i, column):
        return x.at((slices * extent + index[i] % extent) * row + column).astype("f8")

    memory = [
        Virtual(outer * extent * row, X, x),
        Buffer(index, INDICES, writable=False),
        Virtual(
            outer * count * row,
            Y,
            store=check((1, outer, count, row, np.dtype("u1")), got, want),
        ),
    ]
    at = [ctypes.c_void_p(m.address) for m in memory]
    fill = np.zeros(1, np.uint8).ctypes.data_as(ctypes.c_void_p)
    dims = int64s(batch, outer, extent, count, row, 1, False, False, True)
    (launch,) = host.launches("index_select", at[0], at[1], fill, at[2], dims, 0)
    run(INDEX, architecture, [launch], memory, blocks=some(launch[1]))
    assert got


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "atomic"])
@pytest.mark.parametrize("name", SUMS)
def test_index_add_beyond_32_bits(host, name, sort, unit, architecture):
    element = dtype_of(name)
    if (
        unit < element.itemsize
        or not sort
        and (name not in ATOMIC or unit > element.itemsize)
    ):
        pytest.skip("there is no such kernel")
    batch, outer, extent, count, row = huge(unit)
    extent = 100
    inner = row // element.itemsize
    rng = np.random.default_rng(0)
    if sort:
        unsorted = rng.integers(0, extent, count)
        order = np.argsort(unsorted, kind="stable").astype(np.int32)
        index = unsorted[order].astype(np.int32)
    else:
        order = np.arange(count, dtype=np.int32)
        index = rng.permutation(extent)[:count].astype(np.int32)
    y, source, got = Elements(element, 40503), Elements(element, 30011), []

    def want(slices, r, column):
        total = y.at((slices * extent + r) * inner + column)
        for i in range(count):
            total = total + np.where(
                index[i] == r,
                source.at((slices * count + order[i]) * inner + column),
                0,
            )
        return (
            total.astype(np.uint8 if name == "int8" else "f8")
            .astype("i1" if name == "int8" else "f8")
            .astype("f8")
        )

    memory = [
        Buffer(index, INDICES, writable=False),
        Buffer(order, ORDER, writable=False) if sort else None,
        Virtual(outer * count * row, X, source),
        Virtual(
            outer * extent * row,
            Y,
            y,
            check((1, outer, extent, inner, element), got, want),
        ),
    ]
    at = [ctypes.c_void_p(m.address) if m else None for m in memory]
    dims = int64s(
        batch, outer, extent, count, inner, element.itemsize, False, False, True
    )
    (launch,) = host.launches("index_add", *at, SUMS.index(name), dims, 0)
    run(INDEX, architecture, [launch], [m for m in memory if m], blocks=some(launch[1]))
    assert got


@pytest.mark.parametrize("source", [PERMUTE, INDEX])
def test_every_kernel_ran(source, architecture, request):
    """After all tests above."""
    if request.session.testscollected < 400:
        pytest.skip("only some tests run")
    left = set(toolkit.kernels(source, architecture)) - {
        k for s, a, k in ran if (s, a) == (source, architecture)
    }
    assert left == set()
