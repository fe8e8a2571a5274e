# SPDX-License-Identifier: Apache-2.0
"""Runs PTX: what nvcc makes of a kernel, on the arguments that a launch gives it.

A register is an array with a lane per thread, of length 1 while all threads agree.
The threads at the lowest program counter go first, all warps of all blocks of a batch
in one step, up to a branch, a barrier, or where others wait to join them.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from ptx import instructions
from ptx.memory import Buffer, Defect, Memory

LANES = 1 << 14  # of a batch
DEPENDENT, SHARED_LOAD = 4, 30  # cycles until a result can be used
END, WAITING = (1 << 30) + 1, 1 << 30  # program counters


@dataclass
class Instruction:
    line: int
    text: str
    guard: str  # the register of @%p or @!%p, or ""
    negated: bool
    opcode: list[str]
    operands: list[str]


@dataclass
class Counters:
    """Sums over the blocks that ran. A request is one instruction of one warp."""

    requests_loaded: int = 0
    requests_stored: int = 0
    sectors_loaded: int = 0  # 32 bytes, each once per request
    sectors_stored: int = 0
    ideal_sectors_loaded: int = 0  # that its distinct bytes would fill
    ideal_sectors_stored: int = 0
    block_sectors_loaded: int = 0  # each once per block
    block_sectors_stored: int = 0
    partial_sectors_stored: int = 0  # of which a request writes less than all bytes
    bytes_loaded: int = 0  # by all threads, repeats counted
    bytes_stored: int = 0
    shared_passes: int = 0
    bank_conflicts: dict[int, int] = field(default_factory=dict)  # by line
    instructions: int = 0  # issued, of warps
    barriers: int = 0  # of blocks
    blocks: int = 0
    warps: int = 0
    # Of the first warp: the cycles that it would take if memory were at hand, the most
    # bytes that it waits for at a time, and the cycles between such loads and what
    # first needs them.
    cycles: int = 0
    bytes_in_flight: int = 0
    waits: list[int] = field(default_factory=list)


class Kernel:
    def __init__(self, name, parameters, body, first_line, symbols):
        self.name = name
        self.parameters = parameters  # (name, alignment, bytes)
        self.symbols = symbols  # of the module: name -> (space, alignment, bytes)
        self.widths = {}  # register prefix -> type
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.local_bytes = 0
        self._parse(body, first_line)
        self.starts = frozenset(self.labels.values())
        self.steps = None  # compiled at the first launch

    def _parse(self, body, line):
        statement, start = "", line
        for number, raw in enumerate(body.split("\n"), line):
            text = " ".join(raw.split("//")[0].split())
            if text.startswith((".loc ", ".file ", ".pragma ")):
                continue
            if label := re.match(r"([\w$]+): ?(.*)", text):
                self.labels[label[1]] = len(self.code)
                text = label[2]
            if not statement.strip(" {}"):
                start = number
            statement += " " + text
            while ";" in statement:
                one, statement = statement.split(";", 1)
                # Braces around statements keep names apart, which differ anyway.
                self._statement(re.sub(r"^[{} ]+", "", one), start)

    def _statement(self, text, line):
        if not text:
            return
        if declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text):
            for name in declared[2].split(","):
                self.widths[re.sub(r"<\d+>", "", name.strip())] = declared[1]
            return
        if text.startswith("."):
            if not (symbol := declaration(text)):
                raise Defect(f"{self.name}: line {line}: unknown directive {text!r}")
            self.symbols = {**self.symbols, symbol[0]: symbol[1]}
            return
        guarded = re.match(r"@(!?)(%\w+)\s+(.*)", text)
        negated, guard, rest = (
            (guarded[1] == "!", guarded[2], guarded[3])
            if guarded
            else (False, "", text)
        )
        opcode, _, operands = rest.partition(" ")
        self.code.append(
            Instruction(
                line, text, guard, negated, opcode.split("."), split(operands.strip())
            )
        )

    def type_of(self, register):
        """None if it is none."""
        return self.widths.get(register) or self.widths.get(
            re.sub(r"\d+$", "", register)
        )

    def compiled(self):
        if self.steps is None:
            self.steps = [instructions.build(self, i) for i in self.code]
        return self.steps


def split(text):
    """Operands at the commas outside of brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", text)
    return [p.strip() for p in parts if p.strip()]


def declaration(text):
    """(name, (space, alignment, bytes)) of a variable."""
    found = re.match(
        r"(?:\.(?:extern|visible|weak)\s+)*\.(shared|local|const|global)\s+"
        r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?",
        text,
    )
    if not found:
        return None
    item = np.dtype(instructions.TYPES[found[3]]).itemsize
    count = int(found[5] or 0) if "[" in text else 1
    return found[4], (found[1], int(found[2] or item), item * count)


class Module:
    """The kernels of a PTX text."""

    def __init__(self, text):
        self.target = re.search(r"^\.target (\S+?),?$", text, re.MULTILINE)[1]
        self.kernels = {}
        symbols = {}
        for found in re.finditer(
            r"^(?:\.\w+ )*\.(?:shared|const|global) [^;]*;", text, re.M
        ):
            if symbol := declaration(found[0][:-1]):
                symbols[symbol[0]] = symbol[1]
        entry = re.compile(
            r"^(?:\.\w+ )*\.entry ([\w$]+)\(([^)]*)\)[^{]*\{\n(.*?)^\}", re.M | re.S
        )
        for found in entry.finditer(text):
            parameters = []
            for p in filter(None, (p.strip() for p in found[2].split(","))):
                align = re.search(r"\.align (\d+) \.b8", p)
                kind, name, _, count = re.search(
                    r"\.(\w+) ([\w$]+)(\[(\d+)\])?$",
                    re.sub(r"\.ptr( \.\w+)? \.align \d+ ", "", p),
                ).groups()
                item = np.dtype(instructions.TYPES[kind]).itemsize
                parameters.append(
                    (name, int(align[1]) if align else item, item * int(count or 1))
                )
            line = text.count("\n", 0, found.start(3)) + 1
            self.kernels[found[1]] = Kernel(
                found[1], parameters, found[3], line, symbols
            )

    def launch(
        self, kernel, grid, block, args, shared=0, memory=(), blocks=None, counters=True
    ):
        """Runs blocks `blocks` (all by default) of a 1-D to 3-D grid.

        args: NumPy arrays (pointers; written back), Buffers, integers, bytes (structs).
        memory: Buffers that pointers inside of args lead to.
        """
        k = self.kernels[kernel]
        if len(args) != len(k.parameters):
            raise ValueError(
                f"{kernel} takes {len(k.parameters)} arguments, not {len(args)}"
            )
        taken = {b.slot for b in (*memory, *args) if hasattr(b, "address")}
        free = (s for s in range(16, 64) if s not in taken)
        args = [Buffer(a, next(free)) if isinstance(a, np.ndarray) else a for a in args]
        buffers = [*memory, *(a for a in args if hasattr(a, "address"))]
        blob, offsets = bytearray(), {}
        for (name, align, size), value in zip(k.parameters, args, strict=True):
            blob += bytes(-len(blob) % align)
            offsets[name] = len(blob)
            value = getattr(value, "address", value)
            raw = value
            if not isinstance(value, bytes):
                raw = int(value).to_bytes(size, "little", signed=value < 0)
            if len(raw) != size:
                raise ValueError(f"{kernel}: {name} has {size} bytes, not {len(raw)}")
            blob += raw
        grid, block = (
            (*each, 1, 1)[:3]
            for each in (np.atleast_1d(grid).tolist(), np.atleast_1d(block).tolist())
        )
        every = range(int(np.prod(grid))) if blocks is None else sorted(set(blocks))
        threads = int(np.prod(block))
        batch = max(1, LANES // threads)
        total = Counters()
        for buffer in buffers:
            buffer.begin()
        for first in range(0, len(every), batch):
            machine = Machine(
                k,
                grid,
                block,
                np.array(every[first : first + batch]),
                bytes(blob),
                offsets,
                shared,
                buffers,
                total if counters else None,
            )
            machine.run()
        for buffer in buffers:
            buffer.end()
        return total


class Machine:
    """A batch of blocks, from their first instruction to their last."""

    def __init__(
        self, kernel, grid, block, blocks, blob, offsets, dynamic, buffers, counters
    ):
        self.kernel, self.counters = kernel, counters
        self.threads = threads = int(np.prod(block))
        self.blocks = len(blocks)
        self.count = count = self.blocks * threads
        self.thread = np.tile(np.arange(threads, dtype=np.uint32), self.blocks)
        self.block = np.repeat(np.arange(self.blocks), threads)
        self.block_number = np.repeat(blocks, threads)
        self.lane = self.thread % 32
        per_block = (threads + 31) // 32
        self.warp = self.block * per_block + self.thread // 32
        self.warps = self.blocks * per_block
        self.lane_of_warp = self.warp * 32 + self.lane  # of a full grid of warps
        self.special = {}
        for name, size, index in (
            ("tid", block, self.thread),
            ("ctaid", grid, self.block_number),
        ):
            for axis, n, stride in zip(
                "xyz", size, (1, size[0], size[0] * size[1]), strict=True
            ):
                value = (index // stride % n).astype(np.uint32)
                self.special[f"%{name}.{axis}"] = (
                    value if n > 1 else np.zeros(1, np.uint32)
                )
        for axis, n, m in zip("xyz", block, grid, strict=True):
            self.special[f"%ntid.{axis}"] = np.array([n], np.uint32)
            self.special[f"%nctaid.{axis}"] = np.array([m], np.uint32)
        self.special["%laneid"] = self.lane
        self.special["%warpid"] = self.thread // 32
        self.registers = {}
        self.pc = np.zeros(count, np.int64)
        self.waits_at = np.full(count, -1)
        self.index = None  # of the active lanes; None is all of them
        self.at = 0
        self.memory = Memory(self, kernel, blob, offsets, dynamic, buffers)
        # Of the first warp: bytes on their way, the registers that depend on them, when
        # the last was loaded, and how much later something needed it; and of the code
        # since the last jump, its instructions and when each result is there.
        self.pending, self.expected, self.loaded, self.waited = 0, set(), 0, None
        self.issued, self.ready = 0, {}

    # Lanes.

    def lanes(self, of):
        return of if self.index is None else of[self.index]

    def size(self):
        return self.count if self.index is None else self.index.size

    def spread(self, value):
        """A lane each, of a value that may be the same for all."""
        return np.broadcast_to(value, self.size()) if value.size == 1 else value

    def get(self, register):
        value = self.registers.get(register)
        if value is None:
            kind = instructions.unsigned(self.kernel.type_of(register))
            return np.array(
                [0xA5A5A5A5A5A5A5A5 & ((1 << 8 * kind.itemsize) - 1)]
            ).astype(kind)
        return value if self.index is None or value.size == 1 else value[self.index]

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

    def fail(self, message, bad=None):
        """Raises for the first of the active lanes that `bad` says."""
        where = (
            int(np.flatnonzero(np.broadcast_to(bad, self.size()))[0])
            if bad is not None
            else 0
        )
        lane = where if self.index is None else int(self.index[where])
        code = self.kernel.code[min(self.at, len(self.kernel.code) - 1)]
        raise Defect(
            f"{self.kernel.name}: line {code.line}: {message} (block "
            f"{self.block_number[lane]}, thread {self.thread[lane]}): {code.text}"
        )

    # Control.

    def run(self):
        code, steps = self.kernel.code, self.kernel.compiled()
        counters = self.counters
        if counters:
            counters.blocks += self.blocks
            counters.warps += self.warps
        first = counters is not None and counters.blocks == self.blocks
        while True:
            at = int(self.pc.min())
            if at >= WAITING:
                if at == END:
                    return self.memory.finish()
                self.release()
                continue
            active = self.pc == at
            if active.all():
                self.index, stop = None, len(code)
            else:
                self.index = np.flatnonzero(active)
                stop = int(self.pc[~active].min())
            if counters:
                warps = (
                    self.warps
                    if self.index is None
                    else np.unique(self.lanes(self.warp)).size
                )
                watched = first and (
                    self.index is None or self.index[0] < min(32, self.threads)
                )
            everyone = self.index
            while at < stop and at < len(code):
                instruction = code[at]
                self.at = at
                if counters:
                    counters.instructions += warps
                    if watched:
                        self.watch(instruction, at)
                jumped = False
                if instruction.opcode[0] in ("bra", "ret", "exit", "bar", "barrier"):
                    jumped = self.control(instruction, at)
                elif instruction.guard:
                    self.index = self.guarded(instruction)
                    if self.index is None or self.index.size:
                        steps[at](self)
                    self.index = everyone
                else:
                    steps[at](self)
                if jumped:
                    break
                at += 1
            else:
                if at >= len(code):
                    at = END
                if everyone is None:
                    self.pc[:] = at
                else:
                    self.pc[everyone] = at

    def guarded(self, instruction):
        taken = self.get(instruction.guard) ^ instruction.negated
        if taken.size == 1:
            return self.index if taken[0] else np.zeros(0, np.int64)
        where = np.flatnonzero(taken)
        return where if self.index is None else self.index[where]

    def control(self, instruction, at):
        """Moves the active lanes; False if they go on to the next instruction."""
        opcode = instruction.opcode
        everyone = self.index
        taken = self.guarded(instruction) if instruction.guard else everyone
        if taken is not None and taken.size == 0:
            return False
        if opcode[0] == "bra":
            target = self.kernel.labels[instruction.operands[0]]
        elif opcode[0] in ("ret", "exit"):
            target = END
        elif opcode[1] == "warp":
            return False
        else:
            if instruction.operands != ["0"]:
                self.fail("only barrier 0 of all threads is known")
            target = WAITING
            self.waits_at[slice(None) if taken is None else taken] = at
        if everyone is None:
            self.pc[:] = at + 1
        else:
            self.pc[everyone] = at + 1
        self.pc[slice(None) if taken is None else taken] = target
        self.index = everyone
        return True

    def release(self):
        """Lets blocks go whose threads all wait at one barrier."""
        waiting = (self.pc == WAITING).reshape(self.blocks, self.threads)
        at = self.waits_at.reshape(self.blocks, self.threads)
        for b in np.flatnonzero(waiting.any(1)):
            others = ~waiting[b] | (at[b] != at[b].max())
            if others.any():
                self.at, self.index = int(at[b].max()), None
                bad = np.zeros((self.blocks, self.threads), bool)
                bad[b] = others
                self.fail("a barrier that this thread does not reach", bad.reshape(-1))
        self.memory.synchronise(waiting.any(1))
        if self.counters:
            self.counters.barriers += int(waiting.any(1).sum())
        on = waiting.reshape(-1)
        self.pc[on] = self.waits_at[on] + 1
        self.waits_at[on] = -1

    def watch(self, instruction, at):
        """Loads in flight, of the first warp, as if the code between two jumps did
        its loads first: so the assembler orders it. When one is there, all are."""
        c, opcode = self.counters, instruction.opcode
        names = re.findall(r"[%\w]+", " ".join(instruction.operands))
        results = re.findall(r"[%\w]+", instruction.operands[0]) if names else []
        needs = not self.expected.isdisjoint(
            names if opcode[0] == "st" else names[len(results) :]
        )
        load = opcode[0] == "ld" and "global" in opcode
        leaves = opcode[0] in ("bra", "bar", "barrier", "ret", "exit")
        if leaves or at in self.kernel.starts:
            c.cycles += max(self.issued, max(self.ready.values(), default=0))
            self.issued, self.ready = 0, {}
        self.issued += 1
        start = max((self.ready.get(name, 0) for name in names), default=0)
        for name in results:
            self.ready[name] = start + (
                SHARED_LOAD if "shared" in opcode else DEPENDENT
            )
        if needs and self.waited is None:
            self.waited = c.cycles - self.loaded
        if self.waited is not None and (
            load and needs or leaves or at in self.kernel.starts
        ):
            c.waits.append(self.waited)
            self.pending, self.expected, self.waited = 0, set(), None
        if load:
            lanes = self.lane.size if self.index is None else (self.index < 32).sum()
            bits = int(re.search(r"\d+", opcode[-1])[0]) * len(results)
            self.pending += bits // 8 * min(32, int(lanes), self.threads)
            self.loaded = c.cycles
            c.bytes_in_flight = max(c.bytes_in_flight, self.pending)
        if load or needs and opcode[0] != "st":
            self.expected.update(results)
