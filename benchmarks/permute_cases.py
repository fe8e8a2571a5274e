# SPDX-License-Identifier: Apache-2.0
"""The tensors that the permute benchmark moves."""

import csv
import dataclasses
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_layout.tune.permute_cases import IN_PROGRAMS

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


_F32, _F16, _BF16 = "float32", "float16", "bfloat16"

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
        "ml": [PermuteCase("ml", *row) for row in IN_PROGRAMS],
        "ttc": _ttc(),
        "oneflow": _oneflow(),
        "tiny": [PermuteCase("tiny", *row) for row in _TINY],
    }
