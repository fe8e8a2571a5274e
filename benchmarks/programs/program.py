# SPDX-License-Identifier: Apache-2.0
"""What a program is, and what its weights and inputs are made of."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of somebody's library, and what it is called with.

    Attributes:
      name: with the dtype unique in its collection.
      make: gives both. It imports the library, so that a list of programs needs none.
      dtype: of the weights and of what is computed.
    """

    name: str
    make: Callable[[Any], Made]
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Collection:
    """Programs of one library.

    Attributes:
      modules: what has to be installed.
      programs: in the order in which they are run.
    """

    modules: tuple[str, ...]
    programs: tuple[Program, ...]


def both(name: str, make: Callable[[Any], Made]) -> tuple[Program, Program]:
    """A program in float32 and in bfloat16."""
    return Program(name, make), Program(name, make, "bfloat16")


def normal(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values, dtype)


def integers(below: int, *shape: int, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).integers(0, below, shape)
    return jnp.asarray(values, jnp.int32)


def filled(shapes: Any, dtype: Any = None) -> Any:
    """Weights of these shapes, by their names: matrices keep a signal's variance.

    Drawn by NumPy: no time goes into compiling how a library draws them.

    Args:
      shapes: a pytree, such as `jax.eval_shape` gives.
      dtype: of what is floating there; left out, as it is.
    """
    random = np.random.default_rng(0)

    def leaf(path: Any, like: Any) -> jax.Array:
        if not jnp.issubdtype(like.dtype, jnp.floating):
            return jnp.zeros(like.shape, like.dtype)
        name = jax.tree_util.keystr(path).lower()
        values = random.standard_normal(like.shape, np.float32)
        if math.prod(like.shape) != max(like.shape, default=1):
            values *= math.prod(like.shape[:-1]) ** -0.5
        else:  # a vector: of scales and variances, or of biases and means
            positive = any(part in name for part in ("scale", "weight", "var", "gamma"))
            values = positive + 0.02 * values
        return jnp.asarray(values, dtype or like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def cast(tree: Any, dtype: Any) -> Any:
    """The tree with floating leaves of this dtype."""

    def leaf(x: Any) -> Any:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(leaf, tree)


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Of the mean of the squares of what `f` gives, with respect to its first."""

    def loss(p: Any, *args: Any) -> Any:
        return jnp.mean(jnp.square(f(p, *args).astype(jnp.float32)))

    return jax.grad(loss)


def cross_entropy(logits: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], -1))
