# SPDX-License-Identifier: Apache-2.0
"""As many multiply-adds as a product has, in registers alone."""

import ctypes
import os
import timeit

from benchmarks.harness import Contender
from benchmarks.native import library
from benchmarks.profiles import possible, processor_flags

# By profile and dtype, the indices in native/peak.cc. Intel multiplies floats faster
# than pairs of bfloat16.
_KINDS = {
    "avx2": {"float32": [0], "bfloat16": [0], "float16": [0]},  # widened
    "avx512": {"float32": [1], "bfloat16": [1], "float16": [1]},
    "avx512_bf16": {"float32": [1], "bfloat16": [1, 2], "float16": [1]},
}
_TRIAL = 10**8  # operations, a millisecond or two


def contenders(dtype: str, operations: int) -> list[Contender]:
    """The peak of the profile's instructions; none where it is not known."""
    capped = os.environ.get("JAX_LAYOUT_MAX_ISA")
    profile = capped or possible(processor_flags())[0]
    kinds = _KINDS.get(profile, {}).get(dtype)
    if kinds is None:
        return []
    peak = library("peak", native=False).jax_layout_peak
    peak.argtypes = ctypes.c_int, ctypes.c_double, ctypes.c_int
    peak.restype = None
    threads = len(os.sched_getaffinity(0))

    def seconds(kind: int) -> float:
        return min(timeit.repeat(lambda: peak(kind, _TRIAL, threads), number=1))

    kind = min(kinds, key=seconds)
    return [Contender("peak", "peak", lambda _: peak(kind, operations, threads))]
