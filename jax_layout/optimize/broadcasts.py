# SPDX-License-Identifier: Apache-2.0
"""What a value is before it is broadcast, and whether it is known already.

Masks and biases of attention come broadcast to all scores, and those of causal order
are made of counted indices. Attention reads them as they were before.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_layout import _compat
from jax_layout.formats.pointwise import ELEMENTWISE
from jax_layout.plain import lax

_COPIES = ("copy", "copy_p", "stop_gradient", "pvary", "optimization_barrier")
_RESHAPES = ("reshape", "squeeze", "expand_dims")
_MOVES = ("broadcast_in_dim", "transpose", "slice", "dynamic_slice")
_DEEPEST = 40
# Of known values no more than these are computed to see what they are.
_MOST_ELEMENTS = 1 << 24


@dataclasses.dataclass(frozen=True, eq=False)
class Thin:
    """A value with size 1 along the axes on which all of its elements are alike.

    Attributes:
      v: the variable, or literal.
      shape: as many axes as the variable has.
      eqn: what makes it of `operands`; None if it is an operand itself.
      operands: thin as well.
      known: what the value is, if the program says so.
    """

    v: Any
    shape: tuple[int, ...]
    eqn: Any = None
    operands: tuple[Thin, ...] = ()
    known: Any = None

    @property
    def name(self) -> str:
        return "" if self.eqn is None else str(self.eqn.primitive.name)

    @functools.cached_property
    def value(self) -> Any:
        """The numbers, of `shape`; None if the program does not know them."""
        if math.prod(self.shape) > _MOST_ELEMENTS:
            return None
        if self.eqn is None:
            return None if self.known is None else np.asarray(self.known)
        values = [each.value for each in self.operands]
        if any(value is None for value in values):
            return None
        try:
            return _in_numpy(self, values)
        except (TypeError, ValueError):  # dtypes that NumPy lacks
            return None

    @functools.cached_property
    def number(self) -> float | None:
        """The one number that all elements are, if that is known."""
        if any(n != 1 for n in self.shape) or self.v.aval.dtype == bool:
            return None
        return None if self.value is None else float(self.value.reshape(()))

    @property
    def is_whole(self) -> bool:
        return self.shape == self.v.aval.shape

    @functools.cached_property
    def leaves(self) -> dict[Any, None]:
        """The variables that it is computed from."""
        if self.eqn is None or self.is_whole:
            return {} if isinstance(self.v, Literal) else {self.v: None}
        return {leaf: None for each in self.operands for leaf in each.leaves}

    def compute(self, known: dict[Any, Any]) -> Any:
        """The value, of `shape`, from those of its leaves, which `known` is to hold."""
        if self.eqn is None or self.is_whole:
            return self.v.val if isinstance(self.v, Literal) else known[self.v]
        if self not in known:
            known[self] = self._computed(
                [each.compute(known) for each in self.operands]
            )
        return known[self]

    def _computed(self, operands: Sequence[Any]) -> Any:
        name = self.name
        if name in ELEMENTWISE:
            return _compat.bind(self.eqn, [_spread(x, self.shape) for x in operands])[0]
        if name == "transpose":
            return lax.transpose(operands[0], self.eqn.params["permutation"])
        if name == "stop_gradient":
            return lax.stop_gradient(operands[0])
        if name == "slice":
            return lax.slice(operands[0], *_bounds(self))
        if name == "iota":
            dtype, axis = self.eqn.params["dtype"], self.eqn.params["dimension"]
            return lax.broadcasted_iota(dtype, self.shape, axis)
        return lax.reshape(operands[0], self.shape)  # each of the rest


def _spread(x: Any, shape: Sequence[int]) -> Any:
    if np.ndim(x) == 0 or np.shape(x) == tuple(shape):
        return x
    return lax.broadcast_in_dim(x, shape, range(len(shape)))


def _bounds(thin: Thin) -> tuple[list[int], list[int], list[int]]:
    """Of a slice, of what is thin."""
    params, (x,) = thin.eqn.params, thin.operands
    steps = params["strides"] or [1] * len(x.shape)
    given = zip(
        x.shape, params["start_indices"], params["limit_indices"], steps, strict=True
    )
    rows = [(0, 1, 1) if n == 1 else (a, b, step) for n, a, b, step in given]
    starts, stops, strides = (list(column) for column in zip(*rows, strict=True))
    return starts, stops, strides


def thin(
    v: Any,
    makers: Mapping[Any, Any],
    captured: Mapping[Any, Any],
    thinned: dict[Any, Thin],
    depth: int = 0,
) -> Thin:
    """What a value is before it is broadcast.

    Args:
      v: the variable, or literal.
      makers: the equations, by the variable that each makes.
      captured: the values of those that a program has captured.
      thinned: what was found so far.
      depth: how many equations were looked through.
    """
    if not isinstance(v, Literal) and v in thinned:
        return thinned[v]
    found = _thin(v, makers, captured, thinned, depth)
    if not isinstance(v, Literal) and depth <= _DEEPEST:
        thinned[v] = found
    return found


def _thin(
    v: Any,
    makers: Mapping[Any, Any],
    captured: Mapping[Any, Any],
    thinned: dict[Any, Thin],
    depth: int,
) -> Thin:
    if isinstance(v, Literal):
        return Thin(v, np.shape(v.val), known=np.asarray(v.val))
    eqn, shape = makers.get(v), v.aval.shape
    leaf = Thin(v, shape, known=captured.get(v))
    if eqn is None or len(eqn.outvars) != 1 or depth > _DEEPEST:
        return leaf
    name, params = eqn.primitive.name, eqn.params
    if name == "iota" and not eqn.invars:
        axes = [n if i == params["dimension"] else 1 for i, n in enumerate(shape)]
        return Thin(v, tuple(axes), eqn)
    if name not in (*_COPIES, *_RESHAPES, *ELEMENTWISE, *_MOVES) or not eqn.invars:
        return leaf
    operands = tuple(thin(x, makers, captured, thinned, depth + 1) for x in eqn.invars)
    x = operands[0]
    found: Sequence[int] | None = None
    if name == "broadcast_in_dim" and len(eqn.invars) == 1:
        axes = params["broadcast_dimensions"]
        found = [x.shape[axes.index(i)] if i in axes else 1 for i in range(len(shape))]
    elif name == "transpose":
        found = [x.shape[axis] for axis in params["permutation"]]
    elif name == "slice":
        # Axes of one element, and those on which all are alike, stay.
        given = zip(x.shape, shape, strict=True)
        found = [n if old != 1 else 1 for old, n in given]
    elif name == "dynamic_slice" and all(n == 1 for n in x.shape):
        found, operands = [1] * len(shape), (x,)
    elif name in _RESHAPES and len(eqn.invars) == 1:
        before, after = x.v.aval.shape, shape
        if [n for n in before if n != 1] == [n for n in after if n != 1]:
            rest = iter(s for s, n in zip(x.shape, before, strict=True) if n != 1)
            found = [1 if n == 1 else next(rest) for n in after]
    elif name in _COPIES or name in ELEMENTWISE:
        whole = [each.shape for each in operands if each.shape]
        if all(len(each) == len(shape) for each in whole):
            found = np.broadcast_shapes(*whole, (1,) * len(shape))
    return leaf if found is None else Thin(v, tuple(found), eqn, operands)


_FUNCTIONS: dict[str, Any] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "max": np.maximum,
    "min": np.minimum,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
}


def _in_numpy(thin: Thin, values: Sequence[Any]) -> Any:
    name, dtype = thin.name, thin.v.aval.dtype
    if name in _FUNCTIONS:
        found = _FUNCTIONS[name](*values)
    elif name == "div" and np.issubdtype(dtype, np.integer):
        return None
    elif name == "div":
        found = values[0] / values[1]
    elif name == "pow":
        found = values[0] ** values[1]
    elif name == "integer_pow":
        found = values[0] ** float(thin.eqn.params["y"])
    elif name == "select_n" and len(values) == 3 and values[0].dtype == bool:
        found = np.where(values[0], values[2], values[1])
    elif name == "transpose":
        found = values[0].transpose(thin.eqn.params["permutation"])
    elif name == "slice":
        cuts = zip(*_bounds(thin), strict=True)
        found = values[0][tuple(slice(*each) for each in cuts)]
    elif name == "iota":
        axis = thin.eqn.params["dimension"]
        found = np.arange(thin.shape[axis]).reshape(thin.shape)
    elif name in (*_COPIES, *_RESHAPES, *_MOVES, "convert_element_type"):
        found = values[0]
    else:
        return None
    found = np.asarray(found).astype(dtype)
    same_size = found.size == math.prod(thin.shape)
    return (
        found.reshape(thin.shape) if same_size else np.broadcast_to(found, thin.shape)
    )
