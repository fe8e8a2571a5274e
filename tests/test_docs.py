# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of the pages run as they stand, and print what the pages say."""

import doctest
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# The tour is made of a notebook, which runs where the site is built.
PAGES = [ROOT / "README.md", *sorted({*DOCS.glob("*.md")} - {DOCS / "tour.md"})]
# A block, and the output that may follow it; ... stands for anything.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.S | re.M)


def run(page, capsys):
    """Runs a page's blocks one after the other, and returns what they define."""
    text = page.read_text()
    defined = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        before = text.count("\n", 0, block.start(1))  # tracebacks name the page's line
        code, expected = block.groups()
        exec(compile("\n" * before + code, str(page), "exec"), defined)
        printed = capsys.readouterr().out
        if expected is not None:
            matches = doctest.OutputChecker().check_output(
                expected, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            )
            assert matches, f"{page.name}: says\n{expected}\nprinted\n{printed}"
    return defined


@pytest.fixture(autouse=True)
def defaults():
    """Jax as a reader has it; the other tests have 64-bit types."""
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page, capsys):
    run(page, capsys)


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "api.md").read_text()
    entries = set(re.findall(r"^::: jax_layout\.[\w.]+\.(\w+)$", page, re.M))
    mentioned = set(re.findall(r"`jl\.(\w+)`", page))
    missing = set(jl.__all__) - entries - mentioned
    assert not missing, f"docs/api.md lacks {sorted(missing)}"


def test_docstrings_link_the_pages_that_they_name():
    pytest.importorskip("griffe")
    from docs.fence_doctests import FenceDoctests

    text = "See docs/permute.md.\n\n>>> 1 + 1\n2"
    shown = types.SimpleNamespace(docstring=types.SimpleNamespace(value=text))
    FenceDoctests().on_object(obj=shown)
    assert shown.docstring.value == (
        "See [Permute](permute.html).\n\n```pycon\n>>> 1 + 1\n2\n```"
    )


# Columns of operators.md fit a phone; drawings are not wrapped as what is printed is.
def test_tables_and_drawings_fit():
    for line in (DOCS / "operators.md").read_text().splitlines():
        assert line.count(" | ") <= 3
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
        assert page == ROOT / "README.md" or all(fences[::2]), page.name


# A row of the PyTorch guide: two calls, then words.
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.M)


def test_rows_of_the_pytorch_guide_agree(capsys):
    page = DOCS / "from_pytorch.md"
    defined = run(page, capsys)
    rows = ROW.findall(page.read_text())
    assert len(rows) > 40
    given = {name: jnp.asarray(array) for name, array in defined["arrays"].items()}
    ours = [np.asarray(eval(call, defined | given)) for _, call in rows]
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(array) for name, array in defined["arrays"].items()}
    names = {"torch": torch, "F": torch.nn.functional} | tensors
    for (call, _), y in zip(rows, ours, strict=True):
        wanted = np.asarray(eval(call, names))
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5, err_msg=call)
