# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices, 64-bit types, and the meshes made of them.

XLA optimises nothing: most programs run once or twice, which takes less time than that.
Examples, figures of the documents and the wheel's test are without this, as users are.
"""

import os

# Kernels are tested wherever they run, whatever a table says of their speed here.
os.environ["JAX_LAYOUT_CHOICES"] = "kernels"
flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import AxisType  # noqa: E402

jax.config.update("jax_enable_x64", True)

# Runs where the wheel alone is installed.
collect_ignore = ["wheel_smoke.py"]
collect_ignore_glob = ["install/train_*.py"]  # scripts that tests run


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    """A 4x2 mesh with axes a and b, current while the test runs."""
    mesh = jax.make_mesh(
        (4, 2), ("a", "b"), (request.param,) * 2, devices=jax.devices("cpu")
    )
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def by_default():
    """Choices that users get, who have no JAX_LAYOUT_CHOICES."""
    import jax_layout as jl

    jl.use_choices("packaged")
    yield
    jl.use_choices(None)
