# SPDX-License-Identifier: Apache-2.0
"""Reports of programs compiled for an H100 without one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import h100  # noqa: F401  skips where the plugin or our CUDA backend is not there
import jax_layout as jl


def explained(f, *shapes, dtype=jnp.bfloat16):
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    report = jl.explain(f, platform="cuda")(*avals)
    assert (report.platform, "H100" in report.device) == ("cuda", True)
    assert "data sheet" in report.roofline
    left = [r for r in report.reorders if r.stage == "hlo"]
    return report, left


def test_a_transpose():
    report, (left,) = explained(lambda x: x.transpose(0, 2, 3, 1), (8, 64, 32, 32))
    assert left.kind == "transpose" and left.bytes == 2 * 2 * 8 * 64 * 32 * 32
    assert left.cause == "the program's transpose"
    assert left.source == report.reorders[0].source != ""
    assert left.share == pytest.approx(1)


def test_a_permute_of_ours():
    _, (left,) = explained(lambda x: jl.permute(x, (0, 2, 3, 1)), (8, 64, 32, 32))
    assert left.kind == "permute" and left.bytes == 2 * 2 * 8 * 64 * 32 * 32


def test_a_convolution_of_cudnn():
    def f(x, w):
        return lax.conv(x, w, (1, 1), "SAME")

    report, left = explained(f, (4, 16, 28, 28), (32, 16, 3, 3))
    (product,) = report.products
    assert product.implementation == "cuDNN (convForward)"
    assert product.detail.startswith("NHWC, OHWI -> NHWC")
    assert len(left) == 3
    assert {r.cause for r in left} == {"XLA's layout for the convolution"}
    assert [a.code for a in report.warnings] == ["weights-relaid"]
    assert report.flops == 2 * (4 * 32 * 28 * 28) * (16 * 3 * 3)


def test_an_einsum_of_xlas_and_ours():
    shapes = (8, 512, 16, 64), (8, 512, 16, 64)
    spec = "bshd,bthd->bhst"
    report, left = explained(lambda q, k: jnp.einsum(spec, q, k), *shapes)
    assert {r.cause for r in left} == {"XLA's layout for the gemm"}
    assert {a.code for a in report.warnings} == {"transposed-operand"}
    report, left = explained(lambda q, k: jl.einsum(spec, q, k), *shapes)
    (product,) = report.products
    assert product.implementation.startswith("jax_layout TN") and left == []
    assert "cuBLASLt" in product.implementation
    assert report.warnings == ()
    # cuBLASLt's scratch memory is not the program's traffic.
    assert report.bytes == 2 * (2 * 8 * 512 * 16 * 64 + 8 * 16 * 512 * 512)


def test_a_scan():
    def f(x):
        return lax.scan(lambda c, _: (jl.permute(c, (0, 2, 1)), None), x, length=5)[0]

    _, left = explained(f, (8, 128, 128))
    assert [r.trips for r in left if r.kind == "permute"] == [5]
