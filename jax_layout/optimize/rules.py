# SPDX-License-Identifier: Apache-2.0
"""In which memory format each primitive of a jaxpr can compute.

A rule looks at an equation and at the formats that its operands are in, and says
in which formats it wants them, in which ones it gives its results, and how it
computes on the physical arrays. An equation without a rule wants row-major
operands.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.extend.core import Literal

from jax_layout import _compat
from jax_layout.formats.memory_format import (
    MemoryFormat,
    convert,
    from_atoms,
    row_major,
)
from jax_layout.formats.pointwise import ELEMENTWISE
from jax_layout.plain import lax

Equation = Any
# None: the operand can be made in any format at no cost, or is wanted in any.
Formats = Sequence[MemoryFormat | None]


@dataclasses.dataclass(frozen=True)
class Step:
    """How an equation computes on physical arrays.

    Attributes:
      wanted: format of each operand; None for "as it is".
      given: format of each result; None for results that are made where they are
        wanted, by `emit_in`.
      emit: results from operands, physical arrays all.
      emit_in: the only result, in the format that is asked for:
        `emit_in(format, *operands)`.
      needs: formats of the operands that `emit_in` takes for a format.
      bytes_moved: what the operator re-orders inside, beyond its operands.
      unknown: whether no rule is known for the primitive.
      ours: whether a kernel of ours computes what was XLA's.
    """

    wanted: Sequence[MemoryFormat | None]
    given: Sequence[MemoryFormat | None]
    emit: Callable[..., Sequence[Array]] | None = None
    emit_in: Callable[..., Array] | None = None
    needs: Callable[[MemoryFormat], Sequence[MemoryFormat]] | None = None
    bytes_moved: int = 0
    unknown: bool = False
    ours: bool = False

    @property
    def uses(self) -> list[tuple[MemoryFormat, ...]]:
        """The formats in which each operand is read."""
        return [() if format is None else (format,) for format in self.wanted]


Rule = Callable[[Equation, Formats], Step | None]


def barrier(eqn: Equation, unknown: bool = False) -> Step:
    """What is done with equations that have no rule, or none for their operands."""
    return Step(
        [row_major(v.aval.ndim) if is_array(v) else None for v in eqn.invars],
        [row_major(v.aval.ndim) if is_array(v) else None for v in eqn.outvars],
        lambda *operands: _compat.bind(eqn, operands),
        unknown=unknown,
    )


def nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


@functools.lru_cache(maxsize=4096)
def moves(source: MemoryFormat, target: MemoryFormat, shape: tuple[int, ...]) -> bool:
    """Whether a conversion moves anything: axes of size 1 have no place in memory."""
    return source != target and (
        source.without_units(shape) != target.without_units(shape)
    )


def transpose_cost(eqn: Equation) -> int:
    """Bytes that a transpose reads and writes."""
    axes = eqn.params.get("permutation", eqn.params.get("axes"))
    source, out = row_major(len(axes)), eqn.outvars[0].aval
    return 2 * nbytes(out) * moves(source.transposed(axes), source, out.shape)


def without_units(
    format: MemoryFormat | None, shape: Sequence[int]
) -> MemoryFormat | None:
    """A format's name among those of the same memory: axes of size 1 have no order."""
    if format is None or format.permutation is None or 1 not in shape:
        return format
    order = [axis for axis in format.permutation if shape[axis] != 1]
    if order == sorted(order):
        return row_major(format.ndim)
    units = [axis for axis, size in enumerate(shape) if size == 1]
    return MemoryFormat.of_permutation([*units, *order])


def format_of(v: Any, known: Mapping[Any, MemoryFormat | None]) -> MemoryFormat | None:
    """Of a variable or a literal."""
    return row_major(np.ndim(v.val)) if isinstance(v, Literal) else known[v]


def is_array(v: Any) -> bool:
    return hasattr(v.aval, "shape") and hasattr(v.aval, "dtype")


def followed(
    eqn: Equation, formats: Formats, shape: Sequence[int] | None = None
) -> MemoryFormat | None:
    """The format of the largest operand that is not row-major, if there is one."""
    best, size = None, -1
    for v, format in zip(eqn.invars, formats, strict=True):
        if format is None or format.row_major or not is_array(v):
            continue
        if shape is not None and v.aval.shape != tuple(shape):
            continue
        if v.aval.size > size:
            best, size = format, v.aval.size
    return best


def elementwise(eqn: Equation, formats: Formats) -> Step | None:
    shape = eqn.outvars[0].aval.shape
    if any(v.aval.shape != shape for v in eqn.outvars):
        return None
    format = followed(eqn, formats, shape)
    if format is None:
        return _lazily(eqn, formats)
    wanted: list[MemoryFormat | None] = []
    for v in eqn.invars:
        if v.aval.ndim == 0:
            wanted.append(row_major(0))
        elif v.aval.shape == shape or format.permutation is not None:
            wanted.append(format)  # axes of size 1 may be broadcast
        else:
            return None
    return Step(
        wanted,
        [format] * len(eqn.outvars),
        lambda *operands: _compat.bind(eqn, operands),
    )


def _lazily(eqn: Equation, formats: Formats) -> Step | None:
    """What is made of values that are made where they are wanted is so itself."""
    whole = [v.aval.ndim > 0 for v in eqn.invars]
    if not any(whole) or len(eqn.outvars) > 1:
        return None
    if any(f is not None for f, array in zip(formats, whole, strict=True) if array):
        return None

    def order(format: MemoryFormat) -> MemoryFormat:
        return row_major(format.ndim) if format.permutation is None else format

    def needs(format: MemoryFormat) -> list[MemoryFormat]:
        return [order(format) if array else row_major(0) for array in whole]

    def emit_in(format: MemoryFormat, *operands: Array) -> Array:
        return convert(_compat.bind(eqn, operands)[0], order(format), format)

    return Step([None] * len(whole), [None], emit_in=emit_in, needs=needs)


def _permuted(format: MemoryFormat, values: Sequence[Any]) -> tuple[Any, ...]:
    """A parameter with one entry for each logical axis, for the physical ones."""
    return tuple(values[axis] for axis in format.permutation or ())


def _one_tagged(
    eqn: Equation, formats: Formats, operands: int = 1
) -> MemoryFormat | None:
    """The permutation that the first operands, of one rank, are all to have.

    That of the most elements; None if they are row-major, or of no permutation.
    """
    sizes: dict[MemoryFormat, int] = {}
    for v, f in zip(eqn.invars[:operands], formats, strict=False):
        if f is not None:
            plain = f.permutation is None or f.row_major
            key = row_major(v.aval.ndim) if plain else f
            sizes[key] = sizes.get(key, 0) + v.aval.size
    format = max(sizes, key=lambda f: (sizes[f], not f.row_major), default=row_major(0))
    return None if format.row_major else format


def per_axis(*names: str, operands: int = 1) -> Rule:
    """Rule for primitives whose parameters have one entry for each axis."""

    def rule(eqn: Equation, formats: Formats) -> Step | None:
        format = _one_tagged(eqn, formats, operands)
        if format is None:
            return None
        params = {
            name: _permuted(format, eqn.params[name])
            if eqn.params.get(name) is not None
            else None
            for name in names
        }
        rest = [row_major(v.aval.ndim) for v in eqn.invars[operands:]]
        return Step(
            [format] * operands + rest,
            [format] * len(eqn.outvars),
            lambda *given: _compat.bind(eqn, given, **params),
        )

    return rule


def one_axis(name: str) -> Rule:
    """Rule for primitives that work along one axis, or reverse several."""

    def rule(eqn: Equation, formats: Formats) -> Step | None:
        operands = len(eqn.invars)
        format = _one_tagged(eqn, formats, operands)
        if format is None:
            return None
        value = eqn.params[name]
        params = {
            name: tuple(format.axes(d)[0] for d in value)
            if isinstance(value, tuple)
            else format.axes(value)[0]
        }
        return Step(
            [format] * operands,
            [format] * len(eqn.outvars),
            lambda *given: _compat.bind(eqn, given, **params),
        )

    return rule


def reduction(eqn: Equation, formats: Formats) -> Step | None:
    format = formats[0]
    if format is None or format.row_major or len(eqn.invars) != 1:
        return None
    axes = eqn.params["axes"]
    if "index_dtype" in eqn.params and any(len(format.axes(d)) > 1 for d in axes):
        return None
    physical = tuple(sorted(axis for d in axes for axis in format.axes(d)))
    kept = [d for d in range(format.ndim) if d not in axes]
    atoms = [(kept.index(d), a, n) for d, a, n in format.atoms() if d in kept]
    given = from_atoms(len(kept), atoms)
    shape = given.physical_shape(eqn.outvars[0].aval.shape)
    # Atoms that were apart may be one axis now.
    return Step(
        [format],
        [given],
        lambda x: [lax.reshape(_compat.bind(eqn, (x,), axes=physical)[0], shape)],
    )


def broadcast(eqn: Equation, formats: Formats) -> Step | None:
    operand, result = eqn.invars[0].aval, eqn.outvars[0].aval
    if len(eqn.invars) > 1:
        return None  # dynamic shapes
    if operand.size == result.size and operand.ndim > 0:
        return reshape(eqn, formats)
    dims = eqn.params["broadcast_dimensions"]

    def needs(format: MemoryFormat) -> list[MemoryFormat]:
        order = format.permutation
        if order is None:
            return [row_major(operand.ndim)]
        axes = sorted(range(len(dims)), key=lambda i: order.index(dims[i]))
        return [MemoryFormat.of_permutation(axes)]

    def emit_in(format: MemoryFormat, x: Array) -> Array:
        order = format.permutation
        if order is None:
            return format.pack(lax.broadcast_in_dim(x, result.shape, dims))
        places = sorted(order.index(d) for d in dims)
        return lax.broadcast_in_dim(x, format.physical_shape(result.shape), places)

    return Step([None], [None], emit_in=emit_in, needs=needs)


def iota(eqn: Equation, formats: Formats) -> Step | None:
    if eqn.invars:
        return None  # dynamic shapes
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]

    def emit_in(format: MemoryFormat) -> Array:
        order = format.permutation
        if order is None:
            return format.pack(_compat.bind(eqn, ())[0])
        return _compat.bind(
            eqn,
            (),
            shape=format.physical_shape(shape),
            dimension=order.index(dimension),
        )[0]

    return Step([], [None], emit_in=emit_in, needs=lambda format: [])


def stack(eqn: Equation, formats: Formats) -> Step | None:
    """Stacks along a new axis, which lies outside of the others."""
    format = _one_tagged(eqn, formats, len(eqn.invars))
    if format is None:
        return None
    axis = eqn.params["axis"]
    order = [d + (d >= axis) for d in format.permutation or ()]
    return Step(
        [format] * len(eqn.invars),
        [MemoryFormat.of_permutation([axis, *order])],
        lambda *operands: _compat.bind(eqn, operands, axis=0),
    )


def transpose(eqn: Equation, formats: Formats) -> Step | None:
    """A transpose gives the same memory another name."""
    axes = eqn.params.get("permutation", eqn.params.get("axes"))
    format = formats[0]
    if format is None:  # nor is there memory yet
        back = [axes.index(d) for d in range(len(axes))]
        return Step(
            [None],
            [None],
            emit_in=lambda format, x: x,
            needs=lambda format: [format.transposed(back)],
        )
    return Step([format], [format.transposed(axes)], lambda x: [x])


def reshape(eqn: Equation, formats: Formats) -> Step | None:
    operand, result = eqn.invars[0].aval, eqn.outvars[0].aval
    if len(eqn.invars) > 1:
        return None  # dynamic shapes
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        return None
    format = formats[0]
    if operand.size == 0:
        return None
    if format is None:
        return _reshape_lazily(operand.shape, result.shape)
    if format.row_major:
        return None
    regrouped = regroup(format, operand.shape, result.shape)
    if regrouped is None:
        return None
    shape = regrouped.physical_shape(result.shape)
    return Step([format], [regrouped], lambda x: [lax.reshape(x, shape)])


def _reshape_lazily(old: tuple[int, ...], new: tuple[int, ...]) -> Step:
    """A reshape of a value that is made where it is wanted."""

    def before(format: MemoryFormat) -> MemoryFormat | None:
        plain = format.row_major
        return row_major(len(old)) if plain else regroup(format, new, old)

    def needs(format: MemoryFormat) -> list[MemoryFormat]:
        return [before(format) or row_major(len(old))]

    def emit_in(format: MemoryFormat, x: Array) -> Array:
        if before(format) is None:
            return format.pack(lax.reshape(x, new))
        return lax.reshape(x, format.physical_shape(new))

    return Step([None], [None], emit_in=emit_in, needs=needs)


def regroup(
    format: MemoryFormat, old: Sequence[int], new: Sequence[int]
) -> MemoryFormat | None:
    """The format, in the same memory, after a reshape; None where there is none."""
    format = format.without_units(old)
    before = [size for size in old if size != 1]
    after = [(i, size) for i, size in enumerate(new) if size != 1]
    dim = 0  # of the format, whose first `dim` dimensions are the result's
    i = j = 0
    try:
        while i < len(before) and j < len(after):
            left, right = before[i], after[j][1]
            i, j = i + 1, j + 1
            sizes = [right]
            while left != right:
                if left < right:
                    format = format.merge(dim, before[i])
                    left *= before[i]
                    i += 1
                else:
                    sizes.append(after[j][1])
                    right *= after[j][1]
                    j += 1
            for inner in range(1, len(sizes)):
                format = format.split(dim, math.prod(sizes[inner:]))
                dim += 1
            dim += 1
    except ValueError:
        return None
    # Axes of size 1 go anywhere; in front they bring no order of their own.
    units = [i for i, size in enumerate(new) if size == 1]
    names = [i for i, _ in after]
    atoms = [(names[d], a, n) for d, a, n in format.atoms()]
    return from_atoms(len(new), [(d, 0, None) for d in units] + atoms)


def memory_format(eqn: Equation, formats: Formats) -> Step | None:
    format = eqn.params["format"]
    return Step([format], [format], lambda x: [x])


def several(eqn: Equation, formats: Formats) -> Step | None:
    """Rule for primitives that hand each operand on."""
    kept = [
        row_major(v.aval.ndim) if f is None else f
        for f, v in zip(formats, eqn.invars, strict=True)
    ]
    return Step(kept, kept, lambda *operands: _compat.bind(eqn, operands))


def over_names(eqn: Equation, formats: Formats) -> Step | None:
    """Sums and the like over named axes: the arrays' own stay where they are."""
    named = all(isinstance(axis, str) for axis in eqn.params["axes"])
    return several(eqn, formats) if named else None


_WINDOW = ("window_dimensions", "window_strides", "padding")
_DILATED = (*_WINDOW, "base_dilation", "window_dilation")


def unstack(eqn: Equation, formats: Formats) -> Step | None:
    format = _one_tagged(eqn, formats)
    if format is None:
        return None
    axis = eqn.params["axis"]
    order = [d - (d > axis) for d in format.permutation or () if d != axis]
    place = format.axes(axis)[0]
    return Step(
        [format],
        [MemoryFormat.of_permutation(order)] * len(eqn.outvars),
        lambda x: _compat.bind(eqn, (x,), axis=place),
    )


def _dynamic(eqn: Equation, formats: Formats) -> Step | None:
    operands = 1 if eqn.primitive.name == "dynamic_slice" else 2
    # What is updated is written in place if it stays as it is.
    made = operands == 2 and formats[0] is None
    format = _one_tagged(eqn, formats, 2 if made else 1)
    if format is None:
        return None
    starts = [row_major(0) for _ in eqn.invars[operands:]]

    def emit(*given: Array) -> Sequence[Array]:
        arrays, indices = given[:operands], given[operands:]
        params = {}
        if operands == 1:
            params["slice_sizes"] = _permuted(format, eqn.params["slice_sizes"])
        return _compat.bind(eqn, (*arrays, *_permuted(format, indices)), **params)

    return Step([format] * operands + starts, [format], emit)


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(
        [f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")],
        reduction,
    ),
    "argmax": reduction,
    "argmin": reduction,
    "broadcast_in_dim": broadcast,
    "iota": iota,
    "stack": stack,
    "unstack": unstack,
    "transpose": transpose,
    "permute": transpose,
    "reshape": reshape,
    "squeeze": reshape,
    "expand_dims": reshape,
    "pad": per_axis("padding_config"),
    "tile": per_axis("reps"),
    "slice": per_axis("start_indices", "limit_indices", "strides"),
    "reduce_window_sum": per_axis(*_DILATED),
    "reduce_window_max": per_axis(*_DILATED),
    "reduce_window_min": per_axis(*_DILATED),
    "pool": one_axis("axes"),
    "select_and_scatter_add": per_axis(*_WINDOW, operands=2),
    "select_and_gather_add": per_axis(*_DILATED, operands=2),
    "dynamic_slice": _dynamic,
    "dynamic_update_slice": _dynamic,
    "concatenate": one_axis("dimension"),
    "split": one_axis("axis"),
    "rev": one_axis("dimensions"),
    **dict.fromkeys(
        ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], one_axis("axis")
    ),
    "memory_format": memory_format,
    "optimization_barrier": several,
    **dict.fromkeys(["psum", "psum_invariant", "pmax", "pmin"], over_names),
}
