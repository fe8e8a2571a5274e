# SPDX-License-Identifier: Apache-2.0
"""JAX_LAYOUT_MAX_ISA: every operator at every level, in a process of its own."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jax_layout import _backends, doctor

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="names levels of x86-64"
)
LEVELS = ("portable", "neon", "avx2", "avx512", "avx512_bf16", "amx")
X86 = [level for level in LEVELS if level != "neon"]
# The levels that kernels are made for.
KERNELS = {
    "permute": ("portable", "avx2", "avx512"),
    "epilogue": ("portable", "avx2", "avx512"),
    "matrix-vector": ("avx2", "avx512"),
    "skinny": ("avx2", "avx512", "avx512_bf16"),
    "blocked": ("avx2", "avx512"),
    "blocked pairs": ("avx512_bf16",),
    "depthwise": ("portable", "avx2", "avx512"),
    "grouped": ("portable", "avx2", "avx512"),
    "winograd": ("avx2", "avx512"),
    "widened": ("portable", "avx2", "avx512"),
    "index": ("portable", "avx2"),
    "moments": ("portable", "avx2", "avx512"),
    "pool": ("portable", "avx2", "avx512"),
    "geam": ("portable", "avx2"),
    "attention": ("avx2", "avx512", "avx512_bf16"),  # of float32: tiles are of 16 bits
}
# Those that multiply pairs of bfloat16 beside floats.
PAIRS = ("skinny", "attention")
# What oneDNN may call the instruction set that it uses.
ONEDNN = {
    "portable": {"sse41"},
    "avx2": {"avx2"},
    "avx512": {"avx512_core", "avx512_core_vnni"},
    "avx512_bf16": {"avx512_core_bf16"},
}
OPENBLAS = {"portable": {"Prescott", "Katmai", "Nehalem"}, "avx2": {"Haswell", "Zen"}}


def highest(levels, cap):
    """The highest of some levels that is not above another, "" if none is."""
    below = [level for level in levels if LEVELS.index(level) <= LEVELS.index(cap)]
    return max(below, key=LEVELS.index, default="")


def python(code, level, environment=os.environ):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"JAX_LAYOUT_MAX_ISA": level},
        cwd=Path(__file__).parents[1],  # whose own jax_layout may not be in the way
        capture_output=True,
        text=True,
        check=False,
    )


EVERYTHING = """
import json
import jax
import jax.numpy as jnp
import numpy as np
import jax_layout as jl
from jax_layout import _backends, doctor
from jax_layout.convnet.moments import moments

rng = np.random.default_rng(0)
def array(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)
def product(a, b, **options):
    return jax.lax.dot(a, b, precision="highest", **options)
def conv(x, w, groups=1, padding="SAME", **options):
    return jax.lax.conv_general_dilated(x, w, (1, 1), padding, precision="highest",
        feature_group_count=groups, **options)

a, b, bias = array(300, 96), array(96, 330), array(330)
f64 = np.asarray(array(200, 200), np.float64)
i8 = jnp.asarray(rng.integers(-128, 128, (128, 128)), jnp.int8)
x3, image, wide = array(40, 30, 50), array(2, 32, 28, 28), array(2, 32, 28, 28)
w, depthwise, grouped = array(32, 32, 3, 3), array(32, 1, 3, 3), array(32, 4, 3, 3)
odd = array(48, 32, 2, 2)
last = jl.with_memory_format(image, jl.MemoryFormat.named("NHWC"))
square = array(600, 600)
pixels = jnp.asarray(rng.integers(-128, 128, (2, 32, 28, 28)), jnp.int8)
rows = jnp.asarray(rng.integers(-300, 300, 900), jnp.int32)
table, source = array(300, 70), array(900, 70)

q, k, v = array(2, 70, 4, 40), array(2, 90, 2, 40), array(2, 90, 2, 40)
def gradients(attend):
    return jax.vjp(lambda *x: attend(*x, is_causal=True), q, k, v)[1](q)

def low(a, b, dtype):
    return (a.astype(dtype), b.astype(dtype))
ours = jax.jit(lambda: {
    "permute": jl.permute(x3, (2, 0, 1)),
    "f32": jl.gemm(a, b),
    "bf16": jl.gemm(*low(a, b, jnp.bfloat16)),
    "f16": jl.gemm(*low(a, b, jnp.float16)),
    "int8": jl.gemm(i8, i8, preferred_element_type=jnp.int32),
    "epilogue": jl.linear(a, b.T, bias, activation="relu"),
    "row": jl.gemm(a[:1], b),
    "rows": jl.gemm(a[:8], b),
    "column": jl.gemm(a, b[:, :1]),
    "depthwise": jl.conv(image, depthwise, padding=1, groups=32),
    "grouped": jl.conv(image, grouped, padding=1, groups=8),
    "winograd": jl.conv(image, w, padding=1),
    "conv": jl.conv(image, odd),
    "conv_f16": jl.conv(*low(image, odd, jnp.float16)),
    "conv_int8": jl.conv(pixels, i8[:32, :32, None, None],
                         preferred_element_type=jnp.int32),
    "index_select": jl.index_select(table, 0, rows),
    "index_add": jl.index_add(table, 0, rows, source),
    "segment_sum": jl.segment_sum(source, rows % 3, 3),
    "segment_max": jl.segment_max(source, rows % 3, 3),
    "mean": moments(image, (0, 2, 3))[0],
    "variance": moments(image, (0, 2, 3))[1],
    "maxima": jl.max_pool(last, 3, 2, 1),
    "means": jl.avg_pool(last, 2),
    "geam": jl.geam(square, square, 2.0, -0.5, transpose_b=True),
    "geam_bf16": jl.geam(*low(square, square, jnp.bfloat16)),
    "attention": jl.dot_product_attention(q, k, v),
    "one_query": jl.dot_product_attention(q[:, :1], k, v),
    **dict(zip(("dq", "dk", "dv"), gradients(jl.dot_product_attention))),
})()
at = rows % 300
plain = {
    "permute": jnp.transpose(x3, (2, 0, 1)),
    "f32": product(a, b),
    "bf16": product(*low(a, b, jnp.bfloat16), preferred_element_type=jnp.float32),
    "f16": product(*low(a, b, jnp.float16), preferred_element_type=jnp.float32),
    "int8": np.asarray(i8, np.int32) @ np.asarray(i8, np.int32),
    "epilogue": jax.nn.relu(product(a, b) + bias),
    "row": product(a[:1], b),
    "rows": product(a[:8], b),
    "column": product(a, b[:, :1]),
    "depthwise": conv(image, depthwise, 32),
    "grouped": conv(image, grouped, 8),
    "winograd": conv(image, w),
    "conv": conv(image, odd, padding="VALID"),
    "conv_f16": conv(*low(image, odd, jnp.float16), padding="VALID"),
    "conv_int8": conv(pixels, i8[:32, :32, None, None], padding="VALID",
                      preferred_element_type=jnp.int32),
    "index_select": table[at],
    "index_add": table.at[at].add(source),
    "segment_sum": jax.ops.segment_sum(source, rows % 3, 3),
    "segment_max": jax.ops.segment_max(source, rows % 3, 3),
    "mean": image.mean((0, 2, 3)),
    "variance": image.var((0, 2, 3)),
    "maxima": jax.lax.reduce_window(image, -np.inf, jax.lax.max, (1, 1, 3, 3),
                                    (1, 1, 2, 2), [(0, 0), (0, 0), (1, 1), (1, 1)]),
    "means": image.reshape(2, 32, 14, 2, 14, 2).mean((3, 5)),
    "geam": 2 * square - 0.5 * square.T,
    "geam_bf16": 2 * square.astype(jnp.bfloat16),
    "attention": jax.nn.dot_product_attention(q, k, v),
    "one_query": jax.nn.dot_product_attention(q[:, :1], k, v),
    **dict(zip(("dq", "dk", "dv"), gradients(jax.nn.dot_product_attention))),
}
assert ours.keys() == plain.keys()
for name, want in plain.items():
    loose = {"bf16": 2e-2, "f16": 2e-3, "conv_f16": 2e-3}.get(name, 1e-4)
    got, want = (np.asarray(value, np.float64) for value in (ours[name], want))
    np.testing.assert_allclose(got, want, rtol=loose, atol=loose * 10, err_msg=name)
with jax.enable_x64(True):
    got = jax.jit(lambda x: jl.linear(x, x, activation="relu"))(f64)
want = np.maximum(f64 @ f64.T, 0)
np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-10)

native = _backends.module("cpu")
found = doctor.diagnose()
report = jl.explain(jl.conv)(image, odd)
print(json.dumps({
    "ran": {name: kind["ran"] for name, kind in native.kernels().items()},
    "targets": native.library_targets(),
    "conv": [p.implementation for p in report.products],
    "found": found,
    "text": doctor.text(found),
}))
"""


@pytest.mark.parametrize("level", LEVELS)
def test_level(level):
    """Right results, by kernels of this level and none above."""
    done = python(EVERYTHING, level)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    processor = _backends.module("cpu").isa()["processor"]
    best = highest(X86[: X86.index(processor) + 1], level)
    assert told["found"]["isa"] == {
        "processor": processor,
        "max": level,
        "level": best,
    }

    want = {name: highest(levels, best) for name, levels in KERNELS.items()}
    if want["permute"] == "avx512" and "avx512vbmi" not in doctor.instruction_sets():
        want["permute"] = "avx2"
    runs, targets = told["found"]["runs"], told["targets"]
    if {"fp16", "amx"} & {*targets["oneDNN"].split("_")}:  # the latter has the former
        want["widened"] = ""  # the library sums float16 itself
    if best == "amx":
        want["blocked pairs"] = ""  # tiles are before them
    if "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        want["blocked pairs"] = ""  # and floats are sooner multiplied than pairs
        floats = highest(X86[: X86.index("avx512") + 1], best)
        want |= {name: highest(KERNELS[name], floats) for name in PAIRS}
    assert told["ran"] == want

    onednn = targets["oneDNN"].removeprefix("cpu_isa_")
    library = f"oneDNN ({onednn})"
    blocked = f"blocked ({want['blocked']})" if want["blocked"] else library
    assert runs["float32 products"] == runs["float16 products"] == blocked
    if want["blocked pairs"]:
        blocked = f"blocked ({want['blocked pairs']})"
    assert runs["bfloat16 products"] == ("AMX" if best == "amx" else blocked)
    if level == best in ONEDNN:  # else oneDNN takes all that the processor has
        assert onednn in ONEDNN[best]
        for above in ("avx2", "avx512", "bf16", "amx"):
            if above not in onednn:
                assert not [name for name in told["conv"] if above in name]
    assert runs["other convolutions"] == library
    without_vnni = onednn in ("sse41", "avx", "avx2", "avx512_core")
    exact = "plain jax.lax" if without_vnni else library
    assert runs["int8 products"] == exact
    assert targets["OpenBLAS"] in OPENBLAS.get(best, targets["OpenBLAS"])
    assert runs["float64 products"] == f"OpenBLAS ({targets['OpenBLAS']})"

    for kind, name in (("matrix-vector", "matrix-vector products"), ("geam", "geam")):
        assert runs[name] == (want[kind] or "plain jax.lax")
        assert f"  {name}: {runs[name]}\n" in told["text"]
    cap = "nothing" if level == "amx" else f"JAX_LAYOUT_MAX_ISA={level}"
    assert f"level: {best} of {processor}, {cap} caps it\n" in told["text"]
    assert ("AMX tiles: not used" in told["text"]) == (best != "amx")


LEVEL = "from jax_layout import _backends; print(_backends.module('cpu').isa()['max'])"


@pytest.mark.parametrize(("text", "level"), [("AVX2", "avx2"), ("", "amx")])
def test_case_does_not_matter_and_empty_is_not_set(text, level):
    assert python(LEVEL, text).stdout.strip() == level


@pytest.mark.parametrize("text", ["avx3", "avx2 ", "2"])
def test_what_is_no_level_is_an_error(text):
    done = python("import jax_layout", text)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "ValueError: JAX_LAYOUT_MAX_ISA must be one of portable, neon, avx2, avx512, "
        f"avx512_bf16, amx, got {text}.\n"
    )


TOLD = """
import ctypes
from jax_layout import _backends
found = _backends.module("cpu").library_targets()["OpenBLAS"]
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(found, getenv(b"OPENBLAS_CORETYPE"), getenv(b"OPENBLAS_L2_SIZE"))
"""


def test_variables_for_other_copies_of_openblas_do_not_change_ours():
    others = "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"
    kept = {name: value for name, value in os.environ.items() if name not in others}
    told = []
    for given in ({}, dict(zip(others, ("Prescott", "128"), strict=True))):
        done = python(TOLD, "amx", kept | given)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split())
    assert told[1] == [told[0][0], "b'Prescott'", "b'128'"]
    assert told[0][1:] == ["None", "None"]
