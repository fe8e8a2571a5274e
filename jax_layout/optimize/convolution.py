# SPDX-License-Identifier: Apache-2.0
"""In which memory format convolutions compute, and what they re-order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_layout import _backends, _compat
from jax_layout.convnet.general_dilated import conv_general_dilated
from jax_layout.convnet.packed import conv_packed_p, packed_format
from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.optimize.rules import Equation, Formats, Step, moves, nbytes
from jax_layout.plain import lax

# The format for a convolution of this logical input (N, C, *spatial) and dtype; None
# to leave it as it is.
Anchor = Callable[[tuple[int, ...], Any], MemoryFormat | None]


def convolution(
    eqn: Equation,
    formats: Formats,
    anchor: Anchor,
    weights: bool,
    asked: MemoryFormat | None,
    pack: bool = False,
    plain: bool = False,
) -> Step | None:
    """Computes in the order that the policy says.

    Args:
      eqn: the equation.
      formats: of its operands.
      anchor: the policy.
      weights: whether weights are wanted in the order of the fast kernels.
      asked: the format that the user has asked for the input.
      pack: whether weights are wanted in the kernels' own order, where they have one.
      plain: whether it stays jax's own, which kernels of ours lower.
    """
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval for v in eqn.invars)
    out = eqn.outvars[0].aval
    if out.ndim < 3 or 0 in (lhs.size, rhs.size, out.size):
        return None
    kernels = convolution_kernels(lhs, rhs)
    if not kernels and max(_groups(eqn)) > 1:
        return None  # XLA's own are no faster in another order, and slower in loops
    gradient = kernels and of_weights(eqn)

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
    own = kernels and not plain
    apply = conv_general_dilated if own else lax.conv_general_dilated
    step = Step(
        [left, right],
        [given],
        lambda x, w: [apply(x, w, dimension_numbers=specs, **params)],
        bytes_moved=0 if kernels else convolution_cost(specs, lhs, rhs, out),
        ours=kernels,
    )
    if not kernels or gradient or not (pack or _in_blocks(formats[1])):
        return step
    roles = tuple(numbers.rhs_spec)
    forward = specs._replace(rhs_spec=tuple(range(rhs.ndim)))
    as_ours = jax.make_jaxpr(
        lambda x, w: apply(x, w, dimension_numbers=forward, **params)
    )(*_physical(step, eqn, roles))
    (*_, last) = as_ours.eqns
    if last.primitive.name != "conv":
        return step
    return _packed(step, eqn, formats[1], last.params, roles, pack)


def _in_blocks(format: MemoryFormat | None) -> bool:
    return format is not None and format.permutation is None


def _physical(step: Step, eqn: Equation, roles: Sequence[int]) -> list[Any]:
    """The input as a step wants it, and the weights as (O, I, *spatial)."""
    x, w = (v.aval for v in eqn.invars[:2])
    assert step.wanted[0] is not None
    shapes = step.wanted[0].physical_shape(x.shape), [w.shape[d] for d in roles]
    return [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]


def _packed(
    step: Step,
    eqn: Equation,
    known: MemoryFormat | None,
    params: Any,
    roles: Sequence[int],
    pack: bool,
) -> Step:
    """The step of a forward pass with weights in blocks, if they are or may be.

    Args:
      step: with weights in an order of the axes.
      eqn: the equation.
      known: format of its weights.
      params: of our forward pass, with weights as (O, I, *spatial).
      roles: which axes of the weights these are.
      pack: whether weights may be wanted in the kernels' own order.
    """
    own = None
    if params["conv"].groups > 1:
        return step
    if known is not None and _in_blocks(known):
        own = known.transposed(roles)
    elif pack:
        own = packed_format(*_physical(step, eqn, roles), **params)
    if own is None or not _in_blocks(own):
        return step

    def emit(*operands: Array) -> list[Array]:
        return [conv_packed_p(*operands, w_format=own, **{"relu": False, **params})]

    x, _, *rest = step.wanted
    back = own.transposed(np.argsort(roles).tolist())
    return dataclasses.replace(step, wanted=[x, back, *rest], emit=emit)


def of_weights(eqn: Equation) -> bool:
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
    "conv_packed": ("xw", "y"),
    "conv_input_grad": ("yw", "x"),
    "conv_weight_grad": ("xy", "w"),
}


def own_convolution(
    eqn: Equation,
    formats: Formats,
    anchor: Anchor,
    weights: bool,
    asked: MemoryFormat | None,
    pack: bool = False,
) -> Step | None:
    """As `convolution`, of the primitives in convolution.py, and `conv_packed`."""
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
        elif eqn.primitive.name == "conv_packed":
            continue
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
    # The bias, and weights that are packed already.
    rest = [row_major(v.aval.ndim) for v in eqn.invars]
    wanted = [placed.get(name, rest[i]) for i, name in enumerate(read)]
    step = Step(
        [*wanted, *rest[2:]],
        [placed[result]],
        lambda *operands: _compat.bind(eqn, operands, conv=changed),
        bytes_moved=own_convolution_cost(eqn, changed),
    )
    if result != "y" or "w" not in placed:
        return step
    logical = dataclasses.replace(changed, w_order=tuple(range(first.ndim)))
    params = {**eqn.params, "conv": logical}
    return _packed(step, eqn, formats[1], params, roles["w"], pack)


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
    o, i, *taps = specs.rhs_spec
    total = _cost(rhs, [*taps, i, o])
    for aval, (n, c, *spatial) in ((lhs, specs.lhs_spec), (out, specs.out_spec)):
        total += _cost(aval, [n, *spatial, c])
    return total


def kernels_cost(eqn: Equation) -> int:
    """Bytes of images that our kernels have re-ordered for a convolution of jax's.

    Those of groups read any order.
    """
    if max(_groups(eqn)) > 1:
        return 0
    numbers = eqn.params["dimension_numbers"]
    (lhs, rhs), out = (v.aval for v in eqn.invars), eqn.outvars[0].aval
    gradient = of_weights(eqn)
    other = (rhs, numbers.rhs_spec) if gradient else (out, numbers.out_spec)
    total = 0
    for aval, (n, c, *spatial) in ((lhs, numbers.lhs_spec), other):
        total += _cost(aval, [c, *spatial, n] if gradient else [n, *spatial, c])
    return total


def _cost(aval: Any, order: Sequence[int]) -> int:
    format = MemoryFormat.of_permutation(order)
    return 2 * nbytes(aval) * moves(row_major(aval.ndim), format, aval.shape)
