# SPDX-License-Identifier: Apache-2.0
"""Kernels against plain loops, without Python: here, and on an emulated AArch64."""

import emulate
import pytest

HERE = ("portable", "avx2", "avx512", "neon")
MISSING = emulate.missing()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return emulate.build(tmp_path_factory.mktemp("checks"))


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory):
    return emulate.build(tmp_path_factory.mktemp("arm"), emulate.COMPILER)


def passes(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 of " in done.stdout


@pytest.mark.parametrize("name", emulate.CHECKS)
@pytest.mark.parametrize("level", HERE)
def test_here(program, level, name):
    done = emulate.check(program, level, name)
    if done.returncode == 2:
        pytest.skip(f"no {level} here")
    passes(done)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("name", emulate.CHECKS)
@pytest.mark.parametrize("level", emulate.LEVELS)
def test_on_aarch64(arm_program, level, name):
    passes(emulate.check(arm_program, level, name, *emulate.emulator()))


def test_a_level_that_is_not_here_does_not_pass(program):
    assert emulate.check(program, "none", "geam").returncode == 2


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_what_is_missing_is_named(monkeypatch, path):
    monkeypatch.setenv("PATH", path)
    assert "g++-aarch64-linux-gnu" in emulate.missing()
