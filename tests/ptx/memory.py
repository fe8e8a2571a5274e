# SPDX-License-Identifier: Apache-2.0
"""The memories of the machine, what may not be done to them, and what accesses cost."""

import re

import numpy as np

SLOT = 48  # a pointer's bits below the number of what it points into
PARAMETERS, CONSTANTS, LOCAL, SHARED = 1, 2, 3, 4  # slots; buffers have others
NOBODY, SEVERAL, ATOMIC = -1, -2, -3  # for a thread's number


class Defect(Exception):
    """What a kernel must not do."""


class Buffer:
    """Global memory: the bytes of an array, `offset` bytes past a multiple of 256."""

    def __init__(self, array, slot, offset=0, writable=True):
        self.array, self.slot, self.size = array, slot, array.nbytes
        self.base = slot << SLOT
        self.address = self.base + offset
        self.offset, self.writable = offset, writable
        self.storage = np.zeros((offset + self.size + 31) // 16 * 16, np.uint8)
        self.begin()

    def begin(self):
        raw = np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)
        self.storage[self.offset : self.offset + self.size] = raw
        self.writer, self.stored = None, False

    def end(self):
        if self.stored:
            raw = self.storage[self.offset : self.offset + self.size]
            self.array[...] = raw.view(self.array.dtype).reshape(self.array.shape)

    def load(self, at, kind, count):
        """(lanes, count) items at bytes `at` of the storage."""
        return items(self.storage, kind, count)[at // (kind.itemsize * count)]

    def store(self, at, values):
        self.stored = True
        width = values.dtype.itemsize * values.shape[1]
        items(self.storage, values.dtype, values.shape[1])[at // width] = values

    def others(self, at, width, granule, thread, stores):
        """What of each lane's access another thread stored, by granules, and whether
        any was stored."""
        if self.writer is None:
            if not stores:
                return np.zeros((at.size, 1), bool), False
            self.writer = np.full(self.storage.size // granule, NOBODY, np.int64)
        where = units(at, width, granule)
        by = self.writer[where]
        if stores:
            self.writer[where] = thread
        return (by != NOBODY) & (by != thread), (by != NOBODY).any()


class Virtual:
    """Global memory larger than any: load(bytes' offsets) gives a byte each, and
    store(offsets, bytes) is told what was stored."""

    def __init__(self, size, slot, load=None, store=None, offset=0):
        self.size, self.slot, self.offset = size, slot, offset
        self.base = slot << SLOT
        self.address = self.base + offset
        self._load, self._store = load, store
        self.writable = store is not None

    def begin(self):
        pass

    end = begin

    def load(self, at, kind, count):
        width = kind.itemsize * count
        raw = self._load((at - self.offset)[:, None] + np.arange(width))
        return np.ascontiguousarray(raw, np.uint8).view(kind)

    def store(self, at, values):
        raw = np.ascontiguousarray(values).view(np.uint8)
        self._store((at - self.offset)[:, None] + np.arange(raw.shape[1]), raw)

    def others(self, at, *_):
        return np.zeros((at.size, 1), bool), False


def items(storage, kind, count):
    return storage.view(kind).reshape(-1, count)


def units(at, width, granule):
    return (at // granule)[:, None] + np.arange(width // granule)


def access_bytes(i):
    """Of an instruction that accesses memory; 16 of others that name one."""
    if i.opcode[0] not in ("ld", "st", "atom", "red"):
        return 4 if i.opcode[0] == "cp" else 16
    count = next((int(p[1]) for p in i.opcode if p in ("v2", "v4", "v8")), 1)
    return int(re.sub(r"\D", "", i.opcode[-1])) // 8 * count


class Memory:
    def __init__(self, machine, kernel, blob, offsets, dynamic, buffers):
        self.machine = machine
        self.addresses = {n: (PARAMETERS << SLOT) + o for n, o in offsets.items()}
        sizes = {"shared": 0, "local": 0, "const": 0}
        # What a launch makes room for comes after the rest.
        symbols = sorted(kernel.symbols.items(), key=lambda s: s[1][2] == 0)
        for name, (space, align, size) in symbols:
            if space in sizes:
                sizes[space] += -sizes[space] % (align if size else 16)
                base = CONSTANTS << SLOT if space == "const" else 0
                self.addresses[name] = base + sizes[space]
                sizes[space] += size
        self.sizes = sizes | {"shared": sizes["shared"] + dynamic}
        # Of a block, of a thread.
        self.rows = {s: (size + 15) // 16 * 16 for s, size in self.sizes.items()}
        counts = {"shared": machine.blocks, "local": machine.count}
        self.storage = {s: np.zeros(n * self.rows[s], "u1") for s, n in counts.items()}
        self.buffers = {b.slot: b for b in buffers}
        for slot, raw in (PARAMETERS, blob), (CONSTANTS, bytes(sizes["const"])):
            held = np.frombuffer(raw or b"\0", "u1")
            self.buffers[slot] = Buffer(held, slot, writable=False)
        # What races are told apart by: the narrowest access of the kernel.
        self.granule = {"shared": 16, "global": 16}
        for i in kernel.code:
            for space in self.granule.keys() & i.opcode:
                self.granule[space] = min(self.granule[space], access_bytes(i))
        places = machine.blocks * self.rows["shared"] // self.granule["shared"]
        self.written = np.zeros(places, bool)
        self.writer = np.full(places, NOBODY, np.int16)
        self.reader = np.full(places, NOBODY, np.int16)
        self.groups = np.zeros(machine.count, np.int64)  # of cp.async, committed
        self.arriving = []

    def synchronise(self, blocks):
        for shadow in (self.writer, self.reader):
            shadow.reshape(self.machine.blocks, -1)[blocks] = NOBODY

    # Addresses.

    def place(self, space, address, width):
        """What is at the active lanes' addresses, and the bytes' places in it."""
        m = self.machine
        aligned = address % np.uint64(width) == 0
        m.require(aligned, f"a misaligned access of {width} bytes")
        address = np.broadcast_to(address, m.size()).view(np.int64)
        slot = int(address[0]) >> SLOT
        if space == "" and slot in (SHARED, LOCAL):
            space = {SHARED: "shared", LOCAL: "local"}[slot]
            address = address - (slot << SLOT)
        if space in self.storage:
            size = self.sizes[space]
            inside = (address >= 0) & (address + width <= size)
            m.require(inside, f"an access out of the {size} bytes of {space} memory")
            number = m.block if space == "shared" else np.arange(m.count)
            return space, m.lanes(number) * self.rows[space] + address
        buffer = self.buffers.get(slot)
        known = np.full(address.shape, buffer is not None)
        m.require(known, "an access out of bounds: no array is there")
        at = address - (slot << SLOT)
        first, end = buffer.offset, buffer.offset + buffer.size
        outside = (at < first) | (at + width > end)
        byte = int(at[np.argmax(outside)]) - first
        message = f"an access of {width} bytes out of bounds, at byte {byte}"
        m.require(~outside, message)
        return buffer, at

    # Accesses; values are (lanes, count).

    def parameter(self, address, kind, count):
        """They may be less aligned than vectors of the storage."""
        buffer, width = self.buffers[PARAMETERS], kind.itemsize * count
        at = (address.view(np.int64) & ((1 << SLOT) - 1))[:, None] + np.arange(width)
        inside = at[:, -1] < buffer.size
        self.machine.require(inside, "an access out of the kernel's parameters")
        return buffer.storage[at].view(kind)

    def load(self, space, address, kind, count, read_only=False):
        if space == "param":
            return self.parameter(address, kind, count)
        m, width = self.machine, kind.itemsize * count
        what, at = self.place(space, address, width)
        if what in self.storage:
            if what == "shared":
                self.shared_access(at, width, stores=False)
            return items(self.storage[what], kind, count)[at // width]
        others, stored = self.others(what, at, width, self.numbers(), False)
        m.require(~others.any(1), "a race: another thread stored this")
        if read_only and stored:
            m.fail("a read-only load of what this kernel stored")
        self.count("loaded", what, at, width)
        return what.load(at, kind, count)

    def store(self, space, address, values):
        m, width = self.machine, values.dtype.itemsize * values.shape[1]
        what, at = self.place(space, address, width)
        if what in self.storage:
            if what == "shared":
                self.shared_access(at, width, stores=True)
            to = items(self.storage[what], values.dtype, values.shape[1])
            to[at // width] = values
            return
        others, _ = self.others(what, at, width, self.numbers(), True)
        raced = others.any(1)
        # To store what another thread stored is none: tiles may overlap.
        if raced.any():
            held = what.load(at, values.dtype, values.shape[1])
            differ = held.view(np.uint8) != np.ascontiguousarray(values).view(np.uint8)
            raced = (others & differ.reshape(*others.shape, -1).any(2)).any(1)
        self.count("stored", what, at, width)
        what.store(at, values)
        if isinstance(what, Buffer):
            raced |= (what.load(at, values.dtype, values.shape[1]) != values).any(1)
        m.require(~raced, "a race: another thread stored something else here")

    def add(self, address, values, kind):
        """Atomic additions of a type; the old values."""
        width = kind.itemsize
        what, at = self.place("global", address, width)
        self.others(what, at, width, np.full((at.size, 1), ATOMIC), True)
        old = what.load(at, values.dtype, 1)[:, 0]
        if isinstance(what, Virtual):  # a thread for each
            new = (old.view(kind) + values.view(kind)).view(values.dtype)
            what.store(at, new[:, None])
        else:
            what.stored = True
            np.add.at(what.storage.view(kind), at // width, values.view(kind))
        self.count("loaded", what, at, width)
        self.count("stored", what, at, width)
        return old

    def others(self, what, at, width, thread, stores):
        if stores and not what.writable:
            self.machine.fail("a store to constant memory")
        return what.others(at, width, self.granule["global"], thread, stores)

    def numbers(self):
        m = self.machine
        return (m.lanes(m.block_number) * 1024 + m.lanes(m.thread))[:, None]

    def count(self, side, what, at, width):
        if self.machine.watch:
            self.machine.watch.access(side, what, at, width)

    # Shared memory: who wrote and who read since the last barrier.

    def shared_access(self, at, width, stores, arriving=False):
        m, where = self.machine, units(at, width, self.granule["shared"])
        thread = m.lanes(m.thread).astype(np.int16)[:, None]
        if m.watch:
            m.watch.shared(at % self.rows["shared"], width)

        def others(users):
            return (users != NOBODY) & (users != thread)

        raced, before = others(self.writer[where]), others(self.reader[where])
        if stores:
            self.writer[where] = thread
            raced |= before | (self.writer[where] != thread)  # of this instruction
            self.written[where] = not arriving
        else:
            written = self.written[where].all(1)
            m.require(written, "a read of shared memory that nothing wrote")
            now = np.where(before, np.int16(SEVERAL), thread)
            self.reader[where] = now
            self.reader[where[self.reader[where] != now]] = SEVERAL
        did = "used" if stores else "stored"
        m.require(~raced.any(1), f"a race: no barrier since another thread {did} this")

    # cp.async: what was copied is there after a wait, for the thread that copied.

    def copy(self, to, address, kind, count):
        m, width = self.machine, kind.itemsize * count
        values = self.load("global", address, kind, count)
        _, at = self.place("shared", to, width)
        self.shared_access(at, width, stores=True, arriving=True)
        threads = m.lanes(np.arange(m.count))
        self.arriving.append((threads, self.groups[threads], at, values))

    def commit(self):
        self.groups[self.machine.active()] += 1

    def wait(self, left):
        active = np.zeros(self.machine.count, bool)
        active[self.machine.active()] = True
        for n, (threads, group, at, values) in enumerate(self.arriving):
            here = active[threads] & (group < self.groups[threads] - left)
            width = values.shape[1] * values.dtype.itemsize
            to = items(self.storage["shared"], values.dtype, values.shape[1])
            to[at[here] // width] = values[here]
            self.written[units(at[here], width, self.granule["shared"])] = True
            still = [each[~here] for each in (threads, group, at, values)]
            self.arriving[n] = tuple(still)
