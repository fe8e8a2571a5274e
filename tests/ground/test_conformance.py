# SPDX-License-Identifier: Apache-2.0
"""What must hold for every operator, read off its record.

A new operator adds its examples to EXAMPLES below; without them the first test fails.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_layout as jl
from hlo import compiled, kernels
from jax_layout.attention.blocked import (
    attention_backward_p,
    attention_p,
    attention_tangent_p,
)
from jax_layout.attention.cache import update_cache_p
from jax_layout.attention.paged import paged_attention_p, update_paged_cache_p
from jax_layout.convnet.convolution import (
    conv_fused_p,
    conv_input_grad_p,
    conv_p,
    conv_weight_grad_p,
)
from jax_layout.convnet.interpolate import _Resampling, resample_p
from jax_layout.convnet.moments import centered_affine_p, centered_sums_p, moments_p
from jax_layout.convnet.packed import conv_packed_p
from jax_layout.convnet.passes import Convolution
from jax_layout.convnet.pool_kernel import pool_p
from jax_layout.convnet.windows import Window, disjoint_sum_p, pick_p, spread_p
from jax_layout.formats.annotations import memory_format_p
from jax_layout.formats.memory_format import MemoryFormat
from jax_layout.geam import geam_p
from jax_layout.index import index_add_p, index_select_p
from jax_layout.permute import permute_p
from jax_layout.products.gemm import gemm_p
from jax_layout.products.linear import linear_grad_p, linear_p, linear_tangent_p
from jax_layout.products.scaled import scaled_gemm_p
from jax_layout.rows import NOTHING_PROMISED
from jax_layout.segments import segment_extreme_p

# Those of other tests, and of doctests, are not ours to judge.
OPERATORS = {
    name: op
    for name, op in jl.operators().items()
    if op.lax.__module__.startswith("jax_layout.")
}


@dataclasses.dataclass(frozen=True)
class Example:
    """An application of an operator.

    Attributes:
      apply: the operator with its parameters, to be called with operands.
      operands: shapes of float64 operands, or other arrays as they stand. Even
        extents are sharded. Large enough for the kernel, if there is one.
      empty: shapes of operands for the same parameters, one extent or more 0.
      kernel: whether there is one for these dtypes.
      smooth: whether finite differences tell the derivative.
      atomic: whether a GPU adds in any order, so that runs differ in last bits.
    """

    apply: Callable[..., Any]
    operands: Sequence[Any]
    empty: Sequence[Any]
    kernel: bool = True
    smooth: bool = True
    atomic: bool = False


def index(*rows):
    return np.array(rows, np.int32)


partial = functools.partial
_PLAIN: dict[str, Any] = {
    "precision": None,
    "dtype": np.dtype("float64"),
    "out_sharding": None,
}
_PLAIN_GEMM = {
    "precision": None,
    "preferred_element_type": np.dtype("float64"),
    "out_sharding": None,
}

# NHWC, OIHW; kernels are for float32 and smaller, which test_convolution.py has.
_CONV = Convolution(
    x_order=(0, 3, 1, 2),
    w_order=(0, 1, 2, 3),
    y_order=(0, 3, 1, 2),
    x_size=(6, 5),
    w_size=(3, 2),
    y_size=(3, 5),
    stride=(2, 1),
    dilation=(1, 1),
    pad_low=(1, 0),
)
_X, _W, _Y = (2, 6, 5, 4), (6, 4, 3, 2), (2, 3, 5, 6)
_NO_X, _NO_Y = (0, *_X[1:]), (0, *_Y[1:])
_PACKED = MemoryFormat.named("IHWO2o")
_WINDOW = Window(3, 2, 1, 1, 1, 1, 7, 4)
_CHOSEN = (1 + np.arange(4 * 4 * 6) % 2).astype(np.uint8).reshape(4, 4, 6)
_FLOAT8 = np.dtype(jnp.float8_e4m3fn)

# Kernels are for float32 and smaller, which tests/attention has.
_ATTENTION: dict[str, Any] = {
    "q_axes": (0, 1, 2, 3, 4),
    "k_axes": (0, 1, 2, 3),
    "scale": 0.5,
    "causal": True,
    "window": (3, -1),
    "has": (True, False, False, True),
}
_HEADS_FIRST = _ATTENTION | {
    "q_axes": (0, 3, 1, 2, 4),
    "k_axes": (0, 2, 1, 3),
    "causal": False,
    "has": (False, True, True, False),
}
_Q, _K, _POOL = (2, 6, 2, 2, 4), (2, 8, 2, 4), (5, 4, 2, 4)
_QH, _KH = (2, 2, 2, 6, 4), (2, 2, 8, 4)
_BIAS = (1, 2, 1, 6, 8)
_MASK = np.arange(2 * 6 * 8).reshape(2, 1, 1, 6, 8) % 3 > 0
_SUMS = (2, 2, 2, 6, 2)
_NO_Q, _NO_QH = (2, 0, 2, 2, 4), (2, 2, 2, 0, 4)

EXAMPLES = {
    "conv": [
        Example(
            partial(conv_p, conv=_CONV, **_PLAIN), [_X, _W], [_NO_X, _W], kernel=False
        )
    ],
    "conv_input_grad": [
        Example(
            partial(conv_input_grad_p, conv=_CONV, **_PLAIN),
            [_Y, _W],
            [_NO_Y, _W],
            kernel=False,
        )
    ],
    "conv_weight_grad": [
        Example(
            partial(conv_weight_grad_p, conv=_CONV, **_PLAIN),
            [_X, _Y],
            [_NO_X, _NO_Y],
            kernel=False,
        )
    ],
    "conv_fused": [
        Example(
            partial(conv_fused_p, conv=_CONV, relu=relu, **_PLAIN),
            [_X, _W, (6,)],
            [_NO_X, _W, (6,)],
            kernel=False,
            smooth=not relu,
        )
        for relu in (False, True)
    ],
    "conv_packed": [
        Example(
            partial(conv_packed_p, conv=_CONV, relu=False, w_format=_PACKED, **_PLAIN),
            [_X, _PACKED.physical_shape(_W), (6,)],
            [_NO_X, _PACKED.physical_shape(_W), (6,)],
            kernel=False,
        )
    ],
    "interpolate": [
        Example(
            partial(resample_p, axis=1, map=_Resampling("linear", 5, 8, 5 / 8, False)),
            [(4, 5, 6)],
            [(0, 5, 6)],
        )
    ],
    "memory_format": [
        Example(
            partial(memory_format_p, format=MemoryFormat.named("NHWC")),
            [(2, 4, 6, 5)],
            [(2, 0, 6, 5)],
        )
    ],
    "moments": [
        Example(
            partial(moments_p, axes=(0, 2), differentiated=False),
            [(8, 16, 40)],
            [(0, 16, 40)],
        )
    ],
    "centered_sums": [
        Example(
            partial(centered_sums_p, axes=(0, 1)),
            [(10, 30, 16), (10, 30, 16), (16,)],
            [(10, 0, 16), (10, 0, 16), (16,)],
        )
    ],
    "centered_affine": [
        Example(
            partial(centered_affine_p, axes=(0, 2)),
            [(4, 6, 8), (6,), (6,), (6,)],
            [(4, 0, 8), (0,), (0,), (0,)],
        )
    ],
    "pool": [
        Example(
            partial(pool_p, kind=kind, axes=(2, 1), windows=(_WINDOW, _WINDOW)),
            [(4, 7, 7, 32)],
            [(0, 7, 7, 32)],
        )
        for kind in ("sum", "max")
    ],
    "pool_sum": [
        Example(
            partial(disjoint_sum_p, axis=1, window=Window(2, 2, 1, 0, -1, 0, 7, 3)),
            [(4, 7, 6)],
            [(0, 7, 6)],
        )
    ],
    "pool_pick": [
        Example(
            partial(pick_p, axis=1, window=_WINDOW),
            [(4, 7, 6), _CHOSEN],
            [(0, 7, 6), _CHOSEN[:0]],
        )
    ],
    "pool_spread": [
        Example(
            partial(spread_p, axis=1, window=_WINDOW),
            [(4, 4, 6), _CHOSEN],
            [(0, 4, 6), _CHOSEN[:0]],
        )
    ],
    "scaled_gemm": [
        Example(
            partial(scaled_gemm_p, spec="mk,nk->mn", dtype=np.dtype(np.float32)),
            [
                np.arange(-48, 48).reshape(6, 16).astype(_FLOAT8),
                np.arange(-32, 32).reshape(4, 16).astype(_FLOAT8),
                np.float32(0.5),
                np.float32(2),
            ],
            [
                np.zeros((0, 16), _FLOAT8),
                np.zeros((4, 16), _FLOAT8),
                np.float32(1),
                np.float32(1),
            ],
            kernel=False,
            smooth=False,
        )
    ],
    "permute": [
        Example(partial(permute_p, axes=(2, 0, 1)), [(16, 24, 32)], [(4, 0, 3)]),
        Example(partial(permute_p, axes=(1, 0)), [(98, 66)], [(0, 3)]),
    ],
    "gemm": [
        Example(
            partial(gemm_p, spec="bmk,bnk->bmn", alpha=2, beta=0, **_PLAIN_GEMM),
            [(4, 96, 80), (4, 64, 80)],
            [(4, 0, 8), (4, 6, 8)],
        ),
        Example(
            partial(gemm_p, spec="mk,kn->mn", alpha=1, beta=-1, **_PLAIN_GEMM),
            [(96, 80), (80, 64), (96, 64)],
            [(4, 0), (0, 6), (4, 6)],
        ),
    ],
    "linear": [
        Example(
            partial(
                linear_p, spec="bk,nk->bn", activation=activation, aux=aux, **_PLAIN
            ),
            [(96, 80), (64, 80), (64,)],
            [(0, 8), (6, 8), (6,)],
        )
        for activation, aux in ((None, False), ("gelu", True))
    ],
    "linear_tangent": [
        Example(
            partial(linear_tangent_p, spec="bk,nk->bn", given=(True,) * 3, **_PLAIN),
            [(6, 8), (4, 8), (6, 8), (4, 8), (4,)],
            [(0, 8), (4, 8), (0, 8), (4, 8), (4,)],
        )
    ],
    "linear_grad": [
        Example(
            partial(linear_grad_p, spec="bn,bk->nk", **_PLAIN),
            [(96, 64), (96, 80), (64, 80)][: 2 + addend],
            [(0, 6), (0, 8), (6, 8)][: 2 + addend],
        )
        for addend in (False, True)
    ],
    "attention": [
        Example(
            partial(attention_p, **_ATTENTION),
            [_Q, _K, _K, _BIAS, index(5, 8)],
            [_NO_Q, _K, _K, (1, 2, 1, 0, 8), index(5, 8)],
            kernel=False,
            smooth=False,  # the logarithms of sums have no gradient, as in jax.nn
        ),
        Example(
            partial(attention_p, **_HEADS_FIRST),
            [_QH, _KH, _KH, _MASK, index(6, 3)],
            [_NO_QH, _KH, _KH, _MASK[..., :0, :], index(0, 0)],
            kernel=False,
            smooth=False,
        ),
    ],
    "attention_tangent": [
        Example(
            partial(attention_tangent_p, biased=True, **_ATTENTION),
            [_Q, _K, _K, _BIAS, _Q, _K, _K, _BIAS, index(5, 8), _Q, _SUMS],
            [
                *(_NO_Q, _K, _K, (1, 2, 1, 0, 8)) * 2,
                *(index(5, 8), _NO_Q, (2, 2, 2, 0, 2)),
            ],
        ),
    ],
    "attention_backward": [
        Example(
            partial(attention_backward_p, biased=True, **_ATTENTION),
            [_Q, _Q, _K, _K, _BIAS, index(5, 8), _Q, _SUMS],
            [
                _NO_Q,
                _NO_Q,
                _K,
                _K,
                (1, 2, 1, 0, 8),
                index(5, 8),
                _NO_Q,
                (2, 2, 2, 0, 2),
            ],
            kernel=False,
        ),
        Example(
            partial(attention_backward_p, biased=False, **_HEADS_FIRST),
            [_QH, _QH, _KH, _KH, _MASK, index(6, 3), _QH, _SUMS],
            [
                _NO_QH,
                _NO_QH,
                _KH,
                _KH,
                _MASK[..., :0, :],
                index(0, 0),
                _NO_QH,
                (2, 2, 2, 0, 2),
            ],
            kernel=False,
        ),
    ],
    "update_cache": [
        Example(
            partial(update_cache_p, first=0, axis=1, strict=False),
            [(4, 6, 2), (4, 2, 2), index(0, 3, 5, -1)],
            [(4, 0, 2), (4, 2, 2), index(0, 3, 5, -1)],
        ),
        Example(
            partial(update_cache_p, first=1, axis=2, strict=False),
            [(4, 2, 6, 2), (4, 2, 1, 2), index(7, 3)],
            [(4, 2, 6, 2), (4, 2, 0, 2), index(7, 3)],
        ),
    ],
    "paged_attention": [
        Example(
            partial(paged_attention_p, **_ATTENTION),
            [_Q, _POOL, _POOL, _BIAS, index(5, 8), index([0, 4], [3, 7])],
            [_NO_Q, _POOL, _POOL, (1, 2, 1, 0, 8), index(5, 8), index([0, 4], [3, 7])],
            kernel=False,
            smooth=False,
        )
    ],
    "update_paged_cache": [
        Example(
            partial(update_paged_cache_p, first=0, axis=2, strict=False),
            [_POOL, (2, 4, 3, 4), index(1, 2), index([0, 4], [3, 7])],
            [(5, 4, 0, 4), (2, 4, 3, 4), index(1, 2), index([0, 4], [3, 7])],
        )
    ],
    "geam": [
        Example(
            partial(geam_p, alpha=2.0, beta=-0.5, transposes=(False, True)),
            [(384, 400), (400, 384)],
            [(0, 3), (3, 0)],
        )
    ],
    "index_select": [
        Example(
            partial(index_select_p, axis=1, mode="clip"),
            [(12, 6, 10), index(3, 0, -1, 3, 7, -9)],
            [(12, 0, 10), index()],
        ),
        Example(
            partial(index_select_p, axis=2, mode="zero"),
            [(4, 6, 8), np.arange(-24, 24, dtype=np.int32).reshape(4, 12)],
            [(4, 0, 8), np.zeros((4, 2), np.int32)],
        ),
    ],
    "index_add": [
        Example(
            partial(index_add_p, axis=1, extent=6, clip=True, deterministic=True),
            [index(3, 0, -1, 3, 7, -9), (12, 6, 10), (12, 6, 10)],
            [index(), (12, 0, 10), (12, 6, 10)],
        ),
        Example(
            partial(index_add_p, axis=0, extent=8, clip=False, deterministic=True),
            [index(3, 0, -1, 3, 8, -9), (6, 96)],
            [index(3), (1, 0)],
        ),
        Example(
            partial(
                index_add_p,
                axis=1,
                extent=6,
                clip=False,
                wrap=False,
                deterministic=True,
            ),
            [index(3, 0, -1, 3, 7, -9), (12, 6, 10), (12, 6, 10)],
            [index(), (12, 0, 10), (12, 6, 10)],
            atomic=True,  # XLA's scatter: segments are jax's there
        ),
    ],
    "segment_extreme": [
        Example(
            partial(
                segment_extreme_p,
                axis=1,
                extent=6,
                clip=True,
                promised=NOTHING_PROMISED,
                least=least,
            ),
            [index(3, 0, -1, 3, 7, 0, 1, 2, 4), (12, 9, 10)],
            [index(), (12, 0, 10)],
        )
        for least in (False, True)
    ],
}

CASES = [
    pytest.param(name, example, id=f"{name}-{i}")
    for name, examples in EXAMPLES.items()
    for i, example in enumerate(examples)
]
every = pytest.mark.parametrize("name, example", CASES)


def arrays(described: Sequence[Any], lead: tuple[int, ...] = ()) -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(np.broadcast_to(x, (*lead, *x.shape)))
        if isinstance(x, np.ndarray | np.generic)
        else jnp.asarray(rng.standard_normal((*lead, *x)))
        for x in described
    ]


def leaves(out):
    return list(out) if isinstance(out, list | tuple) else [out]


def close(a, b, scale=1e-12):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y = np.asarray(x), np.asarray(y)
        # Results in float32 are of 8-bit operands, as integers exact or nearly.
        rtol = 1e-10 if x.dtype.itemsize > 4 else 1e-6
        if x.dtype == _FLOAT8 and jax.default_backend() != "cpu":
            # A GPU's cosine may round to the next of 8 bits, beside a CPU's.
            rtol = float(jnp.finfo(x.dtype).eps)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=scale * np.sqrt(x.size or 1))


def floating(operands):
    return [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]


def lax_of(name: str, example: Example) -> Callable[..., Any]:
    return partial(OPERATORS[name].lax, **example.apply.keywords)


def test_every_operator_has_examples():
    assert OPERATORS.keys() == EXAMPLES.keys()


@every
def test_it_means_its_lax_function(name, example):
    operands = arrays(example.operands)
    expected = lax_of(name, example)(*operands)
    close(example.apply(*operands), expected, 1e-11)
    hlo = compiled(example.apply, *operands)
    op = OPERATORS[name]
    has = example.kernel and op.kernel is not None and "cpu" in op.platforms
    if has:
        assert kernels(hlo) == 1
    else:  # at most those of the operators that it is made of
        assert f'"jax_layout_{name}"' not in hlo


@every
def test_shape_rule(name, example):
    operands = arrays(example.operands)
    abstract = leaves(jax.eval_shape(example.apply, *operands))
    plain = leaves(jax.eval_shape(lax_of(name, example), *operands))
    for given, shape, lax in zip(
        leaves(example.apply(*operands)), abstract, plain, strict=True
    ):
        assert given.shape == shape.shape == lax.shape
        assert given.dtype == shape.dtype == lax.dtype


@every
def test_jit(name, example):
    operands = arrays(example.operands)
    eager, jitted = example.apply(*operands), jax.jit(example.apply)(*operands)
    if example.atomic and jax.default_backend() != "cpu":
        return close(eager, jitted)
    for a, b in zip(leaves(eager), leaves(jitted), strict=True):
        np.testing.assert_array_equal(a, b)


@every
def test_gradients(name, example):
    """Against finite differences, in every operand that has a derivative."""
    if not example.smooth:
        pytest.skip("no finite differences of what is rounded or has a kink")
    op, operands = OPERATORS[name], arrays(example.operands)
    where = floating(operands)

    def f(*inexact):
        given = dict(zip(where, inexact, strict=True))
        return example.apply(*(given.get(i, x) for i, x in enumerate(operands)))

    assert op.jvp or op.transpose
    inexact = [operands[i] for i in where]
    check_grads(f, inexact, order=2, modes=("fwd", "rev"), rtol=1e-5, atol=1e-5)


@every
def test_vmap(name, example):
    """Each operand alone, all of them, and from the last axis."""
    plain, batched = arrays(example.operands), arrays(example.operands, (3,))
    count = len(plain)
    choices = [{i} for i in range(count)] + [set(range(count))]
    for mapped, last in itertools.product(choices, (False, True)):
        dims = [(-1 if last else 0) if i in mapped else None for i in range(count)]
        operands = [
            plain[i] if d is None else jnp.moveaxis(batched[i], 0, d)
            for i, d in enumerate(dims)
        ]
        out = jax.vmap(example.apply, dims)(*operands)
        each = [
            example.apply(
                *(batched[i][k] if i in mapped else plain[i] for i in range(count))
            )
            for k in range(3)
        ]
        if isinstance(out, list | tuple):
            close(out, [jnp.stack(ys) for ys in zip(*each, strict=True)])
        else:
            close(out, jnp.stack(each))


@every
def test_sharded(name, example):
    """Each axis of each operand, or one of each of many, forward and backward."""
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    operands = arrays(example.operands)
    where = floating(operands)

    def loss(*operands):
        return sum(jnp.sum(jnp.sin(y)) for y in leaves(example.apply(*operands)))

    both = jax.jit(lambda *x: (example.apply(*x), jax.grad(loss, where)(*x)))
    expected, gradients = both(*operands)
    for i, x in enumerate(operands):
        axes = [axis for axis in range(x.ndim) if x.shape[axis] % 2 == 0]
        if len(operands) > 4 and axes:  # XLA takes a second for each of these
            axes = [axes[i % len(axes)]]
        for axis in axes:
            spec = P(*(None,) * axis, "a")
            placed = [
                jax.device_put(y, NamedSharding(mesh, spec if j == i else P()))
                for j, y in enumerate(operands)
            ]
            out, grads = both(*placed)
            close(out, expected)
            close(grads, gradients, 1e-11)


@every
def test_zero_size(name, example):
    operands = arrays(example.empty)
    assert any(x.size == 0 for x in operands)
    close(jax.jit(example.apply)(*operands), lax_of(name, example)(*operands))
