# SPDX-License-Identifier: Apache-2.0
"""Resizing of images and the like, in the memory format of the input.

One spatial axis after the other; each result is a weighted sum of one, two or four
elements, whose places and weights are known when the program is made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jax import Array
from jax.interpreters import ad
from jax.typing import ArrayLike

from jax_layout.formats.physical import floating, sizes, whole, wide
from jax_layout.formats.tags import formatted, store
from jax_layout.op import Op, define
from jax_layout.permute import permute
from jax_layout.plain import jnp, lax

Mode = Literal["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic"]
_RANKS = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}


@formatted
def interpolate(
    x: ArrayLike,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: Mode = "nearest",
    align_corners: bool | None = None,
) -> Array:
    """Resizes the spatial dimensions.

    Args:
      x: shape `(N, C, *spatial)` with one to three spatial dimensions, floating dtype.
      size: of the result, a number or one per spatial dimension; or
      scale_factor: by which to multiply the sizes, rounding down.
      mode: "nearest", "nearest-exact"; "linear", "bilinear" or "trilinear" for one,
        two or three dimensions; "bicubic" for two.
      align_corners: whether the first and last elements keep their places, instead
        of the outer borders of the first and last; not for the nearest ones.

    Returns:
      dtype and memory format of `x`; computed in float32 for 16-bit types.

    Raises:
      TypeError: if x is no floating-point array.
      ValueError: if arguments do not fit the shape, the mode or each other.

    Source: `torch.nn.functional.interpolate`, without antialiasing.

    >>> interpolate(jnp.array([[[0.0, 4.0]]]), 4, mode="linear").tolist()
    [[[0.0, 1.0, 3.0, 4.0]]]
    """
    x = floating("interpolate", x)
    rank = x.ndim - 2
    if rank not in (1, 2, 3) or 0 in x.shape[2:]:
        raise ValueError(
            "interpolate: x must have shape (N, C, *spatial) with one to three spatial "
            f"dimensions, none of them empty, got {x.shape}."
        )
    nearest = mode in ("nearest", "nearest-exact")
    if not nearest and _RANKS.get(mode) != rank:
        raise ValueError(
            "interpolate: mode must be 'nearest', 'nearest-exact', or 'linear', "
            "'bilinear', 'bicubic' or 'trilinear' for as many spatial dimensions, "
            f"got {mode!r} for x of shape {x.shape}."
        )
    if nearest and align_corners is not None:
        raise ValueError(f"interpolate: align_corners does not go with mode {mode!r}.")
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate: give either size or scale_factor.")
    if size is not None:
        wanted = sizes("interpolate", "size", size, rank, 1)
        steps = [n / out for n, out in zip(x.shape[2:], wanted, strict=True)]
    else:
        try:
            given = np.broadcast_to(np.asarray(scale_factor, float), (rank,)).tolist()
        except (TypeError, ValueError):
            given = [math.nan]
        if not all(0 < factor < math.inf for factor in given):
            raise ValueError(
                f"interpolate: scale_factor must be a number above 0, or {rank} of "
                f"them, got {scale_factor!r}."
            )
        wanted = tuple(
            math.floor(n * f) for n, f in zip(x.shape[2:], given, strict=True)
        )
        if min(wanted) < 1:
            raise ValueError(
                "interpolate: the result must not be empty, "
                f"got scale_factor={scale_factor} for x of shape {x.shape}."
            )
        steps = [1 / factor for factor in given]
    dims = list(range(2, x.ndim))
    physical, format = whole(x, dims)
    y = physical if nearest else physical.astype(wide(x.dtype))
    # Elements within rows are the slowest to move: the last axis comes first.
    for dim, out, step in reversed(list(zip(dims, wanted, steps, strict=True))):
        n = x.shape[dim]
        if align_corners:
            step = (n - 1) / (out - 1) if out > 1 else 0.0
        map = _Resampling(mode, n, out, step, bool(align_corners))
        y = resample_p(y, axis=format.axes(dim)[0], map=map)
    return store(y.astype(x.dtype), format)


def _taps(
    mode: str, n: int, out: int, step: float, align_corners: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """What to add up, for every element of the result.

    Args:
      mode: of `interpolate`.
      n: elements of the input.
      out: elements of the result.
      step: from one of them to the next, in the input.
      align_corners: whether both begin at their first elements' centres.

    Returns:
      indices, shape `(taps, out)`, and weights of that shape, None for a single 1.
    """
    j = np.arange(out)
    if mode.startswith("nearest"):
        if mode == "nearest" and out in (n, 2 * n):
            return (j // (out // n))[None], None  # as in PyTorch, whatever the step
        # In float32, as in PyTorch: it decides where the product is a whole number.
        half = np.float32(0.5 if mode == "nearest-exact" else 0)
        place = np.floor((j.astype(np.float32) + half) * np.float32(step))
        return np.minimum(place.astype(np.int64), n - 1)[None], None
    place = j * step if align_corners else (j + 0.5) * step - 0.5
    if mode != "bicubic":
        place = np.maximum(place, 0)
        first = np.minimum(np.floor(place).astype(np.int64), n - 1)
        part = place - first
        weights = np.stack([1 - part, part])
    else:
        first = np.floor(place).astype(np.int64)
        part = place - first
        near, far = (1 + part, part, 1 - part, 2 - part), -0.75
        weights = np.stack(
            [
                ((far * t - 5 * far) * t + 8 * far) * t - 4 * far
                if i in (0, 3)
                else ((far + 2) * t - (far + 3)) * t * t + 1
                for i, t in enumerate(near)
            ]
        )
        first = first - 1
    at = np.clip(first + np.arange(len(weights))[:, None], 0, n - 1)
    return at, weights


@dataclasses.dataclass(frozen=True)
class _Resampling:
    """A sparse matrix, for one axis: the arguments of `_taps`, and its transpose."""

    mode: str
    n: int
    out: int
    step: float
    align_corners: bool
    transposed: bool = False

    def taps(self) -> tuple[np.ndarray, np.ndarray | None]:
        at, weights = _taps(self.mode, self.n, self.out, self.step, self.align_corners)
        return _transposed(at, weights, self.n) if self.transposed else (at, weights)

    @property
    def by_phases(self) -> bool:
        """Whether the elements between two of the input are each time the same."""
        whole = self.n > 0 and self.out % self.n == 0
        return whole and not self.align_corners and self.step == self.n / self.out

    @property
    def transpose(self) -> _Resampling:
        return dataclasses.replace(self, transposed=not self.transposed)


def _transposed(
    at: np.ndarray, weights: np.ndarray | None, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """For every element of the input, where it went and with which weights."""
    out = at.shape[1]
    matrix = np.zeros((n, out))
    np.add.at(matrix, (at, np.arange(out)), 1 if weights is None else weights)
    # Elements that went to fewer places than others have zeros for the rest.
    most = max(int((matrix != 0).sum(1).max()), 1)
    places = np.argsort(matrix == 0, axis=1, kind="stable")[:, :most]
    found = np.take_along_axis(matrix, places, 1)
    places = np.where(found == 0, places[:, :1], places)
    return places.T, found.T


def _resample(x: Array, *, axis: int, map: _Resampling) -> Array:
    if map.mode == "nearest" and map.out % map.n == 0 and map.step == map.n / map.out:
        r = map.out // map.n
        if not map.transposed:
            return jnp.repeat(x, r, axis)
        return x.reshape(*x.shape[:axis], map.n, r, *x.shape[axis + 1 :]).sum(axis + 1)
    if map.mode.endswith("linear") and not map.transposed and map.by_phases:
        return _phases(x, axis, map.out // map.n)
    at, weights = map.taps()
    if len(at) > 2 and axis == x.ndim - 1 > 0:
        rows = functools.partial(_weighted, at=at, weights=weights)
        return lax.platform_dependent(
            x,
            # XLA's CPU backend gathers within rows element by element.
            cpu=lambda x: _by_rows(x, rows),
            default=lambda x: rows(x, axis),
        )
    return _weighted(x, axis, at, weights)


def _phases(x: Array, axis: int, r: int) -> Array:
    """Linear interpolation to r times as many elements, without a gather."""
    n = x.shape[axis]
    part = functools.partial(lax.slice_in_dim, x, axis=axis)
    before = jnp.concatenate([part(0, 1), part(0, n - 1)], axis)
    after = jnp.concatenate([part(1, n), part(n - 1, n)], axis)
    phases = []
    for p in range(r):
        place = (p + 0.5) / r - 0.5
        other = before if place < 0 else after
        weights = np.asarray([1 - abs(place), abs(place)], x.dtype)
        phases.append(x * weights[0] + other * weights[1] if place else x)
    y = jnp.stack(phases, axis + 1)
    y = y.reshape(*x.shape[:axis], n * r, *x.shape[axis + 1 :])
    # XLA would compute it again for every tap of the next axis.
    return lax.optimization_barrier(y)


def _by_rows(x: Array, function: Callable[[Array, int], Array]) -> Array:
    """function(x, -1), applied to the first axis of the transpose."""
    matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = permute(function(permute(matrix, (1, 0)), 0), (1, 0))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _weighted(x: Array, axis: int, at: np.ndarray, weights: np.ndarray | None) -> Array:
    taps = [jnp.take(x, places, axis, mode="clip") for places in at]
    if weights is None:
        return taps[0]
    shape = [1] * x.ndim
    shape[axis] = -1
    total = jnp.zeros((), x.dtype)
    for tap, weight in zip(taps, weights, strict=True):
        total = total + tap * weight.astype(x.dtype).reshape(shape)
    # XLA would compute it again for every tap of the next axis.
    return lax.optimization_barrier(total)


def _transpose(ct: Any, x: Any, *, axis: int, map: _Resampling) -> list[Any]:
    # A gather for the gradient too; that of `take` would scatter.
    return [ct if type(ct) is ad.Zero else resample_p(ct, axis=axis, map=map.transpose)]


def _batch(
    operands: Sequence[Array], dims: Sequence[int], *, axis: int, map: _Resampling
) -> tuple[Array, int]:
    return resample_p(jnp.moveaxis(operands[0], dims[0], 0), axis=axis + 1, map=map), 0


resample_p = define(
    Op(name="interpolate", lax=_resample, transpose=_transpose, batch=_batch)
)
