# SPDX-License-Identifier: Apache-2.0
"""save and load: values, structure, formats, and what other readers see."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_layout as jl
from jax_layout.formats.serialization import _DTYPES

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert getattr(x, "dtype", type(x)) == getattr(y, "dtype", type(y))
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("format", ["NCHW", "NHWC", "CHWN", "HWCN"])
def test_formats_are_restored_and_written_as_they_lie(tmp_path, format):
    numpy = pytest.importorskip("safetensors.numpy")
    x = jl.with_memory_format(X, format)
    jl.save(tmp_path / "x", {"x": x})
    y = jl.load(tmp_path / "x")["x"]
    assert str(jl.memory_format(y)) == format
    np.testing.assert_array_equal(y, X)
    axes = jl.MemoryFormat.named(format).permutation
    raw = numpy.load_file(tmp_path / "x")["x"]
    np.testing.assert_array_equal(raw, X.transpose(axes))


def test_structure(tmp_path):
    tree = {
        "layers": [{"w": jnp.ones((2, 3)), "b": None}, ({}, (), [])],
        "a.b": jnp.zeros(()),
        "a": {"b": jnp.ones((0, 4)), "c": {1: jnp.arange(3), 0: jnp.arange(2)}},
        "step": 3,
        "rate": 1e-3,
        "name": "a",
        "on": True,
    }
    jl.save(tmp_path / "x", tree)
    same(jl.load(tmp_path / "x"), tree)
    jl.save(tmp_path / "leaf", jnp.arange(3))
    same(jl.load(tmp_path / "leaf"), jnp.arange(3))


@pytest.mark.parametrize("dtype", _DTYPES.values())
def test_dtypes(tmp_path, dtype):
    x = [jnp.arange(6).reshape(2, 3).astype(dtype)]
    jl.save(tmp_path / "x", x)
    same(jl.load(tmp_path / "x"), x)


def test_what_keeps_a_format_when_copied(tmp_path):
    """Pickle and deepcopy are jax's own: values, row-major."""
    x = jl.with_memory_format(X, jl.channels_last)
    for y in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert str(jl.memory_format(y)) == "NCHW"
        np.testing.assert_array_equal(y, X)
    packed = jl.FormattedArray.pack(x, "NHWC")
    for z in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert z.format == packed.format
        np.testing.assert_array_equal(z.physical, X.transpose(0, 2, 3, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: jax.Array
    bias: jax.Array


def test_template_for_other_pytrees(tmp_path):
    tree = [Layer(jl.with_memory_format(X, jl.channels_last), jnp.ones(3))]
    jl.save(tmp_path / "x", tree)
    loaded = jl.load(tmp_path / "x", like=[Layer(0, 0)])
    same(loaded, tree)
    assert jl.is_contiguous(loaded[0].weight, jl.channels_last)
    with pytest.raises(
        ValueError, match=r"load: the pytree has nodes other than dicts"
    ):
        jl.load(tmp_path / "x")
    with pytest.raises(
        ValueError, match=r"load: like must have as many leaves as .* 2"
    ):
        jl.load(tmp_path / "x", like=[0])


@pytest.mark.parametrize(
    "leaf, message",
    [
        (jax.random.key(0), r"no dtype key<fry>, found at \['k'\]\[1\]"),
        (np.zeros(2, np.complex128), r"no dtype complex128, found at \['k'\]\[1\]"),
        (object(), r"must be an array, a number or a string, got object at"),
    ],
)
def test_bad_leaves(tmp_path, leaf, message):
    with pytest.raises(TypeError, match=message):
        jl.save(tmp_path / "x", {"k": [1, leaf]})


def test_tracers_and_foreign_files_are_rejected(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    with pytest.raises(TypeError, match=r"save: arrays must be concrete"):
        jax.jit(lambda x: jl.save(tmp_path / "x", x))(X)
    numpy.save_file({"x": X}, tmp_path / "foreign")
    (tmp_path / "text").write_text("some text, which is no header")
    with pytest.raises(ValueError, match=r"load: .*text is not in the safetensors"):
        jl.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match="absent"):
        jl.load(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"was not written by jax_layout.save"):
        jl.load(tmp_path / "foreign")
