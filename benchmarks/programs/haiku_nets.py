# SPDX-License-Identifier: Apache-2.0
"""Networks and recurrent cores of Haiku."""

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.programs.program import (
    Collection,
    Made,
    Program,
    both,
    filled,
    gradient,
    normal,
)


def _transformed(f: Callable[..., Any], x: Any, learns: bool) -> Made:
    """What `f(x, training)` is a net of; its state is that of training."""
    import haiku

    net: Any = haiku.without_apply_rng(haiku.transform_with_state(f))
    shapes = jax.eval_shape(lambda key, x: net.init(key, x, True), jax.random.key(0), x)
    p, state = filled(shapes, x.dtype)

    def forward(p: Any, state: Any, x: Any) -> Any:
        return net.apply(p, state, x, learns)[0]

    return gradient(forward) if learns else forward, (p, state, x)


def _net(name: str, rows: int, size: int, learns: bool) -> Callable[..., Made]:
    def make(dtype: Any) -> Made:
        import haiku

        def f(x: Any, training: bool) -> Any:
            net: Any = getattr(haiku.nets, name)(num_classes=1000)
            return net(x, is_training=training)

        return _transformed(f, normal(rows, size, size, 3, dtype=dtype), learns)

    return make


def _recurrent(
    name: str, shape: tuple[int, ...], learns: bool = True, **options: Any
) -> Callable[..., Made]:
    """Unrolled over the first axis."""

    def make(dtype: Any) -> Made:
        import haiku

        def f(x: Any, training: bool) -> Any:
            core: Any = getattr(haiku, name)(**options)
            state = jax.tree.map(
                lambda s: s.astype(dtype), core.initial_state(x.shape[1])
            )
            return haiku.dynamic_unroll(core, x, state)[0]

        return _transformed(f, normal(*shape, dtype=dtype), learns)

    return make


def _quantizer(dtype: Any) -> Made:
    """A vector-quantised autoencoder, as in Haiku's examples."""
    import haiku

    def f(x: Any, training: bool) -> Any:
        for channels in (64, 128):
            x = jax.nn.relu(haiku.Conv2D(channels, 4, stride=2)(x))
        x = haiku.Conv2D(64, 1)(haiku.Conv2D(128, 3)(x))
        quantizer = haiku.nets.VectorQuantizer(64, 512, 0.25)
        x = quantizer(x, is_training=False)["quantize"]
        for channels in (64, 3):
            x = haiku.Conv2DTranspose(channels, 4, stride=2)(jax.nn.relu(x))
        return x

    return _transformed(f, normal(4, 64, 64, 3, dtype=dtype), True)


_STEPS = 32, 16, 512  # steps, rows, width
_FILM: dict[str, Any] = {
    "input_shape": (16, 16),
    "output_channels": 32,
    "kernel_shape": 3,
}

COLLECTION = Collection(
    ("haiku",),
    (
        *both("LSTM, gradient, 32x16x512", _recurrent("LSTM", _STEPS, hidden_size=512)),
        *both("GRU, gradient, 32x16x512", _recurrent("GRU", _STEPS, hidden_size=512)),
        Program(
            "LSTM, 64x1x512", _recurrent("LSTM", (64, 1, 512), False, hidden_size=512)
        ),
        Program(
            "Conv2DLSTM, gradient, 4x2x16x16",
            _recurrent("Conv2DLSTM", (4, 2, 16, 16, 4), **_FILM),
        ),
        Program("MobileNetV1, gradient, 4x96x96", _net("MobileNetV1", 4, 96, True)),
        Program("ResNet50, 1x160x160", _net("ResNet50", 1, 160, False), "bfloat16"),
        Program("vector-quantised autoencoder, gradient", _quantizer),
    ),
)
