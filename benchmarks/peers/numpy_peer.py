# SPDX-License-Identifier: Apache-2.0
"""NumPy's strided copy, on the host."""

import jax
import numpy as np

from benchmarks.buffers import Buffers, bits
from benchmarks.harness import Contender
from benchmarks.permute_cases import PermuteCase


def contenders(
    case: PermuteCase, buffers: Buffers, device: jax.Device
) -> list[Contender]:
    if device.platform != "cpu":
        return []
    views = [bits(x).transpose(case.axes) for x in buffers.x]
    outputs = [bits(y) for y in buffers.y]

    def into(i: int) -> np.ndarray:
        k = i % buffers.sets
        np.copyto(outputs[k], views[k])
        return outputs[k]

    return [
        Contender(
            family="numpy",
            role="peer",
            launch=lambda i: views[i % buffers.sets].copy(order="C"),
            read=np.asarray,
        ),
        Contender(family="numpy", role="peer", launch=into, read=np.asarray, warm=True),
    ]
