# SPDX-License-Identifier: Apache-2.0
"""Reads compiled HLO text: instructions, layouts, loops, source lines, bytes, flops.

The text of jaxlib 0.9 to 0.12, for CPUs and GPUs. Whatever a line holds that is not
known here stays in the instruction's `attributes`, as text.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Instructions that name buffers, or hand over to computations that are counted.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call "
    "opt-barrier after-all partition-id replica-id copy-done all-gather-done "
    "all-reduce-done collective-permute-done async-done async-update".split()
)
_CALLS = (
    "to_apply",
    "calls",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
)
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))


class Frame(NamedTuple):
    """One level of the Python stack that an instruction was traced from."""

    file: str
    line: int
    function: str


class Trips(NamedTuple):
    """How often a computation runs.

    A loop of unknown length counts once, as does every branch.
    """

    times: int
    known: bool
    inside: bool  # a loop or a branch


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array in memory.

    Attributes:
      dtype: HLO's name of it, "bf16".
      dims: extents.
      order: the dimensions, the slowest to change first.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes in memory, without padding."""
        if self.dtype == "pred":
            return self.size
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return (self.size * int(bits[1]) + 7) // 8 if bits else 0  # tokens have none

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      opcode: "fusion", "custom-call".
      shapes: the arrays of the result, of a tuple all of them.
      operands: names.
      attributes: the text after the operands.
      root: whether the computation returns it.
      literal: the text between the parentheses, of a constant its value.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool
    literal: str

    def attribute(self, name: str) -> str:
        """The text of an attribute, without quotes; "" if it is not there."""
        found = re.search(rf"(?:^|[ {{]){name}=", self.attributes)
        if not found:
            return ""
        text = self.attributes[found.end() :]
        if text[:1] == '"':
            return text[1:].split('"')[0]
        if text[:1] == "{":
            return text[: _closing(text, 0) + 1]
        return re.split(r"[, }]", text, maxsplit=1)[0]

    def integers(self, name: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `dimensions={0,2,1}`."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(name))))

    def called(self, *names: str) -> tuple[str, ...]:
        """The computations that the attributes of these names call."""
        texts = " ".join(self.attribute(name) for name in names)
        return tuple(re.findall(r"%([^\s,}]+)", texts))

    @property
    def op_name(self) -> str:
        """What jax calls the operation: "jit(f)/while/body/dot_general"."""
        return _of_metadata(self, "op_name")

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The backend's configuration; of our custom calls, the FFI attributes."""
        text = self.attribute("backend_config")
        try:
            return json.loads(text) if text else {}
        except json.JSONDecodeError:
            return dict(_mlir_attributes(text))


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      name: "jit_f".
      computations: the instructions of each, by its name.
      entry: the name of the first to run.
      tables: of file names, functions, locations and stack frames.
      donated: the numbers of the parameters whose memory results take.
    """

    name: str
    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    tables: dict[str, dict[int, Any]]
    donated: frozenset[int] = frozenset()

    def frames(self, instruction: Instruction) -> Iterator[Frame]:
        """The Python stack of an instruction, the innermost frame first."""
        line = _of_metadata(instruction, "source_line")
        if line:
            file = _of_metadata(instruction, "source_file")
            yield Frame(file, int(line), "")
        frame = int(_of_metadata(instruction, "stack_frame_id") or 0)
        while frame in self.tables["StackFrames"]:
            entry = self.tables["StackFrames"][frame]
            at = self.tables["FileLocations"][entry["file_location_id"]]
            yield Frame(
                self.tables["FileNames"][at["file_name_id"]],
                at["line"],
                self.tables["FunctionNames"][at["function_name_id"]],
            )
            frame = entry["parent_frame_id"] - 1  # 1: no parent

    @functools.cached_property
    def trips(self) -> dict[str, Trips]:
        """How often each computation outside of fusions runs."""
        found: dict[str, Trips] = {}

        def visit(name: str, now: Trips) -> None:
            old = found.get(name, Trips(0, True, False))
            found[name] = Trips(
                old.times + now.times,
                old.known and now.known,
                old.inside or now.inside,
            )
            for i in self.computations[name]:
                if i.opcode not in ("while", "call", "conditional", "async-start"):
                    continue
                times, known, inside = now
                if i.opcode == "while":
                    n = i.config.get("known_trip_count", {}).get("n")
                    times, known = times * int(n or 1), known and n is not None
                inside |= i.opcode in ("while", "conditional")
                for callee in i.called(*_CALLS):
                    visit(callee, Trips(times, known, inside))

        visit(self.entry, Trips(1, True, False))
        return found

    def below(self, instruction: Instruction) -> set[str]:
        """The computations that an instruction calls, and those that these call."""
        found: set[str] = set()
        for name in instruction.called(*_CALLS):
            found |= {name}.union(*map(self.below, self.computations[name]))
        return found

    def fused(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """What a fusion consists of; of other instructions nothing."""
        if instruction.opcode != "fusion":
            return ()
        return self.computations[instruction.called("calls")[0]]

    @functools.cached_property
    def names(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation, by name."""
        return {c: {i.name: i for i in body} for c, body in self.computations.items()}

    @functools.cached_property
    def users(self) -> dict[str, dict[str, list[Instruction]]]:
        """Who reads an instruction of a computation, by name."""
        found: dict[str, dict[str, list[Instruction]]] = {}
        for name, body in self.computations.items():
            users: dict[str, list[Instruction]] = {}
            for i in body:
                for operand in dict.fromkeys(i.operands):
                    users.setdefault(operand, []).append(i)
            found[name] = users
        return found


def parse(text: str) -> Module:
    """Reads the text of a compiled program.

    Args:
      text: what `jax.jit(f).lower(...).compile().as_text()` returns.

    Raises:
      ValueError: if there is no entry computation in it.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    tables: dict[str, dict[int, Any]] = {
        name: {}
        for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    }
    name = entry = table = ""
    body: list[Instruction] = []
    for line in text.splitlines():
        if line in tables:
            table = line
        elif not line:
            table = ""
        elif table and line[0].isdigit():
            key, value = line.split(" ", 1)
            tables[table][int(key)] = (
                {k: int(v) for k, v in re.findall(r"(\w+)=(-?\d+)", value)}
                if value[0] == "{"
                else ast.literal_eval(value)
            )
        elif line[0] != " " and line.rstrip().endswith("{") and "->" in line:
            heading = re.match(r"(ENTRY )?%?([^\s(]+)", line)
            assert heading
            name, body = heading[2], []
            entry = name if heading[1] else entry
        elif line[0] == "}":
            computations[name] = tuple(body)
        elif line[0] == " " and (instruction := _instruction(line)):
            body.append(instruction)
    if not entry:
        raise ValueError("hlo: the text must hold an ENTRY computation.")
    title = re.search(r"^HloModule ([^\s,]+)(.*)", text, re.MULTILINE)
    name, rest = (title[1], title[2]) if title else ("", "")
    taken = re.findall(r"\((\d+), \{[\d, ]*\}, \w+-alias\)", rest)
    return Module(name, computations, entry, tables, frozenset(map(int, taken)))


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([^\s=]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
    call = re.match(r" ([\w\-]+)(?=\()", rest[end:])
    if call is None:
        return None
    start = end + call.end()
    close = _closing(rest, start)
    inside = rest[start + 1 : close]
    literal = call[1] in ("constant", "parameter")
    return Instruction(
        name=head[2],
        opcode=call[1],
        shapes=tuple(_shapes(rest[:end])),
        operands=() if literal else tuple(re.findall(r"%([^\s,)]+)", inside)),
        attributes=rest[close + 1 :].lstrip(", "),
        root=bool(head[1]),
        literal=inside if literal else "",
    )


def _shapes(text: str) -> Iterator[Shape]:
    pattern = r"([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)[^}]*\})?"
    for dtype, dims, layout in re.findall(pattern, text):
        sizes = tuple(map(int, re.findall(r"\d+", dims)))
        minor = tuple(map(int, layout.split(","))) if layout else ()
        # What has no layout is row-major.
        order = minor[::-1] if minor else tuple(range(len(sizes)))
        yield Shape(dtype, sizes, order)


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` is closed, strings aside."""
    depth, quoted, skip = 0, False, False
    for i in range(start, len(text)):
        c = text[i]
        if skip:
            skip = False
        elif c == "\\":
            skip = True
        elif c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c in "({[") - (c in ")}]")
            if depth == 0:
                return i
    return len(text)


def _of_metadata(instruction: Instruction, name: str) -> str:
    metadata = instruction.attribute("metadata")
    found = re.search(rf'\b{name}=(?:"((?:[^"\\]|\\.)*)"|(\d+))', metadata)
    return re.sub(r"\\(.)", r"\1", found[1] or found[2] or "") if found else ""


def _mlir_attributes(text: str) -> Iterator[tuple[str, Any]]:
    """The attributes of a typed FFI call: numbers, strings, lists."""
    item = (
        r"(\w+) = (?:"
        r"dense<(\[.*?\]|[^>]*)> : tensor<(?:(\d+)x)?\w+>"
        r"|array<\w+:? ?([^>]*)>"
        r'|("(?:[^"\\]|\\.)*"|[^\s,}]+))'
    )
    for name, dense, count, array, plain in re.findall(item, text):
        if plain:
            known = {"true": True, "false": False}
            yield name, known[plain] if plain in known else ast.literal_eval(plain)
        elif array or not (dense or count):
            yield name, [ast.literal_eval(v) for v in array.split(",") if v.strip()]
        elif dense.startswith("["):
            yield name, ast.literal_eval(dense)
        else:  # one value for all
            yield name, [ast.literal_eval(dense)] * int(count or 1) if dense else []


# --- what an instruction costs


def moves(instruction: Instruction, operand: Shape) -> bool:
    """Whether a transpose or copy writes its operand in another order."""
    (result,) = instruction.shapes[:1]
    dims = instruction.integers("dimensions") or tuple(range(len(operand.dims)))
    before = [d for d in operand.order if operand.dims[d] != 1]
    after = [dims[d] for d in result.order if result.dims[d] != 1]
    return before != after


def traffic(module: Module, computation: str, instruction: Instruction) -> int:
    """Bytes that an instruction reads and writes, each array once.

    Of an array that is only sliced the slice counts, of one that is updated in
    place the update.
    """
    if instruction.opcode in _FREE:
        return 0
    names = module.names[computation]
    if instruction.opcode == "fusion":
        return _fusion_traffic(module, instruction, names)
    results = instruction.shapes
    if instruction.opcode == "custom-call" and len(results) > 1:
        scratch = [s.dtype in ("s8", "u8") and len(s.dims) == 1 for s in results]
        results = tuple(s for s, no in zip(results, scratch, strict=True) if not no)
    written = sum(s.bytes for s in results)
    if instruction.opcode in ("copy-start", "all-gather-start", "all-reduce-start"):
        written //= 2  # the tuple holds the operand too
    if instruction.opcode in _SLICES:
        return 2 * written
    operands = {o: names[o].shapes for o in instruction.operands if o in names}
    read = {o: sum(s.bytes for s in shapes) for o, shapes in operands.items()}
    if instruction.opcode == "dynamic-update-slice":
        return 2 * list(read.values())[1]
    if instruction.attribute("custom_call_target") == "jax_layout_gemm":
        c = instruction.config
        for name, o in zip("ab", instruction.operands, strict=False):
            if c.get(f"{name}_part") and o in read:  # a matrix of a stack
                whole = math.prod(operands[o][0].dims)
                read[o] = read[o] * math.prod(c[f"{name}_shape"]) // whole
    return written + sum(read.values())


def _fusion_traffic(
    module: Module, fusion: Instruction, outside: dict[str, Instruction]
) -> int:
    (called,) = fusion.called("calls")
    inside, users = module.names[called], module.users[called]

    def read(i: Instruction, whole: int) -> int:
        total = 0
        for user in users.get(i.name, []):
            if user.opcode == "bitcast":
                total += read(user, whole)
            elif user.opcode in _SLICES:
                total += sum(s.bytes for s in user.shapes)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == i.name:
                continue
            else:
                return whole
        return min(total, whole)

    def write(i: Instruction) -> int:
        if i.opcode == "tuple":
            return sum(write(inside[o]) for o in i.operands)
        if i.opcode == "bitcast" and i.operands[0] in inside:
            return write(inside[i.operands[0]])
        if i.opcode == "dynamic-update-slice":
            return sum(s.bytes for s in inside[i.operands[1]].shapes)
        return sum(s.bytes for s in i.shapes)

    total = sum(write(i) for i in inside.values() if i.root)
    seen = set()
    for i in inside.values():
        if i.opcode == "parameter":
            operand = fusion.operands[int(i.literal)]
            whole = sum(s.bytes for s in i.shapes)
            if operand not in seen and operand in outside:
                seen.add(operand)
                total += read(i, whole)
    return total


def flops(module: Module, computation: str, instruction: Instruction) -> int:
    """Floating-point operations of products and convolutions; of others none."""
    if instruction.opcode == "fusion":
        inside = instruction.called("calls")[0]
        return sum(flops(module, inside, i) for i in module.fused(instruction))
    names = module.names[computation]
    operands = [names[o].shapes[0] for o in instruction.operands if o in names]
    target = instruction.attribute("custom_call_target")
    if instruction.opcode == "dot" and operands:
        summed = instruction.integers("lhs_contracting_dims")
        return _product(instruction.shapes[0], operands[0], summed)
    if instruction.opcode == "convolution" or "$conv" in target:
        return _convolution(instruction, operands)
    if target == "jax_layout_gemm":
        c = instruction.config
        terms = c["spec"].split("->")[0].split(",")
        size = dict(zip(terms[0], c["a_shape"], strict=True))
        size |= dict(zip(terms[1], c["b_shape"], strict=True))
        return 2 * math.prod(size.values())
    if target == "jax_layout_conv":
        c = instruction.config
        weight = c["w_shape"]
        channels = weight[c["w_order"][0]]
        return 2 * math.prod(c["y_shape"]) * math.prod(weight) // channels
    if "$matmul" in target or "$gemm" in target or "$lt$" in target:
        gemm = instruction.config.get("gemm_backend_config", instruction.config)
        numbers = gemm.get("dot_dimension_numbers", {})
        summed = tuple(map(int, numbers.get("lhs_contracting_dimensions", ())))
        last = (len(operands[0].dims) - 1,) if operands else ()
        return _product(instruction.shapes[0], operands[0], summed or last)
    return 0


def total_flops(module: Module) -> int:
    """The same of a program, of what is in loops as often as they go round."""
    return sum(
        trips.times * flops(module, computation, i)
        for computation, trips in module.trips.items()
        for i in module.computations[computation]
    )


def _product(result: Shape, operand: Shape, summed: Sequence[int]) -> int:
    return 2 * result.size * math.prod(operand.dims[d] for d in summed)


def _convolution(instruction: Instruction, operands: Sequence[Shape]) -> int:
    # The forward pass's: of y every element is a sum over a filter of w.
    labels = instruction.attribute("dim_labels")
    if not labels or len(operands) < 2:
        return 0
    _, filters, _ = re.split(r"_|->", labels)
    target = instruction.attribute("custom_call_target")
    if "BackwardFilter" in target:
        result, weight = operands[1], instruction.shapes[0]
    elif "BackwardInput" in target:
        result, weight = operands[0], operands[1]
    else:
        result, weight = instruction.shapes[0], operands[1]
    return 2 * result.size * weight.size // weight.dims[filters.index("o")]
