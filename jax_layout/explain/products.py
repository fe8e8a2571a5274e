# SPDX-License-Identifier: Apache-2.0
"""The products of a compiled program: which arrays they read, and what runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_layout import _backends
from jax_layout.explain.hlo import Instruction
from jax_layout.explain.places import Place
from jax_layout.products.gemm import explain_gemm

_FUSION_KINDS = {
    "ynn": "YNNPACK",
    "xnn": "XNNPACK",
    "onednn": "oneDNN",
    "triton": "Triton",
    "cudnn": "cuDNN",
    "cutlass": "CUTLASS",
}
_TARGETS = {
    "__cublas$lt": "cuBLASLt",
    "__cublas": "cuBLAS",
    "__cudnn": "cuDNN",
    "__onednn": "oneDNN",
}
LOOPS = "XLA's plain loops"
EIGEN = "Eigen convolution"
# Attributes of a call that what runs it does not depend on.
_OF_THE_CALL = ("workspace", "a_part", "b_part")


class Core(NamedTuple):
    """The product in an instruction."""

    kind: str
    instruction: Instruction
    sides: tuple[str, ...]  # the outer operands that it reads, left, right


def core_of(place: Place) -> Core | None:
    module, i = place.module, place.at
    if i.opcode in ("dot", "convolution"):
        return Core("gemm" if i.opcode == "dot" else "convolution", i, i.operands)
    target = i.attribute("custom_call_target")
    if target and re.search(r"conv|gemm|matmul|dot_product", target):
        return Core("convolution" if "conv" in target else "gemm", i, i.operands)
    if i.opcode != "fusion":
        return None
    for part in module.fused(i):
        if part.opcode in ("dot", "convolution"):
            inside = Place(module, i.called("calls")[0], part)
            return Core(
                "gemm" if part.opcode == "dot" else "convolution",
                part,
                tuple(_outside(operand, i) for operand in inside.operands()),
            )
    return None


def _outside(place: Place, fusion: Instruction) -> str:
    """The operand of a fusion that a part of it comes from, along first operands."""
    while place.at.opcode != "parameter":
        operands = place.operands()
        if not operands:
            return ""
        place = operands[0]
    return fusion.operands[int(place.at.literal)]


def consumer(place: Place) -> Core | None:
    """The product that an array is made for."""
    for user in place.users():
        found = core_of(user) or (consumer(user) if user.passing else None)
        if found:
            return found
    return None


def producer(place: Place) -> Core | None:
    for operand in place.operands()[:1]:
        return core_of(operand) or (producer(operand) if operand.passing else None)
    return None


def reaches(place: Place, side: str) -> bool:
    """Whether the operand of a product of this name is the array."""
    return place.at.name == side or any(
        u.passing and reaches(u, side) for u in place.users()
    )


# --- what a product runs on


def implementation_of(place: Place, core: Core, platform: str) -> tuple[str, str]:
    """The implementation of a product, and details."""
    i, inner = place.at, core.instruction
    target = i.attribute("custom_call_target")
    sizes = " x ".join(_shape_of(place, side) for side in core.sides[:2])
    if target == "jax_layout_gemm":
        return _our_gemm(i, platform)
    if target == "jax_layout_conv":
        return _our_conv(i, platform)
    if target.startswith("jax_layout"):
        return target, sizes
    labels = inner.attribute("dim_labels")
    detail = f"{named(labels)}, {sizes}" if labels else sizes
    for prefix, library in _TARGETS.items():
        if target.startswith(prefix):
            epilogue = i.config.get("gemm_backend_config", {}).get("epilogue")
            if epilogue not in (None, "DEFAULT"):
                detail += f", fused {epilogue.lower()}"
            return f"{library} ({target.split('$')[-1]})", detail
    if target:
        return target, detail
    fusion = i.config.get("fusion_config", i.config.get("fusion_backend_config", {}))
    for part, library in _FUSION_KINDS.items():
        if part in fusion.get("kind", ""):
            return f"{library} fusion", detail
    if i.opcode == "fusion":
        return LOOPS, detail
    if core.kind == "gemm":
        return "XLA's dot", detail
    return (EIGEN if _is_eigen(place) else LOOPS), detail


def _shape_of(place: Place, name: str) -> str:
    found = place.module.names[place.computation].get(name)
    return str(found.shapes[0]) if found else "?"


def named(labels: str) -> str:
    """ "b01f_01io->b01f" as "NHWC, HWIO -> NHWC"."""
    spatial = "DHW"[3 - len(set(re.findall(r"\d", labels))) :]
    names = {"b": "N", "f": "C"} | {str(n): s for n, s in enumerate(spatial)}
    text = "".join(names.get(c, c.upper()) for c in labels.replace("->", "\0"))
    return text.replace("_", ", ").replace("\0", " -> ")


def _our_gemm(i: Instruction, platform: str) -> tuple[str, str]:
    c = i.config
    plan = explain_gemm(c["spec"], c["a_shape"], c["b_shape"], c["operand_type"])
    epilogue = [name for name in ("bias", "aux", "sums") if c[name]]
    for name in ("activation", "derivative"):
        if c[name] != "none":
            epilogue.append(f"{name} {c[name]}")
    if any(c["beta"]):
        epilogue.append("accumulates")
    loops = f", {' x '.join(map(str, plan.loops))} steps" if plan.loops else ""
    fused = f", fused {', '.join(epilogue)}" if epilogue else ""
    detail = f"{c['spec']} {c['operand_type']}, {plan.m} x {plan.n} x {plan.k}"
    if stacked := [name for name in "ab" if c.get(f"{name}_part")]:
        detail += f", {' and '.join(stacked)} in a stack"
    library = _library("gemm_methods", c, platform)
    return f"jax_layout {plan.form}{library}", f"{detail}{loops}{fused}"


def _our_conv(i: Instruction, platform: str) -> tuple[str, str]:
    c = i.config
    formats = {}
    for name, letters in (("x", "NC"), ("w", "OI"), ("y", "NC")):
        order = c[f"{name}_order"]
        axes = dict(zip(order, letters + "DHW"[5 - len(order) :], strict=True))
        formats[name] = "".join(axes[axis] for axis in range(len(order)))
        if (block := c.get(f"{name}_block", 1)) > 1:
            formats[name] += f"{block}c"
    formats["w"] = c.get("w_format") or formats["w"]
    shapes = {name: "x".join(map(str, c[f"{name}_shape"])) for name in "xwy"}
    fused = [name for name in ("bias", "relu") if c[name]]
    detail = ", ".join(f"{name} {formats[name]} {shapes[name]}" for name in "xwy")
    detail += f", {c['groups']} groups" if c["groups"] > 1 else ""
    detail += f", fused {', '.join(fused)}" if fused else ""
    library = _library("conv_plan", c, platform)
    return f"jax_layout {c['pass_']}{library}", f"{c['type']}, {detail}"


def _library(question: str, config: Mapping[str, Any], platform: str) -> str:
    """What a backend's module answers, asked with the attributes of the call."""
    ask = getattr(_backends.module(platform), question, None)
    if ask is None:
        return ""
    asked = {k: v for k, v in config.items() if k not in _OF_THE_CALL}
    answer = ask(**asked)
    if isinstance(answer, dict):
        answer = answer.get("implementation", "")
    elif isinstance(answer, list):
        answer = next(iter(answer), "")
    return f", {answer}" if answer else ""


def _is_eigen(place: Place) -> bool:
    """Whether XLA:CPU hands a convolution to Eigen, which knows one order of axes."""
    i = place.at
    arrays = [i.shapes[0], *(p.at.shapes[0] for p in place.operands())]
    spatial = "".join(map(str, range(len(i.shapes[0].dims) - 2)))
    return (
        i.attribute("dim_labels") == f"b{spatial}f_{spatial}io->b{spatial}f"
        and all(a.order == tuple(range(len(a.dims))) for a in arrays)
        and i.shapes[0].dtype in ("f32", "f16")
        and "rhs_reversal" not in i.attributes
        and not i.attribute("batch_group_count")
    )
