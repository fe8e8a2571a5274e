# SPDX-License-Identifier: Apache-2.0
"""What several operators ask of their arguments."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import DotAlgorithmPreset, Precision


def arrays(name: str, **given: Any) -> list[Array]:
    for argument, x in given.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"{name}: {argument} must be an array, got {type(x).__name__}."
            )
        check_dtype(name, argument, x)
    # A traced array as it is: only it remembers its memory format.
    return [x if isinstance(x, Array) else jnp.asarray(x) for x in given.values()]


def check_dtype(name: str, argument: str, x: Any) -> None:
    """Refuses NumPy's arrays of what is no number, such as strings."""
    if isinstance(x, np.ndarray | np.generic):
        try:
            jax.typeof(x)
        except TypeError:
            raise TypeError(
                f"{name}: {argument} must hold numbers, got dtype {x.dtype}."
            ) from None


def scalar(name: str, argument: str, value: Any, dtype: np.dtype) -> Any:
    """A Python number that fits the dtype, or an array of shape ()."""
    integral = jnp.issubdtype(dtype, jnp.integer)
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    if isinstance(value, Array | np.ndarray):
        value = jnp.asarray(value)
        kind = value.dtype
        if value.shape != ():
            raise ValueError(
                f"{name}: {argument} must be a number, got shape {value.shape}."
            )
    elif isinstance(value, numbers.Number | np.generic):
        value = value.item() if isinstance(value, np.generic) else value
        kind = np.dtype(int if isinstance(value, bool) else type(value))
    else:
        raise TypeError(
            f"{name}: {argument} must be a number, got {type(value).__name__}."
        )
    if integral and not jnp.issubdtype(kind, jnp.integer):
        raise TypeError(
            f"{name}: for integer arrays {argument} must be an integer, got {value}."
        )
    if real and jnp.issubdtype(kind, jnp.complexfloating):
        raise TypeError(
            f"{name}: for real arrays {argument} must be real, got {value}."
        )
    if isinstance(value, Array):
        return value.astype(accumulator(dtype))
    if integral:
        return int(value)
    return float(value) if real else complex(value)


def accumulator(dtype: Any) -> np.dtype:
    """The dtype in which products of a dtype are summed."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return np.dtype(np.float32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32:
        return np.dtype(np.int32)
    return np.dtype(dtype)


def sent(dtype: np.dtype) -> np.dtype:
    """The dtype in which parts of a sum go from device to device.

    The result's, as those of `jax.lax.dot_general`: float32 is twice the bytes of 16
    bits, and what is converted after it was sent, XLA does not add to others before.
    """
    return dtype if dtype.itemsize > 1 else accumulator(dtype)


def same_kind(*dtypes: Any) -> bool:
    """Whether numbers of these dtypes differ in their precision alone.

    An integer that is made narrower is another number.
    """
    kinds = (jnp.floating, jnp.complexfloating)
    return len(set(map(np.dtype, dtypes))) == 1 or any(
        all(jnp.issubdtype(dtype, kind) for dtype in dtypes) for kind in kinds
    )


def widest(*dtypes: Any) -> np.dtype:
    """The dtype that holds values of all, also where jax is told to promote none."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def placement(aval: Any) -> Any:
    """The sharding of a value on an Explicit mesh, else None."""
    sharding = aval.sharding
    return None if sharding is None or sharding.mesh.empty else sharding


def may_be_tf32(operand: np.dtype, result: np.dtype, precision: Any) -> bool | None:
    """Whether TF32 will do, of 8-bit floats fast sums; None if kernels cannot obey."""
    if isinstance(precision, DotAlgorithmPreset):
        float32 = np.dtype(np.float32)
        obeyed = {
            DotAlgorithmPreset.DEFAULT: True,
            DotAlgorithmPreset.F32_F32_F32: operand == float32 == result,
            DotAlgorithmPreset.TF32_TF32_F32: operand == float32 == result,
            DotAlgorithmPreset.F64_F64_F64: operand == np.float64,
            DotAlgorithmPreset.BF16_BF16_F32: operand == jnp.bfloat16,
            DotAlgorithmPreset.F16_F16_F32: operand == np.float16,
        }
        if not obeyed.get(precision, False):
            return None
        return precision != DotAlgorithmPreset.F32_F32_F32
    if precision is None:
        return True
    if isinstance(precision, tuple) and all(
        isinstance(p, Precision) for p in precision
    ):
        high = {Precision.HIGH} if operand.itemsize > 1 else set()
        return {Precision.DEFAULT, *high}.issuperset(precision)
    return None
