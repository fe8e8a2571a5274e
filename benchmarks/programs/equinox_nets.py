# SPDX-License-Identifier: Apache-2.0
"""Equinox's examples, neural differential equations of Diffrax among them."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import Collection, Made, Program, gradient, normal


def _parted(net: Any, forward: Any, learns: bool, *args: Any) -> Made:
    import equinox as eqx

    arrays, rest = eqx.partition(net, eqx.is_inexact_array)

    def f(arrays: Any, *args: Any) -> Any:
        return forward(eqx.combine(arrays, rest), *args)

    return gradient(f) if learns else f, (arrays, *args)


def _ode(dtype: Any) -> Made:
    """Learns trajectories: the adjoint of a solver's loop with small products."""
    import diffrax
    import equinox as eqx

    field = eqx.nn.MLP(2, 2, 64, 2, activation=jax.nn.softplus, key=jax.random.key(0))
    times = jnp.linspace(0.0, 2.0, 20)

    def forward(field: Any, starts: Any) -> Any:
        def solve(start: Any) -> Any:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=2.0,
                dt0=0.05,
                y0=start,
                saveat=diffrax.SaveAt(ts=times),
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
            ).ys

        return jax.vmap(solve)(starts)

    return _parted(field, forward, True, normal(128, 2))


def _latent_ode(dtype: Any) -> Made:
    """Runge-Kutta steps of a wide field, unadapted: larger products in a loop."""
    import diffrax
    import equinox as eqx

    field = eqx.nn.MLP(64, 64, 256, 2, activation=jnp.tanh, key=jax.random.key(0))

    def forward(field: Any, starts: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: jax.vmap(field)(y)),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=0.05,
            y0=starts,
            adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=8),
        ).ys

    return _parted(field, forward, True, normal(64, 64))


def _mixer(dtype: Any) -> Made:
    """MLP-Mixer: products along channels and along patches in turn."""
    import equinox as eqx

    nn, keys = eqx.nn, iter(jax.random.split(jax.random.key(0), 16))
    patches, width = 64, 128

    class Block(eqx.Module):
        patch: Any
        channel: Any
        norms: Any

        def __init__(self) -> None:
            self.patch = nn.MLP(patches, patches, 256, 1, key=next(keys))
            self.channel = nn.MLP(width, width, 512, 1, key=next(keys))
            self.norms = [
                nn.LayerNorm((width, patches)),
                nn.LayerNorm((patches, width)),
            ]

        def __call__(self, y: Any) -> Any:
            y = y + jax.vmap(self.patch)(self.norms[0](y))
            y = y.T
            y = y + jax.vmap(self.channel)(self.norms[1](y))
            return y.T

    class Mixer(eqx.Module):
        stem: Any
        blocks: Any

        def __init__(self) -> None:
            self.stem = nn.Conv2d(3, width, 4, 4, key=next(keys))
            self.blocks = [Block() for _ in range(4)]

        def __call__(self, x: Any) -> Any:
            y = self.stem(x).reshape(width, patches)
            for block in self.blocks:
                y = block(y)
            return y.mean(1)

    return _parted(
        Mixer(), lambda net, x: jax.vmap(net)(x), True, normal(16, 3, 32, 32)
    )


def _unet(dtype: Any) -> Made:
    """Convolutions of one image, channels first, mapped over a batch."""
    import equinox as eqx

    nn, keys = eqx.nn, iter(jax.random.split(jax.random.key(0), 32))

    def pair(inner: int, outer: int) -> Any:
        return nn.Sequential(
            [
                nn.Conv2d(inner, outer, 3, padding=1, key=next(keys)),
                nn.GroupNorm(8, outer),
                nn.Lambda(jax.nn.silu),
                nn.Conv2d(outer, outer, 3, padding=1, key=next(keys)),
                nn.Lambda(jax.nn.silu),
            ]
        )

    class UNet(eqx.Module):
        down: Any
        up: Any
        widen: Any
        last: Any

        def __init__(self) -> None:
            self.down = [pair(3, 32), pair(32, 64), pair(64, 128)]
            self.widen = [
                nn.ConvTranspose2d(c, c // 2, 2, 2, key=next(keys)) for c in (128, 64)
            ]
            self.up = [pair(128, 64), pair(64, 32)]
            self.last = nn.Conv2d(32, 3, 1, key=next(keys))

        def __call__(self, x: Any) -> Any:
            kept = []
            for block in self.down:
                x = block(x)
                kept.append(x)
                x = nn.MaxPool2d(2, 2)(x)
            x = kept.pop()
            for widen, block in zip(self.widen, self.up, strict=True):
                x = block(jnp.concatenate([kept.pop(), widen(x)]))
            return self.last(x)

    return _parted(UNet(), lambda net, x: jax.vmap(net)(x), True, normal(2, 3, 64, 64))


def _gru(dtype: Any) -> Made:
    """A cell of one example, scanned, mapped over a batch."""
    import equinox as eqx

    cell = eqx.nn.GRUCell(128, 256, key=jax.random.key(0))

    def forward(cell: Any, xs: Any) -> Any:
        def last(xs: Any) -> Any:
            zeros = jnp.zeros(256)
            return jax.lax.scan(lambda h, x: (cell(x, h), None), zeros, xs)[0]

        return jax.vmap(last)(xs)

    return _parted(cell, forward, True, normal(32, 32, 128))


COLLECTION = Collection(
    ("equinox", "diffrax"),
    (
        Program("neural ODE, gradient, batch 128", _ode),
        Program("neural ODE of 64, gradient, batch 64", _latent_ode),
        Program("MLP-Mixer, gradient, batch 16", _mixer),
        Program("UNet mapped over 2 images, gradient", _unet),
        Program("GRU cell mapped over 32, gradient", _gru),
    ),
)
