# SPDX-License-Identifier: Apache-2.0
"""The software in which tests run AMX tiles: its sums, and what it refuses."""

import signal
import subprocess

import pytest

from native import compile_program, processor_flags, sources

pytestmark = pytest.mark.skipif(
    "avx512f" not in processor_flags(), reason="it needs AVX-512"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    program = compile_program(
        tmp_path_factory.mktemp("tiles"),
        sources("tests/ground/kernels/tiles_on_host.cc"),
    )

    def run(what):
        return subprocess.run(
            [program, what], check=False, capture_output=True, text=True
        )

    return run


def test_products(run):
    assert run("products").returncode == 0


def test_nothing_wrong(run):
    assert run("nothing wrong").returncode == 0


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("nothing set up", "tiles are not set up"),
        ("given back", "tiles are not set up"),
        ("tile not set up", "this tile is not set up"),
        ("larger than a tile", "larger than a tile"),
        ("one tile for two", "one tile for two"),
        ("rows", "rows of sums and left operand"),
        ("columns", "columns of sums and right one"),
        ("depth", "k of both operands"),
    ],
)
def test_what_a_processor_refuses_aborts(run, what, why):
    done = run(what)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr == f"tiles_on_host: {why}\n"
