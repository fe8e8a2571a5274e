# SPDX-License-Identifier: Apache-2.0
"""Values of a program in the formats that they are wanted in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax import Array

from jax_layout.formats.memory_format import MemoryFormat, convert
from jax_layout.optimize.rules import Equation, moves
from jax_layout.permute import permute
from jax_layout.plain import lax

# The name, in jax's stack of names, of conversions.
SCOPE = "optimize_layout"
_move: ContextVar[Callable[..., Array]] = ContextVar("move", default=permute)


@contextlib.contextmanager
def of_jaxs_own() -> Iterator[None]:
    """Inside, conversions are `jax.lax.transpose`."""
    token = _move.set(lax.transpose)
    try:
        yield
    finally:
        _move.reset(token)


class Value:
    """A value in the formats that it has been wanted in so far."""

    def __init__(
        self,
        array: Any,
        format: MemoryFormat | None,
        make: Callable[[MemoryFormat], Array] | None = None,
    ):
        self.format = format  # None: it is made where it is wanted, by `make`
        self.maker: Equation | None = None
        self.make = make
        self.made = {} if make else {format: array}

    def get(self, format: MemoryFormat | None) -> Any:
        """The physical array; in the format that the value has, if None."""
        if format is None:
            format = self.format
        if format not in self.made:
            if self.make is not None:
                assert format is not None
                self.made[format] = self.make(format)
            else:
                assert self.format is not None and format is not None
                base = self.made[self.format]
                shape = self.format.logical_shape(base.shape)
                with jax.named_scope(SCOPE):
                    if moves(self.format, format, shape):
                        move = _move.get()
                        self.made[format] = convert(base, self.format, format, move)
                    else:
                        new = format.physical_shape(shape)
                        self.made[format] = lax.reshape(base, new)
        return self.made[format]
