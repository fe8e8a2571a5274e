# SPDX-License-Identifier: Apache-2.0
"""Finds dot, softmax, dot in a program, and its gradients.

Equations are walked through once. A product may be scores; scores that are scaled,
biased and masked stay scores. What is made of the exponential of those is a sum of
products of powers: of the exponential, of its sum over keys, of the gradient that comes
from the values, and of the sum of both's product. That is enough to know a softmax and
its gradient in every order in which they are written. Names of axes are the letters of
the first product; axes of size 1 have none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jax_layout import _compat
from jax_layout.optimize.broadcasts import Thin, thin
from jax_layout.optimize.names import (
    Names,
    Unknown,
    letters_of_sides,
    met,
    reduced,
    renamed,
    result_names,
)
from jax_layout.optimize.parts import (
    Attention,
    Core,
    Largest,
    Part,
    Scores,
    Shifted,
    Terms,
)
from jax_layout.products.as_they_lie import is_plain

_SAME = (
    "convert_element_type", "copy", "copy_p", "stop_gradient", "pvary", "name",
    "reduce_precision",
)  # fmt: skip
_RENAMES = ("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")
_EXP: Terms = {(1, 0, 0, 0): 1.0}
_SOFTMAX: Terms = {(1, -1, 0, 0): 1.0}
# What hides a key: far below every score, and far above what overflows.
_HIDDEN = -3e4
# Scores that this is added to are gone.
_ABSORBS = -1e30


def found(eqns: Sequence[Any], captured: Mapping[Any, Any]) -> Finder:
    """Every attention of a program.

    Args:
      eqns: its equations, without calls.
      captured: values of what it has captured, by the variable.
    """
    finder = Finder({v: eqn for eqn in eqns for v in eqn.outvars}, captured)
    for eqn in eqns:
        finder.walk(eqn)
    return finder


@dataclasses.dataclass
class Finder:
    """What is known of a program's values.

    Attributes:
      makers: the equations, by the variable that each makes.
      captured: values of what it has captured.
      thinned: what variables are before they are broadcast, as far as that was asked.
      known: what a variable is.
      attentions: by what their softmax is of.
      waiting: products with powers of an attention that is not known yet.
    """

    makers: dict[Any, Any]
    captured: Mapping[Any, Any]
    thinned: dict[Any, Thin] = dataclasses.field(default_factory=dict)
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)
    attentions: dict[Core, Attention] = dataclasses.field(default_factory=dict)
    waiting: dict[Core, list[Any]] = dataclasses.field(default_factory=dict)

    def thin(self, v: Any) -> Thin:
        return thin(v, self.makers, self.captured, self.thinned)

    def walk(self, eqn: Any) -> None:
        """Learns what an equation makes."""
        if len(eqn.outvars) != 1:
            return
        try:
            value = self._made(eqn)
        except Unknown:
            return
        if value is not None:
            self.known[eqn.outvars[0]] = value

    def _made(self, eqn: Any) -> Any:
        name = eqn.primitive.name
        given = [self._of(v) for v in eqn.invars]
        if name == "dot_general":
            return self._product(eqn, given)
        if all(value is None for value in given):
            return None
        if name in _SAME:
            if not jax.dtypes.issubdtype(eqn.outvars[0].aval.dtype, np.floating):
                raise Unknown
            if name == "stop_gradient" and not isinstance(given[0], Largest):
                raise Unknown  # a call would have the gradient
            return given[0]
        if name in _RENAMES and len(eqn.invars) == 1:
            return dataclasses.replace(given[0], names=renamed(eqn, given[0].names))
        if name == "custom_jvp_call" or (name in ("jit", "pjit") and _is_call(eqn)):
            return self._called(eqn)
        rule = getattr(self, f"_{name}", None)
        if rule is None:
            raise Unknown
        return rule(eqn, given)

    def _of(self, v: Any) -> Any:
        return None if isinstance(v, Literal) else self.known.get(v)

    def _called(self, eqn: Any) -> Any:
        """What the body of a call makes; a softmax with a derivative of its own."""
        closed = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
        jaxpr = closed.jaxpr
        if jaxpr.constvars or len(jaxpr.outvars) != 1:
            raise Unknown
        for inner, outer in zip(jaxpr.invars, eqn.invars, strict=True):
            self.known[inner] = self._of(outer)
            self.thinned[inner] = self.thin(outer)
        for each in jaxpr.eqns:
            if each.primitive.name == "dot_general":
                raise Unknown
            for v in each.outvars:
                self.makers[v] = each
                for facts in (self.known, self.thinned):
                    facts.pop(v, None)  # of another call of the same
            self.walk(each)
        return self._of(jaxpr.outvars[0])

    # --- scores

    def _number(self, v: Any) -> float:
        number = self.thin(v).number
        if number is None:
            raise Unknown
        return number

    def _mul(self, eqn: Any, given: Sequence[Any]) -> Any:
        one, other = given
        if isinstance(one, Part) or isinstance(other, Part):
            return self._multiplied(eqn, given)
        at = 0 if one is not None else 1
        return self._scaled(given[at], self._number(eqn.invars[1 - at]))

    def _div(self, eqn: Any, given: Sequence[Any]) -> Any:
        one, other = given
        if isinstance(other, Part):
            if len(other.terms) != 1:
                raise Unknown
            ((powers, factor),) = other.terms.items()
            inverse: Any = {tuple(-n for n in powers): 1 / factor}
            other = dataclasses.replace(other, terms=inverse)
            return self._multiplied(eqn, (one, other))
        number = self._number(eqn.invars[1])
        if number == 0:
            raise Unknown
        return self._scaled(one, 1 / number)

    def _scaled(self, value: Any, number: float) -> Any:
        if isinstance(value, Part):
            terms = {powers: n * number for powers, n in value.terms.items()}
            return dataclasses.replace(value, terms=terms)
        if not isinstance(value, Scores) or value.core.biases or value.core.masks:
            raise Unknown
        core = dataclasses.replace(value.core, scale=value.core.scale * number)
        return Scores(core, value.names)

    def _add(self, eqn: Any, given: Sequence[Any]) -> Any:
        if isinstance(given[0], Part) and isinstance(given[1], Part):
            return self._sum(eqn, given)
        at = 0 if given[0] is not None else 1
        value, bias = given[at], eqn.invars[1 - at]
        if given[1 - at] is not None or not isinstance(value, Scores):
            raise Unknown
        if value.core.masks or eqn.invars[at].aval.size != eqn.outvars[0].aval.size:
            raise Unknown
        if bias.aval.ndim != len(value.names):
            raise Unknown
        biases = (*value.core.biases, (bias, value.names))
        return Scores(dataclasses.replace(value.core, biases=biases), value.names)

    _add_any = _add

    def _select_n(self, eqn: Any, given: Sequence[Any]) -> Any:
        if len(given) != 3 or given[0] is not None:
            raise Unknown
        at = 1 if given[1] is not None else 2
        value, number = given[at], self._number(eqn.invars[3 - at])
        if given[3 - at] is not None:
            raise Unknown
        mask = eqn.invars[0], at == 2
        if isinstance(value, Part):
            # The gradient of what is hidden is 0, by the mask that hides it.
            hides = [(v, true) for v, _, true, _ in value.core.masks]
            if number != 0 or mask not in hides:
                raise Unknown
            return dataclasses.replace(value, hidden=value.hidden | {mask[0]})
        if not isinstance(value, Scores) or not number <= _HIDDEN:
            raise Unknown
        if mask[0].aval.ndim != len(value.names):
            raise Unknown
        masks = (*value.core.masks, (mask[0], value.names, mask[1], number))
        return Scores(dataclasses.replace(value.core, masks=masks), value.names)

    def _reduce_max(self, eqn: Any, given: Sequence[Any]) -> Any:
        (value,) = given
        over, names = reduced(value.names, eqn)
        if not isinstance(value, Scores) or over is None:
            raise Unknown
        return Largest(value.core, names, over)

    def _max(self, eqn: Any, given: Sequence[Any]) -> Any:
        at = 0 if given[0] is not None else 1
        value, least = given[at], self._number(eqn.invars[1 - at])
        if not isinstance(value, Largest) or least != -math.inf:
            raise Unknown
        return value

    def _sub(self, eqn: Any, given: Sequence[Any]) -> Any:
        one, other = given
        if isinstance(one, Part) and isinstance(other, Part):
            return self._sum(eqn, (one, self._scaled(other, -1)))
        if not (isinstance(one, Scores) and isinstance(other, Largest)):
            raise Unknown
        names = met(one.names, other.names)
        if one.core is not other.core or names != one.names:
            raise Unknown
        return Shifted(one.core, names, other.over)

    def _exp(self, eqn: Any, given: Sequence[Any]) -> Any:
        (value,) = given
        if not isinstance(value, Shifted):
            raise Unknown
        return Part(value.core, value.names, value.over, _EXP)

    # --- of exponentials

    def _multiplied(self, eqn: Any, given: Sequence[Any]) -> Any:
        at = 0 if isinstance(given[0], Part) else 1
        value, other = given[at], given[1 - at]
        if other is None:
            return self._scaled(value, self._number(eqn.invars[1 - at]))
        if isinstance(other, Scores):
            other = self._gradient(other, value)
        if not isinstance(other, Part) or value.core is not other.core:
            raise Unknown
        terms: dict[Any, float] = {}
        for a, x in value.terms.items():
            for b, y in other.terms.items():
                powers = tuple(map(sum, zip(a, b, strict=True)))
                terms[powers] = terms.get(powers, 0) + x * y
        if any(powers[2] > 1 for powers in terms):
            raise Unknown
        return Part(
            value.core,
            met(value.names, other.names),
            value.over,
            terms,
            value.hidden | other.hidden,
        )

    def _sum(self, eqn: Any, given: Sequence[Any]) -> Any:
        one, other = given
        if one.core is not other.core:
            raise Unknown
        terms = dict(one.terms)
        for powers, n in other.terms.items():
            terms[powers] = terms.get(powers, 0) + n
        terms = {powers: n for powers, n in terms.items() if n}
        names = met(one.names, other.names)
        return Part(one.core, names, one.over, terms, one.hidden & other.hidden)

    def _neg(self, eqn: Any, given: Sequence[Any]) -> Any:
        return self._scaled(given[0], -1)

    def _integer_pow(self, eqn: Any, given: Sequence[Any]) -> Any:
        (value,) = given
        if not isinstance(value, Part) or len(value.terms) != 1:
            raise Unknown
        ((powers, factor),) = value.terms.items()
        y = eqn.params["y"]
        terms = {tuple(n * y for n in powers): factor**y}
        return dataclasses.replace(value, terms=terms)

    def _reduce_sum(self, eqn: Any, given: Sequence[Any]) -> Any:
        (value,) = given
        over, names = reduced(value.names, eqn)
        if not isinstance(value, Part):
            raise Unknown
        if over is None:
            return dataclasses.replace(value, names=names)
        terms: dict[Any, float] = {}
        for (e, s, d, r), n in value.terms.items():
            if (e, d) not in ((1, 0), (1, 1)) or over != value.over:
                raise Unknown
            powers = (0, s, 0, r + 1) if d else (0, s + 1, 0, r)
            terms[powers] = terms.get(powers, 0) + n
        return dataclasses.replace(value, names=names, terms=terms)

    def _gradient(self, scores: Scores, value: Part) -> Part:
        """A product that meets what a softmax is made of: of the values' gradient."""
        core = scores.core
        if core.scale != 1 or core.biases or core.masks:
            raise Unknown
        if value.core not in self.attentions:
            self._recomputed(scores, value)
        attention = self.attentions[value.core]
        sides = letters_of_sides(core.dot)
        v, v_names = attention.operands[2]
        if v not in core.dot.invars:
            raise Unknown
        at = core.dot.invars.index(v)
        own, theirs = sides[at], sides[1 - at]
        known = dict(zip(own, v_names, strict=True))
        for letter, name in zip(scores.names, value.names, strict=True):
            if letter is not None and letter not in known:
                known[letter] = name
            elif letter is not None and name not in (known[letter], None):
                raise Unknown
        names = tuple(known.get(letter) for letter in theirs)
        do = core.dot.invars[1 - at]
        self._same_gradient(attention, do, names)
        attention.from_value = core.dot
        result = tuple(i if i is None else known[i] for i in scores.names)
        wanted = {*attention.batch, *attention.free, attention.over}
        if {name for name in result if name} != wanted:
            raise Unknown
        return Part(value.core, result, value.over, {(0, 0, 1, 0): 1.0})

    def _recomputed(self, scores: Scores, value: Part) -> None:
        """Has an attention whose second product is no part of the program.

        In a backward pass that makes the powers again.
        """
        dot = scores.core.dot
        sides = letters_of_sides(dot)
        pairs = zip(scores.names, value.names, strict=True)
        known = {letter: name or value.over for letter, name in pairs if letter}
        keys = {letter for letter, name in known.items() if name == value.over}
        at = 0 if keys & set(sides[0]) else 1
        theirs = {letter: known[letter] for letter in sides[at] if letter in known}
        attention = _attention(value, None, theirs, dot.invars[at], sides[at])
        self.attentions[value.core] = attention
        for eqn in self.waiting.pop(value.core, []):
            self.walk(eqn)

    def _same_gradient(self, attention: Attention, v: Any, names: Names) -> None:
        wanted = {*attention.batch, *attention.free, attention.summed}
        whole = [name for name in names if name is not None]
        if set(whole) != wanted or len(whole) != len(wanted):
            raise Unknown
        if attention.gradient not in (None, (v, names)):
            raise Unknown
        attention.gradient = v, names

    # --- products

    def _product(self, eqn: Any, given: Sequence[Any]) -> Any:
        if not is_plain(eqn):
            raise Unknown
        sides, result = letters_of_sides(eqn), result_names(eqn)
        for at in (0, 1):
            value, same = given[at], {*result} - {None} == {*sides[at]} - {None}
            if same and isinstance(value, Scores | Part) and self._is_one(eqn, 1 - at):
                known = dict(zip(sides[at], value.names, strict=True))
                return dataclasses.replace(value, names=tuple(map(known.get, result)))
        at = 0 if isinstance(given[0], Part) else 1
        part = given[at]
        if not isinstance(part, Part):
            return Scores(Core(eqn), result)
        own, theirs = sides[at], sides[1 - at]
        known = dict(zip(own, part.names, strict=True))
        if any(name is None for letter, name in known.items() if letter):
            raise Unknown
        summed = {known[i] for i in own if i and i in theirs and i not in result}
        other = eqn.invars[1 - at]
        attention = self.attentions.get(part.core)
        if summed == {part.over} and part.terms == _SOFTMAX and attention is None:
            self.attentions[part.core] = _attention(part, eqn, known, other, theirs)
            return None
        if attention is None:
            self.waiting.setdefault(part.core, []).append(eqn)
            raise Unknown
        self._gradient_product(attention, part, eqn, known, other, theirs, summed)
        return None

    def _is_one(self, eqn: Any, at: int) -> bool:
        """Whether a product is with ones, as weights of heads are if none are given."""
        return self.thin(eqn.invars[at]).number == 1

    def _gradient_product(
        self,
        attention: Attention,
        part: Part,
        eqn: Any,
        known: dict[Any, Any],
        other: Any,
        theirs: Names,
        summed: set[Any],
    ) -> None:
        own = [letter for letter in theirs if letter and letter not in known]
        if len(own) != 1:
            raise Unknown
        known[own[0]] = attention.summed
        names = tuple(known.get(letter) for letter in theirs)
        if summed == set(attention.free) and part.terms == _SOFTMAX:
            self._same_gradient(attention, other, names)
            which = 2
        else:
            if not _is_gradient(part, part.core.scale):
                raise Unknown
            which = 0 if summed == {attention.over} else 1
            if which == 1 and summed != set(attention.free):
                raise Unknown
            # The gradient by the query is a product with the key.
            if attention.operands[1 - which] != (other, names):
                raise Unknown
        if which in attention.gradients:
            raise Unknown
        result = tuple(None if i is None else known[i] for i in result_names(eqn))
        attention.gradients[which] = eqn, result

    def is_of_bias(self, attention: Attention, v: Any) -> bool:
        """Whether a value is the gradient of each bias, by all scores."""
        part, axes = self._of(v), {*attention.batch, *attention.free, attention.over}
        return (
            isinstance(part, Part)
            and bool(part.core.biases)
            and _is_gradient(part, 1)
            and {*part.names} - {None} == axes
        )

    def inside(self, attention: Attention, products: Sequence[Any]) -> list[Any]:
        """The equations from the first product to others, all of them included."""
        own = (attention.core.dot, attention.from_value)
        pending, inner = [*own, *products], {}
        while pending:
            eqn = pending.pop()
            if eqn is None or id(eqn) in inner:
                continue
            inner[id(eqn)] = eqn
            for v in eqn.invars if not any(eqn is dot for dot in own) else ():
                value = self._of(v)
                if value is not None and any(value.core.dot is dot for dot in own):
                    pending.append(self.makers[v])
        return list(inner.values())


def _is_gradient(part: Part, scale: float) -> bool:
    """Whether this is the gradient of what a softmax is of, times a number."""
    wanted = {(1, -1, 1, 0): scale, (1, -2, 0, 1): -scale}
    return (
        part.terms.keys() == wanted.keys()
        and all(
            math.isclose(n, wanted[powers], rel_tol=1e-6)
            for powers, n in part.terms.items()
        )
        and all(v in part.hidden for v, *_ in part.core.masks)
    )


def _attention(
    part: Part, eqn: Any, known: dict[Any, Any], value: Any, theirs: Names
) -> Attention:
    """The attention whose second product this is, or was, with these values."""
    dot = part.core.dot
    sides = letters_of_sides(dot)
    result = set(result_names(dot)) - {None}
    batch = [i for i in result_names(dot) if i and i in sides[0] and i in sides[1]]
    summed = [i for i in sides[0] if i and i in sides[1] and i not in result]
    at = 0 if part.over in sides[1] else 1
    free = [i for i in sides[at] if i and i in result and i not in batch]
    own = [i for i in theirs if i and i not in known]
    shared = [known[i] for i in theirs if i in known and i is not None]
    sizes = {
        name: n
        for v, names in zip(dot.invars, sides, strict=True)
        for name, n in zip(names, v.aval.shape, strict=True)
        if name
    }
    key = [i for i in sides[1 - at] if i]
    alike = sorted(key) == sorted([*batch, *summed, part.over])
    if not alike or len(summed) != 1 or len(own) != 1 or part.over in batch:
        raise Unknown
    if sorted(shared) != sorted([*batch, part.over]):
        raise Unknown
    features = dict(zip(theirs, value.aval.shape, strict=True))[own[0]]
    if features != sizes[summed[0]]:
        raise Unknown
    known[own[0]] = summed[0]
    return Attention(
        core=part.core,
        dot=eqn,
        over=part.over,
        summed=summed[0],
        batch=batch,
        free=free,
        sizes=sizes,
        operands=[
            (dot.invars[at], sides[at]),
            (dot.invars[1 - at], sides[1 - at]),
            (value, tuple(known.get(i) for i in theirs)),
        ],
        out=tuple(i and known[i] for i in result_names(eqn)) if eqn else (),
    )


# --- equations


def _is_call(eqn: Any) -> bool:
    return _compat.is_plain_call(eqn.params)
