# SPDX-License-Identifier: Apache-2.0
"""Memory formats: the order in which the elements of a logically NCHW array lie.

A format factors each logical dimension into atoms and gives the atoms a physical
order. NHWC is a permutation; NCHW16c splits C into (C/16, 16) and puts the 16 last.
Splitting or merging dimensions by a reshape only regroups the atoms.

Compiled values have no layout that JAX could ask for, so a value inside a trace
remembers the physical array that it was made from: operators compute on that array,
and the logical view beside it costs nothing unless something else reads it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.typing import ArrayLike, DTypeLike

from jax_layout.op import Op, define
from jax_layout.permute import permute

Atom = tuple[int, int]  # dimension, and which of its atoms; 0 is the outermost
P = ParamSpec("P")
R = TypeVar("R")


class Channels(enum.Enum):
    """Where the channels lie, for any number of spatial axes."""

    FIRST = "channels_first"
    LAST = "channels_last"

    def __repr__(self) -> str:
        return self.value


channels_first = Channels.FIRST
channels_last = Channels.LAST


@dataclasses.dataclass(frozen=True)
class MemoryFormat:
    """The order of an array's elements in memory.

    Attributes:
      blocks: for each logical dimension the sizes of its inner atoms, outermost
        first; what they leave of the dimension is its atom 0.
      order: every atom, the slowest to change first.

    >>> nhwc = MemoryFormat.named("NHWC")
    >>> nhwc.physical_shape((8, 3, 32, 32))
    (8, 32, 32, 3)
    >>> MemoryFormat.named("NCHW16c").physical_shape((8, 64, 7, 7))
    (8, 4, 7, 7, 16)
    """

    blocks: tuple[tuple[int, ...], ...]
    order: tuple[Atom, ...]

    def __post_init__(self) -> None:
        atoms = {(d, i) for d, b in enumerate(self.blocks) for i in range(len(b) + 1)}
        if len(self.order) != len(atoms) or set(self.order) != atoms:
            raise ValueError(
                "MemoryFormat: order must hold every atom of the dimensions once, "
                f"got {self.order} for blocks {self.blocks}."
            )

    @classmethod
    def of_permutation(cls, axes: Sequence[int]) -> MemoryFormat:
        """The format whose physical axis i is the logical axis `axes[i]`."""
        return cls(((),) * len(axes), tuple((int(axis), 0) for axis in axes))

    @classmethod
    def named(cls, name: str) -> MemoryFormat:
        """A format by its name: N, C (or O, I), then D, H, W, as many as there are.

        Capitals are dimensions, numbers with a small letter blocks of one, as in
        oneDNN: NCHW, NHWC, NCW, NWC, NCDHW, NDHWC, NCHW16c, OIHW, HWIO, OHWI.

        Raises:
          ValueError: if there is no format of this name.
        """
        return _named(name)

    @property
    def ndim(self) -> int:
        """Number of logical dimensions."""
        return len(self.blocks)

    @property
    def permutation(self) -> tuple[int, ...] | None:
        """Logical axis of each physical one; None for formats with blocks."""
        if any(self.blocks):
            return None
        return tuple(dim for dim, _ in self.order)

    @property
    def row_major(self) -> bool:
        """Whether elements lie in the order of their logical indices."""
        return self.permutation == tuple(range(self.ndim))

    def axes(self, dim: int) -> tuple[int, ...]:
        """Physical axes of a logical dimension, the outermost first."""
        dim %= self.ndim
        return tuple(
            self.order.index((dim, atom)) for atom in range(len(self.blocks[dim]) + 1)
        )

    def physical_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The row-major shape in memory of an array of this logical shape.

        Raises:
          ValueError: if the rank differs, or a dimension does not divide into its
            blocks.
        """
        if len(shape) != self.ndim:
            raise ValueError(
                f"memory format {self} is for arrays of {self.ndim} dimensions, "
                f"got shape {tuple(shape)}."
            )
        sizes = {}
        for dim, (size, blocks) in enumerate(zip(shape, self.blocks, strict=True)):
            block = math.prod(blocks)
            if size % block:
                raise ValueError(
                    f"memory format {self}: dimension {dim} must be divisible by "
                    f"{block}, got shape {tuple(shape)}."
                )
            for atom, extent in enumerate((size // block, *blocks)):
                sizes[dim, atom] = extent
        return tuple(sizes[atom] for atom in self.order)

    def logical_shape(self, physical_shape: Sequence[int]) -> tuple[int, ...]:
        """The logical shape of an array that has this row-major shape in memory."""
        return tuple(
            math.prod(physical_shape[axis] for axis in self.axes(dim))
            for dim in range(self.ndim)
        )

    def pack(self, x: Array) -> Array:
        """The row-major array of what lies in memory when x has this format."""
        return convert(x, row_major(self.ndim), self)

    def unpack(self, physical: Array) -> Array:
        """The inverse of `pack`."""
        return convert(physical, self, row_major(self.ndim))

    def transposed(self, axes: Sequence[int]) -> MemoryFormat:
        """The format of `transpose(x, axes)` in the memory of an x of this one."""
        place = {axis: i for i, axis in enumerate(axes)}
        return MemoryFormat(
            tuple(self.blocks[axis] for axis in axes),
            tuple((place[dim], atom) for dim, atom in self.order),
        )

    def split(self, dim: int, inner: int) -> MemoryFormat:
        """The format, in the same memory, after a reshape that splits a dimension.

        Args:
          dim: the dimension, of size `outer * inner`; it becomes dimensions `dim`
            and `dim + 1` of these sizes.
          inner: size of the inner one.

        Raises:
          ValueError: if the cut does not fall between the factors of an atom.

        >>> groups = MemoryFormat.named("NHWC").split(1, 8)  # N, C/8, 8, H, W
        >>> groups.physical_shape((2, 4, 8, 5, 6))
        (2, 5, 6, 4, 8)
        """
        pieces: dict[int, tuple[int | None, int]] = {}  # of each atom, by the cut
        extent = 1  # of the dimension's atoms inside the one at hand
        for atom, size in reversed(list(enumerate((None, *self.blocks[dim])))):
            if inner <= extent:
                pieces[atom] = (size, 1)
            elif size is not None and inner >= extent * size:
                pieces[atom] = (1, size)
            elif inner % extent == 0 and (size or inner) % (inner // extent) == 0:
                ratio = inner // extent
                pieces[atom] = (size and size // ratio, ratio)
            else:
                raise ValueError(
                    f"memory format {self}: a split of dimension {dim} at {inner} "
                    f"does not fall between the factors of its blocks."
                )
            extent *= size or 1
        atoms: list[_Sized] = []
        for d, atom, size in self.atoms():
            if d == dim:
                outside, within = pieces[atom]
                atoms += [(dim, atom, outside), (dim + 1, atom, within)]
            else:
                atoms.append((d + (d > dim), atom, size))
        return from_atoms(self.ndim + 1, atoms)

    def merge(self, dim: int, inner: int) -> MemoryFormat:
        """The inverse of `split`: dimension `dim + 1`, of size `inner`, joins `dim`."""
        rest = inner // math.prod(self.blocks[dim + 1])
        depth = len(self.blocks[dim]) + 1
        return from_atoms(
            self.ndim - 1,
            [
                (d - 1, atom + depth, size or rest)
                if d == dim + 1
                else (d - (d > dim), atom, size)
                for d, atom, size in self.atoms()
            ],
        )

    def batched(self) -> MemoryFormat:
        """The format of a stack of such arrays along a new first dimension."""
        return MemoryFormat(
            ((), *self.blocks), ((0, 0), *((dim + 1, a) for dim, a in self.order))
        )

    def without_units(self, shape: Sequence[int]) -> MemoryFormat:
        """This format of an array of this shape, without the axes of size 1."""
        axes = [dim for dim, size in enumerate(shape) if size != 1]
        kept = [(axes.index(d), a, n) for d, a, n in self.atoms() if d in axes]
        return from_atoms(len(axes), kept)

    def atoms(self) -> list[_Sized]:
        """Dimension, depth and size of each atom in physical order.

        None is the size of what the others leave of a dimension.
        """
        return [(d, a, self.blocks[d][a - 1] if a else None) for d, a in self.order]

    def __str__(self) -> str:
        letters = {2: "NC", 3: "NCW", 4: "NCHW", 5: "NCDHW"}.get(self.ndim)
        if letters is None:
            letters = "".join(chr(ord("A") + dim) for dim in range(self.ndim))
        return "".join(
            f"{self.blocks[dim][atom - 1]}{letters[dim].lower()}"
            if atom
            else letters[dim]
            for dim, atom in self.order
        )

    def __repr__(self) -> str:
        return f"MemoryFormat({self})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FormattedArray:
    """An array of plain jax kept in a memory format, as `plan_layout` lays it out.

    A node of a tree, whose leaf is the physical array: `jax.tree.map`, optimizers
    and derivatives work on that. Functions of `jax.numpy` take it for the logical
    array, which they make.

    Attributes:
      physical: row-major array of what lies in memory.
      format: in which order that is.

    >>> x = FormattedArray(jnp.zeros((2, 32, 32, 3)), MemoryFormat.named("NHWC"))
    >>> x.shape, x.logical().shape
    ((2, 3, 32, 32), (2, 3, 32, 32))
    """

    physical: Array
    format: MemoryFormat = dataclasses.field(metadata={"static": True})

    @classmethod
    def pack(cls, x: ArrayLike, format: MemoryFormat) -> FormattedArray:
        """A plain array, brought to a format."""
        return cls(format.pack(jnp.asarray(x)), format)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.format.logical_shape(self.physical.shape)

    @property
    def ndim(self) -> int:
        """Number of logical dimensions."""
        return self.format.ndim

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.physical.dtype

    def logical(self) -> Array:
        """The row-major array with the logical shape."""
        return self.format.unpack(self.physical)

    __jax_array__ = logical


FormatLike = MemoryFormat | Channels | str


# Dimension, depth and, unless it is what the others leave, size of an atom.
_Sized = tuple[int, int, int | None]


def from_atoms(ndim: int, atoms: Sequence[_Sized]) -> MemoryFormat:
    """The format of these atoms in this order, of as few atoms as can be."""
    atoms = [atom for atom in atoms if atom[2] != 1]
    for dim in range(ndim):
        if all(d != dim for d, _, _ in atoms):
            atoms.append((dim, 0, None))
    depths = [sorted(depth for d, depth, _ in atoms if d == dim) for dim in range(ndim)]
    joined: list[_Sized] = []
    for dim, depth, size in atoms:
        rank = depths[dim].index(depth)
        if joined and joined[-1][:2] == (dim, rank - 1):
            outer = joined[-1][2]
            whole = None if outer is None or size is None else outer * size
            joined[-1] = (dim, rank, whole)
        else:
            joined.append((dim, rank, size))
    ranks = [sorted(rank for d, rank, _ in joined if d == dim) for dim in range(ndim)]
    sizes = {(dim, rank): size for dim, rank, size in joined}
    blocks = tuple(
        tuple(sizes[dim, rank] or 0 for rank in ranks[dim][1:]) for dim in range(ndim)
    )
    order = tuple((dim, ranks[dim].index(rank)) for dim, rank, _ in joined)
    return MemoryFormat(blocks, order)


@functools.cache
def row_major(ndim: int) -> MemoryFormat:
    """The format of arrays as jax has them."""
    return MemoryFormat.of_permutation(range(ndim))


@functools.cache
def _named(name: str) -> MemoryFormat:
    parts = re.findall(r"([A-Z])|([1-9]\d*)([a-z])", name)
    capitals = [capital for capital, _, _ in parts if capital]
    spelled = "".join(capital + size + letter for capital, size, letter in parts)
    for spatial in ("W", "HW", "DHW", ""):
        for letters in ("NC" + spatial, "OI" + spatial):
            if spelled == name and sorted(capitals) == sorted(letters):
                blocks: list[list[int]] = [[] for _ in letters]
                order = []
                for capital, size, letter in parts:
                    dim = letters.find(capital or letter.upper())
                    if dim < 0:
                        break
                    if size:
                        blocks[dim].append(int(size))
                    order.append((dim, 0 if capital else len(blocks[dim])))
                else:
                    if _outermost_first(order):
                        known = MemoryFormat(tuple(map(tuple, blocks)), tuple(order))
                        return from_atoms(known.ndim, known.atoms())
    raise ValueError(
        "memory format: a name holds N and C (or O and I) and none, W, HW or DHW, "
        f"each once, and blocks such as 16c after them, got {name!r}."
    )


def _outermost_first(order: Sequence[Atom]) -> bool:
    return all((dim, 0) in order[: i + 1] for i, (dim, _) in enumerate(order))


def resolve(name: str, format: FormatLike, ndim: int) -> MemoryFormat:
    """The format that a caller of the operator `name` means for arrays of a rank."""
    if isinstance(format, str) and format in ("channels_first", "channels_last"):
        format = Channels(format)
    if isinstance(format, Channels):
        if ndim < 3 or ndim > 5:
            raise ValueError(
                f"{name}: {format!r} is for arrays of 3 to 5 dimensions (N, C and one "
                f"to three spatial ones), got {ndim}."
            )
        if format is Channels.FIRST:
            return row_major(ndim)
        return MemoryFormat.of_permutation([0, *range(2, ndim), 1])
    if isinstance(format, str):
        try:
            format = MemoryFormat.named(format)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if not isinstance(format, MemoryFormat):
        raise TypeError(
            f"{name}: a memory format is a MemoryFormat, channels_first, channels_last "
            f"or a name such as 'NHWC', got {format!r}."
        )
    if format.ndim != ndim:
        raise ValueError(
            f"{name}: memory format {format} is for arrays of {format.ndim} "
            f"dimensions, got {ndim}."
        )
    return format


def convert(physical: Array, source: MemoryFormat, target: MemoryFormat) -> Array:
    """Re-orders what lies in memory from one format to another, by one permute.

    Args:
      physical: row-major array of the physical shape of `source`.
      source: the format it has.
      target: the format it gets.

    Returns:
      row-major array of the physical shape of `target`.

    Raises:
      ValueError: if the blocks of the two do not divide each other.
    """
    if source == target:
        return physical
    shape = source.logical_shape(physical.shape)
    result = target.physical_shape(shape)
    if 0 in shape:
        return physical.reshape(result)
    # Atoms fine enough for both: a cut wherever either of them cuts.
    fine = []
    for dim, size in enumerate(shape):
        cuts = sorted(_cuts(source.blocks[dim]) | _cuts(target.blocks[dim]))
        if any(outer % inner for inner, outer in zip(cuts, cuts[1:], strict=False)):
            # No common atoms (blocks of 8 and 12): by way of row-major order.
            return target.pack(source.unpack(physical))
        pairs = zip(cuts, [*cuts[1:], size], strict=True)
        fine.append([(inner, outer) for inner, outer in pairs if inner < outer])

    def atoms(format: MemoryFormat) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        for dim, atom in format.order:
            blocks = format.blocks[dim]
            inner = math.prod(blocks[atom:])
            outer = math.prod(blocks[atom - 1 :]) if atom else shape[dim]
            pieces = [(dim, i, o) for i, o in fine[dim] if inner <= i and o <= outer]
            found += reversed(pieces)
        return found

    before, after = atoms(source), atoms(target)
    sizes = [outer // inner for _, inner, outer in before]
    moved = permute(physical.reshape(sizes), [before.index(atom) for atom in after])
    return moved.reshape(result)


def _cuts(blocks: Sequence[int]) -> set[int]:
    return {math.prod(blocks[i:]) for i in range(len(blocks) + 1)}


# What traced values were made from, by id, as they cannot be hashed; gone when they
# are.
_origins: dict[int, tuple[weakref.ref[Any], Array, MemoryFormat]] = {}


def _remember(x: Any, physical: Array, format: MemoryFormat) -> None:
    key = id(x)
    origins = _origins  # the global is gone when the interpreter ends
    reference = weakref.ref(x, lambda _: origins.pop(key, None))
    _origins[key] = reference, physical, format


def stored(x: Array) -> tuple[Array, MemoryFormat]:
    """What an operator computes on: the physical array of a value, and its format.

    Args:
      x: logical value, traced or not.

    Returns:
      the row-major array of what lies in memory, and the format it is in.
    """
    if isinstance(x, jax.core.Tracer):
        _, physical, format = _origins.get(id(x), (None, x, row_major(x.ndim)))
        return physical, format
    format = _format_of_array(x)
    if format.row_major:
        return x, format
    return jax.lax.transpose(x, format.permutation or ()), format


def store(physical: Array, format: MemoryFormat) -> Array:
    """The logical value of a physical array: the inverse of `stored`.

    Operators that find the value in a trace get the physical array back.
    """
    if format.row_major:
        return physical
    if isinstance(physical, jax.core.Tracer):
        x = format.unpack(physical)
        _remember(x, physical, format)
        return x
    placement = _placement([physical])
    if format.permutation is None or placement is None:
        return format.unpack(physical)
    return _as_it_lies(format, placement)(physical)


@functools.lru_cache(maxsize=512)
def _as_it_lies(format: MemoryFormat, placement: Any) -> Callable[[Array], Array]:
    """Relabels concrete physical arrays, which stay as they lie."""
    order = format.permutation
    assert order is not None
    return jax.jit(
        lambda physical: jax.lax.transpose(physical, np.argsort(order)),
        out_shardings=Format(Layout(order), placement),
    )


def formatted(function: Callable[P, R]) -> Callable[P, R]:
    """Lets an operator made of `stored` and `store` be called outside of a trace.

    Concrete arrays in a format of their own are then read, and the results
    written, in that format, by one compiled program.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return function(*args, **kwargs)
        formats = tuple(
            _format_of_array(x) if isinstance(x, Array) else None for x in leaves
        )
        if all(format is None or format.row_major for format in formats):
            return function(*args, **kwargs)
        static = tuple(
            None if isinstance(x, Array | np.ndarray) else (type(x), x) for x in leaves
        )
        arrays = [x for x in leaves if isinstance(x, Array | np.ndarray)]
        return _compiled(function, tree, formats, static)(*arrays)

    return call


@functools.lru_cache(maxsize=512)
def _compiled(
    function: Callable[..., R],
    tree: Any,
    formats: tuple[MemoryFormat | None, ...],
    static: tuple[tuple[type, Hashable] | None, ...],
) -> Callable[..., R]:
    results: list[MemoryFormat | None] = []

    def run(*arrays: Array) -> Any:
        given = iter(arrays)
        leaves: list[Any] = []
        leaf: Any
        for format, known in zip(formats, static, strict=True):
            leaf = next(given) if known is None else known[1]
            if format is not None and not format.row_major:
                # XLA reads the array as it lies.
                _remember(
                    leaf, jax.lax.transpose(leaf, format.permutation or ()), format
                )
            leaves.append(leaf)
        args, kwargs = jax.tree.unflatten(tree, leaves)
        out = function(*args, **kwargs)
        outputs, out_tree = jax.tree.flatten(out)
        results[:] = [
            memory_format(x) if isinstance(x, Array) else None for x in outputs
        ]
        # XLA writes the arrays as they lie, too.
        outputs = [
            jax.lax.transpose(stored(x)[0], np.argsort(format.permutation))
            if format is not None and format.permutation is not None
            else x
            for x, format in zip(outputs, results, strict=True)
        ]
        return jax.tree.unflatten(out_tree, outputs)

    @functools.cache
    def compiled(shapes: Any, placement: Any) -> Callable[..., Any]:
        out = jax.eval_shape(run, *shapes)
        if placement is None:
            return jax.jit(run)
        return jax.jit(
            run,
            out_shardings=jax.tree.unflatten(
                jax.tree.structure(out),
                [
                    Format(Layout(f.permutation), placement)
                    if f is not None and f.permutation is not None
                    else None
                    for f in results
                ],
            ),
        )

    def call(*arrays: Array) -> Any:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        return compiled(shapes, _placement(arrays))(*arrays)

    return call


def _placement(arrays: Sequence[Any]) -> Any:
    """Where results in a format of their own can lie: on one device.

    Results of arrays spread over several devices come back row-major, as jax asks
    for the whole sharding of whatever it is to lay out.
    """
    shardings = {x.sharding for x in arrays if isinstance(x, Array)}
    devices = {device for sharding in shardings for device in sharding.device_set}
    return shardings.pop() if len(devices) == 1 else None


def _format_of_array(x: Array) -> MemoryFormat:
    layout = getattr(getattr(x, "format", None), "layout", None)
    order = range(x.ndim) if layout is None else layout.major_to_minor
    return MemoryFormat.of_permutation(order)


@functools.lru_cache(maxsize=512)
def _in_format(format: MemoryFormat, placement: Any) -> Callable[[Array], Array]:
    """Writes concrete arrays, whatever format they are in, in this one."""
    order = format.permutation
    assert order is not None

    def relayout(x: Array) -> Array:
        return jax.lax.transpose(format.pack(x), np.argsort(order))

    out = Format(Layout(order), placement)
    compiled = jax.jit(relayout, out_shardings=out)

    def call(x: Array) -> Array:
        # Ours permutes row-major arrays; XLA reads the others as they lie.
        if _format_of_array(x).row_major:
            return compiled(x)
        return jax.device_put(x, out)

    return call


def with_memory_format(x: ArrayLike, memory_format: FormatLike) -> Array:
    """The same values in another memory format.

    A concrete array is moved in memory, and keeps its format as jax's own
    `Format(Layout(...))`; its shape stays logical, NCHW. Inside a trace the result
    is tagged: the operators of this package compute in the tag's format and hand it
    on, in the forward pass and in the gradient; other functions, and the borders of
    `jit`, `scan`, `while_loop` and `cond`, take the plain logical values.

    Args:
      x: logical shape `(N, C, *spatial)`, or `(O, I, *spatial)` of a weight.
      memory_format: `channels_last`, `channels_first`, a name such as "NHWC",
        "NCHW16c" or "HWIO", or a `MemoryFormat`.

    Returns:
      values, shape and dtype of `x`.

    Raises:
      TypeError: if x is not an array, or memory_format no format.
      ValueError: if the format's rank or blocks do not fit the shape, or a format
        with blocks, which jax has no layout for, is asked of a concrete array.

    Source: `Tensor.to(memory_format=...)` of PyTorch; the soft tag of its RFC #19092.

    >>> x = with_memory_format(jnp.zeros((8, 3, 32, 32)), channels_last)
    >>> x.shape, is_contiguous(x, "NHWC")
    ((8, 3, 32, 32), True)
    """
    x = _array("with_memory_format", x)
    format = resolve("with_memory_format", memory_format, x.ndim)
    try:
        format.physical_shape(x.shape)
    except ValueError as error:
        raise ValueError(f"with_memory_format: {error}") from error
    if isinstance(x, jax.core.Tracer):
        physical, current = stored(x)
        y = memory_format_p(x, format=format)
        _remember(y, convert(physical, current, format), format)
        return y
    if format.permutation is None:
        raise ValueError(
            f"with_memory_format: a concrete array cannot have the format {format}, "
            "which has blocks; convert inside jit, or keep format.pack(x)."
        )
    return _in_format(format, x.sharding)(x)


def memory_format(x: ArrayLike) -> MemoryFormat:
    """The memory format of an array, or the tag of a traced value.

    >>> memory_format(jnp.zeros((8, 3, 32, 32)))
    MemoryFormat(NCHW)
    """
    return _current(_array("memory_format", x))


def _current(x: Array) -> MemoryFormat:
    if isinstance(x, jax.core.Tracer):
        return stored(x)[1]
    return _format_of_array(x)


def is_contiguous(x: ArrayLike, memory_format: FormatLike = channels_first) -> bool:
    """Whether the elements of x lie in memory as the format says.

    Axes of size 1 have no place in memory: with one channel, or one pixel, an
    array is contiguous in NCHW and in NHWC, as in PyTorch.

    Args:
      x: array or traced value, shape `(N, C, *spatial)`.
      memory_format: as in `with_memory_format`.

    >>> x = jnp.zeros((8, 3, 32, 32))
    >>> is_contiguous(x), is_contiguous(x, channels_last)
    (True, False)
    >>> is_contiguous(x[:, :1], channels_last)
    True
    """
    x = _array("is_contiguous", x)
    if memory_format is channels_first:
        wanted = row_major(x.ndim)
    else:
        wanted = resolve("is_contiguous", memory_format, x.ndim)
    return wanted.without_units(x.shape) == _current(x).without_units(x.shape)


Preserve = Literal["preserve"]
preserve: Preserve = "preserve"


def full_like(
    x: ArrayLike,
    fill_value: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    memory_format: FormatLike = preserve,
) -> Array:
    """An array of one value, with the shape and, unless said otherwise, format of x.

    Args:
      x: shape `(N, C, *spatial)`, any dtype.
      fill_value: number, or array that broadcasts to the shape of `x`.
      dtype: of the result; `x`'s if left out.
      memory_format: `preserve`, or as in `with_memory_format`.

    >>> x = with_memory_format(jnp.zeros((8, 3, 32, 32)), channels_last)
    >>> is_contiguous(full_like(x, 2.0), channels_last)
    True
    """
    return _like("full_like", x, fill_value, dtype, memory_format)


def zeros_like(
    x: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    memory_format: FormatLike = preserve,
) -> Array:
    """`full_like` with zeros."""
    return _like("zeros_like", x, 0, dtype, memory_format)


def ones_like(
    x: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    memory_format: FormatLike = preserve,
) -> Array:
    """`full_like` with ones."""
    return _like("ones_like", x, 1, dtype, memory_format)


def empty_like(
    x: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    memory_format: FormatLike = preserve,
) -> Array:
    """`full_like` with values that do not matter: zeros, as in `jax.numpy`."""
    return _like("empty_like", x, 0, dtype, memory_format)


def _like(
    name: str, x: ArrayLike, value: ArrayLike, dtype: Any, format: FormatLike
) -> Array:
    x = _array(name, x)
    if isinstance(format, str) and format == preserve:
        wanted = _current(x)
    else:
        wanted = resolve(name, format, x.ndim)
    y = jnp.full_like(x, value, dtype=dtype)
    return y if wanted.row_major else with_memory_format(y, wanted)


def _array(name: str, x: Any) -> Array:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: x must be an array, got {type(x).__name__}.")
    # A copy of a traced value, as asarray makes some, would be without its tag.
    return x if isinstance(x, Array) else jnp.asarray(x)


def _transpose(ct: Array, x: Any, *, format: MemoryFormat) -> list[Any]:
    # Concrete ones stay as they lie: jax.vmap, which may be at work, has no layouts.
    if not isinstance(ct, jax.core.Tracer):
        return [ct]
    return [with_memory_format(ct, format)]


def _batch(
    operands: Sequence[Array], dims: Sequence[int], *, format: MemoryFormat
) -> tuple[Array, int]:
    (x,), (dim,) = operands, dims
    return memory_format_p(jnp.moveaxis(x, dim, 0), format=format.batched()), 0


def _sharding(x: Any, *, format: MemoryFormat) -> str:
    axes = " ".join(f"a{i}" for i in range(x.ndim))
    return f"{axes} -> {axes}"


memory_format_p = define(
    Op(
        name="memory_format",
        lax=lambda x, *, format: x,
        transpose=_transpose,
        batch=_batch,
        sharding=_sharding,
    )
)
