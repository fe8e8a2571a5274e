# SPDX-License-Identifier: Apache-2.0
"""A case: a function of ours as one writes it, and its operands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_layout.plain import jnp

Function = Callable[..., Any]
Sizes = tuple[int, ...]
# The least prime above a million: operands of powers of two do not repeat in rows.
_POOL = 1_000_003
# A case with smaller operands and results runs many times in one program.
_SHORT = 1 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    """A function whose kernels are measured against plain jax in its place.

    Attributes:
      name: of the case.
      f: the function.
      shapes: of its operands.
      dtypes: of each operand.
      below: integers are drawn from the interval (`low`, `high`).
      together: the works it asks about are one pattern, which XLA fuses whole: all
        take ours at once. Otherwise each in turn, in a program that is XLA's.
      one_call: the works it asks about are ways to make one call, as a convolution of
        one tap and a product are: each in turn, with all of what that gains.
      whole: a program that is timed as it stands, however short.
      unrolled: short, its calls are written out one after the other, not in a loop,
        where XLA does not lay out convolutions.
      shared: so many operands in front stay the same where it runs many times, as a
        table that a loop looks up rows of.
      hot: its operands were just computed, as those of a norm: one set, unless it
        is too large for a cache.
      kinked: its gradient jumps where a sum changes its sign, so that rounding may
        put single numbers of results far off.
      into: each call writes its result, one array, where the last has its own.
      operators: of jax's own, those that are lowered to ours, as by `jl.install`.
    """

    name: str
    f: Function
    shapes: tuple[Sizes, ...]
    dtypes: tuple[str, ...]
    below: tuple[int, int] = (-8, 8)
    together: bool = False
    one_call: bool = False
    whole: bool = False
    unrolled: bool = False
    shared: int = 0
    hot: bool = False
    kinked: bool = False
    into: bool = False
    operators: tuple[str, ...] = ()

    def operands(self, stack: Sizes = ()) -> list[np.ndarray]:
        """Numbers that the dtypes hold, with leading axes for copies."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        given = [
            ((*(stack if i >= self.shared else ()), *shape), np.dtype(jnp.dtype(dtype)))
            for i, (shape, dtype) in enumerate(pairs)
        ]
        return [_random(d, self.below, s, seed) for seed, (s, d) in enumerate(given)]

    def nbytes(self) -> int:
        """Of operands and results."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in pairs]
        arrays = [*given, *jax.tree.leaves(jax.eval_shape(self.f, *given))]
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

    def is_short(self) -> bool:
        """Whether a program has it many times: in a loop, over so many operands."""
        return not self.whole and self.nbytes() < _SHORT


def _random(
    dtype: np.dtype, below: tuple[int, int], shape: Sizes, seed: int
) -> np.ndarray:
    random = np.random.default_rng(seed)
    count = min(_POOL, math.prod(shape))
    if jnp.issubdtype(dtype, jnp.integer):
        pool = random.integers(*below, count)
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        pool = random.standard_normal(count) + 1j * random.standard_normal(count)
    else:
        pool = random.standard_normal(count, np.float32)
    return np.resize(pool.astype(dtype), shape)


def case_of(kind: str, f: Function, dtype: str, *shapes: Sizes, **options: Any) -> Case:
    listed = ", ".join("x".join(map(str, shape)) for shape in shapes)
    dtypes = (dtype,) * len(shapes)
    return Case(f"{kind} {dtype} {listed}", f, shapes, dtypes, **options)


def with_gradient(f: Function, operands: int) -> Function:
    """The value, and gradients by so many operands of what it makes of the last.

    They wait for the value, as in a program that is trained: XLA runs what waits for
    nothing at the same time.
    """

    def both(*given: Any) -> Any:
        y, pull = jax.vjp(f, *given[:operands])
        return y, pull(given[operands] * y)

    return both


def gradient_by(f: Function, operand: int, operands: int) -> Function:
    """Its gradient by one of so many operands; the cotangent comes last."""

    def one(*given: Any) -> Any:
        _, pull = jax.vjp(f, *given[:operands])
        return pull(given[operands])[operand]

    return one
