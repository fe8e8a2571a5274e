# SPDX-License-Identifier: Apache-2.0
"""What a program asks for, as its jaxpr says: reorders, memory formats, products."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval as pe

from jax_layout import _backends, choices
from jax_layout.explain.places import module_of, user_line
from jax_layout.explain.report import Advice, Reorder, Value
from jax_layout.optimize.values import SCOPE
from jax_layout.products.gemm import gemm_kernel
from jax_layout.products.letters import terms_of

_HERE = os.path.dirname(_backends.__file__) + os.sep
_FRAMES = 100  # of a stack, at most
_DTYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c"}


@dataclasses.dataclass(frozen=True)
class Findings:
    """All of a jaxpr that goes into a `Report`.

    Attributes:
      transposes: source lines of those that move anything, by extents of the operand
        and axes, and by source line and number of elements.
      faster: why products of plain jax would be ours, by source line and module; ""
        if they would not.
    """

    reorders: list[Reorder]
    tags: list[Value]
    warnings: list[Advice]
    transposes: dict[Any, str]
    faster: dict[tuple[str, str], str]


def analyse(jaxpr: Any, platform: str) -> Findings:
    """Finds reorders and tags in a jaxpr and in all that it calls.

    Args:
      jaxpr: of the whole program. Of what nothing depends on, only tags count.
      platform: that the program is for, "cpu" or "cuda".
    """
    found = Findings([], [], [], {}, {})
    top = _Context("", "", frozenset(), 1, True, None)
    found.tags.extend(_tags(_walk(_open(jaxpr), top)))
    live, _ = pe.dce_jaxpr(_open(jaxpr), [True] * len(jaxpr.out_avals))
    for step in _walk(live, top):
        name = step.eqn.primitive.name
        if name in ("transpose", "permute", "copy", "copy_p"):
            _reorder(step, found)
        if name == "permute" and ("formats/tags.py", "store") in step.made_by:
            _dropped(step, "a result in a memory format", found)
        if name == "memory_format" and not step.eqn.params["format"].row_major:
            # Operators that know formats read the physical array beside it instead.
            _dropped(step, f"a value tagged {step.eqn.params['format']}", found)
        if name == "dot_general" and platform == "cpu":
            _product(step, found)
    return found


# --- equations, one after the other


class _Context(NamedTuple):
    """Where a jaxpr is called."""

    line: str
    path: str  # of names, as in HLO's op_name
    made_by: frozenset[tuple[str, str]]
    trips: int
    known: bool
    owner: _Step | None  # None at the top


class _Step(NamedTuple):
    """An equation, with inlined calls taken apart.

    Attributes:
      line: the user's "file:line", if only of a call that it is in.
      path: of names, as in HLO's op_name, itself left out.
      made_by: our functions that asked for it: file, name.
      inputs: numbers of the values that it reads.
      outputs: numbers of its results.
      scope: the steps beside it, and the numbers of their results.
    """

    eqn: Any
    line: str
    path: str
    made_by: frozenset[tuple[str, str]]
    trips: int
    known: bool
    inputs: Sequence[int]
    outputs: Sequence[int]
    scope: _Scope

    @property
    def module(self) -> str:
        """The module of the program, as `module_of` names it."""
        return module_of(f"{self.path}/{self.eqn.primitive.name}")


@dataclasses.dataclass
class _Scope:
    owner: _Step | None
    steps: list[_Step] = dataclasses.field(default_factory=list)
    results: Sequence[int] = ()


_numbers = itertools.count()


def _walk(jaxpr: Any, context: _Context) -> Iterator[_Step]:
    scope = _Scope(context.owner)
    scope.results = _steps(
        jaxpr, [next(_numbers) for _ in jaxpr.invars], context, scope
    )
    for step in scope.steps:
        yield step
        name = step.eqn.primitive.name
        if name == "pallas_call":
            continue  # a kernel's own transposes are in registers
        inner = context._replace(
            line=step.line,
            path=step.path,
            made_by=step.made_by,
            trips=step.trips * (step.eqn.params["length"] if name == "scan" else 1),
            known=step.known and name != "while",
            owner=step,
        )
        for called in _called(step.eqn):
            yield from _walk(called, inner)


def _steps(
    jaxpr: Any, inputs: Sequence[int], context: _Context, scope: _Scope
) -> list[int]:
    numbers = dict(zip(jaxpr.invars, inputs, strict=True))

    def number(atom: Any) -> int:  # a literal has one of its own
        known = hasattr(atom, "val")
        return next(_numbers) if known else numbers.setdefault(atom, next(_numbers))

    for eqn in jaxpr.eqns:
        line = _line(eqn) or context.line
        path = f"{context.path}/{eqn.source_info.name_stack}"
        made_by = context.made_by | _made_by(eqn)
        read = [number(v) for v in eqn.invars]
        inline = eqn.params.get("inline")
        if getattr(inline, "value", inline) in (True, "jax_early", "jax_late"):
            inside = context._replace(line=line, path=path, made_by=made_by)
            results = _steps(_open(eqn.params["jaxpr"]), read, inside, scope)
            numbers |= zip(eqn.outvars, results, strict=True)
        else:
            scope.steps.append(
                _Step(
                    eqn,
                    line,
                    path,
                    made_by,
                    context.trips,
                    context.known,
                    read,
                    [number(v) for v in eqn.outvars],
                    scope,
                )
            )
    return [number(v) for v in jaxpr.outvars]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _called(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                yield _open(item)


def _line(eqn: Any) -> str:
    # The stack, the innermost frame last: "file:line:column (function)".
    stack = source_info_util.summarize(eqn.source_info, _FRAMES)
    frames = [frame.rpartition(" (")[0].split(":") for frame in stack.splitlines()]
    return user_line((f[0], int(f[1])) for f in frames[::-1] if len(f) > 1)


def _made_by(eqn: Any) -> frozenset[tuple[str, str]]:
    traceback = eqn.source_info.traceback
    found = {
        (frame.file_name.removeprefix(_HERE), frame.function_name)
        for frame in (traceback.frames if traceback else ())
        if frame.file_name.startswith(_HERE)
    }
    # Its conversions have the lines of the user's equations, and its name.
    if SCOPE in str(eqn.source_info.name_stack):
        found.add(("optimize/optimize.py", SCOPE))
    return frozenset(found)


# --- what is found


def _reorder(step: _Step, found: Findings) -> None:
    eqn = step.eqn
    x, y = eqn.invars[0].aval, eqn.outvars[0].aval
    axes = eqn.params.get("permutation", eqn.params.get("axes"))
    if axes is not None:
        kept = [axis for axis in axes if x.shape[axis] != 1]
        if kept == sorted(kept) or x.size == 0:
            return  # a relabelling
        found.transposes[tuple(x.shape), tuple(axes)] = step.line
        found.transposes[step.line, x.size] = step.line
    files = {file for file, _ in step.made_by}
    if ("optimize/optimize.py", SCOPE) in step.made_by:
        cause = "optimize_layout"
    elif any(file.startswith("formats/") for file in files):
        cause = "a memory format"
    elif "products/gemm.py" in files:
        cause = "a GEMM that does not run in place"
    elif "transpose(" in str(eqn.source_info.name_stack):
        cause = "the program's gradient"
    else:
        cause = "the program"
    found.reorders.append(
        Reorder(
            stage="jaxpr",
            op=eqn.primitive.name,
            kind="copy" if axes is None else "transpose",
            shape=_text(y),
            bytes=_bytes(x) + _bytes(y),
            trips=step.trips,
            trips_known=step.known,
            fused=False,
            share=None,
            source=step.line,
            cause=cause,
            module=step.module,
        )
    )


def _tags(steps: Iterator[_Step]) -> Iterator[Value]:
    for step in steps:
        if step.eqn.primitive.name == "memory_format":
            shape = _text(step.eqn.outvars[0].aval)
            yield Value("tag", "", shape, str(step.eqn.params["format"]), step.line)


def _dropped(step: _Step, what: str, found: Findings) -> None:
    """Warns of what reads the logical value of something in a memory format."""
    (x,) = step.outputs
    users = [user for user in step.scope.steps if x in user.inputs]
    if x in step.scope.results and step.scope.owner is not None:
        users.append(step.scope.owner)
    for user in users:
        name = user.eqn.params.get("name", user.eqn.primitive.name)
        if name == "memory_format":
            continue  # tagged again
        if ("formats/tags.py", "store") in user.made_by:
            _dropped(user, what, found)  # the reshape of a format with blocks
            continue
        found.warnings.append(
            Advice(
                "format-dropped",
                f"{name} does not know memory formats, and reads {what} in row-major "
                "order: use an operator of jax_layout there, or jl.optimize_layout "
                "around the whole function",
                user.line,
                user.module,
            )
        )


def _product(step: _Step, found: Findings) -> None:
    """Notes a product of plain jax that a kernel of ours would serve better."""
    eqn = step.eqn
    a, b = (v.aval for v in eqn.invars)
    if {f for f, _ in step.made_by} & {"products/gemm.py", "products/linear.py"}:
        return  # ours, which chose plain jax
    spec = "{},{}->{}".format(*terms_of(eqn))
    kernel = gemm_kernel(
        "cpu",
        a,
        b,
        spec=spec,
        precision=eqn.params["precision"],
        dtype=np.dtype(eqn.outvars[0].aval.dtype),
    )
    work, why = None if kernel is None else kernel.work, ""
    if kernel and work and (method := choices.choose(work, kernel.methods)):
        why = _why(method, choices.decided_by(work, kernel.methods))
    # Of several products there, gradients say, all must be.
    at = step.line, step.module
    found.faster[at] = why if found.faster.get(at, why) == why else ""
    if work and why and a.dtype in (jnp.bfloat16, jnp.float16):
        m, n, k, steps = work.sizes
        size = f"{m} x {n} x {k}" + (f", {steps} times" if steps > 1 else "")
        found.warnings.append(
            Advice(
                "16-bit-dot",
                f"XLA computes this {a.dtype} product {spec} of {size}; {why}: "
                "use jl.einsum, jl.matmul or jl.linear",
                *at,
            )
        )


def _why(method: str, table: str) -> str:
    """On what condition a method of ours is recommended."""
    if table == "kernels":
        return f"choices are set to run it with {method}, whatever its speed"
    return f"{method} of jl.matmul is faster here by {os.path.basename(table)}"


def _text(aval: Any) -> str:
    """An array as HLO writes it: "bf16[8,3]"."""
    dtype = str(aval.dtype).replace("_", "").replace("bool", "pred")
    for name, short in _DTYPES.items():
        if dtype.startswith(name):
            dtype = short + dtype.removeprefix(name)
            break
    return f"{dtype}[{','.join(map(str, aval.shape))}]"


def _bytes(aval: Any) -> int:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return aval.size * aval.dtype.itemsize  # PRNG keys
    return (aval.size * jax.dtypes.itemsize_bits(aval.dtype) + 7) // 8
