# SPDX-License-Identifier: Apache-2.0
"""Ours and jnp, under jit and (for dispatch times) eagerly."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_layout as jl
from benchmarks import xla_program
from benchmarks.buffers import Buffers
from benchmarks.harness import Contender, Role
from benchmarks.permute_cases import PermuteCase

Function = Callable[[jax.Array], jax.Array]


def contenders(
    case: PermuteCase, buffers: Buffers, device: jax.Device
) -> list[Contender]:
    """Fresh outputs come from XLA's allocator, warm ones are donated buffers.

    On a GPU a program has many of them, so that what is timed is the device.
    """
    xs = [jax.device_put(x, device) for x in buffers.x]
    functions: dict[str, Function] = {
        "ours": lambda x: jl.permute(x, case.axes),
        "jnp": lambda x: jnp.transpose(x, case.axes),
    }
    found = []
    for family, function in functions.items():
        role: Role = "ours" if family == "ours" else "peer"
        if device.platform != "cpu":
            found.append(_many(family, role, function, xs))
            if case.group != "tiny":
                continue
        compiled = jax.jit(function).lower(xs[0]).compile()
        program = xla_program.text(compiled)
        if device.platform == "cpu":
            found.append(_fresh(family, role, compiled, xs, program))
            found.append(_warm(family, role, function, xs))
        else:
            found.append(_fresh(f"{family} called", role, compiled, xs, program))
        if case.group == "tiny":
            found.append(_fresh(f"{family} eager", role, function, xs))
    if device.platform != "cpu":
        found.append(_many("jax add", "copy", lambda x: x + x.dtype.type(1), xs))
    return found


def _many(family: str, role: Role, f: Function, xs: list[jax.Array]) -> Contender:
    run = xla_program.repeated(f, [(x,) for x in xs])
    return Contender(
        family=family,
        role=role,
        launch=lambda i: run(),
        wait=jax.block_until_ready,
        read=(lambda results: np.asarray(results[0])) if role == "ours" else None,
        times=xla_program.TIMES_ON_GPU,
    )


def _fresh(
    family: str, role: Role, f: Any, xs: list[jax.Array], program: str = ""
) -> Contender:
    return Contender(
        family=family,
        role=role,
        launch=lambda i: f(xs[i % len(xs)]),
        wait=jax.block_until_ready,
        read=np.asarray,
        program=program,
    )


def _warm(family: str, role: Role, f: Function, xs: list[jax.Array]) -> Contender:
    # XLA gives a donated argument of the result's shape to the result, used or not:
    # the caller's y comes back as the output, rewritten in place.
    both = jax.jit(lambda x, y: f(x), donate_argnums=1, keep_unused=True)
    make = jax.jit(f)
    into = both.lower(xs[0], jax.eval_shape(f, xs[0])).compile()
    ys: list[jax.Array] = []

    def launch(i: int) -> jax.Array:
        k = i % len(xs)
        if not ys:
            ys.extend(make(x) for x in xs)
        ys[k] = into(xs[k], ys[k])
        return ys[k]

    return Contender(
        family=family,
        role=role,
        launch=launch,
        wait=jax.block_until_ready,
        read=np.array,  # a copy: the buffer itself will be donated again
        warm=True,
        program=xla_program.text(into),
    )
