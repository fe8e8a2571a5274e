# SPDX-License-Identifier: Apache-2.0
"""What values between the products of attention are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_layout.optimize.names import Names

# Powers of the exponential, its sum, the gradient, and the sum of gradient and
# exponential -> their factor.
Terms = Mapping[tuple[int, int, int, int], float]


@dataclasses.dataclass(frozen=True, eq=False)
class Core:
    """What a softmax is of.

    Attributes:
      dot: the product.
      scale: by which it is multiplied.
      biases: what is added to that, and the names of its axes.
      masks: what selects from that, the names of its axes, where it is true, and the
        number elsewhere.
    """

    dot: Any
    scale: float = 1.0
    biases: tuple[tuple[Any, Names], ...] = ()
    masks: tuple[tuple[Any, Names, bool, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Scores:
    core: Core
    names: Names


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest score of each row; `over` are the keys."""

    core: Core
    names: Names
    over: str


@dataclasses.dataclass(frozen=True)
class Shifted:
    """Scores without the largest of their row."""

    core: Core
    names: Names
    over: str


@dataclasses.dataclass(frozen=True)
class Part:
    """A sum of products of powers of what a softmax is made of.

    Attributes:
      core: what it is of.
      names: of the axes.
      over: that of keys.
      terms: the products.
      hidden: masks behind which it is 0.
    """

    core: Core
    names: Names
    over: str
    terms: Terms
    hidden: frozenset[Any] = frozenset()


@dataclasses.dataclass
class Attention:
    """A dot, a softmax and a dot.

    Attributes:
      core: what the softmax is of.
      dot: the second product; None where only its gradients are left.
      over: the letter of keys.
      summed: that of features.
      batch: those that all operands have.
      free: those of queries, and of heads that share keys.
      sizes: of each letter.
      operands: query, key and value: a variable, and the names of its axes.
      out: names of the result's axes.
      gradient: of the result, and the names of its axes.
      gradients: products by the operand, 0 to 2, that they are the gradient of, with
        the names of the result's axes.
      of_bias: what makes the gradient of biases, and the names of the result's axes.
      from_value: the product of the gradient with the value.
    """

    core: Core
    dot: Any
    over: str
    summed: str
    batch: list[str]
    free: list[str]
    sizes: dict[str, int]
    operands: list[tuple[Any, Names]]
    out: Names
    gradient: tuple[Any, Names] | None = None
    gradients: dict[int, tuple[Any, Names]] = dataclasses.field(default_factory=dict)
    of_bias: tuple[Any, Names] | None = None
    from_value: Any = None
