# SPDX-License-Identifier: Apache-2.0
"""The profiler sees the reorders that run, as often as they run."""

import inspect
import json
import mmap
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl

F32 = jnp.float32


def turned(x):
    return jnp.sin(x.T) + 1


def test_a_transpose_in_a_loop_of_calls():
    f = jax.jit(turned)
    x = jnp.ones((512, 256), F32)
    expected = f(x)
    with jl.profile() as p:
        results = [f(x) for _ in range(5)]
    for y in results:
        np.testing.assert_array_equal(y, expected)
    (run,) = p.runs
    assert (run.program, run.kind, run.count) == ("jit_turned", "transpose", 5)
    assert run.source == f"{__file__}:{inspect.getsourcelines(turned)[1] + 1}"
    assert 0 < run.seconds == p.seconds and p.elapsed > 0
    assert "5 x  transpose" in str(p)
    assert p.calls == 5 and f"in 5 calls, {p.page_faults / 5:.0f} each" in str(p)
    assert json.loads(p.to_json())["runs"][0]["count"] == 5


def test_a_transpose_in_a_scan():
    def scanned(x):
        return lax.scan(lambda c, _: (turned(c), None), x, None, length=6)[0]

    f = jax.jit(scanned)
    x = jnp.ones((256, 256), F32)
    jax.block_until_ready(f(x))
    with jl.profile() as p:
        y = f(x)
    runs = [run for run in p.runs if run.kind == "transpose"]
    assert [run.count for run in runs] == [6]
    assert y.shape == x.shape


def test_a_permute_of_ours():
    f = jax.jit(lambda x: jl.permute(x, (0, 2, 3, 1)))
    x = jnp.ones((8, 64, 32, 32), F32)
    jax.block_until_ready(f(x))
    with jl.profile() as p:
        y = f(x)
    assert [(run.kind, run.count) for run in p.runs] == [("permute", 1)]
    assert y.shape == (8, 32, 32, 64)


def test_pages_that_linux_makes_are_counted():
    # Of memory that is surely new: kept memory (jl.keep_memory) has its pages.
    pages, page = 5000, resource.getpagesize()
    f = jax.jit(lambda x: x + 1)
    x = jnp.ones(1000, F32)
    jax.block_until_ready(f(x))
    with mmap.mmap(
        -1, pages * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as new:
        new.madvise(mmap.MADV_NOHUGEPAGE)
        with jl.profile() as p:
            for _ in range(3):
                y = jax.block_until_ready(f(x))
            new[::page] = bytes(pages)
    assert p.calls == 3 and y[0] == 2
    assert pages <= p.page_faults < 2 * pages


def test_programs_of_one_name_are_told_apart():
    tall, wide = jax.jit(lambda x: x.T * 2), jax.jit(lambda x: x * 2)
    x = jnp.ones((256, 512), F32)
    jax.block_until_ready((tall(x), wide(x)))
    with jl.profile() as p:
        kept = [wide(x), wide(x), tall(x)]
    assert [(run.program, run.count) for run in p.runs] == [("jit__lambda", 1)]
    assert len(kept) == 3


def test_nothing_to_report():
    f = jax.jit(lambda x: x + 1)
    x = jnp.ones(1000, F32)
    with jl.profile() as p:
        y = f(x)
    assert p.runs == () and p.seconds == 0 and str(p).startswith("0 reorders")
    assert y[0] == 2


def test_the_trace_is_kept_where_it_is_asked_for(tmp_path):
    f = jax.jit(turned)
    x = jnp.ones((512, 256), F32)
    with jl.profile(tmp_path) as p:
        y = f(x)
    assert p.runs and list(tmp_path.rglob("*.xplane.pb")) and y.size
    events = json.loads((tmp_path / "reorders.trace.json").read_text())["traceEvents"]
    (event,) = (e for e in events if e["ph"] == "X")
    assert event["name"].startswith("transpose test_profile.py:") and event["dur"] > 0


def test_an_exception_passes_and_ends_the_trace():
    with pytest.raises(ZeroDivisionError), jl.profile():
        _ = 1 / 0
    with jl.profile() as p:
        pass
    assert p.runs == ()
