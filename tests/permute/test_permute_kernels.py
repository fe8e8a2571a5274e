# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels without JAX, exactly, for every instruction set."""

import ctypes
import itertools
import mmap
import os
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from native import check_sanitized, compile_library, compile_sanitized, sources

SOURCES = sources("cpu/permute/*.cc", "cpu/isa.cc", "tests/permute/kernels/*.cc")
ISAS = ("portable", "avx2", "avx512")
DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
EXTENTS = (1, 2, 3, 4, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97)
GUARD = 0xA5


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return ctypes.CDLL(
        str(compile_library(tmp_path_factory.mktemp("kernels"), SOURCES))
    )


@pytest.fixture(params=range(len(ISAS)), ids=ISAS)
def permute(request, library):
    """A function (x, axes, ...) -> y in one instruction set."""
    if request.param > library.BestIsa():
        pytest.skip(f"no {ISAS[request.param]} here")

    def call(x, axes, **kwargs):
        return run(library, request.param, x, axes, **kwargs)

    return call


def int64s(values):
    return (ctypes.c_int64 * len(values))(*values)


def run(library, isa, x, axes, threads=2, run_inline=False, offset=0):
    """Permutes between buffers at `offset` items from a line, with guards."""
    size, itemsize = x.nbytes, x.itemsize
    source = np.empty(size + 128, np.uint8)
    result = np.full(size + 256, GUARD, np.uint8)
    start = -source.ctypes.data % 64 + offset * itemsize
    end = start + size
    source[start:end] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    first = -result.ctypes.data % 64 + 64 + offset * itemsize
    last = first + size
    # A byte that is not written keeps a value that x does not have there.
    shape = [x.shape[a] for a in axes]
    want = np.ascontiguousarray(np.transpose(x, axes)).reshape(-1).view(np.uint8)
    result[first:last] = ~want
    assert (
        library.Permute(
            x.ndim,
            int64s(x.shape),
            int64s(axes),
            ctypes.c_int64(itemsize),
            isa,
            threads,
            run_inline,
            ctypes.c_void_p(source.ctypes.data + start),
            ctypes.c_void_p(result.ctypes.data + first),
        )
        == 0
    )
    assert (result[:first] == GUARD).all() and (result[last:] == GUARD).all()
    return result[first:last].view(x.dtype).reshape(shape)


def random_array(shape, itemsize, seed=0):
    size = int(np.prod(shape)) * itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return data.view(DTYPES[itemsize]).reshape(shape)


def check(permute, x, axes, **kwargs):
    y = permute(x, axes, **kwargs)
    want = np.ascontiguousarray(np.transpose(x, axes))
    assert y.tobytes() == want.tobytes()


@pytest.mark.parametrize("itemsize", DTYPES)
def test_matrices(permute, itemsize):
    for shape in itertools.product(EXTENTS, EXTENTS):
        check(permute, random_array(shape, itemsize), (1, 0))


@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize(
    "shape", [(5, 3, 17, 33), (2, 65, 4, 7), (16, 16, 16, 16), (33, 1, 31, 3)], ids=str
)
def test_all_orders_of_four_axes(permute, shape, itemsize):
    for axes in itertools.permutations(range(4)):
        check(permute, random_array(shape, itemsize), axes)


@pytest.mark.parametrize(
    "chunk",
    [3, 5, 6, 7, 9, 12, 15, 17, 24, 31, 32, 48, 63, 64, 65, 100, 128, 256, 1000, 70000],
)
def test_kept_tails(permute, chunk):
    for shape in [(2, 3), (17, 5), (33, 66)]:
        if chunk * shape[0] * shape[1] < 1 << 21:
            check(permute, random_array((*shape, chunk), 1), (1, 0, 2))


@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize("channels", [2, 3, 4, 5, 8, 13, 24])
def test_planes_and_pixels(permute, channels, itemsize):
    for pixels in (1, 3, 31, 64, 1000, 4097):
        check(permute, random_array((3, pixels, channels), itemsize), (0, 2, 1))
        check(permute, random_array((3, channels, pixels), itemsize), (0, 2, 1))


@pytest.mark.parametrize(
    "shape, axes",
    [
        ((), ()),
        ((0,), (0,)),
        ((3, 0, 2), (2, 1, 0)),
        ((1, 1), (1, 0)),
        ((1000003,), (0,)),
        ((3, 2, 50, 4), (2, 0, 3, 1)),
        ((5, 3, 2, 4, 7, 3, 2, 5), (7, 6, 5, 4, 3, 2, 1, 0)),
        ((2,) * 17, tuple(range(16, -1, -1))),
        ((2,) * 18, (*range(1, 18, 2), *range(0, 18, 2))),
    ],
    ids=str,
)
def test_ranks(permute, shape, axes):
    for itemsize in (1, 4):
        check(permute, random_array(shape, itemsize), axes)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_buffers_aligned_to_items_only(permute, offset):
    for itemsize, shape in itertools.product(
        DTYPES, [(64, 65), (128, 128), (40, 3), (3, 40)]
    ):
        check(permute, random_array(shape, itemsize), (1, 0), offset=offset)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize("column", [1024, 2048, 4096, 14336])
def test_columns_that_share_sets_of_a_cache(permute, column, itemsize, offset):
    """They leave a stage; whole columns and parts, of one axis of y and of two."""
    rows = column // itemsize
    for cols in (20, 70, 530):
        check(permute, random_array((rows, cols), itemsize), (1, 0), offset=offset)
    for shape, axes in [((rows // 16, 16, 70), (2, 0, 1)), ((rows, 3, 40), (2, 1, 0))]:
        check(permute, random_array(shape, itemsize), axes, offset=offset)


# Past the sizes that take non-temporal stores and huge pages.
@pytest.mark.parametrize(
    "shape, axes, itemsize",
    [
        ((2048, 2048), (1, 0), 4),
        ((2039, 2053), (1, 0), 4),
        ((4099, 4111), (1, 0), 1),
        ((2500, 2500, 3), (1, 0, 2), 1),
        ((1500, 1500, 2, 3), (1, 0, 2, 3), 1),
        ((2400, 2401, 3), (2, 0, 1), 1),
        ((3, 2400, 2401), (1, 2, 0), 1),
        ((24, 1024, 8, 64), (0, 2, 1, 3), 2),
        ((15, 16, 17, 16, 15, 16), (5, 4, 3, 2, 1, 0), 1),
        ((5000, 5001), (0, 1), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("offset", [0, 1])
def test_large_results(permute, shape, axes, itemsize, offset):
    check(permute, random_array(shape, itemsize), axes, threads=3, offset=offset)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("run_inline", [False, True])
def test_executors(permute, threads, run_inline):
    check(
        permute,
        random_array((700, 900), 4),
        (1, 0),
        threads=threads,
        run_inline=run_inline,
    )


@hypothesis.settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=st.data())
def test_anything(permute, data):
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    while np.prod(shape) > 1 << 18:
        shape[int(np.argmax(shape))] //= 2
    axes = data.draw(st.permutations(range(len(shape))))
    itemsize = data.draw(st.sampled_from(list(DTYPES)))
    check(
        permute,
        random_array(shape, itemsize),
        axes,
        offset=data.draw(st.integers(0, 3)),
    )


def check_under_sanitizers(path):
    """Runs, in a process with AddressSanitizer, on buffers of the exact size."""
    library = ctypes.CDLL(path)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    rng = np.random.default_rng(0)
    for isa, trial in itertools.product(range(library.BestIsa() + 1), range(300)):
        rank = int(rng.integers(1, 6))
        itemsize = int(rng.choice(list(DTYPES)))
        shape = rng.choice([1, 2, 3, 4, 7, 16, 17, 33, 65], rank)
        while shape.prod() > 1 << 16:
            shape[shape.argmax()] = 2
        if trial < 2:  # a stage, or streamed tiles
            shape, itemsize = np.array([1801 - trial * 9, 1808]), 4
        axes = rng.permutation(len(shape))
        x = random_array(shape, itemsize)
        source, result = (libc.malloc(ctypes.c_size_t(x.nbytes)) for _ in range(2))
        ctypes.memmove(source, x.ctypes.data, x.nbytes)
        assert (
            library.Permute(
                len(shape),
                int64s(shape.tolist()),
                int64s(axes.tolist()),
                ctypes.c_int64(itemsize),
                isa,
                2,
                0,
                ctypes.c_void_p(source),
                ctypes.c_void_p(result),
            )
            == 0
        )
        y = ctypes.string_at(result, x.nbytes)
        assert y == np.ascontiguousarray(np.transpose(x, axes)).tobytes(), shape
        libc.free(ctypes.c_void_p(source))
        libc.free(ctypes.c_void_p(result))


def test_sanitizers(tmp_path):
    check_sanitized(__file__, compile_sanitized(tmp_path, SOURCES))


if __name__ == "__main__":
    check_under_sanitizers(sys.argv[1])


SIZE, START = (33 << 20) + 300, 4000  # of a result, in memory that is longer


def zero_pages(library, memory):
    """Whether the result is zero now; and the bytes beside it are as they were."""
    memory[:START] = b"x" * START
    memory[START + SIZE :] = b"x" * (len(memory) - START - SIZE)
    whole = np.frombuffer(memory, np.uint8)
    function = library.ZeroPages
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    found = function(whole.ctypes.data + START, SIZE)
    assert (whole[:START] == ord("x")).all()
    assert (whole[START + SIZE :] == ord("x")).all()
    return bool(found)


def new_memory(flags=mmap.MAP_PRIVATE, file=-1):
    return mmap.mmap(file, START + SIZE + 5000, flags=flags)


def test_untouched_memory_is_zero(library):
    memory = new_memory()
    memory[START : START + 5000] = b"y" * 5000  # but for its start
    memory[START + SIZE - 100 : START + SIZE] = b"y" * 100
    assert zero_pages(library, memory)
    assert not np.frombuffer(memory, np.uint8)[START : START + SIZE].any()


def test_memory_in_use_is_left_alone(library):
    memory = new_memory()
    result = np.frombuffer(memory, np.uint8)[START : START + SIZE]
    result[:] = 1
    assert not zero_pages(library, memory)
    assert (result == 1).all()


@pytest.mark.parametrize("flags", ["MAP_PRIVATE", "MAP_SHARED"])
def test_memory_of_a_file_is_not_zero(library, flags, tmp_path):
    path = tmp_path / "file"
    content = np.ones(START + SIZE + 5000, np.uint8)
    content.tofile(path)
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        # Dropped from the page cache, no page of it is present.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = new_memory(getattr(mmap, flags), file.fileno())
        assert not zero_pages(library, memory)
    assert (np.frombuffer(memory, np.uint8)[START : START + SIZE] == 1).all()


def test_shared_memory_is_not_given_back(library):
    assert not zero_pages(library, new_memory(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
