# SPDX-License-Identifier: Apache-2.0
"""Attention in one call: scores, softmax and values by blocks, no score in memory."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_layout.attention.blocked import (
    DTYPES,
    attention_p,
    has_kernel,
    here,
    residual,
    wanted,
)
from jax_layout.attention.paged import check_tables, gathered, paged_attention_p
from jax_layout.plain import jnp, lax, nn

_LETTERS = "BTNH"


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: Literal[False] = False,
    order: str = _LETTERS,
    key_value_order: str | None = None,
    block_tables: ArrayLike | None = None,
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: Literal[True],
    order: str = _LETTERS,
    key_value_order: str | None = None,
    block_tables: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    order: str = _LETTERS,
    key_value_order: str | None = None,
    block_tables: ArrayLike | None = None,
) -> Array | tuple[Array, Array]:
    """softmax(scale query key^T + bias) value, as `jax.nn.dot_product_attention`.

    The same arguments, checks and results; beyond them the orders of axes. On CPUs
    scores are made by blocks that stay in the cache, each once for the result and
    once for the gradients, and blocks that nobody sees are left out. On NVIDIA's
    GPUs it is cuDNN's for bfloat16 and float16 where that was measured to be faster
    than jax's own function, which it is elsewhere, for other dtypes than float32,
    bfloat16 and float16, and for more than 256 features.

    Args:
      query: shape `(B, T, N, H)`, or without B: batch, queries, heads, features.
      key: shape `(B, S, K, H)`, where K divides N: N / K heads of queries share one of
        keys and values.
      value: shape and dtype of `key`.
      bias: what is added to the scores; 4-D, broadcast to `(B, N, T, S)`.
      mask: bool, true where a key is seen; 4-D, broadcast to `(B, N, T, S)`.
      scale: of the scores; left out, `1 / sqrt(H)`.
      is_causal: whether query t sees keys up to the t-th alone.
      query_seq_lengths: int32, shape `(B,)`; results behind them are zero.
      key_value_seq_lengths: int32, shape `(B,)`; what lies behind is not read. At most
        S, which is checked where they are known when the call is traced.
      local_window_size: how many keys before and after its own a query sees.
      implementation: None for what is fastest here, or one of jax's.
      return_residual: whether to return the logarithms of the softmax's sums too.
      order: of the axes of `query` and the result, as they lie in memory: "BNTH" are
        heads before queries.
      key_value_order: the same of `key` and `value`, where T names their S and N their
        K; left out, `order`.
      block_tables: int32, shape `(B, M)`, for keys and values of shape `(blocks, R, K,
        H)` that all sequences share: which blocks hold the S = R x M keys of a
        sequence, in their order. What is no block is the nearest one: give
        `key_value_seq_lengths` with them, behind which nothing is read.

    Returns:
      shape and dtype of `query`. With `return_residual` a pair, the second shaped as
      the result without its features.

    Raises:
      TypeError: if an array is none, or dtypes differ.
      ValueError: if shapes do not fit, or an order does not name the axes.

    A query that sees no key gets the mean of all values, as softmax of equal scores
    makes it. The second derivative and forward mode are plain JAX.

    Source: Dao, FlashAttention-2, arXiv:2307.08691; of blocks: Kwon et al.,
    PagedAttention, arXiv:2309.06180.

    >>> q, k = jnp.ones((1, 2, 4, 8)), jnp.ones((1, 3, 2, 8))
    >>> dot_product_attention(q, k, k).shape
    (1, 2, 4, 8)
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    ndim = query.ndim
    orders = [order, order if key_value_order is None else key_value_order]
    for name, letters in zip(("order", "key_value_order"), orders, strict=True):
        _check_order(name, letters)
    if ndim == 3:
        orders = ["B" + letters.replace("B", "") for letters in orders]
        query, key, value = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    if any("B" not in letters for letters in orders):
        raise ValueError(
            f"dot_product_attention: order must have the axis B, got {orders[0]!r} and "
            f"{orders[1]!r} for query of shape {query.shape}."
        )
    order, key_value_order = orders
    tables = None if block_tables is None else jnp.asarray(block_tables)
    if tables is not None:
        if ndim != len(_LETTERS):
            raise ValueError(
                "dot_product_attention: block_tables are for queries with a batch, got "
                f"query of shape {query.shape[1:]}."
            )
        check_tables("dot_product_attention", tables, query.shape[order.index("B")])
    bias, mask = (None if x is None else _as_4d(x) for x in (bias, mask))
    lengths = [
        None if x is None else jnp.asarray(x)
        for x in (query_seq_lengths, key_value_seq_lengths)
    ]
    _check(query, key, value, bias, mask, lengths, order, key_value_order, tables)
    window: Any = local_window_size
    if isinstance(window, numbers.Integral):
        window = (int(window), int(window))
    seen = _see(
        query, key, order, key_value_order, (bias, mask, *lengths), is_causal, window
    )
    out: Array
    lse: Any  # None where it is not asked for
    keys: Any = key
    if tables is not None:
        block, row = (key_value_order.index(letter) for letter in "BT")
        find = functools.partial(gathered, tables=tables, axis=block, row=row)
        keys = jax.eval_shape(find, key)
    if implementation is None and _ours(
        *(query, keys, bias, scale, seen), paged=tables is not None
    ):
        scale = 1 / math.sqrt(query.shape[order.index("H")]) if scale is None else scale
        params = {**seen, "scale": float(scale)}
        out, sums = _apply(query, key, value, bias, mask, lengths, tables, params)
        axes = [letter for letter in order if letter != "H"]
        lse = None
        if return_residual:
            lse = residual(sums).reshape(*sums.shape[:1], -1, sums.shape[3])
            lse = lse.transpose(["BNT".index(letter) for letter in axes])
            lse = lax.stop_gradient(lse.astype(key.dtype))
    else:
        if tables is not None:
            key, value = map(find, (key, value))
        to, back = _to(order, _LETTERS), _to(_LETTERS, order)
        jax_attention: Any = nn.dot_product_attention  # overloaded for literals
        out = jax_attention(
            query.transpose(to),
            *(x.transpose(_to(key_value_order, _LETTERS)) for x in (key, value)),
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=lengths[0],
            key_value_seq_lengths=lengths[1],
            local_window_size=window,
            implementation=implementation,
            return_residual=return_residual,
        )
        out, lse = out if return_residual else (out, None)
        out = out.transpose(back)
        if lse is not None:
            axes = [letter for letter in order if letter != "H"]
            lse = lse.transpose(["BTN".index(letter) for letter in axes])
    if ndim == 3:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_residual else out


# --- arguments


def _to(order: str, other: str) -> list[int]:
    """The permutation from one order to another."""
    return [order.index(letter) for letter in other]


def _as_4d(x: ArrayLike) -> Array:
    array = jnp.asarray(x)
    missing = tuple(range(4 - array.ndim))
    return jnp.expand_dims(array, missing) if missing else array


def _check_order(name: str, letters: Any) -> None:
    if not isinstance(letters, str) or sorted(letters) not in (
        sorted(_LETTERS),
        sorted("TNH"),
    ):
        raise ValueError(
            f"dot_product_attention: {name} must order the letters {_LETTERS}, got "
            f"{letters!r}."
        )


def _check(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    lengths: Sequence[Array | None],
    order: str,
    key_value_order: str,
    tables: Array | None,
) -> None:
    def fail(what: str) -> None:
        raise ValueError(f"dot_product_attention: {what}.")

    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            fail(f"{name} must have 3 or 4 axes like query, got shape {array.shape}")
        if array.dtype != key.dtype:
            raise TypeError(
                f"dot_product_attention: {name} must have the dtype of key, got "
                f"{array.dtype} and {key.dtype}."
            )
    if key.shape != value.shape:
        fail(f"value must have the shape of key, got {value.shape} and {key.shape}")
    b, t, n, h = (query.shape[order.index(letter)] for letter in _LETTERS)
    kb, s, k, kh = (key.shape[key_value_order.index(letter)] for letter in _LETTERS)
    if tables is not None:
        if kb == 0:
            fail(f"key must have blocks, got shape {key.shape}")
        kb, s = b, s * tables.shape[1]
    if (b, h) != (kb, kh):
        fail(
            f"query and key must have the same batch and features, got {query.shape} "
            f"in order {order} and {key.shape} in order {key_value_order}"
        )
    if k == 0 or n % k:
        fail(f"query's {n} heads must be a multiple of key's, got {k}")
    scores: list[tuple[str, Array | None]] = [("bias", bias), ("mask", mask)]
    for name, x in scores:
        if x is None:
            continue
        if name == "mask" and x.dtype != np.dtype(bool):
            raise TypeError(
                f"dot_product_attention: mask must be bool, got dtype {x.dtype}."
            )
        fits = x.ndim == 4 and all(
            have in (1, want) for have, want in zip(x.shape, (b, n, t, s), strict=True)
        )
        if not fits:
            fail(f"{name} must broadcast to {(b, n, t, s)}, got shape {x.shape}")
    names = ("query_seq_lengths", "key_value_seq_lengths")
    for name, ends in zip(names, lengths, strict=True):
        if ends is None or (ends.shape == (b,) and ends.dtype == np.dtype(np.int32)):
            continue
        fail(f"{name} must be int32 of shape {(b,)}, got {ends.dtype} of {ends.shape}")
    ends = lengths[1]
    if ends is None or isinstance(ends, jax.core.Tracer) or not b:
        return
    if ends.is_fully_addressable and (most := int(np.asarray(ends).max())) > s:
        fail(f"key_value_seq_lengths must be at most key's {s} rows, got {most}")


def _see(
    query: Array,
    key: Array,
    order: str,
    key_value_order: str,
    rest: Sequence[Array | None],
    is_causal: bool,
    window: tuple[int, int] | None,
) -> dict[str, Any]:
    """What the primitives are told, but for the scale.

    Their query has its heads as two axes: those of keys, and the group of each.
    """
    split = [letter for name in order for letter in ("NG" if name == "N" else name)]
    return {
        "q_axes": tuple(split.index(letter) for letter in "BTNGH"),
        "k_axes": tuple(key_value_order.index(letter) for letter in _LETTERS),
        "causal": bool(is_causal),
        "window": (-1, -1) if window is None else tuple(map(int, window)),
        "has": tuple(x is not None for x in rest),
    }


def _ours(
    query: Array,
    key: Any,
    bias: Array | None,
    scale: Any,
    seen: dict[str, Any],
    paged: bool,
) -> bool:
    """Whether there may be a kernel, here and for these operands."""
    platform = here()
    axis = seen["q_axes"][2]
    split = (*query.shape[:axis], 1, *query.shape[axis:])
    return (
        seen["q_axes"][4] == 4
        and seen["k_axes"][3] == 3
        and (scale is None or isinstance(scale, numbers.Real))
        and (bias is None or bias.dtype.name in DTYPES)
        and (seen["window"] == (-1, -1) or min(seen["window"]) >= 0)
        and not (paged and platform == "cuda")
        and has_kernel(platform, jax.ShapeDtypeStruct(split, query.dtype), key, seen)
        and wanted(query, key, seen)
    )


def _apply(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    lengths: Sequence[Array | None],
    tables: Array | None,
    params: dict[str, Any],
) -> tuple[Array, Array]:
    """The result, and what softmax divided by, as the primitives have it."""
    heads = key.shape[params["k_axes"][2]]
    axis = params["q_axes"][2]
    shape = query.shape
    query = query.reshape(*shape[:axis], heads, -1, *shape[axis + 1 :])

    def grouped(x: Array) -> Array:
        b, n, t, s = x.shape
        return x.reshape(b, *((1, 1) if n == 1 else (heads, -1)), t, s)

    rest = [grouped(x) for x in (bias, mask) if x is not None]
    rest += [x for x in lengths if x is not None]
    if tables is None:
        out, sums = attention_p(query, key, value, *rest, **params)
    else:
        out, sums = paged_attention_p(query, key, value, *rest, tables, **params)
    return out.reshape(shape), sums
