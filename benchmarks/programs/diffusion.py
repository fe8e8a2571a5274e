# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion's networks, smaller, of diffusers, in Flax."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import (
    Collection,
    Made,
    Program,
    both,
    filled,
    gradient,
    normal,
)


def _denoises(dtype: Any) -> Made:
    import diffusers

    model: Any = diffusers.FlaxUNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=256,
        dtype=jnp.dtype(dtype),
    )
    p = filled(jax.eval_shape(model.init_weights, jax.random.key(0)), dtype)
    latents = normal(1, 4, 32, 32, dtype=dtype)
    words = normal(1, 32, 256, dtype=dtype, seed=1)

    def forward(p: Any, latents: Any, words: Any) -> Any:
        return model.apply({"params": p}, latents, jnp.int32(500), words).sample

    return forward, (p, latents, words)


def _denoising_learnt(dtype: Any) -> Made:
    forward, args = _denoises(dtype)
    return gradient(forward), args


def _decodes(dtype: Any) -> Made:
    import diffusers

    model: Any = diffusers.FlaxAutoencoderKL(
        block_out_channels=(32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        dtype=jnp.dtype(dtype),
    )
    p = filled(jax.eval_shape(model.init_weights, jax.random.key(0)), dtype)

    def forward(p: Any, latents: Any) -> Any:
        return model.apply({"params": p}, latents, method=model.decode).sample

    return forward, (p, normal(1, 4, 32, 32, dtype=dtype))


COLLECTION = Collection(
    ("diffusers", "flax"),
    (
        *both("UNet with cross attention", _denoises),
        Program("UNet with cross attention, gradient", _denoising_learnt),
        *both("VAE, decoder", _decodes),
    ),
)
