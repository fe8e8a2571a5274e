# SPDX-License-Identifier: Apache-2.0
"""The convolutions that the conv benchmark times, alone, in loops and in networks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import nets

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class ConvCase:
    """The same work, for jax with a convolution of any make and for torch.

    Attributes:
      group: the set of cases it belongs to.
      name: the case.
      parameters: makes the parameters, arrays in NumPy.
      x: shape of the input, NCHW or NHWC.
      jax: `jax(conv_general_dilated)`: a function of the parameters and the input.
      torch: `torch(module)`, the same.
      ours: that function of jax_layout's operators; left out, it has only our
        convolution.
      gradient: of the sum of squares, by the parameters and the input.
      channels_last: the input is NHWC; of torch's, in memory.
      dtype: of the parameters and the input.
    """

    group: str
    name: str
    parameters: Callable[[], Any]
    x: tuple[int, ...]
    jax: Callable[[Function], Function]
    torch: Callable[[Any], Function]
    gradient: bool = False
    channels_last: bool = False
    ours: Function | None = None
    dtype: str = "float32"

    @property
    def config(self) -> dict[str, str]:
        return {"x": "x".join(map(str, self.x)), "dtype": self.dtype}

    def operands(self) -> tuple[Any, np.ndarray]:
        random = np.random.default_rng(1)
        x = random.standard_normal(self.x, np.float32)
        dtype = jnp.dtype(self.dtype)
        return jax.tree.map(lambda a: np.asarray(a, dtype), (self.parameters(), x))


def _single(
    name: str,
    x: tuple[int, ...],
    out: int,
    kernel: int,
    groups: int = 1,
    dtype: str = "float32",
) -> list[ConvCase]:
    n, c, h, w = x

    def forward(layout: str) -> Callable[[Function], Function]:
        weights = "OIHW" if layout == "NCHW" else "HWIO"

        def with_conv(conv: Function) -> Function:
            return lambda weight, x: conv(
                x, weight, (1, 1), "SAME", dimension_numbers=(layout, weights, layout),
                feature_group_count=groups,
            )  # fmt: skip

        return with_conv

    def in_torch(torch: Any) -> Function:
        f = torch.nn.functional.conv2d
        return lambda weight, x: f(x, weight, None, 1, kernel // 2, 1, groups)

    def weight(layout: str) -> Callable[[], np.ndarray]:
        shape = (out, c // groups, kernel, kernel)
        array = np.random.default_rng(0).standard_normal(shape, np.float32)
        return lambda: array if layout == "NCHW" else array.transpose(2, 3, 1, 0).copy()

    return [
        ConvCase(
            "single",
            f"{name} {layout}{', gradient' if gradient else ''}",
            weight(layout),
            x if layout == "NCHW" else (n, h, w, c),
            forward(layout),
            in_torch,
            gradient,
            layout == "NHWC",
            dtype=dtype,
        )
        for layout in ("NCHW", "NHWC")
        for gradient in (False, True)
    ]


def _kind(
    name: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    convolve: Callable[[Function], Function],
    in_torch: Callable[[Any], Function],
) -> list[ConvCase]:
    """One of the rarer kinds, channels first."""

    def weight() -> np.ndarray:
        return np.random.default_rng(0).standard_normal(w, np.float32)

    return [
        ConvCase("kind", name + title, weight, x, convolve, in_torch, gradient)
        for gradient, title in ((False, ""), (True, ", gradient"))
    ]


def _kinds() -> list[ConvCase]:
    def same(rank: int) -> Callable[[Function], Function]:
        def with_conv(conv: Function) -> Function:
            return lambda w, x: conv(x, w, (1,) * rank, "SAME")

        return with_conv

    def in_torch(rank: int, padding: int) -> Callable[[Any], Function]:
        def with_torch(torch: Any) -> Function:
            f = getattr(torch.nn.functional, f"conv{rank}d")
            return lambda w, x: f(x, w, None, 1, padding)

        return with_torch

    def transposed(conv: Function) -> Function:
        # As jax.lax.conv_transpose calls it, of weights (in, out, h, w).
        def run(w: Any, x: Any) -> Any:
            return conv(
                x, jnp.flip(w, (2, 3)), (1, 1), [(2, 2)] * 2, lhs_dilation=(2, 2),
                dimension_numbers=("NCHW", "IOHW", "NCHW"),
            )  # fmt: skip

        return run

    def torch_transposed(torch: Any) -> Function:
        return lambda w, x: torch.nn.functional.conv_transpose2d(x, w, None, 2, 1)

    def each(conv: Function) -> Function:
        def one(w: Any, x: Any) -> Any:
            return conv(x[None], w, (1, 1), "SAME")[0]

        return jax.vmap(one)

    def torch_each(torch: Any) -> Function:
        def run(w: Any, x: Any) -> Any:
            n, o, i, *taps = w.shape
            y = torch.nn.functional.conv2d(
                x.reshape(1, -1, *x.shape[2:]), w.reshape(n * o, i, *taps), None, 1,
                1, 1, n,
            )  # fmt: skip
            return y.reshape(n, o, *x.shape[2:])

        return run

    return [
        *_kind("1-D 256ch, 9 taps, 2048", (4, 256, 2048), (256, 256, 9),
               same(1), in_torch(1, 4)),
        *_kind("3-D 32ch, 27 taps, 24^3", (2, 32, 24, 24, 24), (32, 32, 3, 3, 3),
               same(3), in_torch(3, 1)),
        *_kind("transposed 4x4, 128ch to 64, 28^2", (8, 128, 28, 28),
               (128, 64, 4, 4), transposed, torch_transposed),
        *_kind("filters of each sample, 64ch 28^2", (8, 64, 28, 28),
               (8, 64, 64, 3, 3), each, torch_each),
    ]  # fmt: skip


def _scan(conv: Function) -> Function:
    def step(x: Any, w: Any) -> Any:
        return jax.nn.relu(conv(x, w, (1, 1), "SAME")), None

    return lambda ws, x: jax.lax.scan(step, x, ws)[0]


def _torch_scan(torch: Any) -> Function:
    def run(ws: Any, x: Any) -> Any:
        for w in ws:
            x = torch.relu(torch.nn.functional.conv2d(x, w, None, 1, 1))
        return x

    return run


def _fori(conv: Function) -> Function:
    def run(w: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, x: conv(x, w, (1,), "VALID"), x)

    return run


def _torch_fori(torch: Any) -> Function:
    conv = torch.nn.functional.conv1d
    return lambda w, x: conv(conv(x, w), w)


def _loops() -> list[ConvCase]:
    def weights() -> np.ndarray:
        array = np.random.default_rng(0).standard_normal((4, 64, 64, 3, 3), np.float32)
        return array / 17

    def ones() -> np.ndarray:
        return np.full((1000, 1000, 1), 0.5, np.float32)

    x = (4, 64, 28, 28)
    return [
        ConvCase("loop", "scan 4x64x28^2", weights, x, _scan, _torch_scan),
        ConvCase("loop", "scan 4x64x28^2, gradient", weights, x, _scan, _torch_scan,
                 gradient=True),
        ConvCase("loop", "fori_loop 1000ch NCW", ones, (1, 1000, 1024), _fori,
                 _torch_fori),
    ]  # fmt: skip


def _network(
    name: str, net: Function, parameters: Callable[[], Any], x: tuple[int, ...]
) -> list[ConvCase]:
    def case(gradient: bool) -> ConvCase:
        def with_conv(conv: Function) -> Function:
            ops = nets.jax_ops(conv, train=gradient)
            return lambda parameters, x: net(ops, parameters, x)

        def in_torch(torch: Any) -> Function:
            ops = nets.torch_ops(torch, train=gradient)
            return lambda parameters, x: net(ops, parameters, x)

        title = f"{name}, batch {x[0]}{', gradient' if gradient else ''}"
        ours = nets.layout_ops(train=gradient)
        return ConvCase(
            "network", title, parameters, x, with_conv, in_torch, gradient,
            ours=lambda parameters, x: net(ours, parameters, x),
        )  # fmt: skip

    return [case(False), case(True)]


def all_cases() -> dict[str, list[ConvCase]]:
    return {
        "single": [
            *_single("depthwise 64ch 56^2", (8, 64, 56, 56), 64, 3, groups=64),
            *_single("32 groups 256ch 14^2", (8, 256, 14, 14), 256, 3, groups=32),
            *_single("3x3 256ch 14^2", (8, 256, 14, 14), 256, 3),
            *_single("3x3 512ch 7^2", (8, 512, 7, 7), 512, 3),
            *_single("1x1 64ch to 256 56^2", (1, 64, 56, 56), 256, 1),
            *_single("1x1 1024ch to 256 14^2", (8, 1024, 14, 14), 256, 1),
            *(
                case
                for dtype in ("bfloat16", "float16")
                for case in (
                    *_single("3x3 256ch 14^2", (8, 256, 14, 14), 256, 3, dtype=dtype),
                    *_single("3x3 128ch 64^2", (1, 128, 64, 64), 128, 3, dtype=dtype),
                    *_single("1x1 1024ch to 256 14^2", (8, 1024, 14, 14), 256, 1,
                             dtype=dtype),
                )
            ),
        ],
        "kind": _kinds(),
        "loop": _loops(),
        "network": [
            case
            for name, net, parameters, x in (
                ("ResNet-18", nets.resnet18, nets.resnet18_parameters, (3, 224, 224)),
                ("MobileNetV2", nets.mobilenet, nets.mobilenet_parameters,
                 (24, 56, 56)),
            )
            for batch in (1, 8)
            for case in _network(name, net, parameters, (batch, *x))
        ],
    }  # fmt: skip


def value(case: ConvCase, f: Function) -> Function:
    """What is timed of a jax function: its value, or its gradients."""
    if not case.gradient:
        return f
    loss = lambda parameters, x: jnp.sum(f(parameters, x) ** 2)  # noqa: E731
    both = (0,) if case.group == "network" else (0, 1)
    return jax.grad(loss, both)
