# SPDX-License-Identifier: Apache-2.0
"""Times attention, forward and backward: `python -m benchmarks.attention --help`."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

import jax_layout as jl
from benchmarks import profiles
from benchmarks.gemm import main
from benchmarks.gemm_cases import GemmCase

Function = Callable[..., Any]


def _with_gradients(attend: Function) -> Function:
    """The result and the gradients by all three; the cotangent comes last."""

    def f(q: Any, k: Any, v: Any, ct: Any) -> Any:
        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(ct)

    return f


def _torch(grouped: bool, causal: bool, gradients: bool) -> Callable[[Any], Function]:
    def make(torch: Any) -> Function:
        def attend(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )
            return y.transpose(1, 2)

        def with_gradients(q: Any, k: Any, v: Any, ct: Any) -> Any:
            with torch.enable_grad():
                given = [x.detach().requires_grad_() for x in (q, k, v)]
                y = attend(*given)
                return y, *torch.autograd.grad(y, given, ct)

        return with_gradients if gradients else attend

    return make


def _case(
    group: str,
    b: int,
    t: int,
    s: int,
    n: int,
    k: int,
    h: int,
    dtype: str,
    causal: bool = False,
) -> GemmCase:
    """Attention of `n` heads of queries that share `k` of keys."""
    gradients = group == "backward"
    ours, theirs = (
        functools.partial(f, is_causal=causal)
        for f in (jl.dot_product_attention, jax.nn.dot_product_attention)
    )
    queries, keys = (b, t, n, h), (b, s, k, h)
    shapes = [queries, keys, keys, *([queries] if gradients else [])]
    pairs = t * (t + 1) // 2 if causal else t * s
    name = f"{b}x{t}x{n}x{h} of {s}" + (f"x{k}" if k != n else "")
    return GemmCase(
        group,
        f"{name}{', causal' if causal else ''}, {dtype}",
        tuple(shapes),
        dtype,
        (14 if gradients else 4) * b * n * pairs * h,
        _with_gradients(ours) if gradients else ours,
        _with_gradients(theirs) if gradients else theirs,
        _torch(n != k, causal, gradients),
        swept=group == "decode",
    )


def all_cases() -> dict[str, list[GemmCase]]:
    """Forward, with the gradients, and one query at a time."""
    dtypes = ("float32", "bfloat16")
    found = {
        group: [
            _case(group, b, t, t, n, k, h, dtype, causal)
            for b, t, n, k, h in (
                (1, 512, 8, 8, 64),
                (1, 512, 8, 8, 128),
                (1, 2048, 8, 8, 64),
                (1, 2048, 8, 8, 128),
                (1, 2048, 16, 4, 64),
                (1, 8192, 8, 8, 64),
                (1, 8192, 8, 8, 128),
                (4, 640, 12, 12, 64),
                (8, 197, 12, 12, 64),
            )
            for dtype in dtypes
            for causal in (False, True)
            if group == "forward" or t < 8192
        ]
        for group in ("forward", "backward")
    }
    found["decode"] = [
        _case("decode", b, 1, s, n, k, 128, dtype)
        for b, s, n, k in (
            (1, 8192, 8, 8),
            (1, 8192, 32, 8),
            (8, 3000, 4, 4),
            (8, 3000, 32, 4),
            (8, 512, 32, 8),
        )
        for dtype in dtypes
    ]
    return found


if __name__ == "__main__":
    found = all_cases()
    run = functools.partial(main, name="attention", groups=tuple(found), found=found)
    sys.exit(profiles.start(run))
