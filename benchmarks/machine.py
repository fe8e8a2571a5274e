# SPDX-License-Identifier: Apache-2.0
"""What a run ran on."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import jax

_INSTRUCTION_SETS = (
    "sse4_2 avx2 avx512f avx512bw avx512vl avx512vbmi avx512_bf16 avx512_fp16 "
    "amx_tile amx_bf16 asimd sve sve2"
).split()
_PACKAGES = "jax jaxlib numpy torch onednn-cpu-gomp cutensor-cu13 cupy-cuda13x".split()


def describe(device: jax.Device) -> dict[str, Any]:
    """Describes the machine, the versions in use and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in present],
        "gpu": device.device_kind if device.platform == "gpu" else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        run = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
