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
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array, lax

from jax_layout import _backends, _compat
from jax_layout.conv_general_dilated import conv_general_dilated
from jax_layout.memory_format import MemoryFormat, convert, from_atoms, row_major
from jax_layout.permute import permute

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
      emit_in: the only result, in the format that is asked for, of operands that
        are still to be asked for a format: `emit_in(format, *values)`.
      bytes_moved: what the operator re-orders inside, beyond its operands.
    """

    wanted: Sequence[MemoryFormat | None]
    given: Sequence[MemoryFormat | None]
    emit: Callable[..., Sequence[Array]] | None = None
    emit_in: Callable[..., Array] | None = None
    bytes_moved: int = 0


# The format for a convolution of this logical input (N, C, *spatial) and dtype; None
# to leave it as it is.
Anchor = Callable[[tuple[int, ...], Any], MemoryFormat | None]
Rule = Callable[[Equation, Formats], Step | None]


def barrier(eqn: Equation) -> Step:
    """What is done with equations that no rule is known for."""
    return Step(
        [row_major(v.aval.ndim) if is_array(v) else None for v in eqn.invars],
        [row_major(v.aval.ndim) if is_array(v) else None for v in eqn.outvars],
        lambda *operands: _compat.bind(eqn, operands),
    )


def nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


@functools.lru_cache(maxsize=4096)
def moves(source: MemoryFormat, target: MemoryFormat, shape: tuple[int, ...]) -> bool:
    """Whether a conversion moves anything: axes of size 1 have no place in memory."""
    return source != target and (
        source.without_units(shape) != target.without_units(shape)
    )


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

    def emit_in(format: MemoryFormat, *values: Any) -> Array:
        plain = row_major(format.ndim)
        chosen = plain if format.permutation is None else format
        given = [
            value.get(chosen if array else row_major(0))
            for value, array in zip(values, whole, strict=True)
        ]
        return convert(_compat.bind(eqn, given)[0], chosen, format)

    wanted = [None if array else row_major(0) for array in whole]
    return Step(wanted, [None], emit_in=emit_in)


def _permuted(format: MemoryFormat, values: Sequence[Any]) -> tuple[Any, ...]:
    """A parameter with one entry for each logical axis, for the physical ones."""
    return tuple(values[axis] for axis in format.permutation or ())


def _one_tagged(
    eqn: Equation, formats: Formats, operands: int = 1
) -> MemoryFormat | None:
    """The permutation that the first operands, of one rank, are all to have."""
    first = eqn.invars[:operands]
    format = None
    size = -1
    for v, f in zip(first, formats, strict=False):
        if f is not None and f.permutation and not f.row_major and v.aval.size > size:
            format, size = f, v.aval.size
    return format


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
    plain = row_major(operand.ndim)
    dims = eqn.params["broadcast_dimensions"]

    def emit_in(format: MemoryFormat, value: Any) -> Array:
        x, order = value.get(plain), format.permutation
        if order is None:
            return format.pack(lax.broadcast_in_dim(x, result.shape, dims))
        places = [order.index(d) for d in dims]
        axes = sorted(range(len(dims)), key=places.__getitem__)
        return lax.broadcast_in_dim(
            permute(x, axes) if axes != sorted(axes) else x,
            format.physical_shape(result.shape),
            [places[i] for i in axes],
        )

    return Step([plain], [None], emit_in=emit_in)


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

    return Step([], [None], emit_in=emit_in)


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
    if format is None:
        format = row_major(len(axes))
    return Step([format], [format.transposed(axes)], lambda x: [x])


def reshape(eqn: Equation, formats: Formats) -> Step | None:
    operand, result = eqn.invars[0].aval, eqn.outvars[0].aval
    if len(eqn.invars) > 1:
        return None  # dynamic shapes
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        return None
    format = formats[0]
    if format is None or format.row_major or operand.size == 0:
        return None
    regrouped = regroup(format, operand.shape, result.shape)
    if regrouped is None:
        return None
    shape = regrouped.physical_shape(result.shape)
    return Step([format], [regrouped], lambda x: [lax.reshape(x, shape)])


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


def dot_general(eqn: Equation, formats: Formats, keep: bool) -> Step | None:
    """Contracts the axes where they lie; the result's follow the operands' order.

    Args:
      eqn: the equation.
      formats: of its operands.
      keep: whether it stays a `jax.lax.dot_general`.
    """
    from jax_layout.einsum import dot_general as product

    if all(format is None or format.row_major for format in formats):
        return None
    wanted = [
        f if f is not None and f.permutation is not None else row_major(v.aval.ndim)
        for f, v in zip(formats, eqn.invars, strict=True)
    ]
    contract, batch = eqn.params["dimension_numbers"]
    numbers: Any = [
        [[f.axes(d)[0] for d in dims] for f, dims in zip(wanted, pair, strict=True)]
        for pair in (contract, batch)
    ]
    # The result's axes: batch, then what is left of either, in its memory's order.
    axes = len(batch[0])
    free: list[list[int]] = []
    for f, used_c, used_b in zip(wanted, contract, batch, strict=True):
        used = set(used_c) | set(used_b)
        left = [d for d in range(f.ndim) if d not in used]
        order = [d for d in f.permutation or () if d not in used]
        free.append([axes + left.index(d) for d in order])
        axes += len(left)
    params = {k: v for k, v in eqn.params.items() if k != "dimension_numbers"}
    apply = lax.dot_general if keep else product
    # The larger operand's axes stay outside: an image keeps its channels last.
    a, b = (v.aval for v in eqn.invars)
    swap = b.ndim > max(2, a.ndim) and b.size > a.size
    if swap:
        numbers = [pair[::-1] for pair in numbers]
        free.reverse()
        if isinstance(params["precision"], tuple):
            params["precision"] = params["precision"][::-1]
    return Step(
        wanted,
        [MemoryFormat.of_permutation([*range(len(batch[0])), *free[0], *free[1]])],
        lambda a, b: [apply(*((b, a) if swap else (a, b)), numbers, **params)],
    )


def convolution(
    eqn: Equation,
    formats: Formats,
    anchor: Anchor,
    weights: bool,
    asked: MemoryFormat | None,
) -> Step | None:
    """Computes in the order that the policy says.

    Args:
      eqn: the equation.
      formats: of its operands.
      anchor: the policy.
      weights: whether weights are wanted in the order of the fast kernels.
      asked: the format that the user has asked for the input.
    """
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval for v in eqn.invars)
    out = eqn.outvars[0].aval
    if out.ndim < 3 or 0 in (lhs.size, rhs.size, out.size):
        return None
    kernels = convolution_kernels(lhs, rhs)
    if not kernels and max(_groups(eqn)) > 1:
        return None  # XLA's own are no faster in another order, and slower in loops
    gradient = kernels and _of_weights(eqn)

    image = [lhs.shape[d] for d in numbers.lhs_spec]
    if gradient:
        image[:2] = image[1::-1]
    order = _order(anchor, image, lhs.dtype, asked, numbers.lhs_spec)
    if order is None:
        return None

    def preferred(spec: Sequence[int], swapped: bool) -> MemoryFormat:
        roles = [spec[1], spec[0], *spec[2:]] if swapped else spec
        return _by_roles(order, roles)

    wanted, hwio = _same_innermost, _hwio
    known = formats[1]
    if kernels:
        left = wanted(formats[0], preferred(numbers.lhs_spec, gradient))
    else:
        left = preferred(numbers.lhs_spec, False)
    given = preferred(numbers.out_spec, False)
    if gradient:
        right = wanted(known, preferred(numbers.rhs_spec, True))
        given = hwio([*numbers.out_spec[1::-1], *numbers.out_spec[2:]])
        given = given if weights else row_major(out.ndim)
    elif (
        weights
        and order[-1] == 1
        and not (kernels and _channels_last(known, numbers.rhs_spec))
    ):
        right = hwio(numbers.rhs_spec)
    elif known is None or known.permutation is None:
        right = row_major(rhs.ndim)
    else:
        right = known

    def on_axes(format: MemoryFormat, spec: Sequence[int]) -> tuple[int, ...]:
        return tuple(format.axes(d)[0] for d in spec)

    specs = lax.ConvDimensionNumbers(
        on_axes(left, numbers.lhs_spec),
        on_axes(right, numbers.rhs_spec),
        on_axes(given, numbers.out_spec),
    )
    params = {k: v for k, v in eqn.params.items() if k != "dimension_numbers"}
    apply = conv_general_dilated if kernels else lax.conv_general_dilated
    return Step(
        [left, right],
        [given],
        lambda x, w: [apply(x, w, dimension_numbers=specs, **params)],
        bytes_moved=0 if kernels else convolution_cost(specs, lhs, rhs, out),
    )


def _of_weights(eqn: Equation) -> bool:
    """Whether a convolution is the gradient of another's weights.

    jax writes it with the cotangent as kernel, and with channels and batch, in that
    order, in the places of batch and channels. Our kernels know it again.
    """
    numbers = eqn.params["dimension_numbers"]
    swapped = all(spec[0] > spec[1] for spec in (numbers.lhs_spec, numbers.rhs_spec))
    return swapped or eqn.params["batch_group_count"] > 1


def _order(
    anchor: Anchor,
    image: Sequence[int],
    dtype: Any,
    asked: MemoryFormat | None,
    roles: Sequence[int],
) -> tuple[int, ...] | None:
    """Which of (N, C, *spatial) each physical axis is to be; None to leave them.

    Args:
      anchor: the policy.
      image: logical shape of the input.
      dtype: its dtype.
      asked: the format that the user has asked for the input.
      roles: axes of the input that are (N, C, *spatial).
    """
    if asked is not None and asked.permutation is not None:
        return tuple(list(roles).index(axis) for axis in asked.permutation)
    choice = anchor(tuple(image), dtype)
    return None if choice is None else choice.permutation


def _by_roles(order: Sequence[int], roles: Sequence[int]) -> MemoryFormat:
    return MemoryFormat.of_permutation([roles[i] for i in order])


def _same_innermost(format: MemoryFormat | None, best: MemoryFormat) -> MemoryFormat:
    """The format itself, if it has the same axis innermost as the best one."""
    if format is None or format.permutation is None or best.permutation is None:
        return best
    return format if format.permutation[-1] == best.permutation[-1] else best


def _hwio(roles: Sequence[int]) -> MemoryFormat:
    """Of weights whose axes (O, I, *spatial) are these."""
    return MemoryFormat.of_permutation([*roles[2:], roles[1], roles[0]])


def _channels_last(format: MemoryFormat | None, roles: Sequence[int]) -> bool:
    """Whether the channels of weights, those in or those out, lie innermost."""
    order = None if format is None else format.permutation
    return order is not None and order[-1] in roles[:2]


# Our own convolutions: what they read, and what they give.
OWN_CONVOLUTIONS = {
    "conv": ("xw", "y"),
    "conv_fused": ("xw", "y"),
    "conv_input_grad": ("yw", "x"),
    "conv_weight_grad": ("xy", "w"),
}


def own_convolution(
    eqn: Equation,
    formats: Formats,
    anchor: Anchor,
    weights: bool,
    asked: MemoryFormat | None,
) -> Step | None:
    """As `convolution`, of the primitives in convolution.py."""
    conv = eqn.params["conv"]
    read, result = OWN_CONVOLUTIONS[eqn.primitive.name]
    first = eqn.invars[0].aval
    if conv.x_block > 1 or conv.y_block > 1 or not 3 <= first.ndim <= 5:
        return None
    roles = {name: conv.order(name) for name in "xwy"}
    image = [first.shape[d] for d in roles[read[0]]]
    order = _order(anchor, image, first.dtype, asked, roles[read[0]])
    if order is None:
        return None
    placed: dict[str, MemoryFormat] = {}
    for name, known in zip(read, formats, strict=False):
        if name != "w":
            placed[name] = _same_innermost(known, _by_roles(order, roles[name]))
        elif weights and order[-1] == 1 and not _channels_last(known, roles["w"]):
            placed[name] = _hwio(roles["w"])
        else:
            plain = row_major(first.ndim)
            placed[name] = known if known is not None and known.permutation else plain
    if result != "w":
        placed[result] = _by_roles(order, roles[result])
    else:
        placed[result] = _hwio(roles["w"]) if weights else row_major(first.ndim)
    orders = {
        f"{name}_order": tuple(format.axes(d)[0] for d in roles[name])
        for name, format in placed.items()
    }
    changed = dataclasses.replace(conv, **orders)
    rest = [row_major(v.aval.ndim) for v in eqn.invars[2:]]  # the bias
    return Step(
        [*(placed[name] for name in read), *rest],
        [placed[result]],
        lambda *operands: _compat.bind(eqn, operands, conv=changed),
        bytes_moved=own_convolution_cost(eqn, changed),
    )


def _groups(eqn: Equation) -> tuple[int, int]:
    return eqn.params["feature_group_count"], eqn.params["batch_group_count"]


def convolution_kernels(lhs: Any, rhs: Any) -> bool:
    """Whether our kernels compute a convolution, whatever the order of its axes."""
    return (
        lhs.dtype == rhs.dtype
        and lhs.dtype.name in ("float32", "bfloat16", "float16")
        and 1 <= lhs.ndim - 2 <= 3
        and _backends.available("cpu")
    )


def own_convolution_cost(eqn: Equation, conv: Any) -> int:
    """Bytes that our kernels re-order: x and y, if the channels are not innermost."""
    read, result = OWN_CONVOLUTIONS[eqn.primitive.name]
    total = 0
    for v, name in zip((*eqn.invars[:2], *eqn.outvars), read + result, strict=True):
        if name != "w" and conv.block(name) == 1:
            n, channels, *space = conv.order(name)
            total += (
                2
                * nbytes(v.aval)
                * moves(
                    row_major(v.aval.ndim),
                    MemoryFormat.of_permutation([n, *space, channels]),
                    v.aval.shape,
                )
            )
    return total


def convolution_cost(
    specs: lax.ConvDimensionNumbers, lhs: Any, rhs: Any, out: Any
) -> int:
    """Bytes that XLA:CPU re-orders for a convolution: its own is NHWC and HWIO."""
    arrays = [(lhs, specs.lhs_spec), (out, specs.out_spec), (rhs, specs.rhs_spec)]
    total = 0
    for aval, (first, second, *spatial) in arrays:
        order = [*spatial, second, first] if aval is rhs else [first, *spatial, second]
        source = row_major(aval.ndim)
        total += (
            2
            * nbytes(aval)
            * moves(source, MemoryFormat.of_permutation(order), aval.shape)
        )
    return total


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
    format = _one_tagged(eqn, formats, operands)
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


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt
ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf
erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p
logistic lt max min mul name ne neg nextafter not or polygamma population_count pow
pvary real reduce_precision rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
tan tanh xor
""".split()

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
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
    "slice": per_axis("start_indices", "limit_indices", "strides"),
    "reduce_window_sum": per_axis(*_DILATED),
    "reduce_window_max": per_axis(*_DILATED),
    "reduce_window_min": per_axis(*_DILATED),
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
