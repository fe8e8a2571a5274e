# SPDX-License-Identifier: Apache-2.0
"""Where memory order costs time in a program, before and after XLA compiled it.

The jaxpr tells what the program asks for and which values are tagged with a memory
format (traced.py); the compiled HLO what is left of it and what XLA added
(compiled.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jax_layout import choices
from jax_layout.explain import alternatives, compiled, hlo, traced
from jax_layout.explain.report import Cost, Report

# In the text of a program that calls kernels of ours.
_OURS = 'custom_call_target="jax_layout_'
_TRANSFORMATIONS = {
    "Gradient": "grad",
    "Value and gradient": "value_and_grad",
    "Vectorized version": "vmap",
    "Jacobian": "jacobian",
}


def explain(
    f: Callable[..., Any], *, platform: str | None = None
) -> Callable[..., Report]:
    """Reports every transpose, copy and relayout of a function, and what they cost.

    The function is compiled, not run. See docs/explain.md.

    Args:
      f: function of arrays; one that `jax.jit` returned keeps its static arguments,
        donations and shardings.
      platform: "cpu" or "cuda"; left out, that of the arguments. For "cuda" without
        a GPU the program is compiled for an H100, for which jax's CUDA plugin must
        be installed.

    Returns:
      the function of f's arguments that returns the `Report`. Arrays may be given
      as `jax.ShapeDtypeStruct`.

    Raises:
      TypeError: if f is no function.
      ValueError: if the platform is another.
      RuntimeError: if the platform cannot be compiled for here.

    >>> report = explain(lambda x: jnp.sin(x).T)(jnp.ones((512, 256), "float32"))
    >>> [(r.kind, r.bytes) for r in report.reorders if r.stage == "jaxpr"]
    [('transpose', 1048576)]
    """
    if not callable(f):
        raise TypeError(f"explain: f must be a function, got {f!r}.")
    if platform not in (None, "cpu", "cuda"):
        raise ValueError(f"explain: platform must be cpu or cuda, got {platform!r}.")

    def run(*args: Any, **kwargs: Any) -> Report:
        return _explain(f, platform, args, kwargs)

    return run


def _explain(f: Any, platform: str | None, args: Any, kwargs: Any) -> Report:
    device = _device(platform, jax.tree.leaves((args, kwargs)))
    program = _compile(f, device if platform else None, args, kwargs)
    name = "cuda" if device.platform in ("gpu", "cuda") else device.platform
    traces = traced.analyse(program.jaxpr, name)
    machine = _machine(device)
    findings = compiled.analyse(
        hlo.parse(program.text),
        name,
        traces.transposes,
        traces.faster,
        machine.bandwidth,
        machine.peak,
    )
    original = _original(f)
    report = Report(
        function=_name(f),
        platform=name,
        device=device.device_kind,
        reorders=(*traces.reorders, *findings.reorders),
        products=tuple(findings.products),
        values=(*traces.tags, *findings.values),
        warnings=(*traces.warnings, *findings.warnings),
        bytes=findings.bytes,
        flops=findings.flops,
        bandwidth=machine.bandwidth,
        peak=machine.peak,
        roofline=machine.source,
        before=_explain(original, platform, args, kwargs) if original else None,
        conversions=tuple(findings.conversions),
        temporary=program.temporary,
    )
    if original is None and name == "cpu" and _OURS in program.text:
        with choices.forced("lax"):
            plain = _cost(program.again())
        report = dataclasses.replace(report, plain=plain)

    def cost(g: Any, args: Any, kwargs: Any) -> Cost:
        return _cost(_compile(g, device if platform else None, args, kwargs))

    warnings = (
        *alternatives.worse(report),
        *report.warnings,
        *alternatives.laid_out(f, original, args, kwargs, report, cost),
    )
    return dataclasses.replace(report, warnings=tuple(dict.fromkeys(warnings)))


def _cost(program: _Program) -> Cost:
    return Cost(compiled.moved(hlo.parse(program.text)), program.temporary)


def _name(f: Any) -> str:
    """The function's name, in those of the transformations that made it."""
    if isinstance(f, functools.partial):
        return _name(f.func)
    name = getattr(f, "__name__", type(f).__name__)
    inner = getattr(f, "__wrapped__", None)
    if inner is None:
        return name
    # A transformation keeps the name, and says what it is in a docstring of its own.
    text = getattr(f, "__doc__", None)
    if hasattr(f, "trace") or text is getattr(inner, "__doc__", None):
        return _name(inner)  # jax.jit, and what hands the docstring on
    found = re.match(r"([\w ]+?) of (\S+?)[. ]", text or "")
    kind = _TRANSFORMATIONS.get(found[1]) if found and found[2] == name else None
    return f"{kind}({_name(inner)})" if kind else _name(inner)


# --- tracing and compiling


def _device(platform: str | None, leaves: Sequence[Any]) -> Any:
    if platform is None:
        for x in leaves:
            for device in getattr(getattr(x, "sharding", None), "device_set", ()):
                return device
        return jax.devices()[0]
    try:
        return jax.devices(platform)[0]
    except RuntimeError:
        if platform != "cuda":
            raise
        return _h100()


@functools.cache
def _h100() -> Any:
    from jax.experimental import topologies

    target = Path(__file__).with_name("h100_sxm.txtpb").read_text()
    try:
        return topologies.get_topology_desc(
            "h100", platform="cuda", target_config=target, topology="1x1x1"
        ).devices[0]
    except Exception as error:  # of the plugin, of any type
        variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
        unset = (
            ""
            if os.environ.get(variable)
            else f" and the environment variable {variable}=1, set before jax starts"
        )
        raise RuntimeError(
            "explain: there is no GPU, and to compile for an H100 without one takes "
            f"jax's CUDA plugin (pip install 'jax[cuda13]'){unset}; it says: {error}."
        ) from error


class _Program(NamedTuple):
    jaxpr: Any
    text: str
    temporary: int
    again: Callable[[], _Program]  # lowered anew


def _compile(f: Any, device: Any, args: Any, kwargs: Any) -> _Program:
    """Traces and compiles a call, for a device if one is given."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if _is_array(x)]
    if device is not None:
        leaves = [_placed(x, device) if _is_array(x) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(tree, leaves)
    arrays = [leaves[i] for i in places]

    def call(*given: Any) -> Any:
        mixed = list(leaves)
        for i, x in zip(places, given, strict=True):
            mixed[i] = x
        args, kwargs = jax.tree.unflatten(tree, mixed)
        return f(*args, **kwargs)

    if hasattr(f, "trace"):  # of jax.jit
        program = f.trace(*args, **kwargs)
    elif len(arrays) == len(leaves):
        program = jax.jit(f).trace(*args, **kwargs)
    else:
        program = jax.jit(call).trace(*arrays)
    donated = [info.donated for info in jax.tree.leaves(program.args_info)]

    def again() -> _Program:
        # Of a function that jax does not know: what it lowered once, it keeps.
        known = len(donated) == len(arrays)
        given = [i for i, d in enumerate(donated) if d] if known else []
        new = jax.jit(lambda *given: call(*given), donate_argnums=given)
        return _compiled(new.trace(*arrays), again)

    return _compiled(program, again)


def _compiled(program: Any, again: Callable[[], _Program]) -> _Program:
    done = program.lower().compile()
    memory = done.memory_analysis()
    temporary = 0 if memory is None else int(memory.temp_size_in_bytes)
    return _Program(program.jaxpr, done.as_text(), temporary, again)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _placed(x: Any, device: Any) -> Any:
    sharding = SingleDeviceSharding(device)
    layout = getattr(getattr(x, "format", None), "layout", None)
    if layout is not None:  # of an array that is in a format of its own
        order = Layout(tuple(layout.major_to_minor))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Format(order, sharding))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _original(f: Any) -> Any:
    """What `optimize_layout` was given, or None if f is not of its making."""
    while hasattr(f, "trace") and hasattr(f, "__wrapped__"):
        f = f.__wrapped__
    home = getattr(f, "__globals__", {}).get("__name__") or type(f).__module__
    return (
        getattr(f, "__wrapped__", None)
        if home == "jax_layout.optimize.optimize"
        else None
    )


# --- the machine


class _Machine(NamedTuple):
    bandwidth: float  # of a copy, in bytes per second
    peak: float  # of a GEMM, in flops per second
    source: str


@functools.cache
def _machine(device: Any) -> _Machine:
    try:
        bandwidth, peak = _measure(device)
        source = (
            "measured now (in float32): while other programs run, both are lower and "
            "the shares off"
        )
    except Exception:  # a device of a topology runs nothing
        bandwidth, peak = 3.35e12, 989e12
        source = "from NVIDIA's data sheet of the H100 SXM (bfloat16)"
    text = f"copies at {bandwidth / 1e9:.3g} GB/s, GEMMs at {peak / 1e9:.3g} GFLOP/s"
    return _Machine(bandwidth, peak, f"roofline: {text}, {source}")


def _measure(device: Any) -> tuple[float, float]:
    # Enough for a device that starts in microseconds: 64 MiB, or 1 GiB.
    size, side = (1 << 24, 1024) if device.platform == "cpu" else (1 << 28, 8192)
    with jax.default_device(device):
        x = jnp.ones(size, jnp.float32)
        a = jnp.ones((side, side), jnp.float32)
        add = jax.jit(lambda x: x + 1, donate_argnums=0)
        dot = jax.jit(lambda a: a @ a / side)
        seconds = []
        for function, value in ((add, x), (dot, a)):
            best = math.inf
            for _ in range(4):
                value = jax.block_until_ready(value)
                start = time.perf_counter()
                value = jax.block_until_ready(function(value))
                best = min(best, time.perf_counter() - start)
            seconds.append(best)
    return 2 * 4 * size / seconds[0], 2 * side**3 / seconds[1]
