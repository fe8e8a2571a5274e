# SPDX-License-Identifier: Apache-2.0
"""Finds the extension modules, one per backend, and registers their handlers."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

# jax's name of the platform -> our extension module, XLA's name of the platform
_BACKENDS = {"cpu": ("_cpu", "cpu"), "cuda": ("_cuda", "CUDA")}


@functools.cache
def runtime_api_version() -> tuple[int, int]:
    """The XLA FFI version of the jaxlib that is running."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    text = header.read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1])  # type: ignore[index]
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def register(module: types.ModuleType, platform: str) -> bool:
    """Registers a module's handlers with XLA, unless XLA would refuse them.

    A handler built against newer FFI headers than the runtime's is an error when
    XLA sees it, and registered before the backend starts it takes the whole
    backend down with it.

    Args:
      module: an extension module, with `ffi_api_version` and `registrations()`.
      platform: XLA's name of the platform, "cpu" or "CUDA".

    Returns:
      whether the handlers are registered; if not, a warning has said why.
    """
    built, running = module.ffi_api_version, runtime_api_version()
    if built[0] != running[0] or built[1] > running[1]:
        _warn_too_new(built, running)
        return False
    for target, handlers in module.registrations().items():
        jax.ffi.register_ffi_target(target, handlers, platform=platform)
    return True


@functools.cache  # once, though every extension module is likely to be as new
def _warn_too_new(built: tuple[int, int], running: tuple[int, int]) -> None:
    warnings.warn(
        f"jax_layout is built for XLA FFI {built}, but jaxlib {jax.lib.__version__} "
        f"has {running}. Every operator falls back to plain jax.lax: same results, no "
        "kernels. Upgrade jaxlib, or build jax_layout against the installed one.",
        RuntimeWarning,
        stacklevel=2,
    )


def library(package: str, name: str) -> str:
    """The path of a shared library that a package installed, or "".

    Packages put libraries outside of their own folder too, below `sys.prefix` or
    the user's base; only their list of files tells.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    paths = (Path(str(f.locate())).resolve() for f in files if f.name == name)
    return next((str(path) for path in paths if path.exists()), "")


@functools.cache
def module(platform: str) -> Any:
    """The extension module of a platform, by jax's name of it; None if not built.

    Raises:
      ValueError: JAX_LAYOUT_MAX_ISA names no level of instruction sets.
    """
    name = f"jax_layout.{_BACKENDS[platform][0]}"
    if importlib.util.find_spec(name) is None:
        return None  # a CPU-only install has no _cuda
    native = importlib.import_module(name)
    if platform == "cpu":
        native.isa()  # raises: what is to be capped shall not run uncapped
    return native


@functools.cache
def available(platform: str) -> bool:
    """Whether kernels of ours run on a platform, by jax's name of it."""
    native = module(platform)
    if native is None or not register(native, _BACKENDS[platform][1]):
        return False
    if platform == "cpu":
        # Only named here; loaded, 50 MB, by the first product.
        native.set_gemm_libraries(
            library("onednn-cpu-gomp", "libdnnl.so.3"),
            library("scipy-openblas32", "libscipy_openblas.so"),
        )
    return True


@functools.cache  # of each message
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@functools.cache
def usable(platform: str) -> bool:
    """Whether the devices that are here run our kernels; where none is, any may.

    Asked when a program is compiled, as XLA has woken the driver by then. If not, a
    warning has said why.

    Args:
      platform: jax's name of it.
    """
    if platform != "cuda" or (native := module(platform)) is None:
        return True
    if why := native.why_unusable():
        _warn_once(
            f"jax_layout: {why} is needed. Every operator falls back to plain "
            "jax.lax on GPUs: same results, no kernels."
        )
    return not why


def warn_not_built(platform: str) -> None:
    """Says once that there are no kernels for a platform that a program is for."""
    _warn_once(
        f"jax_layout is built without kernels for {platform}: every operator falls "
        "back to plain jax.lax there, with the same results."
    )


@functools.cache
def has_kernels(kind: str) -> bool:
    """Whether CPU kernels of a kind, such as "attention", run on this processor."""
    return available("cpu") and bool(module("cpu").kernels()[kind]["level"])


def register_handler(target: str, handler: Any, platform: str) -> None:
    """Registers one handler for a platform, by jax's name of it."""
    jax.ffi.register_ffi_target(target, handler, platform=_BACKENDS[platform][1])


def gemm_methods(platform: str, attributes: Mapping[str, Any]) -> list[str]:
    """What can compute a product on a platform, what is tried first in front.

    Args:
      platform: jax's name of it.
      attributes: of the FFI call.
    """
    plain = _plain(attributes)
    native = module(platform)
    if why := native.gemm_obstacle(**plain):
        _warn_once(f"{why} Such products fall back to plain jax.lax.")
        return []
    return native.gemm_methods(**plain)


def conv_plan(platform: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What the kernels of a platform make of a convolution (core/conv/module.cc).

    Args:
      platform: jax's name of it.
      attributes: of the FFI call.
    """
    return module(platform).conv_plan(**_plain(attributes))


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in attributes.items()
    }
