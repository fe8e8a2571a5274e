# SPDX-License-Identifier: Apache-2.0
"""Networks as Flax's guides have them, linen and nnx, and what Optax learns of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import (
    Made,
    Program,
    both,
    cast,
    cross_entropy,
    filled,
    gradient,
    integers,
    normal,
)


def _cnn(rows: int) -> tuple[Any, Any, Any, Any]:
    """The classifier of digits of Flax's examples: apply, weights, images, labels."""
    from flax import linen as nn

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for channels in (32, 64):
                x = nn.relu(nn.Conv(channels, (3, 3))(x))
                x = nn.avg_pool(x, (2, 2), (2, 2))
            x = x.reshape(x.shape[0], -1)
            return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))

    net, x = CNN(), normal(rows, 28, 28, 1)
    p = filled(jax.eval_shape(net.init, jax.random.key(0), x))
    return net.apply, p, x, integers(10, rows)


def _per_example(dtype: Any) -> Made:
    """Clipped, noiseless: the gradients that differentially private learning sums."""
    apply, p, x, labels = _cnn(16)

    def loss(p: Any, x: Any, label: Any) -> Any:
        return cross_entropy(apply(p, x[None]), label[None])

    def clipped(p: Any, x: Any, labels: Any) -> Any:
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(p, x, labels)
        squares = [jnp.sum(g * g, range(1, g.ndim)) for g in jax.tree.leaves(each)]
        factors = jnp.minimum(1, jax.lax.rsqrt(sum(squares)))
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), each)

    return clipped, (p, x, labels)


def _ensemble(dtype: Any) -> Made:
    """A step of Adam of four networks at once."""
    import optax

    apply, p, x, labels = _cnn(16)
    scales = jnp.linspace(0.9, 1.1, 4)
    ps = jax.tree.map(lambda v: jax.vmap(lambda s: s * v)(scales), p)
    optimizer = optax.adam(1e-3)
    states = jax.vmap(optimizer.init)(ps)

    def step(p: Any, state: Any, x: Any, labels: Any) -> Any:
        def loss(p: Any) -> Any:
            return cross_entropy(apply(p, x), labels)

        # Momenta, not weights: Adam's first step is the sign of a gradient.
        return optimizer.update(jax.grad(loss)(p), state)[1]

    f = jax.vmap(step, (0, 0, None, None))
    return f, (ps, states, x, labels)


def _lbfgs(dtype: Any) -> Made:
    """Steps of L-BFGS, the line search a loop in the loop."""
    import optax

    apply, p, x, labels = _cnn(4)
    optimizer = optax.lbfgs(memory_size=4)

    def learn(p: Any, x: Any, labels: Any) -> Any:
        def loss(p: Any) -> Any:
            return cross_entropy(apply(p, x), labels)

        def step(carry: Any, _: Any) -> Any:
            p, state = carry
            value, g = optax.value_and_grad_from_state(loss)(p, state=state)
            updates, state = optimizer.update(
                g, state, p, value=value, grad=g, value_fn=loss
            )
            return (optax.apply_updates(p, updates), state), value

        return jax.lax.scan(step, (p, optimizer.init(p)), length=2)[1]

    return learn, (p, x, labels)


def _bidirectional(dtype: Any) -> Made:
    from flax import linen as nn

    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = nn.Bidirectional(
                    nn.RNN(nn.OptimizedLSTMCell(256)), nn.RNN(nn.OptimizedLSTMCell(256))
                )(x)
            return nn.Dense(64)(x)

    net, x = Tagger(), normal(8, 32, 256)
    p = filled(jax.eval_shape(net.init, jax.random.key(0), x))
    return net.apply, (p, x)


def _transformer(dtype: Any) -> Made:
    """An encoder of nnx; its loss's gradient."""
    from flax import nnx

    width, of = 512, jnp.dtype(dtype)

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(
                8, width, dtype=of, decode=False, rngs=rngs
            )
            self.inner = nnx.Linear(width, 4 * width, dtype=of, rngs=rngs)
            self.outer = nnx.Linear(4 * width, width, dtype=of, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norms[0](x))
            return x + self.outer(nnx.gelu(self.inner(self.norms[1](x))))

    class Encoder(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])

        def __call__(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(nnx.Rngs(0))))

    def forward(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x)

    return gradient(forward), (filled(state, of), normal(2, 128, width, dtype=of))


def _scanned(rows: int) -> Callable[[Any], Made]:
    """The next word of a decoder that is a layer, scanned over stacks of weights and
    caches, as those are whose compilation is not to grow with their depth."""
    width, length, layers = 768, 256, 12

    def make(dtype: Any) -> Made:
        from flax import linen as nn

        class Block(nn.Module):
            dtype: Any

            @nn.compact
            def __call__(self, x: Any) -> Any:
                attention = nn.MultiHeadDotProductAttention(
                    12, dtype=self.dtype, decode=True
                )
                x = x + attention(nn.LayerNorm(dtype=self.dtype)(x))
                y = nn.LayerNorm(dtype=self.dtype)(x)
                y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
                return x + nn.Dense(width, dtype=self.dtype)(y), None

        net = nn.scan(
            Block,
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True},
            length=layers,
        )(dtype)
        whole = jax.ShapeDtypeStruct((rows, length, width), dtype)
        shapes = jax.eval_shape(net.init, jax.random.key(0), whole)
        cache = jax.tree.map(
            lambda x: x if x.ndim > 1 else jnp.full_like(x, length // 2),
            filled(shapes["cache"], dtype),
        )

        def decode(p: Any, cache: Any, x: Any) -> Any:
            given = {"params": p, "cache": cache}
            (y, _), changed = net.apply(given, x, mutable=["cache"])
            return y, changed

        p = filled(shapes["params"], dtype)
        return decode, (p, cache, normal(rows, 1, width, dtype=dtype))

    return make


def _actor_critic(dtype: Any) -> Made:
    """The network that Flax's example plays Atari with."""
    from flax import linen as nn

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                conv = nn.Conv(channels, (size, size), (stride, stride), "VALID")
                x = nn.relu(conv(x))
            x = nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))
            return jnp.concatenate([nn.Dense(6)(x), nn.Dense(1)(x)], -1)

    net, x = ActorCritic(), normal(32, 84, 84, 4, dtype=dtype)
    p = filled(jax.eval_shape(net.init, jax.random.key(0), x), dtype)
    return gradient(net.apply), (cast(p, dtype), x)


PROGRAMS = (
    Program("gradients of 16 examples, clipped", _per_example),
    Program("ensemble of 4, a step of Adam", _ensemble),
    Program("L-BFGS, 2 steps", _lbfgs),
    Program("bidirectional LSTM, 32 steps of 8x256", _bidirectional),
    *both("nnx transformer, gradient", _transformer),
    *both("12 layers in a scan, decode, 1 row", _scanned(1)),
    *both("12 layers in a scan, decode, 8 rows", _scanned(8)),
    Program("actor and critic, gradient, batch 32", _actor_critic),
)
