# SPDX-License-Identifier: Apache-2.0
"""Convolutions in groups of a few channels, exactly, for every instruction set."""

import ctypes
import dataclasses
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from test_conv_depthwise import (
    F32,
    ISAS,
    PASSES,
    Case,
    CProblem,
    Images,
    Memory,
    load,
    taps,
)

import jax_layout as jl
from jax_layout import _backends
from native import compile_library, sources

SOURCES = sources(
    "cpu/conv/grouped/*.cc",
    "cpu/isa.cc",
    "cpu/permute/*.cc",
    "tests/convnet/kernels/conv_grouped_library.cc",
)
LANES = dict(zip(ISAS, (4, 8, 16), strict=True))
LAYOUTS = ("nhwc", "nchw", "gaps_last", "gaps_planes")


@dataclasses.dataclass
class Groups(Case):
    """Groups of `ins` channels of x and `outs` of y."""

    groups: int = 8
    ins: int = 8
    outs: int = 8
    y_layout: str = ""  # that of x

    def served(self, isa, name):
        """Whether there is a kernel for a pass."""
        lanes = LANES[isa]
        ins, outs = self.ins, self.outs
        if name == "weight_grad" or (name == "input_grad" and self.stride != (1, 1)):
            return False
        if name == "input_grad":
            ins, outs = outs, ins
        if max(ins, outs) > 16 or self.groups == 1:
            return False
        if outs >= lanes:
            return outs % lanes == 0
        members = lanes // outs
        return (
            lanes % outs == 0
            and members <= lanes // 4
            and self.groups % members == 0
            and ins <= outs
        )


def filters(layout, shape, at_end):
    """The memory of w, its strides, and a view (o, i, h, w)."""
    order = ["oihw".index(axis) for axis in layout]
    memory = Memory(int(np.prod(shape)), F32, at_end)
    memory.array[:] = np.nan
    view = memory.array.reshape([shape[axis] for axis in order])
    view = view.transpose(np.argsort(order))
    o, i, h, w = (stride // 4 for stride in view.strides)
    return memory, (o, i, 0, h, w), view


def reference(case, name, x, w, y, bias):
    """What is written, in float64."""
    images = (slice(None), slice(None))
    n, g = case.batch, case.groups
    w = w.astype(np.float64).reshape(g, case.outs, case.ins, *case.kernel)
    result = np.zeros((y if name == "forward" else x).shape)
    for tap, to, of in taps(case):
        if name == "forward":
            columns = x[(*images, *of)]
            rows, cols = columns.shape[2:]
            columns = columns.reshape(n, g, case.ins, rows * cols)
            product = w[(..., *tap)] @ columns
            result[(*images, *to)] += product.reshape(n, result.shape[1], rows, cols)
        else:
            columns = y[(*images, *to)]
            rows, cols = columns.shape[2:]
            columns = columns.reshape(n, g, case.outs, rows * cols)
            product = w[(..., *tap)].swapaxes(1, 2) @ columns
            result[(*images, *of)] += product.reshape(n, result.shape[1], rows, cols)
    if name == "forward":
        if case.bias:
            result += bias.astype(np.float64)[:, None, None]
        if case.relu:
            result = np.maximum(result, 0)
    return result


def prepare(case, name, at_end):
    """The C problem and its arrays: small integers, so that sums are exact."""
    c = case
    rng = np.random.default_rng(c.seed)
    channels = {"x": c.groups * c.ins, "y": c.groups * c.outs}
    x = Images(c.layout, c.batch, channels["x"], *c.size, F32, at_end)
    y_layout = c.y_layout or c.layout
    y = Images(y_layout, c.batch, channels["y"], *c.out, F32, at_end)
    w_memory, w_strides, w = filters(
        c.w_layout, (channels["y"], c.ins, *c.kernel), at_end
    )
    w[:] = rng.integers(-3, 4, w.shape)
    bias = Memory(channels["y"], F32, at_end)
    bias.array[:] = rng.integers(-3, 4, channels["y"])
    read = x if name == "forward" else y
    read.set(rng.integers(-3, 4, read.get().shape))
    p = CProblem()
    p.pass_ = PASSES.index(name)
    p.batch, p.groups = c.batch, c.groups
    p.in_channels, p.out_channels = channels["x"], channels["y"]
    p.in_[:], p.out[:] = (1, *c.size), (1, *c.out)
    p.kernel[:], p.stride[:] = (1, *c.kernel), (1, *c.stride)
    p.dilation[:] = (1, *c.dilation)
    p.pad_low[:] = (0, *(low for low, _ in c.pad))
    p.pad_high[:] = (0, *(high for _, high in c.pad))
    for i, strides in enumerate((x.strides, w_strides, y.strides)):
        p.strides[i][:] = strides
    p.blocks[:] = (1, 1, 1)
    p.bias, p.relu = c.bias and name == "forward", c.relu and name == "forward"
    return p, x, y, w_memory, w, bias


def run(library, isa, case, p, x, y, w_memory, bias, at_end=True):
    """Calls the kernel; whether it kept to its workspace."""
    index = ISAS.index(isa)
    size = library.Workspace(index, ctypes.byref(p), case.threads)
    workspace = Memory(size, np.uint8, at_end)
    memories = (x.memory, w_memory, y.memory, bias, workspace)
    code = library.Convolve(
        index, ctypes.byref(p), case.threads, *(memory.pointer for memory in memories)
    )
    assert code == 0
    return workspace.intact()


def check(library, isa, case, at_end=True):
    """Compares the passes that there are kernels for with NumPy; their number."""
    done = 0
    for name in PASSES:
        p, x, y, w_memory, w, bias = prepare(case, name, at_end)
        served = case.served(isa, name)
        assert bool(library.Supports(ISAS.index(isa), ctypes.byref(p))) == served
        if not served:
            continue
        done += 1
        want = reference(case, name, x.get(), w, y.get(), bias.array)
        memories = (x.memory, y.memory, w_memory, bias)
        before = [memory.array.copy() for memory in memories]
        assert run(library, isa, case, p, x, y, w_memory, bias, at_end)
        got = y if name == "forward" else x
        np.testing.assert_array_equal(got.get(), want, err_msg=name)
        assert all(memory.intact() for memory in memories)
        # Nothing else is written: not the gaps either.
        got.set(np.full(want.shape, np.nan))
        for memory, array in zip(memories, before, strict=True):
            assert memory.array.tobytes() == array.tobytes()
    return done


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return load(compile_library(tmp_path_factory.mktemp("kernels"), SOURCES))


@pytest.fixture(params=ISAS)
def convolve(request, library):
    """A function that checks a case in one instruction set."""
    if ISAS.index(request.param) > library.BestIsa():
        pytest.skip(f"no {request.param} here")

    def run(size, **case):
        done = [
            check(library, request.param, Groups(size, **case), at_end)
            for at_end in (True, False)
        ]
        return done[0]

    return run


layouts = pytest.mark.parametrize("layout", LAYOUTS)
# Groups, and channels of one in x and y.
CHANNELS = [(8, 8, 8), (4, 16, 16), (16, 4, 4), (4, 3, 8), (2, 5, 16), (8, 16, 8)]
SIZES = [(1, 1), (1, 9), (9, 1), (2, 3), (7, 7), (8, 14), (5, 28), (13, 33), (9, 56)]


@layouts
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(convolve, size, layout):
    for stride, groups, each in (((1, 1), 8, 8), ((1, 1), 8, 4), ((2, 2), 4, 8)):
        assert convolve(
            size, groups=groups, ins=each, outs=each, layout=layout, stride=stride
        )


@layouts
@pytest.mark.parametrize("groups, ins, outs", CHANNELS)
def test_channels(convolve, groups, ins, outs, layout):
    for w_layout in ("oihw", "hwio", "ohwi"):
        convolve(
            (6, 17), groups=groups, ins=ins, outs=outs, layout=layout, w_layout=w_layout
        )


@pytest.mark.parametrize(
    "groups, ins, outs",
    [
        (1, 8, 8), (8, 2, 2), (8, 6, 6), (8, 9, 8), (8, 12, 12), (8, 20, 8),
        (8, 24, 24), (8, 32, 32), (3, 8, 8), (6, 4, 4), (7, 7, 7), (16, 1, 1),
    ],
)  # fmt: skip
def test_channels_that_may_not_be_served(convolve, groups, ins, outs):
    convolve((5, 6), groups=groups, ins=ins, outs=outs)


@pytest.mark.parametrize(
    "x, y", [p for p in itertools.product(LAYOUTS, repeat=2) if p[0] != p[1]]
)
def test_x_and_y_in_different_orders(convolve, x, y):
    assert convolve((6, 17), layout=x, y_layout=y) == 2


@layouts
@pytest.mark.parametrize("kernel", [(1, 1), (1, 3), (2, 2), (5, 5), (7, 3), (4, 11)])
def test_kernels(convolve, kernel, layout):
    for size in ((6, 5), (11, 37)):
        pad = tuple((k // 2, (k - 1) // 2) for k in kernel)
        for stride in ((1, 1), (2, 2), (1, 3)):
            convolve(size, kernel=kernel, pad=pad, layout=layout, stride=stride)
        assert convolve(size, kernel=kernel, pad=((9, 9), (12, 12)), layout=layout)


@layouts
@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (3, 3), (4, 5), (50, 50)], ids=str)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 2), (3, 2), (6, 4)], ids=str)
def test_strides_and_dilations(convolve, stride, dilation, layout):
    for pad in (((5, 7), (9, 3)), ((12, 0), (0, 14)), ((-2, 9), (11, -3))):
        assert convolve(
            (14, 21), stride=stride, dilation=dilation, pad=pad, layout=layout
        )


@layouts
def test_bias_and_relu(convolve, layout):
    for bias, relu in itertools.product((False, True), repeat=2):
        for groups, each in ((4, 8), (4, 4), (3, 16)):
            assert convolve(
                (7, 19), bias=bias, relu=relu, groups=groups, ins=each, outs=each,
                layout=layout,
            )  # fmt: skip


# Past the sizes of tiles.
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "size, groups, batch",
    [((150, 200), 2, 1), ((1, 5000), 4, 1), ((30, 31), 32, 3), ((4000, 3), 2, 2)],
    ids=str,
)
def test_tiles(convolve, size, groups, batch, layout):
    for stride in ((1, 1), (2, 2)):
        for threads in (1, 4):
            assert convolve(
                size, groups=groups, batch=batch, layout=layout, stride=stride,
                threads=threads,
            )  # fmt: skip


@layouts
def test_special_values(library, layout):
    """NaN and infinity reach what sees them, and nothing else."""
    for isa in ISAS[: library.BestIsa() + 1]:
        for name, stride in (("forward", 1), ("forward", 2), ("input_grad", 1)):
            case = Groups((9, 21), layout=layout, stride=(stride,) * 2, relu=True)
            p, x, y, w_memory, w, bias = prepare(case, name, True)
            # The channels of the second group, and of the last.
            read = x if name == "forward" else y
            view = read.view.reshape(case.batch, -1, *read.view.shape[3:])
            view[0, 9, 4, 7] = np.nan
            view[1, -1, 4, 4] = np.inf
            with np.errstate(invalid="ignore"):
                want = reference(case, name, x.get(), w, y.get(), bias.array)
            assert np.isnan(want).any()
            assert run(library, isa, case, p, x, y, w_memory, bias)
            got = y if name == "forward" else x
            np.testing.assert_array_equal(got.get(), want)


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
    outs = draw(st.sampled_from((4, 8, 16)))
    return Groups(
        size=size,
        kernel=kernel,
        stride=pair(st.sampled_from((1, 1, 2, 3))),
        dilation=dilation,
        pad=pad,
        batch=draw(st.integers(1, 3)),
        groups=draw(st.sampled_from((4, 8))),
        ins=draw(st.one_of(st.just(outs), st.integers(1, outs))),
        outs=outs,
        layout=draw(st.sampled_from(LAYOUTS)),
        y_layout=draw(st.sampled_from(LAYOUTS)),
        w_layout=draw(st.sampled_from(("oihw", "hwio"))),
        bias=draw(st.booleans()),
        relu=draw(st.booleans()),
        threads=draw(st.integers(1, 4)),
    )


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(case=cases())
def test_any(library, case):
    for isa in ISAS[: library.BestIsa() + 1]:
        check(library, isa, case)


def test_declines(library):
    def supports(name="forward", **changes):
        p = prepare(Groups((8, 8)), name, True)[0]
        for field, value in changes.items():
            setattr(p, field, value)
        return bool(library.Supports(library.BestIsa(), ctypes.byref(p)))

    assert supports()
    assert not supports(type=1, result=1)  # float64
    assert not supports(type=2)  # bfloat16
    assert not supports("weight_grad")
    assert not supports(blocks=(ctypes.c_int64 * 3)(8, 1, 8))
    assert not supports("input_grad", stride=(ctypes.c_int64 * 3)(1, 2, 1))
    assert not supports(kernel=(ctypes.c_int64 * 3)(2, 3, 3))


# --- through JAX


@pytest.mark.skipif(not _backends.available("cpu"), reason="no CPU kernels")
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("groups, ins, outs", [(32, 8, 8), (16, 4, 4), (4, 16, 16)])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"dilation": 2}, {"bias": True}], ids=str
)
def test_conv(order, groups, ins, outs, options):
    rng = np.random.default_rng(0)
    options = dict(options)
    has_bias = options.pop("bias", False)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    x = array(2, groups * ins, 13, 15)
    w = array(groups * outs, ins, 3, 3)
    bias = array(groups * outs) if has_bias else None

    def ours(x, w):
        if order == "NHWC":
            x = jl.with_memory_format(x, jl.channels_last)
        return jl.conv(x, w, bias, padding=2, groups=groups, **options)

    def plain(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (options.get("stride", 1),) * 2, [(2, 2)] * 2,
            rhs_dilation=(options.get("dilation", 1),) * 2,
            feature_group_count=groups,
        )  # fmt: skip
        return y if bias is None else y + bias[:, None, None]

    def gradient(f):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))

    assert "jax_layout_conv" in jax.jit(ours).lower(x, w).as_text()
    np.testing.assert_allclose(
        jax.jit(ours)(x, w), plain(x, w), rtol=1e-4, atol=1e-4 * (ins * 9) ** 0.5
    )
    for a, b in zip(gradient(ours)(x, w), gradient(plain)(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
