# SPDX-License-Identifier: Apache-2.0
"""Pytrees of arrays in a file, with their memory formats.

A file in the safetensors format: each tensor holds what lies in memory, in that
order; the metadata says which format that is, and how the tree is built.
"""

from __future__ import annotations

import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file

from jax_layout.formats.memory_format import MemoryFormat
from jax_layout.formats.tags import store, stored

_KEY = "jax_layout"
_SCALARS = (bool, int, float, str)
_DTYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def save(path: str | os.PathLike[str], pytree: Any) -> None:
    """Writes a pytree of arrays, each in the memory format that it has.

    Args:
      path: of the file, in the safetensors format.
      pytree: of dicts with strings or integers as keys, lists, tuples and None;
        leaves are arrays, numbers and strings. Others, such as a dataclass, need a
        template to be loaded.

    Raises:
      TypeError: if a leaf is something else, is traced, or has a dtype that
        safetensors lacks.

    >>> import tempfile
    >>> from jax_layout import channels_last, is_contiguous, with_memory_format
    >>> x = with_memory_format(jnp.ones((2, 3, 4, 4)), channels_last)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/x", {"x": x, "step": 3})
    ...     loaded = load(f"{folder}/x")
    >>> loaded["x"].shape, is_contiguous(loaded["x"], channels_last), loaded["step"]
    ((2, 3, 4, 4), True, 3)
    """
    tensors: dict[str, np.ndarray] = {}
    described: list[dict[str, Any]] = []
    for place, leaf in jax.tree_util.tree_leaves_with_path(pytree):
        if type(leaf) in _SCALARS:
            described.append({"value": leaf})
            continue
        where = jax.tree_util.keystr(place) or "the pytree itself"
        if not isinstance(leaf, Array | np.ndarray | np.generic):
            raise TypeError(
                f"save: a leaf must be an array, a number or a string, "
                f"got {type(leaf).__name__} at {where}."
            )
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"save: arrays must be concrete, got a tracer at {where}.")
        if str(leaf.dtype) not in _DTYPES.values():
            raise TypeError(
                f"save: safetensors has no dtype {leaf.dtype}, found at {where}."
            )
        physical, format = (
            stored(leaf)
            if isinstance(leaf, Array)
            else (leaf, MemoryFormat.of_permutation(range(leaf.ndim)))
        )
        name = ".".join(str(_key(entry)) for entry in place) or "value"
        while name in tensors:
            name += "_"
        # On the host a transposed array may have strides; the file has none.
        tensors[name] = np.array(physical, order="C")
        described.append(
            {"tensor": name, "blocks": format.blocks, "order": format.order}
        )
    contents = {
        "tree": _describe(pytree, iter(range(len(described)))),
        "leaves": described,
    }
    save_file(tensors, os.fspath(path), {_KEY: json.dumps(contents)})


def load(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Reads what `save` wrote: values, and the memory formats they had.

    Args:
      path: of the file.
      like: a pytree of the same structure, whose leaves do not matter; needed where
        that is not of dicts, lists, tuples and None alone.

    Returns:
      the pytree, of arrays on the default device. 64-bit types need
      `jax_enable_x64`; without it they become 32-bit ones, as always in JAX.

    Raises:
      FileNotFoundError: if there is no file.
      ValueError: if `save` did not write the file, or `like` is of another structure
        or missing.
    """
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"load: {os.fspath(path)} is not in the safetensors format: {error}."
        ) from error
    if _KEY not in metadata:
        raise ValueError(f"load: {os.fspath(path)} was not written by jax_layout.save.")
    contents = json.loads(metadata[_KEY])
    with open(path, "rb") as bytes_:
        tensors = dict(deserialize(bytes_.read()))
    leaves = [_leaf(leaf, tensors) for leaf in contents["leaves"]]
    if like is not None:
        structure: Any = jax.tree.structure(like)
        if structure.num_leaves != len(leaves):
            raise ValueError(
                f"load: like must have as many leaves as the file, {len(leaves)}, "
                f"got {structure.num_leaves}."
            )
        return jax.tree.unflatten(structure, leaves)
    if contents["tree"] is None:
        raise ValueError(
            "load: the pytree has nodes other than dicts, lists, tuples and None; "
            "pass like, a pytree of its structure."
        )
    return _build(contents["tree"], leaves)


def _leaf(described: dict[str, Any], tensors: dict[str, Any]) -> Any:
    if "tensor" not in described:
        return described["value"]
    tensor = tensors[described["tensor"]]
    dtype = jnp.dtype(_DTYPES[tensor["dtype"]])
    physical = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
    format = MemoryFormat(
        tuple(map(tuple, described["blocks"])), tuple(map(tuple, described["order"]))
    )
    return store(jnp.asarray(physical), format)


def _key(entry: Any) -> Any:
    """The key, index or name in an entry of a path in a pytree."""
    return next(
        (getattr(entry, a) for a in ("key", "idx", "name") if hasattr(entry, a)), entry
    )


def _describe(node: Any, leaf: Any) -> Any:
    """The structure as JSON; None if there is no saying it."""
    if node is None:
        return ["none"]
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        keys = sorted(node)  # the order of jax's leaves
        parts = [_describe(node[key], leaf) for key in keys]
        return None if None in parts else ["dict", keys, parts]
    if type(node) in (list, tuple):
        parts = [_describe(child, leaf) for child in node]
        return None if None in parts else [type(node).__name__, parts]
    if not jax.tree_util.all_leaves([node]):
        return None
    return ["leaf", next(leaf)]


def _build(tree: list[Any], leaves: list[Any]) -> Any:
    kind, *content = tree
    if kind == "none":
        return None
    if kind == "leaf":
        return leaves[content[0]]
    parts = [_build(part, leaves) for part in content[-1]]
    if kind == "dict":
        return dict(zip(content[0], parts, strict=True))
    return parts if kind == "list" else tuple(parts)
