# SPDX-License-Identifier: Apache-2.0
"""Runs PTX: what nvcc makes of a kernel, on the arguments that a launch gives it.

A register is an array with a lane per thread, of length 1 while all threads agree.
The threads at the lowest program counter go first, all warps of all blocks of a batch
in one step, up to a branch, a barrier, or where others wait to join them.
"""

import functools
import re
from dataclasses import dataclass

import numpy as np

from ptx import instructions
from ptx.counters import Counters, Watch
from ptx.memory import Buffer, Defect, Memory

LANES = 1 << 14  # of a batch
END, WAITING = (1 << 30) + 1, 1 << 30  # program counters
CONTROL = ("bra", "ret", "exit", "bar", "barrier")
NEVER = 0xA5A5A5A5A5A5A5A5  # in registers that nothing wrote


@dataclass
class Instruction:
    line: int
    text: str
    negated: str  # "!" of @!%p
    guard: str  # the register of @%p or @!%p, or ""
    opcode: list[str]
    operands: list[str]

    def __post_init__(self):
        self.controls = self.opcode[0] in CONTROL


class Kernel:
    def __init__(self, name, parameters, body, first_line, symbols):
        self.name = name
        self.parameters = parameters  # (name, alignment, bytes)
        self.symbols = dict(symbols)  # name -> (space, alignment, bytes)
        self.widths = {}  # register prefix -> type
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._parse(body, first_line)

    def _parse(self, body, line):
        body = re.sub(r"//.*|^\s*\.(loc|file|pragma)\b.*", "", body, flags=re.MULTILINE)
        for raw in body.split(";"):
            # Braces around statements keep names apart, which differ anyway.
            before = re.match(r"(?:[\s{}]|[\w$]+:)*", raw)[0]
            for label in re.findall(r"([\w$]+):", before):
                self.labels[label] = len(self.code)
            if text := " ".join(raw[len(before) :].split()):
                self._statement(text, line + before.count("\n"))
            line += raw.count("\n")

    def _statement(self, text, line):
        if declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text):
            for name in declared[2].split(","):
                self.widths[re.sub(r"<\d+>", "", name.strip())] = declared[1]
        elif symbol := declaration(text):
            self.symbols[symbol[0]] = symbol[1]
        elif text.startswith("."):
            raise Defect(f"{self.name}: line {line}: unknown directive {text!r}")
        else:
            parts = re.match(r"(?:@(!?)(%\w+)\s+)?(\S+)\s*(.*)", text)
            negated, guard, opcode, rest = (part or "" for part in parts.groups())
            # At the commas outside of brackets.
            operands = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]\s])+", rest)
            one = Instruction(line, text, negated, guard, opcode.split("."), operands)
            self.code.append(one)

    def type_of(self, register):
        """None if it is none."""
        prefix = re.sub(r"\d+$", "", register)
        return self.widths.get(register) or self.widths.get(prefix)

    @functools.cached_property
    def steps(self):
        return [instructions.build(self, i) for i in self.code]


def declaration(text):
    """(name, (space, alignment, bytes)) of a variable."""
    found = re.match(
        r"(?:\.(?:extern|visible|weak)\s+)*\.(shared|local|const|global)\s+"
        r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[(\d*)\])?",
        text,
    )
    if not found:
        return None
    space, align, kind, name, array, count = found.groups()
    item = instructions.TYPES[kind].itemsize
    return name, (space, int(align or item), item * int((count or 0) if array else 1))


def parameter(text):
    """(name, alignment, bytes)."""
    align = re.search(r"\.align (\d+) \.b8", text)
    text = re.sub(r"\.ptr( \.\w+)? \.align \d+ ", "", text)
    kind, name, count = re.search(r"\.(\w+) ([\w$]+)(?:\[(\d+)\])?$", text).groups()
    item = instructions.TYPES[kind].itemsize
    return name, int(align[1]) if align else item, item * int(count or 1)


class Module:
    """The kernels of a PTX text."""

    def __init__(self, text):
        variable = re.compile(
            r"^(?:\.\w+ )*\.(?:shared|const|global) [^;]*;", re.MULTILINE
        )
        found = (declaration(each[0]) for each in variable.finditer(text))
        symbols = dict(filter(None, found))
        entry = re.compile(
            r"^(?:\.\w+ )*\.entry ([\w$]+)\(([^)]*)\)[^{]*\{\n(.*?)^\}", re.M | re.S
        )
        self.kernels = {}
        for found in entry.finditer(text):
            name, given, body = found.groups()
            parameters = [parameter(p.strip()) for p in given.split(",") if p.strip()]
            line = text.count("\n", 0, found.start(3)) + 1
            self.kernels[name] = Kernel(name, parameters, body, line, symbols)

    def launch(
        self, kernel, grid, block, args, shared=0, memory=(), blocks=None, counters=True
    ):
        """Runs blocks `blocks` (all by default) of a 1-D to 3-D grid.

        args: NumPy arrays (pointers; written back), Buffers, integers, bytes (structs).
        memory: Buffers that pointers inside of args lead to.
        """
        k = self.kernels[kernel]
        if len(args) != len(k.parameters):
            wanted = len(k.parameters)
            raise ValueError(f"{kernel} takes {wanted} arguments, not {len(args)}")
        taken = {b.slot for b in (*memory, *args) if hasattr(b, "address")}
        free = (s for s in range(16, 64) if s not in taken)
        args = [Buffer(a, next(free)) if isinstance(a, np.ndarray) else a for a in args]
        buffers = [*memory, *(a for a in args if hasattr(a, "address"))]
        blob, offsets = bytearray(), {}
        for (name, align, size), value in zip(k.parameters, args, strict=True):
            blob += bytes(-len(blob) % align)
            offsets[name] = len(blob)
            raw = getattr(value, "address", value)
            if not isinstance(raw, bytes):
                raw = int(raw).to_bytes(size, "little", signed=raw < 0)
            if len(raw) != size:
                raise ValueError(f"{kernel}: {name} has {size} bytes, not {len(raw)}")
            blob += raw
        grid, block = ((*np.atleast_1d(n).tolist(), 1, 1)[:3] for n in (grid, block))
        every = range(int(np.prod(grid))) if blocks is None else sorted(set(blocks))
        batch = max(1, LANES // int(np.prod(block)))
        total = Counters() if counters else None
        for buffer in buffers:
            buffer.begin()
        for first in range(0, len(every), batch):
            some = np.array(every[first : first + batch])
            machine = Machine(k, grid, block, some)
            machine.watch = Watch(machine, total) if counters else None
            machine.memory = Memory(machine, k, bytes(blob), offsets, shared, buffers)
            machine.run()
        for buffer in buffers:
            buffer.end()
        return total


class Machine:
    """A batch of blocks, from their first instruction to their last."""

    def __init__(self, kernel, grid, block, blocks):
        self.kernel = kernel
        self.threads = threads = int(np.prod(block))
        self.blocks, self.count = len(blocks), len(blocks) * threads
        self.thread = np.tile(np.arange(threads, dtype=np.uint32), self.blocks)
        self.block = np.repeat(np.arange(self.blocks), threads)
        self.block_number = np.repeat(blocks, threads)
        self.lane = self.thread % 32
        per_block = (threads + 31) // 32
        self.warp = self.block * per_block + self.thread // 32
        self.warps = self.blocks * per_block
        self.lane_of_warp = self.warp * 32 + self.lane  # of a full grid of warps
        self.special = {"%laneid": self.lane, "%warpid": self.thread // 32}
        for name, size, index in (
            ("tid", block, self.thread),
            ("ctaid", grid, self.block_number),
        ):
            for axis, n in zip("xyz", size, strict=True):
                value = (index % n).astype(np.uint32) if n > 1 else np.zeros(1, "u4")
                self.special[f"%{name}.{axis}"] = value
                self.special[f"%n{name}.{axis}"] = np.array([n], np.uint32)
                index = index // n
        self.registers = {}
        self.pc = np.zeros(self.count, np.int64)
        self.waits_at = np.full(self.count, -1)
        self.index = None  # of the active lanes; None is all of them
        self.at = 0

    # Lanes.

    def active(self):
        return slice(None) if self.index is None else self.index

    def lanes(self, of):
        return of if self.index is None or of.size == 1 else of[self.index]

    def size(self):
        return self.count if self.index is None else self.index.size

    def spread(self, value):
        """A lane each, of a value that may be the same for all."""
        return np.broadcast_to(value, self.size()) if value.size == 1 else value

    def get(self, register):
        value = self.registers.get(register)
        if value is None:
            kind = instructions.unsigned(self.kernel.type_of(register))
            value = np.array([NEVER >> 64 - 8 * kind.itemsize]).astype(kind)
        return self.lanes(value)

    def set(self, register, value):
        if self.index is None:
            self.registers[register] = value
            return
        old = self.registers.get(register)
        if old is None or old.size != self.count:
            full = np.empty(self.count, value.dtype)
            full[:] = 0xA5 if old is None else old
            self.registers[register] = old = full
        old[self.index] = value

    def fail(self, message, bad=True):
        """Raises for the first of the active lanes that `bad` says."""
        where = np.flatnonzero(np.broadcast_to(bad, self.size()))[0]
        lane = int(np.arange(self.count)[self.active()][where])
        code = self.kernel.code[min(self.at, len(self.kernel.code) - 1)]
        raise Defect(
            f"{self.kernel.name}: line {code.line}: {message} (block "
            f"{self.block_number[lane]}, thread {self.thread[lane]}): {code.text}"
        )

    def require(self, good, message):
        if not good.all():
            self.fail(message, ~good)

    # Control.

    def run(self):
        code, watch = self.kernel.code, self.watch
        while (at := int(self.pc.min())) != END:
            if at == WAITING:
                self.release()
                continue
            active = self.pc == at
            self.index, stop = None, len(code)
            if not active.all():
                self.index = np.flatnonzero(active)
                stop = min(stop, int(self.pc[~active].min()))
            if watch:
                watch.enter()
            everyone, jumped = self.index, False
            while at < stop and not jumped:
                self.at, instruction = at, code[at]
                if watch:
                    watch.issue(instruction, at)
                if instruction.guard:
                    self.index = self.guarded(instruction)
                if self.size():
                    if instruction.controls:
                        jumped = self.control(instruction, at, everyone)
                    else:
                        self.kernel.steps[at](self)
                self.index = everyone
                at += 1
            if not jumped:
                self.pc[self.active()] = at if at < len(code) else END
        if watch:
            watch.finish()

    def guarded(self, instruction):
        """The active lanes that an instruction is for."""
        taken = self.get(instruction.guard) ^ bool(instruction.negated)
        if taken.size == 1:
            return self.index if taken[0] else np.zeros(0, np.int64)
        where = np.flatnonzero(taken)
        return where if self.index is None else self.index[where]

    def control(self, instruction, at, everyone):
        """Moves the active lanes; False if all go on to the next instruction."""
        opcode, target = instruction.opcode, END
        if opcode[0] == "bra":
            target = self.kernel.labels[instruction.operands[0]]
        elif opcode[0] in ("bar", "barrier"):
            if opcode[1] == "warp":
                return False
            if instruction.operands != ["0"]:
                self.fail("only barrier 0 of all threads is known")
            target = WAITING
            self.waits_at[self.active()] = at
        self.pc[slice(None) if everyone is None else everyone] = at + 1
        self.pc[self.active()] = target
        return True

    def release(self):
        """Lets blocks go whose threads all wait at one barrier."""
        waiting = (self.pc == WAITING).reshape(self.blocks, self.threads)
        at = self.waits_at.reshape(self.blocks, self.threads)
        some = waiting.any(1)
        self.at, self.index = int(at.max()), None
        there = waiting & (at == at.max(1, keepdims=True)) | ~some[:, None]
        self.require(there.reshape(-1), "a barrier that this thread does not reach")
        self.memory.synchronise(some)
        if self.watch:
            self.watch.counters.barriers += int(some.sum())
        on = waiting.reshape(-1)
        self.pc[on] = self.waits_at[on] + 1
        self.waits_at[on] = -1
