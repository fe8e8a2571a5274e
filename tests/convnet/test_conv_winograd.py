# SPDX-License-Identifier: Apache-2.0
"""Winograd convolutions without JAX, exactly, for every instruction set."""

import ctypes
import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from test_conv_depthwise import BF16, DTYPES, F16, F32, CProblem, Images, Memory, load

from native import compile_library, sources

SOURCES = sources(
    "cpu/conv/winograd/*.cc",
    "cpu/isa.cc",
    "tests/convnet/kernels/conv_winograd_library.cc",
)
ISAS = (None, "avx2", "avx512")
PASSES = ("forward", "input_grad")
# Steps of w: [o, c, h, w] for so many output and input channels.
FILTERS = {
    "OIHW": lambda o, c: (9 * c, 9, 3, 1),
    "HWIO": lambda o, c: (1, o, 3 * o * c, o * c),
    "OHWI": lambda o, c: (9 * c, 1, 3 * c, c),
    "IHWO": lambda o, c: (1, 9 * o, 3 * o, o),
    "HOWI": lambda o, c: (3 * c, 1, 3 * o * c, c),
    "HWOI": lambda o, c: (c, 1, 3 * o * c, o * c),
    "HIOW": lambda o, c: (3, 3 * o, 3 * o * c, 1),
}


INF, NAN = np.inf, np.nan


def overflow(read, w, bias):
    """Sums of pixels are infinite, results are not."""
    read[:] = 0
    read[0, 5, 4, 3:5] = 2.0**127
    w /= 16


def no_number(*arrays):
    for array in arrays:
        array[:] = NAN


# What is not finite, in what is read (n, c, h, w), in w (o, c, h, w) and bias.
SPOIL = {
    "pixel": lambda x, w, b: x.__setitem__((0, 5, 4, 4), INF),
    "corner": lambda x, w, b: x.__setitem__((0, 5, 0, 0), -INF),
    "no number": lambda x, w, b: x.__setitem__((0, 5, 8, 8), NAN),
    "both signs": lambda x, w, b: x.__setitem__((0, 5, 4, slice(2, 4)), (INF, -INF)),
    "tap": lambda x, w, b: w.__setitem__((3, 2, 0, 1), INF),
    "filter": lambda x, w, b: w.__setitem__((3, 2), NAN),
    "bias": lambda x, w, b: b.__setitem__(slice(0, 3), (INF, -INF, NAN)),
    "overflow": overflow,
    "all": no_number,
}


@dataclasses.dataclass
class Case:
    """A convolution of 3 x 3 taps of images of `size`."""

    size: tuple
    pad: tuple = ((1, 1), (1, 1))
    batch: int = 2
    in_channels: int = 32
    out_channels: int = 64
    layout: str = "nhwc"
    w_layout: str = "OIHW"
    dtype: type = F32
    result: type | None = None  # as dtype
    bias: bool = False
    relu: bool = False
    threads: int = 2
    seed: int = 0
    spoil: str | None = None

    @property
    def out(self):
        return tuple(n + sum(p) - 2 for n, p in zip(self.size, self.pad, strict=True))


def prepare(case, name, at_end):
    """The C problem and its arrays: small integers, so that sums are exact."""
    c = case
    rng = np.random.default_rng(c.seed)
    result = c.result or c.dtype
    x_type, y_type = (c.dtype, result) if name == "forward" else (result, c.dtype)
    x = Images(c.layout, c.batch, c.in_channels, *c.size, x_type, at_end)
    y = Images(c.layout, c.batch, c.out_channels, *c.out, y_type, at_end)
    memory = Memory(9 * c.in_channels * c.out_channels, c.dtype, at_end)
    steps = FILTERS[c.w_layout](c.out_channels, c.in_channels)
    w = np.lib.stride_tricks.as_strided(
        memory.array,
        (c.out_channels, c.in_channels, 3, 3),
        [memory.array.itemsize * s for s in steps],
    )
    w[:] = rng.integers(-3, 4, w.shape)
    bias = Memory(c.out_channels, result, at_end)
    bias.array[:] = rng.integers(-3, 4, c.out_channels)
    read = x if name == "forward" else y
    values = rng.integers(-3, 4, read.get().shape).astype(np.float32)
    if c.spoil:
        SPOIL[c.spoil](values, w, bias.array)
    read.set(values)
    p = CProblem()
    p.pass_ = PASSES.index(name)
    p.batch, p.groups = c.batch, 1
    p.in_channels, p.out_channels = c.in_channels, c.out_channels
    p.in_[:], p.out[:], p.kernel[:] = (1, *c.size), (1, *c.out), (1, 3, 3)
    p.stride[:] = p.dilation[:] = (1, 1, 1)
    p.pad_low[:] = (0, *(low for low, _ in c.pad))
    p.pad_high[:] = (0, *(high for _, high in c.pad))
    w_strides = (*steps[:2], 0, *steps[2:])
    for i, row in enumerate((x.strides, w_strides, y.strides)):
        p.strides[i][:] = row
    p.blocks[:] = (1, 1, 1)
    p.bias, p.relu = (c.bias, c.relu) if name == "forward" else (False, False)
    p.type, p.result = DTYPES.index(c.dtype), DTYPES.index(result)
    p.winograd = True
    return p, x, y, memory, w.astype(np.float64), bias


def reference(case, name, x, w, y, bias):
    """What is written, rounded once. Padding counts as zeros."""
    read, written, pad = x, y, case.pad
    if name == "input_grad":
        # A convolution with the filters turned round.
        read, written, w = y, x, w[:, :, ::-1, ::-1].swapaxes(0, 1)
        pad = [(2 - low, 2 - high) for low, high in case.pad]
    read = np.pad(read, [(0, 0)] * 2 + [(max(a, 0), max(b, 0)) for a, b in pad])
    read = read[:, :, max(-pad[0][0], 0) :, max(-pad[1][0], 0) :].astype(np.float64)
    height, width = written.shape[2:]
    result = np.zeros(written.shape)
    with np.errstate(invalid="ignore"):
        for i, j in itertools.product(range(3), repeat=2):
            window = read[:, :, i : i + height, j : j + width]
            result += np.einsum("nchw,oc->nohw", window, w[:, :, i, j])
    if name == "forward":
        if case.bias:
            result += bias[:, None, None]
        if case.relu:
            result = np.maximum(result, 0)
    return result.astype(case.result or case.dtype).astype(np.float64)


def run(library, isa, p, case, x, y, memory, bias, at_end):
    size = library.Workspace(ctypes.byref(p), case.threads, ISAS.index(isa))
    workspace = Memory(size, np.uint8, at_end)
    code = library.Convolve(
        ISAS.index(isa),
        ctypes.byref(p),
        case.threads,
        x.memory.pointer,
        memory.pointer,
        y.memory.pointer,
        bias.pointer if p.bias else None,
        workspace.pointer,
    )
    assert code == 0
    assert all(m.intact() for m in (x.memory, y.memory, memory, bias, workspace))


def check(library, isa, case, at_end=True):
    """Runs both passes and compares with NumPy."""
    for name in PASSES:
        p, x, y, memory, w, bias = prepare(case, name, at_end)
        assert library.Supports(ctypes.byref(p), ISAS.index(isa))
        want = reference(case, name, x.get(), w, y.get(), bias.array)
        memories = (x.memory, y.memory, memory, bias)
        before = [m.array.copy() for m in memories]
        run(library, isa, p, case, x, y, memory, bias, at_end)
        written = y if name == "forward" else x
        np.testing.assert_array_equal(written.get(), want, err_msg=name)
        # Nothing else is written: not the gaps either.
        written.set(np.full(want.shape, np.nan))
        for m, old in zip(memories, before, strict=True):
            assert m.array.tobytes() == old.tobytes()


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return load(compile_library(tmp_path_factory.mktemp("winograd"), SOURCES))


@pytest.fixture(params=ISAS[1:])
def convolve(request, library):
    """A function that checks a case in one instruction set."""
    if ISAS.index(request.param) > library.BestIsa():
        pytest.skip(f"no {request.param} here")

    def convolve(size, **case):
        for at_end in (True, False):
            check(library, request.param, Case(size, **case), at_end)

    return convolve


@pytest.mark.parametrize("layout", ["nhwc", "gaps_last"])
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 9), (9, 1), (2, 3), (7, 7), (8, 14), (5, 28)], ids=str
)
def test_sizes(convolve, size, layout):
    convolve(size, layout=layout)


@pytest.mark.parametrize(
    "pad", [((0, 0), (0, 0)), ((2, 1), (0, 2)), ((3, 0), (4, 1)), ((0, 5), (1, 9))]
)
def test_padding(convolve, pad):
    convolve((6, 9), pad=pad)
    convolve((3, 3), pad=pad)


@pytest.mark.parametrize("w_layout", FILTERS)
def test_filters(convolve, w_layout):
    convolve((6, 5), w_layout=w_layout, in_channels=96)


def test_bias_and_relu(convolve):
    for bias, relu in itertools.product((False, True), repeat=2):
        convolve((7, 5), bias=bias, relu=relu)


@pytest.mark.parametrize("result", [None, F32])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bits(convolve, dtype, result):
    for w_layout in FILTERS:
        convolve((7, 5), dtype=dtype, result=result, w_layout=w_layout)
    for bias, relu in itertools.product((False, True), repeat=2):
        convolve((1, 9), dtype=dtype, result=result, bias=bias, relu=relu)


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize(
    "size, batch, channels",
    [
        ((30, 31), 3, (64, 32)),
        ((30, 31), 1, (32, 256)),  # more filters than tiles
        ((2, 2), 1, (512, 160)),
        ((13, 3), 9, (160, 224)),
    ],
)
def test_blocks(convolve, size, batch, channels, threads):
    convolve(
        size,
        batch=batch,
        in_channels=channels[0],
        out_channels=channels[1],
        threads=threads,
    )


@hypothesis.given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    pad=st.tuples(*[st.tuples(st.integers(1, 3), st.integers(1, 3))] * 2),
    batch=st.integers(1, 4),
    w_layout=st.sampled_from(sorted(FILTERS)),
    bias=st.booleans(),
    relu=st.booleans(),
    seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_anything(library, **case):
    for isa in ISAS[1 : library.BestIsa() + 1]:
        check(library, isa, Case(**case))


@pytest.mark.parametrize("spoil", SPOIL)
def test_what_is_not_finite(convolve, spoil):
    convolve((9, 9), spoil=spoil)
    convolve((9, 9), spoil=spoil, bias=True, relu=True, w_layout="HWIO", threads=1)
    convolve((9, 9), spoil=spoil, dtype=BF16)
    convolve((19, 19), spoil=spoil)  # more tiles than filters
    if spoil != "overflow":  # 2^127 is no float16
        convolve((9, 9), spoil=spoil, dtype=F16)


@pytest.mark.parametrize(
    "changed",
    [
        {"winograd": 0},
        {"pass_": 2},
        {"type": 2, "result": 3},
        {"result": 2},
        {"type": 6},
        {"groups": 2},
        {"in_channels": 40},
        {"out_channels": 16},
        {"kernel": (3, 3, 3)},
        {"kernel": (1, 3, 5)},
        {"stride": (1, 1, 2)},
        {"dilation": (1, 2, 1)},
        {"blocks": (8, 1, 1)},
    ],
    ids=str,
)
def test_others_are_left(library, changed):
    p, *_ = prepare(Case((8, 8)), "forward", True)
    assert library.Supports(ctypes.byref(p), 1)
    for name, value in changed.items():
        if isinstance(value, tuple):
            getattr(p, name)[:] = value
        else:
            setattr(p, name, value)
    assert not library.Supports(ctypes.byref(p), 1)
