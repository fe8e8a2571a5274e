# SPDX-License-Identifier: Apache-2.0
"""What each PTX instruction does, as a function of the machine, on all active lanes."""

import operator
import re

import numpy as np

from ptx.memory import CONSTANTS, LOCAL, SHARED, SLOT, Defect

TYPES = {
    f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}")
    for kind, letter in {"u": "u", "s": "i", "b": "u"}.items()
    for bits in (8, 16, 32, 64)
} | {
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "f16": np.dtype("f2"),
    "pred": np.dtype("?"),
}
# Said of an access, without a meaning here.
HINTS = re.compile(
    r"volatile|relaxed|acquire|release|gpu|sys|cta|wb|c[agsv]|L[12]::.*|weak|async"
)


def unsigned(kind):
    kind = TYPES.get(kind, kind)
    return kind if kind.kind == "b" else np.dtype(f"u{kind.itemsize}")


def cast(value, kind):
    """The low bits of a register, as a type."""
    if value.dtype.kind == "b" or kind.kind == "b":
        return value.astype(kind)
    if value.dtype.itemsize != kind.itemsize:
        value = value.astype(f"u{kind.itemsize}")
    return value.view(kind)


def constant(text, kind):
    if text[:2].lower() in ("0f", "0d") and kind.kind in "fu":
        bits = np.array([int(text[2:], 16)], f"u{(len(text) - 2) // 2}")
        return cast(bits, kind)
    value = int(text.rstrip("U"), 0) & ((1 << 8 * kind.itemsize) - 1)
    return np.array([value], np.uint64).astype(unsigned(kind)).view(kind)


def reader(kernel, text, kind):
    """How an operand is read as a type."""
    kind = TYPES.get(kind, kind)
    if text.startswith("%") and "." in text or text in ("%laneid", "%warpid"):

        def special(m):
            value = m.special[text]
            return cast(value if value.size == 1 else m.lanes(value), kind)

        return special
    if kernel.type_of(text):
        return lambda m: cast(m.get(text), kind)
    if text[0].isdigit() or text[0] == "-":
        value = (
            np.array([bool(int(text))]) if kind.kind == "b" else constant(text, kind)
        )
        return lambda m: value
    name, _, offset = text.partition("+")
    return lambda m: (
        np.array([m.memory.addresses[name] + int(offset or 0)], np.uint64)
        .astype(unsigned(kind))
        .view(kind)
    )


def writer(kernel, text):
    """How a result, of any type, reaches a register: sign-extended if it is signed."""
    if text == "_":
        return lambda m, value: None
    width = unsigned(kernel.type_of(text))

    def write(m, value):
        if value.dtype.kind == "b" or width.kind == "b":
            m.set(text, value.astype(width))
        elif value.dtype.itemsize == width.itemsize:
            m.set(text, value.view(width))
        elif value.dtype.kind == "i":
            m.set(text, value.astype(f"i{width.itemsize}").view(width))
        else:
            m.set(text, value.view(unsigned(value.dtype)).astype(width))

    return write


def high(a, b):
    """The upper half of a product."""
    if a.dtype.itemsize < 8:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        return (
            a.astype(wide) * b.astype(wide) >> wide.type(8 * a.dtype.itemsize)
        ).astype(a.dtype)
    if a.dtype.kind == "i":
        raise Defect("mul.hi.s64 is not known")
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
    middle = a1 * b0 + (a0 * b0 >> shift)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> shift) + (other >> shift)


def wide(a, b):
    kind = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(kind) * b.astype(kind)


def shift(how):
    def do(a, by):
        bits = 8 * a.dtype.itemsize
        if how == operator.rshift and a.dtype.kind == "i":
            return a >> np.minimum(by, bits - 1).astype(a.dtype)
        inside = how(a, (by % bits).astype(a.dtype))
        return (
            inside
            if (by < bits).all()
            else np.where(by < bits, inside, a.dtype.type(0))
        )

    return do


def prmt(a, b, selector):
    both = np.stack(np.broadcast_arrays(a, b), 1).view(np.uint8)
    if selector.size == 1 and not int(selector[0]) & 0x8888:
        picked = [int(selector[0]) >> 4 * i & 7 for i in range(4)]
        return np.ascontiguousarray(both[:, picked]).view(np.uint32)[:, 0]
    nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    nibbles = np.broadcast_to(nibbles, (max(len(nibbles), len(both)), 4))
    both = np.broadcast_to(both, (len(nibbles), 8))
    byte = np.take_along_axis(both, (nibbles & 7).astype(np.int64), 1)
    byte = np.where(nibbles & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint8)
    return np.ascontiguousarray(byte).view(np.uint32)[:, 0]


def lop3(a, b, c, table):
    result = np.zeros(1, a.dtype)
    for i in range(8):
        if int(table[0]) >> i & 1:
            result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (
                c if i & 1 else ~c
            )
    return result


def bfe(a, position, length):
    position, length = position & 255, length & 255
    kind = unsigned(a.dtype)
    mask = shift(operator.lshift)(np.ones(1, kind), length) - kind.type(1)
    field = shift(operator.rshift)(a, position).view(kind) & mask
    if a.dtype.kind == "u":
        return field
    last = np.maximum(length, 1) - 1
    negative = (shift(operator.rshift)(field, last) & kind.type(1)).astype(bool)
    return np.where(negative, field | ~mask, field).view(a.dtype)


def bfi(a, b, position, length):
    one = b.dtype.type(1)
    mask = shift(operator.lshift)(
        shift(operator.lshift)(np.full(1, one), length & 255) - one, position & 255
    )
    return b & ~mask | shift(operator.lshift)(a, position & 255) & mask


def funnel(side, mode):
    def do(low, top, by):
        both = (top.astype(np.uint64) << np.uint64(32)) | low
        by = (by & 31 if mode == "wrap" else np.minimum(by, 32)).astype(np.uint64)
        return (both << by >> np.uint64(32) if side == "l" else both >> by).astype(
            np.uint32
        )

    return do


SIMPLE = {
    "add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "min": np.minimum, "max": np.maximum, "neg": operator.neg,
    "abs": np.abs, "not": operator.invert, "fma": lambda a, b, c: fused(a, b, c),
    "shl": shift(operator.lshift), "shr": shift(operator.rshift), "mov": np.array,
    "prmt": prmt, "lop3": lop3, "bfe": bfe, "bfi": bfi,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
}  # fmt: skip
COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
    "hi": operator.gt, "hs": operator.ge,
    "neu": operator.ne, "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


def fused(a, b, c):
    if a.dtype.itemsize != 4:
        raise Defect("fma of this type is not known")
    # Exact products of floats in doubles; the sum rounds twice in rare cases.
    return (a.astype("f8") * b.astype("f8") + c.astype("f8")).astype("f4")


def elementwise(kernel, i, f, *kinds):
    operands = zip(i.operands[1:], kinds, strict=True)
    reads = [reader(kernel, text, kind) for text, kind in operands]
    write = writer(kernel, i.operands[0])
    return lambda m: write(m, f(*[read(m) for read in reads]))


def build(kernel, i):
    """The step of an instruction; one that is not known raises when it is reached."""
    try:
        return _build(kernel, i)
    except (KeyError, ValueError, IndexError):
        return lambda m: m.fail("an instruction that this machine does not know")


def _build(kernel, i):
    name, *rest = i.opcode
    kind = TYPES.get(rest[-1]) if rest else None
    if name in ("bra", "ret", "exit", "bar", "barrier", "membar", "fence"):
        return lambda m: None  # the machine's, or none
    if name in MORE:
        return MORE[name](kernel, i, rest, kind)
    if name == "cvta":
        slot = {"shared": SHARED, "local": LOCAL, "const": CONSTANTS}.get(rest[-2], 0)
        base = np.uint64(slot << SLOT) if slot != CONSTANTS else np.uint64(0)
        sign = operator.sub if "to" in rest else operator.add
        return elementwise(kernel, i, lambda a: sign(a, base), "u64")
    if name == "mov" and "{" in i.text:
        return pack(kernel, i, kind)
    if name == "selp":
        return elementwise(
            kernel, i, lambda a, b, p: np.where(p, a, b), *[unsigned(kind)] * 2, "pred"
        )
    if not {"rn", "lo", "hi", "wide", "l", "r", "wrap", "clamp"}.issuperset(rest[:-1]):
        raise ValueError(rest)
    if name in ("mul", "mad"):
        how = "lo" if kind.kind == "f" else rest[0]
        f = {"lo": operator.mul, "hi": high, "wide": wide}[how]
        other = np.dtype(f"{kind.kind}{kind.itemsize * (1 + (how == 'wide'))}")
        if name == "mul":
            return elementwise(kernel, i, f, kind, kind)
        return elementwise(kernel, i, lambda a, b, c: f(a, b) + c, kind, kind, other)
    if name == "div":
        f = {"f": operator.truediv, "u": operator.floordiv}[kind.kind]
        return elementwise(kernel, i, f, kind, kind)
    if name == "shf":
        return elementwise(kernel, i, funnel(*rest[:2]), kind, kind, "u32")
    kinds = [kind] * (len(i.operands) - 1)
    last = {"shl": 1, "shr": 1, "lop3": 1, "bfe": 2, "bfi": 2}.get(name, 0)
    kinds[len(kinds) - last :] = ["u32"] * last
    return elementwise(kernel, i, SIMPLE[name], *kinds)


def address(kernel, text):
    """How [register + offset] or [symbol + offset] is read."""
    base, _, offset = text.strip("[]").partition("+")
    offset = np.uint64(int(offset or 0) & ((1 << 64) - 1))
    register = kernel.type_of(base.strip())
    read = reader(kernel, base.strip(), unsigned(register) if register else "u64")
    return lambda m: read(m).astype(np.uint64) + offset


def access(rest):
    """(space, items), where all else is known."""
    space = next(
        (r for r in rest if r in ("global", "shared", "local", "const", "param")), ""
    )
    count = next((int(r[1]) for r in rest if r in ("v2", "v4")), 1)
    for r in rest[:-1]:
        if r not in (space, f"v{count}", "nc") and not HINTS.fullmatch(r):
            raise ValueError(r)
    return space, count


def load(kernel, i, rest, kind):
    space, count = access(rest)
    where = address(kernel, i.operands[1])
    writes = [writer(kernel, r.strip()) for r in i.operands[0].strip("{}").split(",")]
    if space == "param":

        def parameter(m):
            at = where(m).view(np.int64)
            values = m.memory.parameter(at, kind, count)
            for c, write in enumerate(writes):
                write(m, np.ascontiguousarray(values[:, c]))

        return parameter
    read_only = "nc" in rest

    def step(m):
        values = m.memory.load(
            space if space != "const" else "",
            m.spread(where(m)),
            kind,
            count,
            read_only,
        )
        for c, write in enumerate(writes):
            write(m, np.ascontiguousarray(values[:, c]))

    return step


def store(kernel, i, rest, kind):
    space, count = access(rest)
    where = address(kernel, i.operands[0])
    reads = [
        reader(kernel, r.strip(), unsigned(kind))
        for r in i.operands[1].strip("{}").split(",")
    ]

    def step(m):
        if space in ("const", "param"):
            m.fail("a store to constant memory")
        values = [m.spread(r(m)) for r in reads]
        m.memory.store(space, m.spread(where(m)), np.stack(values, 1))

    return step


def atomic(kernel, i, rest, kind):
    if "add" not in rest or "global" not in rest:
        raise ValueError("atomic")
    operands = i.operands if i.opcode[0] == "atom" else ["_", *i.operands]
    where, read = (
        address(kernel, operands[1]),
        reader(kernel, operands[2], unsigned(kind)),
    )
    write = writer(kernel, operands[0])

    def step(m):
        write(m, m.memory.add(m.spread(where(m)), m.spread(read(m)), kind))

    return step


def asynchronous(kernel, i, rest, _):
    if rest[:2] == ["async", "commit_group"]:
        return lambda m: m.memory.commit()
    if rest[:2] == ["async", "wait_group"]:
        return lambda m: m.memory.wait(int(i.operands[0]))
    if rest[:2] == ["async", "wait_all"]:

        def everything(m):
            m.memory.commit()
            m.memory.wait(0)

        return everything
    if (
        rest[0] != "async"
        or "bulk" in rest
        or i.operands[3:] not in ([], i.operands[2:3])
    ):
        raise ValueError("cp")
    to, source = address(kernel, i.operands[0]), address(kernel, i.operands[1])
    width = int(i.operands[2])
    kind, count = (np.dtype("u4"), width // 4)
    return lambda m: m.memory.copy(m.spread(to(m)), m.spread(source(m)), kind, count)


def shuffle(kernel, i, rest, _):
    mode = rest[1]
    result, _, valid = i.operands[0].partition("|")
    write = writer(kernel, result)
    say = writer(kernel, valid) if valid else None
    value, by, clamp, mask = (reader(kernel, text, "u32") for text in i.operands[1:])

    def step(m):
        active = np.zeros(m.warps * 32, bool)
        active[m.lanes(m.lane_of_warp)] = True
        lane = m.lanes(m.lane).astype(np.int64)
        first = m.lanes(m.lane_of_warp) - lane
        b, c = (m.spread(r(m)).astype(np.int64) for r in (by, clamp))
        members = m.spread(mask(m)).astype(np.int64)
        rows = active.reshape(-1, 32) @ (1 << np.arange(32, dtype=np.int64))
        if (absent := (members & ~rows[first // 32]) != 0).any():
            m.fail("a shuffle that not all lanes of its mask reach", absent)
        segment = c >> 8 & 31
        low, top = lane & segment, (lane & segment) | (c & 31 & ~segment)
        source = {
            "idx": low | (b & 31 & ~segment), "up": lane - (b & 31),
            "down": lane + (b & 31), "bfly": lane ^ (b & 31),
        }[mode]  # fmt: skip
        inside = source >= (lane & segment) if mode == "up" else source <= top
        source = np.where(inside, source, lane)
        if (outside := ~active[first + source]).any():
            m.fail("a shuffle from a lane that is not there", outside)
        held = np.zeros(m.warps * 32, np.uint32)
        held[m.lanes(m.lane_of_warp)] = m.spread(value(m))
        write(m, held[first + source])
        if say:
            say(m, inside)

    return step


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(kernel, i, rest, _):
    to, source = TYPES[rest[-2]], TYPES[rest[-1]]
    rounding = next((ROUND[r] for r in rest if r in ROUND), None)
    if "sat" in rest or "ftz" in rest:
        raise ValueError("cvt")

    def f(a):
        if source.kind == "f" and to.kind != "f":
            limits = np.iinfo(to)
            a = np.nan_to_num(rounding(a.astype("f8")), nan=0)
            inside = np.clip(a, limits.min, limits.max)
            return np.where(
                a >= float(limits.max), limits.max, inside.astype(to)
            ).astype(to)
        return a.astype(to)

    return elementwise(kernel, i, f, source)


def set_predicate(kernel, i, rest, kind):
    name = rest[0]
    ordered = name if kind.kind != "f" or name in COMPARE else name[:-1]
    compare = COMPARE[ordered]
    unordered = kind.kind == "f" and name.endswith("u") and len(name) == 3
    join = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.get(rest[1])
    both = i.operands[0].split("|")
    write = writer(kernel, both[0])
    inverse = writer(kernel, both[1]) if len(both) > 1 else None
    a, b = (reader(kernel, text, kind) for text in i.operands[1:3])
    if join:
        text = i.operands[3].lstrip("!")
        third = reader(kernel, text, "pred")
        flip = i.operands[3].startswith("!")

    def step(m):
        x, y = a(m), b(m)
        p = compare(x, y)
        if unordered:
            p = p | np.isnan(x) | np.isnan(y)
        q = p
        if join:
            other = third(m) ^ flip
            p, q = join(p, other), join(~q, other)
        else:
            q = ~p
        write(m, p)
        if inverse:
            inverse(m, q)

    return step


def pack(kernel, i, kind):
    """mov between a register and the registers that make it up."""
    to, source = i.operands
    parts = [
        p.strip() for p in (to if to.startswith("{") else source).strip("{}").split(",")
    ]
    part = np.dtype(f"u{kind.itemsize // len(parts)}")
    if to.startswith("{"):
        read, writes = (
            reader(kernel, source, unsigned(kind)),
            [writer(kernel, p) for p in parts],
        )

        def unpack(m):
            value = read(m)
            for n, write in enumerate(writes):
                write(m, (value >> kind.type(8 * part.itemsize * n)).astype(part))

        return unpack
    reads, write = [reader(kernel, p, part) for p in parts], writer(kernel, to)

    def join(m):
        value = np.zeros(1, unsigned(kind))
        for n, read in enumerate(reads):
            value = value | read(m).astype(unsigned(kind)) << unsigned(kind).type(
                8 * part.itemsize * n
            )
        write(m, value)

    return join


MORE = {
    "ld": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "cp": asynchronous,
    "shfl": shuffle,
    "cvt": convert,
    "setp": set_predicate,
}
