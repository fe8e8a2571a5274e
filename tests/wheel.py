# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel as a stranger would, outside of the source tree, and tries it.

    python tests/wheel.py dist/jax_layout-*.whl

Needs mypy where it runs, to see the types that the wheel ships.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

SMOKE = Path(__file__).with_name("wheel_smoke.py")
# What mypy says of each, with --strict, from the wheel alone.
TYPES = {
    "jl.permute(x, (1, 0))": "jax._src.basearray.Array",
    "jl.einsum('ij,jk->ik', x, x)": "jax._src.basearray.Array",
    "jl.index_add(x, 0, i, x)": "jax._src.basearray.Array",
    "jl.memory_format(x)": "jax_layout.formats.memory_format.MemoryFormat",
}


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints; what one that fails printed is shown."""
    done = subprocess.run(
        command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv/bin/python"
        # "jax-layout @ file:..." with its dependencies, as from an index.
        run(python, "-m", "pip", "install", "--quiet", wheel.resolve(), cwd=folder)
        smoke = shutil.copy(SMOKE, folder)
        print(run(python, "-I", smoke, cwd=folder), end="")
        print(run(folder / "venv/bin/jax-layout", "doctor", cwd=folder))
        _check_types(folder, python)


def _check_types(folder: Path, python: Path) -> None:
    public = run(
        python, "-I", "-c", "import jax_layout; print(*jax_layout.__all__)", cwd=folder
    ).split()
    expressions = [*TYPES, *(f"jl.{name}" for name in public)]
    program = folder / "types_of.py"
    program.write_text(
        "import jax.numpy as jnp\nimport jax_layout as jl\n"
        "x, i = jnp.ones((2, 2)), jnp.arange(2)\n"
        + "".join(f"reveal_type({expression})\n" for expression in expressions)
    )
    # Strict of the program alone: how jax is typed is jax's.
    told = run(
        sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent",
        "--python-executable", python, program, cwd=folder,
    )  # fmt: skip
    types = re.findall(r'Revealed type is "(.*)"', told)
    found = dict(zip(expressions, types, strict=True))
    for expression, expected in TYPES.items():
        if found[expression] != expected:
            sys.exit(f"{expression} is {found[expression]}, not {expected}")
    # Of functions that take or return functions, and of load, results may be Any.
    untyped = [
        name
        for name in public
        if name != "load"
        and re.search(r"(^|(?<!\*\*Any)\) -> )Any$", found[f"jl.{name}"])
    ]
    if untyped:
        sys.exit(f"not typed: {', '.join(untyped)}")
    print(f"mypy sees the types of {len(public)} public names")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
