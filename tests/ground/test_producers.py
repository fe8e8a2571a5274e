# SPDX-License-Identifier: Apache-2.0
"""What XLA writes out before and after a convolution: nothing it need not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import jax_layout as jl
from hlo import count, kernels
from jax_layout import _backends

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the CPU backend is not built"
)
X = (2, 32, 12, 10)
DENSE, DEPTHWISE, GROUPED = (32, 32, 3, 3), (32, 1, 3, 3), (32, 8, 3, 3)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def conv(x, w):
    return jl.conv(x, w, padding=1, groups=x.shape[-3] // w.shape[1])


def moves(f, *args, **options):
    hlo = jax.jit(f, **options).lower(*args).compile().as_text()
    assert "jax_layout_conv" in hlo
    return count("copy", hlo) + count("transpose", hlo)


def formats(*orders):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [None if o is None else Format(Layout(o), place) for o in orders]


NHWC = (0, 2, 3, 1)


@pytest.mark.parametrize("weight", [DENSE, DEPTHWISE, GROUPED])
def test_transposes_are_read_through(weight):
    x, w = arrays(X, weight)
    last = jnp.transpose(x, NHWC)
    there = lambda x, w: conv(jnp.transpose(x, (0, 3, 1, 2)), w)  # noqa: E731
    np.testing.assert_allclose(there(last, w), conv(x, w), atol=1e-4)
    assert moves(there, last, w, out_shardings=formats(NHWC)[0]) == 0
    # Twice, and of what is computed.
    twice = lambda x, w: there(jnp.transpose(jnp.sin(x.T), (3, 2, 1, 0)), w)  # noqa: E731
    np.testing.assert_allclose(
        jax.jit(twice)(last, w), there(jnp.sin(last), w), atol=1e-4
    )


@pytest.mark.parametrize("weight", [DENSE, DEPTHWISE, GROUPED])
def test_arguments_are_read_in_the_layout_they_have(weight):
    x, w = arrays(X, weight)
    layouts = formats(NHWC, None)
    options = {"in_shardings": tuple(layouts), "out_shardings": layouts[0]}
    assert moves(conv, x, w, **options) == 0


def test_a_lone_depthwise_convolution_stays_row_major():
    x, w = arrays(X, DEPTHWISE)
    assert moves(conv, x, w) == 0
    assert moves(lambda x, w: conv(2 * x + jnp.abs(x), w), x, w) == 0
    loss = lambda x, w: jnp.sum(conv(x, w) ** 2)  # noqa: E731
    assert moves(jax.grad(loss, (0, 1)), x, w) == 0
    got = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    plain = lambda x, w: jnp.sum(jax.lax.conv_general_dilated(  # noqa: E731
        x, w, (1, 1), "SAME", feature_group_count=32) ** 2)  # fmt: skip
    for a, b in zip(got, jax.grad(plain, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2)


def test_so_does_one_in_groups_of_few_channels():
    x, w = arrays(X, GROUPED)
    assert moves(conv, x, w) == 0
    assert moves(lambda x, w: conv(2 * x + jnp.abs(x), w), x, w) == 0


def test_between_dense_ones_it_is_channels_last():
    x, w, v = arrays(X, DENSE, DEPTHWISE)
    net = lambda x, w, v: conv(jax.nn.relu(conv(conv(x, w), v)), w)  # noqa: E731
    assert moves(net, x, w, v) <= 2  # where values enter and leave
    hlo = jax.jit(net).lower(x, w, v).compile().as_text()
    assert kernels(hlo) == 3


@pytest.mark.parametrize("weight", [DENSE, DEPTHWISE, GROUPED])
def test_eager_arrays_stay_as_they_lie(weight):
    x, w = arrays(X, weight)
    last = jl.with_memory_format(x, jl.channels_last)
    y = conv(last, w)
    assert jl.is_contiguous(y, jl.channels_last)
    np.testing.assert_allclose(y, conv(x, w), atol=1e-4)
    np.testing.assert_array_equal(jl.relu(last), jax.nn.relu(x))


def test_other_regions_keep_their_meaning():
    x, w = arrays(X, DEPTHWISE)
    expected = conv(conv(x, w), w)
    scanned = jax.lax.scan(lambda x, _: (conv(x, w), None), x, length=2)[0]
    np.testing.assert_allclose(scanned, expected, atol=1e-3)
    inner = jax.jit(conv)
    f = jax.jit(lambda x, w: inner(inner(x, w), w))
    np.testing.assert_allclose(f(x, w), expected, atol=1e-3)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(lambda x: conv(conv(x, w), w)))(x[:, None])[:, 0],
        expected,
        atol=1e-3,
    )
