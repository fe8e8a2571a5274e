# SPDX-License-Identifier: Apache-2.0
"""The CUDA permute and index kernels, compiled for the host and run thread by thread.

Needs g++ and cmake, no GPU. The sanitized build runs this file once more in a
subprocess (test_everything_again_with_sanitizers).
"""

import ctypes
import itertools
import math
import os
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native import check_sanitized, cuda_emulation, run_sanitized

SANITIZED = bool(os.environ.get("JAX_LAYOUT_EMULATION_SANITIZED"))
FORWARD, REVERSED = 0, 1  # thread orders; others seed a shuffle
POISON = 0xCB
ITEMSIZES = (1, 2, 4, 8, 16)


class Emulation:
    """The library's functions; each returns "" or what went wrong."""

    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))

    def _call(self, name, *arguments) -> str:
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        return function(*arguments).decode()

    @staticmethod
    def _dims(shape, axes):
        array = ctypes.c_int64 * len(shape)
        return array(*shape), array(*axes), len(shape)

    def family(self, shape, axes, itemsize, alignment=16) -> str:
        return self._call(
            "permute_family",
            *self._dims(shape, axes),
            ctypes.c_int64(itemsize),
            alignment,
        )

    def permute(self, x, y, shape, axes, itemsize, order) -> str:
        return self._call(
            "permute",
            ctypes.c_void_p(x),
            ctypes.c_void_p(y),
            *self._dims(shape, axes),
            ctypes.c_int64(itemsize),
            order,
        )

    def permute_virtual(self, shape, axes, itemsize, alignment=16, samples=12) -> str:
        return self._call(
            "permute_virtual",
            *self._dims(shape, axes),
            ctypes.c_int64(itemsize),
            alignment,
            samples,
        )

    def fast_division(self, bits, divisor, n) -> str:
        return self._call(
            "fast_division", bits, ctypes.c_uint64(divisor), ctypes.c_uint64(n)
        )

    def planted(self, defect, y, order=FORWARD) -> str:
        return self._call("planted", defect.encode(), ctypes.c_void_p(y), order)


@pytest.fixture(scope="session")
def emulation():
    return Emulation(cuda_emulation(SANITIZED))


class Buffer:
    """`size` bytes at an address that is `offset` modulo 64, guarded.

    Under the sanitizer the allocation ends with the last byte; otherwise both
    ends carry a guard.
    """

    _libc = ctypes.CDLL(None)
    _libc.free.argtypes = [ctypes.c_void_p]

    def __init__(self, size, offset=0):
        self._before = 64 + offset
        self._after = 0 if SANITIZED else 64
        total = self._before + size + self._after
        base = ctypes.c_void_p()
        assert (
            self._libc.posix_memalign(
                ctypes.byref(base), ctypes.c_size_t(64), ctypes.c_size_t(total)
            )
            == 0
        )
        self._base = base.value
        self.address = self._base + self._before
        self._all = np.frombuffer(
            (ctypes.c_ubyte * total).from_address(self._base), np.uint8
        )
        self._all[:] = POISON
        self.bytes = self._all[self._before : self._before + size]

    def guards_untouched(self):
        after = self._all[self._before + self.bytes.size :]
        return (self._all[: self._before] == POISON).all() and (after == POISON).all()

    def free(self):
        self._libc.free(self._base)


# An output byte equal to the poison could hide a byte that was never written,
# so the input avoids it.
_RANDOM = np.random.default_rng(0).integers(0, 255, 9 << 20, np.uint8)
_RANDOM[_RANDOM >= POISON] += 1


def check(emulation, shape, axes, itemsize, order=FORWARD, offsets=(0, 0)):
    size = math.prod(shape) * itemsize
    x, y = Buffer(size, offsets[0]), Buffer(size, offsets[1])
    try:
        start = size % 61
        x.bytes[:] = _RANDOM[start : start + size]
        error = emulation.permute(x.address, y.address, shape, axes, itemsize, order)
        family = emulation.family(shape, axes, itemsize)
        what = f"{shape} {axes} of {itemsize} bytes, {family}"
        assert not error, f"{what}: {error}"
        # A view of bytes as items of itemsize: exact whatever the bits mean.
        items = x.bytes.view(f"V{itemsize}").reshape(shape)
        want = np.ascontiguousarray(items.transpose(axes)).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(y.bytes, want, err_msg=what)
        assert x.guards_untouched() and y.guards_untouched(), what
    finally:
        x.free()
        y.free()


# -- the emulation is to be trusted -------------------------------------------


@pytest.mark.parametrize("order", [FORWARD, REVERSED, 2, 3])
def test_emulation_shows_a_missing_barrier(emulation, order):
    y = Buffer(64)
    want = np.arange(63, -1, -1, dtype=np.uint8)
    assert emulation.planted("none", y.address, order) == ""
    np.testing.assert_array_equal(y.bytes, want)
    assert emulation.planted("race", y.address, order) == ""
    assert (y.bytes != want).any()
    y.free()


@pytest.mark.parametrize(
    "defect, message",
    [
        ("bounds", "store of 1 bytes out of bounds at offset 64 .*thread 63"),
        ("alignment", "misaligned store of 4 bytes at offset 2 .*thread 1"),
        ("divergence", "different barriers"),
        ("exit", "not reached by all threads"),
    ],
)
def test_emulation_reports(emulation, defect, message):
    y = Buffer(64)
    assert re.search(message, emulation.planted(defect, y.address))
    y.free()


@pytest.mark.skipif(SANITIZED, reason="the sanitizer ends the process there")
def test_guards_show_a_stray_write(emulation):
    y = Buffer(64)
    assert emulation.planted("write", y.address) == ""
    assert not y.guards_untouched()
    y.free()


# -- which kernel -------------------------------------------------------------

CHOICES = [
    # family and unit, shape, axes, itemsize
    ("copy 16", (1000, 1000), (0, 1), 4),
    ("copy 16", (4, 1, 8), (1, 0, 2), 2),
    ("rows 16", (8, 2048, 16, 64), (0, 2, 1, 3), 2),  # attention
    ("rows 16", (2, 2048, 3, 16, 64), (2, 0, 3, 1, 4), 2),  # QKV split
    ("rows 16", (1024, 128, 128), (1, 0, 2), 4),
    ("rows 16", (8, 128, 16, 32), (0, 2, 1, 3), 2),  # 64 bytes
    ("rows 4", (64, 48, 33), (1, 0, 2), 4),  # 132 bytes
    ("tile 16 16 16 32", (4096, 1024, 4), (1, 0, 2), 4),  # the chunk is a vector
    ("packed 16", (256, 256, 8), (1, 0, 2), 4),  # 32 bytes: boxes of vectors
    ("packed 1", (4096, 4096, 3), (1, 0, 2), 1),
    ("packed 3", (4095, 4097, 3), (1, 0, 2), 1),  # rows begin anywhere
    ("packed 6", (4095, 4097, 3), (1, 0, 2), 2),
    ("packed 4", (256, 256, 3), (1, 0, 2), 4),
    ("tile 4 16 16 32", (2048, 2048), (1, 0), 4),  # few
    ("tile 4 16 16 64", (16, 1024, 1024), (0, 2, 1), 4),
    ("tile 2 16 16 64", (32, 1024, 1024), (0, 2, 1), 2),
    ("tile 1 16 16 128", (64, 1024, 1024), (0, 2, 1), 1),
    ("tile 8 16 16 32", (16, 512, 512), (0, 2, 1), 8),
    ("tile 4 4 4 64", (7, 1531, 1789), (0, 2, 1), 4),
    ("tile 2 4 4 64", (8, 1022, 1026), (0, 2, 1), 2),
    ("tile 1 4 4 128", (8, 1020, 1028), (0, 2, 1), 1),
    ("tile 2 2 16 64", (32, 256, 49), (0, 2, 1), 2),  # 7x7 to NHWC
    ("tile 2 16 4 64", (32, 196, 256), (0, 2, 1), 2),  # 14x14 to NCHW
    ("tile 4 16 16 64", (256, 256, 256), (2, 1, 0), 4),
    ("tile 2 16 16 64", (8, 2048, 16, 64), (0, 2, 3, 1), 2),  # K^T
    ("tile 4 16 16 64", (32, 64, 112, 112), (0, 2, 3, 1), 4),  # to NHWC
    ("tile 4 16 16 64", (32, 112, 112, 64), (0, 3, 1, 2), 4),  # to NCHW
    ("tile 4 16 16 32", (256, 256), (1, 0), 4),  # small
    ("packed 4", (64, 3, 224, 224), (0, 2, 3, 1), 4),  # RGB
    ("packed 1", (256, 224, 224, 3), (0, 3, 1, 2), 1),
    ("packed 4", (16,) * 6, (5, 4, 3, 2, 1, 0), 4),
    ("packed 2", (15, 16, 17, 16, 15, 16), (5, 4, 3, 2, 1, 0), 2),
    ("packed 4", (5, 3, 2, 4, 35, 33, 37, 40), tuple(range(7, -1, -1)), 4),
    ("rows64 16", (1 << 20, 1 << 20, 8), (1, 0, 2), 8),
]


@pytest.mark.parametrize("family, shape, axes, itemsize", CHOICES)
def test_choice(emulation, family, shape, axes, itemsize):
    assert (emulation.family(shape, axes, itemsize) + " ").startswith(family + " ")


@pytest.mark.parametrize(
    "shape, axes, itemsize, run, box",
    [
        ((64, 3, 224, 224), (0, 2, 3, 1), 4, 2048, 6 << 10),
        ((256, 224, 224, 3), (0, 3, 1, 2), 1, 2016, 6048),
        ((16,) * 6, (5, 4, 3, 2, 1, 0), 4, 128, 8 << 10),
        ((256, 256, 8), (1, 0, 2), 4, 256, 4 << 10),
        ((4096, 4096, 3), (1, 0, 2), 1, 60, 4 << 10),
    ],
)
def test_packed_makes_long_runs_of_vectors(emulation, shape, axes, itemsize, run, box):
    family, _, x_vector, y_vector, x_run, y_run, size, _ = emulation.family(
        shape, axes, itemsize
    ).split()
    assert family == "packed"
    assert (x_vector, y_vector) == ("16", "16")
    assert int(x_run) >= run and int(y_run) >= run or "3" in str(shape)
    assert int(size) >= box


REVERSED_BYTES = [
    # shape, accesses of x and of y, threads
    ((5, 3, 2, 4, 35, 33, 37, 40), "8 4", 256),  # in patches
    ((5, 3, 2, 4, 5, 9, 37, 40), "8 4", 256),
    ((5, 3, 2, 4, 7, 7, 37, 41), "1 4", 512),
    ((48, 17, 101, 3, 32), "16 4", 256),
    ((5, 3, 2, 4, 35, 3, 5, 40), "4 4", 192),  # few boxes
    ((3, 16, 7, 11, 13, 5, 48), "16 16", 192),  # whole sectors as it is
]


@pytest.mark.parametrize("shape, vectors, threads", REVERSED_BYTES)
def test_short_runs_of_bytes_take_large_boxes(emulation, shape, vectors, threads):
    axes = tuple(reversed(range(len(shape))))
    said = emulation.family(shape, axes, 1).split()
    assert " ".join(said[2:4]) == vectors
    assert int(said[-1]) == threads
    assert (int(said[-2]) > 6 << 10) == (threads > 192)


# -- what it computes ---------------------------------------------------------

FAMILY_CASES = [
    ((1,), (0,)),
    ((2, 0, 3), (2, 1, 0)),
    ((), ()),
    ((1031,), (0,)),
    ((16, 16), (1, 0)),
    ((31, 33), (1, 0)),
    ((32, 32), (1, 0)),
    ((128, 128), (1, 0)),
    ((129, 127), (1, 0)),
    ((64, 192), (1, 0)),
    ((132, 140), (1, 0)),
    ((96, 97), (1, 0)),
    ((97, 96), (1, 0)),
    ((96, 100), (1, 0)),
    ((2, 34, 66), (0, 2, 1)),
    ((2, 3, 96, 64), (1, 3, 0, 2)),
    ((40, 3, 48), (2, 1, 0)),
    ((37, 53, 5), (2, 1, 0)),
    ((3, 640), (1, 0)),
    ((640, 3), (1, 0)),
    ((2, 4, 515), (0, 2, 1)),
    ((5, 7, 16), (1, 0, 2)),
    ((5, 7, 160), (1, 0, 2)),
    ((5, 37, 3), (1, 0, 2)),
    ((40, 36, 2), (1, 0, 2)),
    ((33, 31, 6), (1, 0, 2)),
    ((3, 5, 7, 67), (2, 1, 0, 3)),
    ((2, 3, 700), (1, 0, 2)),
    ((4, 4, 4, 4, 4, 4), (5, 4, 3, 2, 1, 0)),
    ((5, 3, 2, 4, 3, 7, 2, 3), (7, 6, 5, 4, 3, 2, 1, 0)),
    ((2,) * 12, tuple(range(11, -1, -1))),
    ((2, 1) * 6 + (2,) * 6, tuple(range(17, -1, -1))),
    (
        (1, 2) * 8 + (3, 2),
        (17, 1, 16, 3, 5, 13, 0, 2, 7, 4, 9, 6, 15, 8, 11, 10, 12, 14),
    ),
]


@pytest.mark.parametrize("order", [FORWARD, REVERSED, 7])
@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("shape, axes", FAMILY_CASES)
def test_permute(emulation, shape, axes, itemsize, order):
    check(emulation, shape, axes, itemsize, order)


# Large enough for the kernels of large arrays, and for blocks of many tiles.
@pytest.mark.parametrize(
    "shape, axes, itemsize",
    [
        ((1100, 1101), (0, 1), 1),
        ((520, 520), (1, 0), 4),
        ((517, 519), (1, 0), 4),
        ((1, 264, 260, 16), (0, 2, 1, 3), 1),
        ((260, 68, 68), (0, 2, 1), 1),
        ((3, 420000), (1, 0), 1),
        ((210000, 3), (1, 0), 2),
        ((3, 1700000), (1, 0), 1),  # more boxes than blocks
        ((2, 600, 3, 300), (2, 0, 3, 1), 1),
        ((300, 300, 6), (1, 0, 2), 2),
        ((40, 33, 200), (1, 0, 2), 4),
        ((16,) * 5, (4, 3, 2, 1, 0), 1),
    ],
)
def test_permute_large(emulation, shape, axes, itemsize):
    assert math.prod(shape) * itemsize >= 1 << 20
    check(emulation, shape, axes, itemsize, order=5)


# Under sanitizers, where these take longest, pointers that nothing divides.
@pytest.mark.parametrize("offsets", [(1, 3)] if SANITIZED else [(0, 0), (1, 3), (4, 8)])
@pytest.mark.parametrize("shape", [s for s, _, t in REVERSED_BYTES[1:] if t > 192])
def test_permute_in_large_blocks(emulation, shape, offsets):
    check(emulation, shape, tuple(reversed(range(len(shape)))), 1, 5, offsets)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))))
def test_permute_all_axes(emulation, axes, itemsize):
    check(emulation, (3, 8, 5, 33), axes, itemsize)
    check(emulation, (2, 33, 4, 34), axes, itemsize, REVERSED)


@pytest.mark.parametrize(
    "extents", list(itertools.product((0, 1, 2, 31, 32, 33, 67), repeat=2))
)
def test_permute_edges(emulation, extents):
    for itemsize in ITEMSIZES:
        check(emulation, extents, (1, 0), itemsize)
        check(emulation, (2, extents[0], 3, extents[1]), (3, 0, 2, 1), itemsize)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize(
    "shape, axes",
    [
        ((1031,), (0,)),
        ((64, 128), (1, 0)),
        ((65, 3), (1, 0)),
        ((9, 5, 96), (1, 0, 2)),
        ((9, 12, 4), (1, 0, 2)),
        ((4,) * 5, (4, 3, 2, 1, 0)),
    ],
)
def test_permute_misaligned(emulation, shape, axes, itemsize):
    # Only itemsize is guaranteed, and 8 bytes of a complex128.
    step = min(itemsize, 8)
    for offsets in [(step, 0), (0, step), (step, step), (3 * step, 2 * step), (8, 8)]:
        check(emulation, shape, axes, itemsize, offsets=offsets)


@st.composite
def _permutes(draw):
    rank = draw(st.integers(0, 8))
    shape, size = [], 1
    for _ in range(rank):
        extent = draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 40, 64)))
        if size * extent > 6000:
            extent = 1
        shape.append(extent)
        size *= extent
    axes = draw(st.permutations(range(rank)))
    itemsize = draw(st.sampled_from(ITEMSIZES))
    step = min(itemsize, 8)
    offsets = draw(st.tuples(*[st.sampled_from((0, 0, step, 2 * step, 8))] * 2))
    return tuple(shape), tuple(axes), itemsize, draw(st.integers(0, 9)), offsets


@settings(
    max_examples=100 if SANITIZED else 300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(_permutes())
def test_permute_generated(emulation, case):
    check(emulation, *case)


# -- index_select and index_add ------------------------------------------------

SUM_TYPES = {
    name: number
    for number, name in enumerate(
        "float32 float64 bfloat16 float16 int8 int16 int32 int64".split()
    )
}
INDEX_VIEWS = [
    # batch, outer, extent, count, inner
    (1, 1, 50, 70, 32),
    (1, 3, 7, 5, 1),
    (1, 1, 300, 1000, 1),
    (2, 3, 5, 7, 6),
    (3, 1, 4, 9, 16),
    (1, 2, 1, 3, 33),
    (1, 40, 9, 11, 1),
    (2, 5, 33, 4, 12),
]


class Arrays:
    """NumPy arrays in guarded memory."""

    def __init__(self, *arrays):
        self._buffers = []
        for x in arrays:
            buffer = Buffer(x.nbytes)
            buffer.bytes[:] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            self._buffers.append(buffer)

    @property
    def addresses(self):
        return [ctypes.c_void_p(b.address) for b in self._buffers]

    def take(self, i, like):
        y = self._buffers[i].bytes.view(like.dtype).reshape(like.shape).copy()
        assert all(b.guards_untouched() for b in self._buffers)
        for b in self._buffers:
            b.free()
        return y


def index_case(view, wide, clip, itemsize, wrap=True):
    batch, outer, extent, count, inner = view
    rng = np.random.default_rng(count)
    index = rng.integers(-extent - 2, extent + 2, (batch, count))
    index = index.astype(np.int64 if wide else np.int32)
    rows = np.where((index < 0) & wrap, index + extent, index)
    inside = (rows >= 0) & (rows < extent)
    if clip:
        rows, inside = np.clip(rows, 0, extent - 1), np.ones_like(inside)
    dims = (ctypes.c_int64 * 9)(*view, itemsize, wide, clip, wrap)
    return index, rows, inside, dims


@pytest.mark.parametrize("order", [FORWARD, REVERSED, 5])
@pytest.mark.parametrize(
    "wide, clip, wrap",
    [(False, False, True), (True, True, True), (True, False, False)],
)
@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("view", INDEX_VIEWS)
def test_index_select(emulation, view, itemsize, wide, clip, wrap, order):
    batch, outer, extent, count, inner = view
    index, rows, inside, dims = index_case(view, wide, clip, itemsize, wrap)
    size = batch * outer * extent * inner * itemsize
    x = _RANDOM[:size].view(f"V{itemsize}").reshape(batch, outer, extent, inner)
    fill = np.arange(itemsize, dtype=np.uint8)
    want = np.empty((batch, outer, count, inner), x.dtype)
    for b in range(batch):
        want[b] = x[b][:, np.where(inside[b], rows[b], 0)]
        want[b][:, ~inside[b]] = fill.view(x.dtype)[0]
    arrays = Arrays(x, index, fill, np.empty_like(want))
    assert emulation._call("index_select", *arrays.addresses, dims, order) == ""
    got = arrays.take(3, want)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("order", [FORWARD, REVERSED, 5])
@pytest.mark.parametrize("wide, clip", [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", SUM_TYPES)
@pytest.mark.parametrize("view", INDEX_VIEWS)
def test_index_add(emulation, view, dtype, wide, clip, order):
    """Bit for bit: rows meet in their order, 16 bits in float32, rounded once."""
    batch, outer, extent, count, inner = view
    element = np.dtype(dtype) if dtype != "bfloat16" else ml_dtypes.bfloat16
    index, rows, inside, dims = index_case(view, wide, clip, np.dtype(element).itemsize)
    rng = np.random.default_rng(1)
    y = (30 * rng.standard_normal((batch, outer, extent, inner))).astype(element)
    source = (30 * rng.standard_normal((batch, outer, count, inner))).astype(element)
    sums = np.float32 if np.dtype(element).itemsize == 2 and "f" in dtype else element
    want = y.astype(sums)
    for b, i in itertools.product(range(batch), range(count)):
        if inside[b, i]:
            want[b][:, rows[b, i]] += source[b][:, i].astype(sums)
    want = want.astype(element)

    key = np.where(inside, rows, extent)
    places = np.argsort(key, axis=1, kind="stable").astype(np.int32)
    ordered = np.take_along_axis(key, places, 1).astype(index.dtype)
    arrays = Arrays(ordered, places, source, y)
    number = SUM_TYPES[dtype]
    error = emulation._call("index_add", *arrays.addresses, number, dims, order)
    assert error == ""
    got = arrays.take(3, want)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("view", INDEX_VIEWS)
def test_index_add_atomically(emulation, view, dtype):
    batch, outer, extent, count, inner = view
    index, rows, inside, dims = index_case(view, False, False, np.dtype(dtype).itemsize)
    rng = np.random.default_rng(1)
    y = rng.integers(-99, 99, (batch, outer, extent, inner)).astype(dtype)
    source = rng.integers(-99, 99, (batch, outer, count, inner)).astype(dtype)
    want = y.copy()
    for b, i in itertools.product(range(batch), range(count)):
        if inside[b, i]:
            want[b][:, rows[b, i]] += source[b][:, i]
    arrays = Arrays(index, source, y)
    at = arrays.addresses
    number = SUM_TYPES[dtype]
    error = emulation._call("index_add", at[0], None, *at[1:], number, dims, 3)
    assert error == ""
    np.testing.assert_array_equal(arrays.take(2, want), want)


def test_index_add_atomically_in_16_bits_is_an_error(emulation):
    _, _, _, dims = index_case((1, 1, 4, 4, 4), False, False, 2)
    arrays = Arrays(*[np.zeros(16, np.int32)] * 3)
    at = arrays.addresses
    number = SUM_TYPES["bfloat16"]
    error = emulation._call("index_add", at[0], None, *at[1:], number, dims, 0)
    assert "no atomic sum" in error
    arrays.take(0, np.zeros(16, np.int32))


def test_float16_bits(emulation):
    """Every half, and halves between neighbours, by way of index_add."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    for element in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        source = bits.view(element)
        finite = source[np.isfinite(source.astype(np.float32))]
        y = np.roll(finite, 12345)
        dims = (ctypes.c_int64 * 9)(1, 1, 1, 1, finite.size, 2, False, False, True)
        one = np.zeros(1, np.int32)
        arrays = Arrays(one, one, finite, y)
        number = SUM_TYPES[element.name]
        assert emulation._call("index_add", *arrays.addresses, number, dims, 0) == ""
        with np.errstate(over="ignore"):
            want = (finite.astype(np.float32) + y.astype(np.float32)).astype(element)
        got = arrays.take(3, want)
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


# -- beyond 2^31 --------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, axes, itemsize",
    [
        ((1 << 33,), (0,), 1),
        ((70000, 70000), (1, 0), 1),
        ((70000, 70000), (1, 0), 4),
        ((1 << 17, 1 << 18), (1, 0), 2),
        ((3, 1 << 33), (1, 0), 1),
        (((1 << 33) + 1, 3), (1, 0), 2),
        ((1 << 18, 5, 1 << 17), (2, 1, 0), 8),
        ((50000, 50000, 3), (1, 0, 2), 4),
        ((1 << 16, 1 << 16, 8), (1, 0, 2), 8),  # more rows than 32 bits count
        ((40000, 3, 64, 1000), (2, 0, 1, 3), 4),
        ((100003, 100019, 3), (1, 0, 2), 2),
        ((2,) * 36, tuple(range(35, -1, -1)), 1),
        ((3, 5) * 8, tuple(range(15, -1, -1)), 2),
        ((2,) * 40, (*range(20, 40), *range(20)), 1),
    ],
)
def test_permute_virtual(emulation, shape, axes, itemsize):
    assert emulation.permute_virtual(shape, axes, itemsize) == ""
    assert (
        emulation.permute_virtual(shape, axes, itemsize, alignment=min(itemsize, 8))
        == ""
    )


def test_permute_too_large_is_an_error(emulation):
    shape, axes = (2,) * 62, tuple(range(61, -1, -1))
    assert "too large for one launch" in emulation.permute_virtual(shape, axes, 1)


def test_fast_division(emulation):
    divisors = {1, 2, 3, 5, 7, 10, 31, 641, 6700417, (1 << 30) + 1}
    for bits in (32, 64):
        top = 1 << (bits - 1)
        powers = {(1 << k) + e for k in range(bits - 1) for e in (-1, 0, 1)}
        for d in sorted((divisors | powers | {top - 1}) - {0}):
            numerators = {0, 1, d - 1, d, d + 1, 2 * d - 1, top - 1, (top - 1) // d * d}
            numerators |= {(top - 1) // d * d - 1, top // 3, top - 2}
            for n in numerators:
                if 0 <= n < top:
                    assert emulation.fast_division(bits, d, n) == ""


# -- once more, with sanitizers -----------------------------------------------


@pytest.mark.skipif(SANITIZED, reason="this is that run")
def test_everything_again_with_sanitizers():
    cuda_emulation(sanitized=True)
    arguments = "-m pytest -q -x -s --noconftest -p no:cacheprovider -p no:xdist"
    check_sanitized(*arguments.split(), __file__, JAX_LAYOUT_EMULATION_SANITIZED="1")


@pytest.mark.skipif(SANITIZED, reason="started from the other run")
def test_sanitizer_shows_a_stray_write():
    library = cuda_emulation(sanitized=True)
    done = run_sanitized(
        "-c",
        f"""
import ctypes
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
ctypes.CDLL({str(library)!r}).planted(b"write", ctypes.c_void_p(malloc(64)), 0)
""",
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
