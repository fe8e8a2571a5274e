# SPDX-License-Identifier: Apache-2.0
"""Host buffers to walk through, so that no cache is measured."""

import ctypes
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.permute_cases import MIB, PermuteCase

# What one walk over all buffer sets touches, inputs and outputs together: more than
# the last-level cache of the servers we know.
ROTATION = 768 * MIB
ON_GPU = 256 * MIB
POISON = 0xA5


class Buffers:
    """Distinct inputs `x[i]` and outputs `y[i]` of a case, in page-aligned memory.

    A case under 1 MiB gets four sets and stays in cache: it is there to measure the
    dispatch, and its user finds it in cache too.
    """

    def __init__(self, case: PermuteCase, rotation: int = ROTATION) -> None:
        pair = 2 * case.nbytes
        self.sets = 4 if case.nbytes < MIB else math.ceil(rotation / pair)
        self.x = [_empty(case.shape, case.np_dtype) for _ in range(self.sets)]
        self.y = [_empty(case.out_shape, case.np_dtype) for _ in range(self.sets)]
        # Small whole numbers: every dtype holds them, no library rounds them, and
        # they are not zeros, for which the kernel keeps a single page.
        values = np.random.default_rng(0).integers(1, 250, case.shape, np.uint8)
        for x, y in zip(self.x, self.y, strict=True):
            x[...] = values
            y.view(np.uint8)[...] = 0

    def poison(self) -> None:
        """Fills the output that the next check reads."""
        self.y[0].view(np.uint8)[...] = POISON

    def expected(self, case: PermuteCase) -> np.ndarray:
        """The bits of the result: NumPy's word is the definition."""
        return np.ascontiguousarray(bits(self.x[0]).transpose(case.axes))


class DeviceBuffers:
    """The same in a GPU's memory, made there."""

    def __init__(
        self, case: PermuteCase, device: jax.Device, rotation: int = ON_GPU
    ) -> None:
        self.sets = 4 if case.nbytes < MIB else math.ceil(rotation / (2 * case.nbytes))
        values = jax.jit(lambda: _values(case))
        with jax.default_device(device):
            self.x = [values() for _ in range(self.sets)]
            self.y = [
                jnp.zeros(case.out_shape, case.np_dtype) for _ in range(self.sets)
            ]
        jax.block_until_ready((self.x, self.y))

    def poison(self) -> None:
        """Nothing: who writes to `y` does it."""

    def expected(self, case: PermuteCase) -> np.ndarray:
        """The bits of the result, as XLA's transpose has them."""
        return bits(
            np.asarray(jax.jit(jnp.transpose, static_argnums=1)(self.x[0], case.axes))
        )


def _values(case: PermuteCase) -> jax.Array:
    """Whole numbers from 1 to 249, whose order has no period of a power of two."""
    count = math.prod(case.shape)
    order = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(2654435761)
    return ((order >> 16) % 249 + 1).astype(case.np_dtype).reshape(case.shape)


def always_allocate_new_pages() -> None:
    """Makes malloc take outputs of 1 MiB and more from the kernel, and give them back.

    Left alone, glibc recycles what other contenders have freed, so that a fresh output
    has all its page faults or none, as it happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_mmap_threshold = -3
        libc.mallopt(m_mmap_threshold, MIB)


def bits(array: np.ndarray) -> np.ndarray:
    """The same array as unsigned integers, which every library can move."""
    return array.view(f"u{array.dtype.itemsize}")


def _empty(shape: tuple[int, ...], dtype: np.dtype, page: int = 4096) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + page, np.uint8)
    start = -raw.ctypes.data % page
    return raw[start : start + size].view(dtype).reshape(shape)
