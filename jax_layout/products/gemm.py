# SPDX-License-Identifier: Apache-2.0
"""The product of two arrays over any of their axes, read and written in place.

`contract` is what every product of the package comes down to, `gemm_p` the
primitive beneath it. The public functions are in matmul.py, einsum.py, linear.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.interpreters import ad
from jax.typing import DTypeLike

from jax_layout import _backends
from jax_layout.arguments import accumulator, may_be_tf32, placement, sent, widest
from jax_layout.kernel import Kernel
from jax_layout.measured import Work
from jax_layout.op import Op, define
from jax_layout.permute import permute
from jax_layout.plain import jnp, lax
from jax_layout.products import integers
from jax_layout.products.letters import (
    order_of,
    plan_of,
    reordered,
    terms,
    turned,
    unused_letter,
    written,
)
from jax_layout.stacks import Parts

# What NVIDIA recommends for cuBLASLt on Hopper, and room to align it.
_CUDA_WORKSPACE = (32 << 20) + 256
_PARTS = ("a_part", "b_part")  # attributes


def contract(
    a: Any,
    b: Any,
    spec: str,
    *,
    c: Any = None,
    alpha: complex = 1,
    beta: complex = 1,
    precision: Any = None,
    dtype: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """alpha * (a and b summed over their common axes) + beta * c.

    Where the axes do not line up for a GEMM in place, the terms that are cheapest
    to permute are permuted.

    Args:
      a: array.
      b: array of a's dtype.
      spec: the contraction, "bmk,bkn->bmn": every letter in two or three terms.
      c: array of the result's shape and dtype.
      alpha: number.
      beta: number. Zero, c is not read; alpha zero, a and b are not.
      precision: canonical (`_compat.canonical_precision`).
      dtype: of the result; a's if left out.
      out_sharding: as in `jax.lax.dot_general`.
    """
    dtype = np.dtype(a.dtype if dtype is None else dtype)
    if beta == 0:
        c = None
    if alpha == 0:
        like = _lax(
            a,
            b,
            spec=spec,
            alpha=1,
            beta=0,
            precision=precision,
            preferred_element_type=dtype,
            out_sharding=out_sharding,
        )
        return jnp.zeros_like(like) if c is None else (beta * c).astype(dtype)
    x, w, y = terms(spec)
    order = order_of(spec, a.shape, b.shape, a.dtype.itemsize, dtype.itemsize)
    x2, w2, y2 = order[:3]
    if x2 != x:
        a = permute(a, [x.index(label) for label in x2])
    if w2 != w:
        b = permute(b, [w.index(label) for label in w2])
    if y2 != y:
        new = [y.index(label) for label in y2]
        c = None if c is None else permute(c, new)
        out_sharding = reordered(out_sharding, new)
    out = gemm_p(
        *((a, b) if c is None else (a, b, c)),
        spec=f"{x2},{w2}->{y2}",
        alpha=alpha,
        beta=0 if c is None else beta,
        precision=precision,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )
    return out if y2 == y else permute(out, [y2.index(label) for label in y])


# --- what can be seen of a plan


@dataclasses.dataclass(frozen=True)
class GemmPlan:
    """How a contraction runs; see `explain_gemm`.

    Attributes:
      spec: the contraction, after any permutes.
      permuted: the terms that are permuted, of "a", "b" and "y".
      moved_bytes: read and written by these permutes, beyond the operands.
      form: the library call in column-major terms, "TN", "NT", "NN" or "TT".
      m: rows of the result.
      n: columns of the result.
      k: length of the sums.
      lda: elements between rows of a, or columns where it is transposed.
      ldb: the same of b.
      ldy: the same of the result.
      loops: extents of the axes that do not fit into m, n and k: the batch.
      swapped: whether a and b change places, for a result that is transposed.
    """

    spec: str
    permuted: tuple[str, ...]
    moved_bytes: int
    form: str
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldy: int
    loops: tuple[int, ...]
    swapped: bool


def explain_gemm(
    spec: str,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    dtype: DTypeLike = jnp.float32,
) -> GemmPlan:
    """How a contraction of two row-major arrays runs.

    A column-major library sees a row-major matrix as its transpose, so the product
    y = x @ w.T is its `w^T x`, a TN GEMM, without a transpose being written.

    Args:
      spec: two terms and a result, "bshd,bthd->bhst"; every letter is in two or
        three of them.
      a_shape: the extents of the first operand.
      b_shape: the extents of the second operand.
      dtype: of the operands and the result.

    Returns:
      the plan.

    Raises:
      TypeError: if spec is no string, or a shape no sequence of integers.
      ValueError: if the letters do not fit the shapes or each other.

    >>> plan = explain_gemm("bshd,bthd->bhst", (8, 512, 16, 64), (8, 512, 16, 64))
    >>> plan.form, plan.m, plan.n, plan.k, plan.loops, plan.moved_bytes
    ('TN', 512, 512, 64, (8, 16), 0)
    """
    if not isinstance(spec, str):
        raise TypeError(f"explain_gemm: spec must be a string, got {spec!r}.")
    spec = spec.replace(" ", "")
    a, b = _shape("a_shape", a_shape), _shape("b_shape", b_shape)
    itemsize = np.dtype(dtype).itemsize
    x, w, y, moved = order_of(spec, a, b, itemsize, itemsize)
    old = terms(spec)
    shapes = [
        tuple(shape[before.index(label)] for label in after)
        for before, after, shape in zip(old, (x, w), (a, b), strict=False)
    ]
    plan = plan_of(f"{x},{w}->{y}", *shapes)
    assert plan is not None  # that is what the order is chosen for
    first, second = plan["b"], plan["a"]  # y^T = b^T a^T
    return GemmPlan(
        spec=f"{x},{w}->{y}",
        permuted=tuple(
            name for name, p, q in zip("aby", old, (x, w, y), strict=True) if p != q
        ),
        moved_bytes=moved,
        form="NT"[first["transposed"]] + "NT"[second["transposed"]],
        **{size: plan[size] for size in "mnk"},
        **{f"ld{name}": plan[name]["ld"] for name in "aby"},
        loops=tuple(loop[0] for loop in plan["loops"]),
        swapped=plan["swapped"],
    )


def _shape(argument: str, shape: Any) -> tuple[int, ...]:
    try:
        if not hasattr(shape, "shape"):  # an array is not its shape
            return tuple(operator.index(extent) for extent in shape)
    except TypeError:
        pass
    raise TypeError(
        f"explain_gemm: {argument} must be a sequence of integers, "
        f"got {type(shape).__name__}."
    )


def tune_gemms(path: str | os.PathLike[str] | None = None, candidates: int = 8) -> None:
    """Says how cuBLASLt's algorithms are chosen from now on, in this process.

    Without it every product uses the first that cuBLASLt's heuristic names. With it,
    the first call of a product times the heuristic's best `candidates` on its device,
    and keeps the fastest. Algorithms differ in the order of their sums, so that other
    choices give other last bits: a file makes them repeat from run to run, and
    `candidates=1` never times anything, so that results are those of the file, or
    of the heuristic's first.

    What a CUDA graph captures cannot be timed there: call the product once on its
    own. Products that have run already keep their choice. Products on CPUs are not
    affected.

    Args:
      path: of a JSON file that holds a choice for each product, device and version
        of cuBLASLt; read now if it exists, and written when a choice is made. None
        keeps them in memory.
      candidates: how many to time; 1 for none.

    Raises:
      TypeError: if path is no path, or candidates no integer.
      ValueError: if candidates is less than 1, the file has other contents, which
        are left alone, or cannot be written.

    Source: `cublasLtMatmulAlgoGetHeuristic` in the cuBLAS manual.

    >>> tune_gemms(candidates=1)
    """
    if not (path is None or isinstance(path, str | os.PathLike)):
        raise TypeError(f"tune_gemms: path must be a path, got {path!r}.")
    try:
        candidates = operator.index(candidates)
    except TypeError:
        raise TypeError(
            f"tune_gemms: candidates must be an integer, got {candidates!r}."
        ) from None
    if candidates < 1:
        raise ValueError(
            f"tune_gemms: candidates must be at least 1, got {candidates}."
        )
    if path is not None:
        _check_choices(Path(path))
    native = _backends.module("cuda")
    if native is not None:
        native.tune_gemms("" if path is None else os.fspath(path), candidates)


def _check_choices(path: Path) -> None:
    """Also where there is no GPU to choose for: the path will be used on one."""
    if not path.parent.is_dir():
        raise ValueError(f"tune_gemms: cannot write {path}: there is no {path.parent}.")
    if not path.exists():
        return
    try:
        choices = json.loads(path.read_text()).values()
        known = all(len(bytes.fromhex(choice)) == 64 for choice in choices)
    except (OSError, ValueError, TypeError, AttributeError):
        known = False
    if not known:
        raise ValueError(f"tune_gemms: {path} is not a file of choices.")


# --- the primitive


def _lax(
    a: Array,
    b: Array,
    *c: Array,
    spec: str,
    alpha: complex,
    beta: complex,
    precision: Any,
    preferred_element_type: np.dtype,
    out_sharding: Any,
    on_gpu: bool = False,
) -> Array:
    """With what is scaled or added to in float32 for 16 bits; on a GPU as XLA fuses it,
    which then rounds once too, where of a float32 product it would write all of it."""
    dtype = preferred_element_type
    x, w, y = terms(spec)
    batch = [label for label in y if label in x and label in w]
    if [i for i in x + w if i in y and i not in batch] != list(y)[len(batch) :]:
        a, b, x, w = b, a, w, x  # as jax.numpy.einsum, in the order that XLA likes
    summed = [label for label in x if label in w and label not in y]
    order = batch + [i for i in x + w if i in y and i not in batch]
    plain = not c and alpha == 1
    fused = on_gpu and dtype.itemsize == 2
    summed_in = dtype if plain or fused else accumulator(dtype)
    sums, batches = [([*map(x.index, i)], [*map(w.index, i)]) for i in (summed, batch)]
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=(sums, batches),
        precision=precision,
        preferred_element_type=summed_in,
        out_sharding=reordered(out_sharding, [y.index(i) for i in order]),
    )
    k = math.prod(a.shape[i] for i in sums[0])
    out = integers.product(dot, a, b, summed_in, k)
    out = lax.transpose(out, [order.index(label) for label in y])
    if alpha != 1:
        out = out * alpha
    for addend in c:
        out = out + beta * addend.astype(out.dtype)
    return out.astype(dtype)


def gemm_kernel(
    platform: str,
    a: Any,
    b: Any,
    *,
    spec: str,
    precision: Any,
    dtype: np.dtype,
    alpha: complex = 1,
    beta: complex = 0,
    activation: str | None = None,
    bias: bool = False,
    aux: bool = False,
    sums: bool = False,
    scales: int = 0,
) -> Kernel | None:
    """The FFI call for a product (core/gemm/ffi.cc); None where lax serves better."""
    tf32 = may_be_tf32(a.dtype, dtype, precision)
    if a.size == 0 or b.size == 0 or tf32 is None:
        return None
    alike = a.dtype == b.dtype
    if not alike and not scales:
        return None
    plan = plan_of(spec, a.shape, b.shape)
    if plan is None:
        return None
    # Along the columns of the result, which every loop shares.
    if bias and (plan["swapped"] or any(b_step for _, _, b_step, _ in plan["loops"])):
        return None
    if sums and (plan["swapped"] or plan["loops"]):
        return None
    problem = {
        "spec": spec,
        "a_shape": np.array(a.shape, np.int64),
        "b_shape": np.array(b.shape, np.int64),
        "operand_type": a.dtype.name + ("" if alike else f",{b.dtype.name}"),
        "result_type": dtype.name,
        "alpha": np.array([alpha.real, alpha.imag], np.float64),
        "beta": np.array([beta.real, beta.imag], np.float64),
        "activation": activation or "none",
        "derivative": "none",
        "bias": bias,
        "aux": aux,
        "sums": sums,
        "tf32": tf32,
        "scales": scales,
        "method": "",
    }
    methods = _backends.gemm_methods(platform, problem)
    if not methods:
        return None
    of_the_call = {"workspace": platform == "cuda"} | dict.fromkeys(_PARTS, False)
    aliases = {2: 0} if beta != 0 else {}
    call = Kernel(problem | of_the_call, "jax_layout_gemm", aliases)
    work = _work(a.dtype, dtype, plan, activation)
    if platform == "cpu":
        size = max(a.size, b.size) * a.dtype.itemsize
        parts = Parts.of_product(_PARTS, size, min(plan["m"], plan["n"]))
        return dataclasses.replace(call, work=work, methods=methods, parts=parts)
    if not scales:
        extra = {"bias": bias, "aux": aux, "sums": sums, "beta": beta != 0}
        extra["inside"] = not _is_of_matrices(spec, plan)
        case = " ".join([work.case, *(name for name, has in extra.items() if has)])
        call = dataclasses.replace(call, work=Work(case, work.sizes))
    return dataclasses.replace(call, workspace=_CUDA_WORKSPACE)


def _is_of_matrices(spec: str, plan: dict[str, Any]) -> bool:
    """Whether XLA hands a product to cuBLAS and moves nothing before or after it; it
    times cuBLAS's algorithms and its own, and fuses what is around.

    No batch axis is inside, and no more than one of m, n and k is of several axes: the
    leading ones. Heads beside those are read by products with interior axes, of whole
    arrays, but XLA makes one product of those of queries, keys and values, and writes
    their weights side by side before it and slices of its result after it.
    """
    m, n, k = (plan[size] for size in "mnk")
    if any([m * k, k * n, m * n] != strides for _, *strides in plan["loops"]):
        return False
    x, w, y = map(set, terms(spec))
    return sum(len(axes) > 1 for axes in (x & y - w, w & y - x, x & w - y)) <= 1


def _work(
    operand: np.dtype, result: np.dtype, plan: dict[str, Any], activation: str | None
) -> Work:
    """A product in the tables of choices: case and m, n, k and steps."""
    form = "NT"[plan["a"]["transposed"]] + "NT"[plan["b"]["transposed"]]
    case = f"gemm {operand.name} {form}"
    if result != operand and operand.itemsize == 2:
        case = f"gemm {operand.name}->{result.name} {form}"
    steps = math.prod(loop[0] for loop in plan["loops"])
    sizes = (plan["m"], plan["n"], plan["k"], steps)
    if activation is None:
        return Work(case, sizes)
    # What XLA computes in a loop of its own costs a kernel of ours less.
    like = (f"{case} gelu", case) if activation == "gelu_erf" else (case,)
    return Work(f"{case} {activation}", sizes, like)


def _kernel(platform: str, a: Any, b: Any, *c: Any, **params: Any) -> Kernel | None:
    params.pop("out_sharding")
    dtype = params.pop("preferred_element_type")
    return gemm_kernel(platform, a, b, dtype=dtype, **params)


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    alpha: complex,
    beta: complex,
    **params: Any,
) -> tuple[Any, Any]:
    a, b, *_ = primals
    da, db, *dc = tangents
    y = gemm_p(*primals, alpha=alpha, beta=beta, **params)
    dy = [beta * t for t in dc if not isinstance(t, ad.Zero)]
    for t, operands in ((da, (da, b)), (db, (a, db))):
        if not isinstance(t, ad.Zero):
            dy = [gemm_p(*operands, *dy, alpha=alpha, beta=len(dy), **params)]
    return y, dy[0]


def _transpose(
    ct: Any,
    a: Any,
    b: Any,
    *c: Any,
    spec: str,
    alpha: complex,
    beta: complex,
    precision: Any,
    preferred_element_type: np.dtype,
    out_sharding: Any,
) -> list[Any]:
    return [
        *cotangents(ct, a, b, spec, alpha=alpha, precision=precision),
        *[beta * ct if ad.is_undefined_primal(i) else None for i in c],
    ]


def cotangents(
    ct: Any, a: Any, b: Any, spec: str, *, alpha: complex = 1, precision: Any
) -> list[Any]:
    """Of the operands of a product, from its own; None for those that are known."""
    x, w, y = terms(spec)

    def cotangent(of: Any, left: Any, right: Any, spec: str) -> Any:
        if not ad.is_undefined_primal(of):
            return None
        # A float32 cotangent of 16-bit operands is not rounded before the sum.
        wide = widest(left.dtype, right.dtype)
        return contract(
            left.astype(wide),
            right.astype(wide),
            spec,
            alpha=alpha,
            precision=precision,
            dtype=wide,
            out_sharding=placement(of.aval),
        ).astype(of.aval.dtype)

    return [
        cotangent(a, ct, b, f"{y},{w}->{x}"),
        cotangent(b, ct, a, f"{y},{x}->{w}"),
    ]


def _batch(
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    spec: str,
    out_sharding: Any,
    **params: Any,
) -> tuple[Any, int]:
    a, b, *c = operands
    params["dtype"] = params.pop("preferred_element_type")
    x, w, y = terms(spec)
    mapped = [d is not None for d in dims]
    if not any(mapped[:2]):  # only c is: one product serves all
        beta = params.pop("beta")
        out = contract(a, b, spec, **params, out_sharding=out_sharding)
        return out + beta * jnp.moveaxis(c[0], dims[2], 0), 0
    new = unused_letter(spec)
    if mapped[0]:
        x = x[: dims[0]] + new + x[dims[0] :]
    if mapped[1]:
        w = w[: dims[1]] + new + w[dims[1] :]
    if out_sharding is not None:
        out_sharding = out_sharding.update(spec=jax.P(None, *out_sharding.spec))
    if c:
        size = a.shape[dims[0]] if mapped[0] else b.shape[dims[1]]
        params["c"] = (
            jnp.moveaxis(c[0], dims[2], 0)
            if mapped[2]
            else jnp.broadcast_to(c[0], (size, *c[0].shape))
        )
    out = contract(a, b, f"{x},{w}->{new}{y}", **params, out_sharding=out_sharding)
    return out, 0


def _sharding(*avals: Any, spec: str, **params: Any) -> str:
    x, w, y = (" ".join(term) for term in terms(spec))
    return ", ".join([x, w] + [y] * (len(avals) - 2)) + " -> " + y


def _in_parts(total: Any, a: Array, b: Array, *c: Array, **params: Any) -> Array:
    """The addend is added once, not by every device."""
    beta, dtype = params.pop("beta"), params.pop("preferred_element_type")
    out = total(gemm_p(a, b, beta=0, preferred_element_type=sent(dtype), **params))
    for addend in c:
        wide = accumulator(dtype)
        out = out.astype(wide) + beta * addend.astype(wide)
    return out.astype(dtype)


# In the order of DType in core/dtype.h.
GEMM_DTYPES = (
    "float32 float64 bfloat16 float16 float8_e4m3fn float8_e5m2 int8 int32 "
    "complex64 complex128"
).split()

gemm_p = define(
    Op(
        name="gemm",
        lax=_lax,
        lax_on_gpu=functools.partial(_lax, on_gpu=True),
        kernel=_kernel,
        jvp=_jvp,
        transpose=_transpose,
        batch=_batch,
        sharding=_sharding,
        in_parts=_in_parts,
        layouts=True,  # weights may be parts of a stack
        turned=turned,
        written=written,
        dtypes=GEMM_DTYPES,
    )
)


def save_gemms(prim: Any, *_: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint` that keeps the results of products.

    What `jax.checkpoint_policies.dots_saveable` is to `jax.lax.dot_general`, which
    it includes.

    >>> f = jax.checkpoint(lambda x, w: jnp.sin(contract(x, w, "mk,kn->mn")),
    ...                    policy=save_gemms)
    """
    names = ("gemm", "linear", "scaled_gemm")
    return prim.name in names or jax.checkpoint_policies.dots_saveable(
        prim, *_, **params
    )
