# SPDX-License-Identifier: Apache-2.0
"""Convolutions of the kinds that some version of oneDNN sums wrongly, exactly."""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from jax_layout import choices

FORMATS = {3: ("NCW", "NWC"), 4: ("NCHW", "NHWC"), 5: ("NCDHW", "NDHWC")}
ONES = (1, 1, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """x `(N, C, *spatial)`, w `(O, C, *kernel)`; the rest is cut to their axes."""

    x: tuple
    w: tuple
    stride: tuple = ONES
    pad: tuple = ((0, 0),) * 3
    dilation: tuple = ONES

    def __post_init__(self):
        for name in ("stride", "pad", "dilation"):
            object.__setattr__(self, name, getattr(self, name)[: len(self.x) - 2])

    def values(self, seed, low=-3, high=4):
        """x and w, small integers."""
        rng = np.random.default_rng(seed)
        return rng.integers(low, high, self.x), rng.integers(low, high, self.w)

    def windows(self, x):
        """What is summed: (N, C, *out, *kernel)."""
        x = np.pad(x, [(0, 0), (0, 0), *self.pad])
        sizes = zip(self.w[2:], self.dilation, strict=True)
        reach = [(taps - 1) * step + 1 for taps, step in sizes]
        axes = tuple(range(2, x.ndim))
        found = np.lib.stride_tricks.sliding_window_view(x, reach, axes)
        steps = (*self.stride, *self.dilation)
        return found[(..., *(slice(None, None, step) for step in steps))]

    def convolve(self, x, w, format, dtype=None):
        return jl.conv_general_dilated(
            jl.with_memory_format(x, format),
            w,
            self.stride,
            self.pad,
            rhs_dilation=self.dilation,
            preferred_element_type=dtype,
        )


def letters(case):
    return "hwd"[: len(case.x) - 2], "ijk"[: len(case.x) - 2]


def forward(case, x, w):
    out, taps = letters(case)
    return np.einsum(f"nc{out}{taps},oc{taps}->no{out}", case.windows(x), w)


def weight_grad(case, x, ct):
    out, taps = letters(case)
    return np.einsum(f"nc{out}{taps},no{out}->oc{taps}", case.windows(x), ct)


def check_forward(cases, dtype):
    """All in one program, the channels first and last by turns."""
    wide = jnp.int32 if dtype == "int8" else jnp.float32
    limits = (-128, 128) if dtype == "int8" else (-3, 4)
    given = [case.values(i, *limits) for i, case in enumerate(cases)]

    @jax.jit
    def convolve(given):
        return [
            case.convolve(*arrays, FORMATS[len(case.x)][i % 2], wide)
            for i, (case, arrays) in enumerate(zip(cases, given, strict=True))
        ]

    found = convolve([[jnp.asarray(a, dtype) for a in arrays] for arrays in given])
    for case, arrays, y in zip(cases, given, found, strict=True):
        np.testing.assert_array_equal(y, forward(case, *arrays), err_msg=str(case))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_one_column_of_few_channels(dtype):
    """With AMX, some versions sum them wrongly."""
    same = ((1, 1), (1, 1))
    cases = []
    for c, o in [(1, 16), (3, 64), (5, 33), (17, 32)]:
        cases += [
            Case((2, c, 19, 1), (o, c, 3, 3), pad=same),
            Case((2, c, 20, 9), (o, c, 3, 9)),
            Case((1, c, 19, 9), (o, c, 5, 9), stride=(2, 1)),
            Case((2, c, 8, 9, 5), (o, c, 3, 3, 3), (3, 3, 3)),
            Case((2, c, 19, 4), (o, c, 3, 3), (1, 2)),
            Case((40, c, 1, 7), (o, c, 1, 7)),
            Case((40, c, 11), (o, c, 11)),
        ]
    check_forward(cases, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_steps_beyond_the_kernel(dtype):
    """With AMX, versions before 3.13 plan too little memory for the rows of x."""
    check_forward(
        [
            Case(
                (1, 32, 1, 67, 4),
                (48, 32, 1, 1, 1),
                (1, 3, 1),
                ((0, 0),) * 2 + ((0, 1),),
            ),
            Case((2, 32, 67, 4), (48, 32, 1, 1), (3, 1), ((0, 0), (0, 1))),
            Case((2, 40, 67, 17), (33, 40, 2, 3), (4, 1), ((0, 1), (1, 1))),
            Case((1, 64, 131, 31), (64, 64, 2, 2), (3, 3)),
        ],
        dtype,
    )


def test_padded_columns_of_int8():
    """With VNNI, some versions before 3.13 forget the padding's share."""
    check_forward(
        [
            Case((1, 1, 32, 64), (1, 1, 2, 4), (2, 1), ((0, 0), (1, 2))),
            Case((1, 3, 17, 33), (16, 3, 7, 7), (2, 2), ((3, 3), (3, 3))),
            Case((2, 8, 16, 16), (64, 8, 3, 3), pad=((1, 1), (1, 1))),
            Case((1, 33, 7, 30), (40, 33, 1, 5), pad=((0, 0), (4, 2))),
        ],
        "int8",
    )


def test_int8_without_vnni():
    """There oneDNN adds two products in 16 bits, which do not hold them."""
    program = """
import jax, jax.numpy as jnp, numpy as np, jax_layout as jl
rng = np.random.default_rng(0)
a, b = rng.integers(-128, 128, (64, 300)), rng.integers(-128, 128, (300, 64))
x, w = a.reshape(1, 64, 10, 30), b.T.reshape(64, 300, 1, 1)[:, :64]
wide = {"preferred_element_type": jnp.int32}
c = jl.gemm(jnp.asarray(a, jnp.int8), jnp.asarray(b, jnp.int8), **wide)
y = jl.conv(jnp.asarray(x, jnp.int8), jnp.asarray(w, jnp.int8), **wide)
np.testing.assert_array_equal(c, a @ b)
np.testing.assert_array_equal(y, np.einsum("nchw,oc->nohw", x, w[..., 0, 0]))
"""
    subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_LAYOUT_MAX_ISA": "avx2"},
        check=True,
    )


def test_five_points_where_bfloat16_is_emulated():
    """With AVX-512 alone, sums of five points take registers that it needs."""
    program = """
import jax, jax.numpy as jnp, numpy as np, jax_layout as jl
from jax_layout import choices
from jax_layout.measured import Work
rng = np.random.default_rng(0)
options = dict(dimension_numbers=("NWC", "WIO", "NWC"))
conv = lambda x, w: jl.conv_general_dilated(x, w, (1,), "VALID", **options)
for n in (4, 5, 6, 10):
    x, w, ct = (rng.integers(-1, 2, s) for s in ((2, n, 80), (1, 80, 160), (2, n, 160)))
    given = [jnp.asarray(v, jnp.bfloat16) for v in (x, w, ct)]
    for name in "yx":
        work = Work(f"conv {name} bfloat16 one tap", (2 * n, 80, 160, 1))
        with choices.forced("oneDNN", work), choices.asked() as asked:
            if name == "y":
                found, expected = jax.jit(conv)(*given[:2]), x @ w[0]
            else:
                pull = lambda x, w, ct: jax.vjp(conv, x, w)[1](ct)[0]
                found, expected = jax.jit(pull)(*given), ct @ w[0].T
        assert "oneDNN" in dict(asked)[work]
        np.testing.assert_array_equal(np.asarray(found, int), expected, str((name, n)))
"""
    if choices.profile() in ("portable", "neon", "avx2"):
        pytest.skip("needs AVX-512")
    subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_LAYOUT_MAX_ISA": "avx512"},
        check=True,
    )


CHANNELS = [(3, 17), (17, 40), (31, 5), (48, 33), (64, 100), (1, 16), (16, 1)]
GEOMETRIES = list(
    itertools.product(
        [(1, 1), (2, 2), (3, 1)],  # strides
        [(1, 1), (2, 1)],  # dilations
        [((0, 0), (0, 0)), ((1, 2), (0, 3))],  # padding
        [((13, 9), (3, 3)), ((7, 31), (1, 5))],  # sizes of x and w
    )
)


def test_weight_gradients():
    """With AVX-512, some versions sum them wrongly in float32."""
    cases = []
    for (stride, dilation, pad, sizes), (c, o) in zip(
        GEOMETRIES, itertools.cycle(CHANNELS), strict=False
    ):
        cases.append(Case((2, c, *sizes[0]), (o, c, *sizes[1]), stride, pad, dilation))
    # Those of one tap and a stride write past their workspace in some versions.
    for c, o in [(4, 8), (8, 16), (12, 40), (15, 16), (16, 16)]:
        cases.append(Case((4, c, 32, 33), (o, c, 1, 1), (2, 2)))
    given = []
    for i, case in enumerate(cases):
        x, w = case.values(i)
        ct = np.random.default_rng(i).integers(-3, 4, forward(case, x, w).shape)
        given.append((x, w, ct))

    @jax.jit
    def gradients(given):
        found = []
        for i, (case, (x, w, ct)) in enumerate(zip(cases, given, strict=True)):
            convolve = functools.partial(case.convolve, format=FORMATS[4][i % 3 % 2])
            _, pull = jax.vjp(functools.partial(convolve, x), w)
            found += pull(ct)
        return found

    found = gradients([[jnp.asarray(a, jnp.float32) for a in each] for each in given])
    for case, (x, _, ct), dw in zip(cases, given, found, strict=True):
        np.testing.assert_array_equal(dw, weight_grad(case, x, ct), err_msg=str(case))
