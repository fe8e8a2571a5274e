# SPDX-License-Identifier: Apache-2.0
"""What lowers windows that are summed up or searched, and the gradients of both.

Windows that overlap, across channels that lie side by side, are a kernel's. Others, and
gradients, are taken one axis after the other, at a cost of k + k in place of k * k, and
along an axis by slices that XLA adds up or compares elementwise, in any layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.interpreters import mlir

from jax_layout import _compat, choices, producers
from jax_layout.convnet import windows
from jax_layout.convnet.pool_kernel import pool
from jax_layout.convnet.windows import Window
from jax_layout.formats.physical import wide
from jax_layout.install.rules import Context, Program, Rule, array, stays_in_cache
from jax_layout.measured import Work
from jax_layout.plain import jnp, lax

# Maxima as slices are a loop that XLA takes 25 ms to compile, its own windows 5. Across
# so many elements, of which slices save 0.2 ns each, that would not pay in 100 calls.
_SMALL = 1 << 20
_OPERATORS = {"sum": lax.add, "max": lax.max, "min": lax.min}


def reduce_window(operator: str) -> Rule:
    """The rule of windows that are reduced by this operator: sum, max or min."""

    def rule(
        program: Program,
        plain: Callable[..., Any],
        ctx: Context,
        x: Any,
        *,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        base_dilation: Sequence[int],
        window_dilation: Sequence[int],
        **params: Any,
    ) -> Sequence[Any] | None:
        (aval,), (out,) = ctx.avals_in, ctx.avals_out
        given, spread = aval, [int(n) for n in base_dilation]
        if operator != "sum" and any(n > 1 for n in spread):
            return None  # what lies between is no zero
        if operator == "sum" and (pad := producers.padded(x)):
            # The gradient of a sum with strides, which jax pads between its elements.
            x, low, high, between = pad
            given = array(mlir.ir.RankedTensorType(x.type).shape, aval.dtype)
            spread = [(n + 1) * b for n, b in zip(between, spread, strict=True)]
            if any(n > 1 for n in base_dilation):
                return None
            padding = [(a + lo, b + hi) for (a, b), lo, hi
                       in zip(padding, low, high, strict=True)]  # fmt: skip
        along = [
            _window(*each)
            for each in zip(given.shape, out.shape, window_dimensions, window_strides,
                            window_dilation, padding, strict=True)
        ]  # fmt: skip
        steps = [(axis, window, n) for axis, (window, n)
                 in enumerate(zip(along, spread, strict=True))
                 if not _is_whole(window, n)]  # fmt: skip
        if any(n > 1 and window.stride > 1 for _, window, n in steps):
            return None
        is_gradient = any(n > 1 for n in spread)
        kind = (
            f"{operator}, gradient" if is_gradient else operator.replace("min", "max")
        )
        arrays = (out, given) if is_gradient else (given, out)
        order = producers.order_of([x])
        if not _are_ours(kind, ctx, order, steps, *arrays):
            return None

        axes = [axis for axis, *_ in steps]
        is_pool = operator != "min" and not is_gradient
        is_pool &= _side_by_side(order, aval) not in axes

        def run(y: Any) -> Any:
            if is_pool:
                each = [window for _, window, _ in steps]
                return pool(y, operator, axes, each).astype(out.dtype)
            y = y.astype(wide(y.dtype))
            for axis, window, n in steps[:: -1 if is_gradient else 1]:
                if n > 1:
                    y = windows.spread_sum_along(y, axis, window, n)
                else:
                    y = windows.reduce_along(y, axis, window, _OPERATORS[operator])
            return y.astype(out.dtype)

        program.log(f"reduce_window_{operator}", ctx, "ours")
        return _lowered(ctx.replace(avals_in=(given,)), run, x)

    return rule


def select_and_scatter_add(
    program: Program,
    plain: Callable[..., Any],
    ctx: Context,
    source: Any,
    x: Any,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **params: Any,
) -> Sequence[Any] | None:
    """The gradient of a maximum, which goes to the first that a window holds."""
    given, aval = ctx.avals_in
    if select_prim.name != "ge" or not jnp.issubdtype(aval.dtype, np.floating):
        return None
    ones = [1] * aval.ndim
    along = map(_window, aval.shape, given.shape, window_dimensions, window_strides,
                ones, padding)  # fmt: skip
    steps = [(axis, window, 1) for axis, window in enumerate(along)
             if not _is_whole(window, 1)]  # fmt: skip
    order = producers.order_of([x])
    if not _are_ours("max, gradient", ctx, order, steps, aval, given):
        return None

    def run(ct: Any, y: Any) -> Any:
        ct, y, taken = ct.astype(wide(ct.dtype)), y.astype(wide(y.dtype)), []
        # The last axis first: of equal elements the first in row-major order is chosen.
        for axis, window, _ in reversed(steps):
            y, chosen = windows.first_max(y, axis, window)
            taken.append((axis, window, chosen))
        for axis, window, chosen in reversed(taken):
            ct = windows.spread_p(ct, chosen, axis=axis, window=window)
        return ct.astype(aval.dtype)

    program.log("select_and_scatter_add", ctx, "ours")
    return _lowered(ctx, run, source, x)


def _window(n: int, out: int, k: int, s: int, d: int, pads: tuple[int, int]) -> Window:
    low = int(pads[0])
    used = (out - 1) * s + (k - 1) * d + 1 - low
    return Window(int(k), int(s), int(d), low, used - n, low, n, out)


def _is_whole(window: Window, spread: int) -> bool:
    """Whether every window is one element, and every element a window."""
    ends = window.low, window.high
    return window.size == window.stride == spread == 1 and ends == (0, 0)


def _are_ours(
    kind: str,
    ctx: Context,
    order: tuple[int, ...] | None,
    steps: Sequence[Any],
    whole: Any,
    pooled: Any,
) -> bool:
    """Whether a table says so; of both orders, where that in memory is not known."""
    if _compat.partitioning(ctx) != "none" or stays_in_cache(ctx):
        return False
    numbers = jnp.issubdtype(whole.dtype, np.number)
    if not (numbers and steps and whole.size and pooled.size):
        return False
    if any(window.low < 0 for _, window, _ in steps):
        return False
    if all(window.size == 1 for _, window, _ in steps):
        return False  # a slice, which XLA makes as well
    axes = [axis for axis, *_ in steps]
    last = {_side_by_side(order, whole)}
    if order is None:  # and any other, the channels' perhaps
        others = [axis for axis in range(whole.ndim) if axis not in axes]
        last |= {max(others, key=lambda axis: whole.shape[axis])} if others else set()
    apart = all(w.size == w.stride for _, w, _ in steps)
    small = whole.size <= _SMALL and whole.dtype.itemsize >= 4
    if kind == "max" and apart and small and last.isdisjoint(axes):
        return choices.are_all_ours()
    # Of sums side by side XLA makes one kernel with what computes their elements.
    beside = kind == "sum" and apart
    works = (
        work(kind, steps, axis in axes, whole.dtype, whole.shape[axis], whole.size)
        for axis in last
    )
    return all(choices.choose(each, passes=1 + beside) is not None for each in works)


def _side_by_side(order: tuple[int, ...] | None, aval: Any) -> int:
    """The axis whose elements lie side by side in memory; the last if none is known."""
    return order[-1] if order else aval.ndim - 1


def work(
    kind: str, steps: Sequence[Any], inside: bool, dtype: Any, last: int, size: int
) -> Work:
    """What a call is, in the terms of a table.

    Args:
      kind: the operator, and whether it is its gradient.
      steps: axis, window and spread of each axis that has windows.
      inside: whether there are windows along the last axis in memory.
      dtype: of the elements.
      last: extent of that axis.
      size: how many elements there are.
    """
    k = math.prod(window.size for _, window, _ in steps)
    s = math.prod(window.stride * n for _, window, n in steps)
    where = "along" if inside else "across"
    case = f"reduce_window {kind} {np.dtype(dtype).name} {where}"
    return Work(case, (size, last, k, s))


def _lowered(ctx: Context, run: Callable[..., Any], *operands: Any) -> Sequence[Any]:
    # What it is made of is what XLA is to have.
    with choices.forced("lax"):
        lower = functools.partial(mlir.lower_fun(run, multiple_results=False), ctx)
        return lower(*operands)
