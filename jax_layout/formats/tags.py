# SPDX-License-Identifier: Apache-2.0
"""Which memory format a value has: tags of traced values, layouts of concrete ones.

Compiled values have no layout that JAX could ask for, so a value inside a trace
remembers the physical array that it was made from: operators compute on that array,
and the logical view beside it costs nothing unless something else reads it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax import Array
from jax.experimental.layout import Format, Layout

from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.plain import lax

P = ParamSpec("P")
R = TypeVar("R")

# What traced values were made from, by id, as they cannot be hashed; gone when they
# are.
_origins: dict[int, tuple[weakref.ref[Any], Array, MemoryFormat]] = {}


def remember(x: Any, physical: Array, format: MemoryFormat) -> None:
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
    format = format_of_array(x)
    if format.row_major:
        return x, format
    return lax.transpose(x, format.permutation or ()), format


def store(physical: Array, format: MemoryFormat) -> Array:
    """The logical value of a physical array: the inverse of `stored`.

    Operators that find the value in a trace get the physical array back.
    """
    if format.row_major:
        return physical
    if isinstance(physical, jax.core.Tracer):
        x = format.unpack(physical)
        remember(x, physical, format)
        return x
    placement = one_device([physical])
    if format.permutation is None or placement is None:
        return format.unpack(physical)
    return _as_it_lies(format, placement)(physical)


@functools.lru_cache(maxsize=512)
def _as_it_lies(format: MemoryFormat, placement: Any) -> Callable[[Array], Array]:
    """Relabels concrete physical arrays, which stay as they lie."""
    order = format.permutation
    assert order is not None
    return jax.jit(
        lambda physical: lax.transpose(physical, np.argsort(order)),
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
            format_of_array(x) if isinstance(x, Array) else None for x in leaves
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
                remember(leaf, lax.transpose(leaf, format.permutation or ()), format)
            leaves.append(leaf)
        args, kwargs = jax.tree.unflatten(tree, leaves)
        out = function(*args, **kwargs)
        outputs, out_tree = jax.tree.flatten(out)
        results[:] = [format_of(x) if isinstance(x, Array) else None for x in outputs]
        # XLA writes the arrays as they lie, too.
        outputs = [
            lax.transpose(stored(x)[0], np.argsort(format.permutation))
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
        return compiled(shapes, one_device(arrays))(*arrays)

    return call


def one_device(arrays: Sequence[Any]) -> Any:
    """Where results in a format of their own can lie: on one device.

    Results of arrays spread over several devices come back row-major, as jax asks
    for the whole sharding of whatever it is to lay out.
    """
    shardings = {x.sharding for x in arrays if isinstance(x, Array)}
    devices = {device for sharding in shardings for device in sharding.device_set}
    return shardings.pop() if len(devices) == 1 else None


def format_of_array(x: Array) -> MemoryFormat:
    layout = getattr(getattr(x, "format", None), "layout", None)
    order = range(x.ndim) if layout is None else layout.major_to_minor
    return MemoryFormat.of_permutation(order)


def format_of(x: Array) -> MemoryFormat:
    if isinstance(x, jax.core.Tracer):
        return stored(x)[1]
    return format_of_array(x)
