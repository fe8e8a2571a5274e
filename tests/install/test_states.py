# SPDX-License-Identifier: Apache-2.0
"""When kernels are installed and when not: caches, threads, exports, devices."""

import logging
import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_layout as jl
from hlo import kernels
from jax_layout import _backends, choices

pytestmark = pytest.mark.skipif(
    not _backends.available("cpu"), reason="the CPU backend is not built"
)
X = np.random.default_rng(0).standard_normal((2, 8, 12, 12)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 8, 3, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def nothing_installed():
    yield
    jl.uninstall()


def net(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def fresh():
    """`net`, jitted, which jax has not lowered yet."""
    return jax.jit(lambda x, w: net(x, w))


def calls(f, *args):
    """How many kernels of ours a jitted function is lowered to now."""
    return f.lower(*args).as_text().count("@jax_layout_")


class Traced:
    """A jitted function that counts how often it is traced."""

    def __init__(self):
        self.count = 0
        self.f = jax.jit(self._net)

    def _net(self, x, w):
        self.count += 1
        return net(x, w)


def test_a_function_compiled_outside_is_compiled_again_inside_and_both_are_kept():
    traced = Traced()
    plain = traced.f(X, W)
    records = []
    for _ in range(2):
        with jl.installed() as record:
            ours = traced.f(X, W)
        records.append(record)
        assert np.array_equal(traced.f(X, W), plain)
    assert traced.count == 2
    # The second time it was not lowered.
    assert [len(record.operations()) for record in records] == [1, 0]
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)


def test_install_holds_until_uninstall_and_twice_is_once():
    f = jax.jit(net)
    assert calls(f, X, W) == 0
    jl.install(["conv_general_dilated"])
    assert calls(f, X, W) == 1
    jl.install()
    assert calls(f, X, W) == 1
    jl.uninstall()
    jl.uninstall()
    assert calls(f, X, W) == 0


def test_the_innermost_block_counts_whatever_is_installed_meanwhile():
    f = jax.jit(net)
    with jl.installed():
        assert calls(f, X, W) == 1
        with jl.installed(()):
            jl.install()
            assert calls(f, X, W) == 0
        jl.uninstall()
        assert calls(f, X, W) == 1
    assert calls(f, X, W) == 0


def test_an_exception_leaves_the_block():
    with pytest.raises(ZeroDivisionError), jl.installed():
        raise ZeroDivisionError
    assert calls(jax.jit(net), X, W) == 0


def test_a_block_is_its_threads_own_and_install_everybodys():
    found = {}

    def elsewhere(name):
        def body():
            found[name] = calls(jax.jit(net), X, W)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    with jl.installed():
        elsewhere("block")
    jl.install()
    elsewhere("install")
    assert found == {"block": 0, "install": 1}


def test_threads_that_lower_at_once_have_each_their_own():
    start = threading.Barrier(8)
    found = [[] for _ in range(8)]

    def body(i):
        start.wait()
        for turn in range(6):
            if (i + turn) % 2:
                with jl.installed():
                    found[i].append(calls(fresh(), X, W))
            else:
                found[i].append(calls(fresh(), X, W))

    threads = [threading.Thread(target=body, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[(i + turn) % 2 for turn in range(6)] for i in range(8)]


def test_what_was_traced_outside_is_lowered_as_is_installed_then():
    traced = jax.jit(net).trace(X, W)
    with jl.installed():
        assert "@jax_layout_conv" in traced.lower().as_text()
    assert "@jax_layout_conv" not in traced.lower().as_text()


def test_what_is_compiled_ahead_of_time_stays_as_it_is():
    with jl.installed():
        compiled = jax.jit(net).lower(X, W).compile()
    assert kernels(compiled.as_text()) == 1
    np.testing.assert_allclose(compiled(X, W), net(X, W), rtol=1e-4, atol=1e-3)


def test_operations_on_their_own_and_jit_turned_off():
    with jl.installed() as record:
        lax.conv_general_dilated(X, W, (1, 1), "SAME")
    assert record.by_primitive()["conv_general_dilated"]["ours"] == 1
    with jax.disable_jit(), jl.installed():
        net(X, W)


def test_exports_are_portable_unless_asked():
    with jl.installed():
        portable = jax.export.export(jax.jit(net))(X, W)
    assert "jax_layout" not in portable.mlir_module()
    known = [jax.export.DisabledSafetyCheck.custom_call("jax_layout_conv")]
    with jl.installed(exports=True):
        export = jax.export.export(jax.jit(net), disabled_checks=known)(X, W)
    assert "jax_layout_conv" in export.mlir_module()
    np.testing.assert_allclose(export.call(X, W), net(X, W), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("exports", [False, True])
def test_exports_for_several_platforms_are_jaxs_own(exports):
    def export():
        f = jax.jit(lambda x, w: (net(x, w), x.T, x[0, 0] @ x[0, 1]))
        exported = jax.export.export(f, platforms=("cpu", "cuda"))(X, W)
        lines = exported.mlir_module().splitlines()  # without where they are from
        text = "\n".join(line for line in lines if not line.startswith("#loc"))
        return re.sub(r"\s*loc\([^()]*(\([^()]*\))?\)", "", text)

    expected = export()
    assert "stablehlo.case" in expected
    with jl.installed(exports=exports):
        assert export() == expected


def test_symbolic_shapes_are_jaxs_own():
    shape = jax.export.symbolic_shape("n, 8, 12, 12")
    spec = jax.ShapeDtypeStruct(shape, np.float32)
    with jl.installed(exports=True):
        export = jax.export.export(jax.jit(net))(spec, W)
    assert "jax_layout" not in export.mlir_module()


SAME = """
import sys
import jax, jax.numpy as jnp
from jax import lax
if sys.argv[1] == "ours":
    import jax_layout as jl
    jl.install()
    jl.uninstall()
if sys.argv[1] == "none":
    import jax_layout as jl
    jl.install([])
def f(x, w, i):
    y = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME"))
    z = jnp.einsum("nchw,ndhw->ncd", y, y).transpose(0, 2, 1)
    return z.sum() + jnp.take(w, i, axis=0).sum()
args = jnp.ones((2, 8, 12, 12)), jnp.ones((16, 8, 3, 3)), jnp.arange(4)
g = jax.jit(jax.value_and_grad(f, (0, 1)))
print(g.lower(*args).as_text())
print(g.lower(*args).compile().as_text())
"""


def run(source, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_where_nothing_is_installed_programs_are_jaxs_own_to_the_letter():
    # Without source lines, which differ by nothing but the column.
    plain = run(SAME, "plain")
    assert run(SAME, "ours") == plain
    assert run(SAME, "none") == plain


CACHED = """
import sys
import jax, jax.numpy as jnp
from jax import lax
import jax_layout as jl
import jax.monitoring
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(name) if "cache_hits" in name else None)
x, w = jnp.ones((2, 8, 12, 12)), jnp.ones((16, 8, 3, 3))
f = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"))
hits.clear()
if sys.argv[1] == "ours":
    jl.install()
compiled = f.lower(x, w).compile()
print(len(hits), compiled.as_text().count("jax_layout_conv"))
"""


def test_the_persistent_cache_never_mixes_them(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert run(CACHED, "plain", **cache).split() == ["0", "0"]
    missed, ours = run(CACHED, "ours", **cache).split()
    assert missed == "0" and int(ours) > 0
    assert run(CACHED, "ours", **cache).split() == ["1", ours]
    assert run(CACHED, "plain", **cache).split() == ["1", "0"]


def test_programs_over_several_devices_are_xlas_and_each_ones_part_ours(mesh):
    x = jax.device_put(X[:, :4].repeat(2, 0), jax.NamedSharding(mesh, jax.P("a")))
    w = jax.device_put(W[:, :4], jax.NamedSharding(mesh, jax.P()))
    auto = jax.jit(net)

    def per_device(x, w):
        return net(x, w)

    manual = jax.jit(
        jax.shard_map(per_device, in_specs=(jax.P("a"), jax.P()), out_specs=jax.P("a"))
    )
    expected = np.asarray(auto(x, w))
    with jl.installed():
        assert kernels(auto.lower(x, w).compile().as_text()) == 0
        assert kernels(manual.lower(x, w).compile().as_text()) == 1
        np.testing.assert_allclose(manual(x, w), expected, rtol=1e-4, atol=1e-3)
        gradient = jax.jit(jax.grad(lambda w: (manual(x, w) ** 2).sum()))
        found = gradient(w)
    np.testing.assert_allclose(found, gradient(w), rtol=1e-3, atol=1e-1)


def test_what_a_program_annotates_is_xlas():
    from jax.experimental.xla_metadata import set_xla_metadata

    def annotated(x, w):
        with set_xla_metadata(mine="yes"):
            return net(x, w)

    with jl.installed():
        assert calls(jax.jit(annotated), X, W) == 0


def test_tables_that_say_lax_mean_plain_jax(monkeypatch):
    with choices.forced("lax"), jl.installed():
        assert calls(fresh(), X, W) == 0
    monkeypatch.setattr(choices, "_given", ["lax"])
    with jl.installed():
        assert calls(fresh(), X, W) == 0


def test_operators_of_ours_fall_back_to_plain_jax_and_to_nothing_else():
    wide = jnp.asarray(X, jnp.float64)
    with jl.installed():
        f = jax.jit(lambda x, w: jl.conv(x, w, padding=1))
        assert calls(f, wide, jnp.asarray(W, jnp.float64)) == 0  # no kernel of float64
        with choices.forced("lax"):
            assert calls(jax.jit(lambda x: jl.permute(x, (1, 0))), X[0, 0]) == 0


def test_a_line_for_each_operation(caplog):
    with caplog.at_level(logging.WARNING), jl.installed(verbose=True):
        calls(fresh(), X, W)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "jax_layout.install"]
    assert line == (
        "jit__lambda: conv_general_dilated float32[2,8,12,12], float32[16,8,3,3] -> "
        "float32[2,16,12,12]: oneDNN"
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING), jl.installed():
        calls(fresh(), X, W)
    assert not caplog.records


def test_a_record_tells_what_was_not_moved():
    with jl.installed() as record:
        calls(fresh(), X, W)
    x, y, w = 2 * 8 * 144 * 4, 2 * 16 * 144 * 4, 16 * 8 * 9 * 4
    assert record.by_primitive() == {
        "conv_general_dilated": {"ours": 1, "XLA": 0, "kept_bytes": 2 * (x + y + w)}
    }
    assert "conv_general_dilated" in str(record)
    assert record.to_dict()["operations"][0]["program"] == "jit__lambda"


@pytest.mark.parametrize("install", [jl.install, lambda o: jl.installed(o).__enter__()])
def test_operators_that_do_not_exist_are_errors(install):
    with pytest.raises(ValueError, match="operators must be of conv_general_dilated, "):
        install(["conv"])
    with pytest.raises(TypeError, match="must be a sequence of strings, got 'gather'"):
        install("gather")
    with pytest.raises(TypeError, match="operators must be strings, got 3"):
        install([3])
    assert calls(jax.jit(net), X, W) == 0
