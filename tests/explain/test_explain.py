# SPDX-License-Identifier: Apache-2.0
"""Reports of programs whose transposes are known by construction."""

import functools
import importlib.util
import inspect
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from jax_layout import _backends
from jax_layout.explain import compiled, hlo
from jax_layout.formats.tags import store, stored
from reports import explained, optimised

F32 = jnp.float32


def of(report: jl.Report, stage: str, *kinds: str):
    return [
        r
        for r in report.reorders
        if r.stage == stage and (not kinds or r.kind in kinds)
    ]


def codes(report: jl.Report) -> list[str]:
    return sorted(a.code for a in report.warnings)


def dropped(report: jl.Report):
    return [a for a in report.warnings if a.code == "format-dropped"]


def line(f, offset: int = 0) -> str:
    return f"{__file__}:{inspect.getsourcelines(f)[1] + offset}"


def convolve(x, w, form="NCHW", groups=1):
    """A convolution of logically NCHW or NHWC arrays, with its own kind of weight."""
    numbers = (form, {"NCHW": "OIHW", "NHWC": "HWIO"}[form], form)
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


# --- transposes known by construction


def to_nhwc(x):
    return jnp.sin(jnp.transpose(x, (0, 2, 3, 1)))


def test_a_transpose_in_a_straight_line():
    x = (8, 3, 64, 64)
    size = 2 * 4 * 8 * 3 * 64 * 64  # read and written
    report = explained(to_nhwc, x)
    (asked,), (left,) = of(report, "jaxpr"), of(report, "hlo")
    for r in asked, left:
        assert (r.kind, r.shape) == ("transpose", "f32[8,64,64,3]")
        assert (r.bytes, r.trips, r.trips_known) == (size, 1, True)
        assert r.source == line(to_nhwc, 1)
    assert left.fused and left.cause == "the program's transpose"  # with the sine
    assert left.share == pytest.approx(1)
    assert (report.platform, report.function) == ("cpu", "to_nhwc")
    assert report.bytes == size and report.reordered_bytes() == size
    assert report.by_source() == {line(to_nhwc, 1): size}
    assert codes(report) == []


def in_a_scan(x):
    def body(carry, _):
        return jnp.sin(jnp.transpose(carry, (0, 2, 1))) + 1, None

    return lax.scan(body, x, None, length=7)[0]


def test_a_transpose_in_a_scan_counts_its_trips():
    report = explained(in_a_scan, (8, 128, 128))
    size = 2 * 4 * 8 * 128 * 128
    (asked,) = of(report, "jaxpr")
    assert (asked.bytes, asked.trips, asked.trips_known) == (size, 7, True)
    inside = [r for r in of(report, "hlo", "transpose") if r.trips == 7]
    assert [(r.bytes, r.trips_known, r.source) for r in inside] == [
        (size, True, line(in_a_scan, 2))
    ]
    assert inside[0].total_bytes == 7 * size
    # What else moves serves the carry.
    others = [r for r in of(report, "hlo") if r not in inside]
    assert {r.cause for r in others} <= {"loop carry", "entry layout", "XLA's copy"}
    assert sum(r.share for r in of(report, "hlo")) <= 1.0001


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    def f(x):
        return lax.while_loop(
            lambda c: c[0, 0, 0] < 1, lambda c: jnp.sin(c.transpose(0, 2, 1)) + 1, x
        )

    report = explained(f, (8, 64, 64))
    (asked,) = of(report, "jaxpr")
    (left,) = (r for r in of(report, "hlo", "transpose") if not r.trips_known)
    for r in asked, left:
        assert (r.trips, r.trips_known, r.bytes) == (1, False, 2 * 4 * 8 * 64 * 64)


def test_scans_in_scans_multiply():
    def f(x):
        def inner(c, _):
            return c.T * 2, None

        def outer(c, _):
            return lax.scan(inner, c, None, length=3)[0], None

        return lax.scan(outer, x, None, length=5)[0]

    (asked,) = of(explained(f, (64, 32, 32)[1:]), "jaxpr")
    assert asked.trips == 15


@jax.custom_jvp
def with_jvp(x):
    return x.T * 2


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0].T * 2))


@jax.custom_vjp
def with_vjp(x):
    return x.T * 2


with_vjp.defvjp(lambda x: (x.T * 2, None), lambda _, ct: (ct.T * 2,))

WRAPPED = {
    "jit": jax.jit(lambda x: x.T * 2),
    "inlined": jax.jit(lambda x: x.T * 2, inline=True),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda x: x.T * 2, lambda x: x, x),
    "remat": jax.checkpoint(lambda x: x.T * 2),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "shard_map": lambda x: jax.shard_map(
        lambda x: x.T * 2,
        mesh=jax.make_mesh((1,), ("a",), devices=jax.devices()[:1]),
        in_specs=jax.P(),
        out_specs=jax.P(),
    )(x),
    "permute": lambda x: jl.permute(x, (1, 0)) * 2,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_transposes_are_found_in_what_is_called(name):
    report = explained(WRAPPED[name], (64, 64))
    (asked,) = of(report, "jaxpr")
    assert (asked.bytes, asked.trips, asked.kind) == (2 * 4 * 64 * 64, 1, "transpose")
    assert asked.source.startswith(f"{__file__}:")


def test_what_moves_nothing_is_no_reorder():
    def f(x, y):
        return jnp.transpose(x, (0, 2, 1, 3)) + 1, jl.permute(y, (0, 2, 1))

    report = explained(f, (8, 1, 16, 4), (8, 16, 1))
    assert of(report, "jaxpr", "transpose") == [] == of(report, "hlo", "transpose")


def test_dead_code_is_left_out():
    def f(x):
        jnp.transpose(x) + 1
        return x + 1

    assert explained(f, (32, 32)).reorders == ()


def test_a_permute_of_ours():
    def f(x):
        return jl.permute(x, (0, 2, 3, 1))

    report = explained(f, (8, 64, 32, 32))
    (asked,), (left,) = of(report, "jaxpr"), of(report, "hlo")
    assert left.kind == "permute" and left.cause == "a permute of jax_layout"
    assert asked.bytes == left.bytes == 2 * 4 * 8 * 64 * 32 * 32
    assert asked.source == left.source == line(f, 1)


def test_gradients_are_told_from_the_program():
    def f(x):
        return jnp.sum(jnp.sin(x.T) * jnp.arange(64.0, dtype=F32))

    report = explained(jax.grad(f), (64, 32))
    assert {r.cause for r in of(report, "jaxpr")} == {
        "the program",
        "the program's gradient",
    }


# --- products


def scores(q, k):
    return jnp.einsum("bshd,bthd->bhst", q, k)


def test_operands_transposed_for_a_dot():
    shape = (2, 64, 4, 32)
    report = explained(scores, shape, shape)
    (product,) = report.products
    assert product.kind == "gemm" and product.source == line(scores, 1)
    assert report.flops == 2 * 2 * 4 * 64 * 64 * 32
    left = of(report, "hlo")
    assert len(left) == 2 and not any(r.fused for r in left)
    assert {r.cause for r in left} == {"XLA's layout for the gemm"}
    assert {r.bytes for r in left} == {2 * 4 * 2 * 64 * 4 * 32}
    assert codes(report) == ["transposed-operand"] * 2


def test_our_einsum_reads_them_in_place():
    f = functools.partial(jl.einsum, "bshd,bthd->bhst")
    report = explained(f, (2, 256, 4, 64), (2, 256, 4, 64))
    (product,) = report.products
    assert product.implementation.startswith("jax_layout TN")
    assert "256 x 256 x 64, 2 x 4 steps" in product.detail
    assert report.flops == 2 * 2 * 4 * 256 * 256 * 64
    assert of(report, "hlo") == [] and codes(report) == []


def test_a_matrix_of_a_stack_counts_as_what_is_read_of_it():
    def f(h, stack):
        return jax.lax.scan(lambda h, w: (jl.matmul(h, w), None), h, stack)[0]

    report = explained(f, (8, 64), (6, 64, 64))
    (product,) = report.products
    assert product.trips == 6 and product.detail.endswith("8 x 64 x 64, b in a stack")
    # Six matrices, each read once; what the loop carries is read and written.
    assert 6 * 64 * 64 * 4 <= report.bytes <= 2 * 6 * 64 * 64 * 4


def test_our_linear_names_its_epilogue_and_library():
    f = functools.partial(jl.linear, activation="gelu")
    report = explained(f, (512, 256), (320, 256), (320,))
    (product,) = report.products
    form, library = product.implementation.split(", ")
    assert form == "jax_layout TN" and library in (
        "blocked",
        "oneDNN",
        "OpenBLAS",
        "AMX",
        "matrix-vector",
    )
    assert product.detail.endswith("512 x 320 x 256, fused bias, activation gelu")


def test_a_product_that_does_not_run_in_place_says_what_it_permutes():
    # a and b share both axes, in orders that no GEMM reads at once.
    f = functools.partial(jl.einsum, "abm,bna->mn")
    plan = jl.explain_gemm("abm,bna->mn", (32, 64, 128), (64, 96, 32))
    assert plan.moved_bytes > 0
    report = explained(f, (32, 64, 128), (64, 96, 32))
    asked = of(report, "jaxpr")
    assert {r.cause for r in asked} == {"a GEMM that does not run in place"}
    assert sum(r.bytes for r in asked) == plan.moved_bytes


# --- convolutions


def test_a_convolution_is_re_laid_in_nchw():
    report = explained(convolve, (4, 16, 28, 28), (32, 16, 3, 3))
    (product,) = report.products
    assert product.kind == "convolution"
    assert product.detail.startswith("NHWC, HWIO -> NHWC")
    left = of(report, "hlo", "transpose")
    x, w, y = 4 * 16 * 28 * 28, 32 * 16 * 3 * 3, 4 * 32 * 28 * 28
    assert sorted(r.bytes for r in left) == sorted(2 * 4 * n for n in (x, w, y))
    assert {r.cause for r in left} == {"XLA's layout for the convolution"}
    assert {r.source for r in left} == {line(convolve, 3)}
    assert codes(report) == ["plan-layout", "weights-relaid"]
    assert report.warnings[0].message.startswith("w (")


def test_a_convolution_in_nhwc_is_not():
    f = functools.partial(convolve, form="NHWC")
    report = explained(f, (4, 28, 28, 16), (3, 3, 16, 32))
    assert of(report, "hlo") == [] and codes(report) == []


def scanned(f, x, *rest):
    return lax.scan(lambda c, _: (f(c, *rest), None), x, None, length=3)[0]


LOOPS = {
    "scan": scanned,
    "while": lambda f, x, *rest: lax.while_loop(
        lambda c: c.ravel()[0] < 1, lambda c: f(c, *rest), x
    ),
    "cond": lambda f, x, *rest: lax.cond(
        x.ravel()[0] > 0, lambda c: f(c, *rest), lambda c: c, x
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_convolution_in_control_flow(loop):
    nchw = functools.partial(LOOPS[loop], convolve)
    report = explained(nchw, (4, 16, 28, 28), (16, 16, 3, 3))
    assert set(codes(report)) - {"plan-layout"} == {"convolution-in-loop"}
    (product,) = report.products
    assert product.implementation == "XLA's plain loops"
    assert product.trips == (3 if loop == "scan" else 1)
    assert product.trips_known == (loop != "while")
    nhwc = functools.partial(LOOPS[loop], functools.partial(convolve, form="NHWC"))
    report = explained(nhwc, (4, 28, 28, 16), (3, 3, 16, 16))
    assert codes(report) == []


def test_the_gradient_of_an_nhwc_convolution_in_a_scan():
    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(convolve(x, w, form="NHWC") ** 2))(w)

    f = functools.partial(scanned, gradient)
    report = explained(f, (3, 3, 16, 16), (4, 28, 28, 16))
    assert codes(report) == ["nhwc-gradient-in-loop"]
    outside = explained(gradient, (3, 3, 16, 16), (4, 28, 28, 16))
    assert "nhwc-gradient-in-loop" not in codes(outside)


@pytest.mark.parametrize("groups", [4, 16])
def test_a_grouped_convolution(groups):
    f = functools.partial(convolve, form="NHWC", groups=groups)
    report = explained(f, (4, 28, 28, 16), (3, 3, 16 // groups, 16))
    assert codes(report) == ["grouped-convolution"]


def implementations(file: str, platform: str) -> dict[str, tuple[str, str]]:
    text = Path(__file__).with_name("hlo_text").joinpath(file).read_text()
    found = compiled.analyse(hlo.parse(text), platform, {}, {}, 1e12, 1e15)
    assert not found.warnings
    return {p.op: (p.implementation, p.detail) for p in found.products}


def test_libraries_of_a_gpu_and_what_they_fuse():
    found = implementations("h100_calls.txt", "cuda")
    name, detail = found["cublas-lt-matmul.2"]
    assert name == "cuBLASLt (matmul)" and detail.endswith("fused bias_relu")
    name, detail = found["cudnn-conv.1"]
    assert name == "cuDNN (convForward)" and detail.startswith("NHWC, OHWI -> NHWC")
    name, detail = found["linear.3"]
    assert name.startswith("jax_layout NN")
    assert detail.endswith("512 x 320 x 256, fused bias, activation gelu")


def test_a_convolution_of_ours_names_what_the_backend_answers(monkeypatch):
    asked = {}

    def conv_plan(**attributes):
        asked.update(attributes)
        return {"supported": True, "implementation": "a kernel"}

    backend = types.SimpleNamespace(conv_plan=conv_plan)
    monkeypatch.setattr(_backends, "module", lambda platform: backend)
    found = implementations("cpu_conv.txt", "cpu")
    assert found == {
        "conv.1": (
            "jax_layout forward, a kernel",
            "float32, x NHWC 4x28x28x16, w HWIO 3x3x4x32, y NHWC 4x28x28x32, "
            "4 groups, fused bias, relu",
        )
    }
    assert asked["w_order"] == [3, 2, 0, 1] and asked["pass_"] == "forward"
    assert "workspace" not in asked


# --- memory formats


def aware(f, x):
    """An operator that computes on the physical array."""
    physical, format = stored(x)
    return store(f(physical), format)


def test_a_tag_that_is_kept():
    def f(x):
        return aware(jnp.tanh, aware(jnp.sin, jl.with_memory_format(x, "NHWC")))

    report = explained(f, (8, 16, 32, 32))
    (tag,) = (v for v in report.values if v.role == "tag")
    assert (tag.shape, tag.format) == ("f32[8,16,32,32]", "NHWC")
    assert tag.source == line(f, 1)
    assert dropped(report) == []
    assert [r.cause for r in of(report, "jaxpr")] == ["a memory format"] * 2


@pytest.mark.parametrize("format", ["NHWC", "NCHW8c"])
def test_a_tag_that_is_dropped(format):
    def at_once(x):
        y = jl.with_memory_format(x, format)
        return jnp.cumsum(y, 1)

    def later(x):
        y = aware(jnp.tanh, jl.with_memory_format(x, format))
        return lax.rev(y, (1,))

    (warning,) = dropped(explained(at_once, (8, 16, 32, 32)))
    assert (warning.code, warning.source) == ("format-dropped", line(at_once, 2))
    assert f"a value tagged {format}" in warning.message
    (warning,) = dropped(explained(later, (8, 16, 32, 32)))
    assert (warning.code, warning.source) == ("format-dropped", line(later, 2))
    assert warning.message.startswith("rev does not know memory formats")


def test_a_row_major_tag_cannot_be_dropped():
    f = lambda x: jnp.cumsum(jl.with_memory_format(x, "NCHW"), 1)  # noqa: E731
    assert dropped(explained(f, (8, 16, 32, 32))) == []


def test_a_tag_ends_at_the_border_of_a_scan():
    def f(x):
        def body(carry, _):
            return aware(jnp.tanh, jl.with_memory_format(carry, "NHWC")), None

        return lax.scan(body, x, None, length=3)[0]

    (warning,) = dropped(explained(f, (8, 16, 32, 32)))
    assert warning.message.startswith("scan does not know memory formats")


def test_formats_of_arguments_and_results():
    x = jl.with_memory_format(jnp.ones((8, 3, 32, 32), F32), "NHWC")
    report = jl.explain(lambda image: image + 1)(x)
    assert [(v.role, v.name, v.shape, v.format) for v in report.values] == [
        ("argument", "image", "f32[8,3,32,32]", "NHWC"),
        ("result", "0", "f32[8,3,32,32]", "row-major"),
    ]
    placed = jl.explain(lambda image: image + 1, platform="cpu")(x)
    assert placed.values == report.values
    # XLA:CPU writes the result in the default order.
    assert report.reordered_bytes() == 2 * x.nbytes


# --- arguments, options, errors


def test_static_arguments_and_jit():
    def f(x, axes, *, scale=1):
        return jnp.transpose(x, axes) * scale

    x = jnp.ones((64, 32), F32)
    plain = jl.explain(f)(x, (1, 0), scale=2)
    static = jax.jit(f, static_argnums=1, static_argnames="scale")
    jitted = jl.explain(static)(x, (1, 0), scale=2)
    for report in plain, jitted:
        assert [r.bytes for r in of(report, "jaxpr")] == [2 * x.nbytes]
    assert jitted.function == "f"


def test_nothing_runs():
    def f(x):
        jax.debug.callback(lambda _: pytest.fail("ran"), x)
        return x.T

    jl.explain(f)(jnp.ones((8, 8), F32))
    jax.effects_barrier()


def test_a_platform_that_is_not_known():
    with pytest.raises(ValueError, match="platform must be cpu or cuda, got 'tpu'"):
        jl.explain(jnp.sin, platform="tpu")


def test_what_is_no_function():
    with pytest.raises(TypeError, match="explain: f must be a function, got 3"):
        jl.explain(3)


@pytest.mark.parametrize("set_already", [False, True])
def test_cuda_without_the_plugin_says_what_to_install(monkeypatch, set_already):
    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    monkeypatch.delenv(variable, raising=False)
    if set_already:
        monkeypatch.setenv(variable, "1")
    from jax.experimental import topologies

    if any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("there is a GPU")

    def missing(*args, **kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    module = sys.modules["jax_layout.explain.explain"]  # the name is its function's
    monkeypatch.setattr(module, "_h100", module._h100.__wrapped__)  # not cached
    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(RuntimeError, match=r"pip install 'jax\[cuda13\]'") as error:
        jl.explain(jnp.sin, platform="cuda")(jnp.ones(3, F32))
    assert (variable in str(error.value)) != set_already
    assert "topology not implemented for cuda" in str(error.value)


def test_before_and_after():
    better = optimised(to_nhwc, jnp.sin)
    for f in better, jax.jit(better):
        report = explained(f, (8, 3, 64, 64))
        assert report.before == explained(to_nhwc, (8, 3, 64, 64))
        assert report.reordered_bytes() == 0 < report.before.reordered_bytes()
        assert "before: to_nhwc on cpu" in str(report)
        assert "bytes of reorders: 786 kB before, 0 B now" in str(report)
    assert explained(jax.jit(jax.checkpoint(to_nhwc)), (8, 3, 64, 64)).before is None


# --- how it is shown


@pytest.fixture(scope="module")
def report():
    return explained(convolve, (4, 16, 28, 28), (32, 16, 3, 3))


def test_text(report):
    text = str(report)
    assert text.startswith("convolve on cpu: the compiled program has 3 reorders")
    assert "XLA's layout for the convolution" in text and "803 kB" in text
    assert "warning: w (" in text and "measured now" in text
    assert "while other programs run" in text  # what is measured then is less


def loss(w):
    return (w @ w).sum()


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (loss, "loss"),
        (jax.jit(loss), "loss"),
        (jax.checkpoint(loss), "loss"),
        (jax.grad(loss), "grad(loss)"),
        (jax.jit(jax.grad(loss)), "grad(loss)"),
        (jax.checkpoint(jax.grad(loss)), "grad(loss)"),
        (jl.optimize_layout(jax.grad(loss)), "grad(loss)"),
        (jax.value_and_grad(loss), "value_and_grad(loss)"),
        (jax.vmap(jax.grad(loss)), "vmap(grad(loss))"),
        (jax.hessian(loss), "jacobian(jacobian(loss))"),
        (functools.partial(loss), "loss"),
    ],
)
def test_names_of_transformed_functions(f, name):
    shape = (1, 4, 4) if name.startswith("vmap") else (4, 4)
    assert explained(f, shape).function == name


def test_formats_say_that_vectors_have_none():
    report = explained(jnp.linalg.svd, (8, 8))
    assert [v.name for v in report.values if v.role == "result"] == ["0", "2"]
    assert "Memory formats, of arrays with two axes or more" in str(report)


def test_rich(report):
    console = pytest.importorskip("rich.console").Console(width=200)
    with console.capture() as capture:
        console.print(report)
    shown = capture.get()
    assert "Convolutions and GEMMs" in shown and "803 kB" in shown


def test_html_is_escaped(report):
    text = report._repr_html_()
    assert text.count("<table>") == text.count("</table>") == 3
    assert "NHWC, HWIO -&gt; NHWC" in text and "->" not in text


def test_json_is_plain(report):
    fields = json.loads(report.to_json())
    assert fields["reorders"][0]["stage"] == "hlo" and fields["before"] is None


def test_plot(report, tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "bytes.png")
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")
    report.plot(tmp_path / "bytes.svg")
    assert "test_explain.py" in (tmp_path / "bytes.svg").read_text()


def test_plot_of_another_kind(report, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"must end in .png, .svg or .pdf, got 'x'"):
        report.plot("x")
    with pytest.raises(ValueError, match="there is no folder"):
        report.plot(tmp_path / "nowhere" / "x.png")


def test_plot_without_matplotlib_says_what_to_install(report, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot("bytes.png")


def test_roofline_is_the_larger_of_two(report):
    assert report.seconds == max(
        report.flops / report.peak, report.bytes / report.bandwidth
    )
    assert np.isfinite(report.seconds) and report.peak > 0 < report.bandwidth
