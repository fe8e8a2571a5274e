# SPDX-License-Identifier: Apache-2.0
"""The FFI target of the convolution on CPUs, against NumPy in float64."""

import dataclasses
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_layout import _backends
from native import has_vnni

if not _backends.available("cpu"):
    pytest.skip("no CPU kernels", allow_module_level=True)

from jax_layout import _cpu  # noqa: E402

PASSES = ("forward", "input_grad", "weight_grad")
LETTERS = {1: "W", 2: "HW", 3: "DHW"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution; sizes per spatial axis where they are tuples."""

    batch: int = 2
    groups: int = 1
    channels: tuple = (16, 32)  # in, out
    size: tuple = (9, 7)
    kernel: tuple = (3, 3)
    stride: tuple = ()
    dilation: tuple = ()
    pads: tuple = ()  # (low, high) per axis
    x: str = "NHWC"  # "NCHW16c": in blocks
    w: str = "HWIO"
    y: str = ""  # that of x
    types: tuple = ("float32", "float32")
    bias: bool = False
    relu: bool = False
    winograd: bool = False
    method: str = ""

    def __post_init__(self):
        for name, default in (("stride", 1), ("dilation", 1), ("pads", (1, 1))):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * len(self.size))
        object.__setattr__(self, "y", self.y or self.x)

    @property
    def out(self):
        """The spatial sizes of y."""
        return tuple(
            max(0, (n + low + high - (k - 1) * d - 1) // s + 1)
            for n, k, s, d, (low, high) in zip(
                self.size, self.kernel, self.stride, self.dilation, self.pads,
                strict=True,
            )
        )  # fmt: skip

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


def block_of(letters):
    """The letters without the block, and its size."""
    plain = letters.rstrip("0123456789c")
    return plain, int(letters[len(plain) : -1] or 1) if plain != letters else 1


def order_of(letters, first):
    plain, _ = block_of(letters)
    return [plain.index(x) for x in first + LETTERS[len(plain) - 2]]


def to_memory(a, letters, first):
    """From (first..., spatial...) to the order in memory."""
    plain, block = block_of(letters)
    a = np.transpose(a, np.argsort(order_of(letters, first)))
    axis = plain.find("C")
    if block > 1:
        shape = a.shape
        a = a.reshape(*shape[:axis], -1, block, *shape[axis + 1 :])
        a = np.moveaxis(a, axis + 1, -1)
    return np.ascontiguousarray(a)


def from_memory(a, letters, first):
    plain, block = block_of(letters)
    a = np.asarray(a)
    axis = plain.find("C")
    if block > 1:
        a = np.moveaxis(a, -1, axis + 1)
        shape = a.shape
        a = a.reshape(*shape[:axis], -1, *shape[axis + 2 :])
    return np.transpose(a, order_of(letters, first))


def attributes(case, conv_pass):
    """Those of the target, and arguments of conv_plan."""
    i, o = case.channels
    shapes = {
        "x": to_memory(np.empty((case.batch, i, *case.size)), case.x, "NC").shape,
        "w": to_memory(
            np.empty((o, i // case.groups, *case.kernel)), case.w, "OI"
        ).shape,
        "y": to_memory(np.empty((case.batch, o, *case.out)), case.y, "NC").shape,
    }
    result = dict(
        pass_=conv_pass,
        type=case.types[0],
        result=case.types[1],
        x_block=block_of(case.x)[1],
        y_block=block_of(case.y)[1],
        groups=case.groups,
        bias=case.bias,
        relu=case.relu,
        w_format="",
        winograd=case.winograd,
        method=case.method,
    )
    arrays = {f"{name}_shape": shape for name, shape in shapes.items()}
    arrays["x_order"] = order_of(case.x, "NC")
    arrays["w_order"] = order_of(case.w, "OI")
    arrays["y_order"] = order_of(case.y, "NC")
    arrays["stride"], arrays["dilation"] = case.stride, case.dilation
    arrays["pad_low"], arrays["pad_high"] = (
        tuple(pads[side] for pads in case.pads) for side in (0, 1)
    )
    return result | {k: [int(x) for x in v] for k, v in arrays.items()}


RESULT = {"forward": "y", "input_grad": "x", "weight_grad": "w"}
OPERANDS = {"forward": "xw", "input_grad": "yw", "weight_grad": "xy"}


def call(attributes, *operands, workspace=True):
    """Calls the target; the result in the order of memory."""
    plan = _cpu.conv_plan(**attributes)
    assert plan["supported"], attributes
    shape = attributes[RESULT[attributes["pass_"]] + "_shape"]
    results = [jax.ShapeDtypeStruct(shape, attributes["result"])]
    if workspace:  # more than is asked for may be given, too
        size = plan["workspace"] or 8 << 20
        results.append(jax.ShapeDtypeStruct((size,), "uint8"))
    target = jax.ffi.ffi_call("jax_layout_conv", results)
    given = {
        k: np.array(v, np.int64) if isinstance(v, list) else v
        for k, v in attributes.items()
    }
    return jax.jit(lambda *operands: target(*operands, **given))(*operands)[0]


def wide(x):
    return np.asarray(x).astype(np.float64)


def reference(case, conv_pass, x, w, y):
    """One pass over arrays (n, c, spatial...) and (o, i, spatial...), in float64."""
    n, g, spatial = case.batch, case.groups, len(case.size)
    x, w, y = (wide(a) for a in (x, w, y))
    result = {"forward": y, "input_grad": x, "weight_grad": w}[conv_pass]
    result = np.zeros_like(result)
    # Room for every tap of every position, whatever the padding.
    low = [max(0, pads[0]) for pads in case.pads]
    room = [
        max(size + lo, lo - pads[0] + (out - 1) * s + (k - 1) * d + 1)
        for size, lo, pads, out, s, k, d in zip(
            case.size, low, case.pads, case.out, case.stride, case.kernel,
            case.dilation, strict=True,
        )
    ]  # fmt: skip
    inside = tuple(
        slice(lo, lo + size) for lo, size in zip(low, case.size, strict=True)
    )
    padded = np.zeros((*x.shape[:2], *room))
    # x beyond a negative padding counts for nothing.
    kept = tuple(
        slice(lo + max(0, -pads[0]), lo + size + min(0, pads[1]))
        for lo, size, pads in zip(low, case.size, case.pads, strict=True)
    )
    mask = np.zeros(room)
    mask[kept] = 1
    if conv_pass != "input_grad":
        padded[(..., *inside)] = x
        padded *= mask
    i, o = (channels // g for channels in case.channels)
    positions = int(np.prod(case.out))
    y = y.reshape(n, g, o, positions)
    w = w.reshape(g, o, i, *case.kernel)
    for tap in itertools.product(*(range(k) for k in case.kernel)):
        at = tuple(
            slice(
                lo - pads[0] + t * d, lo - pads[0] + t * d + max(0, out - 1) * s + 1, s
            )
            if out
            else slice(0)
            for lo, pads, t, d, s, out in zip(
                low, case.pads, tap, case.dilation, case.stride, case.out, strict=True
            )
        )
        seen = padded[(..., *at)]
        columns = seen.reshape(n, g, i, positions)
        taps = w[(..., *tap)]
        if conv_pass == "forward":
            result += (taps @ columns).reshape(result.shape)
        elif conv_pass == "input_grad":
            seen += (np.swapaxes(taps, 1, 2) @ y).reshape(seen.shape)
        else:
            sums = (y @ np.swapaxes(columns, 2, 3)).sum(0)
            result[(..., *tap)] = sums.reshape(result.shape[:2])
    if conv_pass == "input_grad":
        result = (padded * mask)[(..., *inside)]
    assert result.ndim == spatial + 2
    return result


def sample(rng, shape, dtype, exact):
    x = rng.integers(-3, 4, shape) if exact else rng.standard_normal(shape)
    return np.asarray(jnp.asarray(x, jnp.dtype(dtype)))


def check(case, conv_pass, exact=None, workspace=True):
    """Compares one pass with the reference."""
    kind, result_type = case.types
    exact = kind in ("float32", "int8") if exact is None else exact
    rng = np.random.default_rng(0)
    i, o = case.channels
    arrays = {
        "x": sample(rng, (case.batch, i, *case.size), kind, exact),
        "w": sample(rng, (o, i // case.groups, *case.kernel), kind, exact),
        "y": sample(rng, (case.batch, o, *case.out), kind, exact),
    }
    order = {"x": (case.x, "NC"), "w": (case.w, "OI"), "y": (case.y, "NC")}
    operands = [to_memory(arrays[name], *order[name]) for name in OPERANDS[conv_pass]]
    expected = reference(case, conv_pass, **arrays)
    magnitude = np.zeros(())
    if not exact:
        sums = {name: np.abs(wide(a)) for name, a in arrays.items()}
        magnitude = reference(case, conv_pass, **sums)
    if case.bias:
        bias = sample(rng, (o,), result_type, exact)
        operands.append(bias)
        column = wide(bias).reshape(-1, *[1] * len(case.size))
        expected, magnitude = expected + column, magnitude + np.abs(column)
    if case.relu:
        expected = np.maximum(expected, 0)
    got = call(attributes(case, conv_pass), *operands, workspace=workspace)
    got = from_memory(got, *order[RESULT[conv_pass]])
    assert got.dtype == jnp.dtype(result_type)
    if exact:  # the sum, and the rounding of it to 16 bits
        np.testing.assert_array_equal(wide(got), wide(expected.astype(got.dtype)))
    else:
        error = np.abs(wide(got) - expected)
        tolerance = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-10}
        bound = tolerance[result_type] * (magnitude + 1e-3)
        assert np.all(error <= bound), (error - bound).max()


@pytest.fixture(autouse=True)
def supported():
    if not _cpu.conv_plan(**attributes(Case(), "forward"))["supported"]:
        pytest.skip("no oneDNN on this machine")


all_passes = pytest.mark.parametrize("conv_pass", PASSES)


@all_passes
@pytest.mark.parametrize("w", ["OIHW", "HWIO", "OHWI"])
@pytest.mark.parametrize("x", ["NHWC", "NCHW", "NCHW16c", "NCHW8c", "CHWN", "NHCW"])
@pytest.mark.parametrize("groups", [1, 4, 32])
def test_orders(groups, x, w, conv_pass):
    check(Case(groups=groups, channels=(32, 64), x=x, w=w), conv_pass)


@all_passes
@pytest.mark.parametrize(
    "x, y",
    [
        *itertools.permutations(["NHWC", "NCHW", "NCHW16c"], 2),
        ("NCHW8c", "NCHW16c"),
        ("CNHW16c", "NCHW16c"),
    ],
)
def test_x_and_y_in_different_orders(x, y, conv_pass):
    check(Case(channels=(32, 32), x=x, y=y), conv_pass)


@all_passes
@pytest.mark.parametrize("x", ["NHWC", "NCHW"])
@pytest.mark.parametrize(
    "changes",
    [
        dict(stride=(2, 2)),
        dict(stride=(2, 3), pads=((0, 1), (2, 0))),
        dict(stride=(3, 1), kernel=(1, 1), pads=((0, 0), (0, 0))),
        dict(stride=(2, 2), kernel=(1, 1), pads=((1, 0), (0, 1))),
        dict(dilation=(2, 3), pads=((2, 2), (3, 3))),
        dict(dilation=(2, 2), stride=(2, 2), pads=((3, 1), (0, 4))),
        dict(pads=((-1, 0), (0, -2))),
        dict(pads=((-2, 2), (3, -3))),
        dict(kernel=(1, 1), pads=((-2, -1), (0, 0)), stride=(2, 2)),
        dict(kernel=(5, 2), pads=((4, 3), (1, 0))),
        dict(pads=((6, 5), (7, 4))),
        dict(kernel=(9, 7), pads=((0, 0), (0, 0))),
        dict(kernel=(2, 2), pads=((0, 0), (0, 0)), stride=(4, 5)),
        dict(size=(1, 1)),
        dict(batch=1, size=(5, 31), kernel=(1, 4), pads=((0, 0), (3, 0))),
    ],
)
@pytest.mark.parametrize("groups", [1, 2, 16])
def test_windows(groups, changes, x, conv_pass):
    check(Case(groups=groups, channels=(16, 32), x=x).replace(**changes), conv_pass)


@all_passes
@pytest.mark.parametrize("x", ["NHWC", "NCHW"])
@pytest.mark.parametrize(
    "groups, channels",
    [
        (1, (1, 1)), (1, (3, 5)), (1, (7, 64)), (1, (65, 17)), (1, (100, 130)),
        (2, (6, 10)), (3, (3, 3)), (3, (3, 9)), (5, (35, 5)), (7, (7, 7)),
        (12, (24, 12)), (33, (33, 66)), (4, (64, 128)),
    ],
)  # fmt: skip
def test_odd_channels(groups, channels, x, conv_pass):
    check(Case(groups=groups, channels=channels, x=x), conv_pass)


@all_passes
@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize(
    "size, x, w",
    [
        ((40,), "NWC", "WIO"),
        ((40,), "NCW", "OIW"),
        ((40,), "NCW16c", "OIW"),
        ((5, 6, 7), "NDHWC", "DHWIO"),
        ((5, 6, 7), "NCDHW", "OIDHW"),
        ((5, 6, 7), "NCDHW16c", "OIDHW"),
    ],
)
def test_one_and_three_spatial_axes(size, x, w, groups, conv_pass):
    case = Case(
        groups=groups, channels=(32, 32), size=size, kernel=(3,) * len(size), x=x, w=w
    )
    check(case, conv_pass)
    rank = len(size)
    pads = ((0, 2), (1, 1), (2, 0))[:rank]
    check(case.replace(stride=(2, 1, 3)[:rank], pads=pads), conv_pass)
    check(case.replace(dilation=(1, 2, 2)[-rank:], batch=1), conv_pass)


TYPES = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
]


@all_passes
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("x", ["NHWC", "NCHW", "NCHW16c"])
@pytest.mark.parametrize("groups", [1, 4, 32])
def test_types(groups, x, types, conv_pass):
    case = Case(groups=groups, channels=(32, 64), x=x, w="OIHW", types=types)
    check(case, conv_pass)
    check(case.replace(stride=(2, 2), batch=5), conv_pass)


# Without, oneDNN is not asked: test_int8_without_vnni.
vnni = pytest.mark.skipif(not has_vnni(), reason="no VNNI here")


@vnni
@pytest.mark.parametrize("result", ["int32", "float32"])
@pytest.mark.parametrize("x", ["NHWC", "NCHW"])
@pytest.mark.parametrize("groups", [1, 4, 32])
def test_int8(groups, x, result):
    case = Case(groups=groups, channels=(32, 64), x=x, types=("int8", result))
    check(case, "forward")
    check(case.replace(bias=True, relu=True), "forward")


@vnni
@pytest.mark.parametrize("x", ["NHWC", "NCHW"])
def test_int8_weights_that_are_packed_in_pieces(x):
    case = Case(channels=(256, 256), size=(9, 9), x=x, types=("int8", "int32"))
    check(case, "forward")
    check(case.replace(channels=(3, 384), kernel=(16, 16), size=(33, 33)), "forward")


# Large enough to be cut into tiles, along each axis.
LARGE = [
    Case(batch=9, channels=(64, 128), size=(28, 28)),
    Case(batch=1, channels=(64, 64), size=(57, 55)),
    Case(batch=1, channels=(64, 64), size=(57, 55), stride=(2, 2)),
    Case(batch=3, channels=(64, 128), size=(57, 33), stride=(3, 2), kernel=(1, 1)),
    Case(batch=3, channels=(64, 64), size=(64, 33), dilation=(3, 2)),
    Case(batch=1, channels=(256, 320), size=(7, 7)),
    Case(batch=5, channels=(320, 256), size=(7, 7)),
    Case(batch=1, channels=(3, 64), size=(113, 113), kernel=(7, 7), stride=(2, 2)),
    Case(batch=3, channels=(256, 256), size=(28, 28), groups=4),
    Case(batch=1, channels=(256, 512), size=(14, 14), groups=2),
    Case(batch=2, channels=(512, 512), size=(20, 20), kernel=(1, 1)),
    Case(batch=2, channels=(256, 512), size=(14, 14), kernel=(1, 1), stride=(2, 2),
         pads=((0, 0), (0, 0))),  # weights in blocks of 48
    Case(batch=8, channels=(320, 1280), size=(7, 7), kernel=(1, 1),
         pads=((0, 0), (0, 0))),
    Case(batch=2, channels=(64, 64), size=(9, 20, 20), kernel=(3, 3, 3),
         x="NDHWC", w="DHWIO"),
    Case(batch=1, channels=(64, 64), size=(7000,), kernel=(3,), x="NWC", w="WIO"),
]  # fmt: skip


@all_passes
@pytest.mark.parametrize("order", ["last", "first", "16c"])
@pytest.mark.parametrize("case", LARGE, ids=range(len(LARGE)))
def test_tiles(case, order, conv_pass):
    if order != "last":
        if order == "16c" and case.channels[0] % 16:
            return
        spatial = LETTERS[len(case.size)]
        x = "NC" + spatial + ("16c" if order == "16c" else "")
        case = case.replace(x=x, y=x, w="OI" + spatial)
    check(case, conv_pass)


@all_passes
@pytest.mark.parametrize(
    "x, groups, channels",
    [
        ("NCHW24c", 1, (240, 240)),
        ("NCHW48c", 1, (240, 192)),
        ("NCHW16c", 64, (256, 512)),
        ("NCHW16c", 32, (256, 256)),
    ],
)
def test_tiles_are_of_whole_blocks(x, groups, channels, conv_pass):
    case = Case(batch=1, groups=groups, channels=channels, size=(20, 20), x=x)
    check(case.replace(kernel=(5, 5)), conv_pass)


@all_passes
@pytest.mark.parametrize("case", LARGE, ids=range(len(LARGE)))
def test_tiles_of_bfloat16(case, conv_pass):
    case = case.replace(types=("bfloat16", "bfloat16"))
    check(case, conv_pass)


@all_passes
def test_without_workspace(conv_pass):
    check(LARGE[0].replace(x="NCHW"), conv_pass, workspace=False)


@pytest.mark.parametrize("types", [("float32",) * 2, *TYPES], ids="-".join)
@pytest.mark.parametrize("x", ["NHWC", "NCHW", "NCHW8c"])
@pytest.mark.parametrize("groups", [1, 32])
def test_bias_and_relu(groups, x, types):
    case = Case(groups=groups, channels=(32, 64), x=x, types=types, bias=True)
    check(case, "forward")
    check(case.replace(relu=True), "forward")
    check(case.replace(relu=True, bias=False), "forward")
    check(case.replace(relu=True, batch=8, size=(56, 56)), "forward")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("x", ["NHWC", "NCHW"])
def test_relu_of_nan(x, kind):
    case = Case(x=x, types=(kind, kind), relu=True)
    given = attributes(case, "forward")
    w = jnp.ones(given["w_shape"], kind)
    y = call(given, jnp.full(given["x_shape"], jnp.nan, kind), w)
    assert np.all(np.isnan(wide(y)))
    y = call(given, jnp.full(given["x_shape"], -jnp.inf, kind), w)
    assert np.all(wide(y) == 0)


@all_passes
@pytest.mark.parametrize(
    "changes",
    [
        dict(batch=0),
        dict(channels=(0, 32)),
        dict(channels=(16, 0)),
        dict(size=(0, 7), pads=((2, 2), (1, 1))),
        dict(size=(2, 7), pads=((0, 0), (0, 0))),
        dict(size=(3, 3), pads=((-3, 4), (0, 0))),
        dict(size=(3, 3), pads=((-4, 9), (0, 0))),
        dict(size=(1, 1), kernel=(1, 1), pads=((3, 3), (2, 2)), stride=(2, 2)),
    ],
)
def test_nothing_to_sum(changes, conv_pass):
    case = Case().replace(**changes)
    check(case, conv_pass)
    if conv_pass == "forward":
        check(case.replace(bias=True, relu=True), conv_pass)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(pass_="backward"), "pass_ must be forward, .* got backward"),
        (dict(type="int7"), "unknown dtype int7"),
        (dict(x_shape=[2, 9, 7]), r"x_shape must have 4 axes, got \(2, 9, 7\)"),
        (dict(x_shape=[2, 9, 7, -16]), "must not be negative"),
        (dict(x_shape=[2**40, 2**40, 1, 1]), r"smaller than 2\^63 bytes"),
        (dict(x_order=[0, 3, 1, 1]), r"x_order must reorder 4 axes, got \(0, 3, 1, 1"),
        (dict(w_order=[0, 1, 2]), "w_order must reorder 4 axes"),
        (dict(x_block=4), "x_shape must have 4 axes and one of size 4"),
        (dict(y_block=0), "y_block must be positive, got 0"),
        (dict(stride=[0, 1]), r"stride must be positive for each of 2 .* \(0, 1\)"),
        (dict(dilation=[1]), "dilation must be positive for each of 2"),
        (dict(pad_low=[1, 1, 1]), "pad_low must be given for each of 2"),
        (dict(stride=[1] * 4), "1 to 3 spatial axes are supported, got 4"),
        (dict(groups=3), "divisible by groups, got 16 and 32 channels and groups=3"),
        (dict(groups=0), "divisible by groups"),
        (dict(w_shape=[3, 3, 8, 32]), "w must have 32 and 16 channels, got 32 and 8"),
        (dict(y_shape=[2, 9, 8, 32]), "y must have extent 7 along spatial axis 1"),
        (dict(y_shape=[3, 9, 7, 32]), "one batch size, got 2 and 3"),
        (dict(pass_="input_grad", relu=True), "are of the forward pass"),
        (dict(w_format="OHWI16o"), r"w_format is of .* w_order as the axes are"),
        (dict(pass_="input_grad", w_format="OHWI16o"), "w_format is of the forward"),
        (dict(dilation=[2**60, 1], w_shape=[2**20, 3, 16, 32]), "smaller|too large"),
    ],
)
def test_wrong_attributes_are_errors(changes, message):
    given = attributes(Case(), "forward")
    operands = [np.ones(given[f"{name}_shape"], "float32") for name in "xw"]
    changed = given | changes
    with pytest.raises(ValueError, match=message):
        _cpu.conv_plan(**changed)
    target = jax.ffi.ffi_call(
        "jax_layout_conv", jax.ShapeDtypeStruct(given["y_shape"], "float32")
    )
    arrays = {
        k: np.array(v, np.int64) if isinstance(v, list) else v
        for k, v in changed.items()
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(lambda *operands: target(*operands, **arrays))(*operands)


def test_orders_of_weights_that_no_kernel_has_are_errors():
    case = Case(w="OIHW")
    given = attributes(case, "forward") | {"w_format": "OHWI3o"}
    assert not _cpu.conv_plan(**given)["supported"]
    target = jax.ffi.ffi_call(
        "jax_layout_conv", jax.ShapeDtypeStruct(given["y_shape"], "float32")
    )
    operands = [np.ones(given[f"{name}_shape"], "float32") for name in "xw"]
    given = {k: np.array(v) if isinstance(v, list) else v for k, v in given.items()}
    with pytest.raises(jax.errors.JaxRuntimeError, match="no kernel on this machine"):
        jax.jit(lambda *operands: target(*operands, **given))(*operands)


@pytest.mark.parametrize(
    "operands, results, message",
    [
        ("x", "y", "expected 2 operands and 1 or 2 results, got 1 and 1"),
        ("xww", "y", "got 3 and 1"),
        ("xw", "yyy", "got 2 and 3"),
        ("xx", "y", "w must have 4608 elements of float32, got 2016"),
        ("xw", "x", "y must have 4032 elements"),
    ],
)
def test_wrong_buffers_are_errors(operands, results, message):
    given = attributes(Case(), "forward")
    shapes = {name: given[f"{name}_shape"] for name in "xwy"}
    target = jax.ffi.ffi_call(
        "jax_layout_conv",
        [jax.ShapeDtypeStruct(shapes[name], "float32") for name in results],
    )
    arrays = {
        k: np.array(v, np.int64) if isinstance(v, list) else v for k, v in given.items()
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(
            jax.jit(lambda *operands: target(*operands, **arrays))(
                *(np.ones(shapes[name], "float32") for name in operands)
            )
        )


def test_types_without_a_kernel():
    for types in (("float64",) * 2, ("float32", "bfloat16"), ("int32",) * 2):
        plan = _cpu.conv_plan(**attributes(Case(types=types), "forward"))
        assert not plan["supported"]
    case = Case(types=("int8", "int32"))
    assert not _cpu.conv_plan(**attributes(case, "input_grad"))["supported"]


def test_calls_from_many_threads():
    import concurrent.futures

    cases = [(LARGE[0], p) for p in PASSES] + [(LARGE[5], p) for p in PASSES]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: check(*cases[i % len(cases)]), range(24)))


def test_inside_a_loop():
    given = attributes(Case(batch=4, channels=(16, 16), size=(32, 32)), "forward")
    w = np.random.default_rng(0).integers(-1, 2, given["w_shape"]).astype("float32")
    x = np.random.default_rng(1).integers(-1, 2, given["x_shape"]).astype("float32")
    looped = jax.jit(
        lambda x, w: lax.fori_loop(0, 3, lambda _, x: call(given, x, w), x)
    )
    expected = x
    for _ in range(3):
        expected = call(given, expected, w)
    np.testing.assert_array_equal(looped(x, w), expected)


def test_which_groups_have_kernels_of_ours():
    def ours(case, conv_pass="forward", **changes):
        given = attributes(case, conv_pass) | changes
        return _cpu.conv_plan(**given)["implementation"] == "grouped"

    case = Case(groups=32, channels=(256, 256), size=(14, 14))
    assert ours(case) and ours(case, "input_grad")
    assert ours(case.replace(x="NCHW", w="OIHW", stride=(2, 2)))
    assert ours(case.replace(batch=1, kernel=(5, 5), dilation=(2, 2)))
    # What oneDNN has faster, or alone.
    assert not ours(case.replace(stride=(2, 2)))
    assert not ours(case.replace(channels=(512, 512)))
    assert not ours(case.replace(kernel=(1, 1), pads=((0, 0),) * 2))
    assert not ours(case.replace(x="NCHW8c"))
    assert not ours(case.replace(types=("bfloat16", "bfloat16")))
    assert not ours(case, "weight_grad")
    assert not ours(case.replace(stride=(2, 2), x="NCHW"), "input_grad")
    assert not ours(case.replace(groups=16))
    assert not ours(case.replace(w="OIHW"), w_format="OHWI16o")


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_library_starts_no_threads():
    code = """
import os
import jax, jax.numpy as jnp
from test_conv_kernels import LARGE, PASSES, check
jax.block_until_ready(jax.jit(jnp.matmul)(jnp.ones((512, 512)), jnp.ones((512, 512))))
before = len(os.listdir("/proc/self/task"))
for conv_pass in PASSES:
    check(LARGE[0].replace(x="NCHW"), conv_pass)
print(len(os.listdir("/proc/self/task")) - before)
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path)}  # where this file and native are
        | {"OPENBLAS_NUM_THREADS": "1"},  # NumPy's
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.stdout.split() == ["0"], process.stderr
