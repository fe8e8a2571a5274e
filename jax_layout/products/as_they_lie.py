# SPDX-License-Identifier: Apache-2.0
"""Products that stay XLA's read what their operands are transposes of.

XLA reads transposes in place too, but of bfloat16 it widens copies of both operands
then, and for a vector it writes the matrix out, or computes by it what takes longer.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal, primitives
from jax.lax import DotAlgorithmPreset

from jax_layout import _compat, choices, op
from jax_layout.plain import jnp
from jax_layout.products.letters import PRODUCTS, rows_of, terms_of, untransposed
from jax_layout.rewriting import Place, has_shapes, live, rewritten

_PRECISIONS = ("BF16_BF16_F32", "F16_F16_F32", "F32_F32_F32")
# In loops and branches XLA runs a product of a vector by less with what is around, and
# before a loop it widens the weights that all steps read, if not for so many rows.
_LEAST_INSIDE, _ROWS_INSIDE = 1 << 14, 16
# Of a vector of so many bytes XLA (kFusionThresholdBytes) writes the transpose out.
_WRITTEN_FOR = 16 << 10
# Of more multiplications, XLA has products of matrices computed by a library, and of
# more elements, sums in 32 bits and more, and extremes, of floats and of bytes.
_MULTIPLIED, _REDUCED = 32, 4096
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min".split())
_CALLED = frozenset(
    "sort top_k fft scatter scatter-add cholesky triangular_solve ffi_call".split()
)


def is_plain(eqn: Any) -> bool:
    """Whether a product is one of numbers as they are."""
    if _compat.says_where(eqn):
        return False
    precision = eqn.params["precision"]
    if isinstance(precision, DotAlgorithmPreset):
        return precision.name in _PRECISIONS
    given = precision if isinstance(precision, tuple) else (precision,)
    known = all(p is None or isinstance(p, jax.lax.Precision) for p in given)
    return known and eqn.params.get("out_sharding") is None


def is_large(*arrays: Any) -> bool:
    """Whether a core's second-level cache does not hold an operand."""
    largest = max(v.size * v.dtype.itemsize for v in arrays)
    return largest > choices.level2_bytes() / choices.threads()


def calls_libraries(loop: Any) -> bool:
    """Whether XLA calls other functions in a loop than those that it compiles.

    Without any it compiles the whole loop to one function of one thread
    (`xla_cpu_small_call`), in which a vector by a transpose in float32 takes a fifth of
    the time that it takes elsewhere.

    Args:
      loop: the jaxpr of its body.
    """
    return _compat.has_any(loop, _is_called)


def _is_called(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in PRODUCTS:
        a, b = (v.aval for v in eqn.invars[:2])
        rows = rows_of(terms_of(eqn), a, b)
        return min(rows) > 1 and a.size * rows[1] >= _MULTIPLIED
    if name in _REDUCTIONS:
        x = eqn.invars[0].aval
        size, floats = x.dtype.itemsize, jnp.issubdtype(x.dtype, jnp.floating)
        wide = floats and size >= 4
        known = wide if name == "reduce_sum" else floats or size == 1
        return known and x.size >= _REDUCED
    return name in _CALLED or (op.is_operator(eqn) and op.is_ours(eqn))


def products_as_they_lie(closed: Any) -> tuple[Any, int]:
    """A program for CPUs whose products read what their operands are transposes of.

    Where that is faster on XLA.

    Args:
      closed: its jaxpr.

    Returns:
      its jaxpr, the same one if nothing changed, and the number of such products.
    """
    if not has_shapes(closed):
        return closed, 0
    count = 0

    def change(eqns: Sequence[Any], results: Sequence[Any], at: Place) -> Sequence[Any]:
        nonlocal count
        calls = at.loop is not None and calls_libraries(at.loop)
        found = as_they_lie(eqns, at, calls)
        changed = sum(map(operator.is_not, found, eqns))
        count += changed
        return live(found, results) if changed else eqns

    return rewritten(closed, change), count


def as_they_lie(eqns: Sequence[Any], at: Place, calls: bool) -> list[Any]:
    """Equations of which jax's products read what their operands are transposes of.

    Where that is faster on XLA.

    Args:
      eqns: those of a jaxpr.
      at: where they are.
      calls: whether the loop around them, if they are in one, `calls_libraries`.
    """
    around = _Around(at, calls, {})
    found = []
    for eqn in eqns:
        if eqn.primitive is primitives.dot_general_p and is_plain(eqn):
            for place in range(2):
                eqn = _through_transpose(eqn, place, around)
        around.makers.update(dict.fromkeys(eqn.outvars, eqn))
        found.append(eqn)
    return found


@dataclasses.dataclass(frozen=True)
class _Around:
    """What a product is among.

    Attributes:
      at: where it is.
      calls: whether the loop around it `calls_libraries`.
      makers: the equations before it, by what they make.
    """

    at: Place
    calls: bool
    makers: dict[Any, Any]

    def makes(self, v: Any) -> bool:
        """Whether it is another value in each step."""
        return v in self.at.slices or v in self.makers


def _through_transpose(eqn: Any, place: int, around: _Around) -> Any:
    """A product of what its operand at this place is a transpose of; or as it was."""
    v = eqn.invars[place]
    transpose = None if isinstance(v, Literal) else around.makers.get(v)
    if transpose is None or transpose.primitive is not primitives.transpose_p:
        return eqn
    *operands, y = terms_of(eqn)
    before = operands[place]
    operands[place] = term = untransposed(before, transpose.params["permutation"])
    both = [i for i in operands[0] if i in operands[1]]
    summed, batch = ([i for i in both if (i in y) == kept] for kept in (False, True))
    orders = [[i for i in given if i in y] for given in (before, term)]
    # Batches that lie inside are XLA's to place, with what is around them.
    leads = term.startswith("".join(batch)) and y.startswith("".join(batch))
    (x,) = transpose.invars
    if orders[0] != orders[1] or not leads or not _pays(eqn, place, term, x, around):
        return eqn
    numbers = tuple(
        tuple(tuple(map(given.index, letters)) for given in operands)
        for letters in (summed, batch)
    )
    read = list(eqn.invars)
    read[place] = x
    params = eqn.params | {"dimension_numbers": numbers}
    return _through_transpose(eqn.replace(invars=read, params=params), place, around)


def _pays(eqn: Any, place: int, term: str, lies: Any, around: _Around) -> bool:
    """Whether XLA is faster at a product of this operand as it lies, by its letters."""
    at = around.at
    arrays = a, b = [v.aval for v in eqn.invars]
    x, w, y = terms_of(eqn)
    rows = min(rows_of((x, w), a, b))
    if rows > 1:
        few = at.inside and lies not in at.slices and rows < _ROWS_INSIDE
        return a.dtype == b.dtype == jnp.bfloat16 and not few
    if set(x) & set(w) & set(y):
        return False
    if not (at.inside or _compat.fuses_transposes()):
        return True
    matrix, vector = arrays[place], arrays[1 - place]
    if term[0] not in y:
        return _is_enough(matrix, vector)
    return pays_for_a_vector(matrix, vector, around.calls, not around.makes(lies))


def pays_for_a_vector(matrix: Any, vector: Any, calls: bool, kept: bool) -> bool:
    """Whether XLA, in a loop, had better read a matrix than what is its transpose.

    Where nothing is called its one pass by the transpose takes in how a step slices or
    computes the matrix, and finds a small one in a core's own cache.

    Args:
      matrix: as it lies.
      vector: what it is multiplied by.
      calls: as of `calls_libraries`.
      kept: whether all steps read the same matrix.
    """
    if not _is_enough(matrix, vector):
        return False
    written = vector.size * vector.dtype.itemsize >= _WRITTEN_FOR
    if (calls or written) and not _compat.fuses_transposes():
        return True
    return kept and is_large(matrix)


def _is_enough(matrix: Any, vector: Any) -> bool:
    return bool(matrix.size >= max(_LEAST_INSIDE, vector.size))
