# SPDX-License-Identifier: Apache-2.0
"""Freed memory that the process keeps, by the settings of glibc's malloc."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import threading
import warnings
from pathlib import Path
from typing import Any

from jax_layout import _compat

# Of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_NEVER = -1  # as a size: the largest there is
_INT_MAX = 2**31 - 1
# What glibc has without settings, its adjustment to large blocks at its end.
_DEFAULTS = {
    _MMAP_MAX: 65536,
    _MMAP_THRESHOLD: 32 << 20,
    _TRIM_THRESHOLD: 64 << 20,
}
_PERIOD = 0.1  # seconds between two looks at what is kept


class _Dl(ctypes.Structure):
    """Dl_info of <dlfcn.h>."""

    _fields_ = (
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    )


class _Info(ctypes.Structure):
    """struct mallinfo2: in use are the bytes of blocks, uordblks, and maps, hblkhd."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks "
        "fordblks keepcost".split()
    )


_lock = threading.Lock()
_watch: list[threading.Event] = []  # stops the thread that holds a limit


def keep_memory(limit: int | None = None) -> None:
    """Keeps memory that is freed, rather than have Linux make its pages anew.

    A result of some megabytes is new memory to the C library at each call, and the
    page faults of that cost as much as computing it, or several times that. From now
    on freed memory stays with the process and is used again. It may so hold up to
    twice the memory.

    It is for the process, and to be called before jax computes for the first time:
    threads that have allocated keep heaps of their own, in which large arrays stay new.
    A warning says so. `profile` counts page faults.

    Args:
      limit: bytes of freed memory that are kept at most; 0 is none, as without this
        call; left out, all. What is more goes back to Linux within a fraction of a
        second, by a thread that looks. A limit below what one step of a program frees
        takes the gain away.

    Raises:
      TypeError: if limit is no integer.
      ValueError: if it is negative.
      RuntimeError: where the process does not allocate by glibc 2.33 or newer: on
        other systems, or with another allocator in front.

    Source: mallopt(3), malloc_trim(3) and mallinfo2(3) of glibc.

    >>> keep_memory(2 << 30)
    >>> keep_memory(0)  # off
    """
    most = None
    if limit is not None:
        try:
            most = operator.index(limit)
        except TypeError:
            raise TypeError(
                f"keep_memory: limit must be an integer or None, got {limit!r}."
            ) from None
        if most < 0:
            raise ValueError(f"keep_memory: limit must be at least 0, got {most}.")
    libc = _glibc("keep_memory")
    with _lock:
        while _watch:
            _watch.pop().set()
        if most == 0:
            for setting, value in _DEFAULTS.items():
                libc.mallopt(setting, value)
            libc.malloc_trim(0)
            return
        if _compat.backends_have_started():
            warnings.warn(
                "keep_memory: jax has computed already; large arrays of threads that "
                "it has started stay new memory. Call it before.",
                RuntimeWarning,
                stacklevel=2,
            )
        libc.mallopt(_ARENA_MAX, 1)  # other heaps have no room for large blocks
        libc.mallopt(_MMAP_MAX, 0)
        whole = most is None or most > _INT_MAX
        libc.mallopt(_TRIM_THRESHOLD, _NEVER if whole else most)
        if most is not None:
            stop = threading.Event()
            _watch.append(stop)
            threading.Thread(
                target=_hold,
                args=(libc, most, stop),
                name="jax_layout.keep_memory",
                daemon=True,
            ).start()


def trim_memory() -> int:
    """Gives the freed memory that the process keeps back to Linux, now.

    Returns:
      bytes by which the process's memory went down.

    Raises:
      RuntimeError: as `keep_memory`.

    Source: malloc_trim(3) of glibc.

    >>> trim_memory() >= 0
    True
    """
    libc = _glibc("trim_memory")
    before = _resident()
    libc.malloc_trim(0)
    return max(0, before - _resident())


def _hold(libc: Any, limit: int, stop: threading.Event) -> None:
    """Trims whenever more than the limit is resident that is not in use.

    The settings trim the end of the heap alone; what is freed below something alive
    is found by looking. What is resident and not malloc's, such as code, is what
    remains after trimming.
    """
    other = _unused(libc)
    while not stop.wait(_PERIOD):
        unused = _unused(libc)
        other = min(other, unused)
        if unused - other > limit:
            libc.malloc_trim(0)
            other = _unused(libc)


def _unused(libc: Any) -> int:
    info = libc.mallinfo2()
    return _resident() - info.uordblks - info.hblkhd


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _library() -> Any | str:
    """The C library, if it allocates for this process; else what does."""
    process = ctypes.CDLL(None)
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version.restype = ctypes.c_char_p
        version = libc.gnu_get_libc_version().decode()
    except (OSError, AttributeError):
        return "a C library other than glibc"
    if not hasattr(libc, "mallinfo2"):
        return f"glibc {version}"
    if _address(process.malloc) != _address(libc.malloc):
        found = _Dl()
        process.dladdr.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        process.dladdr(_address(process.malloc), ctypes.byref(found))
        return (found.fname or b"another allocator").decode()
    libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.mallinfo2.restype = _Info
    return libc


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _glibc(name: str) -> Any:
    found = _library() if os.name == "posix" else "Windows"
    if isinstance(found, str):
        raise RuntimeError(
            f"{name}: the process must allocate by glibc 2.33 or newer, "
            f"but does by {found}."
        )
    return found
