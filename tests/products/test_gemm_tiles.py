# SPDX-License-Identifier: Apache-2.0
"""The hand-written CPU GEMMs without JAX, against NumPy in float64."""

import ctypes
import dataclasses
import itertools
import mmap
import sys

import ml_dtypes
import numpy as np
import pytest

from native import (
    check_sanitized,
    compile_library,
    compile_sanitized,
    sources,
)

SOURCES = sources(
    "cpu/gemm/amx/*.cc",
    "cpu/gemm/blocked/*.cc",
    "cpu/gemm/matvec/*.cc",
    "cpu/gemm/skinny/*.cc",
    "cpu/gemm/finish.cc",
    "cpu/isa.cc",
    "tests/products/kernels/*.cc",
)
MATVEC = ("matvec_avx512", "matvec_avx2")
SKINNY = ("skinny_avx512_bf16", "skinny_avx512", "skinny_avx2")
BLOCKED = ("blocked_avx512_bf16", "blocked_avx512", "blocked_avx2")
METHODS = ("amx", *MATVEC, *BLOCKED, *SKINNY)
DTYPES = (  # as in DType
    *(np.float32, np.float64, ml_dtypes.bfloat16, np.float16),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.int32),
)
F32, _, BF16, F16, _, _, S8, S32 = DTYPES
ACTIVATIONS = ("none", "relu", "gelu")
# What the blocked kernels are asked for where the tiles' result is of a type.
OPERANDS = {F32: ((F32, F32), (BF16, F32), (F16, F32)), BF16: ((BF16,) * 2, (F16,) * 2)}
EXTENTS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129)
PAGE = mmap.PAGESIZE
GUARD = 0xA5


class CProblem(ctypes.Structure):
    _fields_ = [
        *[(x, ctypes.c_int64) for x in ("m", "n", "k", "a_transposed", "a_ld")],
        *[(x, ctypes.c_int64) for x in ("b_transposed", "b_ld", "y_ld")],
        ("num_loops", ctypes.c_int64),
        ("loops", (ctypes.c_int64 * 4) * 4),
        *[(x, ctypes.c_int64) for x in ("operands", "result", "activation")],
        *[(x, ctypes.c_int64) for x in ("derivative", "bias", "aux", "sums")],
        ("alpha", ctypes.c_double),
        ("beta", ctypes.c_double),
    ]


@dataclasses.dataclass
class Case:
    """A GEMM; `pad` is what ld has over the extent of a row."""

    m: int
    n: int
    k: int
    ta: bool = False
    tb: bool = False
    operands: type = BF16
    result: type = BF16
    alpha: float = 1.0
    beta: float = 0.0
    activation: str = "none"
    derivative: str = "none"
    bias: bool = False
    aux: bool = False
    sums: bool = False
    pad: tuple = (0, 0, 0)
    loops: tuple = ()  # (extent, stride of a, b, y)
    lds: tuple = ()  # of a, b, y, in place of those from `pad`
    threads: int = 2
    seed: int = 0


class Memory:
    """An array that ends where a page that nobody may touch begins."""

    def __init__(self, count, dtype, guarded):
        itemsize = np.dtype(dtype).itemsize
        size = max(1, count) * itemsize
        pages = -(-size // PAGE) + 2
        self.map = mmap.mmap(-1, pages * PAGE)
        data = np.frombuffer(self.map, np.uint8)
        data[:] = GUARD
        start = (pages - 1) * PAGE - size if guarded else PAGE
        self.around = (
            data[:start],
            data[start + count * itemsize : (pages - 1) * PAGE],
        )
        self.array = data[start : start + count * itemsize].view(dtype)
        self.pointer = ctypes.c_void_p(data.ctypes.data + start)
        self.last_page = ctypes.c_void_p(data.ctypes.data + (pages - 1) * PAGE)
        libc = ctypes.CDLL(None)
        assert libc.mprotect(self.last_page, ctypes.c_size_t(PAGE), 0) == 0

    def intact(self):
        return all((part == GUARD).all() for part in self.around)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_derivative(x):
    scale = np.sqrt(2 / np.pi)
    t = np.tanh(scale * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * scale * (1 + 3 * 0.044715 * x**2)


def view(array, step, rows, cols, transposed, ld):
    """A matrix inside a flat array, as GemmMatrix describes it."""
    if transposed:
        return view(array, step, cols, rows, False, ld).T
    return np.lib.stride_tricks.as_strided(
        array[step:],
        (rows, cols),
        (ld * array.itemsize, array.itemsize),
        writeable=True,
    )


def extent_of(rows, cols, ld, transposed):
    major, minor = (cols, rows) if transposed else (rows, cols)
    return 0 if 0 in (major, minor) else (major - 1) * ld + minor


def check(library, method, case, guarded=False):
    """Runs the case and compares with NumPy. False if the method declines."""
    c = case
    rng = np.random.default_rng(c.seed)
    a_ld, b_ld, y_ld = c.lds or (
        (c.m if c.ta else c.k) + c.pad[0],
        (c.k if c.tb else c.n) + c.pad[1],
        c.n + c.pad[2],
    )
    reach = [sum((x[0] - 1) * x[o] for x in c.loops) for o in (1, 2, 3)]
    sizes = [
        reach[0] + extent_of(c.m, c.k, a_ld, c.ta),
        reach[1] + extent_of(c.k, c.n, b_ld, c.tb),
        reach[2] + extent_of(c.m, c.n, y_ld, False),
    ]
    reads_aux = c.derivative != "none"
    a, b = (Memory(size, c.operands, guarded) for size in sizes[:2])
    y, aux = (Memory(sizes[2], c.result, guarded) for _ in range(2))
    bias, sums = (Memory(size, c.result, guarded) for size in (c.n, c.m))
    # What must not be read is NaN: the gaps between rows, y without beta, and
    # the operands without alpha.
    exact = c.operands is S8
    if not exact:
        a.array[:] = b.array[:] = y.array[:] = np.nan
    steps = [
        [sum(i * x[o] for i, x in zip(index, c.loops, strict=True)) for o in (1, 2, 3)]
        for index in itertools.product(*(range(x[0]) for x in c.loops))
    ]
    lefts = [view(a.array, x[0], c.m, c.k, c.ta, a_ld) for x in steps]
    rights = [view(b.array, x[1], c.k, c.n, c.tb, b_ld) for x in steps]
    if c.alpha:
        for operand in (*lefts, *rights):
            if exact:
                operand[:] = rng.choice([-128, -128, -127, 1, 127], operand.shape)
            else:
                operand[:] = rng.standard_normal(operand.shape)
    bias.array[:] = 9 * rng.standard_normal(c.n) if exact else rng.standard_normal(c.n)
    if c.beta:
        y.array[:] = 9 * rng.standard_normal(sizes[2])
    if reads_aux:
        aux.array[:] = rng.standard_normal(sizes[2])
    y_before, aux_before = y.array.copy(), aux.array.copy()

    problem = CProblem(c.m, c.n, c.k, c.ta, a_ld, c.tb, b_ld, y_ld, len(c.loops))
    for i, loop in enumerate(c.loops):
        problem.loops[i][:] = loop
    problem.operands = DTYPES.index(c.operands)
    problem.result = DTYPES.index(c.result)
    problem.activation = ACTIVATIONS.index(c.activation)
    problem.derivative = ACTIVATIONS.index(c.derivative)
    problem.bias, problem.aux, problem.sums = c.bias, c.aux, c.sums
    problem.alpha, problem.beta = c.alpha, c.beta
    null = ctypes.c_void_p()
    code = library.Gemm(
        METHODS.index(method),
        ctypes.byref(problem),
        c.threads,
        a.pointer,
        b.pointer,
        bias.pointer if c.bias else null,
        y.pointer,
        aux.pointer if c.aux or reads_aux else null,
        sums.pointer if c.sums else null,
    )
    if code == 2:
        return False
    assert code == 0
    for memory in (a, b, y, aux, bias, sums):
        assert memory.intact()

    epsilon = {F32: 2e-7, BF16: 2**-8, F16: 2**-11, S32: 0}[c.result]
    written = np.zeros(sizes[2], bool)
    for (_, _, at), left, right in zip(steps, lefts, rights, strict=True):
        left, right = left.astype(np.float64), right.astype(np.float64)
        at = (at, c.m, c.n, False, y_ld)
        z = c.alpha * (left @ right) if c.alpha else np.zeros((c.m, c.n))
        slack = 0 if exact else 3e-6
        if c.alpha and not exact:
            slack = 3e-6 * (abs(c.alpha) * (abs(left) @ abs(right)) + 1)
        if c.beta:
            z += c.beta * view(y_before, *at).astype(np.float64)
        if c.bias:
            z += bias.array.astype(np.float64)
        if c.aux:
            close(view(aux.array, *at), z, epsilon, slack)
        if c.activation == "relu":
            z = np.maximum(z, 0)
        if c.activation == "gelu":
            z = gelu(z)
        if reads_aux:
            saved = view(aux_before, *at).astype(np.float64)
            if c.derivative == "gelu":  # 1 - s, of which up to 20 times is taken
                slack = slack + 3e-6 * abs(z)
            z *= saved > 0 if c.derivative == "relu" else gelu_derivative(saved)
        close(view(y.array, *at), z, epsilon, slack * 1.2)
        view(written, *at)[:] = True
        if c.sums:
            close(sums.array, left.sum(1), epsilon, 3e-6 * (abs(left).sum(1) + 1))
    # What lies between the rows of y is not ours.
    assert (
        y.array.view(f"u{y.array.itemsize}") == y_before.view(f"u{y.array.itemsize}")
    )[~written].all()
    if not c.aux:
        assert aux.array.tobytes() == aux_before.tobytes()
    return True


def close(got, want, epsilon, slack):
    error = abs(got.astype(np.float64) - want)
    assert (error <= epsilon * abs(want) + slack).all(), error.max()


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    return ctypes.CDLL(str(compile_library(folder, SOURCES, tiles=True)))


def need(library, method):
    if not library.HasMethod(METHODS.index(method)):
        pytest.skip(f"this processor, or system, has no {method.split('_')[-1]}")


@pytest.fixture
def amx(library):
    """A function that checks a case on the AMX tiles."""
    need(library, "amx")

    def run(**case):
        assert check(library, "amx", Case(**case), guarded=True)

    return run


@pytest.fixture(params=["amx", *BLOCKED])
def tiles(request, library):
    """A function that checks a case by tiles, of the dtypes that they take in turn."""
    need(library, request.param)
    turns = {result: itertools.cycle(pairs) for result, pairs in OPERANDS.items()}

    def run(result=BF16, **case):
        operands = BF16
        if request.param != "amx":
            operands, result = next(turns[result])
        case = Case(operands=operands, result=result, **case)
        assert check(library, request.param, case, guarded=True)

    return run


@pytest.fixture(params=MATVEC)
def matvec(request, library):
    """A function that checks a case with a vector in it."""
    need(library, request.param)

    def run(**case):
        assert check(library, request.param, Case(**case), guarded=True)

    return run


@pytest.fixture(params=SKINNY)
def skinny(request, library):
    """A function that checks a case with a few rows or columns."""
    need(library, request.param)

    def run(**case):
        assert check(library, request.param, Case(**case), guarded=True)

    return run


TRANSPOSES = list(itertools.product((False, True), repeat=2))
transposes = pytest.mark.parametrize("ta, tb", TRANSPOSES)

EPILOGUES = [
    {"alpha": -0.5},
    {"beta": 1.0},
    {"alpha": 2.0, "beta": -0.25, "bias": True},
    {"bias": True},
    {"activation": "relu", "bias": True},
    {"activation": "gelu", "bias": True},
    {"activation": "gelu", "bias": True, "aux": True},
    {"activation": "relu", "aux": True, "beta": 0.5},
    {"aux": True},
    {"derivative": "relu"},
    {"derivative": "gelu", "alpha": 0.5, "beta": 1.0},
    {"alpha": 0.0, "beta": 2.0, "bias": True},
]
epilogues = pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)


@transposes
@pytest.mark.parametrize("m", EXTENTS)
def test_sizes(tiles, m, ta, tb):
    for i, (n, k) in enumerate(itertools.product(EXTENTS, EXTENTS)):
        result = (F32, BF16)[i % 2]
        tiles(m=m, n=n, k=k, ta=ta, tb=tb, result=result, threads=1 + i % 2)


@transposes
@pytest.mark.parametrize("result", [F32, BF16])
@epilogues
def test_epilogues(tiles, epilogue, result, ta, tb):
    for m, n, k in [(33, 65, 40), (7, 130, 64), (64, 64, 0), (70, 33, 1100)]:
        tiles(m=m, n=n, k=k, ta=ta, tb=tb, result=result, pad=(3, 1, 2), **epilogue)


@transposes
@pytest.mark.parametrize("result", [F32, BF16])
def test_sums(tiles, result, ta, tb):
    for m, n, k in [(33, 65, 40), (1, 130, 64), (300, 700, 1100), (64, 32, 0)]:
        tiles(m=m, n=n, k=k, ta=ta, tb=tb, result=result, sums=True)


# Past the sizes of blocks, of waiting sums and of non-temporal stores.
@transposes
@pytest.mark.parametrize(
    "m, n, k",
    [(600, 1100, 1000), (513, 530, 2100), (1100, 90, 1500), (2, 3000, 2500)],
    ids=str,
)
def test_blocks(tiles, m, n, k, ta, tb):
    tiles(m=m, n=n, k=k, ta=ta, tb=tb, threads=3)
    tiles(m=m, n=n, k=k, ta=ta, tb=tb, bias=True, beta=1.0, aux=True, result=F32)


# Columns in turn: few rows, past a block of columns and of k, and parts of tiles.
@transposes
@pytest.mark.parametrize("result", [F32, BF16])
@epilogues
def test_columns_in_turn(tiles, epilogue, result, ta, tb):
    for i, (m, n, k) in enumerate([(5, 700, 33), (40, 801, 64), (130, 770, 1)]):
        case = {"m": m, "n": n, "k": k, "ta": ta, "tb": tb, "pad": (0, 3, 1)}
        tiles(result=result, threads=1 + i % 2, **case, **epilogue)


# Few rows by many columns.
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("m", [2, 8, 15, 16, 17, 31, 32, 33, 47, 48])
def test_streamed(amx, m, ta):
    sizes = [(256, 64), (300, 200), (2081, 31), (1000, 0), (2048, 515), (4100, 260)]
    for i, (n, k) in enumerate(sizes):
        case = {"m": m, "n": n, "k": k, "ta": ta, "threads": 1 + i % 4}
        amx(result=(F32, BF16)[i % 2], pad=(i % 3, i % 2, i), **case)
    for case["n"], case["k"] in [(300, 65), (2500, 420)]:
        amx(bias=True, beta=0.5, alpha=-1.0, activation="gelu", aux=True, **case)
    amx(m=m, n=260, k=70, ta=ta, loops=((3, m * 70, 70 * 260, m * 260),))


@pytest.mark.parametrize(
    "method, m, n, k",
    [
        *[(method, 9, 3000, 200) for method in ("amx", *BLOCKED)],
        *[(method, 70, 700, 700) for method in ("amx", *BLOCKED)],
        *[(method, 1, 1500, 1600) for method in MATVEC],  # k is cut
    ],
)
def test_threads_do_not_change_results(library, method, m, n, k):
    need(library, method)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(BF16) for shape in ((m, k), (k, n)))
    results = []
    for threads in (1, 2, 3, 8):
        problem = CProblem(m, n, k, False, k, False, n, n, 0)
        problem.operands = problem.result = DTYPES.index(BF16)
        problem.alpha = 1
        y = np.zeros((m, n), BF16)
        a_, b_, y_ = (ctypes.c_void_p(x.ctypes.data) for x in (a, b, y))
        null = ctypes.c_void_p()
        assert not library.Gemm(
            METHODS.index(method), ctypes.byref(problem), threads,
            a_, b_, null, y_, null, null,
        )  # fmt: skip
        results.append(y.tobytes())
    assert len(set(results)) == 1


@transposes
def test_aligned_large_results(library, ta, tb):
    need(library, "amx")
    sizes = [(1040, 2080, 288), (2048, 1024, 320), (64, 40000, 256)]
    for i, (m, n, k) in enumerate(sizes, ta + tb):
        case = Case(m=m, n=n, k=k, ta=ta, tb=tb, result=(F32, BF16)[i % 2])
        assert check(library, "amx", case)


@pytest.mark.parametrize(
    "m, n, k",
    [(0, 5, 3), (5, 0, 3), (0, 0, 0), (3, 4, 0), (300, 600, 0)],
    ids=str,
)
def test_nothing(tiles, m, n, k):
    for tb in (False, True):
        tiles(m=m, n=n, k=k, tb=tb)


@pytest.mark.parametrize("m, n, k", [(65, 33, 40), (17, 64, 64), (100, 129, 63)])
@transposes
def test_leading_dimensions(tiles, m, n, k, ta, tb):
    for pad in itertools.product((0, 5, 64), repeat=3):
        tiles(m=m, n=n, k=k, ta=ta, tb=tb, pad=pad)


def attention(b, s, t, h, d):
    """bshd,bthd->bhst and bhst,bthd->bshd."""
    scores = {"m": s, "n": t, "k": d, "tb": True, "lds": (h * d, h * d, t)}
    loops = (b, s * h * d, t * h * d, h * s * t), (h, d, d, s * t)
    yield {**scores, "loops": loops}
    values = {"m": s, "n": d, "k": t, "lds": (t, h * d, h * d)}
    loops = (b, h * s * t, t * h * d, s * h * d), (h, s * t, d, d)
    yield {**values, "loops": loops}


@pytest.mark.parametrize(
    "sizes", [(2, 40, 65, 3, 64), (1, 128, 128, 4, 32), (3, 5, 7, 2, 9)]
)
@pytest.mark.parametrize("result", [F32, BF16])
def test_attention(tiles, sizes, result):
    for case in attention(*sizes):
        tiles(result=result, **case)
        tiles(result=result, alpha=0.125, beta=1.0, **case)


@transposes
def test_loops(tiles, ta, tb):
    m, n, k = 33, 20, 50
    a, b, y = m * k, k * n, m * n
    tiles(m=m, n=n, k=k, ta=ta, tb=tb, loops=((7, a, b, y),))
    tiles(
        m=m, n=n, k=k, ta=ta, tb=tb, loops=((3, 0, b, 2 * y), (2, a, 0, y)), bias=False
    )
    tiles(m=m, n=n, k=k, ta=ta, tb=tb, loops=((5, a, 0, y),), bias=True, aux=True)
    tiles(m=m, n=n, k=k, ta=ta, tb=tb, loops=((5, a, 0, y),), derivative="gelu")


def test_tiles_are_given_back(library, amx):
    """The pool's threads are not ours: others may use the tiles as well."""
    amx(m=64, n=64, k=64, threads=1)
    assert library.TilesAtRest()


@pytest.mark.parametrize(
    "operands, result", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)]
)
@transposes
def test_vectors(matvec, operands, result, ta, tb):
    for n, k in itertools.product((*EXTENTS, 1500), (0, *EXTENTS, 1500)):
        case = {"operands": operands, "result": result, "ta": ta, "tb": tb}
        matvec(m=1, n=n, k=k, **case)
        matvec(m=n, n=1, k=k, pad=(2, 3, 1), **case)


@pytest.mark.parametrize("operands, result", [(F32, F32), (BF16, BF16), (F16, F32)])
@epilogues
def test_vector_epilogues(matvec, operands, result, epilogue):
    case = {"operands": operands, "result": result, **epilogue}
    for tb in (False, True):
        matvec(m=1, n=101, k=37, tb=tb, **case)
        matvec(m=101, n=1, k=37, ta=tb, **case)
        matvec(m=101, n=1, k=37, ta=tb, pad=(0, 0, 4), **case)
        matvec(m=1, n=37, k=33, tb=tb, loops=((5, 33, 0, 37),), **case)


skinny_types = pytest.mark.parametrize(
    "operands, result", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16), (S8, S32)]
)


@skinny_types
@transposes
def test_few_rows(skinny, operands, result, ta, tb):
    case = {"operands": operands, "result": result, "ta": ta, "tb": tb}
    sizes = (1, 15, 16, 17, 31, 32, 33, 65, 130, 300)
    depths = (1, 2, 7, 16, 33, 63, 64, 65, 127, 129, 515, 1100)
    for m in (1, 2, 3, 5, 6, 8, 9, 13, 16, 25, 47, 64):
        for i in range(4):
            n, k = sizes[(m + 3 * i) % len(sizes)], depths[(5 * m + i) % len(depths)]
            pad = (i % 3, (m + i) % 2 * 5, i % 2)
            skinny(m=m, n=n, k=k, pad=pad, threads=1 + i % 2, **case)
            if i < 2:
                skinny(m=n, n=m, k=k, pad=pad, **case)
    skinny(m=1300, n=20, k=1100, threads=3, **case)
    skinny(m=40, n=2816, k=20, threads=2, **case)  # ten blocks, not eleven
    for few in (65, 129, 256) if operands is not S8 else ():
        if not tb:  # the matrix is contiguous along its columns
            skinny(m=few, n=600, k=300, pad=(1, 2, 0), threads=2, **case)
        if ta:
            skinny(m=600, n=few, k=300, pad=(2, 1, 3), threads=2, **case)
    if operands is S8:
        skinny(m=5, n=101, k=70, alpha=3.0, beta=-2.0, bias=True, **case)


@pytest.mark.parametrize("operands, result", [(F32, F32), (BF16, BF16), (F16, F32)])
@epilogues
def test_skinny_epilogues(skinny, operands, result, epilogue):
    case = {"operands": operands, "result": result, **epilogue}
    for tb in (False, True):
        skinny(m=5, n=101, k=37, tb=tb, pad=(0, 0, 3), **case)
        skinny(m=101, n=14, k=37, ta=tb, pad=(0, 0, 3), **case)
        skinny(m=9, n=37, k=33, tb=tb, loops=((5, 9 * 33, 0, 9 * 37),), **case)


@skinny_types
def test_skinny_loops(skinny, operands, result):
    b, heads, t, d = 3, 4, 70, 64
    case = {"operands": operands, "result": result, "m": 5}
    loops = ((b, heads * 5 * d, t * heads * d, heads * 5 * t), (heads, 5 * d, d, 5 * t))
    keys = {"n": t, "k": d, "tb": True, "lds": (d, heads * d, t)}
    skinny(**case, **keys, loops=loops)
    loops = ((b, heads * 5 * t, t * heads * d, heads * 5 * d), (heads, 5 * t, d, 5 * d))
    skinny(**case, n=d, k=t, lds=(t, heads * d, d), loops=loops)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_special_values(library, activation):
    """NaN and infinity come out as jax.nn has them."""
    for method in METHODS:
        if not library.HasMethod(METHODS.index(method)):
            continue
        x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0, -50, 50], F32)
        rows = 1 if method in MATVEC else 2
        y = np.zeros((rows, 8), F32)
        problem = CProblem(rows, 8, 1, False, 1, False, 8, 8, 0)
        operands = F32 if method != "amx" else BF16
        problem.operands, problem.result = DTYPES.index(operands), 0
        problem.activation, problem.alpha = ACTIVATIONS.index(activation), 1
        problem.bias = True
        a, b = np.zeros((rows, 1), operands), np.zeros((1, 8), operands)
        pointers = [ctypes.c_void_p(v.ctypes.data) for v in (a, b, x, y)]
        null = ctypes.c_void_p()
        method_id = METHODS.index(method)
        assert not library.Gemm(
            method_id, ctypes.byref(problem), 1, *pointers, null, null
        )
        with np.errstate(all="ignore"):
            want = np.maximum(x, 0) if activation == "relu" else gelu(x)
        if method not in SKINNY or activation == "relu":
            want[x == -np.inf] = 0  # the limit
        np.testing.assert_allclose(y[0], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", BLOCKED)
@transposes
def test_what_is_not_finite_stays_in_its_row_and_column(library, method, ta, tb):
    need(library, method)
    dtype = BF16 if method.endswith("bf16") else F32
    for m, n, k in [(8, 8, 8), (29, 45, 20), (130, 300, 700)]:
        a, b = np.ones((m, k), dtype), np.ones((k, n), dtype)
        a[m // 2, k // 2], b[k // 3, n // 2], b[k // 3, -1] = np.nan, np.inf, -np.inf
        y = np.full((m, n), np.nan, F32)
        operands = [
            np.ascontiguousarray(x.T if t else x) for x, t in ((a, ta), (b, tb))
        ]
        lds = [x.shape[1] for x in operands]
        problem = CProblem(m, n, k, ta, lds[0], tb, lds[1], n, 0)
        problem.operands, problem.alpha = DTYPES.index(dtype), 1
        a_, b_, y_ = (ctypes.c_void_p(x.ctypes.data) for x in (*operands, y))
        null = ctypes.c_void_p()
        assert not library.Gemm(
            METHODS.index(method), ctypes.byref(problem), 2,
            a_, b_, null, y_, null, null,
        )  # fmt: skip
        want = np.full((m, n), k, F32)
        want[:, n // 2], want[:, -1], want[m // 2] = np.inf, -np.inf, np.nan
        np.testing.assert_array_equal(y, want)


def check_under_sanitizers(path):
    """Runs, in a process with AddressSanitizer, on buffers of the exact size."""
    library = ctypes.CDLL(path)
    rng = np.random.default_rng(0)
    methods = [x for x in METHODS if library.HasMethod(METHODS.index(x))]
    for method, trial in itertools.product(methods, range(150)):
        m, n, k = (int(x) for x in rng.choice(EXTENTS, 3))
        if trial % 20 == 0:
            m, n, k = 290, 700, 1090
        if method in MATVEC:
            m, n = ((1, n), (m, 1))[trial % 2]
        if method in SKINNY:
            m, n = ((m % 65, n), (m, n % 65))[trial % 2]
        ta, tb = TRANSPOSES[trial % 4]
        result = (F32, BF16)[trial // 4 % 2]
        epilogue = EPILOGUES[trial % len(EPILOGUES)]
        pad = tuple(int(x) for x in rng.integers(0, 3, 3))
        case = Case(m, n, k, ta, tb, BF16, result, pad=pad, **epilogue)
        assert check(library, method, case, guarded=trial % 3 > 0), case


def test_sanitizers(tmp_path):
    check_sanitized(__file__, compile_sanitized(tmp_path, SOURCES, tiles=True))


if __name__ == "__main__":
    check_under_sanitizers(sys.argv[1])
