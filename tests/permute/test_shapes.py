# SPDX-License-Identifier: Apache-2.0
"""Shapes and errors of every public operator, without values: `jax.eval_shape`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl


def a(*shape, dtype="float32"):
    """An argument that is only a shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


X = a(2, 4, 6, 6)
I3 = a(3, dtype="int32")
KEY = jax.eval_shape(lambda: jax.random.key(0))
# operator: operands, other arguments, and operands that it rejects with the same
# other arguments; None where all go.
CASES = {
    "adaptive_avg_pool": ([X], dict(output_size=3), [a(4)]),
    "adaptive_max_pool": ([X], dict(output_size=(2, 3)), [a(4)]),
    "add": ([X, a(4, 1, 1)], {}, [X, a(5)]),
    "addbmm": ([a(3, 5), a(2, 3, 4), a(2, 4, 5)], {}, [a(3, 5), a(2, 3), a(2, 4, 5)]),
    "addmm": ([a(5), a(3, 4), a(4, 5)], {}, [a(5), a(3, 4), a(5, 4)]),
    "avg_pool": ([X], dict(kernel_size=2), [a(4)]),
    "baddbmm": ([a(5), a(2, 3, 4), a(2, 4, 5)], {}, [a(5), a(2, 3, 4), a(3, 4, 5)]),
    "batch_norm": ([X, a(4), a(4)], {}, [X, a(3), a(4)]),
    "bmm": ([a(2, 3, 4), a(2, 4, 5)], {}, [a(2, 3, 4), a(3, 4, 5)]),
    "channel_shuffle": ([X], dict(groups=2), [a(2, 3, 6, 6)]),
    "concatenate": ([[X, X]], dict(dim=1), [[X, a(2, 4, 6)]]),
    "conv": ([X, a(8, 4, 3, 3), a(8)], dict(padding=1), [X, a(8, 3, 3, 3), a(8)]),
    "conv_general_dilated": (
        [X, a(8, 4, 3, 3)],
        dict(window_strides=(2, 2), padding="SAME"),
        [X, a(8, 3, 3, 3)],
    ),
    "conv_transpose": ([X, a(4, 8, 3, 3)], dict(stride=2), [X, a(3, 8, 3, 3)]),
    "divide": ([X, X], {}, [X, a(5)]),
    "dot_general": (
        [a(3, 4), a(4, 5)],
        dict(dimension_numbers=(([1], [0]), ([], []))),
        [a(3, 4), a(5, 4)],
    ),
    "dot_product_attention": (3 * [a(2, 3, 4, 8)], {}, [*2 * [a(2, 3, 4, 8)], a(2, 3)]),
    "dropout": ([X, KEY], dict(p=0.25), None),
    "dropout2d": ([X, KEY], dict(p=0.25), [a(4), KEY]),
    "einsum": (["bij,bkj->bki", a(2, 3, 4), a(2, 5, 4)], {}, ["ij,kj->ki", X, X]),
    "empty_like": ([X], dict(dtype="int8"), None),
    "full_like": ([X], dict(fill_value=2), None),
    "geam": ([a(3, 4), a(4, 3)], dict(transpose_b=True), [a(3, 4), a(4, 4)]),
    "gelu": ([X], dict(approximate="tanh"), None),
    "gemm": ([a(4, 3), a(5, 4)], dict(transpose_a=True, transpose_b=True), [a(3), X]),
    "group_norm": ([X, 2, a(4)], {}, [X, 3, a(4)]),
    "hardswish": ([X], {}, None),
    "index_add": ([a(5, 2), 0, I3, a(3, 2)], {}, [a(5, 2), 0, I3, a(4, 2)]),
    "index_select": ([a(5, 2), 0, I3], {}, [a(5, 2), 2, I3]),
    "instance_norm": ([X, a(4), a(4)], {}, [X, a(3), a(4)]),
    "interpolate": ([X], dict(scale_factor=1.5, mode="bilinear"), [a(4)]),
    "layer_norm": ([X, (6, 6)], {}, [X, (5, 6)]),
    "leaky_relu": ([X], dict(negative_slope=0.1), None),
    "linear": ([a(2, 3, 4), a(5, 4), a(5)], {}, [a(2, 3, 4), a(5, 3), a(5)]),
    "log_softmax": ([X], dict(dim=1), None),
    "matmul": ([a(2, 3, 4), a(4, 5)], {}, [a(2, 3, 4), a(5, 5)]),
    "matrix_transpose": ([a(2, 3, 4)], {}, [a(3)]),
    "max_pool": ([X], dict(kernel_size=3, stride=2, padding=1), [a(4)]),
    "max_unpool": (
        [X, a(2, 4, 6, 6, dtype="int32")],
        dict(kernel_size=2),
        [X, a(2, 4, 6, 5, dtype="int32")],
    ),
    "maximum": ([X, X], {}, [X, a(5)]),
    "minimum": ([X, X], {}, [X, a(5)]),
    "mm": ([a(3, 4), a(4, 5)], {}, [a(3, 4), a(5, 4)]),
    "moveaxis": ([X], dict(source=1, destination=-1), [a(3)]),
    "multiply": ([X, a(6)], {}, [X, a(5)]),
    "ones_like": ([X], {}, None),
    "pad": ([X, (1, 2)], dict(mode="reflect"), [X, (1, 2, 3)]),
    "permute": ([X], dict(axes=(0, 2, 3, 1)), [a(2, 3)]),
    "pixel_shuffle": ([X], dict(upscale_factor=2), [a(2, 3, 6, 6)]),
    "pixel_unshuffle": ([X], dict(downscale_factor=3), [a(2, 3, 7, 6)]),
    "relu": ([X], {}, None),
    "relu6": ([X], {}, None),
    "sigmoid": ([X], {}, None),
    "silu": ([X], {}, None),
    "softmax": ([X], dict(dim=-1), None),
    "subtract": ([X, X], {}, [X, a(5)]),
    "swapaxes": ([X], dict(axis1=0, axis2=2), [a(3)]),
    "tanh": ([X], {}, None),
    "tensordot": ([a(3, 4), a(4, 5)], dict(axes=1), [a(3, 4), a(5, 4)]),
    "transpose": ([X], dict(axes=(3, 1, 0, 2)), [a(3)]),
    "where": ([a(6, dtype="bool"), X, X], {}, [a(5, dtype="bool"), X, X]),
    "with_memory_format": ([X], dict(memory_format=jl.channels_last), [a(4)]),
    "zeros_like": ([X], {}, None),
}
# Those that update in place want what the others want.
CASES |= {f"{name}_": CASES[name] for name in ("addbmm", "addmm", "baddbmm")}
CASES["addbmm_"] = ([a(3, 5), *CASES["addbmm"][0][1:]], {}, CASES["addbmm"][2])
CASES["addmm_"] = ([a(3, 5), *CASES["addmm"][0][1:]], {}, CASES["addmm"][2])
CASES["baddbmm_"] = ([a(2, 3, 5), *CASES["baddbmm"][0][1:]], {}, CASES["baddbmm"][2])
for name in ("segment_max", "segment_min", "segment_sum"):
    CASES[name] = ([a(3, 2), I3], dict(num_segments=4), [a(3, 2), a(3)])
CASES["update_cache"] = (
    [a(2, 6, 3), a(2, 1, 3), a(2, dtype="int32")],
    {},
    [a(2, 6, 3), a(2, 1, 4), a(2, dtype="int32")],
)
# What else is public: of functions, files, formats and plans.
OTHERS = set(
    "batch_of conv_weight_format define elementwise explain explain_gemm install "
    "installed is_contiguous jvp_of keep_memory load load_plan memory_format operators "
    "optimize_layout plan_layout profile save save_gemms trim_memory tune_gemms "
    "uninstall use_choices".split()
)


def is_shape(x):
    return isinstance(x, jax.ShapeDtypeStruct)


def value(x):
    if not is_shape(x):
        return x
    if x.dtype == KEY.dtype:
        return jax.random.key(0)
    return jnp.zeros(x.shape, x.dtype)


def without_values(name, operands, options):
    """The operator on its operands that are shapes; the rest stands."""
    leaves, tree = jax.tree.flatten(operands)

    def f(*shapes):
        given = iter(shapes)
        filled = [next(given) if is_shape(x) else x for x in leaves]
        return getattr(jl, name)(*jax.tree.unflatten(tree, filled), **options)

    return jax.eval_shape(f, *filter(is_shape, leaves))


def with_values(name, operands, options):
    return getattr(jl, name)(*jax.tree.map(value, operands), **options)


def test_every_public_operator_has_a_case():
    functions = {name for name in jl.__all__ if callable(getattr(jl, name))}
    classes = {name for name in functions if isinstance(getattr(jl, name), type)}
    assert set(CASES) == functions - classes - OTHERS


@pytest.mark.parametrize("name", sorted(CASES))
def test_shapes(name):
    operands, options, _ = CASES[name]
    found = jax.tree.leaves(without_values(name, operands, options))
    expected = jax.tree.leaves(with_values(name, operands, options))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


@pytest.mark.parametrize("name", sorted(n for n in CASES if CASES[n][2] is not None))
def test_errors(name):
    _, options, operands = CASES[name]
    with pytest.raises((TypeError, ValueError)) as expected:
        with_values(name, operands, options)
    with pytest.raises(expected.type) as found:
        without_values(name, operands, options)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    "f, operands, shape",
    [
        (jl.mm, [a(10**6, 10**6), a(10**6, 10**5)], (10**6, 10**5)),
        (functools.partial(jl.permute, axes=(1, 0)), [a(10**6, 9)], (9, 10**6)),
        (jl.conv, [a(10**5, 3, 999, 999), a(8, 3, 1, 1)], (10**5, 8, 999, 999)),
    ],
    ids=["mm", "permute", "conv"],
)
def test_nothing_runs(f, operands, shape):
    """Nor has this machine the memory."""
    assert np.prod(shape) and jax.eval_shape(f, *operands).shape == shape
