# SPDX-License-Identifier: Apache-2.0
"""The primitives of attention: what they mean, and their rules.

The query has its heads as two axes: those of keys, and the group of each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.interpreters import ad

from jax_layout import _backends, _compat, choices
from jax_layout.kernel import Kernel
from jax_layout.measured import Work
from jax_layout.op import Op, define, jvp_of
from jax_layout.plain import jnp, lax, nn

DTYPES = ("float32", "bfloat16", "float16")
MOST_FEATURES = 256
# As many as cuDNN has on every GPU since Ampere.
_CUDNN_FEATURES = 128


def work_of(query: Any, key: Any, params: dict[str, Any], suffix: str = "") -> Work:
    """Of a query that has its heads as one axis, or as two."""
    sizes = list(query.shape)
    heads = key.shape[params["k_axes"][2]]
    if len(sizes) == 4:
        axis = params["q_axes"][2]
        sizes[axis : axis + 1] = [heads, sizes[axis] // heads]
    b, t, k, g, h = (sizes[axis] for axis in params["q_axes"])
    s = key.shape[params["k_axes"][1]]
    kind = " causal" if params["causal"] else ""
    return Work(f"attention{suffix} {query.dtype.name}{kind}", (b * k, g, t, s, h))


def here() -> str | None:
    """jax's default platform, if there are kernels for it."""
    return {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend())


def wanted(query: Any, key: Any, params: dict[str, Any], suffix: str = "") -> bool:
    """Whether the tables have a call on jax's default platform as one of a kernel."""
    work = work_of(query, key, params, suffix)
    if here() == "cuda":
        work = dataclasses.replace(work, case=f"cuda {work.case}")
    return choices.choose(work) is not None


def has_kernel(
    platform: str | None, query: Any, key: Any, params: dict[str, Any]
) -> bool:
    """Whether a platform has a kernel for these operands.

    The CPU's are ours. cuDNN's is asked where its results are jax's: nothing that may
    hide a whole row, which it leaves undefined.
    """
    h = query.shape[params["q_axes"][4]]
    if platform is None or min(*query.shape, *key.shape) == 0 or h > MOST_FEATURES:
        return False
    if platform == "cpu":
        return query.dtype.name in DTYPES and _backends.has_kernels("attention")
    queries, keys = query.shape[params["q_axes"][1]], key.shape[params["k_axes"][1]]
    return (
        query.dtype.name in DTYPES[1:]
        and h % 8 == 0
        and h <= _CUDNN_FEATURES
        and not any(params["has"])
        and params["window"] == (-1, -1)
        and (queries == keys or not params["causal"])
        and _backends.available("cuda")
        and _compat.has_cudnn_attention()
    )


def has_backward(
    platform: str | None, query: Any, key: Any, params: dict[str, Any]
) -> bool:
    """Likewise for gradients: jax asks cuDNN for those of even lengths alone."""
    lengths = query.shape[params["q_axes"][1]], key.shape[params["k_axes"][1]]
    odd = platform == "cuda" and any(n % 2 for n in lengths)
    return not odd and has_kernel(platform, query, key, params)


# jax's score of what is hidden, finite in float32.
_HIDDEN = -0.7 * float(np.finfo(np.float32).max)
# The largest score of a query that sees nothing.
_NOTHING = float(np.finfo(np.float32).min)


def _given(rest: Sequence[Array], has: Sequence[bool]) -> list[Array | None]:
    """Bias, mask, and the lengths of queries and keys."""
    queue = list(rest)
    return [queue.pop(0) if given else None for given in has]


def _attention(
    query: Array,
    key: Array,
    value: Array,
    *rest: Array,
    q_axes: tuple[int, ...],
    k_axes: tuple[int, ...],
    scale: float,
    causal: bool,
    window: tuple[int, int],
    has: tuple[bool, ...],
) -> list[Array]:
    """The result, and what softmax divided by: batch, heads, groups, queries, two.

    That is the largest score and the logarithm of the sum of powers about it. As one
    number, a large score would leave no digits for the sum.
    """
    bias, mask, query_lengths, key_lengths = _given(rest, has)
    query = query.transpose(q_axes)
    key, value = (x.transpose(k_axes) for x in (key, value))
    wide = jnp.promote_types(query.dtype, np.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=wide)
    scores = scores * jnp.asarray(scale, wide)
    if bias is not None:
        scores = (scores + bias).astype(wide)
    t = jnp.arange(scores.shape[3]).reshape(-1, 1)
    s = jnp.arange(scores.shape[4])
    seen = [] if mask is None else [mask]
    seen += [s <= t] if causal else []
    seen += [s >= t - window[0]] if window[0] >= 0 else []
    seen += [s <= t + window[1]] if window[1] >= 0 else []
    for at, lengths in ((t, query_lengths), (s, key_lengths)):
        if lengths is not None:
            seen.append(at < lengths.reshape(-1, 1, 1, 1, 1))
    if seen:
        every = functools.reduce(jnp.logical_and, seen, jnp.ones_like(scores, bool))
        scores = jnp.where(every, scores, jnp.full_like(scores, _HIDDEN))
    fixed = lax.stop_gradient(scores)
    most = jnp.max(fixed, axis=-1, initial=_NOTHING)
    logs = jnp.log(jnp.exp(fixed - most[..., None]).sum(axis=-1))
    most = jnp.where(most <= _HIDDEN, _NOTHING, most)
    powers = nn.softmax(scores, axis=-1).astype(key.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", powers, value)
    if query_lengths is not None:
        rows = jnp.arange(out.shape[1]).reshape(-1, 1, 1, 1)
        inside = rows < query_lengths.reshape(-1, 1, 1, 1, 1)
        out = out * inside.astype(out.dtype)
    return [out.transpose(np.argsort(q_axes)), jnp.stack([most, logs], axis=-1)]


def residual(sums: Array) -> Array:
    """The natural logarithms of softmax's sums, as jax has them."""
    most, logs = sums[..., 0], sums[..., 1]
    return jnp.where(most <= _NOTHING, _HIDDEN, most + logs)


def _as_jax(query: Array, key: Array, value: Array, *rest: Array, **params: Any) -> Any:
    """The result as jax's function makes it."""
    axes = params["q_axes"]
    b, t, k, g, h = (query.shape[axis] for axis in axes)
    bias, mask, query_lengths, key_lengths = _given(rest, params["has"])

    def whole(x: Array | None) -> Array | None:
        """With the heads of queries as one axis, or broadcast over all of them."""
        if x is None or x.shape[1] == x.shape[2] == 1:
            return x if x is None else x[:, :, 0]
        x = jnp.broadcast_to(x, (x.shape[0], k, g, *x.shape[3:]))
        return x.reshape(x.shape[0], k * g, *x.shape[3:])

    jax_attention: Any = nn.dot_product_attention  # overloaded for literals
    out: Array = jax_attention(
        query.transpose(axes).reshape(b, t, k * g, h),
        *(x.transpose(params["k_axes"]) for x in (key, value)),
        whole(bias),
        whole(mask),
        scale=params["scale"],
        is_causal=params["causal"],
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        local_window_size=None if params["window"] == (-1, -1) else params["window"],
    )
    return out.reshape(b, t, k, g, h).transpose(np.argsort(axes))


def _kernel(
    platform: str, query: Any, key: Any, value: Any, *rest: Any, **params: Any
) -> Kernel | None:
    if not has_kernel(platform, query, key, params):
        return None
    if platform == "cuda":
        instead = functools.partial(_cudnn, **params)
        return Kernel({}, instead=instead, work=work_of(query, key, params))
    return Kernel(attributes(params) | {"block_tables": False})


def _backward_kernel(
    platform: str,
    ct: Any,
    query: Any,
    key: Any,
    *rest: Any,
    biased: bool,
    **params: Any,
) -> Kernel | None:
    if not has_backward(platform, query, key, params):
        return None
    if platform == "cuda":
        instead = functools.partial(_cudnn_backward, biased=biased, **params)
        work = work_of(query, key, params, "_backward")
        return Kernel({}, instead=instead, work=work)
    return Kernel(attributes(params) | {"bias_gradient": biased})


def _cudnn(query: Array, key: Array, value: Array, **params: Any) -> list[Array]:
    """As `_attention`, by cuDNN, which reads two orders where they lie."""
    q_axes, k_axes = params["q_axes"], params["k_axes"]
    heads_first = k_axes == (0, 2, 1, 3)
    letters, order = ("bkgth", "BNTH") if heads_first else ("btkgh", "BTNH")
    to = [q_axes["btkgh".index(letter)] for letter in letters]
    split = query.transpose(to)
    heads = letters.index("k")
    merged = (*split.shape[:heads], -1, *split.shape[heads + 2 :])
    out, logs = _compat.cudnn_attention(
        split.reshape(merged),
        *(x if heads_first else x.transpose(k_axes) for x in (key, value)),
        scale=params["scale"],
        causal=params["causal"],
        order=order,
    )
    b, _, t = logs.shape
    logs = logs.reshape(b, key.shape[k_axes[2]], -1, t)
    sums = jnp.stack([logs, jnp.zeros_like(logs)], axis=-1)
    return [out.reshape(split.shape).transpose(np.argsort(to)), sums]


def _cudnn_backward(
    ct: Array,
    query: Array,
    key: Array,
    value: Array,
    *_: Array,
    biased: bool,
    **params: Any,
) -> list[Array]:
    """Its forward call comes with it; XLA makes one of that and the program's own."""

    def f(*moving: Array) -> Array:
        return _cudnn(*moving, **params)[0]

    return list(jax.vjp(f, query, key, value)[1](ct))


def attributes(params: dict[str, Any]) -> dict[str, Any]:
    bias, mask, query_lengths, key_lengths = params["has"]
    return {
        "bias": bias,
        "mask": mask,
        "query_lengths": query_lengths,
        "key_lengths": key_lengths,
        "q_axes": np.array(params["q_axes"], np.int64),
        "k_axes": np.array(params["k_axes"], np.int64),
        "scale": np.float64(params["scale"]),
        "causal": params["causal"],
        "window": np.array(params["window"], np.int64),
    }


# --- rules

# Where each operand has its batch: as the query, as the key, or first; sums are no
# array that broadcasts.
_QUERY, _KEY, _FIRST, _SUMS = "q", "k", "first", "sums"


def _places(params: dict[str, Any]) -> list[str]:
    """Of the operands of attention."""
    return [_QUERY, _KEY, _KEY, *[_FIRST] * sum(params["has"])]


def batch_axis(place: str, params: dict[str, Any]) -> int:
    if place in (_FIRST, _SUMS):
        return 0
    return int(params["q_axes" if place == _QUERY else "k_axes"][0])


def merged(
    operands: Sequence[Array],
    dims: Sequence[int | None],
    places: Sequence[str],
    params: dict[str, Any],
) -> tuple[list[Array], int]:
    """Operands with a batch axis made one with their own; how many there are of it."""
    count = next(
        x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None
    )
    x, dim = operands[places.index(_QUERY)], dims[places.index(_QUERY)]
    own = list(x.shape if dim is None else np.delete(x.shape, dim))
    batch = own[params["q_axes"][0]]
    whole = []
    for x, dim, place in zip(operands, dims, places, strict=True):
        axis = batch_axis(place, params)
        if dim is None:
            if place == _FIRST and x.ndim == 5 and x.shape[0] == 1:  # over both
                whole.append(x)
                continue
            x = jnp.broadcast_to(jnp.expand_dims(x, axis), _with(x.shape, axis, count))
        else:
            x = jnp.moveaxis(x, dim, axis)
        if x.shape[axis + 1] != batch:
            shape = list(x.shape)
            shape[axis + 1] = batch
            x = jnp.broadcast_to(x, shape)
        whole.append(x.reshape(*x.shape[:axis], count * batch, *x.shape[axis + 2 :]))
    return whole, count


def _with(shape: Sequence[int], axis: int, count: int) -> tuple[int, ...]:
    return (*shape[:axis], count, *shape[axis:])


def _apart(x: Array, axis: int, count: int) -> Array:
    return x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])


def _batch(
    operands: Sequence[Array], dims: Sequence[Any], **params: Any
) -> tuple[list[Array], list[int]]:
    whole, count = merged(operands, dims, _places(params), params)
    axes = [batch_axis(_QUERY, params), 0]
    out = attention_p(*whole, **params)
    return [_apart(x, axis, count) for x, axis in zip(out, axes, strict=True)], axes


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[list[Array], list[Any]]:
    query, key = primals[:2]
    ours = has_backward(here(), query, key, params)
    ours = ours and wanted(query, key, params, "_backward")
    biased = params["has"][0] and type(tangents[3]) is not ad.Zero
    if not ours:
        out, sums, moves = _moved(primals, tangents, params)
    else:
        out, sums = attention_p(*primals, **params)
        given = [ad.instantiate_zeros(t) for t in tangents[: 3 + biased]]
        moves = attention_tangent_p(
            *given, *primals, out, sums, biased=biased, **params
        )
    return [out, sums], [moves, ad.Zero(jax.typeof(sums).to_tangent_aval())]


def _moved(
    primals: Sequence[Array], tangents: Sequence[Any], params: dict[str, Any]
) -> tuple[Array, Array, Array]:
    """The results, and by how much the first of them moves, in plain JAX."""
    wanted = 3 + params["has"][0]
    # Of float16, jax's own function is not to be had in programs for CPUs.
    as_jax = primals[0].dtype.name in ("float32", "bfloat16")

    def f(*operands: Array) -> Any:
        given = (*operands, *primals[wanted:])
        return _as_jax(*given, **params) if as_jax else _attention(*given, **params)[0]

    moving = [ad.instantiate_zeros(t) for t in tangents[:wanted]]
    out, moves = jax.jvp(f, tuple(primals[:wanted]), tuple(moving))
    return out, _attention(*primals, **params)[1], moves


def _tangent(*operands: Array, biased: bool, **params: Any) -> Array:
    count = 3 + biased
    tangents, primals = operands[:count], operands[count:-2]

    def f(*moving: Array) -> Array:
        return _attention(*moving, *primals[count:], **params)[0]

    moves: Array = jax.jvp(f, tuple(primals[:count]), tuple(tangents))[1]
    return moves


def _tangent_transpose(
    ct: Any, *operands: Any, biased: bool, **params: Any
) -> list[Any]:
    count = 3 + biased
    linear = list(map(ad.is_undefined_primal, operands[:count]))
    wanted = biased and linear[3]
    given = attention_backward_p(ct, *operands[count:], biased=wanted, **params)
    given = [*given, None][:count]
    rest = [None] * (len(operands) - count)
    return [g if w else None for g, w in zip(given, linear, strict=True)] + rest


def _tangent_batch(
    operands: Sequence[Array], dims: Sequence[Any], *, biased: bool, **params: Any
) -> tuple[Array, int]:
    operands, dims = list(operands), list(dims)
    if biased and (dims[3] is None) != (dims[7] is None):
        # A bias and what it moves by are to be broadcast alike.
        i = 3 if dims[3] is None else 7
        count = operands[10 - i].shape[dims[10 - i]]
        operands[i] = jnp.broadcast_to(operands[i], (count, *operands[i].shape))
        dims[i] = 0
    places = [_QUERY, _KEY, _KEY, *[_FIRST] * biased]
    places += [*_places(params), _QUERY, _SUMS]
    whole, count = merged(operands, dims, places, params)
    axis = batch_axis(_QUERY, params)
    moves = attention_tangent_p(*whole, biased=biased, **params)
    return _apart(moves, axis, count), axis


def _backward(ct: Array, *operands: Array, biased: bool, **params: Any) -> list[Array]:
    """Gradients by query, key, value and bias; out and sums are functions of those."""
    primals, count = operands[:-2], 3 + biased

    def f(*moving: Array) -> Array:
        return _attention(*moving, *primals[count:], **params)[0]

    return list(jax.vjp(f, *primals[:count])[1](ct))


def _backward_batch(
    operands: Sequence[Array], dims: Sequence[Any], *, biased: bool, **params: Any
) -> tuple[list[Array], list[int]]:
    operands, dims = list(operands), list(dims)
    once = False
    if biased:  # each of the batch has a gradient of its own
        count = next(
            x.shape[dim]
            for x, dim in zip(operands, dims, strict=True)
            if dim is not None
        )
        if dims[4] is None:
            operands[4] = jnp.broadcast_to(operands[4], (count, *operands[4].shape))
            dims[4] = 0
        once = np.delete(operands[4].shape, dims[4])[0] == 1
    places = [_QUERY, *_places(params), _QUERY, _SUMS]
    whole, count = merged(operands, dims, places, params)
    axes = [batch_axis(place, params) for place in (_QUERY, _KEY, _KEY, _FIRST)]
    axes = axes[: 3 + biased]
    out = attention_backward_p(*whole, biased=biased, **params)
    out = [_apart(x, axis, count) for x, axis in zip(out, axes, strict=True)]
    if once:
        out[3] = out[3].sum(axis=1, keepdims=True)
    return out, axes


def names(params: dict[str, Any], rest: Sequence[Any]) -> tuple[str, str, list[str]]:
    """The axes of the query, of the key, and of what follows the value.

    Queries stay whole, and keys where an order counts from the first; heads and the
    batch do not meet.
    """
    s = "S" if params["causal"] or params["window"] != (-1, -1) else "s"
    query = [""] * 5
    for name, axis in zip("bTkgH", params["q_axes"], strict=True):
        query[axis] = name
    key = [""] * 4
    for name, axis in zip(f"b{s}kH", params["k_axes"], strict=True):
        key[axis] = name
    others = []
    for i, x in enumerate(rest):
        if x.ndim == 1:
            others.append("b")
            continue
        every = zip(f"bkgT{s}", x.shape, strict=True)
        others.append(" ".join(f"U{i}{name}" if n == 1 else name for name, n in every))
    return " ".join(query), " ".join(key), others


def _sharding(query: Any, key: Any, value: Any, *rest: Any, **params: Any) -> str:
    q, k, others = names(params, rest)
    return ", ".join([q, k, k, *others]) + f" -> {q}, b k g T E"


def _tangent_sharding(*avals: Any, biased: bool, **params: Any) -> str:
    q, k, others = names(params, avals[6 + biased : -2])
    first = [q, k, k, *others[:biased]]
    return ", ".join([*first, q, k, k, *others, q, "b k g T E"]) + f" -> {q}"


def _backward_sharding(*avals: Any, biased: bool, **params: Any) -> str:
    q, k, others = names(params, avals[4:-2])
    results = ", ".join([q, k, k, *others[:biased]])
    return ", ".join([q, q, k, k, *others, q, "b k g T E"]) + f" -> {results}"


def _own(total: Any, operands: Sequence[Array], params: dict[str, Any]) -> list[Array]:
    """Operands with the lengths of the keys that a device has."""
    own, at = list(operands), 2 + sum(params["has"])
    if params["has"][3]:
        count = operands[1].shape[params["k_axes"][1]]

        def behind(lengths: Array, axes: tuple[str, ...]) -> Array:
            return lengths - count * lax.axis_index(axes)

        own[at] = total(own[at], "s", by=behind)
    return own


def _in_parts(total: Any, *operands: Array, **params: Any) -> list[Array]:
    """Results of parts of the keys, by the shares of their sums."""
    out, sums = attention_p(*_own(total, operands, params), **params)
    own = sums[..., 0]
    most = total(own, by=lax.pmax)
    powers = jnp.exp(own - most + sums[..., 1])
    every = total(powers)
    whole = total(out.astype(sums.dtype) * _as_query(powers / every, params))
    return [whole.astype(out.dtype), jnp.stack([most, jnp.log(every)], axis=-1)]


def _as_query(of_rows: Array, params: dict[str, Any]) -> Array:
    """Numbers by batch, heads, groups and queries, to be multiplied with a query."""
    rows = of_rows.transpose(0, 3, 1, 2)[..., None]
    return rows.transpose(np.argsort(params["q_axes"]))


def _backward_in_parts(
    total: Any, ct: Array, *operands: Array, biased: bool, **params: Any
) -> list[Array]:
    """Sums over what devices share: keys all groups, queries all keys."""
    own = _own(total, operands, params)
    # What sees nothing is the mean of all values, of which this device has some.
    share = jnp.where(own[-1][..., 0] <= _NOTHING, 1 / total(1, "s"), 1.0)
    ct = (ct * _as_query(share, params)).astype(ct.dtype)
    out = attention_backward_p(ct, *own, biased=biased, **params)
    shared = ["s", "g", "g"]
    if biased:
        sizes = zip("bkgTs", operands[3].shape, strict=True)
        shared.append("".join(name for name, n in sizes if n == 1))
    wide = [x.astype(jnp.promote_types(x.dtype, np.float32)) for x in out]
    return [
        total(x, *over).astype(y.dtype) if over else y
        for x, y, over in zip(wide, out, shared, strict=True)
    ]


attention_p: Any = define(
    Op(
        name="attention",
        lax=_attention,
        kernel=_kernel,
        jvp=_jvp,
        batch=_batch,
        sharding=_sharding,
        in_parts=_in_parts,
        multiple_results=True,
        dtypes=DTYPES,
    )
)

# Linear in the first three operands; its transpose is what the gradient is.
attention_tangent_p: Any = define(
    Op(
        name="attention_tangent",
        lax=_tangent,
        jvp=jvp_of(_tangent),
        transpose=_tangent_transpose,
        batch=_tangent_batch,
        sharding=_tangent_sharding,
    )
)

attention_backward_p: Any = define(
    Op(
        name="attention_backward",
        lax=_backward,
        kernel=_backward_kernel,
        jvp=jvp_of(_backward),
        batch=_backward_batch,
        sharding=_backward_sharding,
        in_parts=_backward_in_parts,
        multiple_results=True,
        dtypes=DTYPES,
    )
)
