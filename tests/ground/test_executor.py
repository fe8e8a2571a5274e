# SPDX-License-Identifier: Apache-2.0
"""Loops over a pool of threads: everything once, by whom, and from where on."""

import ctypes

import numpy as np
import pytest

from native import compile_library, sources

POOLS = {"threads": 0, "inline": 1, "busy": 2}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("executor")
    return ctypes.CDLL(
        compile_library(folder, sources("tests/ground/kernels/executor.cc"))
    )


def call(function, *given, size):
    counts = np.zeros(size, np.int64)
    function.restype = ctypes.c_int64
    pointer = counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    found = function(*(ctypes.c_int64(value) for value in given), pointer)
    return found, counts


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 1000])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_everything_runs_once(library, pool, threads, n, workers):
    together, counts = call(library.Workers, POOLS[pool], threads, n, workers, size=n)
    np.testing.assert_array_equal(counts, 1)
    assert together == (n > 0)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n, most", [(0, 4), (1, 4), (6, 5), (7, 7), (100, 9)])
def test_parts_are_even(library, pool, threads, n, most):
    apart, counts = call(library.Parts, POOLS[pool], threads, n, most, size=n)
    np.testing.assert_array_equal(counts, 1)
    assert apart <= 1


@pytest.mark.parametrize("workers, n", [(2, 8), (3, 10), (4, 4)])
def test_workers_begin_with_parts_of_their_own(library, workers, n):
    _, first = call(library.Firsts, workers, n, size=workers)
    assert first.tolist() == [worker * n // workers for worker in range(workers)]
