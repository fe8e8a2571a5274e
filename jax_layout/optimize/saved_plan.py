# SPDX-License-Identifier: Apache-2.0
"""Formats for what goes into a function, so that weights are laid out once.

On CPUs the arguments are handed over as the physical arrays that the plan of
`optimize_layout` reads: XLA would copy an argument with a layout of its own that it
transposes. On other platforms XLA is asked for the layouts that it likes best, and
the arguments keep their shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jax_layout import _compat
from jax_layout.formats.annotations import FormattedArray
from jax_layout.formats.memory_format import MemoryFormat, row_major
from jax_layout.optimize.control import CONTROL
from jax_layout.optimize.optimize import (
    LayoutReport,
    Policy,
    checked_platform,
    is_array,
    is_formatted,
    run,
    trace,
)
from jax_layout.optimize.plan import (
    Planner,
    definite,
    emit,
)
from jax_layout.optimize.program import inner_jaxprs, unsupported
from jax_layout.optimize.rules import Step
from jax_layout.optimize.values import Value
from jax_layout.plain import lax

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """An argument's or a result's array.

    Attributes:
      path: where it is, as in `jax.tree_util.keystr`.
      shape: its logical shape.
      dtype: its dtype's name.
      format: its memory format; None for what is no array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: MemoryFormat | None


@dataclasses.dataclass(frozen=True)
class LayoutPlan:
    """In which memory formats a function takes its arguments and gives its results.

    Attributes:
      f: the function.
      policy: of `optimize_layout`.
      platform: "cpu", "cuda", ...
      arguments: every leaf of the arguments.
      results: every leaf of the result.
      report: what the function moves with this plan; None if XLA plans.
    """

    f: Callable[..., Any]
    policy: Policy
    platform: str
    arguments: tuple[Entry, ...]
    results: tuple[Entry, ...]
    report: LayoutReport | None
    _args: tuple[Any, ...] = dataclasses.field(repr=False)

    @property
    def formats(self) -> dict[str, MemoryFormat]:
        """The arguments that are not row-major, by path."""
        return {
            entry.path: entry.format
            for entry in self.arguments
            if entry.format is not None and not entry.format.row_major
        }

    def params(self, tree: Any, argnum: int = 0) -> Any:
        """An argument in the formats of the plan.

        Args:
          tree: the argument.
          argnum: which one it is.

        Returns:
          on CPUs the tree with `FormattedArray`s, to be given to what `jit` returns;
          elsewhere the tree with arrays in other layouts.

        Raises:
          ValueError: if the tree is not like the plan's argument.
        """
        if not 0 <= argnum < len(self._args):
            raise ValueError(
                f"plan_layout: argnum must be one of the {len(self._args)} arguments "
                f"of the plan, got {argnum}."
            )
        start = len(_leaves(self._args[:argnum]))
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_formatted)
        expected: Any = jax.tree.structure(self._args[argnum], is_leaf=is_formatted)
        if structure != expected:
            raise ValueError(
                f"plan_layout: argument {argnum} must have the structure of the "
                f"plan's, {expected}, got {structure}."
            )
        entries = self.arguments[start : start + len(leaves)]
        for entry, leaf in zip(entries, leaves, strict=True):
            if is_array(leaf) and tuple(leaf.shape) != entry.shape:
                raise ValueError(
                    f"plan_layout: {entry.path} must have shape {entry.shape}, "
                    f"got {tuple(leaf.shape)}."
                )
        laid = [self._lay(x, e.format) for x, e in zip(leaves, entries, strict=True)]
        return jax.tree.unflatten(structure, laid)

    def logical(self, tree: Any) -> Any:
        """The plain arrays of a tree with `FormattedArray`s; undoes `params`."""
        return jax.tree.map(
            lambda x: x.logical() if is_formatted(x) else x, tree, is_leaf=is_formatted
        )

    def jit(self, donate_argnums: int | Sequence[int] = ()) -> Callable[..., Any]:
        """The function, compiled for arguments in the formats of the plan.

        On CPUs it takes plain arrays too, and lays them out on each call; results
        that the plan gives in the format of an argument of their shape, such as
        gradients of weights, are `FormattedArray`s.

        Args:
          donate_argnums: as in `jax.jit`.
        """
        if self.platform == "cpu":
            return jax.jit(self._call, donate_argnums=donate_argnums)
        given = jax.eval_shape(self.f, *self._args)
        default = _sharding(self.platform, self._args)
        return jax.jit(
            _windows_last(self.f),
            in_shardings=_placed(self._args, self.arguments, default),
            out_shardings=_placed(given, self.results, default),
            donate_argnums=donate_argnums,
        )

    def to_json(self) -> str:
        """The formats, without the function."""
        arguments, results = (
            [
                {
                    "path": e.path,
                    "shape": e.shape,
                    "dtype": e.dtype,
                    "order": _spelled(e.format),
                }
                for e in entries
            ]
            for entries in (self.arguments, self.results)
        )
        return json.dumps(
            {
                "jax_layout plan": _VERSION,
                "platform": self.platform,
                "arguments": arguments,
                "results": results,
            },
            indent=1,
        )

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    def _lay(self, x: Any, format: MemoryFormat | None) -> Any:
        if format is None or not is_array(x):
            return x
        if self.platform != "cpu":
            order = format.permutation
            assert order is not None
            return jax.device_put(x, Format(Layout(order), x.sharding))
        if is_formatted(x):
            if x.format == format:
                return x
            x = x.logical()
        return x if format.row_major else FormattedArray(format.pack(x), format)

    def _call(self, *args: Any) -> Any:
        formats = [e.format for e in self.results if e.format is not None]
        traced = trace(self.f, args, {}, self.policy, self.platform, True, formats)
        return run(traced, formats)


def plan_layout(
    f: Callable[..., Any],
    *args: Any,
    policy: Policy = "auto",
    platform: str | None = None,
) -> LayoutPlan:
    """Plans the memory formats of a function's arguments and results.

    Args:
      f: function of pytrees of arrays.
      args: its arguments, or `jax.ShapeDtypeStruct`s like them.
      policy: as in `optimize_layout`; on CPUs only, elsewhere XLA decides.
      platform: "cpu", "cuda", ...; the default backend's if left out.

    Returns:
      the plan: `plan.params(tree)` lays weights out once, `plan.jit()` is the
      function for them.

    Raises:
      TypeError: if f is no function, or policy is not one.
      ValueError: if a policy's format has blocks, or jax has no such platform.

    >>> import jax.numpy as jnp
    >>> def net(w, x):
    ...     return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME").mean((2, 3))
    >>> w, x = jnp.ones((4, 3, 3, 3)), jnp.ones((2, 3, 8, 8))
    >>> plan = plan_layout(net, w, x)
    >>> laid = plan.params(w)  # once
    >>> plan.jit()(laid, x).shape
    (2, 4)
    """
    platform = checked_platform("plan_layout", f, policy, platform)
    if platform != "cpu":
        return _asked_of_xla(f, args, policy, platform)
    traced = trace(f, args, {}, policy, platform, weights=True)
    given = jax.eval_shape(f, *_logical(args))
    if traced.planner is None or traced.plan is None:
        plain = [row_major(x.ndim) for x in traced.arrays]
        ends = [row_major(x.ndim) for x in traced.closed.out_avals]
        report = traced.report
    else:
        plan, plain = traced.planner.settled(traced.closed, traced.formats, free=True)
        ends = definite(plan.given, plan.jaxpr.outvars)
        # What has the format of an argument of its shape is its gradient, or what
        # comes in its place.
        kept = {
            (x.aval.shape, x.aval.dtype, f)
            for x, f in zip(traced.closed.jaxpr.invars, plain, strict=True)
        }
        for i, aval in enumerate(traced.closed.out_avals):
            if (aval.shape, aval.dtype, ends[i]) not in kept:
                ends[i] = row_major(aval.ndim)
        cost = plan.total()
        cost.add(plan.result_cost(ends))
        report = dataclasses.replace(
            traced.report,
            planned_bytes=cost.bytes_moved,
            conversions=cost.conversions,
            barriers=dict(cost.barriers),
        )
    return LayoutPlan(
        f,
        policy,
        platform,
        _entries(args, plain),
        _entries(given, ends),
        report,
        args,
    )


def load_plan(
    text: str | Path, f: Callable[..., Any], *args: Any, policy: Policy = "auto"
) -> LayoutPlan:
    """A plan that was saved, for the same function and arguments.

    Args:
      text: what `LayoutPlan.to_json` returned, or the path of a file that holds it.
      f: the function.
      args: its arguments, or shapes and dtypes like them.
      policy: with which it was planned.

    Raises:
      TypeError: if f is no function.
      ValueError: if this is no plan, or one for other arguments or results.
    """
    if not callable(f):
        raise TypeError(f"load_plan: f must be a function, got {f!r}.")
    if isinstance(text, Path):
        text = text.read_text()
    try:
        data = json.loads(text)
        version = data["jax_layout plan"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"load_plan: this is no plan: {error}.") from error
    if version != _VERSION:
        raise ValueError(f"load_plan: version must be {_VERSION}, got {version}.")
    given = jax.eval_shape(f, *_logical(args))
    known = {}
    for name, tree in (("arguments", args), ("results", given)):
        saved = tuple(
            Entry(
                entry["path"],
                tuple(entry["shape"]),
                entry["dtype"],
                _read(entry["order"]),
            )
            for entry in data[name]
        )
        found = _entries(tree, None)
        for old, new in zip(saved, found, strict=False):
            if (old.path, old.shape, old.dtype) != (new.path, new.shape, new.dtype):
                raise ValueError(
                    f"load_plan: the plan is for {name} with {old.dtype}{old.shape} "
                    f"at {old.path!r}, got {new.dtype}{new.shape} at {new.path!r}."
                )
        if len(saved) != len(found):
            raise ValueError(
                f"load_plan: the plan is for {len(saved)} {name}, got {len(found)}."
            )
        known[name] = saved
    return LayoutPlan(
        f, policy, data["platform"], known["arguments"], known["results"], None, args
    )


def _spelled(format: MemoryFormat | None) -> Any:
    """A format in JSON: the order of the axes, or the name of one with blocks."""
    if format is None:
        return None
    return str(format) if format.permutation is None else format.permutation


def _read(spelled: Any) -> MemoryFormat | None:
    if isinstance(spelled, str):
        return MemoryFormat.named(spelled)
    return None if spelled is None else MemoryFormat.of_permutation(spelled)


def _asked_of_xla(
    f: Callable[..., Any], args: tuple[Any, ...], policy: Policy, platform: str
) -> LayoutPlan:
    """The layouts that XLA chooses, left free to."""
    auto = Format(Layout.AUTO, _sharding(platform, args))
    lowered = jax.jit(_windows_last(f), in_shardings=auto, out_shardings=auto).lower(
        *args
    )
    compiled = lowered.compile()
    given = jax.eval_shape(f, *args)
    plain, ends = (
        [
            MemoryFormat.of_permutation(format.layout.major_to_minor)
            for format in jax.tree.leaves(formats)
        ]
        for formats in (compiled.input_formats, compiled.output_formats)
    )
    return LayoutPlan(
        f, policy, platform, _entries(args, plain), _entries(given, ends), None, args
    )


def _windows_last(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with gradients of pooling written channels-last.

    On GPUs XLA makes a scatter of them, in the order of their logical axes, and
    transposes what goes in; transposes of the program's own cost nothing, as its
    layouts are assigned before.
    """

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        arrays, tree = jax.tree.flatten(args)
        out: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            again = jax.tree.unflatten(tree, arrays)
            results, out["tree"] = jax.tree.flatten(f(*again))
            return results

        closed = jax.make_jaxpr(flat)(*arrays)
        if not _scatters(closed.jaxpr) or unsupported(closed.jaxpr) is not None:
            return f(*args)
        rules = {"select_and_scatter_add": _scatter_last}
        planner = Planner(lambda shape, dtype: None, rules, CONTROL)
        formats = [row_major(aval.ndim) for aval in closed.in_avals]
        plan = planner.plan(closed, formats)
        values = emit(plan, [Value(x, f) for x, f in zip(arrays, formats, strict=True)])
        results = [
            _compat.like(value.get(row_major(aval.ndim)), aval)
            for value, aval in zip(values, closed.out_avals, strict=True)
        ]
        return jax.tree.unflatten(out["tree"], results)

    return call


def _scatters(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "select_and_scatter_add"
        or any(_scatters(inner) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _scatter_last(eqn: Any, formats: Any) -> Step | None:
    window = eqn.params["window_dimensions"]
    if len(window) < 3 or window[:2] != (1, 1) or window[-1] == 1:
        return None
    axes = (0, *range(2, len(window)), 1)
    back = (0, len(window) - 1, *range(1, len(window) - 1))
    changed = {
        name: tuple(eqn.params[name][axis] for axis in axes)
        for name in ("window_dimensions", "window_strides", "padding")
    }

    def scattered(source: Any, operand: Any) -> list[Any]:
        moved = [lax.transpose(x, axes) for x in (source, operand)]
        return [lax.transpose(_compat.bind(eqn, moved, **changed)[0], back)]

    plain = row_major(len(window))
    return Step([plain, plain], [plain], scattered)


def _sharding(platform: str, args: Any) -> Any:
    """Where the arguments are, or the platform's first device."""
    for x in _leaves(args):
        sharding = getattr(x, "sharding", None)
        if sharding is not None and not isinstance(x, jax.core.Tracer):
            return sharding
    return SingleDeviceSharding(jax.devices(platform)[0])


def _placed(tree: Any, entries: Sequence[Entry], default: Any) -> Any:
    leaves = [
        None
        if e.format is None or e.format.permutation is None
        else Format(
            Layout(e.format.permutation), getattr(x, "sharding", None) or default
        )
        for x, e in zip(_leaves(tree), entries, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_formatted)


def _logical(args: Any) -> Any:
    """Shapes and dtypes of arguments."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x,
        args,
        is_leaf=is_formatted,
    )


def _entries(tree: Any, formats: Sequence[MemoryFormat] | None) -> tuple[Entry, ...]:
    """One for each leaf; `formats` has one for each array."""
    rest = iter(formats or ())
    entries = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_formatted):
        name = jax.tree_util.keystr(path)
        if not is_array(x):
            entries.append(Entry(name, (), type(x).__name__, None))
            continue
        format = next(rest) if formats is not None else row_major(len(x.shape))
        entries.append(Entry(name, tuple(x.shape), x.dtype.name, format))
    return tuple(entries)
