# SPDX-License-Identifier: Apache-2.0
"""The memories of the machine, what may not be done to them, and what accesses cost."""

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
        self.address = (slot << SLOT) + offset
        self.offset, self.writable = offset, writable
        self.storage = np.zeros((offset + self.size + 31) // 16 * 16, np.uint8)
        self.begin()

    def begin(self):
        raw = np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)
        self.storage[self.offset : self.offset + self.size] = raw
        self.writer = None
        self.stored = False

    def end(self):
        if self.stored:
            raw = self.storage[self.offset : self.offset + self.size]
            self.array[...] = raw.view(self.array.dtype).reshape(self.array.shape)

    def load(self, at, kind, count):
        """(lanes, count) items at bytes `at` of the storage."""
        items = self.storage.view(kind)
        first = at // kind.itemsize
        if count == 1:
            return items[first][:, None]
        return items.reshape(-1, count)[first // count]

    def store(self, at, values):
        items = self.storage.view(values.dtype)
        count = values.shape[1]
        self.stored = True
        first = at // values.dtype.itemsize
        if count == 1:
            items[first] = values[:, 0]
        else:
            items.reshape(-1, count)[first // count] = values

    def others(self, at, width, granule, thread, stores):
        """Which lanes touch what another thread stored; None if nothing was stored."""
        if self.writer is None:
            if stores:
                self.writer = np.full(self.storage.size // granule, NOBODY, np.int64)
                self.writer[(at // granule)[:, None] + np.arange(width // granule)] = (
                    thread[:, None]
                )
            return None
        where = (at // granule)[:, None] + np.arange(width // granule)
        by = self.writer[where]
        if stores:
            self.writer[where] = thread[:, None]
        return ((by != NOBODY) & (by != thread[:, None])).any(1)

    def touched(self, at, granule):
        return self.writer[at // granule] != NOBODY


class Virtual:
    """Global memory larger than any: load(bytes' offsets) gives a byte each, and
    store(offsets, bytes) is told what was stored."""

    writer = None

    def __init__(self, size, slot, load=None, store=None, offset=0):
        self.size, self.slot, self.offset = size, slot, offset
        self.address = (slot << SLOT) + offset
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

    def others(self, *_):
        return None


class Memory:
    def __init__(self, machine, kernel, blob, offsets, dynamic, buffers):
        self.machine = machine
        parameters = Buffer(
            np.frombuffer(blob or b"\0", np.uint8), PARAMETERS, writable=False
        )
        self.addresses = {n: (PARAMETERS << SLOT) + o for n, o in offsets.items()}
        sizes = {"shared": 0, "local": 0, "const": 0}
        for name, (space, align, size) in kernel.symbols.items():
            if space not in sizes:
                continue
            if name.endswith("[]") or not size:
                continue
            sizes[space] += -sizes[space] % align
            self.addresses[name] = sizes[space]
            sizes[space] += size
        start = sizes["shared"] + -sizes["shared"] % 16
        for name, (space, _, size) in kernel.symbols.items():
            if space == "shared" and not size:
                self.addresses[name] = start
            if space == "const":
                self.addresses[name] += CONSTANTS << SLOT
        constants = Buffer(
            np.zeros(sizes["const"], np.uint8), CONSTANTS, writable=False
        )
        self.buffers = {b.slot: b for b in (*buffers, parameters, constants)}
        self.parameters = parameters
        self.shared_size = start + dynamic if dynamic else sizes["shared"]
        self.row = (self.shared_size + 15) // 16 * 16  # of a block
        self.shared = np.zeros(machine.blocks * self.row, np.uint8)
        self.local_size = sizes["local"]
        self.local_row = (self.local_size + 15) // 16 * 16
        self.local = np.zeros(machine.count * self.local_row, np.uint8)
        # What races are told apart by: the narrowest access of the kernel.
        self.granule = {"shared": 16, "global": 16}
        for i in kernel.code:
            for space in self.granule:
                if (
                    i.opcode[0] in ("ld", "st", "atom", "red", "cp")
                    and space in i.opcode
                ):
                    bits = (
                        "".join(c for c in i.opcode[-1] if c.isdigit())
                        if i.opcode[0] != "cp"
                        else "32"
                    )
                    count = next(
                        (int(p[1]) for p in i.opcode if p in ("v2", "v4", "v8")), 1
                    )
                    self.granule[space] = min(
                        self.granule[space], int(bits) // 8 * count
                    )
        places = machine.blocks * self.row // self.granule["shared"]
        self.written = np.zeros(places, bool)
        self.writer = np.full(places, NOBODY, np.int16)
        self.reader = np.full(places, NOBODY, np.int16)
        self.groups = np.zeros(machine.count, np.int64)  # of cp.async, committed
        self.arriving = []
        c = machine.counters
        self.seen = {"loaded": [], "stored": []} if c else None

    def synchronise(self, blocks):
        for shadow in (self.writer, self.reader):
            shadow.reshape(self.machine.blocks, -1)[blocks] = NOBODY

    # Addresses.

    def place(self, space, address, width):
        """What is at the active lanes' addresses, and the bytes' places in it."""
        m = self.machine
        if (misaligned := address % np.uint64(width) != 0).any():
            m.fail(f"a misaligned access of {width} bytes", misaligned)
        address = (
            m.spread(address).view(np.int64)
            if address.size > 1
            else np.full(m.size(), address[0], np.int64)
        )
        if space == "":
            slot = int(address[0]) >> SLOT
            space = {SHARED: "shared", LOCAL: "local"}.get(slot, "global")
            if space != "global":
                address = address - (slot << SLOT)
        if space in ("shared", "local"):
            size, row = (
                (self.shared_size, self.row)
                if space == "shared"
                else (self.local_size, self.local_row)
            )
            if (outside := (address < 0) | (address + width > size)).any():
                m.fail(f"an access out of the {size} bytes of {space} memory", outside)
            number = (
                m.lanes(m.block) if space == "shared" else m.lanes(np.arange(m.count))
            )
            return space, number * row + address
        slot = int(address[0]) >> SLOT
        buffer = self.buffers.get(slot)
        if buffer is None:
            m.fail(
                "an access out of bounds: no array is there", address >> SLOT == slot
            )
        at = address - (slot << SLOT)
        outside = (at < buffer.offset) | (at + width > buffer.offset + buffer.size)
        if outside.any():
            first = int(at[np.flatnonzero(outside)[0]]) - buffer.offset
            m.fail(
                f"an access of {width} bytes out of bounds, at byte {first}", outside
            )
        return buffer, at

    # Accesses; values are (lanes, count).

    def parameter(self, address, kind, count):
        at = address - (PARAMETERS << SLOT)
        if (
            outside := (at < 0) | (at + kind.itemsize * count > self.parameters.size)
        ).any():
            self.machine.fail("an access out of the kernel's parameters", outside)
        return self.parameters.load(at, kind, count)

    def load(self, space, address, kind, count, read_only=False):
        m, width = self.machine, kind.itemsize * count
        what, at = self.place(space, address, width)
        if isinstance(what, str):
            if what == "shared":
                self.shared_load(at, width)
            bytes_of = self.shared if what == "shared" else self.local
            return bytes_of.view(kind).reshape(-1, count)[at // width]
        others = what.others(at, width, self.granule["global"], self.numbers(), False)
        if others is not None and others.any():
            m.fail("a race: another thread stored this", others)
        if (
            read_only
            and others is not None
            and what.touched(at, self.granule["global"]).any()
        ):
            m.fail("a read-only load of what this kernel stored")
        self.count("loaded", what, at, width)
        return what.load(at, kind, count)

    def store(self, space, address, values):
        m, width = self.machine, values.dtype.itemsize * values.shape[1]
        what, at = self.place(space, address, width)
        values = np.broadcast_to(values, (at.size, values.shape[1]))
        if isinstance(what, str):
            if what == "shared":
                self.shared_store(at, width)
            bytes_of = self.shared if what == "shared" else self.local
            bytes_of.view(values.dtype).reshape(-1, values.shape[1])[at // width] = (
                values
            )
            return
        if not what.writable:
            m.fail("a store to constant memory")
        others = what.others(at, width, self.granule["global"], self.numbers(), True)
        # To store what another thread stored is none: tiles may overlap.
        raced = np.zeros(at.size, bool)
        if others is not None and others.any():
            raced = others & (
                what.load(at, values.dtype, values.shape[1]) != values
            ).any(1)
        self.count("stored", what, at, width)
        what.store(at, values)
        if isinstance(what, Buffer):
            raced |= (what.load(at, values.dtype, values.shape[1]) != values).any(1)
        if raced.any():
            m.fail("a race: another thread stored something else here", raced)

    def add(self, address, values, kind):
        """Atomic additions of a type; the old values."""
        what, at = self.place("global", address, kind.itemsize)
        if not what.writable:
            self.machine.fail("a store to constant memory")
        old = what.load(at, values.dtype, 1)[:, 0]
        if isinstance(what, Virtual):  # a thread for each
            what.store(
                at, (old.view(kind) + values.view(kind)).view(values.dtype)[:, None]
            )
        else:
            what.others(
                at,
                kind.itemsize,
                self.granule["global"],
                np.full(at.size, ATOMIC),
                True,
            )
            what.stored = True
            np.add.at(what.storage.view(kind), at // kind.itemsize, values.view(kind))
        self.count("loaded", what, at, kind.itemsize)
        self.count("stored", what, at, kind.itemsize)
        return old

    def numbers(self):
        m = self.machine
        return m.lanes(m.block_number) * 1024 + m.lanes(m.thread)

    # Shared memory: who wrote and who read since the last barrier.

    def places(self, at, width):
        granule = self.granule["shared"]
        return (at // granule)[:, None] + np.arange(width // granule)

    def shared_load(self, at, width):
        m = self.machine
        where, thread = (
            self.places(at, width),
            m.lanes(m.thread).astype(np.int16)[:, None],
        )
        if (unwritten := ~self.written[where].all(1)).any():
            m.fail("a read of shared memory that nothing wrote", unwritten)
        by = self.writer[where]
        if (raced := ((by != NOBODY) & (by != thread)).any(1)).any():
            m.fail("a race: no barrier since another thread stored this", raced)
        before = self.reader[where]
        now = np.where(
            (before == NOBODY) | (before == thread), thread, np.int16(SEVERAL)
        )
        self.reader[where] = now
        self.reader[where[self.reader[where] != now]] = SEVERAL
        self.conflicts(at, width)

    def shared_store(self, at, width, arriving=False):
        m = self.machine
        where, thread = (
            self.places(at, width),
            m.lanes(m.thread).astype(np.int16)[:, None],
        )
        by, read = self.writer[where], self.reader[where]
        raced = ((by != NOBODY) & (by != thread)) | (
            (read != NOBODY) & (read != thread)
        )
        self.writer[where] = thread
        raced |= self.writer[where] != thread
        if raced.any():
            m.fail("a race: no barrier since another thread used this", raced.any(1))
        self.written[where] = not arriving
        self.conflicts(at, width)

    # cp.async: what was copied is there after a wait, for the thread that copied.

    def copy(self, to, address, kind, count):
        m = self.machine
        values = self.load("global", address, kind, count)
        what, at = self.place("shared", to, kind.itemsize * count)
        self.shared_store(at, kind.itemsize * count, arriving=True)
        self.arriving.append(
            (m.lanes(np.arange(m.count)), m.lanes(self.groups).copy(), at, values)
        )

    def commit(self):
        m = self.machine
        self.groups[slice(None) if m.index is None else m.index] += 1

    def wait(self, left):
        m = self.machine
        active = np.zeros(m.count, bool)
        active[slice(None) if m.index is None else m.index] = True
        still = []
        for lanes, group, at, values in self.arriving:
            here = active[lanes] & (group < self.groups[lanes] - left)
            width = values.shape[1] * values.dtype.itemsize
            self.shared.view(values.dtype).reshape(-1, values.shape[1])[
                at[here] // width
            ] = values[here]
            self.written[self.places(at[here], width)] = True
            if not here.all():
                still.append(tuple(each[~here] for each in (lanes, group, at, values)))
        self.arriving = still

    # Counters.

    def by_request(self, values, absent):
        """(warps, 32), with `absent` for lanes that do not take part."""
        m = self.machine
        if m.index is None and m.threads % 32 == 0:
            return values.reshape(-1, 32)
        rows = np.full(m.warps * 32, absent, values.dtype)
        rows[m.lanes(m.lane_of_warp)] = values
        rows = rows.reshape(-1, 32)
        return rows[(rows != absent).any(1)]

    def count(self, what, buffer, at, width):
        m, c = self.machine, self.machine.counters
        if c is None:
            return
        top = np.int64(1) << 62
        rows = np.sort(self.by_request(at + (buffer.slot << SLOT), top), axis=1)
        there = rows != top
        new = there.copy()
        new[:, 1:] &= rows[:, 1:] != rows[:, :-1]
        sectors = rows >> 5
        first = there.copy()
        first[:, 1:] &= sectors[:, 1:] != sectors[:, :-1]
        distinct = new.sum(1) * width
        setattr(c, f"requests_{what}", getattr(c, f"requests_{what}") + len(rows))
        setattr(c, f"sectors_{what}", getattr(c, f"sectors_{what}") + int(first.sum()))
        ideal = int((-(-distinct // 32)).sum())
        setattr(c, f"ideal_sectors_{what}", getattr(c, f"ideal_sectors_{what}") + ideal)
        setattr(c, f"bytes_{what}", getattr(c, f"bytes_{what}") + at.size * width)
        if what == "stored" and width < 32:
            full = np.add.reduceat(
                new.reshape(-1) * width, np.flatnonzero(first.reshape(-1))
            )
            c.partial_sectors_stored += int((full < 32).sum())
        sector = (at >> 5) | (m.lanes(m.block) << 44) | (buffer.slot % 8 << 60)
        self.seen[what].append(np.unique(sector))

    def finish(self):
        c = self.machine.counters
        for what, seen in (self.seen or {}).items():
            if seen:
                name = f"block_sectors_{what}"
                setattr(
                    c, name, getattr(c, name) + np.unique(np.concatenate(seen)).size
                )

    def conflicts(self, at, width):
        """Passes of requests to the 32 banks: 16 bytes go by eight lanes, 8 by 16."""
        m, c = self.machine, self.machine.counters
        if c is None:
            return
        top = np.int64(1) << 40
        lanes = self.by_request(at - m.lanes(m.block) * self.row, top)
        words = max(1, width // 4)
        rows = lanes.reshape(-1, 32 // words)
        rows = (rows[:, :, None] // 4 + np.arange(words)).reshape(len(rows), -1)
        rows = np.sort((rows % 32 << 42) | rows, axis=1)
        new = (rows & ((1 << 42) - 1)) < top // 4
        new[:, 1:] &= rows[:, 1:] != rows[:, :-1]
        banks = np.arange(len(rows))[:, None] * 32 + (rows >> 42)
        depth = np.bincount(banks[new], minlength=len(rows) * 32).reshape(-1, 32).max(1)
        passes = int(depth.sum())
        extra = passes - int((depth > 0).sum())
        c.shared_passes += passes
        line = m.kernel.code[m.at].line
        if extra:
            c.bank_conflicts[line] = c.bank_conflicts.get(line, 0) + extra
