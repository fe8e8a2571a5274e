# SPDX-License-Identifier: Apache-2.0
"""What `define` makes of a record, by the example of a matrix product."""

import ctypes
import itertools
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_layout as jl
from hlo import collectives, compiled, kernels
from jax_layout import _backends


def build(tmp_path, *flags):
    library = tmp_path / "toy_matmul.so"
    source = Path(__file__).with_name("toy_matmul.cc")
    headers = ("-I", jax.ffi.include_dir())
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *flags, *headers]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return library


def _matmul(a, b):
    return jax.lax.dot(a, b)


def _transpose(ct, a, b):
    if ad.is_undefined_primal(a):
        return [toy(ct, jl.permute(b, (1, 0))), None]
    return [None, toy(jl.permute(a, (1, 0)), ct)]


toy = jl.define(
    jl.Op(
        name="toy_matmul",
        lax=_matmul,
        kernel=lambda platform, a, b: jl.Kernel({}) if platform == "cpu" else None,
        transpose=_transpose,
        sharding=lambda a, b: "m k, k n -> m n",
    )
)


@pytest.fixture(autouse=True, scope="module")
def handler(tmp_path_factory):
    library = ctypes.CDLL(str(build(tmp_path_factory.mktemp("toy"))))
    target = jax.ffi.pycapsule(library.ToyMatmul)
    jax.ffi.register_ffi_target("jax_layout_toy_matmul", target, platform="cpu")


def matrices(mesh=None, a_spec=None, b_spec=None):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 24)), rng.standard_normal((24, 8))
    if mesh is None:
        return jnp.asarray(a), jnp.asarray(b)
    specs = (a_spec, b_spec)
    return [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip((a, b), specs, strict=True)
    ]


def test_the_kernel_runs():
    a, b = matrices()
    np.testing.assert_allclose(jax.jit(toy)(a, b), a @ b, rtol=1e-12)
    assert kernels(compiled(toy, a, b)) == 1


def test_derivatives():
    a, b = matrices()
    check_grads(toy, (a, b), order=2, modes=("fwd", "rev"))


def loss(product):
    return lambda a, b: jnp.sum(jnp.sin(product(a, b)))


SPECS = [P(None, None), P("a", None), P(None, "a"), P("a", "b"), P(("a", "b"), None)]


@pytest.fixture
def auto_mesh():
    types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("a", "b"), types, devices=jax.devices("cpu")[:4])


@pytest.mark.parametrize(
    ("a_spec", "b_spec"), list(itertools.product(SPECS, SPECS)), ids=str
)
def test_partition_follows_the_sharding_rule(auto_mesh, a_spec, b_spec):
    """A partition that left the summed axis sharded would be wrong here."""
    a, b = matrices(auto_mesh, a_spec, b_spec)
    np.testing.assert_allclose(jax.jit(toy)(a, b), np.asarray(a) @ b, rtol=1e-12)
    ours = jax.jit(jax.grad(loss(toy), (0, 1)))(a, b)
    expected = jax.grad(loss(jnp.matmul), (0, 1))(*matrices())
    for g, e in zip(ours, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-10)


def test_rows_and_columns_need_no_collective(auto_mesh):
    a, b = matrices(auto_mesh, P("a", None), P(None, "b"))
    hlo = compiled(toy, a, b)
    assert collectives(hlo) == {} and kernels(hlo) == 1


def test_a_summed_axis_needs_one_all_reduce(auto_mesh):
    a, b = matrices(auto_mesh, P(None, "a"), P("a", None))
    hlo = compiled(toy, a, b)
    assert collectives(hlo) == {"all-reduce": 1} and kernels(hlo) == 1


def test_the_gradient_of_a_replicated_weight_in_shard_map(auto_mesh):
    """Without varying axes marked, each device would keep its own."""
    a, b = matrices(auto_mesh, P(("a", "b"), None), P())
    f = jax.shard_map(
        lambda a, b: jax.lax.psum(loss(toy)(a, b), ("a", "b")),
        mesh=auto_mesh,
        in_specs=(P(("a", "b")), P()),
        out_specs=P(),
    )
    ours = jax.jit(jax.grad(f, 1))(a, b)
    expected = jax.grad(loss(jnp.matmul), 1)(*matrices())
    np.testing.assert_allclose(ours, expected, rtol=1e-10)


def test_an_explicit_sharding_that_lax_refuses_names_the_operator():
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), types, devices=jax.devices("cpu")[:4])
    a, b = matrices(mesh, P(None, "a"), P("a", None))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="^toy_matmul: unsupported sharding: .*'a'"),
    ):
        jax.jit(toy).trace(a, b)


def test_errors_of_lax_name_the_operator():
    a, _ = matrices()
    with pytest.raises(ValueError, match="^toy_matmul: "):
        jax.jit(toy).trace(a, a)


def test_without_a_sharding_rule_lax_runs(auto_mesh):
    record = jl.Op("toy_no_rule", lax=_matmul, kernel=lambda *_: jl.Kernel({}))
    a, b = matrices(auto_mesh, P("a", None), P(None, "b"))
    product = jl.define(record)
    np.testing.assert_allclose(jax.jit(product)(a, b), np.asarray(a) @ b, rtol=1e-12)


def test_without_a_derivative_grad_says_so():
    product = jl.define(jl.Op("toy_no_grad", lax=_matmul))
    message = "^toy_no_grad: cannot be {}, as its record has no '{}' rule"
    with pytest.raises(NotImplementedError, match=message.format("diff.*", "jvp")):
        jax.grad(loss(product))(*matrices())
    with pytest.raises(NotImplementedError, match=message.format("diff.*", "jvp")):
        jax.jit(lambda a, b: jax.jvp(product, (a, b), (a, b)))(*matrices())
    a, b = matrices()
    with pytest.raises(NotImplementedError, match=message.format("tr.*", "transpose")):
        jax.linear_transpose(lambda a: product(a, b), a)(a @ b)


def test_without_a_batching_rule_vmap_says_so():
    a, b = matrices()
    message = "^toy_matmul: cannot be mapped by vmap, as its record has no 'batch' rule"
    with pytest.raises(NotImplementedError, match=message):
        jax.vmap(toy, (None, 0))(a, b[None])


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        (3, TypeError, "op must be an Op, got int"),
        (jl.Op("toy_bad", lax=3), TypeError, "lax of toy_bad must be a function"),
        (jl.Op("toy_bad", lax=_matmul, batch=0), TypeError, "batch of toy_bad must be"),
        (
            jl.Op("a b", lax=_matmul),
            ValueError,
            "name must be .*, got 'a b'",
        ),
        (jl.Op(None, lax=_matmul), ValueError, "name must be an identifier, got None"),
    ],
)
def test_define_refuses_what_is_no_record(record, error, message):
    with pytest.raises(error, match=f"^define: {message}"):
        jl.define(record)


def test_a_name_can_be_defined_once():
    for name in ("toy_matmul", "permute"):
        with pytest.raises(ValueError, match=f"an operator named '{name}' already"):
            jl.define(jl.Op(name, lax=_matmul))


def test_records_are_kept_by_name():
    assert jl.operators()["toy_matmul"].lax is _matmul
    with pytest.raises(TypeError):
        jl.operators()["toy_matmul"] = None


def test_handlers_given_to_define_are_for_their_platforms_alone(tmp_path):
    """Elsewhere the lax function runs, as the program for CUDA shows."""
    library = ctypes.CDLL(str(build(tmp_path)))
    handlers = {"cpu": jax.ffi.pycapsule(library.ToyMatmul)}
    record = jl.Op("toy_handled", lax=_matmul, kernel=lambda *_: jl.Kernel({}))
    product = jl.define(record, handlers)
    a, b = matrices()
    np.testing.assert_allclose(jax.jit(product)(a, b), a @ b, rtol=1e-12)
    traced = jax.jit(product).trace(a, b)
    for platform, target in (("cpu", True), ("cuda", False), ("tpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("jax_layout_toy_handled" in text) == target
        assert ("dot_general" in text) != target


def test_a_handler_for_an_unknown_platform_is_an_error():
    with pytest.raises(ValueError, match="cpu, cuda at most, got one for 'tpu'"):
        jl.define(jl.Op("toy_tpu", lax=_matmul), {"tpu": None})
    assert "toy_tpu" not in jl.operators()


def test_a_kernel_without_a_handler_is_an_error_that_names_it():
    record = jl.Op("toy_missing", lax=_matmul, kernel=lambda *_: jl.Kernel({}))
    product = jl.define(record)
    with pytest.raises(jax.errors.JaxRuntimeError, match="jax_layout_toy_missing"):
        jax.jit(product)(*matrices())


def test_dtypes_that_kernels_do_not_make_run_lax():
    record = jl.Op(
        "toy_float32",
        lax=_matmul,
        kernel=lambda *_: jl.Kernel({}, target="jax_layout_toy_matmul"),
        dtypes=("float64",),
    )
    product = jl.define(record)
    a, b = matrices()
    assert kernels(compiled(product, a, b)) == 1
    half = a.astype(np.float32), b.astype(np.float32)
    assert kernels(compiled(product, *half)) == 0
    np.testing.assert_allclose(product(*half), a @ b, rtol=1e-4)


def test_prepared_operands():
    """A kernel may take other operands than the operator: here the product's."""
    record = jl.Op(
        "toy_gram",
        lax=lambda a: jax.lax.dot(a, a.T),
        kernel=lambda *_: jl.Kernel(
            {}, target="jax_layout_toy_matmul", prepare=lambda a: [a, a.T]
        ),
    )
    gram = jl.define(record)
    a, _ = matrices()
    np.testing.assert_allclose(jax.jit(gram)(a), a @ a.T, rtol=1e-12)
    assert kernels(compiled(gram, a)) == 1


def test_several_results(auto_mesh):
    both = jl.define(
        jl.Op(
            "toy_sincos",
            lax=lambda x: [jnp.sin(x), jnp.cos(x)],
            sharding=lambda x: "m n -> m n, m n",
            multiple_results=True,
        )
    )
    a, _ = matrices(auto_mesh, P("a", "b"), P())
    s, c = jax.jit(both)(a)
    np.testing.assert_allclose(s**2 + c**2, np.ones_like(a))


# --- backends


def run(code):
    """Runs Python in a process of its own, with warnings shown."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )


TOO_NEW = """
    import ctypes, types, jax, jax.numpy as jnp, numpy as np
    from unittest import mock
    toy = ctypes.CDLL({library!r})
    capsule = jax.ffi.pycapsule(toy.ToyMatmul)
    module = types.SimpleNamespace(
        __name__="jax_layout._cpu",
        ffi_api_version=(0, 99),
        isa=lambda: {{}},
        registrations=lambda: {{"jax_layout_permute": {{"execute": capsule}}}},
    )
"""


def test_a_library_newer_than_jaxlib_would_take_the_backend_down(tmp_path):
    """Why `_backends.register` looks first; fails once jaxlib is more lenient."""
    library = str(build(tmp_path, "-DTOY_API_MINOR=99"))
    out = run(
        TOO_NEW.format(library=library)
        + """
    for target, handlers in module.registrations().items():
        jax.ffi.register_ffi_target(target, handlers, platform="cpu")
    jnp.ones(3)
    """
    )
    assert out.returncode != 0 and "Unable to initialize backend 'cpu'" in out.stderr


def test_a_library_newer_than_jaxlib_is_left_out_with_one_warning(tmp_path):
    library = str(build(tmp_path, "-DTOY_API_MINOR=99"))
    out = run(
        TOO_NEW.format(library=library)
        + """
    with mock.patch("importlib.import_module", lambda name: module):
        import jax_layout as jl
    f = lambda x: jl.permute(x, (2, 0, 1))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 64, 48)))
    np.testing.assert_array_equal(jax.jit(f)(x), np.transpose(x, (2, 0, 1)))
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), np.ones_like(x))
    assert "jax_layout_permute" not in jax.jit(f).lower(x).as_text()
    """
    )
    assert out.returncode == 0, out.stderr
    assert out.stderr.count("RuntimeWarning: jax_layout is built") == 1
    assert "for XLA FFI (0, 99), but jaxlib" in out.stderr
    assert "falls back to plain jax.lax" in out.stderr


def lowered_for_gpus(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_a_machine_that_cannot_run_kernels_runs_lax_with_one_warning(monkeypatch):
    """A driver that is too old, a GPU before Ampere: as the native module says."""

    class Native:
        why = ""
        why_unusable = classmethod(lambda native: native.why)

    monkeypatch.setattr(_backends, "module", lambda platform: Native)
    monkeypatch.setattr(_backends, "available", lambda platform: True)
    double = jl.define(
        jl.Op(
            name="doubled_on_gpus",
            lax=lambda x: x + x,
            kernel=lambda platform, x: jl.Kernel({}),
        )
    )
    x = np.ones(8, np.float32)
    assert "@jax_layout_doubled_on_gpus" in lowered_for_gpus(double, x)
    Native.why = "the driver is for CUDA 12.8, where 13.0"
    _backends.usable.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="CUDA 12.8, where 13.0 is needed"):
            assert "jax_layout" not in lowered_for_gpus(lambda x: double(x), x)
        with warnings.catch_warnings(action="error"):
            assert "jax_layout" not in lowered_for_gpus(lambda x: 1 + double(x), x)
    finally:
        _backends.usable.cache_clear()


def test_a_product_that_the_machine_lacks_runs_lax_with_one_warning(monkeypatch):
    class Native:
        gemm_obstacle = staticmethod(lambda **_: "gemm: cannot load cuBLASLt: gone.")
        gemm_methods = staticmethod(lambda **_: ["cuBLASLt"])

    monkeypatch.setattr(_backends, "module", lambda platform: Native)
    with pytest.warns(RuntimeWarning, match="cuBLASLt: gone. Such products"):
        assert _backends.gemm_methods("cuda", {}) == []
    with warnings.catch_warnings(action="error"):
        assert _backends.gemm_methods("cuda", {}) == []


def test_without_kernels_for_gpus_one_warning_says_so(monkeypatch):
    monkeypatch.setattr(
        _backends, "module", lambda platform: None if platform == "cuda" else object()
    )
    monkeypatch.setattr(_backends, "available", lambda platform: False)
    triple = jl.define(
        jl.Op(
            name="tripled_on_gpus",
            lax=lambda x: 3 * x,
            kernel=lambda platform, x: jl.Kernel({}),
        )
    )
    x = np.ones(8, np.float32)
    _backends._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="built without kernels for cuda"):
        assert "jax_layout" not in lowered_for_gpus(triple, x)
    with warnings.catch_warnings(action="error"):
        assert "jax_layout" not in lowered_for_gpus(lambda x: 1 + triple(x), x)


def test_the_library_is_built_against_headers_that_old_jaxlibs_have():
    from jax_layout import _cpu

    assert _cpu.ffi_api_version <= _backends.runtime_api_version()


def test_importing_starts_no_backend():
    out = run(
        """
    import jax_layout
    from jax._src import xla_bridge
    assert not xla_bridge._backends
    """
    )
    assert out.returncode == 0, out.stderr


# --- a handler that is handed a wrong call returns an error, and the process lives


def call(x, result, **attributes):
    attributes = {
        "shape": np.array(x.shape, np.int64),
        "axes": np.arange(x.ndim)[::-1].astype(np.int64),
        "itemsize": np.int64(x.dtype.itemsize),
    } | attributes
    return jax.ffi.ffi_call("jax_layout_permute", result)(x, **attributes)


WRONG = {
    "rank": ({"axes": np.array([0], np.int64)}, "axes must name every axis of x"),
    "axis": ({"axes": np.array([0, 2], np.int64)}, "axes must reorder the axes of x"),
    "repeated": (
        {"axes": np.array([1, 1], np.int64)},
        "axes must reorder the axes of x",
    ),
    "extent": ({"shape": np.array([-1, 4], np.int64)}, "extents must not be negative"),
    "huge": ({"shape": np.array([2**40, 2**40], np.int64)}, "smaller than 2.63 bytes"),
    "itemsize": ({"itemsize": np.int64(0)}, "itemsize must be positive"),
    "int32": ({"axes": np.array([1, 0], np.int32)}, "expected S64 but got S32"),
    "operand": (
        {"shape": np.array([3, 5], np.int64)},
        "operand and result must have 15",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_return_an_error(name):
    attributes, message = WRONG[name]
    x = jnp.ones((3, 4), jnp.float32)
    result = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(lambda x: call(x, result, **attributes))(x)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x, result))(x), x.T)


@pytest.mark.parametrize("shape", [(4, 2), (4, 4), (1, 1)], ids=str)
def test_a_wrong_result_buffer_returns_an_error(shape):
    x, result = jnp.ones((3, 4)), jax.ShapeDtypeStruct(shape, jnp.float64)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="operand and result must have"
    ):
        jax.jit(lambda x: call(x, result))(x)


def test_a_result_of_another_width_returns_an_error():
    x, result = jnp.ones((3, 4)), jax.ShapeDtypeStruct((4, 3), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="12 of 4"):
        jax.jit(lambda x: call(x, result))(x)
