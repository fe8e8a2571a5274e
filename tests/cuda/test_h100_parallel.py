# SPDX-License-Identifier: Apache-2.0
"""A transformer block over the batch and over heads and features, on 8 and 256 H100s,
compiled without one: what goes from device to device."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from h100 import topology
from hlo import collectives, count, kernels
from native import ROOT

# devices: topology (slices, hosts, devices of a host), mesh
MACHINES = {8: ("1x1x8", (2, 4)), 256: ("1x32x8", (32, 8))}
TOKENS, WIDTH, HEADS, HEAD, HIDDEN = 512, 1024, 16, 64, 4096
PER_DEVICE = 2  # sequences
SHAPES = {
    "scale": (WIDTH,),
    "q": (WIDTH, HEADS, HEAD),
    "k": (WIDTH, HEADS, HEAD),
    "v": (WIDTH, HEADS, HEAD),
    "o": (HEADS, HEAD, WIDTH),
    "w1": (HIDDEN, WIDTH),
    "b1": (HIDDEN,),
    "w2": (WIDTH, HIDDEN),
    "b2": (WIDTH,),
}
# Heads and hidden features over "model": columns, then rows.
SPECS = {
    "q": P(None, "model"),
    "k": P(None, "model"),
    "v": P(None, "model"),
    "o": P("model"),
    "w1": P("model"),
    "b1": P("model"),
    "w2": P(None, "model"),
}


def plain_linear(x, w, b, activation=None):
    z = x @ w.T + b
    return jax.nn.gelu(z) if activation else z


OURS = jl.einsum, jl.dot_product_attention, jl.linear
PLAIN = jnp.einsum, jax.nn.dot_product_attention, plain_linear


def norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def block(functions, p, x):
    einsum, attend, linear = functions
    y = norm(x, p["scale"])
    q, k, v = (einsum("bsm,mhd->bshd", y, p[name]) for name in "qkv")
    x = x + einsum("bshd,hdm->bsm", attend(q, k, v), p["o"])
    y = linear(norm(x, p["scale"]), p["w1"], p["b1"], activation="gelu")
    return x + linear(y, p["w2"], p["b2"])


def step(functions, p, x):
    def loss(p, x):
        return (block(functions, p, x).astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss)(p, x)


def compiled(devices, backward, functions):
    shape, (data, model) = MACHINES[devices]
    grid = np.array(topology(shape)).reshape(data, model)
    mesh = Mesh(grid, ("data", "model"))

    def place(shape, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    p = {name: place(s, SPECS.get(name, P())) for name, s in SHAPES.items()}
    x = place((PER_DEVICE * data, TOKENS, WIDTH), P("data"))
    out = x.sharding
    if backward:
        gradients = {name: value.sharding for name, value in p.items()}
        out = NamedSharding(mesh, P()), gradients
    f = functools.partial(step if backward else block, functions)
    program = jax.jit(f, out_shardings=out).trace(p, x).lower().compile()
    return program.as_text(), program.memory_analysis().argument_size_in_bytes


def parts(devices):
    """Bytes on a device: of the parameters, of its tokens."""
    model = MACHINES[devices][1][1]
    elements = (
        math.prod(shape) // (model if name in SPECS else 1)
        for name, shape in SHAPES.items()
    )
    return 2 * sum(elements), 2 * PER_DEVICE * TOKENS * WIDTH


def reduced(hlo):
    """The bytes that a device gives to all-reduces."""
    total = 0
    pattern = r"= (\S+|\(\(.*?\), .*?\)) all-reduce(-start)?\("
    for result, start in re.findall(pattern, hlo):
        given = result[2:].split(")")[0] if start else result
        for bits, extents in re.findall(r"\bb?f(\d+)\[([\d,]*)\]", given):
            total += (
                int(bits) // 8 * math.prod(map(int, filter(None, extents.split(","))))
            )
    return total


def test_forward():
    """A sum for each product whose summed axis is spread."""
    hlo, held = compiled(256, False, OURS)
    parameters, tokens = parts(256)
    assert held == parameters + tokens
    assert collectives(hlo) == {"all-reduce": 2} and reduced(hlo) == 2 * tokens
    assert kernels(hlo) == 6 and count("copy", hlo) == 0


@pytest.mark.parametrize(
    ("devices", "functions", "ours"),
    [(8, OURS, 18), (8, PLAIN, 0), (256, OURS, 18)],
)
def test_only_the_collectives_that_the_mathematics_needs(devices, functions, ours):
    """As many backward, one of all gradients, and the loss."""
    hlo, held = compiled(devices, True, functions)
    parameters, tokens = parts(devices)
    assert held == parameters + tokens
    assert collectives(hlo) == {"all-reduce": 6}
    assert reduced(hlo) == 4 * tokens + parameters + 4
    assert kernels(hlo) == ours
    if ours:
        assert count("copy", hlo) == 0


def test_permutes_need_none():
    """Over both axes of the mesh, on all of 256 devices."""
    shape, (data, model) = MACHINES[256]
    mesh = Mesh(np.array(topology(shape)).reshape(data, model), ("data", "model"))
    sharding = NamedSharding(mesh, P("data", None, "model"))
    x = jax.ShapeDtypeStruct((64, 128, 16, 64), jnp.bfloat16, sharding=sharding)
    f = jax.jit(lambda x: jl.permute(x, (0, 2, 3, 1)))
    hlo = f.trace(x).lower().compile().as_text()
    assert kernels(hlo) == 1 and collectives(hlo) == {} and count("copy", hlo) == 0


def row(devices):
    data, model = MACHINES[devices][1]
    parameters, tokens = parts(devices)
    each = parameters, tokens, 2 * tokens, 2 * tokens, parameters
    words = (f"{n / 2**20:.2f}" for n in each)
    return f"| {devices} | {data} x {model} | {' | '.join(words)} |"


@pytest.mark.parametrize("devices", MACHINES)
def test_the_table_of_the_page(devices):
    assert row(devices) in (ROOT / "docs" / "gemm.md").read_text(), row(devices)
