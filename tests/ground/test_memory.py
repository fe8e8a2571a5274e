# SPDX-License-Identifier: Apache-2.0
"""keep_memory, each in a process of its own: what it sets is the process's."""

import platform
import subprocess
import sys
import textwrap

import pytest

import jax_layout as jl
from jax_layout import memory

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="sets glibc's malloc"
)
START = """
import resource, time, warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import jax_layout as jl

MB = 1 << 20

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def faults(f, x, calls):
    # Of the last of so many calls.
    for _ in range(calls):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        f(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def freed(count):
    # MB that came to be resident, before and after arrays and their kin are freed;
    # something small lives on between any two.
    before = resident()
    arrays, small = [], []
    for i in range(count):
        arrays += [np.ones(4 * MB), np.ones(1 * MB)]
        small.append(np.ones(1 * MB >> 3))
    full = resident()
    del arrays
    time.sleep(1)
    return small, (full - before) // MB, (resident() - before) // MB
"""


def run(code, **environment):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::RuntimeWarning",
            "-c",
            START + textwrap.dedent(code),
        ],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_large_results_are_no_longer_new_memory():
    run("""
        jl.keep_memory()
        f = jax.jit(lambda x: 2 * x + 1)
        x = jnp.ones((4096, 4096))
        kept = min(faults(f, x, 4) for _ in range(5))
        assert kept < 500, kept
        """)
    run("""
        f = jax.jit(lambda x: 2 * x + 1)
        x = jnp.ones((4096, 4096))
        assert faults(f, x, 4) > 16000
        """)


def test_without_a_limit_all_stays_until_it_is_trimmed():
    run("""
        jl.keep_memory()
        small, full, after = freed(20)
        assert full > 800 and after > 700, (full, after)
        given = jl.trim_memory()
        assert given > 700 * MB, given
        """)


def test_a_limit_holds():
    """Also for what lies below something alive, which glibc itself would not trim."""
    run("""
        jl.keep_memory(200 * MB)
        for _ in range(3):
            small, full, after = freed(20)
            assert full > 800 and after < 200 + 2 * len(small), (full, after)
        """)


def test_less_than_the_limit_stays():
    run("""
        jl.keep_memory(2000 * MB)
        small, full, after = freed(20)
        assert after > 700, (full, after)
        """)


def test_off_again():
    run("""
        jl.keep_memory()
        jl.keep_memory(100 * MB)
        small, _, _ = freed(4)
        jl.keep_memory(0)
        import threading
        time.sleep(0.5)
        assert "jax_layout.keep_memory" not in {t.name for t in threading.enumerate()}
        f = jax.jit(lambda x: 2 * x + 1)
        x = jnp.ones((4096, 4096))
        assert faults(f, x, 4) > 16000
        """)


def test_threads_that_have_heaps_already_are_warned_of():
    run("""
        jnp.ones(3).block_until_ready()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            jl.keep_memory()
            jl.keep_memory(0)
        assert [str(w.message)[:40] for w in found] == [
            "keep_memory: jax has computed already; l"]
        """)


def test_another_allocator_is_named(tmp_path):
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(
        "#include <stddef.h>\nvoid* __libc_malloc(size_t);\n"
        "void* malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", source, "-o", library]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip("no gcc here")
    run(
        """
        for f in (jl.keep_memory, jl.trim_memory):
            try:
                f()
            except RuntimeError as error:
                assert "must allocate by glibc" in str(error), error
                assert "libother.so" in str(error), error
            else:
                raise AssertionError
        """,
        LD_PRELOAD=str(library),
    )


def test_another_system(monkeypatch):
    memory._library.cache_clear()
    monkeypatch.setattr(memory.os, "name", "nt")
    with pytest.raises(RuntimeError, match=r"keep_memory: .* but does by Windows"):
        jl.keep_memory()


@pytest.mark.parametrize(
    "limit, error, message",
    [
        (-1, ValueError, "limit must be at least 0, got -1"),
        (1.5, TypeError, "limit must be an integer or None, got 1.5"),
        ("1G", TypeError, "limit must be an integer or None, got '1G'"),
    ],
)
def test_bad_input(limit, error, message):
    with pytest.raises(error, match=f"^keep_memory: {message}"):
        jl.keep_memory(limit)
