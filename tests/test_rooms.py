# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: docs/architecture.md draws it, this holds the files to it."""

import ast
import re
from pathlib import Path

import pytest

import jax_layout

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jax_layout"
# Lowest first; rooms of one floor do not know each other.
FLOORS = (
    {"_compat", "_backends", "plain", "producers", "arguments", "measured"},
    {"choices", "memory", "partition", "rewriting"},
    {"stacks", "readers"},
    {"kernel"},
    {"op"},
    {"permute"},
    {"products", "formats", "rows"},
    {"index", "geam", "attention", "convnet"},
    {"segments"},
    {"optimize"},
    {"explain", "install"},
    {"__init__"},
    {"tune", "doctor"},
    {"cli", "equinox"},
)
# Kernels' rooms that others may use: the operators beneath the others, and vectors.
SHARED = ("permute", "index", "vectors")
# A file that is longer holds two things.
LONGEST = 600


def room(file):
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def floor(name):
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


def imports(file):
    """The rooms that a file imports, also where a function does so late."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "jax_layout":
            names = [f"jax_layout.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            package, *rest = name.split(".")
            if package == "jax_layout":
                yield rest[0] if rest else "__init__"


def python_files():
    return sorted(PACKAGE.rglob("*.py"))


def native_files(*folders):
    return sorted(
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".h", ".cc", ".cu", ".cuh")
    )


@pytest.mark.parametrize("file", python_files(), ids=lambda file: room(file))
def test_no_room_imports_upward(file):
    here = room(file)
    for there in imports(file):
        if there in ("_cpu", "_cuda"):
            continue
        assert there == here or floor(there) < floor(here), f"{here} imports {there}"


def test_private_jax_is_imported_in_one_file():
    private = re.compile(r"^\s*(?:from|import) jax\._src|jaxlib\._jax", re.MULTILINE)
    found = {file.name for file in python_files() if private.search(file.read_text())}
    assert found <= {"_compat.py"}


@pytest.mark.parametrize("backend", ["core", "cpu", "cuda"])
def test_an_operators_kernels_include_their_own_room_and_what_all_share(backend):
    for file in native_files(backend):
        here = file.relative_to(ROOT).parts
        own = here[1] if len(here) > 2 else None
        for include in re.findall(r'#include "([^"]+)"', file.read_text()):
            parts = include.split("/")
            if parts[0] not in ("core", "cpu", "cuda"):
                continue
            assert parts[0] in ("core", backend), f"{file} includes {include}"
            shared = len(parts) == 2 or parts[1] in SHARED
            assert shared or parts[1] == own, f"{file} includes {include}"


def test_what_has_a_drop_in_is_called_as_it_was_at_import():
    """So that a drop-in which takes jax's function's place does not call itself."""
    for file in python_files():
        tree = ast.parse(file.read_text())
        bound = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "jax_layout.plain"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in jax_layout.__all__:
                module = ast.unparse(node.value)
                late = module in {"jnp", "lax", "nn", "ops"} - bound
                public = {"jax.lax", "jax.nn", "jax.numpy", "jax.ops"}
                assert not late and module not in public, (
                    f"{file}:{node.lineno} calls {module}.{node.attr}"
                )


def test_every_room_says_what_it_is():
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and (folder / "__init__.py").exists():
            assert "Imports " in (folder / "__init__.py").read_text(), folder
    page = (ROOT / "docs" / "architecture.md").read_text()
    for folder in ("core", "cpu", "cuda"):
        for name in (ROOT / folder).iterdir():
            if name.is_dir():
                assert f"{name.name}/" in page, name


def test_no_file_holds_two_things():
    files = [*python_files(), *native_files("core", "cpu", "cuda")]
    long = {
        str(file.relative_to(ROOT)): lines
        for file in files
        if (lines := len(file.read_text().splitlines())) > LONGEST
    }
    assert not long
