# SPDX-License-Identifier: Apache-2.0
"""Sweeps over memory, the ceiling of what reads a large operand and writes little."""

import ctypes
import os
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.harness import Contender
from benchmarks.native import library

# Pages that are read in turn, by the name of the sweep.
_STREAMS = {"sweep": 1, "sweep x4": 4}


def contenders(sets: Sequence[Sequence[jax.Array]]) -> list[Contender]:
    """They read the arrays of a set on all of this process's processors."""
    threads = len(os.sched_getaffinity(0))
    words = [[_words(x) for x in arrays] for arrays in sets]
    return [_sweep(words, family, n, threads) for family, n in _STREAMS.items()]


def _words(x: jax.Array) -> np.ndarray:
    flat = np.asarray(x).reshape(-1).view(np.uint8)  # of the array's own memory
    return flat[: flat.size // 8 * 8].view(np.uint64)


def _sweep(
    sets: Sequence[Sequence[np.ndarray]], family: str, streams: int, threads: int
) -> Contender:
    sweep = library("sweep", native=True).jax_layout_sweep
    sweep.restype = ctypes.c_uint64
    sweep.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64

    def launch(i: int) -> int:
        arrays = sets[i % len(sets)]
        return sum(sweep(x.ctypes.data, x.size, threads, streams) for x in arrays)

    return Contender(family, "copy", launch)
