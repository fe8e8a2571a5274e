# SPDX-License-Identifier: Apache-2.0
"""Memory formats: the order in which the elements of a logically NCHW array lie.

A format factors each logical dimension into atoms and gives the atoms a physical
order. NHWC is a permutation; NCHW16c splits C into (C/16, 16) and puts the 16 last.
Splitting or merging dimensions by a reshape only regroups the atoms.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable, Sequence

import numpy as np
from jax import Array

from jax_layout.permute import permute

Atom = tuple[int, int]  # dimension, and which of its atoms; 0 is the outermost


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
          TypeError: if name is no string.
          ValueError: if there is no format of this name.
        """
        if not isinstance(name, str):
            raise TypeError(f"MemoryFormat.named: name must be a str, got {name!r}.")
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
        dim = self._dim("axes", dim)
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
        """The logical shape of an array that has this row-major shape in memory.

        Raises:
          ValueError: if there are more or fewer axes than the format has in memory.
        """
        if len(physical_shape) != len(self.order):
            raise ValueError(
                f"memory format {self} has {len(self.order)} axes in memory, "
                f"got shape {tuple(physical_shape)}."
            )
        return tuple(
            math.prod(physical_shape[axis] for axis in self.axes(dim))
            for dim in range(self.ndim)
        )

    def pack(self, x: Array) -> Array:
        """The row-major array of what lies in memory when x has this format.

        Raises:
          ValueError: if the format is not one for the shape of x.
        """
        self.physical_shape(x.shape)
        return convert(x, row_major(self.ndim), self)

    def unpack(self, physical: Array) -> Array:
        """The inverse of `pack`."""
        return convert(physical, self, row_major(self.ndim))

    def transposed(self, axes: Sequence[int]) -> MemoryFormat:
        """The format of `transpose(x, axes)` in the memory of an x of this one.

        Raises:
          ValueError: if axes do not hold each dimension once.
        """
        axes = [self._dim("transposed", axis) for axis in axes]
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(
                "MemoryFormat.transposed: axes must reorder the dimensions of "
                f"{self}, got {tuple(axes)}."
            )
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
          ValueError: if there is no such dimension, inner is less than 1, or the cut
            does not fall between the factors of an atom.

        >>> groups = MemoryFormat.named("NHWC").split(1, 8)  # N, C/8, 8, H, W
        >>> groups.physical_shape((2, 4, 8, 5, 6))
        (2, 5, 6, 4, 8)
        """
        dim, inner = self._dim("split", dim), _positive("split", inner)
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
        dim, inner = self._dim("merge", dim), _positive("merge", inner)
        block = math.prod(self.blocks[self._dim("merge", dim + 1)])
        if inner % block:
            raise ValueError(
                f"MemoryFormat.merge: dimension {dim + 1} of {self} must be divisible "
                f"by {block}, got size {inner}."
            )
        rest = inner // block
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

    def _dim(self, method: str, dim: int) -> int:
        """A dimension, counted from the first."""
        if not isinstance(dim, int | np.integer) or not -self.ndim <= dim < self.ndim:
            raise ValueError(
                f"MemoryFormat.{method}: {self} has {self.ndim} dimensions, "
                f"got dimension {dim!r}."
            )
        return int(dim) % self.ndim

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


def _positive(method: str, inner: int) -> int:
    if not isinstance(inner, int | np.integer) or inner < 1:
        raise ValueError(
            f"MemoryFormat.{method}: inner must be an integer of at least 1, "
            f"got {inner!r}."
        )
    return int(inner)


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


def convert(
    physical: Array,
    source: MemoryFormat,
    target: MemoryFormat,
    move: Callable[[Array, Sequence[int]], Array] = permute,
) -> Array:
    """Re-orders what lies in memory from one format to another, by one permute.

    Args:
      physical: row-major array of the physical shape of `source`.
      source: the format it has.
      target: the format it gets.
      move: what permutes.

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
    moved = move(physical.reshape(sizes), [before.index(atom) for atom in after])
    return moved.reshape(result)


def _cuts(blocks: Sequence[int]) -> set[int]:
    return {math.prod(blocks[i:]) for i in range(len(blocks) + 1)}
