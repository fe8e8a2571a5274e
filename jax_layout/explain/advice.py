# SPDX-License-Identifier: Apache-2.0
"""What to change in a compiled program, each on the condition that it states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jax_layout.explain import hlo
from jax_layout.explain.places import Place, origin
from jax_layout.explain.products import EIGEN, LOOPS, Core, consumer, named, reaches
from jax_layout.explain.report import Advice, Conversion, Product, Reorder
from jax_layout.explain.updates import copied_for

# Of all that a program reads and writes.
NOTICED = 0.01

# Why a product of plain jax would be ours, by source line and module.
Faster = Mapping[tuple[str, str], str]


def of_product(
    place: Place, core: Core, product: Product, platform: str
) -> Iterator[Advice]:
    """Of convolutions that XLA computes slowly on a CPU."""
    if platform != "cpu" or core.kind != "convolution":
        return
    inner = core.instruction
    if product.implementation not in (LOOPS, EIGEN):
        return
    at = product.source, product.module
    if inner.attribute("feature_group_count") or inner.attribute("batch_group_count"):
        yield Advice(
            "grouped-convolution",
            "XLA's grouped and depthwise convolutions are slow on a CPU (jax#23713): "
            "use jl.conv",
            *at,
        )
    elif product.implementation == LOOPS and place.inside:
        # The weight's gradient, of which x and y lie in NHWC.
        labels = inner.attribute("dim_labels")
        if "transpose(" in inner.op_name and labels.split("_")[0][-1] in "bf":
            yield Advice(
                "nhwc-gradient-in-loop",
                "the gradient of an NHWC convolution in scan, while_loop or cond runs "
                "by plain loops on a CPU (jax#12868): use jl.conv, or "
                "jl.optimize_layout around the whole function",
                *at,
            )
        else:
            yield Advice(
                "convolution-in-loop",
                f"a convolution in scan, while_loop or cond runs by plain loops on a "
                f"CPU unless it is NHWC, HWIO (jax#12868), this one is "
                f"{named(labels)}: use jl.conv, or jl.optimize_layout around the "
                "whole function",
                *at,
            )


def of_reorder(
    place: Place, reorder: Reorder, platform: str, faster: Faster
) -> Iterator[Advice]:
    """Of what is written out in another order for a product."""
    core = consumer(place)
    if core is None or reorder.kind == "copy" or reorder.fused:
        return
    at = reorder.source, reorder.module
    if core.kind == "gemm" and not _is_ours(core):
        advice = "keep it in that order, if it is used often"
        if platform != "cpu":
            advice = "jl.einsum and jl.matmul read operands in place"
        elif faster.get(at):
            advice = f"jl.einsum and jl.matmul read it in place; {faster[at]}"
        yield Advice(
            "transposed-operand",
            f"{reorder.shape} is written out in another order before a dot: {advice}",
            *at,
        )
    if _is_weight(place, core):
        yield Advice(
            "weights-relaid",
            f"{place.argument} ({reorder.shape}) is re-laid on every call: keep it in "
            "that order, if it stays the same",
            *at,
        )


def of_conversion(
    place: Place, conversion: Conversion, faster: Faster
) -> Iterator[Advice]:
    """Of weights that are converted to another dtype for a product."""
    core = consumer(place)
    if core is None or len(place.at.shapes[0].dims) < 2 or not _is_weight(place, core):
        return
    at = conversion.source, conversion.module
    advice = f"keep it in {place.at.shapes[0].dtype}, if there is memory for it"
    if conversion.cause == "the program's conversion":
        advice = "convert it once, before"
    elif faster.get(at):
        advice = f"jl.matmul reads it as it is; {faster[at]}"
    yield Advice(
        "weights-converted",
        f"{place.argument} ({conversion.dtype}) is written out as {conversion.shape} "
        f"on every call: {advice}",
        *at,
    )


def of_update(place: Place) -> Iterator[tuple[int, Advice]]:
    """Of an array that is copied whole for a part of it to be written.

    Yields:
      bytes that the copy reads and writes each time, and the advice.
    """
    found = copied_for(place)
    if found is None:
        return
    shape = found.copy.at.shapes[0]
    what, advice = "an array", "it is read later: read it before, or what was written"
    if found.sliced:
        what = "a slice of a whole"
        advice = "keep slices as arrays of their own, or let the loop carry the whole"
    elif found.source.argument:
        what = found.source.argument
        if not found.source.donated:
            advice = "donate it (donate_argnums of jax.jit), and it stays where it is"
    often = "in every pass of a loop" if place.inside else "on every call"
    yield (
        hlo.traffic(place.module, place.computation, found.copy.at),
        Advice(
            "copied-to-update",
            f"{what} ({shape}) is copied {often} for {found.part.shapes[0]} to be "
            f"written to it: {advice}",
            *origin(place),
        ),
    )


def _is_ours(core: Core) -> bool:
    return core.instruction.attribute("custom_call_target").startswith("jax_layout")


def _is_weight(place: Place, core: Core) -> bool:
    """Whether an array is an argument that a product reads as its second operand."""
    batched = core.instruction.attribute("lhs_batch_dims")
    return bool(place.argument and not batched and reaches(place, core.sides[1]))
