# SPDX-License-Identifier: Apache-2.0
"""PyTorch, on the host or on the GPU."""

from typing import Any

import jax
import numpy as np

from benchmarks.buffers import Buffers, bits
from benchmarks.harness import LINGERS, Contender
from benchmarks.permute_cases import PermuteCase

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

# The bits as NumPy and torch both know them, and the type that torch then sees.
_VIEWS = {
    "float32": ("f4", "float32"),
    "float16": ("f2", "float16"),
    "bfloat16": ("i2", "bfloat16"),
    "uint8": ("u1", "uint8"),
}


def contenders(
    case: PermuteCase, buffers: Buffers, device: jax.Device
) -> list[Contender]:
    on_gpu = device.platform == "gpu"
    if torch is None or (on_gpu and not torch.cuda.is_available()):
        return []
    where = "cuda" if on_gpu else "cpu"
    xs = [tensor(x, case.dtype, where) for x in buffers.x]
    views = [x.permute(case.axes) for x in xs]
    ys = [tensor(y, case.dtype, where) for y in buffers.y]
    wait = synchronize if on_gpu else lambda result: None
    lingers = 0.0 if on_gpu else LINGERS

    def into(i: int) -> Any:
        k = i % buffers.sets
        return ys[k].copy_(views[k])

    found = [
        Contender(
            family="torch",
            role="peer",
            launch=lambda i: views[i % buffers.sets].contiguous(),
            wait=wait,
            read=host_bits,
            lingers=lingers,
        ),
        Contender(
            family="torch",
            role="peer",
            launch=into,
            wait=wait,
            read=host_bits,
            warm=True,
            lingers=lingers,
        ),
    ]
    if on_gpu:
        found.append(
            Contender(
                family="torch clone",
                role="copy",
                launch=lambda i: xs[i % buffers.sets].clone(),
                wait=wait,
            )
        )
    return found


def tensor(array: np.ndarray, dtype: str, where: str) -> Any:
    """The array as a torch tensor; on the host they share memory."""
    numpy_view, torch_dtype = _VIEWS[dtype]
    plain = torch.from_numpy(array.view(numpy_view))
    return plain.to(where).view(getattr(torch, torch_dtype))


def synchronize(result: Any) -> None:
    """Waits for everything that the GPU was given."""
    del result
    torch.cuda.synchronize()


def host_bits(y: Any) -> np.ndarray:
    """A tensor's bits on the host."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return bits(y.view(kinds[y.element_size()]).cpu().numpy())
