# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: JAX's own tests, with our drop-ins in place of its functions, or,
`--installed`, with our kernels beneath its primitives.

JAX's tests are not in its wheel; they, and what they import, are in its repository:

    make jax-tests JAX_TESTS=path/of/jax/tests

`--plain` leaves JAX's functions where they are, to compare with. `--every` runs those
too whose names are of nothing that there is a kernel for.
"""

import sys
from pathlib import Path

import jax
import jax._src
import jax.numpy as jnp

import jax_layout as jl

DROP_INS = {
    jax.lax.conv_general_dilated: jl.conv_general_dilated,
    jax.lax.dot_general: jl.dot_general,
    jax.lax.transpose: jl.permute,
    jnp.einsum: jl.einsum,
    jnp.matmul: jl.matmul,
    jnp.matrix_transpose: jl.matrix_transpose,
    jnp.moveaxis: jl.moveaxis,
    jnp.swapaxes: jl.swapaxes,
    jnp.tensordot: jl.tensordot,
    jnp.transpose: jl.transpose,
}
WORDS = "dot conv transpose einsum matmul moveaxis swapaxes contract matvec vecmat vdot"
# They assert that dot_general_p is what a jaxpr or a module of StableHLO has.
NAMES_OF_PRIMITIVES = (
    "testMixedPrecisionDot",
    "testMatmulBothSize1BatchDimsSqueezedJaxpr",
    "test_einsum_mixed_precision",
)


def pytest_addoption(parser):
    parser.addoption("--plain", action="store_true", help="leave JAX's functions")
    parser.addoption("--installed", action="store_true", help="jl.install() instead")
    parser.addoption("--every", action="store_true", help="whatever it is named")


def pytest_configure(config):
    # What the tests import of JAX's repository, and the wheel lacks.
    package = sys.modules["jax._src"]
    package.__path__.append(str(Path(config.rootpath) / "jax" / "_src"))
    if config.getoption("--installed"):
        config.lowered = jl.install()
    elif not config.getoption("--plain"):
        put_in_place()


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--installed") and not config.getoption("numprocesses", None):
        terminalreporter.write_line(str(config.lowered))


def put_in_place():
    """Wherever JAX has them, so that `jnp.dot` and `lax.conv` call ours too."""
    jax_modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "jax"]
    for module in jax_modules:
        for name, value in list(vars(module).items()):
            if callable(value) and value.__hash__ is not None and value in DROP_INS:
                setattr(module, name, DROP_INS[value])


def pytest_collection_modifyitems(config, items):
    def wanted(item):
        name = item.name.lower()
        named = any(word in name for word in WORDS.split()) and "convert" not in name
        asserts = item.name.startswith(NAMES_OF_PRIMITIVES)
        as_jax = config.getoption("--plain") or config.getoption("--installed")
        return (named or config.getoption("--every")) and (as_jax or not asserts)

    left_out = [item for item in items if not wanted(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if wanted(item)]
