# SPDX-License-Identifier: Apache-2.0
"""Makes one call of each attention that softmax.py finds, and plans it.

An attention is taken whole or left alone: where something else reads what lies between
its products, where a mask or a bias may differ from what the primitive promises, and
where no table says that it pays.
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

from jax_layout import _backends, _compat, choices
from jax_layout.attention.blocked import (
    DTYPES,
    MOST_FEATURES,
    attention_backward_p,
    attention_p,
    work_of,
)
from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.optimize.broadcasts import Thin
from jax_layout.optimize.names import Names, renamed_from
from jax_layout.optimize.rules import Equation, Formats, Step, nbytes
from jax_layout.optimize.softmax import (
    Attention,
    Finder,
    found,
)
from jax_layout.plain import jnp, lax
from jax_layout.rewriting import live, spliced

# A bias of no more than this leaves nothing of a score, but of one that it hides.
_ABSORBS = -1e30
_Q, _K, _SCORES = "btkgh", "bskh", "bkgts"


def attended(
    eqns: Sequence[Equation], results: Sequence[Any], captured: Mapping[Any, Any]
) -> tuple[list[Equation], dict[Any, int]]:
    """A program with calls in place of each attention that is worth one.

    Args:
      eqns: its equations, without calls.
      results: its results.
      captured: the values of what it has captured, by the variable.

    Returns:
      its equations; and by the first result of each that is a call, how many bytes of
      scores nobody writes and reads any more.
    """
    if not _backends.has_kernels("attention") or jax.default_backend() != "cpu":
        return list(eqns), {}
    finder = found(eqns, captured)
    if not finder.attentions:
        return list(eqns), {}
    readers: dict[Any, list[Any]] = {v: [None] for v in results}
    for eqn in eqns:
        for v in eqn.invars:
            if not isinstance(v, Literal):
                readers.setdefault(v, []).append(eqn)
    places = {id(eqn): i for i, eqn in enumerate(eqns)}
    instead: dict[int, list[Equation]] = {}
    gone: set[int] = set()
    calls: dict[Any, int] = {}
    for attention in finder.attentions.values():
        products = _whole(attention, finder, readers, places)
        learns = products != [attention.dot]
        call = None if products is None else _call(attention, finder, learns)
        if products is None or call is None:
            continue
        new, kept = _forward(attention, call)
        at = places.get(id(attention.dot))
        if at is not None:
            instead[at] = new
        if learns:
            then = min(_later(attention, places))
            back = _backward(attention, call, kept)
            instead[then] = back if at is not None else [*new, *back]
            new = [*new, *back]
        gone.update(map(id, products))
        if attention.of_bias:
            gone.add(id(attention.of_bias[0]))
        names = ("attention", "attention_backward")
        scores = 2 * nbytes(attention.core.dot.outvars[0].aval)
        ours = [eqn.outvars[0] for eqn in new if eqn.primitive.name in names]
        calls.update(dict.fromkeys(ours, scores))
    after: list[Equation] = []
    for i, eqn in enumerate(eqns):
        after += instead.get(i, [])
        if id(eqn) not in gone:
            after.append(eqn)
    return live(after, results), calls


def _whole(
    attention: Attention,
    finder: Finder,
    readers: Mapping[Any, Sequence[Any]],
    places: Mapping[int, int],
) -> list[Equation] | None:
    """The products behind the softmax, if nothing else needs what lies before them.

    But for gradients of scores, which are those of biases.
    """
    dots = [] if attention.dot is None else [attention.dot]
    gradients = [eqn for eqn, _ in attention.gradients.values()]
    for products in (dots, [*dots, *gradients]):
        inner = finder.inside(attention, products)
        ends, own = set(map(id, products)), {id(eqn) for eqn in inner}
        between = [v for eqn in inner if id(eqn) not in ends for v in eqn.outvars]
        if not products or not own <= places.keys():
            continue
        others = {
            v: rest
            for v in between
            if (rest := [eqn for eqn in readers.get(v, []) if id(eqn) not in own])
        }
        if products == dots:
            if not others:
                return products
            continue
        first = places.get(id(attention.dot), -1)
        if attention.gradient is None or first >= min(_later(attention, places)):
            return None
        for v, rest in others.items():
            if len(others) > 1 or not finder.is_of_bias(attention, v):
                return None
            attention.of_bias = _summed(finder.makers[v], finder.known[v].names, rest)
        return products
    return None


def _summed(
    eqn: Equation, names: Names, readers: Sequence[Any]
) -> tuple[Equation, Names]:
    """What is read of the gradient of scores: a sum, or all of it."""
    if len(readers) != 1 or readers[0] is None:
        return eqn, names
    (reader,) = readers
    if reader.primitive.name != "reduce_sum":
        return eqn, names
    axes = reader.params["axes"]
    return reader, tuple(name for i, name in enumerate(names) if i not in axes)


def _later(attention: Attention, places: Mapping[int, int]) -> list[int]:
    """Where the products with the gradient are."""
    gradients = [eqn for eqn, _ in attention.gradients.values()]
    both = [attention.from_value, *gradients]
    return [places[id(eqn)] for eqn in both if eqn is not None]


@dataclasses.dataclass
class Call:
    """A call of attention.

    Attributes:
      operands: query, key and value: a variable, and the names of its axes.
      groups: the letters of each axis of the primitive's operands.
      sizes: of each letter.
      biases: what is added to scores, with the names of its axes.
      masks: the same of what hides them, and where it is true.
      params: the primitive's.
    """

    operands: list[tuple[Any, Names]]
    groups: dict[str, list[str]]
    sizes: dict[str, int]
    biases: list[tuple[Thin, Names]]
    masks: list[tuple[Thin, Names, bool]]
    params: dict[str, Any]

    def shape(self, order: str) -> list[int]:
        return [math.prod(self.sizes[i] for i in self.groups[x]) for x in order]

    def leaves(self) -> list[Any]:
        """The variables that biases and masks are computed from."""
        thin = [bias for bias, _ in self.biases] + [mask for mask, *_ in self.masks]
        return list(dict.fromkeys(leaf for each in thin for leaf in each.leaves))


def _call(attention: Attention, finder: Finder, learns: bool) -> Call | None:
    """The call that is an attention, if there is one and it pays."""
    hidden = _hidden(attention, finder, learns)
    if hidden is None:
        return None
    biases, masks, causal = hidden
    operands, scale = attention.operands, attention.core.scale
    if not learns:
        operands, scale = _before_scaling(operands, scale, finder)
    dtypes = {v.aval.dtype.name for v, _ in operands}
    if len(dtypes) > 1 and not learns:
        operands = [(_narrow(v, finder), names) for v, names in operands]
        dtypes = {v.aval.dtype.name for v, _ in operands}
    result = (attention.dot.outvars if attention.dot else operands[0])[0].aval.dtype
    if len(dtypes) > 1 or result.name not in dtypes or result.name not in DTYPES:
        return None
    if any(bias.v.aval.dtype.name not in DTYPES for bias, _ in biases):
        return None
    sizes = attention.sizes
    rows = causal or max(attention.free, key=sizes.__getitem__, default=None)
    groups = {
        "b": attention.batch[:-1],
        "k": attention.batch[-1:],
        "t": [rows] if rows else [],
        "g": [i for i in attention.free if i != rows],
        "s": [attention.over],
        "h": [attention.summed],
    }
    params = {
        "q_axes": (0, 1, 2, 3, 4),
        "k_axes": (0, 1, 2, 3),
        "causal": causal is not None,
        "window": (-1, -1),
        "has": (bool(biases), bool(masks), False, False),
        "scale": float(scale),
    }
    call = Call(operands, groups, sizes, biases, masks, params)
    query, key = (jax.ShapeDtypeStruct(call.shape(order), result) for order in (_Q, _K))
    work = work_of(query, key, params, "_backward" if learns else "")
    if sizes[attention.summed] > MOST_FEATURES or 0 in (*query.shape, *key.shape):
        return None
    return None if choices.choose(work) is None else call


def _before_scaling(
    operands: list[tuple[Any, Names]], scale: float, finder: Finder
) -> tuple[list[tuple[Any, Names]], float]:
    """Query and key before they are multiplied by a number, and the scale with it."""
    plain = []
    for v, names in operands[:2]:
        while (eqn := finder.makers.get(v)) and eqn.primitive.name in ("mul", "div"):
            divides = eqn.primitive.name == "div"
            numbers = [finder.thin(x).number for x in eqn.invars]
            at = 0 if numbers[1] or divides else 1  # what is no number
            number = numbers[1 - at]
            if not number or eqn.invars[at].aval.shape != v.aval.shape:
                break
            v, scale = eqn.invars[at], scale / number if divides else scale * number
        plain.append((v, names))
    return [*plain, operands[2]], scale


def _narrow(v: Any, finder: Finder) -> Any:
    """What a value was widened from."""
    eqn = finder.makers.get(v)
    if eqn is None or eqn.primitive.name != "convert_element_type":
        return v
    return eqn.invars[0]


# --- masks


def _hidden(
    attention: Attention, finder: Finder, learns: bool
) -> tuple[list[Any], list[Any], str | None] | None:
    """Biases, masks, and the letter of rows in causal order; None if not understood."""
    core = attention.core
    masks: list[tuple[Thin, Names, bool]] = []
    fills = {fill for *_, fill in core.masks}
    if len(fills) > 1:
        return None  # a row that sees nothing would see some
    for v, names, true, _ in core.masks:
        each = finder.thin(v)
        masks += _parts(each, names) if true else [(each, names, False)]
    kept, causal = _shown(masks, attention)
    if -math.inf in fills and kept:
        return None  # not a number where nothing is seen
    biases = [(finder.thin(v), names) for v, names in core.biases]
    biases = [(bias, names) for bias, names in biases if bias.number != 0]
    hiding = [_as_mask(bias, names) for bias, names in biases]
    if not masks and sum(each is not None for each in hiding) == 1:
        (mask,) = [each for each in hiding if each is not None]
        shown = _shown(_parts(*mask[:2]) if mask[2] else [mask], attention)
        if not (learns and shown[0]):
            kept, causal = shown
            biases = [b for b, each in zip(biases, hiding, strict=True) if each is None]
    if attention.of_bias and not biases:
        return None
    return biases, kept, causal


def _shown(
    masks: Sequence[tuple[Thin, Names, bool]], attention: Attention
) -> tuple[list[tuple[Thin, Names, bool]], str | None]:
    """Masks that hide something, but for the causal order, whose rows are named."""
    causal: str | None = None
    kept = []
    for thin, names, true in masks:
        value = thin.value
        if value is not None and (value == true).all():
            continue
        axes = [i for i, n in zip(names, thin.shape, strict=True) if n != 1]
        rows = None if value is None or not true else _causal(value, axes, attention)
        if rows is None or causal not in (None, rows):
            kept.append((thin, names, true))
        else:
            causal = rows
    return kept, causal


def _causal(value: Any, axes: Sequence[Any], attention: Attention) -> str | None:
    """The letter of rows that see keys up to their own."""
    if len(axes) != 2 or attention.over not in axes:
        return None
    (rows,) = [i for i in axes if i != attention.over]
    square = value.reshape([n for n in value.shape if n != 1])
    if axes[0] == attention.over:
        square = square.T
    return rows if (square == np.tril(np.ones(square.shape, bool))).all() else None


def _parts(thin: Thin, names: Names) -> list[tuple[Thin, Names, bool]]:
    """Masks that are all to be true."""
    name = thin.name
    if name == "and" and all(x.shape for x in thin.operands):
        return [part for x in thin.operands for part in _parts(x, names)]
    if name in ("ne", "gt") and thin.operands[1].number == 0:
        (flag, _) = thin.operands
        if (
            flag.name == "convert_element_type"
            and flag.operands[0].v.aval.dtype == bool
        ):
            return _parts(flag.operands[0], names)
    if name in _RENAMES:
        return _parts(thin.operands[0], renamed_from(thin.eqn, names))
    return [(thin, names, True)]


_RENAMES = (
    "transpose",
    "reshape",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "copy",
)


def _as_mask(thin: Thin, names: Names) -> tuple[Thin, Names, bool] | None:
    """The mask that a bias of zeros and numbers that leave no score is."""
    if thin.name in (*_RENAMES, "convert_element_type"):
        given = (
            names
            if thin.name == "convert_element_type"
            else renamed_from(thin.eqn, names)
        )
        return _as_mask(thin.operands[0], given)
    if thin.name != "select_n" or len(thin.operands) != 3:
        return None
    which, one, other = thin.operands
    for true, seen, hidden in ((True, other, one), (False, one, other)):
        if hidden.number is None or seen.number != 0 or not which.shape:
            continue
        if -math.inf < hidden.number <= _ABSORBS:
            return which, names, true
    return None


# --- calls


def _merged(x: Any, names: Names, order: str, call: Call) -> Any:
    """An operand with the axes of the primitive's."""
    present = [i for i in names if i]
    x = lax.reshape(x, [call.sizes[i] for i in present])
    wanted = [i for letter in order for i in call.groups[letter]]
    x = lax.transpose(x, [present.index(i) for i in wanted])
    return lax.reshape(x, call.shape(order))


def _apart(x: Any, names: Names, order: str, call: Call) -> Any:
    """What the primitive gives, with axes of these names; None has size 1."""
    have = [i for letter in order for i in call.groups[letter]]
    x = lax.reshape(x, [call.sizes[i] for i in have])
    x = lax.transpose(x, [have.index(i) for i in names if i])
    return lax.reshape(x, [call.sizes[i] if i else 1 for i in names])


def _of_scores(x: Any, names: Names, call: Call) -> Any:
    """A mask or a bias with the axes of scores, of size 1 where it is broadcast."""
    shape = np.shape(x)
    present = [i for i, n in zip(names, shape, strict=True) if n != 1]
    x = lax.reshape(x, [n for n in shape if n != 1])
    wanted = [i for letter in _SCORES for i in call.groups[letter]]
    x = lax.transpose(x, [present.index(i) for i in wanted if i in present])
    whole = set(present)
    for letter in _SCORES:  # an axis of several is broadcast as one
        if whole & set(call.groups[letter]):
            whole |= set(call.groups[letter])
    sizes = [call.sizes[i] if i in whole else 1 for i in wanted]
    places = [i for i, letter in enumerate(wanted) if letter in present]
    x = lax.broadcast_in_dim(x, sizes, places)
    merged = []
    for letter in _SCORES:
        group = call.groups[letter]
        known = bool(group) and group[0] in whole
        merged.append(math.prod(call.sizes[i] for i in group) if known else 1)
    return lax.reshape(x, merged)


def _joined(arrays: Sequence[Any], join: Callable[[Any, Any], Any]) -> list[Any]:
    if not arrays:
        return []
    shape = np.broadcast_shapes(*(np.shape(x) for x in arrays))
    dtype = jnp.result_type(*arrays)
    first, *rest = (
        lax.convert_element_type(
            lax.broadcast_in_dim(x, shape, range(len(shape))), dtype
        )
        for x in arrays
    )
    for x in rest:
        first = join(first, x)
    return [first]


def _learning(bias: Any, eqn: Equation, names: Names, call: Call) -> Any:
    """A bias as wide as its gradient, and with the axes that that has."""
    whole = zip(_SCORES, np.shape(bias), call.shape(_SCORES), strict=True)
    shape = [every if {*names} & {*call.groups[x]} else n for x, n, every in whole]
    dtype = jnp.promote_types(bias.dtype, eqn.outvars[0].aval.dtype)
    return lax.convert_element_type(
        lax.broadcast_in_dim(bias, shape, range(len(shape))), dtype
    )


def _of_bias(moved: Any, names: Names, call: Call) -> Any:
    """The gradient of a bias, summed over the axes that have no name here."""
    sizes = zip(_SCORES, np.shape(moved), strict=True)
    have = [i for letter, n in sizes if n != 1 for i in call.groups[letter]]
    x = lax.reshape(moved, [call.sizes[i] for i in have])
    x = x.sum([at for at, i in enumerate(have) if i not in names])
    have = [i for i in have if i in names]
    x = lax.transpose(x, [have.index(i) for i in names if i])
    return lax.reshape(x, [call.sizes[i] if i else 1 for i in names])


def _forward(attention: Attention, call: Call) -> tuple[list[Equation], list[Any]]:
    """Equations, and the variables that the gradients need: operands and results."""
    leaves = call.leaves()

    def forward(q: Array, k: Array, v: Array, *arrays: Array) -> list[Any]:
        known: dict[Any, Any] = dict(zip(leaves, arrays, strict=True))
        orders = zip((q, k, v), (_Q, _K, _K), call.operands, strict=True)
        operands = [_merged(x, names, order, call) for x, order, (_, names) in orders]
        biases = [
            _of_scores(bias.compute(known), names, call) for bias, names in call.biases
        ]
        masks = []
        for mask, names, true in call.masks:
            array = mask.compute(known)
            masks.append(
                _of_scores(array if true else lax.bitwise_not(array), names, call)
            )
        bias = _joined(biases, lax.add)
        if attention.of_bias:
            bias = [_learning(bias[0], *attention.of_bias, call)]
        rest = [*bias, *_joined(masks, lax.bitwise_and)]
        y, sums = attention_p(*operands, *rest, **call.params)
        kept = [*operands, *rest, y, sums]
        return [_apart(y, attention.out, _Q, call), *kept] if attention.dot else kept

    given = [*(v for v, _ in call.operands), *leaves]
    out = attention.dot.outvars if attention.dot else []
    eqns, results = spliced(forward, given, out, attention.dot or attention.core.dot)
    return eqns, results[len(out) :]


def _backward(attention: Attention, call: Call, kept: Sequence[Any]) -> list[Equation]:
    assert attention.gradient is not None
    ct, names = attention.gradient
    wanted = sorted(attention.gradients.items())
    of_bias = attention.of_bias
    eqns = [eqn for _, (eqn, _) in wanted] + ([of_bias[0]] if of_bias else [])

    def backward(ct: Array, *kept: Array) -> list[Any]:
        ct = _merged(lax.convert_element_type(ct, kept[0].dtype), names, _Q, call)
        biased = of_bias is not None
        moved = attention_backward_p(ct, *kept, **call.params, biased=biased)
        found = [
            _apart(moved[i], result, _K if i else _Q, call) for i, (_, result) in wanted
        ]
        if of_bias is not None:
            found.append(_of_bias(moved[3], of_bias[1], call))
        return [
            lax.convert_element_type(x, eqn.outvars[0].aval.dtype)
            for x, eqn in zip(found, eqns, strict=True)
        ]

    results = [eqn.outvars[0] for eqn in eqns]
    source = attention.dot or attention.core.dot
    return spliced(backward, [ct, *kept], results, source)[0]


# --- where they lie


def attention(eqn: Equation, formats: Formats) -> Step:
    """Operands in any order of their axes in which features are last."""
    backward = eqn.primitive.name == "attention_backward"
    wanted = [row_major(v.aval.ndim) for v in eqn.invars]
    queries = [0, 1, len(wanted) - 2] if backward else [0]
    keys = [i + backward for i in (1, 2)]
    params = dict(eqn.params)
    orders = []
    for places, name in ((queries, "q_axes"), (keys, "k_axes")):
        axes = eqn.params[name]
        order = _first_order([formats[i] for i in places], axes[-1])
        if order is None:
            order = wanted[places[0]]
        for i in places:
            wanted[i] = order
        params[name] = tuple(order.axes(axis)[0] for axis in axes)
        orders.append(order)
    given = [orders[0], *orders[1:] * 2] if backward else orders[:1]
    given += [row_major(v.aval.ndim) for v in eqn.outvars[len(given) :]]
    return Step(wanted, given, lambda *operands: _compat.bind(eqn, operands, **params))


def _first_order(formats: Formats, features: int) -> MemoryFormat | None:
    """The first of these that is an order of axes in which one is last."""
    for format in formats:
        order = None if format is None else format.permutation
        if order is not None and order[-1] == features:
            return format
    return None
