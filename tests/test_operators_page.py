# SPDX-License-Identifier: Apache-2.0
"""docs/operators.md says what the records say."""

import runpy
import subprocess
import sys
from pathlib import Path

import jax_layout as jl

SCRIPT = Path(__file__).parent.parent / "docs" / "operators.py"


def test_the_page_is_not_stale():
    """In a process of its own: tests define operators too."""
    code = f"import runpy; print(runpy.run_path({str(SCRIPT)!r})['page'](), end='')"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    written = SCRIPT.with_name("operators.md").read_text()
    assert written == out.stdout, "run: python docs/operators.py"


def test_a_record_without_rules_says_so():
    page = runpy.run_path(str(SCRIPT))
    assert list(page["rules"](jl.Op("bare", lax=abs))) == ["none", "none", "fallback"]


def test_dtypes_of_a_kind_are_one():
    short = runpy.run_path(str(SCRIPT))["short"]
    names = "bfloat16 float32 float64 float8_e5m2 int8".split()
    assert short(names) == "bfloat16, float32/64, float8_e5m2, int8"
