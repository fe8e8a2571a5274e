# SPDX-License-Identifier: Apache-2.0
"""Which programs are lowered to kernels of ours: those of a process, or of a block.

Whether kernels are installed is a context of jax's, part of the keys of its caches of
traced and compiled functions: a function that was compiled without them is compiled
again with them, and the other way round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from jax_layout import _backends, _compat, choices
from jax_layout.install import calls, pooling, products, rules
from jax_layout.install.record import Lowered, Record
from jax_layout.install.rules import Program, Rule
from jax_layout.optimize.optimize import with_channels_last
from jax_layout.products.as_they_lie import products_as_they_lie

# By jax's name of a primitive: the primitive, and what may lower it.
_RULES: dict[str, tuple[Any, Rule]] = {
    "conv_general_dilated": (primitives.conv_general_dilated_p, rules.convolution),
    "dot_general": (primitives.dot_general_p, products.dot_general),
    "transpose": (primitives.transpose_p, products.transpose),
    "gather": (primitives.gather_p, rules.gather),
    "scatter_add": (primitives.scatter_add_p, rules.scatter_add),
    **{
        f"reduce_window_{operator}": (
            getattr(primitives, f"reduce_window_{operator}_p"),
            pooling.reduce_window(operator),
        )
        for operator in ("sum", "max", "min")
    },
    "select_and_scatter_add": (
        primitives.select_and_scatter_add_p,
        pooling.select_and_scatter_add,
    ),
}
OPERATORS = tuple(_RULES)
# GPUs are left alone: their compiler lays out arrays itself.
_PLATFORMS = ("cpu",)


@dataclasses.dataclass(frozen=True)
class _Installed:
    operators: frozenset[str]
    exports: bool
    verbose: bool
    record: Record = dataclasses.field(compare=False)


_installed: Any = jax.make_user_context(None)
_wrapping = threading.Lock()


def install(
    operators: Sequence[str] | None = None,
    *,
    exports: bool = False,
    verbose: bool = False,
) -> Record:
    """Lowers jax's own primitives to kernels of this package, from now on.

    Nothing in a program changes: what jax traces, differentiates, maps and splits over
    devices are its own primitives. When it compiles a program for CPUs, each
    operation that a kernel here is measured to run faster (see docs/choices.md) becomes
    a call of that kernel, and the others what they always were.

    It holds for all threads, until `uninstall()`. Functions that jax has compiled
    before are compiled again when they are called next; what
    `jax.jit(f).lower(x).compile()` returned stays as it is. Called again, it replaces
    what was installed. Programs that XLA splits over several devices are left alone;
    inside `jax.shard_map` over all axes of a mesh each device runs kernels.

    Args:
      operators: names of jax's primitives, of "conv_general_dilated", "dot_general",
        "transpose", "gather", "scatter_add", "reduce_window_sum",
        "reduce_window_max", "reduce_window_min" and "select_and_scatter_add"; all of
        them if left out.
      exports: whether `jax.export` writes calls of these kernels too. Such a program
        runs only where this package is imported, and has to be exported with
        `disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(...)]`.
      verbose: whether to log a line, a warning of the logger "jax_layout.install", for
        each operation that is lowered.

    Returns:
      the record of what is lowered from now on: `print` it.

    Raises:
      TypeError: if operators is no sequence of strings.
      ValueError: if one of them is unknown.

    >>> import jax.numpy as jnp
    >>> record = install()
    >>> jax.jit(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    >>> uninstall()
    """
    state = _state("install", operators, exports, verbose)
    _wrap()
    _installed.set_global(state)
    return state.record


def uninstall() -> None:
    """Undoes `install`: from now on programs are lowered as jax does it alone.

    Functions that were compiled before `install` run again as they were compiled then.
    Does nothing where nothing is installed, nor to an `installed()` that is entered.

    >>> uninstall()
    """
    _installed.set_global(None)


@contextlib.contextmanager
def installed(
    operators: Sequence[str] | None = None,
    *,
    exports: bool = False,
    verbose: bool = False,
) -> Iterator[Record]:
    """As `install`, for what this thread lowers inside of a `with` block.

    The innermost counts, whatever is installed outside of it or meanwhile; no
    operators, `installed(())`, is jax alone. Other threads are not affected, nor those
    that are started inside.

    Args:
      operators: as in `install`, as are all.
      exports: the same.
      verbose: the same.

    Yields:
      the record of what is lowered inside. A function that was compiled inside of an
      earlier block is not lowered again, and leaves none.

    Raises:
      TypeError: as `install`.
      ValueError: as `install`.

    >>> import jax.numpy as jnp
    >>> with installed() as record:
    ...     y = jax.jit(lambda x: x @ x.T)(jnp.ones((2, 3)))
    >>> row = record.by_primitive()["dot_general"]
    >>> row["ours"] + row["XLA"]
    1
    """
    state = _state("installed", operators, exports, verbose)
    _wrap()
    with _installed(state):
        yield state.record


def is_installed() -> bool:
    """Whether what this thread lowers now may become calls of kernels.

    >>> is_installed()
    False
    """
    return bool(_installed.value and _installed.value.operators)


def _state(name: str, operators: Any, exports: bool, verbose: bool) -> _Installed:
    if operators is None:
        operators = OPERATORS
    if isinstance(operators, str) or not isinstance(operators, Sequence | set):
        raise TypeError(
            f"{name}: operators must be a sequence of strings, got {operators!r}."
        )
    for operator in operators:
        if not isinstance(operator, str):
            raise TypeError(f"{name}: operators must be strings, got {operator!r}.")
        if operator not in _RULES:
            raise ValueError(
                f"{name}: operators must be of {', '.join(OPERATORS)}, "
                f"got {operator!r}."
            )
    return _Installed(frozenset(operators), bool(exports), bool(verbose), Record())


def _wrap() -> None:
    """Puts ours before jax's rules, once; they ask for themselves what is installed."""
    with _wrapping:
        _wrap_all()


@functools.cache
def _wrap_all() -> None:
    for name, (primitive, rule) in _RULES.items():
        wrap = functools.partial(_lowering, name, rule)
        _compat.wrap_lowerings(primitive, wrap, is_installed)
    _compat.rewrite_programs(_rewritten)


def _rewritten(name: str, jaxpr: Any, platform: str, for_export: bool) -> Any:
    """A program as it is to be lowered: channels-last, with calls of attention and
    layers, and with products that read through transposes."""
    state = _installed.value
    if state is None or choices.are_plain():
        return jaxpr
    if platform not in _PLATFORMS or not _backends.available(platform):
        return jaxpr
    if for_export and not state.exports:
        return jaxpr
    log = Program(state.record, state.verbose)
    if "conv_general_dilated" in state.operators:
        jaxpr, less = with_channels_last(jaxpr)
        if less:
            log.add(Lowered(name, "layout", "of convolutions", "channels-last", less))
    if "dot_general" not in state.operators:
        return jaxpr
    program, ours = calls.with_calls(products_as_they_lie(jaxpr)[0])
    for call in ours:
        arrays = ", ".join(v.aval.str_short() for v in call.invars[:3])
        log.add(Lowered(name, "dot_general", arrays, call.primitive.name))
    return program


def _lowering(name: str, rule: Rule, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a primitive, in the place of `plain`, which is jax's."""

    def lower(ctx: rules.Context, *operands: Any, **params: Any) -> Any:
        state = _installed.value
        if state is None or not state.operators or choices.are_plain():
            return plain(ctx, *operands, **params)
        platform = _compat.lowering_platform(ctx)
        if platform not in _PLATFORMS or not _backends.available(platform):
            return plain(ctx, *operands, **params)
        if _compat.is_annotated(ctx) or (_compat.is_export(ctx) and not state.exports):
            return plain(ctx, *operands, **params)
        if not all(map(_is_plain_array, (*ctx.avals_in, *ctx.avals_out))):
            return plain(ctx, *operands, **params)
        program = _compat.of_module(ctx, lambda: Program(state.record, state.verbose))
        of_xla = functools.partial(plain, **params)
        if name in state.operators:
            found = rule(program, of_xla, ctx, *operands, **params)
            if found is not None:
                return found
        return program.left(name, of_xla, ctx, *operands)

    return lower


def _is_plain_array(aval: Any) -> bool:
    """Whether its shape is known and its dtype is one of numbers."""
    return all(isinstance(n, int) for n in aval.shape) and isinstance(
        aval.dtype, np.dtype
    )
