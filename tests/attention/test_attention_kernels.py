# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of attention without JAX, against NumPy in float64."""

import ctypes
import dataclasses
import functools
import itertools
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
    "cpu/attention/*.cc",
    "cpu/isa.cc",
    "tests/attention/kernels/*.cc",
)
ISAS = ("avx2", "avx512", "avx512_bf16", "amx")
F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16
DTYPES = {F32: 0, BF16: 2, F16: 3}  # as in DType
TOLERANCES = {F32: 3e-6, BF16: 1e-2, F16: 2e-3}
HIDDEN = np.float32(-0.7) * np.finfo(np.float32).max
NOTHING = np.finfo(np.float32).min
PLACES = ("BTKGH", "BKGTH", "TBKGH")


class CProblem(ctypes.Structure):
    _fields_ = [
        *[(x, ctypes.c_int64) for x in ("type", "batch", "heads", "groups")],
        *[(x, ctypes.c_int64) for x in ("queries", "keys", "features")],
        *[(x, ctypes.c_int64) for x in ("causal", "left", "right")],
        *[(x, ctypes.c_int64 * 4) for x in "qk"],
        *[(x, ctypes.c_int64 * 6) for x in ("bias", "mask")],
        *[(x, ctypes.c_int64) for x in ("bias_type", "block", "blocks")],
        ("scale", ctypes.c_double),
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention; `bias` and `mask` name the axes that they have, of BKGTS."""

    b: int = 1
    k: int = 1
    g: int = 1
    t: int = 1
    s: int = 1
    h: int = 16
    dtype: type = F32
    place: str = "BTKGH"
    scale: float = 0.3
    causal: bool = False
    window: tuple = (-1, -1)
    bias: str | None = None
    mask: str | None = None
    bias_type: type = F32
    lengths: bool = False
    block: int = 0  # keys of a block, which divide s
    threads: int = 2
    seed: int = 0

    @property
    def factor(self):
        """Of scores, which then are as large for any number of features."""
        return 4 * self.scale / self.h**0.5


def place(x, order):
    """An array of axes BTKGH, or BSKH, in the order of a place in memory."""
    order = order if x.ndim == 5 else order.replace("G", "")
    axes = "BTKGH" if x.ndim == 5 else "BTKH"
    return np.ascontiguousarray(x.transpose([axes.index(a) for a in order]))


def placed_back(x, order):
    order = order if x.ndim == 5 else order.replace("G", "")
    axes = "BTKGH" if x.ndim == 5 else "BTKH"
    return x.transpose([order.index(a) for a in axes])


def strides(x, order):
    """Of batch, row, head and group, in elements."""
    order = order if x.ndim == 5 else order.replace("G", "")
    found = dict(zip(order, (n // x.itemsize for n in x.strides), strict=True))
    return [found.get(a, 0) for a in "BTKG"]


def scores_strides(x):
    if x is None:
        return [0] * 6
    pairs = zip(x.strides, x.shape, strict=True)
    return [1, *(0 if n == 1 else s // x.itemsize for s, n in pairs)]


def pointer(x):
    return None if x is None else x.ctypes.data_as(ctypes.c_void_p)


class Operands:
    def __init__(self, c):
        random = np.random.default_rng(c.seed)
        extents = dict(zip("BKGTS", (c.b, c.k, c.g, c.t, c.s), strict=True))

        def normal(*shape):
            return random.standard_normal(shape).astype(c.dtype)

        self.q = normal(c.b, c.t, c.k, c.g, c.h)
        self.k, self.v = (normal(c.b, c.s, c.k, c.h) for _ in "kv")
        self.dy = normal(c.b, c.t, c.k, c.g, c.h)

        def of_scores(axes):
            return [extents[a] if a in axes else 1 for a in "BKGTS"]

        self.bias = self.mask = self.query_lengths = self.key_lengths = None
        if c.bias is not None:
            bias = random.standard_normal(of_scores(c.bias))
            self.bias = bias.astype(c.bias_type)
        if c.mask is not None:
            self.mask = (random.random(of_scores(c.mask)) < 0.5).astype(np.uint8)
        if c.lengths:
            self.query_lengths = random.integers(0, c.t + 1, c.b).astype(np.int32)
            self.key_lengths = random.integers(0, c.s + 1, c.b).astype(np.int32)


einsum = functools.partial(np.einsum, optimize=True)


def expected(c, x):
    """The result, the logarithms of sums (BKGT), and the gradients."""
    q, k, v, dy = (a.astype(np.float64) for a in (x.q, x.k, x.v, x.dy))
    scores = einsum("btkgh,bskh->bkgts", q, k) * c.factor
    if x.bias is not None:
        scores = scores + x.bias.astype(np.float64)
    t, s = np.arange(c.t)[:, None], np.arange(c.s)
    seen = np.ones(scores.shape, bool)
    if c.causal:
        seen &= s <= t
    if c.window[0] >= 0:
        seen &= s >= t - c.window[0]
    if c.window[1] >= 0:
        seen &= s <= t + c.window[1]
    if x.mask is not None:
        seen &= x.mask != 0
    inside = np.ones((c.b, c.t), bool)
    if c.lengths:
        inside = np.arange(c.t) < x.query_lengths[:, None]
        seen &= inside[:, None, None, :, None]
        seen &= (s < x.key_lengths[:, None])[:, None, None, None, :]
    nothing = ~seen.any(-1, keepdims=True)
    hidden = np.where(seen, scores, -np.inf)
    most = np.where(nothing, 0, hidden.max(-1, keepdims=True))
    powers = np.exp(hidden - most)
    total = powers.sum(-1, keepdims=True)
    # Softmax of equal scores.
    p = np.where(nothing, 1 / c.s, powers / np.where(nothing, 1, total))
    with np.errstate(divide="ignore"):
        lse = np.where(nothing, HIDDEN, most + np.log(total))[..., 0]
    inside = inside[:, :, None, None, None]
    y = einsum("bkgts,bskh->btkgh", p, v) * inside
    dy = dy * inside
    dp = einsum("btkgh,bskh->bkgts", dy, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * seen
    dq = einsum("bkgts,bskh->btkgh", ds, k) * c.factor
    dk = einsum("bkgts,btkgh->bskh", ds, q) * c.factor
    dv = einsum("bkgts,btkgh->bskh", p, dy)
    if x.bias is None:
        return y, lse, (dq, dk, dv)
    lacks = tuple(i for i, n in enumerate(x.bias.shape) if n == 1)
    return y, lse, (dq, dk, dv, ds.sum(lacks, keepdims=True))


def in_blocks(c, *arrays):
    """Blocks of the arrays in any order, among others; the tables that find them."""
    random = np.random.default_rng(c.seed)
    used = c.b * c.s // c.block
    tables = random.permutation(used + 3)[:used].astype(np.int32).reshape(c.b, -1)
    tables[:, -1] += (used + 3) * (tables[:, -1] == used + 2)  # clipped to the last
    pools = []
    for x in arrays:
        pool = np.full((used + 3, c.block, *x.shape[2:]), np.nan).astype(x.dtype)
        pool[np.minimum(tables, used + 2)] = x.reshape(*tables.shape, *pool.shape[1:])
        pools.append(pool)
    return tables, *pools


def run(library, c, x, isa, gradient=False):
    tables, k, v = in_blocks(c, x.k, x.v) if c.block else (None, x.k, x.v)
    q, k, v, dy = (place(a, c.place) for a in (x.q, k, v, x.dy))
    problem = CProblem(
        type=DTYPES[c.dtype], batch=c.b, heads=c.k, groups=c.g, queries=c.t, keys=c.s,
        features=c.h, causal=c.causal, left=c.window[0], right=c.window[1],
        q=(ctypes.c_int64 * 4)(*strides(q, c.place)),
        k=(ctypes.c_int64 * 4)(*strides(k, c.place)),
        bias=(ctypes.c_int64 * 6)(*scores_strides(x.bias)),
        mask=(ctypes.c_int64 * 6)(*scores_strides(x.mask)),
        bias_type=DTYPES[c.bias_type], scale=c.factor, block=c.block,
        blocks=k.shape[c.place.replace("G", "").index("B")],
    )  # fmt: skip
    y = np.full_like(q, 7)
    sums = np.full((c.b, c.k, c.g, c.t, 2), 7, np.float32)
    rest = (x.bias, x.mask, x.query_lengths, x.key_lengths)
    given = [pointer(a) for a in (q, k, v, *rest, y, sums)]
    assert library.attention(
        ctypes.byref(problem), *given, pointer(tables), c.threads, isa
    )
    if not gradient:
        most, log = np.moveaxis(sums.astype(np.float64), -1, 0)
        lse = np.where(most == NOTHING, HIDDEN, most + log)
        return placed_back(y, c.place), lse
    out = [np.full_like(a, 7) for a in (q, k, v)]
    dbias = None if x.bias is None else np.full_like(x.bias, 7)
    more = [pointer(a) for a in (dy, *out, dbias)]
    assert library.attention_gradient(
        ctypes.byref(problem), *given, *more, c.threads, isa
    )
    out = [placed_back(a, c.place) for a in out]
    return out if dbias is None else [*out, dbias]


def check(found, wanted, tolerance):
    assert found.shape == wanted.shape
    apart = np.abs(found.astype(np.float64) - wanted).max(initial=0)
    assert apart <= tolerance * max(1, np.abs(wanted).max(initial=0)), apart


def check_case(library, c, isa):
    x = Operands(c)
    y, lse, gradients = expected(c, x)
    found_y, found_lse = run(library, c, x, isa)
    check(found_y, y, TOLERANCES[c.dtype])
    hidden = lse == HIDDEN
    assert (found_lse[hidden] == HIDDEN).all()
    check(np.where(hidden, 0, found_lse), np.where(hidden, 0, lse), 2e-6)
    if c.block:
        return
    found = run(library, c, x, isa, gradient=True)
    for gradient, wanted in zip(found, gradients, strict=True):
        dtypes = (c.dtype, gradient.dtype.type)
        check(gradient, wanted, 4 * max(TOLERANCES[dtype] for dtype in dtypes))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    return ctypes.CDLL(str(compile_library(folder, SOURCES, tiles=True)))


@pytest.fixture(params=range(len(ISAS)), ids=ISAS)
def isa(request, library):
    if not library.has_isa(request.param):
        pytest.skip("not on this processor")
    return request.param


SHAPES = [
    {"t": 1, "s": 1, "h": 16},
    {"b": 2, "k": 2, "g": 2, "t": 5, "s": 9, "h": 16},
    {"k": 2, "t": 57, "s": 65, "h": 64},
    {"g": 3, "t": 40, "s": 257, "h": 80},
    {"b": 2, "t": 113, "s": 300, "h": 33},
    {"t": 20, "s": 530, "h": 256},
    {"k": 3, "t": 1, "s": 700, "h": 128},
    {"b": 2, "g": 7, "t": 1, "s": 130, "h": 40},
    {"g": 4, "t": 4, "s": 300, "h": 17},
    {"b": 2, "k": 2, "g": 4, "t": 1, "s": 130, "h": 64},
    {"k": 3, "g": 2, "t": 3, "s": 65, "h": 32},
    {"g": 16, "t": 1, "s": 300, "h": 96},
    {"b": 2, "g": 5, "t": 3, "s": 17, "h": 32},
]
FORMS = [
    {},
    {"place": "BKGTH", "scale": -0.2},
    {"place": "TBKGH", "causal": True},
    {"causal": True, "window": (3, 0)},
    {"window": (9, 30)},
    {"window": (0, 0)},
    {"bias": "KGTS", "causal": True},
    {"bias": "BS", "bias_type": BF16},
    {"bias": "T", "bias_type": F16},
    {"mask": "BTS"},
    {"mask": "KGT", "bias": "BKGTS"},
    {"lengths": True},
    {"lengths": True, "causal": True, "mask": "S", "window": (100, 5)},
]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_attention(library, isa, dtype, shape):
    for seed, form in enumerate(FORMS):
        check_case(library, Case(**SHAPES[shape], **form, dtype=dtype, seed=seed), isa)


IN_BLOCKS = [
    {"b": 2, "k": 2, "g": 2, "t": 1, "s": 96, "h": 40, "block": 16},
    {"b": 2, "g": 3, "t": 4, "s": 700, "h": 17, "block": 7, "lengths": True},
    {"b": 3, "k": 2, "t": 90, "s": 530, "h": 32, "block": 53, "causal": True},
    {"b": 2, "t": 60, "s": 600, "h": 64, "block": 300, "lengths": True, "bias": "BS"},
    {"k": 2, "t": 1, "s": 2048, "h": 16, "block": 128, "place": "BKGTH"},
    {"b": 2, "k": 2, "t": 30, "s": 40, "block": 8, "place": "TBKGH"},
    {"b": 2, "k": 2, "g": 8, "t": 1, "s": 192, "h": 64, "block": 16, "lengths": True},
    {"b": 2, "g": 2, "t": 7, "s": 350, "h": 32, "block": 7, "place": "BKGTH"},
]


@pytest.mark.parametrize("form", range(len(IN_BLOCKS)))
def test_keys_in_blocks(library, isa, form):
    for dtype in DTYPES:
        check_case(library, Case(**IN_BLOCKS[form], dtype=dtype, seed=form), isa)


@pytest.mark.parametrize("bias", ["", "BKGTS", "KGTS", "TS", "BTS", "GS", "BKG", "KT"])
def test_gradients_by_biases(library, isa, bias):
    c = Case(b=3, k=2, g=2, t=150, s=290, h=16, bias=bias, causal=True, threads=3)
    check_case(library, c, isa)
    wide = dataclasses.replace(c, b=9, k=1, t=40, s=70, bias_type=BF16, threads=8)
    check_case(library, wide, isa)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_parts_of_heads_on_any_number_of_threads(library, isa, threads):
    for shape in ({"t": 600, "s": 70}, {"t": 1, "s": 3000}, {"b": 9, "t": 3, "s": 5}):
        check_case(library, Case(**shape, h=24, threads=threads, causal=True), isa)


def test_the_same_sums_every_time(library, isa):
    c = Case(b=2, t=700, s=300, h=32, bias="S", threads=8)
    x = Operands(c)
    first = run(library, c, x, isa, gradient=True)
    for _ in range(3):
        for a, b in zip(first, run(library, c, x, isa, gradient=True), strict=True):
            np.testing.assert_array_equal(a, b)


def test_large_scores_do_not_overflow(library, isa):
    c = Case(t=70, s=300, h=32, scale=300.0, bias="TS")
    x = Operands(c)
    y, lse, _ = expected(c, x)
    found_y, found_lse = run(library, c, x, isa)
    # Scores of thousands, of which float32 leaves three digits behind the point.
    check(found_y, y, 5e-3)
    check(found_lse, lse, 1e-5)


def test_what_is_hidden_by_the_bias(library, isa):
    c = Case(t=3, s=40, h=16, bias="TS")
    x = Operands(c)
    x.bias[..., 20:] = -np.inf
    x.bias[..., :5] = np.finfo(np.float32).min
    y, _, _ = expected(c, x)
    check(run(library, c, x, isa)[0], y, TOLERANCES[F32])


def test_a_nan_stays_in_its_row(library, isa):
    for t, h, dtype in ((1, 16, F32), (60, 16, F32), (8, 32, BF16), (60, 32, BF16)):
        c = Case(t=t, s=300, h=h, b=2, dtype=dtype)
        x = Operands(c)
        x.q[0, 0, 0, 0, 3] = np.nan
        y, lse = run(library, c, x, isa)
        y = y.astype(F32)
        assert np.isnan(y[0, 0]).all() and np.isnan(lse[0, 0, 0, 0])
        assert np.isfinite(y[1]).all() and np.isfinite(y[0, 1:]).all()


def test_what_lies_behind_the_lengths_is_not_read(library, isa):
    for (t, h), dtype in itertools.product(((2, 16), (60, 16), (8, 64)), DTYPES):
        c = Case(b=2, t=t, s=700, h=h, lengths=True, dtype=dtype)
        x = Operands(c)
        x.query_lengths[:] = t
        x.key_lengths[:] = (3, 301)
        x.k[0, 3:] = x.v[0, 3:] = x.k[1, 301:] = x.v[1, 301:] = np.nan
        assert np.isfinite(run(library, c, x, isa)[0].astype(F32)).all()
        dq, dk, dv = run(library, c, x, isa, gradient=True)
        assert all(np.isfinite(a.astype(F32)).all() for a in (dq, dk, dv))
        assert not dk[0, 3:].any() and not dv[1, 301:].any()


def test_what_a_call_leaves_in_memory_is_not_multiplied(library, isa):
    for dtype in (F32, BF16):
        c = Case(t=150, s=600, h=256, dtype=dtype, threads=1)
        x = Operands(c)
        for array in (x.q, x.k, x.v, x.dy):
            array[:] = np.nan
        for t, s, h in [(17, 1, 16), (45, 33, 24), (70, 270, 40), (130, 511, 66)]:
            run(library, c, x, isa)
            run(library, c, x, isa, gradient=True)
            case = Case(t=t, s=s, h=h, dtype=dtype, window=(40, 9), threads=1)
            check_case(library, case, isa)


# Of tiles, along queries, keys and features, and beyond blocks.
EDGES = [
    {"t": 17, "s": 1, "h": 16},
    {"t": 31, "s": 15, "h": 18},
    {"t": 33, "s": 31, "h": 30},
    {"t": 63, "s": 33, "h": 34},
    {"t": 64, "s": 65, "h": 46},
    {"t": 65, "s": 255, "h": 62},
    {"t": 80, "s": 257, "h": 80},
    {"t": 127, "s": 300, "h": 96},
    {"t": 129, "s": 511, "h": 130},
    {"t": 20, "s": 300, "h": 256},
    {"g": 9, "t": 2, "s": 97, "h": 64},
    {"g": 5, "t": 3, "s": 97, "h": 256},
    {"b": 2, "k": 2, "g": 4, "t": 1, "s": 300, "h": 128},
]


@pytest.fixture
def amx(library):
    """The level of tiles."""
    if not library.has_isa(ISAS.index("amx")):
        pytest.skip("tiles, also in software, need AVX-512 with bf16")
    return ISAS.index("amx")


@pytest.mark.parametrize("shape", range(len(EDGES)))
def test_tiles_sum_up_what_pairs_do(library, amx, shape):
    """Close enough that a single key, query or feature less would be seen."""
    pairs = ISAS.index("avx512_bf16")
    for seed, form in enumerate(FORMS):
        c = Case(**EDGES[shape], **form, dtype=BF16, seed=seed)
        x = Operands(c)
        for gradient in (False, True):
            ours, theirs = (run(library, c, x, i, gradient) for i in (amx, pairs))
            for a, b in zip(ours, theirs, strict=True):
                a, b = a.astype(F32), b.astype(F32)
                slack = 3e-3 * max(1, abs(b).max())
                assert (abs(a - b) <= 2**-7 * abs(b) + slack).all()


def test_tiles_are_given_back(library, amx):
    """The pool's threads are not ours: others may use the tiles as well."""
    check_case(library, Case(t=40, s=50, dtype=BF16, threads=1), amx)
    assert library.TilesAtRest()


def main():
    """What the sanitizers are to see: cases of every kind."""
    library = ctypes.CDLL(sys.argv[1])
    for isa in filter(library.has_isa, range(len(ISAS))):
        for i, shape in enumerate(SHAPES):
            for form in FORMS[i % 4 :: 4]:
                dtype = list(DTYPES)[i % 3]
                check_case(library, Case(**shape, **form, dtype=dtype, seed=i), isa)
        for form, dtype in itertools.product(IN_BLOCKS, (F32, BF16)):
            check_case(library, Case(**form, dtype=dtype), isa)


def test_sanitized(tmp_path):
    check_sanitized(__file__, compile_sanitized(tmp_path, SOURCES, tiles=True))


if __name__ == "__main__":
    main()
