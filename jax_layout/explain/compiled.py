# SPDX-License-Identifier: Apache-2.0
"""What a compiled program moves, who asked for it, and what its products run on."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jax_layout import _backends
from jax_layout.explain import hlo, traced
from jax_layout.explain.hlo import Instruction, Module
from jax_layout.explain.report import Advice, Product, Reorder, Value
from jax_layout.formats.memory_format import MemoryFormat
from jax_layout.products.gemm import explain_gemm

# Frames below these are not the user's.
_LIBRARIES = tuple(
    os.path.dirname(str(file)) + os.sep
    for file in (jax.__file__, jax.lib.__file__, _backends.__file__)
)
# Only a name for the buffer, or only another dtype, of the operand.
_PASSING = frozenset(
    "parameter bitcast get-tuple-element reshape copy transpose convert".split()
)
_STILL = frozenset("parameter transpose copy bitcast reshape".split())
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
_LOOPS = "XLA's plain loops"
_EIGEN = "Eigen convolution"


@dataclasses.dataclass(frozen=True)
class Findings:
    """All of a compiled program that goes into a `Report`."""

    reorders: Sequence[Reorder]
    products: Sequence[Product]
    values: Sequence[Value]
    warnings: Sequence[Advice]
    bytes: int
    flops: int


def analyse(
    module: Module,
    platform: str,
    transposes: Mapping[Any, str],
    bandwidth: float,
    peak: float,
) -> Findings:
    """Finds the reorders and products of a program.

    Args:
      module: the program.
      platform: "cpu" or "cuda".
      transposes: the program's own: source lines by extents of the operand and axes,
        and by source line and number of elements.
      bandwidth: bytes per second.
      peak: flops per second.
    """
    reorders: list[Reorder] = []
    products: list[Product] = []
    warnings: list[Advice] = []
    total = flops = 0
    for computation, (trips, known, _) in module.trips.items():
        for i in module.computations[computation]:
            at = _Place(module, computation, i)
            size = hlo.traffic(module, computation, i)
            total += trips * size
            flops += trips * hlo.flops(module, computation, i)
            if core := _core(at):
                implementation, detail = _implementation(at, core, platform)
                product = Product(
                    op=i.name,
                    kind=core.kind,
                    implementation=implementation,
                    detail=detail,
                    trips=trips,
                    trips_known=known,
                    source=line_of(*at),
                )
                products.append(product)
                warnings += _product_advice(at, core, product, platform)
            kind, fused = reorder_kind(module, computation, i)
            if kind:
                cause, line = _cause(at, kind, transposes)
                reorder = Reorder(
                    stage="hlo",
                    op=i.name,
                    kind=kind,
                    shape=str(i.shapes[0]),
                    bytes=size,
                    trips=trips,
                    trips_known=known,
                    fused=fused,
                    share=None,
                    source=line or line_of(*at),
                    cause=cause,
                )
                reorders.append(reorder)
                warnings += _reorder_advice(at, reorder, platform)
    whole = bandwidth * max(flops / peak, total / bandwidth)
    return Findings(
        [dataclasses.replace(r, share=r.total_bytes / whole) for r in reorders],
        products,
        list(_values(module)),
        warnings,
        total,
        flops,
    )


def _values(module: Module) -> Iterator[Value]:
    body = module.computations[module.entry]
    inputs = [i for i in body if i.opcode == "parameter"]
    results = [i for i in body if i.root]
    for i in (*sorted(inputs, key=lambda i: int(i.literal)), *results):
        role = "argument" if i.opcode == "parameter" and not i.root else "result"
        for n, shape in enumerate(i.shapes):
            if len(shape.dims) > 1:
                format = MemoryFormat.of_permutation(shape.order)
                name = i.op_name if role == "argument" else str(n)
                text = "row-major" if format.row_major else str(format)
                yield Value(role, name, str(shape), text)


class _Place(NamedTuple):
    """An instruction, and where it is."""

    module: Module
    computation: str
    at: Instruction

    def near(self, instruction: Instruction) -> _Place:
        return self._replace(at=instruction)

    def users(self) -> list[_Place]:
        users = self.module.users[self.computation].get(self.at.name, [])
        return [self.near(i) for i in users]

    def operands(self) -> list[_Place]:
        names = self.module.names[self.computation]
        return [self.near(names[o]) for o in self.at.operands if o in names]

    @property
    def passing(self) -> bool:
        """Whether it is its operand, as far as the cause of a reorder goes."""
        parts = self.module.fused(self.at) or (self.at,)
        return all(i.opcode in _PASSING for i in parts)

    @property
    def inside(self) -> bool:
        """Whether it is in a loop or a branch."""
        return self.module.trips[self.computation].inside

    @property
    def argument(self) -> str:
        """The name of the program's argument that this is, "" if it is none."""
        if self.computation != self.module.entry:
            return ""
        if self.at.opcode == "parameter":
            return self.at.op_name or f"argument {self.at.literal}"
        operands = self.operands()
        return operands[0].argument if self.passing and operands else ""


def reorder_kind(module: Module, computation: str, i: Instruction) -> tuple[str, bool]:
    """What kind of `Reorder` an instruction is, and whether arithmetic is in it.

    Returns:
      "" if it is none.
    """
    names = module.names[computation]
    if i.attribute("custom_call_target") == "jax_layout_permute":
        return "permute", False
    if i.opcode in ("transpose", "copy", "copy-start") and i.operands[0] in names:
        if i.shapes[0].size <= 1:
            return "", False  # a loop's counter
        if hlo.moves(i, names[i.operands[0]].shapes[0]):
            return ("transpose" if i.opcode == "transpose" else "relayout"), False
        return ("" if i.opcode == "transpose" else "copy"), False
    # A custom fusion is a library's kernel, which reads its operands as they lie.
    if i.opcode != "fusion" or i.attribute("kind") == "kCustom":
        return "", False
    parts = module.fused(i)
    inside = module.names[i.called("calls")[0]]
    if any(p.opcode in ("dot", "convolution") for p in parts):
        return "", False
    pure = all(p.opcode in _STILL for p in parts)
    moved = [p for p in parts if p.opcode in ("transpose", "copy")]
    if any(hlo.moves(p, inside[p.operands[0]].shapes[0]) for p in moved):
        turned = any(p.opcode == "transpose" for p in moved)
        return ("transpose" if turned else "relayout"), not pure
    copied = pure and i.shapes[0].size > 1 and any(p.opcode == "copy" for p in moved)
    return ("copy" if copied else ""), False


# --- source lines


def _user_line(module: Module, i: Instruction) -> str:
    """The user's "file:line" of an instruction, or of a part of a fusion."""
    for part in (i, *module.fused(i)):
        for frame in module.frames(part):
            if not frame.file.startswith(_LIBRARIES):
                return f"{frame.file}:{frame.line}"
    return ""


def line_of(module: Module, computation: str, i: Instruction) -> str:
    """The same; of an instruction that XLA made, that of the nearest one it serves."""
    level = [_Place(module, computation, i)]
    seen: set[str] = set()
    for _ in range(4):
        for p in level:
            if line := _user_line(p.module, p.at):
                return line
        seen |= {p.at.name for p in level}
        near = {n.at.name: n for p in level for n in (*p.users(), *p.operands())}
        level = [place for name, place in near.items() if name not in seen]
    return ""


# --- who asked for a reorder


def _cause(place: _Place, kind: str, transposes: Mapping[Any, str]) -> tuple[str, str]:
    """Who asked for it, and the program's line where it is known to be its own."""
    module, i = place.module, place.at
    if kind == "permute":
        return "a permute of jax_layout", ""
    if kind == "copy":
        return ("loop carry" if _carried(place) else "XLA's copy"), ""
    names = module.names[i.called("calls")[0] if i.opcode == "fusion" else place[1]]
    parts = [i, *module.fused(i)]
    for part in parts:
        if part.opcode == "transpose":
            x = names[part.operands[0]].shapes[0]
            if line := transposes.get((x.dims, part.integers("dimensions"))):
                return "the program's transpose", line
    if any(part.op_name.endswith("/transpose") for part in parts):
        return "the program's transpose", ""
    found = _consumer(place) or _producer(place)
    if found:
        return f"XLA's layout for the {found.kind}", ""
    if (_user_line(module, i), i.shapes[0].size) in transposes:
        return "the program's transpose", ""
    if _carried(place):
        return "loop carry", ""
    if place.computation == module.entry and (i.root or place.argument):
        return "entry layout", ""
    return "XLA", ""


def _carried(place: _Place) -> bool:
    """Whether it is what a loop or branch is given, or hands on."""
    inside = place.inside
    for user in place.users():
        if user.at.opcode == "tuple":
            if user.at.root and inside:
                return True
            takers = {taker.at.opcode for taker in user.users()}
            if takers & {"while", "conditional", "call"}:
                return True
    return bool(place.at.root and inside)


class _Core(NamedTuple):
    """The product in an instruction."""

    kind: str
    instruction: Instruction
    sides: tuple[str, ...]  # the outer operands that it reads, left, right


def _core(place: _Place) -> _Core | None:
    module, i = place.module, place.at
    if i.opcode in ("dot", "convolution"):
        return _Core("gemm" if i.opcode == "dot" else "convolution", i, i.operands)
    target = i.attribute("custom_call_target")
    if target and re.search(r"conv|gemm|matmul|dot_product", target):
        return _Core("convolution" if "conv" in target else "gemm", i, i.operands)
    if i.opcode != "fusion":
        return None
    for part in module.fused(i):
        if part.opcode in ("dot", "convolution"):
            inside = _Place(module, i.called("calls")[0], part)
            return _Core(
                "gemm" if part.opcode == "dot" else "convolution",
                part,
                tuple(_outside(operand, i) for operand in inside.operands()),
            )
    return None


def _outside(place: _Place, fusion: Instruction) -> str:
    """The operand of a fusion that a part of it comes from, along first operands."""
    while place.at.opcode != "parameter":
        operands = place.operands()
        if not operands:
            return ""
        place = operands[0]
    return fusion.operands[int(place.at.literal)]


def _consumer(place: _Place) -> _Core | None:
    """The product that an array is made for."""
    for user in place.users():
        found = _core(user) or (_consumer(user) if user.passing else None)
        if found:
            return found
    return None


def _producer(place: _Place) -> _Core | None:
    for operand in place.operands()[:1]:
        return _core(operand) or (_producer(operand) if operand.passing else None)
    return None


def _reaches(place: _Place, side: str) -> bool:
    """Whether the operand of a product of this name is the array."""
    return place.at.name == side or any(
        u.passing and _reaches(u, side) for u in place.users()
    )


# --- what a product runs on


def _implementation(place: _Place, core: _Core, platform: str) -> tuple[str, str]:
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
    detail = f"{_named(labels)}, {sizes}" if labels else sizes
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
        return _LOOPS, detail
    if core.kind == "gemm":
        return "XLA's dot", detail
    return (_EIGEN if _is_eigen(place) else _LOOPS), detail


def _shape_of(place: _Place, name: str) -> str:
    found = place.module.names[place.computation].get(name)
    return str(found.shapes[0]) if found else "?"


def _named(labels: str) -> str:
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
    answer = ask(**{k: v for k, v in config.items() if k != "workspace"})
    if isinstance(answer, dict):
        answer = answer.get("implementation", "")
    elif isinstance(answer, list):
        answer = next(iter(answer), "")
    return f", {answer}" if answer else ""


def _is_eigen(place: _Place) -> bool:
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


# --- advice


def _product_advice(
    place: _Place, core: _Core, product: Product, platform: str
) -> Iterator[Advice]:
    if platform != "cpu" or core.kind != "convolution":
        return
    inner = core.instruction
    if product.implementation not in (_LOOPS, _EIGEN):
        return
    if inner.attribute("feature_group_count") or inner.attribute("batch_group_count"):
        yield Advice(
            "grouped-convolution",
            "XLA's grouped and depthwise convolutions are slow on a CPU (jax#23713): "
            "use jl.conv",
            product.source,
        )
    elif product.implementation == _LOOPS and place.inside:
        # The weight's gradient, of which x and y lie in NHWC.
        labels = inner.attribute("dim_labels")
        if "transpose(" in inner.op_name and labels.split("_")[0][-1] in "bf":
            yield Advice(
                "nhwc-gradient-in-loop",
                "the gradient of an NHWC convolution in scan, while_loop or cond runs "
                "by plain loops on a CPU (jax#12868): use jl.conv, or "
                "jl.optimize_layout around the whole function",
                product.source,
            )
        else:
            yield Advice(
                "convolution-in-loop",
                f"a convolution in scan, while_loop or cond runs by plain loops on a "
                f"CPU unless it is NHWC, HWIO (jax#12868), this one is "
                f"{_named(labels)}: use jl.conv, or jl.optimize_layout around the "
                "whole function",
                product.source,
            )


def _reorder_advice(place: _Place, reorder: Reorder, platform: str) -> Iterator[Advice]:
    core = _consumer(place)
    if core is None or reorder.kind == "copy" or reorder.fused:
        return
    ours = core.instruction.attribute("custom_call_target").startswith("jax_layout")
    half = place.at.shapes[0].dtype in ("bf16", "f16")
    slower = platform == "cpu" and half and not traced.has_amx()
    if core.kind == "gemm" and not ours:
        advice = (
            "keep it in that order, if it is used often"
            if slower
            else "jl.einsum and jl.matmul read operands in place"
        )
        yield Advice(
            "transposed-operand",
            f"{reorder.shape} is written out in another order before a dot: {advice}",
            reorder.source,
        )
    batched = core.instruction.attribute("lhs_batch_dims")
    if place.argument and not batched and _reaches(place, core.sides[1]):
        yield Advice(
            "weights-relaid",
            f"{place.argument} ({reorder.shape}) is re-laid on every call: keep it in "
            "that order, as jl.plan_layout does",
            reorder.source,
        )
