# SPDX-License-Identifier: Apache-2.0
"""A program of plain JAX, and one line more: `python -m examples.one_line`.

A recurrence of convolutions, in the order in which most networks are written, and its
gradient. Both are called in turns; a time is the median.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jax_layout as jl

ROUNDS = 7


@jax.jit
def net(w: Any, x: Any) -> Any:  # x: (batch, channels, height, width)
    def cell(h: Any, _: None) -> Any:
        return jnp.tanh(jax.lax.conv(h, w, (1, 1), "SAME")), None

    return jax.lax.scan(cell, x, None, length=8)[0].mean()


def main() -> int:
    """Shows the times; 1 if the results differ."""
    random = np.random.default_rng(0)
    w = jnp.asarray(random.standard_normal((32, 32, 3, 3)) / 17, jnp.float32)
    x = jnp.asarray(random.standard_normal((4, 32, 32, 32)), jnp.float32)
    table = Table("", "plain jax", "after jl.install()", "times")
    for name, f in (("net", net), ("its gradient", jax.jit(jax.grad(net)))):
        before, after = [], []
        expected = jax.block_until_ready(f(w, x))
        for _ in range(1 + ROUNDS):
            before.append(seconds(f, w, x))
            jl.install()
            after.append(seconds(f, w, x))
            found = f(w, x)
            jl.uninstall()
        if not jnp.allclose(found, expected, rtol=1e-3, atol=1e-6):
            print(f"{name}: results differ", file=sys.stderr)
            return 1
        times = [1e3 * statistics.median(each[1:]) for each in (before, after)]
        table.add_row(
            name, *(f"{t:.1f} ms" for t in times), f"{times[0] / times[1]:.0f}"
        )
    Console().print(table)
    return 0


def seconds(f: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
