# SPDX-License-Identifier: Apache-2.0
"""The plan of a contraction, carried out with NumPy's strides."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_layout as jl
from jax_layout import _cpu

IN_PLACE = {
    # spec: (a's shape, b's shape, form, number of products)
    "mk,nk->mn": ((5, 7), (3, 7), "TN", 1),
    "mk,kn->mn": ((5, 7), (7, 3), "NN", 1),
    "km,kn->mn": ((7, 5), (7, 3), "NT", 1),
    "km,nk->mn": ((7, 5), (3, 7), "TT", 1),
    "mk,kn->nm": ((5, 7), (7, 3), "TT", 1),
    "abk,nk->abn": ((2, 5, 7), (3, 7), "TN", 1),
    "abn,abk->nk": ((2, 5, 7), (2, 5, 3), "NT", 1),
    "bmk,bkn->bmn": ((4, 5, 7), (4, 7, 3), "NN", 4),
    "bshd,bthd->bhst": ((2, 5, 3, 4), (2, 6, 3, 4), "TN", 6),
    "bhst,bthd->bshd": ((2, 3, 5, 6), (2, 6, 3, 4), "NN", 6),
    "bsm,mhd->bhsd": ((2, 5, 7), (7, 3, 4), "NN", 6),
    "bhsd,hdm->bsm": ((2, 3, 5, 4), (3, 4, 7), None, None),  # h and d do not merge
}


def matrix(flat, offset, rows, cols, view):
    """The matrix in a flat array, which must hold it."""
    strides = (1, view["ld"]) if view["transposed"] else (view["ld"], 1)
    last = offset + max(0, rows - 1) * strides[0] + max(0, cols - 1) * strides[1]
    assert offset >= 0 and last < max(1, flat.size)
    if min(rows, cols) > 1:  # what a library asks of a leading dimension
        assert view["ld"] >= (rows if view["transposed"] else cols)
    itemsize = flat.itemsize
    return np.lib.stride_tricks.as_strided(
        flat[offset:], (rows, cols), [s * itemsize for s in strides]
    )


def carry_out(plan, a, b, y_size):
    if plan["swapped"]:
        a, b = b, a
    y = np.full(y_size, np.nan)
    a, b = a.ravel(), b.ravel()
    m, n, k = plan["m"], plan["n"], plan["k"]
    loops = plan["loops"]
    for index in itertools.product(*(range(loop[0]) for loop in loops)):
        at = [
            sum(i * loop[o] for i, loop in zip(index, loops, strict=True))
            for o in (1, 2, 3)
        ]
        out = matrix(y, at[2], m, n, plan["y"])
        assert not plan["y"]["transposed"] and np.isnan(out).all(), "written once"
        out[:] = matrix(a, at[0], m, k, plan["a"]) @ matrix(b, at[1], k, n, plan["b"])
    return y


def check(spec, a_shape, b_shape):
    """The plan's result is NumPy's; returns how it is reached."""
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 8, a_shape).astype(float)
    b = rng.integers(-8, 8, b_shape).astype(float)
    expected = np.einsum(spec, a, b)
    before = spec.replace("->", ",").split(",")
    x, w, y, moved = _cpu.gemm_order(spec, a_shape, b_shape, 2, 4)
    after = [x, w, y]
    sizes = [a.size * 2, b.size * 2, expected.size * 4]
    changed = [size for p, q, size in zip(before, after, sizes, strict=True) if p != q]
    assert moved == 2 * sum(changed)
    a = np.transpose(a, [before[0].index(i) for i in x])
    b = np.transpose(b, [before[1].index(i) for i in w])
    plan = _cpu.gemm_plan(f"{x},{w}->{y}", a.shape, b.shape)
    assert (
        plan["n"] * plan["m"] * math.prod(i[0] for i in plan["loops"]) == expected.size
    )
    shape = [expected.shape[before[2].index(i)] for i in y]
    result = carry_out(plan, a.copy(), b.copy(), expected.size).reshape(shape)
    np.testing.assert_array_equal(
        result, np.transpose(expected, [before[2].index(i) for i in y])
    )
    return changed


@pytest.mark.parametrize("spec", IN_PLACE)
def test_common_contractions_run_in_place(spec):
    a, b, form, products = IN_PLACE[spec]
    changed = check(spec, a, b)
    plan = jl.explain_gemm(spec, a, b)
    if form is None:
        assert changed and plan.permuted
        return
    assert not changed and plan.moved_bytes == 0 and plan.permuted == ()
    assert plan.form == form and math.prod(plan.loops) == products


@st.composite
def contractions(draw):
    kinds = draw(st.lists(st.sampled_from(["batch", "m", "n", "k"]), max_size=7))
    letters = "abcdefg"[: len(kinds)]
    extents = dict(
        zip(letters, draw(st.permutations([1, 2, 3, 1, 4, 2, 5])), strict=False)
    )
    parts = {"batch": (0, 1, 2), "m": (0, 2), "n": (1, 2), "k": (0, 1)}
    spec = []
    for term in range(3):
        mine = [
            i for i, kind in zip(letters, kinds, strict=True) if term in parts[kind]
        ]
        spec.append("".join(draw(st.permutations(mine))))
    shapes = [tuple(extents[i] for i in term) for term in spec[:2]]
    return f"{spec[0]},{spec[1]}->{spec[2]}", *shapes


@hypothesis.settings(max_examples=600, deadline=None)
@hypothesis.given(contractions())
def test_every_contraction_has_a_plan(contraction):
    check(*contraction)


@pytest.mark.parametrize("spec", ["mk,kn->mn", "bmk,bkn->bmn", "km,kn->mn"])
@pytest.mark.parametrize("empty", ["m", "n", "k"])
def test_empty_axes(spec, empty):
    extents = {"b": 2, "m": 3, "n": 4, "k": 5, empty: 0}
    a, b, _ = spec.replace("->", ",").split(",")
    plan = _cpu.gemm_plan(spec, [extents[i] for i in a], [extents[i] for i in b])
    assert plan[empty] == 0


BAD = {
    "mk,kn": ((2, 3), (3, 4), "expected a contraction like mk,kn->mn"),
    "mk,kn->mn": ((2, 3), (4, 5), "extent 4 of axis k .* does not agree"),
    "mk,kn->mk": ((2, 3), (3, 5), "every axis must be in two or three"),
    "mm,mn->mn": ((2, 2), (2, 5), "every axis must be in two or three"),
    "mk,kn->m": ((2, 3), (3, 5), "every axis must be in two or three"),
    "mk,k->mn": ((2, 3), (3,), "every axis must be in two or three"),
    "mkj,kn->mn": ((2, 3), (3, 5), "operands of rank 2 and 2"),
}


@pytest.mark.parametrize("spec", BAD)
def test_bad_contractions(spec):
    a, b, message = BAD[spec]
    with pytest.raises(ValueError, match=message):
        jl.explain_gemm(spec, a, b)
