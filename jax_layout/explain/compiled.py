# SPDX-License-Identifier: Apache-2.0
"""What a compiled program moves, who asked for it, and what its products run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_layout.explain import advice, hlo
from jax_layout.explain.hlo import Instruction, Module
from jax_layout.explain.places import Place, origin
from jax_layout.explain.products import consumer, core_of, implementation_of, producer
from jax_layout.explain.report import Advice, Conversion, Product, Reorder, Value
from jax_layout.formats.memory_format import MemoryFormat

_STILL = frozenset("parameter transpose copy bitcast reshape".split())
_CONVERTING = _STILL | {"convert", "slice", "dynamic-slice"}


@dataclasses.dataclass(frozen=True)
class Findings:
    """All of a compiled program that goes into a `Report`."""

    reorders: Sequence[Reorder]
    conversions: Sequence[Conversion]
    products: Sequence[Product]
    values: Sequence[Value]
    warnings: Sequence[Advice]
    bytes: int
    flops: int


def analyse(
    module: Module,
    platform: str,
    transposes: Mapping[Any, str],
    faster: advice.Faster,
    bandwidth: float,
    peak: float,
) -> Findings:
    """Finds the reorders, conversions and products of a program.

    Args:
      module: the program.
      platform: "cpu" or "cuda".
      transposes: the program's own: source lines by extents of the operand and axes,
        and by source line and number of elements.
      faster: why products of plain jax would be ours, by source line and module.
      bandwidth: bytes per second.
      peak: flops per second.
    """
    reorders: list[Reorder] = []
    conversions: list[Conversion] = []
    products: list[Product] = []
    warnings: list[Advice] = []
    copied: list[tuple[int, Advice]] = []
    total = 0
    for computation, (trips, known, _) in module.trips.items():
        for i in module.computations[computation]:
            place = Place(module, computation, i)
            size = hlo.traffic(module, computation, i)
            total += trips * size
            copied += [(trips * n, a) for n, a in advice.of_update(place)]
            kind, fused = reorder_kind(module, computation, i)
            dtype = "" if kind else _converted(place)
            core = core_of(place)
            if not (kind or dtype or core):
                continue
            source, scope = origin(place)
            often: dict[str, Any] = {"trips": trips, "trips_known": known}
            if core:
                implementation, detail = implementation_of(place, core, platform)
                product = Product(
                    op=i.name,
                    kind=core.kind,
                    implementation=implementation,
                    detail=detail,
                    **often,
                    source=source,
                    module=scope,
                )
                products.append(product)
                warnings += advice.of_product(place, core, product, platform)
            sizes: dict[str, Any] = often | {
                "op": i.name,
                "shape": str(i.shapes[0]),
                "bytes": size,
            }
            if kind:
                cause, line = _cause(place, kind, transposes)
                reorder = Reorder(
                    stage="hlo",
                    kind=kind,
                    **sizes,
                    fused=fused,
                    share=None,
                    source=line or source,
                    cause=cause,
                    module=scope,
                )
                reorders.append(reorder)
                warnings += advice.of_reorder(place, reorder, platform, faster)
            elif dtype:
                conversion = Conversion(
                    **sizes,
                    dtype=dtype,
                    share=0,
                    source=source,
                    cause=_converts_for(place),
                    module=scope,
                )
                conversions.append(conversion)
                warnings += advice.of_conversion(place, conversion, faster)
    warnings += [a for n, a in copied if n > advice.NOTICED * total]
    flops = hlo.total_flops(module)
    whole = bandwidth * max(flops / peak, total / bandwidth)
    return Findings(
        [dataclasses.replace(r, share=r.total_bytes / whole) for r in reorders],
        [dataclasses.replace(c, share=c.total_bytes / whole) for c in conversions],
        products,
        list(_values(module)),
        warnings,
        total,
        flops,
    )


def moved(module: Module) -> int:
    """Bytes that all reorders and conversions of a program read and write."""
    return sum(
        trips.times * hlo.traffic(module, computation, i)
        for computation, trips in module.trips.items()
        for i in module.computations[computation]
        if reorder_kind(module, computation, i)[0]
        or _converted(Place(module, computation, i))
    )


def _values(module: Module) -> Iterator[Value]:
    body = module.computations[module.entry]
    inputs = [i for i in body if i.opcode == "parameter"]
    results = [i for i in body if i.root]
    for i in (*sorted(inputs, key=lambda i: int(i.literal)), *results):
        role = "argument" if i.opcode == "parameter" and not i.root else "result"
        for n, shape in enumerate(i.shapes):
            if len(shape.dims) > 1:
                format = MemoryFormat.of_permutation(shape.order)
                name = i.op_name if role == "argument" else str(n)
                text = "row-major" if format.row_major else str(format)
                yield Value(role, name, str(shape), text)


def reorder_kind(module: Module, computation: str, i: Instruction) -> tuple[str, bool]:
    """What kind of `Reorder` an instruction is, and whether arithmetic is in it.

    Returns:
      "" if it is none.
    """
    names = module.names[computation]
    if i.attribute("custom_call_target") == "jax_layout_permute":
        return "permute", False
    if i.opcode in ("transpose", "copy", "copy-start") and i.operands[0] in names:
        if i.shapes[0].size <= 1:
            return "", False  # a loop's counter
        if hlo.moves(i, names[i.operands[0]].shapes[0]):
            return ("transpose" if i.opcode == "transpose" else "relayout"), False
        return ("" if i.opcode == "transpose" else "copy"), False
    # A custom fusion is a library's kernel, which reads its operands as they lie.
    if i.opcode != "fusion" or i.attribute("kind") == "kCustom":
        return "", False
    parts = module.fused(i)
    inside = module.names[i.called("calls")[0]]
    if any(p.opcode in ("dot", "convolution") for p in parts):
        return "", False
    pure = all(p.opcode in _STILL for p in parts)
    moved = [p for p in parts if p.opcode in ("transpose", "copy")]
    if any(hlo.moves(p, inside[p.operands[0]].shapes[0]) for p in moved):
        turned = any(p.opcode == "transpose" for p in moved)
        return ("transpose" if turned else "relayout"), not pure
    copied = pure and i.shapes[0].size > 1 and any(p.opcode == "copy" for p in moved)
    return ("copy" if copied else ""), False


def _converted(place: Place) -> str:
    """The dtype of the array that an instruction writes in another one, and no more.

    Returns:
      "" if it is no conversion.
    """
    module, i = place.module, place.at
    names = module.names[place.computation]
    if len(i.shapes) != 1 or i.shapes[0].size <= 1:
        return ""
    if i.opcode == "convert":
        return names[i.operands[0]].shapes[0].dtype if i.operands[0] in names else ""
    if i.opcode != "fusion" or i.attribute("kind") == "kCustom":
        return ""
    arrays = [p for p in module.fused(i) if any(s.size > 1 for s in p.shapes)]
    if not {p.opcode for p in arrays} <= _CONVERTING:
        return ""
    read = {p.shapes[0].dtype for p in arrays if p.opcode == "parameter"}
    return next(iter(sorted(read - {i.shapes[0].dtype})), "")


# --- who asked for a reorder


def _cause(place: Place, kind: str, transposes: Mapping[Any, str]) -> tuple[str, str]:
    """Who asked for it, and the program's line where it is known to be its own."""
    module, i = place.module, place.at
    if kind == "permute":
        return "a permute of jax_layout", ""
    if kind == "copy":
        return ("loop carry" if _carried(place) else "XLA's copy"), ""
    names = module.names[i.called("calls")[0] if i.opcode == "fusion" else place[1]]
    for part in place.parts:
        if part.opcode == "transpose":
            x = names[part.operands[0]].shapes[0]
            if line := transposes.get((x.dims, part.integers("dimensions"))):
                return "the program's transpose", line
    if any(part.op_name.endswith("/transpose") for part in place.parts):
        return "the program's transpose", ""
    found = consumer(place) or producer(place)
    if found:
        return f"XLA's layout for the {found.kind}", ""
    if (place.line, i.shapes[0].size) in transposes:
        return "the program's transpose", ""
    if _carried(place):
        return "loop carry", ""
    if place.computation == module.entry and (i.root or place.argument):
        return "entry layout", ""
    return "XLA", ""


def _carried(place: Place) -> bool:
    """Whether it is what a loop or branch is given, or hands on."""
    inside = place.inside
    for user in place.users():
        if user.at.opcode == "tuple":
            if user.at.root and inside:
                return True
            takers = {taker.at.opcode for taker in user.users()}
            if takers & {"while", "conditional", "call"}:
                return True
    return bool(place.at.root and inside)


def _converts_for(place: Place) -> str:
    """Who asked for a conversion."""
    if any(p.op_name.endswith("/convert_element_type") for p in place.parts):
        return "the program's conversion"
    found = consumer(place)
    return f"XLA's dtype for the {found.kind}" if found else "XLA"
