# SPDX-License-Identifier: Apache-2.0
"""What each PTX instruction does, as a function of the machine, on all active lanes."""

import functools
import operator
import re

import numpy as np

from ptx.memory import LOCAL, SHARED, SLOT

TYPES = {
    f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}")
    for kind, letter in {"u": "u", "s": "i", "b": "u"}.items()
    for bits in (8, 16, 32, 64)
} | {name: np.dtype(f"f{int(name[1:]) // 8}") for name in ("f16", "f32", "f64")}
TYPES["pred"] = np.dtype("?")
# Said of an access, without a meaning here.
HINTS = re.compile(
    r"volatile|relaxed|acquire|release|gpu|sys|cta|wb|c[agsv]|L[12]::.*|weak|async|nc"
)
SPACES = ("global", "shared", "local", "const", "param")


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
        return cast(np.array([int(text[2:], 16)], f"u{(len(text) - 2) // 2}"), kind)
    value = int(text.rstrip("U"), 0) & ((1 << 8 * kind.itemsize) - 1)
    return np.array([value], np.uint64).astype(unsigned(kind)).view(kind)


def reader(kernel, text, kind):
    """How an operand is read as a type."""
    kind = TYPES.get(kind, kind)
    if text.startswith("!"):
        read = reader(kernel, text[1:], kind)
        return lambda m: ~read(m)
    if kernel.type_of(text):
        return lambda m: cast(m.get(text), kind)
    if text.startswith("%"):
        return lambda m: cast(m.lanes(m.special[text]), kind)
    if text[0].isdigit() or text[0] == "-":
        value = constant(text, kind)
        return lambda m: value
    name, _, offset = text.partition("+")
    past = np.uint64(int(offset or 0))
    return lambda m: cast(np.array([m.memory.addresses[name] + past], np.uint64), kind)


def writer(kernel, text):
    """How a result, of any type, reaches a register: sign-extended if it is signed."""
    if text == "_":
        return lambda m, value: None
    width = unsigned(kernel.type_of(text))

    def write(m, value):
        if value.dtype.kind == "f":
            value = value.view(unsigned(value.dtype))
        m.set(text, value.astype(width, copy=False))

    return write


def names(*operands):
    """Those of lists and pairs one by one."""
    return re.findall(r"!?[%\w$.+-]+", " ".join(operands))


def elementwise(kernel, i, f, *kinds):
    """f of the operands, each as its type, is the result or a list of all results."""
    operands = zip(names(*i.operands[1:]), kinds, strict=True)
    reads = [reader(kernel, text, kind) for text, kind in operands]
    writes = [writer(kernel, text) for text in names(i.operands[0])]

    def step(m):
        values = f(*[read(m) for read in reads])
        for write, value in zip(
            writes, values if isinstance(values, list) else [values], strict=False
        ):
            write(m, value)

    return step


# -- arithmetic ----------------------------------------------------------------


def wide(a, b):
    kind = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(kind) * b.astype(kind)


def high(a, b):
    """The upper half of a product."""
    if a.dtype.itemsize < 8:
        product = wide(a, b)
        return (product >> product.dtype.type(8 * a.dtype.itemsize)).astype(a.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (other >> half)


def shift(how, a, by):
    bits = 8 * a.dtype.itemsize
    if how == operator.rshift and a.dtype.kind == "i":
        return a >> np.minimum(by, bits - 1).astype(a.dtype)
    inside = how(a, (by % bits).astype(a.dtype))
    return inside if (by < bits).all() else np.where(by < bits, inside, a.dtype.type(0))


left = functools.partial(shift, operator.lshift)
right = functools.partial(shift, operator.rshift)


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
            terms = zip((a, b, c), (4, 2, 1), strict=True)
            result = result | np.bitwise_and.reduce(
                np.broadcast_arrays(*[t if i & bit else ~t for t, bit in terms])
            )
    return result


def bfe(a, position, length):
    position, length = position & 255, length & 255
    mask = left(np.ones(1, a.dtype), length) - a.dtype.type(1)
    return right(a, position) & mask


def bfi(a, b, position, length):
    one = b.dtype.type(1)
    mask = left(left(np.full(1, one), length & 255) - one, position & 255)
    return b & ~mask | left(a, position & 255) & mask


def funnel(side, mode, low, top, by):
    both = (top.astype(np.uint64) << np.uint64(32)) | low
    by = (by & 31 if mode == "wrap" else np.minimum(by, 32)).astype(np.uint64)
    return (both << by >> np.uint64(32) if side == "l" else both >> by).astype("u4")


SIMPLE = {
    "add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "min": np.minimum, "max": np.maximum, "neg": operator.neg,
    "not": operator.invert, "shl": left, "shr": right, "prmt": prmt, "lop3": lop3,
    "bfe": bfe, "bfi": bfi,
}  # fmt: skip
COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
    "hi": operator.gt, "hs": operator.ge,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
# Signed operands, which no kernel has here, would be taken for unsigned ones.
LACKING = {"bfe.s32", "bfe.s64", "mul.hi.s64", "mad.hi.s64"}
JOIN = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


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
    known = {"rn", "lo", "hi", "wide", "l", "r", "wrap", "clamp"}
    if not known.issuperset(rest[:-1]) or ".".join(i.opcode) in LACKING:
        raise ValueError(rest)
    if name in ("mul", "mad"):
        how = "lo" if kind.kind == "f" else rest[0]
        f = {"lo": operator.mul, "hi": high, "wide": wide}[how]
        if name == "mul":
            return elementwise(kernel, i, f, kind, kind)
        other = np.dtype(f"{kind.kind}{kind.itemsize * (1 + (how == 'wide'))}")
        return elementwise(kernel, i, lambda a, b, c: f(a, b) + c, kind, kind, other)
    if name == "div":
        f = {"f": operator.truediv, "u": operator.floordiv}[kind.kind]
        return elementwise(kernel, i, f, kind, kind)
    if name == "shf":
        return elementwise(
            kernel, i, functools.partial(funnel, *rest[:2]), *["u32"] * 3
        )
    kinds = [kind] * (len(i.operands) - 1)
    last = {"shl": 1, "shr": 1, "lop3": 1, "bfe": 2, "bfi": 2}.get(name, 0)
    kinds[len(kinds) - last :] = ["u32"] * last
    return elementwise(kernel, i, SIMPLE[name], *kinds)


def to_address(kernel, i, rest, _):
    base = {"shared": SHARED, "local": LOCAL}.get(rest[-2], 0) << SLOT
    sign = operator.sub if "to" in rest else operator.add
    return elementwise(kernel, i, lambda a: sign(a, np.uint64(base)), "u64")


def move(kernel, i, _, kind):
    """Between registers, or one and those that make it up."""
    parts = len(names(i.operands[0])), len(names(*i.operands[1:]))
    if parts == (1, 1):
        return elementwise(kernel, i, np.array, kind)
    whole, part = unsigned(kind), np.dtype(f"u{kind.itemsize // max(parts)}")
    places = [whole.type(8 * part.itemsize * n) for n in range(max(parts))]

    def split(value):
        return [(value >> place).astype(part) for place in places]

    def join(*values):
        shifted = [v.astype(whole) << p for v, p in zip(values, places, strict=True)]
        return functools.reduce(operator.or_, shifted)

    if parts[1] == 1:
        return elementwise(kernel, i, split, whole)
    return elementwise(kernel, i, join, *[part] * parts[1])


def select(kernel, i, _, kind):
    kinds = unsigned(kind), unsigned(kind), "pred"
    return elementwise(kernel, i, lambda a, b, p: np.where(p, a, b), *kinds)


def set_predicate(kernel, i, rest, kind):
    compare, join = COMPARE[rest[0]], JOIN.get(rest[1])

    def f(a, b, *other):
        p = compare(a, b)
        return [join(q, *other) if join else q for q in (p, ~p)]

    return elementwise(kernel, i, f, kind, kind, *["pred"] * bool(join))


def convert(kernel, i, rest, source):
    to = TYPES[rest[0]]
    if len(rest) > 2 or "f" in source.kind + to.kind:
        raise ValueError("cvt")
    return elementwise(kernel, i, lambda a: a.astype(to), source)


# -- memory --------------------------------------------------------------------


def address(kernel, text):
    """How [register + offset] or [symbol + offset] is read."""
    base, _, offset = text.strip("[]").partition("+")
    offset = np.uint64(int(offset or 0) & ((1 << 64) - 1))
    register = kernel.type_of(base.strip())
    read = reader(kernel, base.strip(), unsigned(register) if register else "u64")
    return lambda m: read(m).astype(np.uint64) + offset


def access(rest):
    """(space, items), where all else is known."""
    space = next((r for r in rest if r in SPACES), "")
    count = next((int(r[1]) for r in rest if r in ("v2", "v4")), 1)
    for r in rest[:-1]:
        if r not in (space, f"v{count}") and not HINTS.fullmatch(r):
            raise ValueError(r)
    return space, count


def load(kernel, i, rest, kind):
    space, count = access(rest)
    where = address(kernel, i.operands[1])
    writes = [writer(kernel, name) for name in names(i.operands[0])]

    def step(m):
        at = where(m) if space == "param" else m.spread(where(m))
        values = m.memory.load(space, at, kind, count, "nc" in rest)
        for c, write in enumerate(writes):
            write(m, np.ascontiguousarray(values[:, c]))

    return step


def store(kernel, i, rest, kind):
    space, _ = access(rest)
    where = address(kernel, i.operands[0])
    reads = [reader(kernel, name, unsigned(kind)) for name in names(i.operands[1])]

    def step(m):
        values = [m.spread(read(m)) for read in reads]
        m.memory.store(space, m.spread(where(m)), np.stack(values, 1))

    return step


def atomic(kernel, i, rest, kind):
    if "add" not in rest or "global" not in rest:
        raise ValueError("atomic")
    result, at, value = i.operands if i.opcode[0] == "atom" else ["_", *i.operands]
    where, read = address(kernel, at), reader(kernel, value, unsigned(kind))
    write = writer(kernel, result)
    return lambda m: write(m, m.memory.add(m.spread(where(m)), m.spread(read(m)), kind))


def asynchronous(kernel, i, rest, _):
    if rest[:2] == ["async", "commit_group"]:
        return lambda m: m.memory.commit()
    if rest[:2] == ["async", "wait_group"]:
        return lambda m: m.memory.wait(int(i.operands[0]))
    to, source, width, *copied = i.operands
    if rest[0] != "async" or "bulk" in rest or copied not in ([], [width]):
        raise ValueError("cp")
    to, source = address(kernel, to), address(kernel, source)
    return lambda m: m.memory.copy(
        m.spread(to(m)), m.spread(source(m)), np.dtype("u4"), int(width) // 4
    )


def shuffle(kernel, i, rest, _):
    result, _, valid = i.operands[0].partition("|")
    write, say = writer(kernel, result), writer(kernel, valid or "_")
    value, by, clamp, mask = (reader(kernel, text, "u32") for text in i.operands[1:])
    if rest[1] not in ("idx", "bfly"):
        raise ValueError(rest)

    def step(m):
        held, active = np.zeros(m.warps * 32, np.uint32), np.zeros(m.warps * 32, bool)
        place = m.lanes(m.lane_of_warp)
        active[place], held[place] = True, m.spread(value(m))
        lane = m.lanes(m.lane).astype(np.int64)
        b, c, members = (m.spread(r(m)).astype(np.int64) for r in (by, clamp, mask))
        b &= 31
        rows = active.reshape(-1, 32) @ (1 << np.arange(32, dtype=np.int64))
        absent = (members & ~rows[place // 32]) != 0
        m.require(~absent, "a shuffle that not all lanes of its mask reach")
        segment = c >> 8 & 31
        low, top = lane & segment, (lane & segment) | (c & 31 & ~segment)
        source = low | (b & ~segment) if rest[1] == "idx" else lane ^ b
        inside = source <= top
        source = place - lane + np.where(inside, source, lane)
        m.require(active[source], "a shuffle from a lane that is not there")
        write(m, held[source])
        say(m, inside)

    return step


MORE = {
    "atom": atomic, "cp": asynchronous, "cvt": convert, "cvta": to_address, "ld": load,
    "mov": move, "red": atomic, "selp": select, "setp": set_predicate, "shfl": shuffle,
    "st": store,
}  # fmt: skip
