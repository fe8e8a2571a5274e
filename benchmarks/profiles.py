# SPDX-License-Identifier: Apache-2.0
"""Processors that one machine can stand for: everyone capped at an instruction set.

A library reads its cap when it is loaded, so a profile is the environment of a
process of its own. The best profile of a machine caps nothing. YNNPACK, in which XLA
does most products, asks the processor itself: AMX is taken from it by the kernel, and
AVX-512 where CPUID may fault, on Intel's. Copies in libc are beyond a cap.
"""

import argparse
import contextlib
import ctypes
import errno
import os
import platform
import re
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import native

PROFILES = ("amx", "avx512_bf16", "avx512", "avx2")

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_NEEDS = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma"),
}

# In turn: ours, XLA's generated code, oneDNN (torch's too), torch, MKL, OpenBLAS.
_CAPS = {
    "avx512_bf16": {
        "JAX_LAYOUT_MAX_ISA": "avx512_bf16",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX512_BF16",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
        "OPENBLAS_CORETYPE": "Cooperlake",
    },
    "avx512": {
        "JAX_LAYOUT_MAX_ISA": "avx512",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "OPENBLAS_CORETYPE": "SkylakeX",
    },
    "avx2": {
        "JAX_LAYOUT_MAX_ISA": "avx2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
}
# What native/cpuid.cc answers as, of those profiles that it can.
_ANSWERS = {"avx512": ("AVX512",), "avx2": ()}
# Set for other reasons, these mislead a library about the processor.
_STRAY = ("DNNL_MAX_CPU_ISA", "OPENBLAS_L2_SIZE", "OPENBLAS_CORETYPE")

_ARCH_PRCTL, _REQ_XCOMP_PERM, _XFEATURE_TILEDATA = 158, 0x1023, 18
_AUDIT_ARCH_X86_64 = 0xC000003E
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the processor says that it has."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return set(flags[1].split()) if flags else set()


def possible(flags: set[str]) -> tuple[str, ...]:
    """The profiles of a processor with these flags, best first.

    One without any, such as an AArch64, has the profile of its architecture alone.
    """
    found = tuple(name for name in PROFILES if flags.issuperset(_NEEDS[name]))
    return found or (platform.machine(),)


def choose(wanted: str | None, flags: set[str]) -> str:
    """The wanted profile, or the best; ValueError where the machine lacks it."""
    found = possible(flags)
    if wanted is None:
        return found[0]
    if wanted not in found:
        lacks = sorted(set(_NEEDS.get(wanted, ())) - flags)
        raise ValueError(
            f"profile {wanted}: this processor lacks {', '.join(lacks) or 'it'}; "
            f"it can have {', '.join(found)}."
        )
    return wanted


def caps(profile: str, flags: set[str]) -> dict[str, str]:
    """The variables that hold everyone to a profile; none for the best."""
    return {} if profile == possible(flags)[0] else dict(_CAPS[profile])


def answered(profile: str, flags: set[str]) -> bool:
    """Whether the processor itself answers everyone as one of the profile."""
    return bool(caps(profile, flags)) and profile in _ANSWERS and "cpuid_fault" in flags


def environment(
    profile: str, flags: set[str], given: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a process of this profile: caps, and no others' caps."""
    known = {*_STRAY, *(name for each in _CAPS.values() for name in each)}
    kept = {name: value for name, value in given.items() if name not in known}
    settings = caps(profile, flags)
    if answered(profile, flags):
        settings["LD_PRELOAD"] = str(native.preload("cpuid", *_ANSWERS[profile]))
    flagged = given.get("XLA_FLAGS", "").split()
    others = [flag for flag in flagged if not flag.startswith("--xla_cpu_max_isa=")]
    if words := [*others, *settings.pop("XLA_FLAGS", "").split()]:
        settings["XLA_FLAGS"] = " ".join(words)
    return kept | settings


def refuse_amx() -> None:
    """Takes AMX from this process for good, and from those it starts.

    Tiles need a permission of Linux. A filter of system calls that refuses it leaves
    everyone who asks without AMX, as on a processor that lacks it.
    """
    load, equal, give = 0x20, 0x15, 0x06  # BPF: load a word; jump if equal; return
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 0, 5, _AUDIT_ARCH_X86_64),
        (load, 0, 0, 0),  # the system call
        (equal, 0, 3, _ARCH_PRCTL),
        (load, 0, 0, 16),  # its first argument
        (equal, 0, 1, _REQ_XCOMP_PERM),
        (give, 0, 0, 0x00050000 | errno.EPERM),
        (give, 0, 0, 0x7FFF0000),  # allowed
    ]
    packed = b"".join(struct.pack("=HBBI", *line) for line in program)
    lines = ctypes.create_string_buffer(packed, len(packed))
    filter = struct.pack("@HP", len(program), ctypes.addressof(lines))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    for option, first, second in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), filter),
    ):
        if libc.prctl(option, first, second, zero, zero):
            reason = os.strerror(ctypes.get_errno())
            raise OSError(f"AMX cannot be refused: prctl({option}): {reason}.")


def amx_is_refused() -> bool:
    """Whether Linux refuses this process tiles by our filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _XFEATURE_TILEDATA)
    return bool(status) and ctypes.get_errno() == errno.EPERM


def enter(wanted: str | None) -> str:
    """Makes this process one of the profile, by starting it anew where it is not.

    Returns:
      the profile.

    Raises:
      ValueError: the machine does not have it.
    """
    flags = processor_flags()
    profile = choose(wanted, flags)
    settings = environment(profile, flags, os.environ)
    without_amx = profile != "amx" and "amx_tile" in flags
    refused = not without_amx or amx_is_refused()
    if settings != dict(os.environ) or not refused:
        if not refused:
            refuse_amx()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], settings)
    return profile


def add_argument(add: Callable[..., Any]) -> None:
    add("--profile", choices=PROFILES, help="the processor to stand for (the best)")


def start(main: Callable[[], int]) -> int:
    """Runs a benchmark's `main` as its `--profile` says, alone on the machine."""
    from benchmarks.runner import alone  # which imports this module

    parser = argparse.ArgumentParser(add_help=False)
    add_argument(parser.add_argument)
    options, _ = parser.parse_known_args()
    try:
        enter(options.profile)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    asked = {"-h", "--help", "--list"}.intersection(sys.argv)  # nothing is measured
    with contextlib.nullcontext() if asked else alone():
        return main()
