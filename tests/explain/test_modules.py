# SPDX-License-Identifier: Apache-2.0
"""Lines name the module of the program, and those that are alike are one."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_layout as jl
from jax_layout.explain.places import module_of, user_line
from jax_layout.explain.report import Advice, Product
from jax_layout.explain.tables import text
from reports import explained

LAYERS = 24


def dense(x, w, name):
    with jax.named_scope(name):
        return x @ w  # the one line of all layers, as in a library


def stack(x, ups, downs):
    with jax.named_scope("Net"):
        for i in range(LAYERS):
            with jax.named_scope(f"layers_{i}"):
                x = dense(dense(x, ups[i], "up"), downs[i], "down")
    return x


def arrays(rows, dtype=jnp.bfloat16):
    array = jax.ShapeDtypeStruct
    ups = [array((64, 128), dtype)] * LAYERS
    return array((rows, 64), dtype), ups, [array((128, 64), dtype)] * LAYERS


@pytest.fixture(scope="module")
def report():
    return jl.explain(stack)(*arrays(1))


def names(kind):
    return {f"Net/layers_{i}/{kind}" for i in range(LAYERS)}


def test_products_and_conversions_name_their_module(report):
    assert {p.module for p in report.products} == names("up") | names("down")
    assert {p.source for p in report.products} == {report.products[0].source}
    # They are XLA's own, without a name.
    weights = [c for c in report.conversions if c.bytes >= 6 * 64 * 128]
    assert {c.module for c in weights} == names("up") | names("down")
    assert len(weights) == 2 * LAYERS
    assert {a.module for a in report.warnings} == names("up") | names("down")


def test_lines_that_are_alike_are_one(report):
    shown = text(report)
    products = shown.split("Convolutions and GEMMs\n")[1].split("\n\n")[0]
    assert len(products.splitlines()) == 3  # the heading, up and down
    assert products.count(f"{LAYERS} x 1") == 2
    assert "Net/layers_*/up at explain/test_modules.py" in products
    assert f"{LAYERS} x argument  ups[*]  " in shown
    warnings = [line for line in shown.splitlines() if line.startswith("warning")]
    assert warnings and all(w.startswith(f"warning ({LAYERS} x): ") for w in warnings)
    assert any("ups[*] (bf16)" in w for w in warnings)
    assert len(jl.Report.from_json(report.to_json()).products) == 2 * LAYERS


def test_shares_and_bytes_of_a_line(report):
    """Bytes are those of each, shares those of all."""
    shown = text(report).split("Conversions of dtype that write arrays\n")[1]
    first = re.split(r"  +", shown.splitlines()[1])
    alike = [c for c in report.conversions if c.shape == first[1] and c.bytes > 40_000]
    total = sum(c.share for c in alike if "up" in c.module)
    assert first[2] == "49.2 kB" and first[3] == f"{LAYERS} x 1"
    assert float(first[4].rstrip("%")) == pytest.approx(100 * total, abs=0.1)


def test_what_differs_is_not_one(report):
    def product(op, **changed):
        fields = dict(
            kind="gemm",
            implementation="XLA's dot",
            detail="f32[1,2] x f32[2,3]",
            trips=1,
            trips_known=True,
            source="/a/model.py:7",
            module="Net/Block_0/up",
        )
        return Product(op, **(fields | changed))

    changes = (
        {},
        {"module": "Net/Block_1/up"},
        {"module": "Net/Block_1/down"},
        {"detail": "f32[1,2] x f32[2,4]"},
        {"trips": 2},
        {"source": "/a/model.py:8"},
    )
    products = tuple(product(f"dot.{i}", **c) for i, c in enumerate(changes))
    fields = {name: getattr(report, name) for name in report.__dataclass_fields__}
    advice = tuple(Advice("code", f"w[{i}] is 2 x 3", "") for i in range(3))
    shown = text(jl.Report(**fields | {"products": products, "warnings": advice}))
    lines = shown.split("Convolutions and GEMMs\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) == 1 + len(changes) - 1
    assert "2 x 1" in lines[1] and "Net/Block_*/up at a/model.py:7" in lines[1]
    assert "warning (3 x): w[*] is 2 x 3" in shown


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_in_a_terminal_breaks_no_number(report, width):
    console = pytest.importorskip("rich.console").Console(width=width)
    with console.capture() as capture:
        console.print(report)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width and "…" not in capture.get()
    for whole in "f32[64,128]", "49.2 kB", f"{LAYERS} x 1", "bf16[1,64]":
        assert any(re.search(rf"(^| ){re.escape(whole)}( |$)", line) for line in lines)


def test_modules_in_a_scan_and_a_gradient():
    def loss(w, x):
        def body(carry, _):
            with jax.named_scope("Block"):
                turned = jnp.sin(carry.T) + 1
                return dense(turned, w, "up"), None

        with jax.named_scope("Net"):
            return lax.scan(jax.checkpoint(body), x, None, length=3)[0].sum()

    report = explained(jax.grad(loss), (64, 64), (64, 64))
    assert {p.module for p in report.products} == {"Net/Block/up"}
    asked = [r for r in report.reorders if r.stage == "jaxpr"]
    assert {r.module for r in asked} >= {"Net/Block"}
    assert {r.module for r in asked} <= {"Net/Block", "Net/Block/up"}


@pytest.mark.parametrize(
    ("op_name", "module"),
    [
        ("jit(f)/dot_general", ""),
        ("reduce_sum", ""),
        ("jit(f)/Net/Dense_0/dot_general", "Net/Dense_0"),
        ("jit(f)/jvp(Net)/Dense_0/dot_general", "Net/Dense_0"),
        ("jit(f)/transpose(jvp(Net))/Dense_0/transpose", "Net/Dense_0"),
        ("jit(<lambda>)/vmap()/Net/jit(silu)/mul", "Net"),
        ("jit(f)/Net/while/body/eval_jaxpr/checkpoint/up/dot_general", "Net/up"),
        ("jit(f)/cond/branch_1_fun/up/dot_general", "up"),
        ("jit(f)/vmap(jit(g))/up/dot_general", "up"),
        ("jit(f)/Att_0/...hqk,...khd->...qhd/dot_general", "Att_0"),
    ],
)
def test_scopes_of_jaxs_own_are_left_out(op_name, module):
    assert module_of(op_name) == module


def test_the_line_is_where_a_layer_is_applied():
    flax = "/usr/lib/python3/site-packages/flax/linen/linear.py"
    model = "/home/me/model.py"
    jaxs = jax.__file__.replace("__init__", "_src/core")
    assert user_line([(jaxs, 1), (flax, 287), (model, 10)]) == f"{model}:10"
    assert user_line([(jaxs, 1), (flax, 287)]) == f"{flax}:287"
    assert user_line([(jaxs, 1)]) == ""


def test_flax():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="down")(nn.Dense(128, name="up")(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = Block()(x)
            return x

    net = Net()
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    params = jax.eval_shape(net.init, jax.random.key(0), x)
    report = jl.explain(net.apply)(params, x)
    expected = {f"Net/Block_{i}/{n}" for i in range(3) for n in ("up", "down")}
    assert {p.module for p in report.products} == expected
    assert {p.source.split(":")[0] for p in report.products} == {__file__}
    assert "3 x 1  Net/Block_*/up at explain/test_modules.py" in str(report)
