# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of the pages run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, capsys):
    exec(compile(block, "<page>", "exec"), {})
