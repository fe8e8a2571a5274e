# SPDX-License-Identifier: Apache-2.0
"""Makes one call of a product, its bias and its gelu.

Behind a product of ours, XLA computes bias and gelu in a loop of their own; a kernel
does so before it writes the result. Libraries write a gelu in many ways. Here it is
known by its values: functions made of the analytic operators below that are alike in
some hundred points are alike elsewhere. A relu is none, and costs XLA little; the
derivatives that programs give it where it bends differ.

A layer is left alone where something else reads what lies between product and result,
as its gradient does, and where no table says that a call pays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import Literal

from jax_layout import _backends, _compat
from jax_layout.kernel import by_choice
from jax_layout.optimize.broadcasts import Thin, thin
from jax_layout.optimize.rules import Equation
from jax_layout.plain import lax
from jax_layout.products.as_they_lie import is_plain
from jax_layout.products.gemm import gemm_kernel
from jax_layout.products.letters import letters_of
from jax_layout.products.linear import biased_product
from jax_layout.rewriting import live, spliced

_ERF, _ERFC = np.vectorize(math.erf), np.vectorize(math.erfc)
# What activations are functions of: numbers of each size and sign, and 0.
_SIZES = np.exp2(np.arange(-16, 7, 1 / 8))
_POINTS = np.concatenate([-_SIZES[::-1], [0.0], _SIZES])
_INNER = math.sqrt(2 / math.pi) * (_POINTS + 0.044715 * _POINTS**3)
_GELUS = {
    "gelu": _POINTS * (1 + np.tanh(_INNER)) / 2,
    "gelu_erf": _POINTS * _ERFC(-_POINTS / math.sqrt(2)) / 2,
}
# The constants of a program are rounded to its dtype: so much of its epsilon values
# may differ, relative to the argument, or what float64 makes of so many operators.
# x sigmoid(1.702 x) differs by more in bfloat16.
_ROUNDING, _LEAST = 0.25, 2.0**-48

# Analytic ones, so that what agrees in all points agrees.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "square": np.square,
    "pow": np.power,
    "tanh": np.tanh,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf": _ERF,
    "erfc": _ERFC,
}
# One of these is in every gelu.
CURVES = {"tanh", "logistic", "erf", "erfc"}
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_SAME = ("convert_element_type", "copy", "copy_p")
_RESHAPES = ("reshape", "squeeze", "expand_dims")


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """A value that is a function of a product and its bias.

    Attributes:
      dot: the product.
      bias: added to it, one number for each column.
      values: of the function, in `_POINTS`.
    """

    dot: Equation
    bias: Thin | None
    values: np.ndarray

    @property
    def is_sum(self) -> bool:
        return self.values is _POINTS


def layered(
    eqns: Sequence[Equation], results: Sequence[Any], captured: Mapping[Any, Any]
) -> tuple[list[Equation], list[Any]]:
    """A program with calls in place of each layer that is worth one.

    Args:
      eqns: its equations, without calls.
      results: its results.
      captured: the values of what it has captured, by the variable.

    Returns:
      its equations, and the results of those that are calls.
    """
    names = {eqn.primitive.name for eqn in eqns}
    known = "dot_general" in names and names & CURVES
    if not known or not _backends.available("cpu") or jax.default_backend() != "cpu":
        return list(eqns), []
    finder = _Finder(eqns, results, captured)
    instead: dict[int, list[Equation]] = {}
    gone: set[int] = set()
    calls = []
    for end, activation, inner in finder.ends():
        new = _call(finder, end, activation)
        if new is not None:
            instead[id(finder.makers[end])] = new
            gone.update(map(id, inner))
            calls.append(end)
    after: list[Equation] = []
    for eqn in eqns:
        after += instead.get(id(eqn), [] if id(eqn) in gone else [eqn])
    return live(after, results) if calls else after, calls


class _Finder:
    """What is known of the values of a program."""

    def __init__(
        self,
        eqns: Sequence[Equation],
        results: Sequence[Any],
        captured: Mapping[Any, Any],
    ):
        self.captured = captured
        self.makers = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.thinned: dict[Any, Thin] = {}
        self.layers: dict[Any, _Layer] = {}
        self.readers: dict[Any, list[Any]] = {
            v: [None] for v in results if not isinstance(v, Literal)
        }
        for eqn in eqns:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    self.readers.setdefault(v, []).append(eqn)
            found = self._layer(eqn)
            if found is not None:
                self.layers[eqn.outvars[0]] = found

    def thin(self, v: Any) -> Thin:
        return thin(v, self.makers, self.captured, self.thinned)

    def of(self, v: Any) -> _Layer | None:
        return None if isinstance(v, Literal) else self.layers.get(v)

    def _layer(self, eqn: Equation) -> _Layer | None:
        """What an equation makes, if that is a function of a product."""
        name = eqn.primitive.name
        if name == "dot_general":
            return _Layer(eqn, None, _POINTS) if is_plain(eqn) else None
        given = [self.of(v) for v in eqn.invars]
        layers = [layer for layer in given if layer is not None]
        if not layers or len(eqn.outvars) != 1:
            return None
        first, out = layers[0], eqn.outvars[0].aval
        if any(x.dot is not first.dot or x.bias is not first.bias for x in layers):
            return None
        if name in _SAME and out.dtype.name in _DTYPES:
            return first
        if name in _RESHAPES:
            same = out.shape[-1:] == eqn.invars[0].aval.shape[-1:]
            return first if same else None
        if name in ("add", "add_any") and first.is_sum and first.bias is None:
            others = [v for v, x in zip(eqn.invars, given, strict=True) if x is None]
            if others and self.thin(others[0]).number is None:
                bias = self._bias(others[0], out)
                return None if bias is None else dataclasses.replace(first, bias=bias)
        operands = [
            self.thin(v).number if x is None else x.values
            for v, x in zip(eqn.invars, given, strict=True)
        ]
        if any(x is None for x in operands):
            return None
        with np.errstate(all="ignore"):
            values = _computed(eqn, operands)
        return None if values is None else dataclasses.replace(first, values=values)

    def _bias(self, v: Any, out: Any) -> Thin | None:
        """What is added, if it is one number for each column."""
        each = self.thin(v)
        if not out.shape or each.shape != (*(1,) * (out.ndim - 1), out.shape[-1]):
            return None
        return each

    def untransposed(self, read: tuple[str, Any]) -> tuple[str, Any]:
        """A product's letters of an operand, and that, before it was transposed."""
        term, v = read
        while (eqn := self.makers.get(v)) and eqn.primitive.name == "transpose":
            term, v = _before(eqn, term), eqn.invars[0]
        return term, v

    def ends(self) -> list[tuple[Any, str, list[Equation]]]:
        """The last result of each layer, what it is, and the equations that make it."""
        found: dict[int, tuple[Any, str, list[Equation]]] = {}
        for v, layer in self.layers.items():
            dtype = v.aval.dtype
            alike = all(x.aval.dtype == dtype for x in layer.dot.invars)
            if layer.is_sum or not alike or dtype.name not in _DTYPES:
                continue
            activation = _name(layer.values, dtype)
            if activation is not None and (inner := self.inside(v)):
                found[id(layer.dot)] = v, activation, inner
        return list(found.values())

    def inside(self, end: Any) -> list[Equation]:
        """The equations from the product to a result; none if others read of them."""
        pending, inner = [self.makers[end]], {}
        while pending:
            eqn = pending.pop()
            if id(eqn) not in inner:
                inner[id(eqn)] = eqn
                if eqn is not self.layers[end].dot:
                    makers = [self.makers[v] for v in eqn.invars if self.of(v)]
                    pending += makers
        for eqn in inner.values():
            for v in eqn.outvars:
                if v is not end and any(id(r) not in inner for r in self.readers[v]):
                    return []
        return list(inner.values())


def _before(transpose: Equation, term: str) -> str:
    """The letters of a transpose's operand, from its result's."""
    source = dict(zip(transpose.params["permutation"], term, strict=True))
    return "".join(source[i] for i in range(len(term)))


def _computed(eqn: Equation, operands: Sequence[Any]) -> Any:
    """The values of an equation's result; None if it is of no known function."""
    name = eqn.primitive.name
    if name == "integer_pow":
        return operands[0] ** float(eqn.params["y"])
    return _FUNCTIONS[name](*operands) if name in _FUNCTIONS else None


def _name(values: np.ndarray, dtype: Any) -> str | None:
    """The gelu that has these values, the nearer one; None if neither does."""
    rounding = max(_ROUNDING * float(jax.numpy.finfo(dtype).eps), _LEAST)
    allowed = rounding * np.abs(_POINTS)
    off = {name: np.abs(values - wanted) for name, wanted in _GELUS.items()}
    fits = [name for name, error in off.items() if (error <= allowed).all()]
    return min(fits, key=lambda name: off[name].max(), default=None)


def _call(finder: _Finder, end: Any, activation: str) -> list[Equation] | None:
    """Equations of a call in place of a layer; None if it does not pay."""
    layer, dtype = finder.layers[end], end.aval.dtype
    dot, bias = layer.dot, layer.bias
    a, b = dot.invars
    if bias is not None and bias.v.aval.dtype != dtype:
        return None
    options = {
        "activation": activation,
        "precision": _compat.canonical_precision(dot.params["precision"]),
        "dtype": dtype,
    }
    *terms, result = letters_of(
        dot.params["dimension_numbers"], a.aval.ndim, b.aval.ndim
    )
    read = [*zip(terms, dot.invars, strict=True)]
    # A kernel may read what lies before a transpose, too.
    for (x, left), (w, right) in (read, [*map(finder.untransposed, read)]):
        spec = f"{x},{w}->{result}"
        kernel = gemm_kernel(
            "cpu", left.aval, right.aval, spec=spec, bias=bias is not None, **options
        )
        if kernel is None or by_choice(kernel) is None:
            return None
    leaves = [] if bias is None else list(bias.leaves)

    def call(a: Array, b: Array, *arrays: Array) -> list[Any]:
        known: dict[Any, Any] = dict(zip(leaves, arrays, strict=True))
        columns = None
        if bias is not None:
            columns = lax.reshape(bias.compute(known), (end.aval.shape[-1],))
        y = biased_product(a, b, columns, "{},{}->{}".format(*terms, result), **options)
        return [lax.reshape(y, end.aval.shape)]

    return spliced(call, [a, b, *leaves], [end], dot)[0]
