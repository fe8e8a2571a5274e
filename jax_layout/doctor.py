# SPDX-License-Identifier: Apache-2.0
"""What `jax-layout doctor` tells of the machine and of what runs on it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jax_layout
from jax_layout import _backends, choices

_INSTRUCTION_SETS = (
    "sse4_2 avx2 avx512f avx512bw avx512vbmi avx512_bf16 avx512_fp16 avx_vnni "
    "amx_tile amx_bf16 amx_int8 asimd sve sve2"
).split()
_DTYPES = "float32 float64 bfloat16 float16 int8 complex64 complex128".split()


@dataclasses.dataclass(frozen=True)
class _Backend:
    name: str
    state: str  # "loaded", "not built", or why it does not load
    path: str
    ffi_built: tuple[int, int] | None
    wanted: bool


def diagnose() -> dict[str, Any]:
    """What `jax-layout doctor` tells, as JSON has it.

    Returns:
      versions, devices, instruction sets, the level of them that is used, what runs
      each operator on CPUs, backends, libraries, what falls back to plain `jax.lax`
      and why, and problems: what should load and does not.
    """
    devices = [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
    running = _backends.runtime_api_version()
    gpu = any(d.platform in ("gpu", "cuda") for d in jax.devices())
    backends = [_backend("cpu", True), _backend("cuda", gpu)]
    native = _backends.module("cpu") if backends[0].state == "loaded" else None
    # Before the libraries are tried here: one that is loaded cannot be capped.
    runs = _runs(native) if native else {}
    libraries = _libraries(backends)
    fallbacks, problems = [], []
    for backend in backends:
        if backend.state != "loaded":
            all_of_it = f"every operator on {backend.name}: {backend.state}"
            fallbacks.append(all_of_it)
            if backend.wanted or backend.state != "not built":
                problems.append(all_of_it)
    for dtype in _DTYPES:
        result = "int32" if dtype == "int8" else dtype
        if native is not None and not native.gemm_supported(dtype, result):
            fallbacks.append(f"{dtype} products on cpu: neither a kernel nor a library")
    for library in libraries:
        if library["path"] and library["error"]:
            problems.append(f"{library['name']} does not load: {library['error']}")
    return {
        "jax_layout": jax_layout.__version__,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "devices": devices,
        "instruction_sets": instruction_sets(),
        "isa": native.isa() if native else None,
        "runs": runs,
        "choices": choices.source(),
        "ffi_runtime": list(running),
        "backends": [dataclasses.asdict(backend) for backend in backends],
        "libraries": libraries,
        "fallbacks": fallbacks,
        "problems": problems,
    }


def _backend(name: str, wanted: bool) -> _Backend:
    try:
        native = _backends.module(name)
    except ImportError as error:
        return _Backend(name, f"does not load: {error}", "", None, wanted)
    if native is None:
        return _Backend(name, "not built", "", None, wanted)
    built, state = tuple(native.ffi_api_version), "loaded"
    if not _backends.available(name):
        state = f"built for XLA FFI {built}, newer than jaxlib's"
    return _Backend(name, state, native.__file__, built, wanted)


def _libraries(backends: Sequence[_Backend]) -> list[dict[str, str]]:
    found = []
    for name, package, file in (
        ("oneDNN", "onednn-cpu-gomp", "libdnnl.so.3"),
        ("OpenBLAS", "scipy-openblas32", "libscipy_openblas.so"),
        ("cuBLASLt", "nvidia-cublas", "libcublasLt.so.13"),
    ):
        path = _backends.library(package, file)
        error = "" if path else f"package {package} is not installed"
        version = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
        if path:
            try:
                ctypes.CDLL(path)
            except OSError as failure:
                error = str(failure)
        found.append({"name": name, "version": version, "path": path, "error": error})
    return found


def _runs(native: Any) -> dict[str, str]:
    """What runs each operator on this CPU, at the level that is used."""
    libraries = {
        name: f"{name} ({target.removeprefix('cpu_isa_')})"
        for name, target in native.library_targets().items()
        if target
    }
    kernels = {name: kind["level"] for name, kind in native.kernels().items()}
    runs = {"permute": kernels["permute"]}
    for dtype in ("float32", "bfloat16", "float16", "int8", "float64"):
        methods = native.gemm_methods(
            spec="mk,kn->mn",
            a_shape=[512, 512],
            b_shape=[512, 512],
            operand_type=dtype,
            result_type="int32" if dtype == "int8" else dtype,
            alpha=[1.0, 0.0],
            beta=[0.0, 0.0],
            activation="none",
            derivative="none",
            bias=False,
            aux=False,
            sums=False,
            tf32=False,
            scales=0,
            method="",
        )
        name = methods[0] if methods else ""
        pairs = kernels["blocked pairs"] if dtype == "bfloat16" else ""
        blocked = {"blocked": f"blocked ({pairs or kernels['blocked']})"}
        runs[f"{dtype} products"] = (libraries | blocked).get(name, name)
    runs["epilogues of products"] = kernels["epilogue"]
    runs["matrix-vector products"] = kernels["matrix-vector"]
    for name in ("depthwise", "grouped", "winograd"):
        runs[f"{name} convolutions"] = kernels[name] or libraries.get("oneDNN", "")
    runs["other convolutions"] = libraries.get("oneDNN", "")
    runs |= {name: kernels[name] for name in ("index", "moments", "pool", "geam")}
    return {name: what or "plain jax.lax" for name, what in runs.items()}


def instruction_sets() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    told = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", told, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return [name for name in _INSTRUCTION_SETS if name in present]


def text(found: dict[str, Any]) -> str:
    lines = [
        f"jax_layout {found['jax_layout']}, jax {found['jax']}, "
        f"jaxlib {found['jaxlib']} (XLA FFI {_dotted(found['ffi_runtime'])}), "
        f"Python {found['python']}",
        f"machine: {found['machine']}",
        f"devices: {', '.join(found['devices'])}",
        f"instruction sets: {' '.join(found['instruction_sets']) or 'unknown'}",
    ]
    if isa := found["isa"]:
        cap = f"JAX_LAYOUT_MAX_ISA={isa['max']}" if isa["max"] != "amx" else "nothing"
        lines.append(f"level: {isa['level']} of {isa['processor']}, {cap} caps it")
        if isa["level"] != "amx":
            why = cap if isa["processor"] == "amx" else "the processor has none"
            lines.append(f"  AMX tiles: not used, {why}")
    lines += [f"  {name}: {what}" for name, what in found["runs"].items()]
    lines.append(f"choices: {found['choices']}")
    for b in found["backends"]:
        built = f", XLA FFI {_dotted(b['ffi_built'])}" if b["ffi_built"] else ""
        lines.append(f"backend {b['name']}: {b['state']}{built} {b['path']}".rstrip())
    for library in found["libraries"]:
        where = library["error"] or library["path"]
        lines.append(f"{library['name']} {library['version']}".strip() + f": {where}")
    nothing = ["nothing falls back to plain jax.lax as a whole"]
    falls = [f"falls back to plain jax.lax: {what}" for what in found["fallbacks"]]
    problems = [f"problem: {what}" for what in found["problems"]]
    return "\n".join([*lines, *(falls or nothing), *problems])


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
