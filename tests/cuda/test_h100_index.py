# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of rows by index on an H100, compiled without one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from h100 import mesh, moved
from hlo import collectives, count, kernels

X = {0: (5000, 1024), 1: (64, 1000, 256)}  # by axis
COUNT = 512


def compiled(f, *avals, spec=(), devices=1, donate=()):
    """avals are shapes and dtypes; the index, 1-D, is on every device."""

    def place(shape, dtype):
        axes = P() if len(shape) == 1 else P(*spec)
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh(devices), axes)
        )

    avals = [place(*aval) for aval in avals]
    return jax.jit(f, donate_argnums=donate).trace(*avals).lower().compile().as_text()


def selected(axis):
    return (*X[axis][:axis], COUNT, *X[axis][axis + 1 :])


def gradient(select, axis, ct, index):
    like = jax.ShapeDtypeStruct(X[axis], ct.dtype)
    return jax.linear_transpose(lambda x: select(x, axis, index), like)(ct)


def scattered(hlo):
    """How often XLA itself would gather or add rows."""
    return count("gather", hlo) + count("scatter", hlo)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("axis", X)
def test_a_selection_is_one_kernel(axis, dtype):
    f = lambda x, index: jl.index_select(x, axis, index)  # noqa: E731
    hlo = compiled(f, (X[axis], dtype), ((COUNT,), "int32"))
    assert kernels(hlo) == 1 and moved(hlo) == {} and scattered(hlo) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("axis", X)
def test_its_gradient_sorts_the_index_and_starts_at_zero(axis, dtype):
    f = functools.partial(gradient, jl.index_select, axis)
    hlo = compiled(f, (selected(axis), dtype), ((COUNT,), "int32"))
    assert kernels(hlo) == 1 and scattered(hlo) == 0
    assert count("transpose", hlo) == count("copy", hlo) == 0
    assert "jax_layout_index_add" in hlo


def test_what_the_counts_above_see_in_plain_jax():
    def take(x, axis, index):
        return jnp.take(x, index, axis)

    x, index = (X[1], "float32"), ((COUNT,), "int32")
    hlo = compiled(lambda x, index: take(x, 1, index), x, index)
    assert kernels(hlo) == 0 and moved(hlo) != {}
    hlo = compiled(
        functools.partial(gradient, take, 1), (selected(1), "float32"), index
    )
    assert kernels(hlo) == 0 and scattered(hlo) > 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_donated_array_is_added_to_in_place(deterministic):
    def f(x, source, index):
        return jl.index_add(x, 1, index, source, deterministic=deterministic)

    avals = (X[1], "float32"), (selected(1), "float32"), ((COUNT,), "int32")
    hlo = compiled(f, *avals, donate=0)
    assert kernels(hlo) == 1 and scattered(hlo) == 0
    assert count("transpose", hlo) == count("copy", hlo) == 0
    if not deterministic:
        assert count("sort", hlo) == 0 and moved(hlo) == {}
    # The array is kept where it is not donated: that is a copy.
    assert count("copy", compiled(f, *avals)) == 1


@pytest.mark.parametrize("spec", [("a",), (None, None, "a")], ids=str)
def test_axes_that_are_not_indexed_need_no_collective(spec):
    index = ((COUNT,), "int32")
    f = lambda x, index: jl.index_select(x, 1, index)  # noqa: E731
    hlo = compiled(f, (X[1], "float32"), index, spec=spec, devices=4)
    assert kernels(hlo) == 1 and moved(hlo) == {} and collectives(hlo) == {}
    f = functools.partial(gradient, jl.index_select, 1)
    hlo = compiled(f, (selected(1), "float32"), index, spec=spec, devices=4)
    assert kernels(hlo) == 1 and collectives(hlo) == {}
    assert count("transpose", hlo) == count("copy", hlo) == scattered(hlo) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min"])
def test_segments_in_order_are_reduced_as_jaxs(name, dtype):
    """0.9 ms, for 57 if XLA does not know: a million rows in ten, bfloat16 maxima."""
    avals = (X[0], dtype), (X[0][:1], "int32")
    ours, theirs = (
        compiled(
            functools.partial(
                getattr(module, name), num_segments=40, indices_are_sorted=True
            ),
            *avals,
        )
        for module in (jl, jax.ops)
    )
    for hlo in (ours, theirs):
        assert hlo.count("indices_are_sorted=true") == count("scatter", hlo) == 1
    assert kernels(ours) == 0
