# SPDX-License-Identifier: Apache-2.0
"""PyTorch, on the host or on the GPU."""

from collections.abc import Callable
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
    xs = [tensor(x, case.dtype) for x in buffers.x]
    views = [x.permute(case.axes) for x in xs]
    ys = [tensor(y, case.dtype) for y in buffers.y]
    wait = synchronize if on_gpu else lambda result: None
    lingers = 0.0 if on_gpu else LINGERS
    clock = timer if on_gpu else None

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
            timer=clock,
        ),
        Contender(
            family="torch",
            role="peer",
            launch=into,
            wait=wait,
            read=host_bits,
            warm=True,
            lingers=lingers,
            timer=clock,
        ),
    ]
    if on_gpu:
        found.append(
            Contender(
                family="torch clone",
                role="copy",
                launch=lambda i: xs[i % buffers.sets].clone(),
                wait=wait,
                timer=timer,
            )
        )
    return found


def tensor(array: Any, dtype: str) -> Any:
    """The array, NumPy's or jax's, as a torch tensor of the same memory."""
    if isinstance(array, jax.Array):
        return torch.from_dlpack(array)
    numpy_view, torch_dtype = _VIEWS[dtype]
    return torch.from_numpy(array.view(numpy_view)).view(getattr(torch, torch_dtype))


def timer(work: Callable[[], None]) -> float:
    """Seconds between two events on torch's stream, with the work between them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def synchronize(result: Any) -> None:
    """Waits for everything that the GPU was given."""
    del result
    torch.cuda.synchronize()


def host_bits(y: Any) -> np.ndarray:
    """A tensor's bits on the host."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return bits(y.view(kinds[y.element_size()]).cpu().numpy())
