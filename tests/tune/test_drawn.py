# SPDX-License-Identifier: Apache-2.0
"""Cases whose sizes are drawn, and what a loop's steps share."""

import numpy as np
import pytest

import jax_layout as jl
from jax_layout.tune import norm_cases, row_cases
from jax_layout.tune.case import Case
from jax_layout.tune.cases import DRAWN
from jax_layout.tune.draw import Draw
from jax_layout.tune.measure import Timing, measure, program_of

SHORT = Timing(seconds=0.0, rounds=1, sample=0.0)


def test_what_is_drawn_is_the_same_everywhere():
    draw = Draw(0)
    assert [draw.of(1, 2, 3, 4) for _ in range(8)] == [4, 4, 2, 2, 3, 2, 4, 2]
    extents = [draw.extent() for _ in range(1000)]
    assert min(extents) < 8 and max(extents) <= 4096
    assert sum(extent % 8 > 0 for extent in extents) > 100
    for drawn in DRAWN.values():
        names = [{c.name for c in drawn(False, i, 50)} for i in (0, 0, 1)]
        assert names[0] == names[1] and len(names[0] & names[2]) < 5
        assert not [*drawn(True)]


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_table_that_all_steps_look_up_is_not_stacked(unrolled):
    def f(x, i):
        return jl.index_select(x, 0, i)

    shapes, dtypes = ((50, 3), (7,)), ("float32", "int32")
    one = Case("rows", f, shapes, dtypes, (0, 50), unrolled=unrolled, shared=1)
    program, ((x, indices),) = program_of(one, "cpu")
    assert x.shape == (50, 3) and indices.shape[1:] == (7,) and len(indices) > 4
    for result, i in zip(program(x, indices), indices, strict=True):
        np.testing.assert_array_equal(result, np.asarray(x)[i])


@pytest.mark.parametrize("drawn", [row_cases.drawn, norm_cases.drawn])
def test_what_is_drawn_can_be_measured(drawn):
    """The least of each kind, however it is timed."""
    least = {}
    for each in drawn(False):
        dtype = each.dtypes[0]
        kind = each.name.partition(dtype)[0].partition(" axis")[0].rstrip(" 0123456789")
        known = least.get((kind, dtype), each)
        least[kind, dtype] = min(each, known, key=Case.nbytes)
    assert len(least) >= 20
    found = measure(list(least.values()), SHORT)
    assert not found.failures
