# SPDX-License-Identifier: Apache-2.0
"""The CUDA GEMM over a cuBLASLt of our own, on the host.

`fake_cublaslt/` multiplies in plain loops and refuses what NVIDIA's library is
documented to refuse. Needs g++, no GPU, no CUDA toolkit. The sanitized build runs
this file once more in a subprocess (test_everything_again_with_sanitizers).
"""

import ctypes
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import threading

import ml_dtypes
import numpy as np
import pytest

from native import ROOT, check_sanitized

SANITIZED = bool(os.environ.get("JAX_LAYOUT_CUBLASLT_SANITIZED"))
DTYPES = [
    np.dtype(t)
    for t in (
        np.float32,
        np.float64,
        ml_dtypes.bfloat16,
        np.float16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        np.int8,
        np.int32,
        np.complex64,
        np.complex128,
    )
]
F32, F64, BF16, F16, E4M3, E5M2, S8, S32, C64, C128 = DTYPES
WIDE = {F64: np.float64, C64: np.complex128, C128: np.complex128}
ACTIVATIONS = ("none", "relu", "gelu")
# cublasLtEpilogue_t
DEFAULT, RELU, BIAS, GELU, GELU_AUX, GELU_AUX_BIAS = 1, 2, 4, 32, 160, 164
DGELU, BGRADB = 192, 512
WORKSPACE = 1 << 16
CUDA_SOURCES = [
    "cuda/device.cc",
    *(f"cuda/gemm/{part}.cc" for part in ("gemm", "choose", "cublaslt", "tuning")),
]

# A contraction, and the shapes of its operands: odd ones, then such as 8-bit
# types want.
SPECS = {
    "bmk,bkn->bmn": ((3, 5, 7), (3, 7, 4)),
    "mk,nk->mn": ((5, 7), (9, 7)),
    "km,kn->mn": ((7, 5), (7, 9)),
    "mk,kn->mn": ((5, 7), (7, 9)),
    "mk,kn->nm": ((5, 7), (7, 9)),
    "bshd,bthd->bhst": ((2, 5, 3, 4), (2, 6, 3, 4)),
    "bhst,bthd->bshd": ((2, 3, 5, 6), (2, 6, 3, 4)),
    "bsm,mhd->bhsd": ((2, 5, 7), (7, 3, 4)),
    "m,n->mn": ((5,), (3,)),
    "k,k->": ((5,), (5,)),
    "mk,k->m": ((5, 7), (7,)),
}


def compile_program(sources, program, *flags):
    done = subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-fPIC",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Itests/cuda/fake_cublaslt",
            "-I.",
            *flags,
            *sources,
            "-o",
            program,
            "-ldl",
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def int64s(values):
    return (ctypes.c_int64 * len(values))(*values)


class Problem(ctypes.Structure):
    _fields_ = (
        [("spec", ctypes.c_char_p)]
        + [(n, ctypes.POINTER(ctypes.c_int64)) for n in ("a_shape", "b_shape")]
        + [(n, ctypes.c_double * 2) for n in ("alpha", "beta")]
        + [
            (n, ctypes.c_int)
            for n in "a_rank b_rank operands result tf32 bias activation aux "
            "derivative sums b_type scales".split()
        ]
    )


class Buffers(ctypes.Structure):
    _fields_ = [
        (n, ctypes.c_void_p) for n in "a b bias y aux sums workspace".split()
    ] + [
        ("workspace_bytes", ctypes.c_int64),
        *[(n, ctypes.c_void_p) for n in ("scale_a", "scale_b", "scale_y")],
    ]


class Memory:
    """Bytes at an address that is `offset` modulo 256, nothing behind them."""

    _libc = ctypes.CDLL(None)
    _libc.free.argtypes = [ctypes.c_void_p]

    def __init__(self, shape, dtype, offset=0):
        count = int(np.prod(shape, dtype=np.int64))
        total = offset + max(1, count * dtype.itemsize)
        base = ctypes.c_void_p()
        assert not self._libc.posix_memalign(
            ctypes.byref(base), ctypes.c_size_t(256), ctypes.c_size_t(total)
        )
        self._base = base.value
        self.address = self._base + offset
        everything = np.frombuffer(
            (ctypes.c_ubyte * total).from_address(self._base), np.uint8
        )
        everything[:] = 0xFF  # NaN, for floats
        self.array = (
            everything[offset:][: count * dtype.itemsize].view(dtype).reshape(shape)
        )

    def __del__(self):
        self._libc.free(self._base)


class Library:
    def __init__(self, fake, ours):
        self.fake = ctypes.CDLL(str(fake))
        self.ours = ctypes.CDLL(str(ours))
        for name in (
            "OpenLibrary",
            "MakeKernel",
            "RunKernel",
            "TuneGemms",
            "WhyUnusable",
            "Obstacle",
        ):
            getattr(self.ours, name).restype = ctypes.c_char_p
        self.not_found = self.ours.OpenLibrary(b"libno_such_thing.so").decode()
        assert self.ours.OpenLibrary(str(fake).encode()) == b""
        clock = ctypes.c_int.in_dll(self.fake, "fake_clock")
        self.ours.SetClock(ctypes.byref(clock))

    def count(self, name):
        return ctypes.c_int.in_dll(self.fake, f"fake_{name}").value

    def set(self, name, value):
        ctypes.c_int.in_dll(self.fake, f"fake_{name}").value = value


class Kernel:
    """What ChooseGemmKernel makes of a problem."""

    def __init__(
        self,
        library,
        spec,
        a_shape,
        b_shape,
        operands,
        result=None,
        alpha=1,
        beta=0,
        activation="none",
        derivative="none",
        bias=False,
        aux=False,
        sums=False,
        tf32=False,
        b_type=None,
        scales=(),
    ):
        self.b_type, self.scales = b_type or operands, scales
        self.library, self.spec = library, spec
        self.operands, self.result = operands, result or operands
        labels = spec.split("->")[0].replace(",", "")
        extents = dict(zip(labels, a_shape + b_shape, strict=True))
        self.y_shape = tuple(extents[c] for c in spec.split("->")[1])
        self.alpha, self.beta = alpha, beta
        self.activation, self.derivative = activation, derivative
        self.bias, self.aux, self.sums = bias, aux, sums
        self._problem = Problem(
            spec=spec.encode(),
            a_shape=int64s(a_shape),
            b_shape=int64s(b_shape),
            alpha=(complex(alpha).real, complex(alpha).imag),
            beta=(complex(beta).real, complex(beta).imag),
            a_rank=len(a_shape),
            b_rank=len(b_shape),
            operands=DTYPES.index(operands),
            result=DTYPES.index(self.result),
            tf32=tf32,
            bias=bias,
            activation=ACTIVATIONS.index(activation),
            aux=aux,
            derivative=ACTIVATIONS.index(derivative),
            sums=sums,
            b_type=DTYPES.index(self.b_type),
            scales=len(scales),
        )
        self._kernel = ctypes.c_void_p()
        self.refusal = library.ours.MakeKernel(
            ctypes.byref(self._problem), ctypes.byref(self._kernel)
        ).decode()

    def __del__(self):
        if self._kernel:
            self.library.ours.FreeKernel(self._kernel)

    def __call__(
        self, a, b, y=None, bias=None, aux=None, workspace=WORKSPACE, offsets=()
    ):
        """Returns y, aux and sums, or what went wrong."""
        offsets = dict(offsets)
        buffers, kept = Buffers(workspace_bytes=workspace), {}

        def place(name, value, shape, dtype):
            kept[name] = Memory(shape, dtype, offsets.get(name, 0))
            if value is not None:
                kept[name].array[...] = value
            setattr(buffers, name, kept[name].address)

        place("a", a, a.shape, self.operands)
        place("b", b, b.shape, self.b_type)
        place("y", y, self.y_shape, self.result)
        if self.bias:
            place("bias", bias, bias.shape, self.result)
        if self.aux or self.derivative != "none":
            place("aux", aux, self.y_shape, self.result)
        if self.sums:
            place("sums", None, self.y_shape[:1], self.result)
        names = ("scale_a", "scale_b", "scale_y")
        for name, scale in zip(names, self.scales, strict=False):
            place(name, scale, (1,), F32)
        place("workspace", None, (workspace,), np.dtype(np.uint8))
        error = self.library.ours.RunKernel(
            self._kernel, ctypes.byref(buffers)
        ).decode()
        for name, value in (("a", a), ("b", b)):
            assert kept[name].array.tobytes() == value.tobytes()
        outputs = [kept[n].array.copy() for n in ("y", "aux", "sums") if n in kept]
        return error or outputs


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cublaslt")
    flags = ["-shared", "-O2"]
    if SANITIZED:
        flags = ["-shared", "-O0", "-g", "-fsanitize=address,undefined"]
        flags += ["-fno-sanitize-recover=all"]
    fake, ours = folder / "libfake_cublaslt.so", folder / "libgemm.so"
    compile_program(["tests/cuda/fake_cublaslt/fake_cublaslt.cc"], fake, *flags)
    sources = ["tests/cuda/fake_cublaslt/gemm_test_library.cc"]
    sources += CUDA_SOURCES
    compile_program(sources, ours, *flags)
    return Library(fake, ours)


@pytest.fixture(autouse=True)
def nothing_leaks(library):
    before = library.count("live")
    yield
    assert library.count("live") <= before  # fewer after a failed test


def numbers(seed, shape, dtype):
    """Small integers and halves, which every dtype holds."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.integers(-4, 5, shape).astype(np.float64)
    if dtype.kind == "c":
        x = x + 1j * rng.integers(-4, 5, shape)
    elif dtype not in (S8, S32):
        x /= 2
    return x.astype(dtype)


def wide(x):
    return x.astype(WIDE.get(x.dtype, np.float64))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_derivative(x):
    h = 1e-6
    return (gelu(x + h) - gelu(x - h)) / (2 * h)


def expected(kernel, a, b, y=None, bias=None, aux=None):
    z = kernel.alpha * np.einsum(kernel.spec, wide(a), wide(b))
    z = z * np.prod(kernel.scales)
    if kernel.beta != 0:
        z = z + kernel.beta * wide(y)
    if kernel.bias:
        z = z + wide(bias)
    out = {"none": lambda z: z, "relu": lambda z: np.maximum(z, 0), "gelu": gelu}
    results = [out[kernel.activation](z)]
    if kernel.derivative == "gelu":
        results[0] = z * gelu_derivative(wide(aux))
        results.append(wide(aux))
    if kernel.aux:
        results.append(z)
    if kernel.sums:
        results.append(np.einsum(kernel.spec.split(",")[0] + "->m", wide(a)))
    return results


def assert_close(ours, theirs):
    """Rounded once, after sums that are exact but for the activation."""
    rtol = atol = 0
    if ours.dtype.kind in "fcV":
        info = ml_dtypes.finfo(ours.dtype)
        rtol, atol = float(info.eps), 1e-8 + float(info.smallest_subnormal)
    np.testing.assert_allclose(wide(ours), theirs, rtol=rtol, atol=atol)


def check(kernel, a, b, y=None, bias=None, aux=None, **kwargs):
    assert kernel.refusal == ""
    got = kernel(a, b, y, bias, aux, **kwargs)
    assert not isinstance(got, str), got
    want = expected(kernel, a, b, y, bias, aux)
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs)


def results_of(dtype):
    return {
        BF16: (BF16, F32),
        F16: (F16, F32),
        E4M3: (BF16, F16, F32, E4M3),
        E5M2: (),
        S8: (S32,),
        S32: (),
    }.get(dtype, (dtype,))


# -- contractions and dtypes ---------------------------------------------------


@pytest.mark.parametrize("operands", [F32, F64, BF16, F16, C64, C128], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_contractions(library, spec, operands):
    a, b = (numbers(i, s, operands) for i, s in enumerate(SPECS[spec]))
    for result in results_of(operands):
        kernel = Kernel(library, spec, a.shape, b.shape, operands, result)
        check(kernel, a, b)
        kernel = Kernel(
            library, spec, a.shape, b.shape, operands, result, alpha=-2, beta=0.5
        )
        check(kernel, a, b, numbers(2, kernel.y_shape, result))


@pytest.mark.parametrize("operands", [E4M3, S8], ids=str)
def test_eight_bits(library, operands):
    for result in set(results_of(operands)) - {E4M3}:
        for spec, *shapes in (
            ("mk,nk->mn", (3, 32), (16, 32)),
            ("mk,nk->mn", (1, 16), (16, 16)),
            ("bmk,bnk->bmn", (3, 5, 16), (3, 32, 16)),
            ("bshd,bthd->bhst", (2, 5, 3, 16), (2, 16, 3, 16)),
        ):
            a, b = (numbers(i, s, operands) for i, s in enumerate(shapes))
            kernel = Kernel(library, spec, *shapes, operands, result, alpha=2, beta=-1)
            check(kernel, a, b, numbers(2, kernel.y_shape, result))


@pytest.mark.parametrize("a_type, b_type", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("result", [BF16, F16, F32, E4M3, E5M2], ids=str)
def test_scales(library, a_type, b_type, result):
    for spec, shapes in (
        ("mk,nk->mn", ((3, 32), (16, 32))),
        ("mk,nk->nm", ((16, 32), (3, 32))),  # a and b change places
        ("bmk,bnk->bmn", ((3, 5, 16), (3, 32, 16))),
    ):
        a, b = numbers(0, shapes[0], a_type), numbers(1, shapes[1], b_type)
        for scales in ((), (0.5, 0.125), (0.5, 0.125, 0.25)):
            kernel = Kernel(
                library, spec, *shapes, a_type, result, b_type=b_type, scales=scales
            )
            if result == E5M2 and a_type == b_type:
                assert "has no such product" in kernel.refusal
            elif len(scales) == 3 and result not in (E4M3, E5M2):
                assert "scales results of 8-bit floats alone" in kernel.refusal
            else:
                check(kernel, a, b)


def test_scales_come_with_the_call(library):
    """The descriptor of one alignment serves calls with other scales."""
    a, b = numbers(0, (3, 16), E4M3), numbers(1, (16, 16), E4M3)
    scales = (2.0, 4.0)
    kernel = Kernel(library, "mk,nk->mn", a.shape, b.shape, E4M3, F32, scales=scales)
    check(kernel, a, b)
    before = library.count("heuristics")
    kernel.scales = (0.5, 0.25)
    check(kernel, a, b)
    assert library.count("heuristics") == before


@pytest.mark.parametrize(
    "kwargs",
    [{"beta": 1}, {"bias": True}, {"activation": "relu"}, {"sums": True}],
    ids=str,
)
def test_eight_bit_results_are_of_the_product_alone(library, kwargs):
    kernel = Kernel(library, "mk,nk->mn", (16, 16), (16, 16), E4M3, E4M3, **kwargs)
    assert "makes 8-bit floats of the product alone" in kernel.refusal


def test_other_dtypes_have_no_scales(library):
    shapes = (16, 16), (16, 16)
    kernel = Kernel(library, "mk,nk->mn", *shapes, BF16, scales=(1.0, 1.0))
    assert "has scales of 8-bit floats alone" in kernel.refusal
    kernel = Kernel(library, "mk,nk->mn", *shapes, BF16, b_type=F16)
    assert "has no such product" in kernel.refusal


@pytest.mark.parametrize("spec", ["mk,kn->mn", "km,kn->mn", "mk,kn->nm"])
def test_eight_bit_floats_want_k_contiguous(library, spec):
    assert (
        "needs k contiguous"
        in Kernel(library, spec, (16, 16), (16, 16), E4M3, BF16).refusal
    )
    kernel = Kernel(library, spec, (16, 16), (16, 16), S8, S32)
    a = np.ones((16, 16), np.int8)
    if kernel.refusal == "" and spec != "mk,kn->nm":
        assert "CUBLAS_STATUS_NOT_SUPPORTED" in kernel(a, a)


@pytest.mark.parametrize("shapes", [((4, 24), (16, 24)), ((4, 16), (9, 16))], ids=str)
def test_eight_bit_floats_want_multiples(library, shapes):
    assert (
        "multiples of 16 bytes"
        in Kernel(library, "mk,nk->mn", *shapes, E4M3, F32).refusal
    )


@pytest.mark.parametrize(
    "operands, result", list(itertools.product(DTYPES, repeat=2)), ids=str
)
def test_other_dtypes_are_refused(library, operands, result):
    refusal = Kernel(library, "mk,nk->mn", (16, 16), (16, 16), operands, result).refusal
    if result in results_of(operands):
        assert refusal == ""
    else:
        assert "gemm: cuBLASLt has no such product" in refusal
        assert f"{operands} to {result}" in refusal


def test_tf32_is_asked_for_per_problem(library):
    fine = np.array([[1 + 2.0**-12]], np.float32)
    for dtype in (F32, C64):
        kernel = Kernel(library, "mk,kn->mn", (1, 1), (1, 1), dtype, tf32=True)
        assert kernel(fine.astype(dtype), fine.astype(dtype))[0] == 1
        assert library.count("compute") == 77  # CUBLAS_COMPUTE_32F_FAST_TF32
        kernel = Kernel(library, "mk,kn->mn", (1, 1), (1, 1), dtype)
        check(kernel, fine.astype(dtype), fine.astype(dtype))
        assert library.count("compute") == 68  # CUBLAS_COMPUTE_32F


@pytest.mark.parametrize("operands", [E4M3, BF16], ids=str)
def test_fast_sums_are_of_8_bit_floats_that_may(library, operands):
    a, b = numbers(0, (16, 16), operands), numbers(1, (16, 16), operands)
    for may in (True, False):
        kernel = Kernel(library, "mk,nk->mn", a.shape, b.shape, operands, F32, tf32=may)
        check(kernel, a, b)
        assert library.count("fast") == (may and operands == E4M3)


def test_partial_sums_are_kept_in_the_compute_type(library):
    kernel = Kernel(library, "mk,kn->mn", (4, 8), (8, 4), BF16)
    check(kernel, numbers(0, (4, 8), BF16), numbers(1, (8, 4), BF16))
    assert library.count("mask") == 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE


# -- epilogues -----------------------------------------------------------------

FLOATS = [(F32, F32), (F64, F64), (BF16, BF16), (BF16, F32), (F16, F16), (F16, F32)]


@pytest.mark.parametrize("operands, result", FLOATS, ids=str)
@pytest.mark.parametrize("beta", [0, 0.5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spec", ["mk,nk->mn", "bmk,kn->bmn", "bsm,mhd->bhsd"])
def test_activations(library, spec, bias, activation, beta, operands, result):
    shapes = {
        "mk,nk->mn": ((5, 7), (8, 7)),
        "bmk,kn->bmn": ((3, 5, 7), (7, 8)),
        "bsm,mhd->bhsd": ((2, 5, 7), (7, 3, 8)),
    }[spec]
    if spec == "bsm,mhd->bhsd" and bias:
        return  # of columns that are not the last axis: the handler refuses it
    a, b = (numbers(i, s, operands) for i, s in enumerate(shapes))
    for aux in (False, True) if activation == "gelu" else (False,):
        kernel = Kernel(
            library,
            spec,
            *shapes,
            operands,
            result,
            alpha=0.5,
            beta=beta,
            activation=activation,
            bias=bias,
            aux=aux,
        )
        if activation == "gelu" and result == F64:
            assert "has no gelu of float64's precision" in kernel.refusal
            continue
        y = numbers(2, kernel.y_shape, result)
        check(kernel, a, b, y, numbers(3, (8,), result))
        epilogue = {"none": 0, "relu": RELU, "gelu": GELU}[activation]
        epilogue |= BIAS * bias | 128 * aux
        assert library.count("epilogue") == (epilogue or DEFAULT)


@pytest.mark.parametrize("operands, result", FLOATS, ids=str)
@pytest.mark.parametrize("beta", [0, 0.5])
@pytest.mark.parametrize("spec", ["mk,nk->mn", "bmk,bkn->bmn"])
def test_derivative_of_gelu(library, spec, beta, operands, result):
    shapes = {"mk,nk->mn": ((5, 7), (8, 7)), "bmk,bkn->bmn": ((3, 5, 7), (3, 7, 8))}
    a, b = (numbers(i, s, operands) for i, s in enumerate(shapes[spec]))
    kernel = Kernel(
        library,
        spec,
        *shapes[spec],
        operands,
        result,
        alpha=0.5,
        beta=beta,
        derivative="gelu",
    )
    if result == F64:
        assert "has no gelu of float64's precision" in kernel.refusal
        return
    y, aux = (numbers(i, kernel.y_shape, result) for i in (2, 3))
    check(kernel, a, b, y, aux=aux)
    assert library.count("epilogue") == DGELU


def test_the_rows_of_aux_are_eight_apart(library):
    text = "needs rows and steps of aux a multiple of 8 elements apart"
    for kwargs in ({"activation": "gelu", "aux": True}, {"derivative": "gelu"}):
        kernel = Kernel(library, "mk,kn->mn", (5, 7), (7, 9), F32, **kwargs)
        assert text in kernel.refusal
        # A lone row has no distance.
        kernel = Kernel(library, "mk,kn->mn", (1, 7), (7, 9), F32, **kwargs)
        check(
            kernel,
            numbers(0, (1, 7), F32),
            numbers(1, (7, 9), F32),
            aux=numbers(2, (1, 9), F32),
        )
        shapes = ((2, 1, 7), (2, 7, 9))
        kernel = Kernel(library, "bmk,bkn->bmn", *shapes, F32, **kwargs)
        assert text in kernel.refusal


@pytest.mark.parametrize("operands, result", FLOATS, ids=str)
@pytest.mark.parametrize("spec", ["mk,kn->mn", "km,kn->mn", "mk,nk->mn"])
def test_sums(library, spec, operands, result):
    shapes = {
        "mk,kn->mn": ((5, 7), (7, 9)),
        "km,kn->mn": ((7, 5), (7, 9)),
        "mk,nk->mn": ((5, 7), (9, 7)),
    }[spec]
    a, b = (numbers(i, s, operands) for i, s in enumerate(shapes))
    for beta in (0, 1):
        kernel = Kernel(library, spec, *shapes, operands, result, beta=beta, sums=True)
        check(kernel, a, b, numbers(2, kernel.y_shape, result))
        assert library.count("epilogue") == BGRADB


@pytest.mark.parametrize(
    "kwargs, text",
    [
        ({"activation": "relu", "aux": True}, "keeps z for gelu alone"),
        ({"aux": True}, "keeps z for gelu alone"),
        ({"derivative": "relu"}, "keeps z for gelu alone"),
        ({"derivative": "gelu", "bias": True}, "by a derivative"),
        ({"derivative": "gelu", "activation": "relu"}, "by a derivative"),
        ({"derivative": "gelu", "sums": True}, "by a derivative"),
        ({"sums": True, "bias": True}, "has sums with a plain product"),
        ({"sums": True, "alpha": 2}, "has sums with a plain product"),
        ({"alpha": 1j}, "needs a real alpha and beta"),
        ({"beta": 1 + 1j}, "needs a real alpha and beta"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(library, kwargs, text):
    kernel = Kernel(library, "mk,kn->mn", (8, 8), (8, 8), BF16, **kwargs)
    assert text in kernel.refusal
    assert "m=8, n=8, k=8 of bfloat16 to bfloat16" in kernel.refusal


@pytest.mark.parametrize("operands, result", [(S8, S32), (C64, C64)], ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [{"bias": True}, {"activation": "relu"}, {"derivative": "gelu"}, {"sums": True}],
    ids=str,
)
def test_integers_and_complex_numbers_have_no_epilogue(
    library, kwargs, operands, result
):
    kernel = Kernel(library, "mk,nk->mn", (8, 8), (8, 8), operands, result, **kwargs)
    assert "nothing but the product" in kernel.refusal


def test_integers_want_integer_factors(library):
    for kwargs in ({"alpha": 0.5}, {"beta": 1.5}, {"alpha": np.nan}, {"beta": 2**40}):
        kernel = Kernel(library, "mk,nk->mn", (8, 8), (8, 8), S8, S32, **kwargs)
        assert "needs an integer alpha and beta" in kernel.refusal


def test_complex_factors(library):
    a, b, y = (numbers(i, (5, 5), C128) for i in range(3))
    for alpha, beta in ((2j, 0), (1 - 1j, 0.5j)):
        kernel = Kernel(
            library, "mk,nk->mn", (5, 5), (5, 5), C128, alpha=alpha, beta=beta
        )
        check(kernel, a, b, y)


# -- no product ----------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("beta", [0, 1, 0.5])
@pytest.mark.parametrize("k, alpha", [(0, 1), (0, 0.5), (3, 0)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_without_a_product(library, dtype, k, alpha, beta, activation, bias):
    shapes = ((2, 5, k), (k, 8))
    a, b = (np.full(s, np.nan, dtype) for s in shapes)
    for aux in (False, True) if activation == "gelu" else (False,):
        kernel = Kernel(
            library,
            "bmk,kn->bmn",
            *shapes,
            dtype,
            alpha=alpha,
            beta=beta,
            activation=activation,
            bias=bias,
            aux=aux,
        )
        y, bias_ = numbers(0, (2, 5, 8), dtype), numbers(1, (8,), dtype)
        assert kernel.refusal == ""
        got = kernel(a, b, y, bias_)
        assert not isinstance(got, str), got
        kernel.alpha = 1
        zeros = (np.zeros(s, dtype) for s in shapes)
        want = expected(kernel, *zeros, y, bias_)
        for ours, theirs in zip(got, want, strict=True):
            assert_close(ours, theirs)


def test_sums_over_nothing_are_zero(library):
    empty = np.zeros((5, 0), np.float32), np.zeros((0, 8), np.float32)
    for beta in (0, 1, 0.5):
        kernel = Kernel(library, "mk,kn->mn", (5, 0), (0, 8), F32, beta=beta, sums=True)
        check(kernel, *empty, numbers(0, (5, 8), F32))


@pytest.mark.parametrize("operands", DTYPES, ids=str)
def test_zeros_of_every_dtype(library, operands):
    for result in set(results_of(operands)) - {E4M3}:
        kernel = Kernel(library, "mk,nk->mn", (5, 0), (16, 0), operands, result, beta=2)
        empty = np.zeros((5, 0), operands), np.zeros((16, 0), operands)
        check(kernel, *empty, numbers(0, (5, 16), result))


def test_zeros_need_a_workspace(library):
    kernel = Kernel(library, "mk,kn->mn", (5, 0), (0, 8), F32, beta=2)
    empty = np.zeros((5, 0), np.float32), np.zeros((0, 8), np.float32)
    error = kernel(*empty, numbers(0, (5, 8), F32), workspace=256)
    assert "a workspace of 768 bytes is needed, got 256" in error
    check(kernel, *empty, numbers(0, (5, 8), F32), workspace=512)


@pytest.mark.parametrize("shapes", [((0, 7), (7, 9)), ((5, 7), (7, 0))], ids=str)
def test_nothing_to_do(library, shapes):
    before = library.count("matmuls")
    kernel = Kernel(library, "mk,kn->mn", *shapes, F32)
    check(kernel, *(numbers(0, s, F32) for s in shapes))
    assert library.count("matmuls") == before
    if shapes[1][1] == 0:
        kernel = Kernel(library, "mk,kn->mn", *shapes, F32, sums=True)
        assert "has sums" in kernel.refusal


def test_the_addend_is_not_read_without_beta(library):
    kernel = Kernel(library, "mk,kn->mn", (5, 7), (7, 9), F32)
    y = np.full((5, 9), np.nan, np.float32)
    check(kernel, numbers(0, (5, 7), F32), numbers(1, (7, 9), F32), y)


def test_nan_times_zero_is_nan(library):
    a = np.zeros((2, 3), np.float32)
    b = np.full((3, 2), np.nan, np.float32)
    got = Kernel(library, "mk,kn->mn", (2, 3), (3, 2), F32)(a, b)
    assert np.isnan(got[0]).all()


# -- loops ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, shapes, launches, batch",
    [
        ("bmk,bkn->bmn", ((7, 2, 3), (7, 3, 2)), 1, 7),
        # b and h do not merge: the larger is launched, the other walked.
        ("bshd,bthd->bhst", ((2, 2, 5, 3), (2, 2, 5, 3)), 2, 5),
        ("bshd,bthd->bhst", ((5, 2, 2, 3), (5, 2, 2, 3)), 2, 5),
        # More steps than a batch may have, in even pieces: 35001 + 35000.
        ("bmk,bkn->bmn", ((70001, 1, 2), (70001, 2, 1)), 2, 35000),
        ("bmk,bkn->bmn", ((65535, 1, 1), (65535, 1, 1)), 1, 65535),
        ("bmk,bkn->bmn", ((65536, 1, 1), (65536, 1, 1)), 2, 32768),
    ],
    ids=str,
)
def test_loops(library, spec, shapes, launches, batch):
    a, b = (numbers(i, s, F32) for i, s in enumerate(shapes))
    kernel = Kernel(library, spec, *shapes, F32, beta=0.5)
    before = library.count("matmuls")
    check(kernel, a, b, numbers(2, kernel.y_shape, F32))
    assert library.count("matmuls") - before == launches
    assert library.count("batch") == batch


# -- the cache -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F64, C128], ids=str)
def test_alignment_is_part_of_the_key(library, dtype):
    step = min(dtype.itemsize, 8)
    spec, shapes = "mk,kn->mn", ((5, 8), (8, 16))
    floats, gelu = dtype.kind != "c", dtype in (F32, BF16)
    kernel = Kernel(
        library,
        spec,
        *shapes,
        dtype,
        beta=0.5,
        bias=floats,
        activation="gelu" if gelu else "none",
        aux=gelu,
    )
    a, b = (numbers(i, s, dtype) for i, s in enumerate(shapes))
    y, bias = numbers(2, (5, 16), dtype), numbers(3, (16,), dtype)
    names = ["a", "b", "y"] + ["bias"] * floats + ["aux"] * gelu
    # Twice the same, then other addresses of the same alignment.
    for name, offset in itertools.product(names, sorted({step, 16})):
        before = library.count("heuristics")
        for twice in (1, 1, 3):
            check(kernel, a, b, y, bias, offsets={name: offset * twice})
        # All is alike from 16 bytes on, so that what XLA gives has one answer.
        new = offset < 16 or name == names[0]
        assert library.count("heuristics") == before + new


def test_strides_limit_the_alignment(library):
    # Rows of b are 16 bytes apart, but its matrices 12.
    a, b = numbers(0, (3, 2, 5), F32), numbers(1, (5, 3, 3), F32)
    kernel = Kernel(library, "bmk,kbn->bmn", a.shape, b.shape, F32)
    check(kernel, a, b)
    kernel = Kernel(library, "bshd,bthd->bhst", (2, 3, 3, 5), (2, 3, 3, 5), BF16)
    check(kernel, *(numbers(i, (2, 3, 3, 5), BF16) for i in range(2)))


def test_the_heuristic_runs_once_per_key(library):
    a, b = numbers(0, (5, 7), F32), numbers(1, (7, 9), F32)
    kernel = Kernel(library, "mk,kn->mn", (5, 7), (7, 9), F32)
    handles, live = library.count("handles"), library.count("live")
    for device, workspace in itertools.product((0, 1), (0, 512, WORKSPACE)):
        library.ours.SetDevice(device)
        before = library.count("heuristics")
        for _ in range(3):
            check(kernel, a, b, workspace=workspace)
        assert library.count("heuristics") == before + 1
    library.ours.SetDevice(0)
    # One handle per device and process, made when first needed.
    assert library.count("handles") - handles <= 2
    assert library.count("handles") <= 2
    # The descriptors of one key: operation, a, b, y.
    assert library.count("live") - live == 6 * 4


def test_capture_is_relaxed_for_the_first_call_alone(library):
    a, b = numbers(0, (5, 7), F32), numbers(1, (7, 9), F32)
    kernel = Kernel(library, "mk,kn->mn", (5, 7), (7, 9), F32)
    before = library.ours.RelaxedCaptures()
    check(kernel, a, b)
    assert library.ours.RelaxedCaptures() == before + 1
    check(kernel, a, b)
    assert library.ours.RelaxedCaptures() == before + 1


@pytest.mark.parametrize("offset", [0, 8, 255])
@pytest.mark.parametrize("workspace", [0, 1, 255, 256, 300, 5000])
def test_workspace(library, workspace, offset):
    kernel = Kernel(library, "mk,kn->mn", (5, 7), (7, 9), F32)
    check(
        kernel,
        numbers(0, (5, 7), F32),
        numbers(1, (7, 9), F32),
        workspace=workspace,
        offsets={"workspace": offset},
    )


def test_threads_share_a_kernel(library):
    shapes = ((5, 7), (7, 8))
    a, b = (numbers(i, s, F32) for i, s in enumerate(shapes))
    kernel = Kernel(
        library, "mk,kn->mn", *shapes, F32, bias=True, activation="gelu", aux=True
    )
    wrong = []

    def work(device):
        library.ours.SetDevice(device % 2)
        try:
            for i in range(100):
                bias = numbers(100 * device + i, (8,), F32)
                check(kernel, a, b, None, bias)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(d,)) for d in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- tuning --------------------------------------------------------------------

# Of what the fake library's heuristic names, five algorithms.
FIRST, FASTEST = 0, 3


@pytest.fixture
def tune(library):
    """A function that tunes; afterwards nothing is tuned."""

    def run(path="", candidates=8):
        return library.ours.TuneGemms(str(path).encode(), candidates).decode()

    yield run
    assert run(candidates=1) == ""
    assert library.ours.Allocated() == 0


def multiply(library, shapes=((5, 7), (7, 8)), **kwargs):
    """Runs a product on a kernel of its own; which algorithm ran, and how many."""
    a, b = (numbers(i, s, F32) for i, s in enumerate(shapes))
    kernel = Kernel(library, "mk,kn->mn", *shapes, F32, **kwargs)
    before = library.count("matmuls")
    shape = kernel.y_shape
    check(kernel, a, b, numbers(2, shape, F32), numbers(3, shape[1:], F32),
          numbers(4, shape, F32))  # fmt: skip
    return library.count("candidate"), library.count("matmuls") - before


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"beta": 0.5, "bias": True},
        {"activation": "gelu", "aux": True},
        {"derivative": "gelu"},
        {"sums": True, "beta": 1},
    ],
    ids=str,
)
def test_the_fastest_candidate_is_chosen(library, tune, kwargs):
    assert multiply(library, **kwargs) == (FIRST, 1)
    tune()
    # Five rounds of five; results are what they are without.
    assert multiply(library, **kwargs) == (FASTEST, 26)
    assert multiply(library, **kwargs) == (FASTEST, 1)
    tune(candidates=3)  # forgets what was chosen
    assert multiply(library, **kwargs) == (2, 16)
    tune(candidates=1)
    assert multiply(library, **kwargs) == (FIRST, 1)


def test_choices_are_kept_in_a_file(library, tune, tmp_path):
    path = tmp_path / "gemms.json"
    assert tune(path) == ""
    assert json.loads(path.read_text()) == {}
    assert multiply(library) == (FASTEST, 26)
    (name,) = json.loads(path.read_text())
    assert name.startswith("Fake 0, cuBLASLt 130100: m=5, n=8, k=7 of float32")
    multiply(library, beta=1)
    assert len(json.loads(path.read_text())) == 2
    # As another process would: what is in the file is not timed again, or at all.
    assert tune() == tune(path, candidates=1) == ""
    assert multiply(library) == (FASTEST, 1)
    assert multiply(library, alpha=2) == (FASTEST, 1)
    assert multiply(library, ((5, 7), (7, 9))) == (FIRST, 1)
    assert len(json.loads(path.read_text())) == 2


def test_choices_are_of_a_device_and_a_library(library, tune, tmp_path):
    tune(tmp_path / "gemms.json")
    multiply(library)
    library.ours.SetDevice(1)
    assert multiply(library) == (FASTEST, 26)
    library.ours.SetDevice(0)
    library.set("version", 130200)
    assert multiply(library) == (FASTEST, 26)
    library.set("version", 130100)
    assert multiply(library) == (FASTEST, 1)
    assert len(json.loads((tmp_path / "gemms.json").read_text())) == 3


def test_processes_share_a_file(library, tune, tmp_path):
    path = tmp_path / "gemms.json"
    tune(path)
    path.write_text('{ "another" : "' + "0" * 128 + '" }')
    multiply(library)
    assert len(json.loads(path.read_text())) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_choice_that_does_not_fit_is_made_anew(library, tune, tmp_path):
    path = tmp_path / "gemms.json"
    tune(path)
    multiply(library)
    choices = {name: "f" * 128 for name in json.loads(path.read_text())}
    path.write_text(json.dumps(choices))
    tune(path, candidates=1)
    assert multiply(library) == (FIRST, 1)
    tune(path)
    assert multiply(library) == (FASTEST, 26)


def test_nothing_is_timed_while_a_graph_captures(library, tune):
    tune()
    a, b = numbers(0, (5, 7), F32), numbers(1, (7, 8), F32)
    kernel = Kernel(library, "mk,kn->mn", (5, 7), (7, 8), F32)
    library.ours.SetCapturing(1)
    try:
        for _ in range(2):
            before = library.count("matmuls"), library.count("heuristics")
            check(kernel, a, b)
            assert library.count("candidate") == FIRST
            assert library.count("matmuls") == before[0] + 1
        assert library.count("heuristics") == before[1]
    finally:
        library.ours.SetCapturing(0)
    check(kernel, a, b)
    assert library.count("candidate") == FASTEST


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1}', '{"a": "12"}', '{"a": "' + "g" * 128 + '"}']
)
def test_other_files_are_errors(tune, tmp_path, text):
    path = tmp_path / "gemms.json"
    path.write_text(text)
    assert tune(path) == f"tune_gemms: {path} is not a file of choices."
    assert path.read_text() == text
    missing = tmp_path / "nowhere" / "gemms.json"
    assert tune(missing) == f"tune_gemms: cannot write {missing}."
    assert tune(missing, candidates=1) == ""


def test_what_cannot_be_timed_or_kept_still_runs(library, tune, tmp_path):
    tune(tmp_path / "gemms.json")
    library.ours.SetWithoutMemory(1)
    try:
        assert multiply(library)[0] == FIRST
    finally:
        library.ours.SetWithoutMemory(0)
    (tmp_path / "gone").mkdir()
    tune(tmp_path / "gone" / "gemms.json")
    shutil.rmtree(tmp_path / "gone")
    assert multiply(library)[0] == FASTEST


# -- the machine ---------------------------------------------------------------


@pytest.fixture
def machine(library):
    yield library.ours.SetMachine
    library.ours.SetMachine(13000, 1, 90)


@pytest.mark.parametrize(
    "driver, devices, capability, why",
    [
        (13000, 1, 90, ""),
        (13020, 2, 80, ""),
        (0, 0, 0, ""),  # programs are compiled for other machines
        (12080, 1, 90, "the driver is for CUDA 12.8, where 13.0"),
        (13000, 1, 75, "device 0 has compute capability 7.5, where 8.0"),
        (13000, 0, 75, ""),
    ],
)
def test_machines(library, machine, driver, devices, capability, why):
    machine(driver, devices, capability)
    assert library.ours.WhyUnusable().decode() == why


def test_the_heuristic_is_asked_before_a_product_is_claimed(library, machine, tune):
    """If there is a device; nothing is timed then, nor allocated."""
    tune()
    kernel = Kernel(library, "mk,kn->mn", (5, 7), (7, 8), F32, bias=True)

    def obstacle():
        return library.ours.Obstacle(kernel._kernel).decode()

    before = library.count("matmuls")
    assert obstacle() == ""
    library.set("without_algorithm", 1)
    try:
        assert obstacle().startswith("gemm: cuBLASLt has no algorithm for m=5, n=8")
        machine(13000, 0, 90)
        assert obstacle() == ""
    finally:
        library.set("without_algorithm", 0)
    assert library.count("matmuls") == before
    assert library.ours.Allocated() == 0


# -- errors --------------------------------------------------------------------


def test_errors_name_the_status_and_the_problem(library):
    a, b = numbers(0, (4, 5, 7), BF16), numbers(1, (4, 9, 7), BF16)
    kernel = Kernel(library, "bmk,bnk->bmn", a.shape, b.shape, BF16, F32)
    problem = "m=5, n=9, k=7 of bfloat16 to float32, b transposed, 4 times."
    library.set("without_algorithm", 1)
    assert kernel(a, b) == f"gemm: cuBLASLt has no algorithm for {problem}"
    library.set("without_algorithm", 0)
    library.set("fail", 14)
    assert (
        kernel(a, b)
        == f"gemm: cublasLtMatmul returned CUBLAS_STATUS_INTERNAL_ERROR for {problem}"
    )
    library.set("fail", 0)
    check(kernel, a, b)
    # Pointers to single bytes are too little for any algorithm.
    assert kernel(a, b, offsets={"a": 1}) == (
        "gemm: cublasLtMatmulAlgoGetHeuristic returned CUBLAS_STATUS_NOT_SUPPORTED "
        f"for {problem}"
    )


def test_a_missing_library_is_named(library):
    assert library.not_found.startswith("gemm: cannot load cuBLASLt: libno_such_thing")


def test_declarations_are_those_of_the_header(tmp_path):
    """Where cublasLt.h is: in a CUDA toolkit or the nvidia-cublas wheel."""
    folders = [pathlib.Path("/usr/local/cuda/include")]
    if nvidia := importlib.util.find_spec("nvidia"):
        for path in nvidia.submodule_search_locations:
            folders.append(pathlib.Path(path) / "cu13" / "include")
    have = {
        name: [f for f in folders if (f / name).exists()]
        for name in ("cublasLt.h", "cuda_runtime_api.h")
    }
    if not all(have.values()):
        pytest.skip("needs cublasLt.h and the CUDA headers")
    includes = [f"-isystem{f}" for fs in have.values() for f in fs]
    source = ROOT / "tests" / "cuda" / "cublaslt_header.cc"
    done = subprocess.run(
        ["g++", "-std=c++20", f"-I{ROOT}", *includes, "-fsyntax-only", source],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(SANITIZED, reason="is slow, and nothing new to a sanitizer")
def test_the_check_for_devices_runs_here(library, tmp_path):
    """tests/cuda/cuda_check_gemm.cu, over the same library."""
    program = tmp_path / "cuda_check_gemm"
    sources = CUDA_SOURCES + ["-xc++", "tests/cuda/cuda_check_gemm.cu", "-xnone"]
    compile_program(sources, program, "-O2")
    done = subprocess.run(
        [program, library.fake._name], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "cuda_check_gemm: 0 of " in done.stdout


# -- once more, with sanitizers ------------------------------------------------


@pytest.mark.skipif(SANITIZED, reason="this is that run")
def test_everything_again_with_sanitizers():
    arguments = "-m pytest -q -x -s --noconftest -p no:cacheprovider -p no:xdist"
    check_sanitized(*arguments.split(), __file__, JAX_LAYOUT_CUBLASLT_SANITIZED="1")
