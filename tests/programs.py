# SPDX-License-Identifier: Apache-2.0
"""Random programs on images: chains of primitives with loops, branches and calls."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_layout as jl

CHANNELS = 8


def weights(seed, dtype):
    rng = np.random.default_rng(seed)
    shapes = {
        "dense": (CHANNELS, CHANNELS, 3, 3),
        "point": (CHANNELS, CHANNELS, 1, 1),
        "depthwise": (CHANNELS, 1, 3, 3),
        "groups": (CHANNELS, CHANNELS // 2, 3, 3),
        "hwio": (3, 3, CHANNELS, CHANNELS),
        "matrix": (CHANNELS, CHANNELS),
        "scale": (CHANNELS,),
    }
    return {
        name: jnp.asarray(rng.normal(0, 0.3, shape), dtype)
        for name, shape in shapes.items()
    }


def _conv(x, w, groups=1, stride=1, spec=("NCHW", "OIHW", "NCHW"), **options):
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=spec,
        feature_group_count=groups,
        **options,
    )


@jax.custom_vjp
def _doubled(x):
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, jnp.sign(x)), lambda sign, ct: (ct * (2 + 0 * sign),))


def _nhwc(x, w, r):
    y = _conv(x.transpose(0, 2, 3, 1), w["hwio"], spec=("NHWC", "HWIO", "NHWC"))
    return y.transpose(0, 3, 1, 2)


def _norm(x, axes):
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(axes, keepdims=True) + 0.1)


def _group_norm(x, w, r):
    y = _norm(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), (2, 3, 4))
    return y.reshape(x.shape) * w["scale"][:, None, None]


def _shuffle(x, w, r):
    n, c, *space = x.shape
    return x.reshape(n, 2, c // 2, *space).swapaxes(1, 2).reshape(x.shape)


def _window(x, kind, stride):
    size, strides = (1, 1, 3, 3), (1, 1, stride, stride)
    init, f = {"max": (-jnp.inf, lax.max), "sum": (0, lax.add)}[kind]
    y = lax.reduce_window(x, np.array(init, x.dtype), f, size, strides, "SAME")
    return y / 9 if kind == "sum" else y


def _dynamic(x, w, r):
    part = lax.dynamic_slice_in_dim(x, r.randrange(CHANNELS // 2), CHANNELS // 2, 1)
    return lax.dynamic_update_slice_in_dim(x, 0.5 * part, 0, 1)


def _by_largest(x, w, r):
    axis = r.choice([1, 2, 3])
    hot = jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], axis=axis, dtype=x.dtype)
    return x + hot


def _position(x, w, r):
    axis = r.choice([1, 2, 3])
    return x + 0.1 * lax.broadcasted_iota(x.dtype, x.shape, axis) / x.shape[axis]


def _stacked(x, w, r):
    return sum(jnp.unstack(jnp.stack([x, -0.5 * x, jnp.sin(x)], 1), axis=1))


SAME = {
    "conv": lambda x, w, r: _conv(x, w["dense"]),
    "nhwc": _nhwc,
    "point": lambda x, w, r: _conv(x, w["point"]),
    "depthwise": lambda x, w, r: _conv(x, w["depthwise"], CHANNELS),
    "groups": lambda x, w, r: _conv(x, w["groups"], 2),
    "ours": lambda x, w, r: jl.conv(x, w["dense"], padding=1),
    "einsum": lambda x, w, r: jnp.einsum("nchw,dc->ndhw", x, w["matrix"]),
    "dense": lambda x, w, r: jnp.moveaxis(jnp.moveaxis(x, 1, -1) @ w["matrix"], -1, 1),
    "relu": lambda x, w, r: jax.nn.relu(x),
    "silu": lambda x, w, r: jax.nn.silu(x),
    "gelu": lambda x, w, r: jax.nn.gelu(x),
    "custom_vjp": lambda x, w, r: _doubled(x),
    "elementwise": lambda x, w, r: jnp.exp(-jnp.square(x)) + jnp.arctan2(x, 1 + x**2),
    "where": lambda x, w, r: jnp.where(x > 0.1, x, 0.3 * x),
    "clip": lambda x, w, r: jnp.clip(x, -2, 2),
    "scale": lambda x, w, r: x * w["scale"][:, None, None] + w["scale"].sum(),
    "batch_norm": lambda x, w, r: _norm(x, (0, 2, 3)),
    "layer_norm": lambda x, w, r: _norm(x, (1,)),
    "group_norm": _group_norm,
    "softmax": lambda x, w, r: jax.nn.softmax(x, r.choice([1, 2, 3])),
    "shuffle": _shuffle,
    "pool": lambda x, w, r: _window(x, r.choice(["max", "sum"]), 1),
    "rev": lambda x, w, r: lax.rev(x, r.choice([(1,), (2, 3), (0,)])),
    "cumsum": lambda x, w, r: 0.2 * jnp.cumsum(x, r.choice([1, 2, 3])),
    "sort": lambda x, w, r: jnp.sort(x, r.choice([1, 2, 3])),
    "roll": lambda x, w, r: jnp.roll(x, 1, r.choice([1, 2, 3])),
    "halves": lambda x, w, r: jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1),
    "gather": lambda x, w, r: x[:, np.array([3, 1, 2, 0, 7, 5, 4, 6])],
    "dynamic": _dynamic,
    "largest": _by_largest,
    "position": _position,
    "stack": _stacked,
    "pad": lambda x, w, r: jnp.pad(x, ((0, 0), (0, 0), (1, 2), (0, 1)))[
        :, :, 1:-2, :-1
    ],
    "flat": lambda x, w, r: jnp.tanh(x.reshape(x.shape[0], -1)).reshape(x.shape),
    "squeeze": lambda x, w, r: jnp.squeeze(jnp.expand_dims(x, (1, 3)), (1, 3)),
    "barrier": lambda x, w, r: lax.optimization_barrier(x),
    "tag": lambda x, w, r: jl.with_memory_format(x, r.choice(["NHWC", "NCHW"])),
    "cast": lambda x, w, r: x.astype(jnp.float32).astype(x.dtype),
}
OTHER = {
    "strided": lambda x, w, r: _conv(x, w["dense"], stride=2),
    "pool2": lambda x, w, r: _window(x, r.choice(["max", "sum"]), 2),
    "transposed": lambda x, w, r: lax.conv_transpose(
        x, w["dense"], (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    ),
    "upsample": lambda x, w, r: jnp.repeat(x, 2, r.choice([2, 3])),
    "swap": lambda x, w, r: x.swapaxes(2, 3),
    "crop": lambda x, w, r: x[:, :, : max(1, x.shape[2] - 1), ::2],
    "batch": lambda x, w, r: jnp.concatenate([x, x[::-1]], 0)[:2],
}


def _chain(r, length, ops):
    """A function of (x, weights) that is the same each time it is traced."""
    steps = [(r.choice(sorted(ops)), r.random()) for _ in range(length)]

    def chain(x, w):
        for name, seed in steps:
            x = ops[name](x, w, random.Random(seed))
        return x

    return chain


def _scan(r):
    body = _chain(r, r.randint(1, 3), SAME)
    length, reverse = r.choice([0, 1, 3]), r.random() < 0.5

    def scan(x, w, _):
        stacks = jnp.stack([w["dense"], -w["dense"], w["dense"]])[:length]

        def turn(carry, v):
            y, count = carry
            y = 0.5 * body(_conv(y, v), w) + y
            return (y, count + 1), y.mean((2, 3))

        (x, count), means = lax.scan(turn, (x, 0), stacks, reverse=reverse)
        return x * (1 + 0.01 * count) + means.sum((0, 2))[:, None, None, None]

    return scan


def _fori(r):
    body = _chain(r, r.randint(1, 3), SAME)
    return lambda x, w, _: lax.fori_loop(0, 2, lambda i, x: 0.7 * body(x, w) + i, x)


def _while(r):
    """Has no reverse derivative: it stands where none is taken."""
    body = _chain(r, r.randint(1, 2), SAME)

    def loop(x, w, _):
        fixed = lax.stop_gradient((x, w))

        def turn(state):
            i, y = state
            return i + 1, jnp.tanh(body(y, fixed[1]))

        start = jnp.asarray(jnp.sum(jnp.abs(fixed[0]) < 0), jnp.int32)
        return x + lax.while_loop(lambda s: s[0] < 2, turn, (start, fixed[0]))[1]

    return loop


def _cond(r):
    one, two = (_chain(r, r.randint(1, 2), SAME) for _ in range(2))
    return lambda x, w, _: lax.cond(x.sum() > 0, one, two, x, w)


def _checkpoint(r):
    body = _chain(r, r.randint(2, 3), SAME)
    policy = r.choice([None, jax.checkpoint_policies.dots_saveable])
    return lambda x, w, _: jax.checkpoint(body, policy=policy)(x, w)


def _jit(r):
    body = _chain(r, r.randint(2, 3), SAME)
    return lambda x, w, _: jax.jit(body)(x, w)


def _custom_jvp(r):
    body = _chain(r, 2, SAME)

    @jax.custom_jvp
    def function(x, w):
        return body(x, w)

    @function.defjvp
    def jvp(primals, tangents):
        return jax.jvp(body, primals, jax.tree.map(lambda t: 1.5 * t, tangents))

    return lambda x, w, _: function(x, w)


NESTED = {
    "scan": _scan,
    "fori": _fori,
    "while": _while,
    "cond": _cond,
    "checkpoint": _checkpoint,
    "jit": _jit,
    "custom_jvp": _custom_jvp,
}


@functools.cache
def program(seed):
    """A scalar function of (weights, x), with what it is made of."""
    r = random.Random(seed)
    names = list(SAME) * 2 + list(OTHER) + list(NESTED) * 2
    steps = []
    for _ in range(r.randint(4, 7)):
        name = r.choice(names)
        f = NESTED[name](r) if name in NESTED else (SAME | OTHER)[name]
        steps.append((name, f, r.random()))

    def f(w, x):
        for _, step, start in steps:
            x = step(x, w, random.Random(start))
        return jnp.sum(jnp.sin(x))

    return f, " ".join(name for name, _, _ in steps)
