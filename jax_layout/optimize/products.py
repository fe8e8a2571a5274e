# SPDX-License-Identifier: Apache-2.0
"""In which memory formats products compute, and which of them are XLA's.

A product reads operands in any order of their axes and writes its result in the order
that is wanted, where a kernel of ours runs it. Where XLA does, a transpose before or
behind it is XLA's to fuse, and it stays `jax.lax.dot_general`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jax_layout import _backends, _compat, choices
from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.formats.pointwise import ELEMENTWISE
from jax_layout.kernel import by_choice
from jax_layout.measured import Work
from jax_layout.optimize.rules import Equation, Formats, Step, nbytes
from jax_layout.plain import lax
from jax_layout.products.gemm import GEMM_DTYPES, gemm_kernel, gemm_p
from jax_layout.products.letters import terms, terms_of

# What XLA computes in one loop with the transposes before and behind it.
_FUSED = ELEMENTWISE | {"concatenate", "pad", "slice", "split", "dynamic_slice", "rev"}
# An operand of so many results, a weight of few rows, is not moved for their sake.
_MOST_MOVED = 4
# XLA reads a matrix in either order: one that is moved for a kernel of ours costs time.
_GAIN_OF_MOVED = 1.5
# In a loop, of operands that a core finds in its own cache: XLA runs what is around a
# product of its own with it. Tables tell of operands that come from memory.
_GAIN_IN_LOOPS = 1.3


def _reordered(term: str, format: MemoryFormat) -> str:
    """The letters of a term's axes in the order of memory."""
    return "".join(term[axis] for axis in format.permutation or ())


def _orders(eqn: Equation, formats: Formats) -> list[MemoryFormat]:
    """The formats of operands, row-major for those that are not orders of the axes."""
    return [
        f if f is not None and f.permutation is not None else row_major(v.aval.ndim)
        for f, v in zip(formats, eqn.invars, strict=True)
    ]


def _physical(v: Any, format: MemoryFormat) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(format.physical_shape(v.aval.shape), v.aval.dtype)


def dot_general(
    eqn: Equation,
    formats: Formats,
    keep: bool = False,
    wish: MemoryFormat | None = None,
    gain: float = 0.0,
    in_loop: bool = False,
    sliced: bool = False,
) -> Step:
    """Contracts the axes where they lie.

    Args:
      eqn: the equation.
      formats: of its operands.
      keep: whether it stays a `jax.lax.dot_general`.
      wish: the format in which the result is wanted. Otherwise it follows the
        operands' order.
      gain: how many times as fast as XLA a kernel of ours has to be, if more than
        the tables ask.
      in_loop: whether this runs again and again.
      sliced: whether a loop slices the larger operand out of a stack.
    """
    wanted = _orders(eqn, formats)
    a, b = (v.aval for v in eqn.invars)
    arrays = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if in_loop and sum(map(nbytes, arrays)) <= _own_cache():
        gain = max(gain, _GAIN_IN_LOOPS)
    x, w, y = terms_of(eqn)
    batch = [label for label in y if label in x and label in w]
    left, right = map(_reordered, (x, w), wanted)
    free = [[i for i in term if i in y and i not in batch] for term in (left, right)]
    # The larger operand's axes stay outside: an image keeps its channels last.
    swap = b.ndim > max(2, a.ndim) and b.size > a.size
    orders = ["".join([*batch, *one, *two]) for one, two in (free, free[::-1])]
    params = eqn.params
    dtype = eqn.outvars[0].aval.dtype
    physical = [_physical(v, f) for v, f in zip(eqn.invars, wanted, strict=True)]
    precision = _compat.canonical_precision(params["precision"])

    def is_ours(order: str) -> bool:
        if keep or params.get("out_sharding") is not None or a.dtype != b.dtype:
            return False
        if {a.dtype.name, dtype.name} - set(GEMM_DTYPES):
            return False
        spec = f"{left},{right}->{order}"
        if not _backends.available("cpu"):
            return False
        kernel = gemm_kernel(
            "cpu", *physical, spec=spec, precision=precision, dtype=dtype
        )
        if kernel is None:
            return False
        own = kernel.parts.gain if sliced and kernel.parts else kernel.gain
        kernel = dataclasses.replace(kernel, gain=max(own, gain))
        return by_choice(kernel) is not None

    order = orders[swap]
    ours = is_ours(order)
    if wish is not None and wish.permutation is not None:
        other = _reordered(y, wish)
        if is_ours(other):
            order, ours = other, True
        elif other in orders:  # XLA's operands change places
            order, ours, swap = other, False, other == orders[1]
    pairs = zip(eqn.invars, wanted, strict=True)
    moved = [v.aval.size for v, f in pairs if not f.row_major]
    if not ours and moved and max(moved) <= _MOST_MOVED * eqn.outvars[0].aval.size:
        # Axes that no kernel contracts in place: their maker may write others.
        least = _GAIN_OF_MOVED if a.ndim == b.ndim == 2 else 1.0
        rows = [row_major(f.ndim) for f in wanted]
        plain = dot_general(eqn, rows, keep, wish, max(gain, least))
        if plain.ours:
            return plain
    given = MemoryFormat.of_permutation([y.index(i) for i in order])
    if ours:
        options = {"alpha": 1, "beta": 0, "out_sharding": None}
        spec = f"{left},{right}->{order}"

        def product(a: Any, b: Any) -> list[Any]:
            return [
                gemm_p(
                    a,
                    b,
                    spec=spec,
                    precision=precision,
                    preferred_element_type=dtype,
                    **options,
                )
            ]

        return Step(wanted, [given], product, ours=True)
    contract = [i for i in x if i in w and i not in y]
    numbers: Any = [
        [[term.index(i) for i in labels] for term in (left, right)]
        for labels in (contract, batch)
    ]
    rest = {k: v for k, v in params.items() if k != "dimension_numbers"}
    if swap:
        numbers = [pair[::-1] for pair in numbers]
        if isinstance(rest["precision"], tuple):
            rest["precision"] = rest["precision"][::-1]
    return Step(
        wanted,
        [given],
        lambda a, b: [lax.dot_general(*((b, a) if swap else (a, b)), numbers, **rest)],
    )


def _own_cache() -> float:
    """Bytes: half of a core's second-level cache."""
    return choices.level2_bytes() / choices.threads() / 2


def own_product(
    eqn: Equation, formats: Formats, wish: MemoryFormat | None = None
) -> Step | None:
    """As `dot_general`, of `gemm` and `linear`: other letters, the same kernel.

    A bias lies along the columns of the result, which therefore stays in its order.
    """
    params = eqn.params
    if params["out_sharding"] is not None or not _backends.available("cpu"):
        return None
    wanted = _orders(eqn, formats)
    x, w, y = terms(params["spec"])
    plain = row_major(len(y))
    given = plain
    if eqn.primitive.name == "gemm" and wish is not None and wish.permutation:
        given = wish
    for result in dict.fromkeys((given, plain)):
        wanted[2:] = [result if v.aval.ndim == len(y) else row_major(v.aval.ndim)
                      for v in eqn.invars[2:]]  # fmt: skip
        orders = map(_reordered, (x, w, y), (*wanted[:2], result))
        spec = "{},{}->{}".format(*orders)
        if _runs(eqn, wanted, spec) or spec == params["spec"]:
            return Step(
                wanted,
                [result] * len(eqn.outvars),
                lambda *operands, spec=spec: _compat.bind(eqn, operands, spec=spec),
            )
    return None


def _runs(eqn: Equation, formats: Sequence[MemoryFormat], spec: str) -> bool:
    """Whether a kernel can run a `gemm` or a `linear` with this specification."""
    names = ("precision", "activation", "aux", "alpha", "beta")
    options = {name: eqn.params[name] for name in names if name in eqn.params}
    dtype = eqn.outvars[0].aval.dtype
    physical = [_physical(v, f) for v, f in zip(eqn.invars, formats, strict=True)]
    if any(v.dtype.name not in GEMM_DTYPES for v in (*physical, eqn.outvars[0].aval)):
        return False
    if eqn.primitive.name == "linear":
        options["bias"] = len(physical) > 2
    return (
        gemm_kernel("cpu", *physical[:2], spec=spec, dtype=dtype, **options) is not None
    )


# --- what XLA does for nothing


def fused_transposes(
    eqns: Sequence[Equation], results: Iterable[Any]
) -> dict[Any, list[tuple[Equation, list[MemoryFormat]]]]:
    """The results of transposes that XLA writes for nothing.

    Those that it reads through in products and elementwise functions, and those of
    what such a one makes for the transpose alone. Reshapes may lie between.

    Returns:
      for each, the products beside it, with the formats in which these would read
      their operands without it.
    """
    readers: dict[Any, list[Any]] = {v: [None] for v in results if _new(v)}
    maker: dict[Any, Any] = {}
    for eqn in eqns:
        for v in filter(_new, eqn.invars):
            readers.setdefault(v, []).append(eqn)
        maker.update((v, eqn) for v in eqn.outvars)

    def fuses(eqn: Any, alike: bool) -> bool:
        """Whether an equation fuses with a transpose; a product with the same axes."""
        name = None if eqn is None else eqn.primitive.name
        return name in _FUSED or (name == "dot_general" and alike)

    def read(v: Any, alike: bool = True) -> bool:
        return all(
            fuses(eqn, alike)
            or (_renames(eqn) and read(eqn.outvars[0], alike and _alike(eqn)))
            for eqn in readers.get(v, [])
        )

    def made(v: Any, alike: bool = True) -> bool:
        eqn = maker.get(v) if _new(v) and len(readers[v]) == 1 else None
        if eqn is None:
            return False
        if _reshapes(eqn):
            return made(eqn.invars[0], alike and _alike(eqn))
        return fuses(eqn, alike)

    def beside(transpose: Equation) -> list[tuple[Equation, list[MemoryFormat]]]:
        out = transpose.outvars[0]
        axes = transpose.params["permutation"]
        found = []
        pending = [transpose]
        while pending:
            for eqn in readers.get(pending.pop().outvars[0], []):
                if _renames(eqn):
                    pending.append(eqn)
                elif fuses(eqn, True) and eqn.primitive.name == "dot_general":
                    plain = [row_major(v.aval.ndim) for v in eqn.invars]
                    read = [
                        f.transposed(axes) if v is out else f
                        for v, f in zip(eqn.invars, plain, strict=True)
                    ]
                    found.append((eqn, read))
        eqn = transpose
        while _renames(eqn) and _new(eqn.invars[0]):
            eqn = maker.get(eqn.invars[0])
        if eqn is not None and eqn.primitive.name == "dot_general":
            found.append((eqn, [row_major(v.aval.ndim) for v in eqn.invars]))
        return found

    return {
        eqn.outvars[0]: beside(eqn)
        for eqn in eqns
        if eqn.primitive.name == "transpose"
        and (read(eqn.outvars[0]) or made(eqn.invars[0]))
    }


def _new(v: Any) -> bool:
    """Whether an operand or a result is a variable."""
    return not isinstance(v, Literal)


def _reshapes(eqn: Any) -> bool:
    """Whether an equation gives the same memory another shape."""
    names = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
    return (
        eqn is not None
        and eqn.primitive.name in names
        and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    )


def _renames(eqn: Any) -> bool:
    return _reshapes(eqn) or (eqn is not None and eqn.primitive.name == "transpose")


def _alike(eqn: Equation) -> bool:
    """Whether operand and result differ by the order of axes, and those of size 1."""
    shapes = (eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
    before, after = (sorted(n for n in shape if n != 1) for shape in shapes)
    return before == after


def attention(eqns: Sequence[Equation]) -> set[Any]:
    """The results of the pairs of products around a softmax that XLA fuses."""
    found: set[Any] = set()
    scores: dict[Any, tuple[Equation, bool]] = {}  # which product's, and behind exp
    for eqn in eqns:
        known = [(v, scores[v]) for v in filter(_new, eqn.invars) if v in scores]
        name = eqn.primitive.name
        if name == "dot_general":
            for _, (first, softmax) in known:
                if softmax and not _attends(first):
                    found |= {first.outvars[0], eqn.outvars[0]}
            if eqn.outvars[0].aval.ndim > 2:
                scores[eqn.outvars[0]] = eqn, False
        elif name in ELEMENTWISE or name == "custom_jvp_call" or _reshapes(eqn):
            for v, (first, softmax) in known:
                if len(eqn.outvars) == 1 and eqn.outvars[0].aval.size == v.aval.size:
                    scores[eqn.outvars[0]] = first, softmax or _exponential(eqn)
    return found


def _exponential(eqn: Equation) -> bool:
    if eqn.primitive.name == "exp":
        return True
    inner = [getattr(j, "jaxpr", j) for j in _jaxprs(eqn.params)]
    return any(_exponential(e) for jaxpr in inner for e in jaxpr.eqns)


def _jaxprs(params: Mapping[str, Any]) -> list[Any]:
    return [params[k] for k in ("call_jaxpr", "jaxpr") if k in params]


def _attends(scores: Equation) -> bool:
    a, b = (v.aval for v in scores.invars)
    return attends(a, b, scores.params["dimension_numbers"])


def attends(a: Any, b: Any, dimension_numbers: Any) -> bool:
    """Whether kernels of ours, one for each product, are worth cutting XLA's fusion.

    Args:
      a: the first operand of the product before the softmax.
      b: the second.
      dimension_numbers: the product's, as in `jax.lax.dot_general`.
    """
    if choices.profile() == "amx":
        return True
    (summed, _), (batch, _) = dimension_numbers
    extents = [math.prod(a.shape[i] for i in axes) for axes in (batch, summed)]
    rows, columns = (v.size // math.prod(extents) for v in (a, b))
    sizes = (extents[0], rows, columns, extents[1])
    if 0 in sizes:
        return False
    work = Work(f"attention {a.dtype.name}", sizes)
    return choices.choose(work) is not None
