# SPDX-License-Identifier: Apache-2.0
"""A linear layer spread over two processes, by jax's own runtime on loopback."""

import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax, jax.numpy as jnp, numpy as np
    import jax_layout as jl
    from jax.sharding import NamedSharding, PartitionSpec as P

    port, process = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    assert jax.device_count() == 4 and jax.local_device_count() == 2
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), types)  # a: processes, b: devices
    rng = np.random.default_rng(0)
    whole = [
        rng.standard_normal(s).astype(np.float32)
        for s in ((128, 256), (192, 256), (192,))
    ]

    def loss(f, *args):
        return jnp.sum(jnp.sin(f(*args)))

    def plain(x, w, b):
        return jax.nn.gelu(x @ w.T + b)

    def ours(x, w, b):
        return jl.linear(x, w, b, activation="gelu")

    local = jax.local_devices()[0]
    expected = jax.value_and_grad(lambda *a: loss(plain, *a), (0, 1, 2))(
        *[jax.device_put(v, local) for v in whole]
    )
    layouts = {
        "data": (P("a"), P(), P()),
        "columns": (P(), P("a"), P("a")),
        "rows": (P(None, "a"), P(None, "a"), P()),
        "fully sharded": (P(("a", "b")), P(("a", "b")), P("a")),
    }
    for name, specs in layouts.items():
        args = [
            jax.make_array_from_callback(
                v.shape, NamedSharding(mesh, s), lambda index, v=v: v[index]
            )
            for v, s in zip(whole, specs)
        ]
        step = jax.jit(
            jax.value_and_grad(lambda *a: loss(ours, *a), (0, 1, 2)),
            out_shardings=NamedSharding(mesh, P()),
        )
        assert "jax_layout_gemm" in step.lower(*args).compile().as_text(), name
        found = step(*args)
        for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
            f = np.asarray(f.addressable_data(0))
            np.testing.assert_allclose(f, e, rtol=1e-3, atol=1e-3, err_msg=name)
    print("all layouts agree")
"""


def test_layouts_across_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), port]
    processes = [
        subprocess.Popen(
            [*command, str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if "collectives are not implemented" in "".join(outputs):
        pytest.skip("this jaxlib's CPU backend has no collectives across processes")
    assert all("all layouts agree" in output for output in outputs), outputs
