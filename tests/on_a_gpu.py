# SPDX-License-Identifier: Apache-2.0
"""The tests that a GPU is to pass: `PYTHONPATH=tests python -m on_a_gpu`, with options
for pytest, from the root of the repository.

Bounds are of float32: JAX_DEFAULT_MATMUL_PRECISION=highest, or TF32 misses them. Left
out is what says something of XLA:CPU's programs or layouts, is marked `cpu`, or builds
C++.
"""

import sys

import pytest

FILES = """
attention/test_attention attention/test_update_cache
convnet/test_elementwise convnet/test_operators
formats/test_memory_format formats/test_serialization
ground/test_conformance
index/test_index index/test_segments
permute/test_permute permute/test_permute_transforms permute/test_shapes
products/test_drop_ins products/test_einsum products/test_gemm products/test_layers
products/test_linear products/test_scaled
""".split()


def pytest_collection_modifyitems(config, items):
    """Leaves out what reads programs, by what it calls or its mark."""
    left_out = [i for i in items if i.get_closest_marker("cpu") or reads_programs(i)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_configure(config):
    config.pluginmanager.register(SaysAtOnce(config))


class SaysAtOnce:
    """Why a test failed, when it does: the process may be stopped before its end."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid}: {report.longreprtext[-800:]}")


def reads_programs(item):
    """Whether a test calls something of tests/hlo.py."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    if code is None:
        return False
    helpers = {
        name
        for name, value in vars(item.module).items()
        if getattr(value, "__module__", None) == "hlo"
    }
    return bool(helpers & set(code.co_names))


if __name__ == "__main__":
    files = [f"tests/{name}.py" for name in FILES]
    sys.exit(pytest.main(["-p", "on_a_gpu", *files, *sys.argv[1:]]))
