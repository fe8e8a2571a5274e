# SPDX-License-Identifier: Apache-2.0
"""The network of generate.py in PyTorch, with the same weights."""

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Tensor = Any  # torch.Tensor, where torch is installed


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = F.rms_norm(x.float(), (x.shape[-1],), eps=1e-5)
    return wide.to(x.dtype) * weight


def _rotary(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half) / half)
    angles = positions[:, None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """By the last axis of x and the first of the weight."""
    out = x @ weight.reshape(weight.shape[0], -1)
    return out.reshape(*x.shape[:-1], *weight.shape[1:])


class TorchWriter:
    """Reads prompts and writes, as generate.Writer does."""

    def __init__(self, params: Any, most: int) -> None:
        self.params, self.most = _tensors(params), most

    def _network(self, tokens: Tensor, caches: list[Any], first: int) -> Tensor:
        count = tokens.shape[1]
        positions = torch.arange(first, first + count)
        x = self.params["embedding"][tokens]
        for layer, (keys, values) in zip(self.params["layers"], caches, strict=True):
            y = _rms_norm(x, layer["norm1"])
            q, k = (_rotary(_times(y, layer[n]), positions) for n in ("query", "key"))
            keys[:, :, first : first + count] = k.transpose(1, 2)
            values[:, :, first : first + count] = _times(y, layer["value"]).transpose(
                1, 2
            )
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys[:, :, : first + count],
                values[:, :, : first + count],
                is_causal=first == 0,
                enable_gqa=True,
            )
            x = x + _times(
                attended.transpose(1, 2).flatten(2), layer["out"].flatten(0, 1)
            )
            y = _rms_norm(x, layer["norm2"])
            hidden = F.silu(_times(y, layer["gate"])) * _times(y, layer["up"])
            x = x + _times(hidden, layer["down"])
        last = _rms_norm(x[:, -1], self.params["norm"])
        return _times(last, self.params["head"]).argmax(-1)

    @torch.no_grad()
    def __call__(self, tokens: np.ndarray, count: int) -> tuple[Any, float, float]:
        batch, length = tokens.shape
        _, heads, features = self.params["layers"][0]["key"].shape
        shape = (2, batch, heads, self.most, features)
        caches = [
            torch.zeros(shape, dtype=torch.bfloat16) for _ in self.params["layers"]
        ]
        start = time.perf_counter()
        token = self._network(torch.from_numpy(tokens), caches, 0)
        middle = time.perf_counter()
        written = []
        for i in range(count):
            written.append(token)
            token = self._network(token[:, None], caches, length + i)
        return torch.stack(written, 1), middle - start, time.perf_counter() - middle


def _tensors(params: Any) -> Any:
    """The same memory, as torch knows it."""
    if isinstance(params, dict):
        return {name: _tensors(x) for name, x in params.items()}
    if isinstance(params, list):
        return [_tensors(x) for x in params]
    return torch.from_dlpack(params)
