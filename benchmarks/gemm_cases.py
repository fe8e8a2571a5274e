# SPDX-License-Identifier: Apache-2.0
"""The products that the gemm and linear benchmarks time."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_layout as jl

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class GemmCase:
    """The same product, as three libraries write it.

    Attributes:
      group: the set of cases it belongs to.
      name: the case.
      shapes: of the operands.
      dtype: of the operands.
      flops: multiplications and additions of real numbers.
      ours: the function of ours.
      jnp: the same in jax.numpy.
      torch: the same in torch, given the module `torch`; None to leave it out.
      index: the extent and number of the indices that are one more operand, the last.
      in_order: whether these are sorted.
      swept: whether reading the operands once is the ceiling.
      installed: whether ours is compiled while `jax_layout.installed()`.
    """

    group: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flops: int
    ours: Function
    jnp: Function
    torch: Callable[[Any], Function] | None = None
    index: tuple[int, int] | None = None
    in_order: bool = False
    swept: bool = False
    installed: bool = False

    @property
    def config(self) -> dict[str, str]:
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        return {"shapes": shapes, "dtype": self.dtype}

    def operands(self) -> list[np.ndarray]:
        """Random numbers that the dtype holds."""
        random = np.random.default_rng(0)
        if self.index is not None:
            extent, count = self.index
            rows = random.integers(0, extent, count).astype(np.int32)
            rows = np.sort(rows) if self.in_order else rows
            return [*dataclasses.replace(self, index=None).operands(), rows]
        if jnp.issubdtype(self.dtype, jnp.integer):
            return [random.integers(-8, 8, s).astype(self.dtype) for s in self.shapes]
        parts = [random.standard_normal((2, *s), np.float32) for s in self.shapes]
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            return [(re + 1j * im).astype(self.dtype) for re, im in parts]
        return [re.astype(jnp.dtype(self.dtype)) for re, _ in parts]

    def on_device(self, device: jax.Device) -> list[jax.Array]:
        """The same kind of numbers, made where they are used."""

        def draw(key: jax.Array) -> list[jax.Array]:
            dtype = jnp.dtype(self.dtype)
            keys = jax.random.split(key, len(self.shapes) + 1)
            if jnp.issubdtype(dtype, jnp.integer):
                made = [
                    jax.random.randint(k, s, -8, 8, jnp.int32).astype(dtype)
                    for k, s in zip(keys[1:], self.shapes, strict=True)
                ]
            else:
                wide = jnp.promote_types(np.float32, dtype)
                made = [
                    jax.random.normal(k, s, wide).astype(dtype)
                    for k, s in zip(keys[1:], self.shapes, strict=True)
                ]
            if self.index is not None:
                extent, count = self.index
                rows = jax.random.randint(keys[0], (count,), 0, extent, jnp.int32)
                made.append(jnp.sort(rows) if self.in_order else rows)
            return made

        with jax.default_device(device):
            return jax.jit(draw)(jax.random.key(0))


def _einsum(group: str, name: str, spec: str, dtype: str, **extents: int) -> GemmCase:
    a, b, y = spec.replace("->", ",").split(",")
    shapes = tuple(tuple(extents[i] for i in term) for term in (a, b))
    real = 4 if jnp.issubdtype(dtype, jnp.complexfloating) else 1
    wide = jnp.int32 if dtype == "int8" else None

    # As one writes it: x @ w.T, and einsum where there are more axes.
    matrices = {
        "mk,nk->mn": lambda a, b: a @ b.T,
        "km,kn->mn": lambda a, b: a.T @ b,
        "mk,kn->mn": lambda a, b: a @ b,
        "bmk,bkn->bmn": lambda a, b: a @ b,
    }

    def plain(a: Any, b: Any) -> Any:
        if spec in matrices and wide is None:
            return matrices[spec](a, b)
        return jnp.einsum(spec, a, b, preferred_element_type=wide)

    def torch(module: Any) -> Function:
        if dtype == "int8":
            across = spec == "mk,nk->mn"
            return lambda a, b: module._int_mm(a, b.T if across else b)
        return matrices.get(spec, lambda a, b: module.einsum(spec, a, b))

    return GemmCase(
        group,
        name,
        shapes,
        dtype,
        2 * real * math.prod(extents.values()),
        lambda a, b: jl.einsum(spec, a, b, preferred_element_type=wide),
        plain,
        torch,
    )


_FORMS = {"NT": "mk,nk->mn", "TN": "km,kn->mn", "NN": "mk,kn->mn"}


def _squares() -> list[GemmCase]:
    cases = [
        _einsum("square", f"{n} {form}", spec, "bfloat16", m=n, n=n, k=n)
        for n in (256, 512, 1024, 2048, 4096)
        for form, spec in _FORMS.items()
    ]
    cases += [
        _einsum("square", f"{n} {form}", _FORMS[form], dtype, m=n, n=n, k=n)
        for dtype, sizes, forms in (
            ("float32", (256, 512, 1024, 2048, 4096), ("NT", "NN")),
            ("float64", (512, 1024, 2048), ("NN", "NT")),
            ("float16", (512, 1024), ("NN", "NT")),
            ("complex64", (512, 1024), ("NN",)),
            ("complex128", (512,), ("NN",)),
            ("int8", (512, 1024), ("NN",)),
        )
        for n in sizes
        for form in forms
    ]
    return cases


def _skinny() -> list[GemmCase]:
    return [
        dataclasses.replace(
            _einsum(
                "skinny", f"{m} rows, {form}", _FORMS[form], dtype, m=m, n=4096, k=4096
            ),
            swept=True,
        )
        for dtype, rows in (
            ("bfloat16", (1, 4, 8, 16, 32)),
            ("float32", (1, 4, 8, 16, 32)),
            ("float16", (1, 8)),
            ("int8", (8, 32)),
        )
        for m in rows
        for form in ("NT", "NN")
    ]


def _attention() -> list[GemmCase]:
    heads = {"b": 8, "s": 512, "t": 512, "h": 16, "d": 64}
    cases = []
    for dtype in ("bfloat16", "float32"):
        cases += [
            _einsum("attention", "q k^T", "bshd,bthd->bhst", dtype, **heads),
            _einsum("attention", "p v", "bhst,bthd->bshd", dtype, **heads),
            _pair(dtype, **heads),
            _einsum(
                "attention",
                "to heads",
                "bsm,mhd->bhsd",
                dtype,
                b=8,
                s=512,
                m=1024,
                h=16,
                d=64,
            ),  # noqa: E501
            _einsum(
                "attention",
                "from heads",
                "bshd,hdm->bsm",
                dtype,
                b=8,
                s=512,
                m=1024,
                h=16,
                d=64,
            ),  # noqa: E501
            _einsum(
                "attention", "batched", "bmk,bkn->bmn", dtype, b=64, m=128, n=128, k=64
            ),  # noqa: E501
        ]
    return cases


def _pair(dtype: str, *, b: int, s: int, t: int, h: int, d: int) -> GemmCase:
    def pair(einsum: Function) -> Function:
        return lambda q, k, v: einsum(
            "bhst,bthd->bshd", einsum("bshd,bthd->bhst", q, k), v
        )

    return GemmCase(
        "attention",
        "both",
        ((b, s, h, d), (b, t, h, d), (b, t, h, d)),
        dtype,
        4 * b * s * t * h * d,
        pair(jl.einsum),
        pair(jnp.einsum),
        lambda torch: pair(torch.einsum),
    )


def _linear(
    tokens: int, inner: int, outer: int, dtype: str, activation: str | None
) -> list[GemmCase]:
    """Forward; its two gradients; both together as a training step sees them."""
    size = f"{tokens}x{inner}->{outer}"
    x, w, b, ct = (tokens, inner), (outer, inner), (outer,), (tokens, outer)
    flops = 2 * tokens * inner * outer
    kind = f", {activation}" if activation else ""
    ours = functools.partial(jl.linear, activation=activation)

    def plain(x: Any, w: Any, b: Any) -> Any:
        z = x @ w.T + b
        return jax.nn.gelu(z) if activation == "gelu" else z

    def torch_forward(torch: Any) -> Function:
        functional = torch.nn.functional

        def forward(x: Any, w: Any, b: Any) -> Any:
            z = functional.linear(x, w, b)
            return functional.gelu(z, approximate="tanh") if activation == "gelu" else z

        return forward

    return [
        GemmCase(
            "linear", f"{size}{kind}", (x, w, b), dtype, flops, ours, plain,
            torch_forward,
        ),
        # Without an activation the gradients do not need what came forward.
        GemmCase(
            "linear", f"{size}{kind}, and backward", (x, w, b, ct), dtype,
            (3 if activation else 2) * flops,
            _gradient(ours), _gradient(plain), _torch_gradient(torch_forward),
        ),
    ]  # fmt: skip


def _gradient(f: Function) -> Function:
    """By all operands but the last, the result's cotangent."""

    def gradient(*operands: Any) -> Any:
        *given, ct = operands
        return jax.vjp(f, *given)[1](ct)

    return gradient


def _torch_gradient(made: Callable[[Any], Function]) -> Callable[[Any], Function]:
    """The same in torch, of what `made(torch)` is."""

    def of(torch: Any) -> Function:
        f = made(torch)

        def gradient(*operands: Any) -> Any:
            *given, ct = operands
            given = [v.detach().requires_grad_() for v in given]
            with torch.enable_grad():
                return torch.autograd.grad(f(*given), given, ct)

        return gradient

    return of


def _linears() -> list[GemmCase]:
    cases = []
    for dtype in ("bfloat16", "float32"):
        for activation in (None, "gelu"):
            cases += _linear(2048, 1024, 4096, dtype, activation)
        cases += _linear(2048, 4096, 1024, dtype, None)
        cases += _linear(16, 4096, 4096, dtype, "gelu")
        tokens = {"m": 2048, "k": 1024, "n": 4096}
        cases += [
            _einsum("linear", "forward alone", "mk,nk->mn", dtype, **tokens),
            _einsum("linear", "dX alone", "mn,nk->mk", dtype, **tokens),
            _einsum("linear", "dW alone", "mn,mk->nk", dtype, **tokens),
        ]
    return cases


# How layers whose weights are stacked follow each other.
_SCANS: dict[str, Callable[..., Any] | None] = {
    "one by one": None,
    "in a scan": jax.lax.scan,
    "in a scan of jit": lambda f, *xs: jax.lax.scan(jax.jit(f), *xs),
    "in a scan of checkpoint": lambda f, *xs: jax.lax.scan(jax.checkpoint(f), *xs),
    "in a scan of two at a time": functools.partial(jax.lax.scan, unroll=2),
    "in a scan of three at a time": functools.partial(jax.lax.scan, unroll=3),
    "in a scan of branches": lambda f, *xs: jax.lax.scan(_in_a_branch(f), *xs),
    "in a scan of flat ones": jax.lax.scan,
}


def _in_a_branch(layer: Function) -> Function:
    """The layer, for hidden values that are numbers."""

    def step(h: Any, weights: Any) -> tuple[Any, None]:
        known = h[0, 0] == h[0, 0]
        return jax.lax.cond(known, layer, lambda h, _: (h, None), h, weights)

    return step


def _layers(rows: int, dtype: str, form: str, way: str) -> GemmCase:
    """Layers whose weights are stacked, scanned over or taken one after the other."""
    layers, inner, outer = 8, 512, 2048
    each = [(inner, outer), (outer, inner)][:: -1 if form == "NT" else 1]
    are_flat = way.endswith("flat ones")
    shapes = [(inner * outer,)] * 2 if are_flat else each

    def net(product: Function, relu: Function, scan: Any) -> Function:
        def layer(h: Any, weights: Any) -> tuple[Any, None]:
            a, b = (w.reshape(shape) for w, shape in zip(weights, each, strict=True))
            return h + product(relu(product(h, a)), b) / inner, None

        def forward(h: Any, a: Any, b: Any) -> Any:
            if scan is not None:
                return scan(layer, h, (a, b))[0]
            for i in range(layers):
                h, _ = layer(h, (a[i], b[i]))
            return h

        return forward

    across = form == "NT"
    plain = (lambda x, w: x @ w.T) if across else (lambda x, w: x @ w)
    ours = jl.linear if across else jl.matmul
    scan = _SCANS[way]
    return GemmCase(
        "stacked",
        f"{rows} rows, {form}, {way}",
        ((rows, inner), *((layers, *shape) for shape in shapes)),
        dtype,
        4 * rows * layers * inner * outer,
        net(ours, jax.nn.relu, scan),
        net(plain, jax.nn.relu, scan),
        lambda torch: net(plain, torch.nn.functional.relu, None),
    )


def _stacked() -> list[GemmCase]:
    return [
        _layers(rows, dtype, form, way)
        for dtype in ("bfloat16", "float32")
        for way in _SCANS
        for form in ("NT", "NN")
        for rows in (1, 8, 64)
    ]


def _turns(rows: int, inner: int, dtype: str, form: str, installed: bool) -> GemmCase:
    """Two products by the same weights again and again, as an RNN has them."""
    turns, outer = 32, 4 * inner
    shapes = (
        (rows, inner),
        *((inner, outer), (outer, inner))[:: 1 if form == "NN" else -1],
    )

    def net(product: Function, relu: Function, scan: Any) -> Function:
        def forward(h: Any, a: Any, b: Any) -> Any:
            def turn(h: Any, _: Any) -> tuple[Any, None]:
                left, right = (a.T, b.T) if form == "NT" else (a, b)
                return h + product(relu(product(h, left)), right) / inner, None

            if scan is not None:
                return scan(turn, h, None, length=turns)[0]
            for _ in range(turns):
                h, _ = turn(h, None)
            return h

        return forward

    plain = net(jnp.matmul, jax.nn.relu, jax.lax.scan)
    ours = net(jl.matmul, jax.nn.relu, jax.lax.scan)
    return GemmCase(
        "looped",
        f"{rows} rows by {inner}, {form}, {'installed' if installed else 'matmul'}",
        shapes,
        dtype,
        4 * rows * turns * inner * outer,
        plain if installed else ours,
        plain,
        lambda torch: net(torch.matmul, torch.nn.functional.relu, None),
        installed=installed,
    )


def _beside(inner: int, dtype: str, stacked: bool) -> GemmCase:
    """One row by a transpose, in a loop in which a library multiplies matrices."""
    turns, rows, columns = 32, 8, 64
    w = (turns, inner, inner) if stacked else (inner, inner)

    def net(tanh: Function, scan: Any) -> Function:
        def forward(x: Any, w: Any, y: Any, v: Any) -> Any:
            def turn(carry: Any, step: Any) -> tuple[Any, None]:
                h, z = carry
                h = x + tanh(h @ (step if stacked else w).T / inner)
                return (h, y + tanh(z @ v / columns)), None

            if scan is not None:
                return scan(turn, (x, y), w if stacked else None, length=turns)[0]
            h, z = x, y
            for i in range(turns):
                (h, z), _ = turn((h, z), w[i] if stacked else None)
            return h, z

        return forward

    plain = net(jnp.tanh, jax.lax.scan)
    return GemmCase(
        "looped",
        f"1 row by {inner}, NT, {'stacked' if stacked else 'kept'}, beside {rows} rows",
        ((1, inner), w, (rows, columns), (columns, columns)),
        dtype,
        2 * turns * (inner**2 + rows * columns**2),
        plain,
        plain,
        lambda torch: net(torch.tanh, None),
        installed=True,
    )


def _looped() -> list[GemmCase]:
    return [
        _beside(inner, dtype, stacked)
        for dtype in ("bfloat16", "float32")
        for stacked in (False, True)
        for inner in (128, 256, 512)
    ] + [
        _turns(rows, inner, dtype, form, installed)
        for dtype in ("bfloat16", "float32")
        for form in ("NT", "NN")
        for installed, few in ((True, (1, 2, 8)), (False, (1, 2)))
        for rows in few
        for inner in (128, 256, 512)
    ]


def _by_transpose(
    rows: int, size: int, dtype: str, backward: bool, installed: bool
) -> GemmCase:
    """A weight's transpose as one writes it, in jax's product or in ours."""
    x, w, ct = (rows, size), (2 * size, size), (rows, 2 * size)

    def forward(product: Function) -> Function:
        return lambda x, w: product(x, w.T)

    def torch_forward(torch: Any) -> Function:
        return forward(torch.matmul)

    ours = forward(jnp.matmul if installed else jl.matmul)
    plain = forward(jnp.matmul)
    written = "x @ w.T, installed" if installed else "matmul(x, w.T)"
    return GemmCase(
        "transposed",
        f"{rows}x{size}, {written}{', gradients' if backward else ''}",
        (x, w, ct) if backward else (x, w),
        dtype,
        2 * rows * size * 2 * size * (1 + backward),
        _gradient(ours) if backward else ours,
        _gradient(plain) if backward else plain,
        _torch_gradient(torch_forward) if backward else torch_forward,
        installed=installed,
    )


def _transposed() -> list[GemmCase]:
    return [
        _by_transpose(rows, size, dtype, backward, installed)
        for dtype in ("bfloat16", "float32")
        for installed in (True, False)
        for backward in (False, True)
        for rows, size in ((1, 128), (1, 1024), (16, 1024), (512, 1024))
    ]


def _lstm(product: Function) -> Function:
    def forward(xs: Any, w: Any) -> Any:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            h, c = carry
            gates = product(jnp.concatenate([x, h], axis=-1), w) / w.shape[0]
            i, f, o, u = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), c

        return jax.lax.scan(step, (xs[0], xs[0]), xs)[1]

    return forward


def _four_layers(product: Function) -> Function:
    return lambda x, *ws: functools.reduce(
        lambda h, w: jax.nn.relu(product(h, w)) / len(w), ws, x
    )


def _little(rows: int, inner: int, dtype: str, steps: int, way: str) -> GemmCase:
    """An LSTM, or layers, whose operands caches hold: what is around counts too."""
    net = _lstm if steps else _four_layers
    plain = net(jnp.matmul)
    ours = {"matmul": net(jl.matmul), "optimized": jl.optimize_layout(plain)}
    of_lstm = (steps, rows, inner), (2 * inner, 4 * inner)
    return GemmCase(
        "little",
        f"{rows} rows by {inner}, {'LSTM' if steps else '4 layers'}, {way}",
        of_lstm if steps else ((rows, inner), *[(inner, inner)] * 4),
        dtype,
        2 * rows * inner * inner * (8 * steps or 4),
        ours.get(way, plain),
        plain,
        installed=way == "installed",
    )


def _littles() -> list[GemmCase]:
    return [
        _little(rows, inner, dtype, steps, way)
        for dtype in ("bfloat16", "float32")
        for steps in (0, 32)
        for way in ("matmul", "installed", "optimized")
        for rows in (4, 32)
        for inner in (32, 128, 256)
    ]


def _tiny() -> list[GemmCase]:
    return [
        _einsum("tiny", f"{n} {form}", _FORMS[form], dtype, m=n, n=n, k=n)
        for dtype in ("bfloat16", "float32", "float64")
        for n in (4, 16, 64, 128)
        for form in ("NT", "NN")
    ] + [
        _einsum("tiny", f"1024 of {n}", "bmk,bkn->bmn", dtype, b=1024, m=n, n=n, k=n)
        for dtype in ("bfloat16", "float32")
        for n in (8, 16, 32)
    ]


def all_cases() -> dict[str, list[GemmCase]]:
    return {
        "square": _squares(),
        "skinny": _skinny(),
        "attention": _attention(),
        "tiny": _tiny(),
        "linear": _linears(),
        "stacked": _stacked(),
        "looped": _looped(),
        "little": _littles(),
        "transposed": _transposed(),
    }
