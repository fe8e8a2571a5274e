# SPDX-License-Identifier: Apache-2.0
"""The tensors that the permute benchmark moves."""

import csv
import dataclasses
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class PermuteCase:
    """`np.transpose(x, axes)` for one x."""

    group: str
    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str

    @property
    def np_dtype(self) -> np.dtype:
        return jnp.dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of x; as many are written."""
        return math.prod(self.shape) * self.np_dtype.itemsize

    @property
    def out_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def config(self) -> dict[str, str]:
        return {
            "shape": "x".join(map(str, self.shape)),
            "axes": ",".join(map(str, self.axes)),
            "dtype": self.dtype,
        }


_F32, _F16, _BF16, _U8 = "float32", "float16", "bfloat16", "uint8"

_ML: list[tuple[str, tuple[int, ...], tuple[int, ...], str]] = [
    ("matrix 2048", (2048, 2048), (1, 0), _F32),
    ("matrix 8192x4096", (8192, 4096), (1, 0), _F32),
    ("batched matrices", (16, 1024, 1024), (0, 2, 1), _F32),
    ("batched matrices", (32, 1024, 1024), (0, 2, 1), _BF16),
    ("batched matrices", (64, 1024, 1024), (0, 2, 1), _U8),
    ("odd extents", (7, 1531, 1789), (0, 2, 1), _F32),
    ("short rows, 4", (4096, 1024, 4), (1, 0, 2), _F32),
    ("short rows, 3", (4096, 4096, 3), (1, 0, 2), _U8),
    ("rows of 128", (1024, 128, 128), (1, 0, 2), _F32),
    ("wide volume to planes", (3072, 2048, 12), (2, 0, 1), _F32),
    ("NCHW to NHWC, 64", (32, 64, 112, 112), (0, 2, 3, 1), _F32),
    ("NHWC to NCHW, 64", (32, 112, 112, 64), (0, 3, 1, 2), _F32),
    ("NCHW to NHWC, 64", (32, 64, 112, 112), (0, 2, 3, 1), _BF16),
    ("NHWC to NCHW, 64", (32, 112, 112, 64), (0, 3, 1, 2), _BF16),
    ("NCHW to NHWC, 256", (32, 256, 56, 56), (0, 2, 3, 1), _BF16),
    ("NHWC to NCHW, 256", (32, 56, 56, 256), (0, 3, 1, 2), _BF16),
    ("NCHW to NHWC, RGB", (64, 3, 224, 224), (0, 2, 3, 1), _F32),
    ("NHWC to NCHW, RGB", (64, 224, 224, 3), (0, 3, 1, 2), _F32),
    ("NCHW to NHWC, RGB", (256, 3, 224, 224), (0, 2, 3, 1), _U8),
    ("NHWC to NCHW, RGB", (256, 224, 224, 3), (0, 3, 1, 2), _U8),
    ("UNet to NHWC", (8, 320, 64, 64), (0, 2, 3, 1), _F16),
    ("UNet to NCHW", (8, 64, 64, 320), (0, 3, 1, 2), _F16),
    ("attention head split", (8, 2048, 16, 64), (0, 2, 1, 3), _BF16),
    ("attention head split", (8, 2048, 16, 128), (0, 2, 1, 3), _BF16),
    ("attention head merge", (8, 16, 2048, 64), (0, 2, 1, 3), _BF16),
    ("attention K^T", (8, 2048, 16, 64), (0, 2, 3, 1), _BF16),
    ("attention QKV split", (4, 2048, 3, 16, 64), (2, 0, 3, 1, 4), _BF16),
    ("paged KV, values", (1024, 16, 8, 128), (0, 2, 1, 3), _BF16),
    ("paged KV, keys", (1024, 16, 8, 16, 8), (0, 2, 3, 1, 4), _BF16),
    ("MoE dispatch", (16, 8, 256, 512), (1, 0, 2, 3), _BF16),
    ("MoE weights", (8, 1024, 4096), (0, 2, 1), _BF16),
    ("patchify 16", (32, 14, 16, 14, 16, 3), (0, 1, 3, 2, 4, 5), _F32),
    ("patchify 16, from NCHW", (128, 3, 14, 16, 14, 16), (0, 2, 4, 3, 5, 1), _U8),
    ("pixel shuffle 2", (8, 64, 2, 2, 128, 128), (0, 1, 4, 2, 5, 3), _F32),
    ("reversal, rank 3", (256, 256, 256), (2, 1, 0), _F32),
    ("reversal, rank 6", (16, 16, 16, 16, 16, 16), (5, 4, 3, 2, 1, 0), _F32),
    ("reversal, rank 6", (15, 16, 17, 16, 15, 16), (5, 4, 3, 2, 1, 0), _BF16),
    ("reversal, rank 8", (5, 3, 2, 4, 35, 33, 37, 40), tuple(range(7, -1, -1)), _U8),
]

_TINY: list[tuple[str, tuple[int, ...], tuple[int, ...], str]] = [
    ("16x8", (16, 8), (1, 0), _F32),
    ("64x64", (64, 64), (1, 0), _F32),
    ("one token's heads", (1, 32, 16, 64), (0, 2, 1, 3), _BF16),
    ("32x128x64", (32, 128, 64), (0, 2, 1), _F16),
]


def _ttc() -> list[PermuteCase]:
    """The TTC benchmark in row-major terms (Springer, Hammond, Bientinesi)."""
    cases = []
    with open(Path(__file__).parent / "data" / "ttc57.csv", newline="") as file:
        for row in csv.DictReader(file):
            shape = tuple(int(extent) for extent in row["shape"].split("x"))
            axes = tuple(int(axis) for axis in row["axes"].split())
            name = f"{int(row['id']):02} {row['shape']}"
            cases.append(PermuteCase("ttc", name, shape, axes, _F32))
    return cases


def _oneflow() -> list[PermuteCase]:
    """The two patterns of OneFlow's article on permute, 16 to 128 MiB."""
    cases = []
    for dtype, itemsize in ((_F32, 4), (_F16, 2)):
        for mib in (16, 32, 64, 128):
            n = mib * MIB // itemsize
            for name, shape, axes in (
                ("outer swap", (1024, n >> 17, 128), (1, 0, 2)),
                ("batch transpose", (n >> 20, 1024, 1024), (0, 2, 1)),
            ):
                title = f"{name}, {mib} MiB"
                cases.append(PermuteCase("oneflow", title, shape, axes, dtype))
    return cases


def all_cases() -> dict[str, list[PermuteCase]]:
    """Every set of cases by its name."""
    return {
        "ml": [PermuteCase("ml", *row) for row in _ML],
        "ttc": _ttc(),
        "oneflow": _oneflow(),
        "tiny": [PermuteCase("tiny", *row) for row in _TINY],
    }
