# SPDX-License-Identifier: Apache-2.0
"""The FFI target of the GEMM on CPUs, against NumPy in the widest types."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jax_layout import _backends

if not _backends.available("cpu"):
    pytest.skip("no CPU kernels", allow_module_level=True)

from jax_layout import _cpu  # noqa: E402

TYPES = [
    ("float32", "float32"),
    ("float64", "float64"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
    ("int8", "int32"),
    ("complex64", "complex64"),
    ("complex128", "complex128"),
]
REAL = [types for types in TYPES if types[0][:3] not in ("com", "int")]
# Relative to the sums of magnitudes.
TOLERANCE = {
    "float32": 2e-6,
    "float64": 1e-14,
    "bfloat16": 2**-8,
    "float16": 2**-10,
    "int32": 0,
    "complex64": 2e-6,
    "complex128": 1e-14,
}
SPECS = ["mk,kn->mn", "km,kn->mn", "mk,nk->mn", "km,nk->mn", "mk,kn->nm"]
SIZES = [1, 2, 3, 7, 31, 33, 64, 100]


@pytest.fixture(autouse=True)
def supported(request):
    types = (
        request.node.callspec.params.get("types")
        if hasattr(request.node, "callspec")
        else None
    )
    if not _cpu.gemm_supported(*(types or ("float32", "float32"))):
        pytest.skip("no kernel for these types on this machine")


def sample(rng, shape, dtype):
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(-9, 10, shape), dtype)
    x = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x, dtype)


def shapes_of(spec, **extents):
    terms = spec.replace("->", ",").split(",")
    return [tuple(extents[label] for label in term) for term in terms]


def rows_and_columns(spec):
    """How many rows and columns y has as the kernel sees it, where there are two."""
    a, _, y = spec.replace("->", ",").split(",")
    return y if y[0] in a else y[::-1]


def gemm(
    spec,
    a,
    b,
    result,
    *,
    alpha=1,
    beta=0,
    addend=None,
    bias=None,
    activation="none",
    derivative="none",
    read_aux=None,
    aux=False,
    sums=0,
    y_shape=None,
    method="",
):
    """Calls the target; the results as a list."""
    extents = dict(
        zip(spec.replace(",", "").split("->")[0], a.shape + b.shape, strict=True)
    )
    y_shape = y_shape or tuple(extents[label] for label in spec.split("->")[1])
    y = jax.ShapeDtypeStruct(y_shape, result)
    results = [y] + [y] * aux
    if sums:
        results.append(jax.ShapeDtypeStruct((sums,), result))
    operands = [a, b] + [x for x in (addend, bias, read_aux) if x is not None]
    call = jax.ffi.ffi_call(
        "jax_layout_gemm",
        results,
        input_output_aliases={2: 0} if addend is not None else {},
    )
    pair = [np.array([np.real(x), np.imag(x)], np.float64) for x in (alpha, beta)]
    return jax.jit(
        lambda *operands: call(
            *operands,
            spec=spec,
            a_shape=np.array(a.shape, np.int64),
            b_shape=np.array(b.shape, np.int64),
            operand_type=str(a.dtype),
            result_type=str(jnp.dtype(result)),
            alpha=pair[0],
            beta=pair[1],
            activation=activation,
            derivative=derivative,
            bias=bias is not None,
            aux=aux,
            sums=bool(sums),
            workspace=False,
            tf32=False,
            scales=0,
            method=method,
            a_part=False,
            b_part=False,
        )
    )(*operands)


def wide(x):
    x = np.asarray(x)
    kind = "complex128" if np.iscomplexobj(x) else "float64"
    return x.astype(kind)


def check(got, expected, magnitude):
    """Compares with an error bound in proportion to a sum of magnitudes."""
    tolerance = TOLERANCE[str(got.dtype)]
    error = np.abs(wide(got) - expected)
    bound = tolerance * (np.abs(magnitude) + 1e-3)
    assert np.all(error <= bound), (error - bound).max()


def gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def gelu_derivative(z):
    t = np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope


def gelu_erf(z):
    return 0.5 * z * scipy.special.erfc(-z / np.sqrt(2))


ACTIVATIONS = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": gelu,
    "gelu_erf": gelu_erf,
}
DERIVATIVES = {"relu": lambda z: z > 0, "gelu": gelu_derivative}


def random_case(spec, types, seed=0, **extents):
    rng = np.random.default_rng(seed)
    a_shape, b_shape, y_shape = shapes_of(spec, **extents)
    a, b = sample(rng, a_shape, types[0]), sample(rng, b_shape, types[0])
    product = np.einsum(spec, wide(a), wide(b))
    magnitude = np.einsum(spec, np.abs(wide(a)), np.abs(wide(b)))
    return rng, a, b, y_shape, product, magnitude


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("spec", SPECS)
def test_product(spec, types):
    sizes = np.random.default_rng(len(spec)).permutation(SIZES)
    for i in range(len(SIZES)):
        m, n, k = sizes[i], sizes[i - 1], sizes[i - 3]
        _, a, b, _, product, magnitude = random_case(spec, types, m=m, n=n, k=k)
        (y,) = gemm(spec, a, b, types[1])
        check(y, product, magnitude)


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize(
    "extents", [(1000, 130, 200), (8, 2000, 300), (700, 1, 513), (1, 900, 1100)]
)
def test_product_in_tiles(extents, types):
    m, n, k = extents
    for spec in SPECS:
        _, a, b, _, product, magnitude = random_case(spec, types, m=m, n=n, k=k)
        (y,) = gemm(spec, a, b, types[1])
        check(y, product, magnitude)


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize(
    "spec",
    [
        "bmk,bkn->bmn",
        "bshd,bthd->bhst",
        "bhst,bthd->bshd",
        "bsm,mhd->bhsd",
        "bshd,mhd->bsm",
        "mbk,kbn->bnm",
        "bk,bk->b",
        "m,n->mn",
    ],
)
def test_loops_over_strided_operands(spec, types):
    extents = dict(b=3, s=33, t=20, h=4, d=16, m=24, k=17, n=10)
    _, a, b, _, product, magnitude = random_case(spec, types, **extents)
    (y,) = gemm(spec, a, b, types[1])
    check(y, product, magnitude)


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("alpha, beta", [(1, 1), (2, 0), (-1, 3), (0, 2), (0, 0)])
def test_alpha_and_beta(alpha, beta, types):
    if types[0].startswith("complex"):
        alpha, beta = alpha + 2j * alpha, beta - 1j * beta
    elif types[0] != "int8":
        alpha, beta = alpha * 0.75, beta * 0.625
    for spec in ("mk,nk->mn", "bmk,bkn->bmn"):
        rng, a, b, y_shape, product, magnitude = random_case(
            spec, types, b=2, m=65, n=70, k=33
        )
        addend = sample(rng, y_shape, types[1])
        expected = alpha * product + beta * wide(addend)
        magnitude = abs(alpha) * magnitude + abs(beta) * np.abs(wide(addend))
        addend = addend if beta else None
        (y,) = gemm(spec, a, b, types[1], alpha=alpha, beta=beta, addend=addend)
        check(y, expected, magnitude)


@pytest.mark.parametrize("types", REAL, ids="-".join)
@pytest.mark.parametrize("activation", [*ACTIVATIONS])
@pytest.mark.parametrize("aux", [False, True], ids=["", "aux"])
@pytest.mark.parametrize("alpha, beta", [(1, 0), (0.5, 0), (1, 1), (0.5, 0.25)])
def test_bias_and_activation(alpha, beta, aux, activation, types):
    spec = "mk,nk->mn"
    rng, a, b, y_shape, product, magnitude = random_case(
        spec, types, m=100, n=300, k=64
    )
    bias, addend = sample(rng, (300,), types[1]), sample(rng, y_shape, types[1])
    z = alpha * product + beta * wide(addend) + wide(bias)
    magnitude = magnitude + np.abs(wide(addend)) + np.abs(wide(bias))
    y, *rest = gemm(
        spec, a, b, types[1],
        alpha=alpha, beta=beta, addend=addend if beta else None, bias=bias,
        activation=activation, aux=aux,
    )  # fmt: skip
    check(y, ACTIVATIONS[activation](z), magnitude)
    if aux:
        check(rest[0], z, magnitude)


@pytest.mark.parametrize("types", [t for t in TYPES if t not in REAL], ids="-".join)
def test_bias_of_other_types(types):
    rng, a, b, _, product, magnitude = random_case("mk,kn->mn", types, m=9, n=40, k=5)
    bias = sample(rng, (40,), types[1])
    (y,) = gemm("mk,kn->mn", a, b, types[1], bias=bias)
    check(y, product + wide(bias), magnitude + np.abs(wide(bias)))


@pytest.mark.parametrize("types", REAL, ids="-".join)
@pytest.mark.parametrize("derivative", ["relu", "gelu"])
def test_derivative(derivative, types):
    spec = "bmk,bkn->bmn"
    rng, a, b, y_shape, product, magnitude = random_case(
        spec, types, b=2, m=70, n=90, k=40
    )
    aux = 3 * sample(rng, y_shape, types[1])
    (y,) = gemm(spec, a, b, types[1], derivative=derivative, read_aux=aux)
    check(y, product * DERIVATIVES[derivative](wide(aux)), 2 * magnitude)


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("spec", SPECS[:4])
def test_sums_of_rows(spec, types):
    _, a, b, _, product, magnitude = random_case(spec, types, m=300, n=70, k=133)
    y, sums = gemm(spec, a, b, types[1], sums=300)
    check(y, product, magnitude)
    axis = spec.index("k")
    check(sums, wide(a).sum(axis), np.abs(wide(a)).sum(axis))


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_nothing_to_sum(types):
    rng = np.random.default_rng(0)
    a, b = sample(rng, (5, 0), types[0]), sample(rng, (0, 7), types[0])
    addend = sample(rng, (5, 7), types[1])
    (y,) = gemm("mk,kn->mn", a, b, types[1])
    check(y, np.zeros((5, 7)), np.ones(()))
    (y,) = gemm("mk,kn->mn", a, b, types[1], beta=2, addend=addend)
    check(y, 2 * wide(addend), wide(addend))
    for m, n, k in [(0, 3, 4), (3, 0, 4), (0, 0, 0)]:
        _, a, b, *_ = random_case("mk,kn->mn", types, m=m, n=n, k=k)
        (y,) = gemm("mk,kn->mn", a, b, types[1])
        assert y.shape == (m, n)


@pytest.mark.parametrize("types", [t for t in TYPES if t[0] != "int8"], ids="-".join)
@pytest.mark.parametrize("size", [1, 40])
def test_nan(types, size):
    _, a, b, y_shape, *_ = random_case("mk,kn->mn", types, m=size, n=size, k=size)
    nan = jnp.full(y_shape, jnp.nan, types[1])
    # alpha == 0: a and b are not read. 0 * NaN is NaN in a product.
    (y,) = gemm("mk,kn->mn", a * jnp.nan, b, types[1], alpha=0)
    assert np.all(wide(y) == 0)
    (y,) = gemm("mk,kn->mn", a * 0, b * jnp.nan, types[1])
    assert np.all(np.isnan(wide(y)))
    (y,) = gemm("mk,kn->mn", a, b, types[1], beta=1, addend=nan)
    assert np.all(np.isnan(wide(y)))


@pytest.mark.parametrize("types", REAL, ids="-".join)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_erf"])
@pytest.mark.parametrize("aux", [False, True], ids=["", "aux"])
def test_activation_of_special_values(activation, aux, types):
    a = jnp.array([[np.nan], [np.inf], [300.0], [-300.0], [0.0]], types[0])
    b = jnp.ones((1, 3), types[0])
    (y, *_) = gemm("mk,kn->mn", a, b, types[1], activation=activation, aux=aux)
    expected = np.array([np.nan, np.inf, wide(a)[2, 0], 0, 0])
    np.testing.assert_allclose(wide(y)[:, 0], expected, rtol=0, atol=1e-30)


def test_small_16_bit_results_keep_their_denormals():
    a = jnp.full((4, 1), 2**-12, jnp.float16)
    b = jnp.full((1, 3), 2**-12, jnp.float16)
    bias = jnp.full((3,), 2**-23, jnp.float16)
    (y, aux) = gemm("mk,kn->mn", a, b, "float16", bias=bias, aux=True)
    np.testing.assert_array_equal(wide(aux), np.full((4, 3), 2**-23 + 2**-24))


@pytest.mark.parametrize("types", [("bfloat16",) * 2, ("float16",) * 2], ids="-".join)
def test_rounds_once(types):
    """z is rounded to the result's dtype after bias and activation, not before."""
    # 256 + 1 + -256 is 0 if the product or its sum with alpha is rounded.
    a = jnp.array([[2.0**5, 1]], types[0])
    b = jnp.array([[2.0**8], [1]], types[0])
    bias = jnp.array([-(2.0**13)], types[1])
    for aux in (False, True):
        y, *_ = gemm("mk,kn->mn", a, b, types[1], bias=bias, aux=aux)
        assert wide(y)[0, 0] == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(y_shape=(4, 9)), "y must have 40 elements of float32"),
        (dict(bias=jnp.ones(9, "float32")), "bias must have 10 elements"),
        (dict(bias=jnp.ones(10, "float64")), "bias must have 10 elements of float32"),
        (dict(activation="tanh"), "unknown activation tanh"),
        (dict(alpha=1j), "must be real"),
        (dict(derivative="relu"), "operand 2 is missing"),
        (dict(spec="mk,kn->mm"), "mk,kn->mm"),
    ],
)
def test_wrong_calls_are_errors(changes, message):
    a, b = jnp.ones((4, 6), "float32"), jnp.ones((6, 10), "float32")
    arguments = {"spec": "mk,kn->mn", "result": "float32", **changes}
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(gemm(a=a, b=b, **arguments))
    (y,) = gemm("mk,kn->mn", a, b, "float32")
    assert np.all(np.asarray(y) == 6)


def test_types_without_a_kernel_are_errors():
    a = jnp.ones((4, 4), "int32")
    assert not _cpu.gemm_supported("int32", "int32")
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="no kernel .* 4 x 4 x 4 int32"
    ):
        jax.block_until_ready(gemm("mk,kn->mn", a, a, "int32"))
    with pytest.raises(ValueError, match="unknown dtype int7"):
        _cpu.gemm_supported("int7", "int32")


def test_calls_from_many_threads():
    import concurrent.futures

    cases = []
    for types in (("float32",) * 2, ("float64",) * 2, ("bfloat16", "float32")):
        if _cpu.gemm_supported(*types):
            cases.append((types, random_case("mk,kn->mn", types, m=300, n=200, k=100)))

    def run(i):
        types, (_, a, b, _, product, magnitude) = cases[i % len(cases)]
        (y,) = gemm("mk,kn->mn", a, b, types[1])
        check(y, product, magnitude)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(60)))


@pytest.mark.parametrize("method", _cpu.gemm_method_names())
def test_every_method_computes_what_it_supports(method):
    dtype = "bfloat16" if method == "AMX" else "float32"
    m = 1 if method == "matrix-vector" else 16
    rng = np.random.default_rng(0)
    a, b = sample(rng, (m, 96), dtype), sample(rng, (96, 80), dtype)
    (y,) = gemm("mk,kn->mn", a, b, "float32", method=method)
    check(y, wide(a) @ wide(b), abs(wide(a)) @ abs(wide(b)))


def test_a_method_that_does_not_exist_is_an_error():
    a = jnp.ones((8, 8), jnp.float32)
    with pytest.raises(Exception, match="there is no method nothing"):
        gemm("mk,kn->mn", a, a, "float32", method="nothing")


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path)},  # with this file
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_without_libraries_nothing_is_supported():
    code = """
from jax_layout import _cpu
_cpu.set_gemm_libraries("", "/nowhere/libopenblas.so")
print(_cpu.gemm_supported("float64", "float64"))
problem = ("mk,kn->mn", [512, 512], [512, 512], "float64", "float64", [1, 0], [0, 0])
print(_cpu.gemm_methods(*problem, "none", "none", False, False, False, False, 0, ""))
"""
    assert run_python(code).stdout.split() == ["False", "[]"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_libraries_start_no_threads():
    code = """
import os
import jax, jax.numpy as jnp
from jax_layout import _backends
from test_gemm_kernels import gemm
x = jnp.ones((512, 512))
jax.block_until_ready(jax.jit(jnp.matmul)(x, x))
before = len(os.listdir("/proc/self/task"))
for dtype in "float32", "bfloat16":
    y = gemm("mk,kn->mn", x.astype(dtype), x.astype(dtype), "float32")
jax.block_until_ready(y)
print(len(os.listdir("/proc/self/task")) - before)
"""
    process = run_python(code)
    assert process.stdout.split() == ["0"], process.stderr
