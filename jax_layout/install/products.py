# SPDX-License-Identifier: Apache-2.0
"""What lowers products, and the transposes before and behind them.

A product of ours is followed by a transpose of the identity, which XLA drops: what
stands for the product once its own reader turns out to want another order, or XLA's
fusion with a softmax, of which nothing is known yet when the product is lowered.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.lax import DotAlgorithm, DotAlgorithmPreset

from jax_layout import _compat, choices, op, producers
from jax_layout.install.record import Lowered
from jax_layout.install.rules import Context, Program, array, method, stays_in_cache
from jax_layout.optimize.products import attends
from jax_layout.plain import jnp
from jax_layout.products.as_they_lie import is_large
from jax_layout.products.gemm import GEMM_DTYPES
from jax_layout.products.in_loops import goes_with_others
from jax_layout.products.letters import letters_of, rows_of, untransposed
from jax_layout.stacks import part_of

ir = mlir.ir


@dataclasses.dataclass
class Product:
    """A product of ours in a program.

    Attributes:
      call: lowers it with its result's axes in this order, by their letters, to a
        value; None if no kernel is chosen for that.
      order: the letters in the order that is known to be read.
      standing: what stands for it, in the order of the program, and in which order of
        letters each does; jax's own first.
      plain: lowers it as jax does.
      attends: whether it is ours also before a softmax and another product.
      lowered: what was recorded.
      block: the body of the loop, if it is XLA's when another there is.
    """

    call: Callable[[str], Any]
    order: str
    standing: list[tuple[Any, str]]
    plain: Callable[[], Any]
    attends: Callable[[], bool]
    lowered: Lowered
    block: Any = None


def dot_general(
    program: Program,
    plain: Callable[..., Any],
    ctx: Context,
    lhs: Any,
    rhs: Any,
    **params: Any,
) -> Sequence[Any] | None:
    """Reads operands through transposes, and those that were widened as they were.

    In a loop, products of few rows are all ours or all XLA's, if none is large.
    """
    a, b = ctx.avals_in
    letters = letters_of(params["dimension_numbers"], a.ndim, b.ndim)
    if not goes_with_others(letters, a, b) or "while" not in _compat.inside():
        return _ours(program, plain, ctx, lhs, rhs, **params)
    block = ir.InsertionPoint.current.block
    if is_large(a, b):
        program.with_large_products.append(block)
    if block in program.with_large_products:
        return _ours(program, plain, ctx, lhs, rhs, **params)
    if block in program.with_products_of_xla:
        return None
    found = _ours(program, plain, ctx, lhs, rhs, **params)
    if found is not None:
        program.products[found[0]].block = block
        return found
    program.with_products_of_xla.append(block)
    for value, product in [*program.products.items()]:
        if product.block is not None and product.block == block:
            _give_back(program, value)
    return None


def _ours(
    program: Program,
    plain: Callable[..., Any],
    ctx: Context,
    lhs: Any,
    rhs: Any,
    *,
    dimension_numbers: Any,
    precision: Any,
    **params: Any,
) -> Sequence[Any] | None:
    (a, b), (out,) = ctx.avals_in, ctx.avals_out
    if a.dtype != b.dtype or {a.dtype.name, out.dtype.name} - set(GEMM_DTYPES):
        return None
    if a.ndim + b.ndim > len(string.ascii_letters) or not (a.size and b.size):
        return None
    if isinstance(precision, DotAlgorithm | DotAlgorithmPreset):
        return None  # jax knows which of them it has, and refuses the others
    x, w, y = letters_of(dimension_numbers, a.ndim, b.ndim)
    sizes = dict(zip(x + w, a.shape + b.shape, strict=True))
    summed = math.prod(sizes[label] for label in x if label not in y)
    alone = math.prod(sizes[label] for label in y if not (label in x and label in w))
    # XLA fuses products without a sum, and sums of vectors, with what is around.
    if 1 in (summed, alone) and not choices.are_all_ours():
        return None
    left, right = _read(lhs, a, x), _read(rhs, b, w)
    stays = stays_in_cache(ctx) and not any(
        _is_streamed(ctx, *one) for one in (left, right)
    )
    if stays or _fuses(program, ctx, lhs, rhs):
        return None
    # Of a matrix that XLA computes for a vector's sake, it writes nothing.
    free = rows_of((x, w), a, b)
    matrix = lhs if free[1] == 1 else rhs if free[0] == 1 else None
    passes = 2 if matrix is not None and producers.is_computed(matrix) else 1
    given = [(left, right)]
    narrow = [_narrowed(*side) for side in (left, right)]
    if None not in narrow and _compat.is_default_precision(precision):
        given.insert(0, tuple(narrow))

    methods: list[str] = []

    def call(order: str) -> Any:
        result = array([sizes[label] for label in order], out.dtype)
        for one, two in given:
            inner = ctx.replace(avals_in=(one[1], two[1]), avals_out=(result,))
            options = {
                "spec": f"{one[2]},{two[2]}->{order}",
                "alpha": 1,
                "beta": 0,
                "precision": _compat.canonical_precision(precision),
                "preferred_element_type": out.dtype,
                "out_sharding": None,
            }
            operands = one[0], two[0]
            kernel = op.chosen_kernel(
                "gemm", "cpu", inner, *operands, passes=passes, **options
            )
            if kernel is not None:
                methods.append(method(kernel))
                return op.custom_call("gemm", kernel, inner, *operands)[0]
        return None

    value = call(y)
    if value is None:
        return None
    moved = sum(2 * aval.size * aval.dtype.itemsize
                for (read, aval, _), v in ((left, lhs), (right, rhs))
                if read is not v)  # fmt: skip
    lowered = program.log("dot_general", ctx, methods[0], moved)
    stands_for = _identity(value, y)
    program.products[stands_for] = Product(
        call=call,
        order=y,
        standing=[(stands_for, y)],
        plain=lambda: plain(ctx, *map(producers.for_xla, (lhs, rhs)))[0],
        attends=lambda: attends(a, b, dimension_numbers),
        lowered=lowered,
    )
    return [stands_for]


def _read(value: Any, aval: Any, term: str) -> tuple[Any, Any, str]:
    """What a value is a transpose of, and the letters of its axes."""
    while (axes := producers.permuted(value)) is not None:
        value = producers.maker(value).operands[0]
        term = untransposed(term, axes)
    shape = tuple(ir.RankedTensorType(value.type).shape)
    return value, array(shape, aval.dtype), term


def _is_streamed(ctx: Context, value: Any, aval: Any, _: str) -> bool:
    """Whether a loop reads another matrix of a stack in each step, each of them larger
    than a core's second-level cache. On less, XLA may run a loop without calls faster.
    """
    if not is_large(aval):
        return False
    part = part_of(value, ctx)
    return part is not None and not part.is_known()


def _narrowed(value: Any, aval: Any, term: str) -> Any:
    """The same of what a value was widened from, through transposes; None if not."""
    narrow = producers.widened_from(value)
    if narrow is None:
        return None
    element = str(ir.RankedTensorType(narrow.type).element_type)
    dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16}[element]
    return _read(narrow, array(aval.shape, dtype), term)


def _fuses(program: Program, ctx: Context, lhs: Any, rhs: Any) -> bool:
    """Whether XLA makes one of this product, a softmax and the product before that."""

    def called(call: Any) -> Iterator[str]:
        function = producers.called(call, ctx.module_context.symbol_table)
        for region in function.regions if function is not None else ():
            for block in region.blocks:
                yield from (operation.operation.name for operation in block.operations)

    found = False
    for value in producers.through_softmax((lhs, rhs), called):
        product = program.products.get(value)
        if product is None:
            found |= producers.maker(value).name == "stablehlo.dot_general"
        elif not product.attends():
            found = True
            _give_back(program, value)
    return found


def _give_back(program: Program, value: Any) -> None:
    """Makes a product of ours XLA's."""
    mine = program.products.pop(value)
    _, order = mine.standing[0]
    _replace(mine, mine.plain, order)
    program.instead(mine.lowered, dataclasses.replace(mine.lowered, runs="XLA"))


def _identity(value: Any, order: str) -> Any:
    return stablehlo.transpose(value, ir.DenseI64ArrayAttr.get(list(range(len(order)))))


def _replace(product: Product, make: Callable[[], Any], order: str) -> Any:
    """Has what stands for a product be transposes of another value, made before it."""
    first = producers.maker(product.standing[0][0])
    with ir.InsertionPoint(first), first.location:
        made = make()
    for value, letters in product.standing if made is not None else ():
        axes = ir.DenseI64ArrayAttr.get([order.index(letter) for letter in letters])
        operation = producers.maker(value)
        operation.operands[0] = made
        operation.attributes["permutation"] = axes
    return made


# --- transposes


def transpose(
    program: Program,
    plain: Callable[..., Any],
    ctx: Context,
    x: Any,
    *,
    permutation: Any,
) -> Sequence[Any] | None:
    """A product that is written in that order; or a permute, where it pays alone."""
    axes = tuple(int(axis) for axis in permutation)
    if x in program.products:
        written = _written(program, ctx, x, axes)
        if written is None:
            _give_back(program, x)  # to XLA, which writes any order
        return written
    if producers.permuted(x) is not None or producers.is_fused(x):
        return None
    kernel = op.chosen_kernel("permute", "cpu", ctx, x, passes=2, axes=axes)
    if kernel is None:
        return None
    program.log("transpose", ctx, method(kernel))
    return op.custom_call("permute", kernel, ctx, x)


def _written(
    program: Program, ctx: Context, x: Any, axes: Sequence[int]
) -> Sequence[Any] | None:
    product = program.products[x]
    order = "".join(product.order[axis] for axis in axes)
    value = _replace(product, lambda: product.call(order), order)
    if value is None:
        return None
    # Which may be transposed again, back perhaps.
    stands_for = _identity(value, order)
    product.standing.append((stands_for, order))
    program.products[stands_for] = dataclasses.replace(product, order=order)
    del program.products[x]
    (aval,) = ctx.avals_out
    program.log("transpose", ctx, "ours", 2 * aval.size * aval.dtype.itemsize)
    return [stands_for]
