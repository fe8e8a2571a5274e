# SPDX-License-Identifier: Apache-2.0
"""The depthwise convolutions without JAX, exactly, for every instruction set."""

import ctypes
import dataclasses
import itertools
import mmap

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from native import compile_library, sources

SOURCES = sources(
    "cpu/conv/depthwise/*.cc",
    "cpu/isa.cc",
    "tests/convnet/kernels/conv_depthwise_library.cc",
)
ISAS = ("portable", "avx2", "avx512")
PASSES = ("forward", "input_grad", "weight_grad")
LAYOUTS = ("nhwc", "nchw", "block8", "block16", "gaps_last", "gaps_planes")
F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16
DTYPES = (F32, None, BF16, F16)  # as in DType
PAGE = mmap.PAGESIZE
GUARD = 0xA5


class CProblem(ctypes.Structure):
    _fields_ = [
        *[(x, ctypes.c_int64) for x in ("pass_", "type", "result", "batch")],
        *[(x, ctypes.c_int64) for x in ("groups", "in_channels", "out_channels")],
        *[(x, ctypes.c_int64 * 3) for x in ("in_", "kernel", "out", "stride")],
        *[(x, ctypes.c_int64 * 3) for x in ("dilation", "pad_low", "pad_high")],
        ("strides", ctypes.c_int64 * 5 * 3),
        ("blocks", ctypes.c_int64 * 3),
        ("bias", ctypes.c_int64),
        ("relu", ctypes.c_int64),
        ("winograd", ctypes.c_int64),
    ]


@dataclasses.dataclass
class Case:
    """A convolution of images of `size` with kernels of `kernel`."""

    size: tuple
    kernel: tuple = (3, 3)
    stride: tuple = (1, 1)
    dilation: tuple = (1, 1)
    pad: tuple = ((1, 1), (1, 1))
    batch: int = 2
    channels: int = 17
    layout: str = "nhwc"
    w_layout: str = "oihw"
    dtype: type = F32
    result: type = F32
    bias: bool = False
    relu: bool = False
    threads: int = 2
    seed: int = 0

    @property
    def out(self):
        return tuple(
            (i + sum(p) - d * (k - 1) - 1) // s + 1
            for i, k, s, d, p in zip(
                self.size,
                self.kernel,
                self.stride,
                self.dilation,
                self.pad,
                strict=True,
            )
        )


class Memory:
    """An array between two pages that nobody may touch, at one of them."""

    def __init__(self, count, dtype, at_end):
        size = max(1, count) * np.dtype(dtype).itemsize
        pages = -(-size // PAGE) + 2
        self.map = mmap.mmap(-1, pages * PAGE)
        data = np.frombuffer(self.map, np.uint8)
        data[:] = GUARD
        last = (pages - 1) * PAGE
        start = last - size if at_end else PAGE
        self.around = (data[PAGE:start], data[start + size : last])
        self.array = data[start : start + size].view(dtype)[:count]
        self.pointer = ctypes.c_void_p(data.ctypes.data + start)
        libc = ctypes.CDLL(None)
        for page in (0, last):
            address = ctypes.c_void_p(data.ctypes.data + page)
            assert libc.mprotect(address, ctypes.c_size_t(PAGE), 0) == 0

    def intact(self):
        return all((part == GUARD).all() for part in self.around)


class Images:
    """x or y in one of the layouts; `array` is nchw, in memory of its own."""

    def __init__(self, layout, n, c, h, w, dtype, at_end):
        gap = 3 if layout.startswith("gaps") else 0
        self.block = int(layout[5:]) if layout.startswith("block") else 1
        blocks = c // self.block
        if self.block > 1 or layout in ("nhwc", "gaps_last"):
            pixel = (self.block if self.block > 1 else c) + gap
            row = w * pixel + gap
            plane = h * row
            image = plane * (blocks if self.block > 1 else 1) + gap
            strides = (image, plane if self.block > 1 else 1, row, pixel)
        else:
            row = w + gap
            plane = h * row + gap
            strides = (c * plane + gap, plane, row, 1)
        self.strides = (*strides[:2], 0, *strides[2:])
        extents = (n, blocks, h, w, self.block)
        steps = (*strides, 1)
        count = sum((e - 1) * s for e, s in zip(extents, steps, strict=True)) + 1
        self.memory = Memory(count if 0 not in extents else 0, dtype, at_end)
        self.memory.array[:] = np.nan
        flat = self.memory.array
        view = np.lib.stride_tricks.as_strided(
            flat, extents, [s * flat.itemsize for s in steps], writeable=True
        )
        # n, blocks, block, h, w
        self.view = view.transpose(0, 1, 4, 2, 3)

    def set(self, values):
        self.view[:] = values.reshape(self.view.shape)

    def get(self):
        n, blocks, block, h, w = self.view.shape
        return self.view.astype(np.float64).reshape(n, blocks * block, h, w)


def filters(layout, c, kernel, dtype, at_end):
    """The memory of w, its strides, and a view [c, h, w]."""
    h, w = kernel
    strides = (h * w, w, 1) if layout == "oihw" else (1, w * c, c)
    memory = Memory(c * h * w, dtype, at_end)
    memory.array[:] = np.nan
    view = np.lib.stride_tricks.as_strided(
        memory.array,
        (c, h, w),
        [s * memory.array.itemsize for s in strides],
        writeable=True,
    )
    return memory, (strides[0], 0, 0, *strides[1:]), view


def taps(case):
    """Indices (k, l), and the results and what they read, of every tap."""
    for tap in itertools.product(*map(range, case.kernel)):
        to, of = [], []
        for axis in range(2):
            q = np.arange(max(case.out[axis], 0))
            i = (
                q * case.stride[axis]
                + tap[axis] * case.dilation[axis]
                - case.pad[axis][0]
            )
            inside = (i >= 0) & (i < case.size[axis])
            to.append(q[inside])
            of.append(i[inside])
        yield tap, np.ix_(*to), np.ix_(*of)


def reference(case, name, x, w, y, bias):
    """What is written, in float64."""
    images = (slice(None), slice(None))
    if name == "forward":
        result = np.zeros(y.shape)
        for tap, to, of in taps(case):
            result[(*images, *to)] += x[(*images, *of)] * w[:, *tap, None, None]
        if case.bias:
            result += bias[:, None, None]
        return np.maximum(result, 0) if case.relu else result
    if name == "input_grad":
        result = np.zeros(x.shape)
        for tap, to, of in taps(case):
            result[(*images, *of)] += y[(*images, *to)] * w[:, *tap, None, None]
        return result
    result = np.zeros(w.shape)
    for tap, to, of in taps(case):
        products = x[(*images, *of)] * y[(*images, *to)]
        result[:, *tap] = products.sum((0, 2, 3))
    return result


def prepare(case, name, at_end):
    """The C problem and its arrays: small integers, so that sums are exact."""
    c = case
    rng = np.random.default_rng(c.seed)
    dtype = {"x": c.dtype, "w": c.dtype, "y": c.dtype}
    written = dict(zip(PASSES, "yxw", strict=True))[name]
    dtype[written] = c.result
    x = Images(c.layout, c.batch, c.channels, *c.size, dtype["x"], at_end)
    y = Images(c.layout, c.batch, c.channels, *c.out, dtype["y"], at_end)
    w_memory, w_strides, w = filters(
        c.w_layout, c.channels, c.kernel, dtype["w"], at_end
    )
    bias = Memory(c.channels, c.result, at_end)
    bias.array[:] = rng.integers(-3, 4, c.channels)
    if written != "x":
        x.set(rng.integers(-3, 4, x.get().shape))
    if written != "y":
        y.set(rng.integers(-3, 4, y.get().shape))
    if written != "w":
        w[:] = rng.integers(-3, 4, w.shape)
    p = CProblem()
    p.pass_ = PASSES.index(name)
    p.type, p.result = DTYPES.index(c.dtype), DTYPES.index(c.result)
    p.batch = c.batch
    p.groups = p.in_channels = p.out_channels = c.channels
    p.in_[:], p.out[:] = (1, *c.size), (1, *c.out)
    p.kernel[:], p.stride[:] = (1, *c.kernel), (1, *c.stride)
    p.dilation[:] = (1, *c.dilation)
    p.pad_low[:] = (0, *(low for low, _ in c.pad))
    p.pad_high[:] = (0, *(high for _, high in c.pad))
    strides = (x.strides, w_strides, y.strides)
    for i, row in enumerate(strides):
        p.strides[i][:] = row
    p.blocks[:] = (x.block, 1, y.block)
    p.bias, p.relu = c.bias and name == "forward", c.relu and name == "forward"
    return p, x, y, w_memory, w, bias


def check(library, isa, case, at_end=True):
    """Runs the three passes and compares with NumPy."""
    for name in PASSES:
        p, x, y, w_memory, w, bias = prepare(case, name, at_end)
        if case.dtype != F32 and isa == "portable":
            continue
        assert library.Supports(ctypes.byref(p))
        want = reference(
            case,
            name,
            x.get(),
            w.astype(np.float64),
            y.get(),
            bias.array.astype(np.float64),
        )
        memories = (x.memory, y.memory, w_memory, bias)
        before = [memory.array.copy() for memory in memories]
        size = library.Workspace(ctypes.byref(p), case.threads)
        workspace = Memory(size, np.uint8, at_end)
        code = library.Convolve(
            ISAS.index(isa),
            ctypes.byref(p),
            case.threads,
            x.memory.pointer,
            w_memory.pointer,
            y.memory.pointer,
            bias.pointer,
            workspace.pointer,
        )
        assert code == 0
        got = {"forward": y, "input_grad": x}
        result = got[name].get() if name in got else w.astype(np.float64)
        np.testing.assert_array_equal(
            result, want.astype(case.result).astype(np.float64), err_msg=name
        )
        assert all(memory.intact() for memory in (*memories, workspace))
        # Nothing else is written: not the gaps either.
        written = {"forward": 1, "input_grad": 0, "weight_grad": 2}[name]
        if name in got:
            got[name].set(np.full(want.shape, np.nan))
        for i, memory in enumerate(memories):
            if i != written or name in got:
                assert memory.array.tobytes() == before[i].tobytes()


def load(path):
    library = ctypes.CDLL(str(path))
    library.Workspace.restype = ctypes.c_int64
    return library


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return load(compile_library(tmp_path_factory.mktemp("kernels"), SOURCES))


@pytest.fixture(params=ISAS)
def convolve(request, library):
    """A function that checks a case in one instruction set."""
    if ISAS.index(request.param) > library.BestIsa():
        pytest.skip(f"no {request.param} here")

    def run(size, **case):
        for at_end in (True, False):
            check(library, request.param, Case(size, **case), at_end)

    return run


def channels_of(layout):
    return (48,) if layout.startswith("block") else (1, 2, 8, 17, 70)


layouts = pytest.mark.parametrize("layout", LAYOUTS)
SIZES = [(1, 1), (1, 9), (9, 1), (2, 3), (7, 7), (8, 14), (5, 28), (13, 33), (9, 56)]


@layouts
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(convolve, size, layout):
    for channels in channels_of(layout):
        for stride in ((1, 1), (2, 2)):
            convolve(size, channels=channels, layout=layout, stride=stride)


@layouts
@pytest.mark.parametrize("kernel", [(1, 1), (1, 3), (2, 2), (5, 5), (7, 7), (4, 11)])
def test_kernels(convolve, kernel, layout):
    for size in ((6, 5), (11, 37)):
        pad = tuple((k // 2, (k - 1) // 2) for k in kernel)
        for stride in ((1, 1), (2, 2), (1, 3)):
            convolve(
                size,
                kernel=kernel,
                pad=pad,
                channels=16,
                layout=layout,
                stride=stride,
                w_layout="hwio",
            )
        convolve(
            size, kernel=kernel, pad=((9, 9), (12, 12)), channels=16, layout=layout
        )


@layouts
@pytest.mark.parametrize("stride", [(1, 2), (2, 1), (3, 3), (4, 5), (50, 50)], ids=str)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 2), (3, 2), (6, 4)], ids=str)
def test_strides_and_dilations(convolve, stride, dilation, layout):
    for pad in (((5, 7), (9, 3)), ((12, 0), (0, 14)), ((-2, 9), (11, -3))):
        convolve(
            (14, 21),
            kernel=(3, 3),
            stride=stride,
            dilation=dilation,
            pad=pad,
            channels=16,
            layout=layout,
        )


@layouts
@pytest.mark.parametrize(
    "dtype, result", [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32)]
)
def test_dtypes(convolve, dtype, result, layout):
    for stride in ((1, 1), (2, 2)):
        for channels in channels_of(layout)[-2:]:
            convolve(
                (9, 23),
                stride=stride,
                dtype=dtype,
                result=result,
                bias=True,
                relu=True,
                channels=channels,
                layout=layout,
            )


@layouts
def test_bias_and_relu(convolve, layout):
    for bias, relu in itertools.product((False, True), repeat=2):
        convolve((7, 19), bias=bias, relu=relu, channels=48, layout=layout)


# Past the sizes of tiles.
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "size, channels, batch",
    [((150, 500), 2, 1), ((1, 40000), 3, 1), ((30, 31), 300, 3), ((4000, 3), 20, 1)],
    ids=str,
)
def test_tiles(convolve, size, channels, batch, layout):
    for stride in ((1, 1), (2, 2)):
        for threads in (1, 4):
            convolve(
                size,
                channels=channels,
                batch=batch,
                layout=layout,
                stride=stride,
                threads=threads,
            )


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_nothing(convolve, layout):
    convolve((0, 5), channels=3, layout=layout)
    convolve((5, 0), channels=3, layout=layout, stride=(2, 2))
    convolve((5, 5), channels=3, batch=0, layout=layout)
    # Nothing comes out, so that the gradients are zero.
    convolve((2, 2), channels=3, layout=layout, pad=((0, 0), (0, 0)))


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", PASSES)
def test_threads_do_not_change_a_bit(library, layout, name):
    results = []
    for threads in (1, 2, 3, 4, 4):
        case = Case((40, 41), channels=70, layout=layout, threads=threads)
        p, x, y, w_memory, _, bias = prepare(case, name, True)
        rng = np.random.default_rng(1)
        for memory in (x.memory, y.memory, w_memory):
            memory.array[:] = rng.standard_normal(memory.array.size)
        size = library.Workspace(ctypes.byref(p), threads)
        workspace = Memory(size, np.uint8, True)
        pointers = (x.memory, w_memory, y.memory, bias, workspace)
        assert not library.Convolve(
            library.BestIsa(),
            ctypes.byref(p),
            threads,
            *(memory.pointer for memory in pointers),
        )
        written = {"forward": y.memory, "input_grad": x.memory}.get(name, w_memory)
        results.append(written.array.tobytes())
    assert len(set(results)) == 1


@layouts
def test_special_values(library, layout):
    """NaN and infinity reach what sees them, and nothing else."""
    for isa in ISAS[: library.BestIsa() + 1]:
        for name, stride in itertools.product(PASSES, ((1, 1), (2, 2))):
            case = Case((9, 21), channels=16, layout=layout, stride=stride, relu=True)
            p, x, y, w_memory, w, bias = prepare(case, name, True)
            if name == "forward":
                x.view[0, 0, 0, 4, 17] = np.nan
                x.view[1, 0, 0, 4, 4] = np.inf
                w[:] = abs(w)  # zeros among them
            elif name == "input_grad":
                y.view[0, 0, 0, 2, 7] = np.nan
            else:
                x.view[0, 0, 0, 4, 17] = np.nan
                y.view[0, -1, -1, 3, 8] = np.inf
            with np.errstate(invalid="ignore"):
                want = reference(
                    case, name, x.get(), w.astype(float), y.get(), bias.array
                )
            size = library.Workspace(ctypes.byref(p), 2)
            workspace = Memory(size, np.uint8, True)
            pointers = (x.memory, w_memory, y.memory, bias, workspace)
            assert not library.Convolve(
                ISAS.index(isa),
                ctypes.byref(p),
                2,
                *(memory.pointer for memory in pointers),
            )
            got = {"forward": y, "input_grad": x}
            got = got[name].get() if name in got else w.astype(float)
            np.testing.assert_array_equal(got, want)


@st.composite
def cases(draw):
    def pair(strategy):
        return draw(st.tuples(strategy, strategy))

    kernel = pair(st.integers(1, 5))
    dilation = pair(st.integers(1, 3))
    size = pair(st.integers(1, 24))
    pad = tuple(
        # At least one result.
        (
            low := draw(st.integers(-(i - 1), k * d)),
            draw(st.integers(max(d * (k - 1) + 1 - i - low, -i - low + 1), 9 + k * d)),
        )
        for i, k, d in zip(size, kernel, dilation, strict=True)
    )
    layout = draw(st.sampled_from(LAYOUTS))
    channels = 16 if layout.startswith("block") else draw(st.integers(1, 40))
    dtype = draw(st.sampled_from((F32, F32, BF16)))
    return Case(
        size=size,
        kernel=kernel,
        stride=pair(st.integers(1, 4)),
        dilation=dilation,
        pad=pad,
        batch=draw(st.integers(1, 3)),
        channels=channels,
        layout=layout,
        w_layout=draw(st.sampled_from(("oihw", "hwio"))),
        dtype=dtype,
        result=draw(st.sampled_from((dtype, F32))),
        bias=draw(st.booleans()),
        relu=draw(st.booleans()),
        threads=draw(st.integers(1, 4)),
    )


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(case=cases())
def test_any(library, case):
    for isa in ISAS[: library.BestIsa() + 1]:
        check(library, isa, case)


def test_declines(library):
    p = prepare(Case((8, 8), channels=16), "forward", True)[0]
    assert library.Supports(ctypes.byref(p))
    p.out_channels = 32
    assert not library.Supports(ctypes.byref(p))
    p.out_channels = 16
    p.type = p.result = 1  # float64
    assert not library.Supports(ctypes.byref(p))
    p.type = p.result = 0
    p.strides[2][1] = 64  # y in planes, x is not
    p.strides[2][4] = 1
    assert not library.Supports(ctypes.byref(p))
