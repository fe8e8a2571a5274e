# SPDX-License-Identifier: Apache-2.0
"""A function in other memory formats is the same function."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_layout as jl
from hlo import compiled, count
from jax_layout.optimize import plan
from nets import NETS, make, resnet50
from programs import program, weights

TOLERANCE = {"float32": 2e-4, "float64": 1e-10}


def close(ours, theirs):
    """Equal within the dtype's tolerance, in units of the largest value."""
    ours, theirs = (jax.tree.leaves(tree) for tree in (ours, theirs))
    assert len(ours) == len(theirs)
    scale = max([float(jnp.abs(x).max()) for x in theirs if x.size], default=0) + 1e-6
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False)
        tolerance = scale * TOLERANCE.get(x.dtype.name, 0)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def normal(*shape, dtype=np.float32, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, dtype)


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME")


def permutes(jaxpr):
    """Of at least so many elements, in all its jaxprs, with the loops around them."""
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("permute", "transpose") and eqn.invars[0].aval.size > 64:
            found.append(())
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                around = () if name == "jit" else (name,)
                found += [(*around, *path) for path in permutes(inner)]
    return found


# --- generated programs


@pytest.mark.parametrize("seed", [6, 11, 14, 16, 24, 25, 36])
def test_random_programs_and_their_gradients(seed):
    f, _ = program(seed)
    dtype = ("float32", "float64")[seed % 2]
    w, x = weights(seed, dtype), normal(2, 8, 6, 5, dtype=dtype, seed=seed)
    differentiated = jax.value_and_grad(f, (0, 1))
    expected = jax.jit(differentiated)(w, x)
    optimized = jl.optimize_layout(differentiated)
    close(jax.jit(optimized)(w, x), expected)
    close(jax.jit(jax.value_and_grad(jl.optimize_layout(f), (0, 1)))(w, x), expected)
    report = optimized.layout_report(w, x)
    assert not report.optimized or report.planned_bytes <= report.original_bytes


@pytest.mark.parametrize("seed", [17, 26])
def test_random_programs_under_vmap_and_jvp(seed):
    f, _ = program(seed)
    w, x = weights(seed, "float32"), normal(3, 2, 8, 6, 5, seed=seed)
    ours, theirs = (
        jax.jit(
            jax.vmap(lambda x, f=f: jax.jvp(lambda x: f(w, x), (x,), (jnp.cos(x),)))
        )(x)
        for f in (jl.optimize_layout(f), f)
    )
    close(ours, theirs)


# --- networks

# Of each network, as it is and its gradient: transposes and copies in the HLO that
# XLA makes for CPUs, and what they may be at most once the layout is optimised.
GOLDEN = {
    ("resnet18", "forward"): 2,
    ("mobilenet", "forward"): 0,
    ("mobilenet", "gradient"): 2,
    ("unet", "forward"): 2,
    ("unet", "gradient"): 16,
    ("convnext", "forward"): 0,
    ("convnext", "gradient"): 8,
    ("vit", "forward"): 0,
    ("vit", "gradient"): 8,
}


@pytest.mark.parametrize("name, kind", GOLDEN, ids=["-".join(key) for key in GOLDEN])
def test_networks_move_less(name, kind):
    net, shape = NETS[name]
    # No relu of these images is within rounding of its kink, as one of seed 1 is: there
    # plain jax's own gradient of MobileNet moves by 1e-2 with weights four ulps off.
    x = normal(*shape, seed=3)
    p = make(net, x)
    f = net
    if kind == "gradient":
        f = jax.grad(lambda p, x: (net(p, x) ** 2).sum())
    optimized = jl.optimize_layout(f)
    report = optimized.layout_report(p, x)
    assert report.optimized and 2 * report.planned_bytes < report.original_bytes
    assert report.barriers == {}
    programs = [jax.jit(g).lower(p, x).compile() for g in (optimized, f)]
    close(*(program(p, x) for program in programs))
    ours, theirs = (
        count("transpose", hlo) + count("copy", hlo)
        for hlo in (program.as_text() for program in programs)
    )
    assert ours <= GOLDEN[name, kind] and ours < theirs


def test_resnet50s_gradient_is_planned_in_proportion_to_its_equations():
    """Each jaxpr is planned once for the formats of its operands."""
    x = jax.ShapeDtypeStruct((1, 3, 64, 64), jnp.float32)
    p = make(resnet50, x)
    f = jl.optimize_layout(jax.grad(lambda p, x: (resnet50(p, x) ** 2).sum()))
    report = f.layout_report(p, x)
    assert report.optimized and report.conversions < 12


# --- loops


def stack_of(w, x, count=3):
    def turn(c, _):
        return jax.nn.relu(conv(c, w)), c.mean()

    return lax.scan(turn, x, None, length=count)


@pytest.mark.parametrize("form", ["scan", "while", "fori", "nested"])
def test_loops_convert_nothing(form):
    w, x = 0.1 * normal(16, 16, 3, 3), normal(2, 16, 9, 9)
    f = {
        "scan": stack_of,
        "fori": lambda w, x: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(conv(c, w)), x),
        "while": lambda w, x: lax.while_loop(
            lambda c: c.max() > 1, lambda c: jnp.tanh(conv(c, w)), x
        ),
        "nested": lambda w, x: lax.scan(
            lambda c, _: (jax.jit(stack_of)(w, c)[0], None), x, None, length=2
        )[0],
    }[form]
    optimized = jl.optimize_layout(f)
    close(jax.jit(optimized)(w, x), jax.jit(f)(w, x))
    found = permutes(jax.make_jaxpr(optimized)(w, x).jaxpr)
    assert found == [()] * 3  # w and x before the loop, x after it


def test_stacked_weights_are_converted_before_the_scan():
    w, x = 0.1 * normal(3, 16, 16, 3, 3), normal(2, 16, 9, 9)

    def f(w, x):
        return lax.scan(lambda c, w: (jnp.tanh(conv(c, w)), None), x, w)[0]

    optimized = jl.optimize_layout(f)
    close(jax.jit(optimized)(w, x), jax.jit(f)(w, x))
    assert permutes(jax.make_jaxpr(optimized)(w, x).jaxpr) == [()] * 3


@pytest.mark.parametrize(
    "reverse, unroll, length", [(True, 1, 3), (False, 2, 3), (False, 1, 0)]
)
def test_scans_keep_their_parameters(reverse, unroll, length):
    w, x = 0.1 * normal(4, 4, 3, 3), normal(2, 4, 5, 5)

    def f(w, x):
        def turn(carry, i):
            c, n = carry
            return (conv(c, w), n + i), (c, n)

        steps = jnp.arange(length)
        return lax.scan(turn, (x, 0), steps, reverse=reverse, unroll=unroll)

    close(jax.jit(jl.optimize_layout(f))(w, x), jax.jit(f)(w, x))


@pytest.mark.parametrize("form", ["loops", "branches"])
def test_nested_control_is_planned_once_per_format(form, monkeypatch):
    steps = []
    step = plan.Planner.step

    def counted(self, *args):
        steps.append(args)
        return step(self, *args)

    monkeypatch.setattr(plan.Planner, "step", counted)
    w, x = normal(4, 4, 3, 3), normal(1, 4, 5, 5)

    def nest(depth):
        if depth == 0:
            return lambda c: jnp.tanh(conv(c, w)) @ c
        inner = nest(depth - 1)
        if form == "loops":
            return lambda c: lax.fori_loop(0, 2, lambda _, c: inner(c), c)
        return lambda c: lax.cond(c.sum() > 0, inner, lambda c: -c, c)

    counts = []
    for depth in (2, 4, 8):
        steps.clear()
        jl.optimize_layout(nest(depth)).layout_report(x)
        counts.append(len(steps))
    assert 0 < counts[2] - counts[1] <= 3 * (counts[1] - counts[0])


def test_branches_agree_on_a_format():
    w, x = normal(4, 4, 3, 3), normal(2, 4, 5, 5)

    def f(x):
        y = lax.cond(x.sum() > 0, lambda x: conv(x, w), lambda x: -x, x)
        return conv(y, w), lax.switch(2, [jnp.sin, lambda x: x, jnp.cos], y)

    for sign in (1, -1):
        close(jax.jit(jl.optimize_layout(f))(sign * x), jax.jit(f)(sign * x))


def test_a_branch_writes_its_products_in_the_order_of_the_others():
    """A gradient comes transposed from its product, where nobody asks otherwise."""
    x, y, w = normal(4, 96), normal(4, 40, seed=1), normal(96, 40, seed=2)

    def f(w):
        def grad(w):
            return jax.grad(lambda w: ((x @ w - y) ** 2).sum())(w)

        return lax.cond(w[0, 0] > 0, grad, lambda w: 2 * w, w).reshape(-1)

    optimized = jl.optimize_layout(f)
    report = optimized.layout_report(w)
    assert report.optimized and report.planned_bytes == 0
    for sign in (1, -1):
        close(jax.jit(optimized)(sign * w), jax.jit(f)(sign * w))


# --- transformations and what a function may hold


def test_idempotent():
    w, x = 0.1 * normal(8, 8, 3, 3), normal(2, 8, 9, 9)
    once = jl.optimize_layout(stack_of)
    again = jl.optimize_layout(lambda w, x: once(w, x))
    assert jl.optimize_layout(once).__wrapped__ is stack_of
    close(jax.jit(again)(w, x), jax.jit(once)(w, x))
    assert len(permutes(jax.make_jaxpr(again)(w, x).jaxpr)) == len(
        permutes(jax.make_jaxpr(once)(w, x).jaxpr)
    )


def test_higher_derivatives():
    w, x = normal(4, 3, 3, 3, dtype="float64"), normal(2, 3, 5, 5, dtype="float64")

    def f(w, x):
        return jnp.sum(jax.nn.softplus(conv(x, w)) ** 3)

    def hvp(f):
        return jax.jit(lambda w, x: jax.jvp(jax.grad(f), (w, x), (w, x))[1])

    close(hvp(jl.optimize_layout(f))(w, x), hvp(f)(w, x))


def test_checkpoints_stay_checkpoints():
    w, x = normal(4, 4, 3, 3), normal(2, 4, 5, 5)
    policy = jax.checkpoint_policies.dots_saveable

    def f(w, x):
        block = jax.checkpoint(
            lambda x: jnp.sin(conv(jnp.sin(conv(x, w)), w)), policy=policy
        )
        return block(x).sum()

    g = jl.optimize_layout(jax.grad(f))
    close(jax.jit(g)(w, x), jax.jit(jax.grad(f))(w, x))
    eqns = {
        which: [e for e in jax.make_jaxpr(h)(w, x).eqns if "policy" in e.params]
        for which, h in (("ours", g), ("theirs", jax.grad(f)))
    }
    assert [
        [(e.params["differentiated"], e.params["prevent_cse"]) for e in found]
        for found in eqns.values()
    ] == [[(True, True)]] * 2
    assert eqns["ours"][0].params["policy"] is policy


def test_custom_rules_are_kept():
    @jax.custom_jvp
    def cube(x, n):
        return x**3 + n

    cube.defjvp(lambda p, t: (cube(*p), 100 * t[0]))

    @jax.custom_vjp
    def flip(x, w, n):
        return conv(x, w), n

    flip.defvjp(
        lambda x, w, n: (flip(x, w, n), (x, w)),
        lambda kept, ct: (7 * kept[0] + conv(ct[0], kept[1]), 0 * kept[1], None),
    )

    @jax.custom_vjp
    def closed(x):
        return conv(x, w)

    closed.defvjp(lambda x: (conv(x, w), None), lambda _, ct: (5 * ct,))
    w, x = normal(4, 4, 3, 3), normal(2, 4, 5, 5)

    def f(x, n):
        y, n = flip(cube(closed(conv(x, w)), n), w, n)
        return (y * cube(flip(y, w, n)[0], n)).sum()

    for g in (jax.grad(jl.optimize_layout(f)), jl.optimize_layout(jax.grad(f))):
        close(jax.jit(g)(x, jnp.int32(2)), jax.jit(jax.grad(f))(x, jnp.int32(2)))


def test_symbolic_zeros_reach_the_rule():
    seen = []

    @jax.custom_jvp
    def product(x, y):
        return x * y

    @functools.partial(product.defjvp, symbolic_zeros=True)
    def jvp(primals, tangents):
        seen.append(type(tangents[1]).__name__)
        (x, y), t = primals, tangents[0]
        return x * y, t * y

    x = normal(2, 4, 5, 5)
    f = jl.optimize_layout(lambda x: product(x.swapaxes(1, 2), 2.0).sum())
    close(jax.jit(jax.grad(f))(x), jnp.full_like(x, 2))
    assert seen and set(seen) == {"SymbolicZero"}


def test_effects_stay_in_order(capsys):
    seen = []
    w, x = normal(4, 4, 3, 3), normal(2, 4, 5, 5)

    def f(x):
        def turn(c, i):
            jax.debug.callback(
                lambda i, shape: seen.append((int(i), shape.shape)), i, c
            )
            return conv(c, w), None

        y = lax.scan(turn, x, jnp.arange(3))[0]
        jax.debug.print("sum {}", jnp.int32(3), ordered=True)
        return y.sum()

    jax.jit(jl.optimize_layout(f))(x).block_until_ready()
    jax.effects_barrier()
    assert sorted(seen) == [(i, (2, 4, 5, 5)) for i in range(3)]
    assert capsys.readouterr().out == "sum 3\n"


def test_what_is_no_array_passes_through():
    x = normal(2, 3, 5, 5)

    def f(x, how, *, scale):
        return {"y": conv(x, x[:1, :, :3, :3]) * scale, "how": how, "n": 3, "no": None}

    out = jl.optimize_layout(f)(x, "fast", scale=2)
    assert (out["how"], out["n"], out["no"]) == ("fast", 3, None)
    close(out["y"], f(x, "fast", scale=2)["y"])


@pytest.mark.parametrize(
    "dtype", ["int8", "int4", "float8_e4m3fn", "bool", "complex64"]
)
def test_dtypes_pass(dtype):
    x = jnp.asarray(np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5) % 2, dtype)
    w = normal(4, 3, 3, 3)

    def f(x):
        y = conv(x.real.astype(jnp.float32), w)
        z = lax.rev(x, (1,)).transpose(0, 2, 3, 1).astype(dtype)
        return y, jnp.concatenate([z, z], 3)

    ours, theirs = (jax.jit(g)(x) for g in (jl.optimize_layout(f), f))
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-4)
    np.testing.assert_array_equal(np.asarray(ours[1]), np.asarray(theirs[1]))


def test_keys_weak_types_and_empty_arrays_pass():
    key, w = jax.random.key(0), normal(4, 3, 3, 3)

    def f(key, x, n):
        keys = jax.random.split(key, (2, 3)).T
        noise = jax.random.normal(keys[0, 0], x.shape, x.dtype)
        return (
            conv(x + noise, w),
            jax.random.key_data(keys),
            n * 2,
            x[:, :0].swapaxes(1, 2),
        )

    args = key, normal(2, 3, 5, 5), jnp.asarray(1.0) * 1
    close(jax.jit(jl.optimize_layout(f))(*args), jax.jit(f)(*args))
    weak = jax.jit(jl.optimize_layout(lambda n: n + 1))(3)
    assert weak.weak_type and weak == 4
    empty = jnp.zeros((0, 3, 5, 5), w.dtype)
    assert jl.optimize_layout(conv)(empty, w).shape == (0, 4, 5, 5)


def test_closed_over_tracers():
    w, x = normal(4, 3, 3, 3), normal(2, 3, 5, 5)

    def f(w, x):
        return jl.optimize_layout(lambda x: jnp.sin(conv(x, w)).sum())(x)

    close(
        jax.jit(jax.grad(f))(w, x),
        jax.jit(jax.grad(lambda w, x: jnp.sin(conv(x, w)).sum()))(w, x),
    )


def test_named_axes():
    w, x = normal(4, 3, 3, 3), normal(3, 2, 3, 5, 5)

    def f(x):
        y = conv(x, w)
        return y - lax.pmean(y, "batch")

    ours, theirs = (
        jax.jit(jax.vmap(g, axis_name="batch"))(x) for g in (jl.optimize_layout(f), f)
    )
    close(ours, theirs)


def test_a_shard_map_is_a_barrier_and_may_hold_one():
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    w, x = normal(4, 4, 3, 3), normal(4, 4, 5, 5)

    def local(x):
        return jnp.tanh(conv(x, w)) + lax.psum(x.sum(), "a")

    def sharded(f):
        return jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"))

    def f(x):
        return conv(sharded(local)(conv(x, w)), w)

    expected = jax.jit(f)(x)
    optimized = jl.optimize_layout(f)
    close(jax.jit(optimized)(x), expected)
    assert optimized.layout_report(x).barriers == {"shard_map": 1}
    close(jax.jit(sharded(jl.optimize_layout(local)))(x), jax.jit(sharded(local))(x))


def test_operators_of_ours_follow():
    w, x = normal(8, 8, 3, 3), normal(2, 8, 9, 9)

    def f(x):
        for _ in range(3):
            x = jax.nn.relu(jl.conv(x, w, padding=1))
        return x

    optimized = jl.optimize_layout(f)
    close(jax.jit(optimized)(x), f(x))
    assert permutes(jax.make_jaxpr(f)(x).jaxpr) == []
    assert permutes(jax.make_jaxpr(optimized)(x).jaxpr) == [()] * 2


@pytest.mark.parametrize("policy, tag", [("auto", "NCHW"), ("channels_first", "NHWC")])
def test_tags_come_before_the_policy(policy, tag):
    w, x = normal(8, 8, 3, 3), normal(2, 8, 9, 9)

    def f(x):
        return conv(jl.with_memory_format(x, tag), w)

    optimized = jl.optimize_layout(f, policy=policy)
    close(jax.jit(optimized)(x), jax.jit(f)(x))
    found = permutes(jax.make_jaxpr(optimized)(x).jaxpr)
    assert len(found) == (2 if tag == "NHWC" else 0)


# --- policies


@pytest.mark.parametrize(
    "policy", ["channels_first", "NHWC", jl.channels_last, "callback"]
)
def test_policies(policy):
    asked = []

    def callback(name, shape, dtype):
        asked.append((name, shape, dtype.name))
        return "NHWC" if shape[1] > 4 else None

    w, v, x = normal(8, 3, 3, 3), normal(4, 8, 3, 3), normal(2, 3, 7, 7)

    def f(x):
        return conv(jnp.sin(conv(x, w)), v)

    optimized = jl.optimize_layout(
        f, policy=callback if policy == "callback" else policy
    )
    close(jax.jit(optimized)(x), jax.jit(f)(x))
    if policy == "callback":
        shapes = [(2, 3, 7, 7), (2, 8, 7, 7)]
        assert asked[:2] == [("conv_general_dilated", s, "float32") for s in shapes]


def test_other_platforms_are_left_alone():
    x = normal(2, 3, 7, 7)
    f = jl.optimize_layout(lambda x: x.transpose(0, 2, 3, 1), platform="cuda")
    assert not f.layout_report(x).optimized
    assert str(jax.make_jaxpr(f)(x)) == str(jax.make_jaxpr(f.__wrapped__)(x))


def test_no_plan_moves_more_than_the_program():
    """One small convolution does not pay for the order of all around it."""
    w, x = normal(1, 8, 1, 1), normal(2, 8, 64, 64)

    def f(x):
        big = jnp.broadcast_to(x[:, None], (2, 16, 8, 64, 64)).reshape(2, 128, 64, 64)
        return jnp.sort(big, 1) + lax.conv_general_dilated(x, w, (1, 1), "SAME")

    optimized = jl.optimize_layout(f)
    report = optimized.layout_report(x)
    assert report.planned_bytes <= report.original_bytes or not report.optimized
    close(jax.jit(optimized)(x), jax.jit(f)(x))


def test_what_is_no_function_or_platform():
    with pytest.raises(TypeError, match="optimize_layout: f must be a function, got 3"):
        jl.optimize_layout(3)
    with pytest.raises(ValueError, match="optimize_layout: platform .* got 'foo'"):
        jl.optimize_layout(conv, platform="foo")
    for platform in ("cpu", "cuda", "tpu"):  # with or without such a device
        jl.optimize_layout(conv, platform=platform)


def test_bad_policies():
    with pytest.raises(TypeError, match=r"policy is 'auto', a memory format or a func"):
        jl.optimize_layout(conv, policy=3)
    with pytest.raises(ValueError, match="a name holds N and C"):
        jl.optimize_layout(conv, policy="NHCX")
    with pytest.raises(ValueError, match="without blocks, got NCHW16c"):
        jl.optimize_layout(conv, policy="NCHW16c")(
            normal(1, 16, 3, 3), normal(1, 16, 1, 1)
        )
    with pytest.raises(ValueError, match="is for arrays of 3 dimensions, got 4"):
        jl.optimize_layout(conv, policy=lambda *_: "NWC")(
            normal(1, 2, 3, 3), normal(1, 2, 1, 1)
        )


def test_references_are_left_alone_with_a_warning():
    def f(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] += x.swapaxes(2, 3).swapaxes(2, 3)
        return ref[...]

    x = normal(2, 3, 4, 4)
    with pytest.warns(UserWarning, match=r"mutable reference: \w+ \(.*test_optimize"):
        close(jax.jit(jl.optimize_layout(f))(x), x)


def test_explicit_shardings_are_left_alone_with_a_warning(mesh):
    if mesh.axis_types[0] != AxisType.Explicit:
        pytest.skip("only types of explicit meshes have shardings")
    x = jax.device_put(normal(4, 3, 4, 4), jax.NamedSharding(mesh, P("a")))
    with pytest.warns(UserWarning, match="explicit mesh axis"):
        close(jax.jit(jl.optimize_layout(jnp.sin))(x), jnp.sin(x))


def test_conversions_have_the_line_of_what_asked_for_them():
    jax.clear_caches()  # what is traced once has the lines of that time
    w, x = normal(4, 4, 3, 3), normal(2, 4, 5, 5)

    def f(x):
        y = conv(x, w)  # conv, above, asks for x in NHWC
        y = jnp.sort(y, 1)  # a jaxpr of its own, without lines of the user's
        return lax.fori_loop(0, 3, lambda _, c: conv(c, w), y)

    report = jl.explain(jl.optimize_layout(f))(x)
    found = [r for r in report.reorders if r.stage == "jaxpr"]
    assert {r.cause for r in found} == {"optimize_layout"}
    names = [r.source.rsplit("/", 1)[-1].split(":") for r in found]
    assert {file for file, _ in names} == {"test_optimize_layout.py"}
    first = f.__code__.co_firstlineno
    assert str(first + 2) in [line for _, line in names]


# --- XLA


def test_canary_xla_leaves_convolutions_in_loops_as_they_are():
    """If this fails XLA:CPU has fixed jax#12868: loops need no help any more."""
    w, x = normal(16, 16, 3, 3), normal(2, 16, 9, 9)
    hlo = compiled(lambda w, x: stack_of(w, x)[0], w, x)
    in_loop = [line for line in hlo.splitlines() if " convolution(" in line]
    assert in_loop and all("dim_labels=bf01_oi01->bf01" in line for line in in_loop)
    straight = compiled(conv, x, w)
    assert "dim_labels=b01f_01io->b01f" in straight
    ours = compiled(lambda w, x: jl.optimize_layout(stack_of)(w, x)[0], w, x)
    assert "bf01_oi01" not in ours


def test_nothing_warns():
    w, x = normal(4, 3, 3, 3), normal(2, 3, 5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jl.optimize_layout(conv)(x, w)


def test_what_is_left_alone_is_traced_once():
    traced = []

    def f(x):
        traced.append(x)
        return jnp.tanh(x), 3

    x = jnp.ones((4, 4))
    optimized = jl.optimize_layout(f)
    assert not optimized.layout_report(x).optimized
    traced.clear()
    y, three = jax.jit(lambda x: optimized(x))(x)
    assert len(traced) == 1 and three == 3
    np.testing.assert_array_equal(y, jnp.tanh(x))
