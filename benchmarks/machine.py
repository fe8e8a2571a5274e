# SPDX-License-Identifier: Apache-2.0
"""What a run ran on."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import jax

from benchmarks import profiles

_INSTRUCTION_SETS = (
    "sse4_2 avx2 avx512f avx512bw avx512vl avx512vbmi avx512_bf16 avx512_fp16 "
    "amx_tile amx_bf16 asimd sve sve2"
).split()
_PACKAGES = "jax jaxlib numpy torch onednn-cpu-gomp cutensor-cu13 cupy-cuda13x".split()
# Where a change makes results another commit's.
_CODE = "jax_layout core cpu cuda cmake benchmarks/*.py benchmarks/*/*.py".split()


# Family and models of AMD's; Intel's and others go by what they can do.
_ZEN = {
    (23, range(0x00, 0x30)): "zen",
    (23, range(0x30, 0x100)): "zen2",
    (25, range(0x00, 0x10)): "zen3",
    (25, range(0x10, 0x20)): "zen4",
    (25, range(0x20, 0x60)): "zen3",
    (25, range(0x60, 0x100)): "zen4",
    (26, range(0x00, 0x100)): "zen5",
}
_BRANDS = "epyc ryzen threadripper xeon core neoverse".split()


def describe(device: jax.Device, profile: str | None = None) -> dict[str, Any]:
    """Describes the machine, the versions in use and the date.

    Args:
      device: that was measured.
      profile: what this process was started as; the machine's best if left out.
    """
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = profiles.processor_flags()
    profile = profiles.choose(profile, flags)
    cpu = _field(text, "model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    on_gpu = device.platform == "gpu"
    return {
        "class": slug(device.device_kind) if on_gpu else processor_class(text, cores),
        "profile": profile,
        "caps": profiles.caps(profile, flags),
        "cpuid": profiles.answered(profile, flags),
        "cpu": cpu,
        "cores": cores,
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
        "gpu": device.device_kind if on_gpu else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def processor_class(cpuinfo: str, cores: int) -> str:
    """Names the kind of processor, such as `epyc-zen5-2c` and `xeon-amx-2c`.

    Args:
      cpuinfo: the text of /proc/cpuinfo.
      cores: that may be used.
    """
    name = _field(cpuinfo, "model name") or platform.machine()
    family, model = (_field(cpuinfo, key) or "" for key in ("cpu family", "model"))
    words = slug(name).split("-")
    brand = next((brand for brand in _BRANDS if brand in words), "-".join(words[:2]))
    kind = None
    if _field(cpuinfo, "vendor_id") == "AuthenticAMD":
        kind = next(
            (
                zen
                for (known, models), zen in _ZEN.items()
                if known == int(family) and int(model) in models
            ),
            None,
        )
    found = set((_field(cpuinfo, "flags") or "").split())
    if kind is None and found:
        kind = profiles.possible(found)[0].partition("_")[0]
    return "-".join(filter(None, (brand, kind, f"{cores}c")))


def slug(text: str) -> str:
    """Text for names of files: lower case, words and numbers."""
    text = re.sub(r"\((?:r|tm)\)", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _field(cpuinfo: str, key: str) -> str | None:
    found = re.search(rf"^{key}\s*: (.*)$", cpuinfo, re.MULTILINE)
    return found[1] if found else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit; after -dirty a digest of what was changed since.

    Results and documents, which a run changes itself, do not count.
    """
    described = _git("describe", "--always", "--exclude=*")
    if described is None:
        return None
    changed = _git("diff", "HEAD", "--", *_CODE) or ""
    if not changed.strip():
        return described.strip()
    digest = hashlib.sha256(changed.encode()).hexdigest()[:8]
    return f"{described.strip()}-dirty-{digest}"


def _git(*arguments: str) -> str | None:
    root = Path(__file__).parent.parent
    command = ["git", "-C", str(root), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout
