# SPDX-License-Identifier: Apache-2.0
"""What a launch asks of memory and of the schedulers, for the model of time."""

import functools
import re
from dataclasses import dataclass, field

import numpy as np

DEPENDENT, SHARED_LOAD = 4, 30  # cycles until a result can be used
SHORT = 8  # instructions that a branch skips, and the assembler predicates


def loads(i):
    return i.opcode[0] == "ld" and "global" in i.opcode


@functools.cache
def jumps(kernel):
    """Where branches are of which the assembler makes predicates, short ones over
    instructions that wait for nothing; and where the others lead."""
    predicated, starts = set(), set()
    for at, i in enumerate(kernel.code):
        if i.opcode[0] == "bra":
            to = kernel.labels[i.operands[0]]
            over = kernel.code[at + 1 : to]
            waits = any(o.controls or loads(o) for o in over)
            if i.guard and 0 < len(over) <= SHORT and not waits:
                predicated.add(at)
            else:
                starts.add(to)
    return predicated, starts


@functools.cache
def registers(kernel, at):
    """Those that an instruction has, and how many of the first are its results."""
    i = kernel.code[at]
    first = re.findall(r"[%\w]+", "".join(i.operands[:1]))
    return first + re.findall(r"[%\w]+", " ".join(i.operands[1:])), len(first)


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

    def add(self, what, side, count):
        name = f"{what}_{side}"
        setattr(self, name, getattr(self, name) + int(count))


class Watch:
    """Counts for a batch of blocks."""

    def __init__(self, machine, counters):
        self.machine, self.counters = machine, counters
        self.predicated, self.starts = jumps(machine.kernel)
        self.first = counters.blocks == 0  # of all batches
        counters.blocks += machine.blocks
        counters.warps += machine.warps
        self.seen = {"loaded": [], "stored": []}
        # Of the first warp: bytes on their way, the registers that depend on them, when
        # the last was loaded, and how much later something needed it; and of the code
        # since the last jump, its instructions and when each result is there.
        self.pending, self.expected, self.loaded, self.waited = 0, set(), 0, None
        self.issued, self.ready = 0, {}

    def enter(self):
        """The active lanes have come together."""
        m = self.machine
        self.issuing = np.unique(m.lanes(m.warp)).size
        leader = 0 if m.index is None else m.index[0]
        self.follows = self.first and leader < min(32, m.threads)

    def issue(self, i, at):
        """Loads in flight, of the first warp, as if the code between two jumps did
        its loads first: so the assembler orders it. When one is there, all are."""
        m, c = self.machine, self.counters
        c.instructions += self.issuing
        if not self.follows:
            return
        stores, fetches = i.opcode[0] == "st", loads(i)
        names, count = registers(m.kernel, at)
        results = names[:count]
        used = names if stores else names[count:]
        needs = not self.expected.isdisjoint(used)
        leaves = i.controls and at not in self.predicated
        if leaves or at in self.starts:
            c.cycles += max(self.issued, max(self.ready.values(), default=0))
            self.issued, self.ready = 0, {}
        self.issued += 1
        start = max((self.ready.get(name, 0) for name in names), default=0)
        until = start + (SHARED_LOAD if "shared" in i.opcode else DEPENDENT)
        self.ready |= dict.fromkeys(results, until)
        if needs and self.waited is None:
            self.waited = c.cycles - self.loaded
        ends = fetches and needs or leaves or at in self.starts
        if self.waited is not None and ends:
            c.waits.append(self.waited)
            self.pending, self.expected, self.waited = 0, set(), None
        if fetches:
            lanes = np.count_nonzero(np.arange(m.count)[m.active()] < 32)
            bits = int(re.search(r"\d+", i.opcode[-1])[0]) * len(results)
            self.pending += bits // 8 * min(lanes, m.threads)
            self.loaded = c.cycles
            c.bytes_in_flight = max(c.bytes_in_flight, self.pending)
        if fetches or needs and not stores:
            self.expected.update(results)

    def by_request(self, values, absent):
        """(warps, 32), with `absent` for lanes that do not take part."""
        m = self.machine
        if m.index is None and m.threads % 32 == 0:
            return values.reshape(-1, 32)
        rows = np.full(m.warps * 32, absent, values.dtype)
        rows[m.lanes(m.lane_of_warp)] = values
        rows = rows.reshape(-1, 32)
        return rows[(rows != absent).any(1)]

    def access(self, side, buffer, at, width):
        """Global memory is loaded from or stored to."""
        m, c, top = self.machine, self.counters, np.int64(1) << 62
        rows = np.sort(self.by_request(at + buffer.base, top), axis=1)
        new, first = distinct(rows, rows != top), distinct(rows >> 5, rows != top)
        c.add("requests", side, len(rows))
        c.add("sectors", side, first.sum())
        c.add("ideal_sectors", side, (-(-new.sum(1) * width // 32)).sum())
        c.add("bytes", side, at.size * width)
        if side == "stored" and width < 32:
            starts = np.flatnonzero(first.reshape(-1))
            filled = np.add.reduceat(new.reshape(-1) * width, starts)
            c.partial_sectors_stored += int((filled < 32).sum())
        sector = (at >> 5) | (m.lanes(m.block) << 44) | (buffer.slot % 8 << 60)
        self.seen[side].append(np.unique(sector))

    def shared(self, at, width):
        """Passes of requests to the 32 banks: 16 bytes go by eight lanes, 8 by 16."""
        c, top = self.counters, np.int64(1) << 40
        words = max(1, width // 4)
        rows = self.by_request(at, top).reshape(-1, 32 // words)
        rows = (rows[:, :, None] // 4 + np.arange(words)).reshape(len(rows), -1)
        rows = np.sort((rows % 32 << 42) | rows, axis=1)
        new = distinct(rows, (rows & ((1 << 42) - 1)) < top // 4)
        banks = np.arange(len(rows))[:, None] * 32 + (rows >> 42)
        depth = np.bincount(banks[new], minlength=len(rows) * 32).reshape(-1, 32).max(1)
        extra = int(depth.sum()) - int((depth > 0).sum())
        c.shared_passes += int(depth.sum())
        line = self.machine.kernel.code[self.machine.at].line
        if extra:
            c.bank_conflicts[line] = c.bank_conflicts.get(line, 0) + extra

    def finish(self):
        for side, seen in self.seen.items():
            if seen:
                sectors = np.unique(np.concatenate(seen))
                self.counters.add("block_sectors", side, sectors.size)


def distinct(rows, there):
    """Of sorted rows, the first of each value."""
    first = there.copy()
    first[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return first
