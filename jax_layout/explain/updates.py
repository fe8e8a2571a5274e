# SPDX-License-Identifier: Apache-2.0
"""Arrays that are written in part, and those that are copied whole for that."""

from __future__ import annotations

from typing import NamedTuple

from jax_layout.explain.hlo import Instruction
from jax_layout.explain.places import Place

# Which operand is written to the first.
_PARTS = {"dynamic-update-slice": 1, "scatter": 2}
_NAMES = frozenset("parameter bitcast reshape constant".split())
_SLICES = frozenset(("dynamic-slice", "slice"))


class Copied(NamedTuple):
    """An array that is copied, for a part of it to be written."""

    copy: Place
    source: Place
    part: Instruction
    sliced: bool  # out of a whole, to which it goes back


def copied_for(place: Place) -> Copied | None:
    """What an instruction writes a part of, if that is a copy made for it."""
    found = _update(place)
    if found is None:
        return None
    copy, part = found
    while copy.at.opcode == "bitcast" and copy.operands():
        copy = copy.operands()[0]
    codes = _copies(copy)
    if not codes or 2 * part.shapes[0].bytes > copy.at.shapes[0].bytes:
        return None
    back = any(map(_update, place.users()))
    if codes & _SLICES and not back:
        return None  # what is made of a slice is an array of its own
    source = copy.operands()[0]
    while (more := _copies(source)) and source.operands():
        codes, source = codes | more, source.operands()[0]
    return Copied(copy, source, part, back and bool(codes & _SLICES))


def _copies(place: Place) -> set[str]:
    """The instructions that a copy or slice consists of; of others none."""
    parts = place.module.fused(place.at) or (place.at,)
    codes = {i.opcode for i in parts if any(s.size > 1 for s in i.shapes)} - _NAMES
    return codes if codes <= _SLICES | {"copy"} and place.operands() else set()


def _update(place: Place) -> tuple[Place, Instruction] | None:
    """The array that an instruction writes a part of, and that part."""
    at, operands = place.at, place.operands()
    if at.attribute("custom_call_target") == "jax_layout_update_cache":
        return operands[0], operands[1].at
    if at.opcode in _PARTS:
        return operands[0], operands[_PARTS[at.opcode]].at
    if at.opcode != "fusion" or len(at.shapes) != 1:
        return None
    inside = place.module.names[at.called("calls")[0]]

    def behind(i: Instruction) -> Instruction:
        while i.opcode == "bitcast" and i.operands[0] in inside:
            i = inside[i.operands[0]]
        return i

    root = behind(next(i for i in inside.values() if i.root))
    if root.opcode not in _PARTS:
        return None
    array = behind(inside[root.operands[0]])
    if array.opcode != "parameter":
        return None
    outer = place.module.names[place.computation][at.operands[int(array.literal)]]
    return place.near(outer), inside[root.operands[_PARTS[root.opcode]]]
