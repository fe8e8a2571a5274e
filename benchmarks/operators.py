# SPDX-License-Identifier: Apache-2.0
"""Times pooling, normalisation, resizing: `python -m benchmarks.operators --help`.

Every contender gets its arrays in the format, and returns them in it: ours tagged,
jax.numpy with the axes in that order, torch with strides.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_layout as jl
from benchmarks import profiles, runner, xla_program
from benchmarks.display import show_products
from benchmarks.harness import LINGERS, Contender, Timing, measure
from benchmarks.results import CaseResult
from benchmarks.runner import Work
from jax_layout.formats.tags import store, stored

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

_SHAPES = ((8, 64, 56, 56), (8, 256, 14, 14))
# Transformers' words, one sentence and eight, and ConvNeXt's pixels.
_ROWS = ((1, 1, 16, 768), (1, 1, 512, 768), (8, 1, 512, 768), (8, 1, 3136, 64))
_SETS = 3


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator as three libraries write it, of `x`, and `weight` and `bias`.

    Attributes:
      name: the case's.
      ours: of logical arrays.
      jnp: of arrays whose axes lie as in memory, and the axis of the channels.
      torch: of tensors, given the module `torch.nn.functional`.
      parameters: whether there are a weight and a bias of the shape of `(C,)`.
      shapes: of x.
      formats: of x.
    """

    name: str
    ours: Callable[..., Any]
    jnp: Callable[..., Any]
    torch: Callable[..., Any]
    parameters: bool = False
    shapes: tuple[tuple[int, ...], ...] = _SHAPES
    formats: tuple[str, ...] = ("NCHW", "NHWC")


def _spatial(channel: int, values: Sequence[Any], other: Any) -> tuple[Any, ...]:
    where = [axis for axis in (1, 2, 3) if axis != channel]
    out = [other] * 4
    for axis, value in zip(where, values, strict=True):
        out[axis] = value
    return tuple(out)


def _pool(name: str, k: int, s: int, p: int) -> Operator:
    mean = name == "avg_pool"

    def plain(x: Any, channel: int) -> Any:
        windows = (
            _spatial(channel, (k, k), 1),
            _spatial(channel, (s, s), 1),
            _spatial(channel, ((p, p), (p, p)), (0, 0)),
        )
        if mean:
            return lax.reduce_window(x, 0.0, lax.add, *windows) / (k * k)
        return lax.reduce_window(x, -jnp.inf, lax.max, *windows)

    return Operator(
        f"{name} {k}/{s}/{p}",
        lambda x: getattr(jl, name)(x, k, s, p),
        plain,
        lambda f, x: getattr(f, f"{name}2d")(x, k, s, p),
    )


def _affine(x: Any, mean: Any, var: Any, weight: Any, bias: Any, channel: int) -> Any:
    shape = [1] * 4
    shape[channel] = -1
    y = (x - mean) * (lax.rsqrt(var + 1e-5) * weight.reshape(shape))
    return y + bias.reshape(shape)


def _moments(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """As in Flax: the mean of the squares minus the square of the mean."""
    mean = x.mean(axes, keepdims=True)
    var = jnp.maximum((x * x).mean(axes, keepdims=True) - mean * mean, 0)
    return mean, var


def _batch_norm(x: Any, weight: Any, bias: Any, channel: int) -> Any:
    mean, var = _moments(x, tuple(axis for axis in range(4) if axis != channel))
    return _affine(x, mean, var, weight, bias, channel)


def _layer_norm(x: Any, axes: tuple[int, ...]) -> Any:
    mean, var = _moments(x, axes)
    return (x - mean) * lax.rsqrt(var + 1e-5)


def _group_norm(x: Any, weight: Any, bias: Any, channel: int) -> Any:
    shape = (*x.shape[:channel], 32, x.shape[channel] // 32, *x.shape[channel + 1 :])
    over = tuple(axis for axis in range(1, 5) if axis != channel)
    groups = x.reshape(shape)
    mean, var = (
        jnp.broadcast_to(
            v, (*v.shape[: channel + 1], shape[channel + 1], *v.shape[channel + 2 :])
        ).reshape(
            [1 if axis not in (0, channel) else n for axis, n in enumerate(x.shape)]
        )
        for v in _moments(groups, over)
    )
    return _affine(x, mean, var, weight, bias, channel)


def _bilinear(x: Any, channel: int) -> Any:
    shape = [n if axis in (0, channel) else 2 * n for axis, n in enumerate(x.shape)]
    return jax.image.resize(x, shape, "bilinear")


OPERATORS = (
    _pool("avg_pool", 2, 2, 0),
    _pool("avg_pool", 3, 2, 1),
    _pool("avg_pool", 3, 1, 1),
    _pool("max_pool", 2, 2, 0),
    _pool("max_pool", 3, 2, 1),
    _pool("max_pool", 3, 1, 1),
    Operator(
        "batch_norm",
        lambda x, w, b: jl.batch_norm(x, None, None, w, b, training=True)[0],
        _batch_norm,
        lambda f, x, w, b: f.batch_norm(x, None, None, w, b, training=True),
        parameters=True,
    ),
    Operator(
        "group_norm 32",
        lambda x, w, b: jl.group_norm(x, 32, w, b),
        _group_norm,
        lambda f, x, w, b: f.group_norm(x, 32, w, b),
        parameters=True,
    ),
    Operator(
        "layer_norm",
        lambda x: jl.layer_norm(x, x.shape[1:]),
        lambda x, _: _layer_norm(x, (1, 2, 3)),
        lambda f, x: f.layer_norm(x, x.shape[1:]),
    ),
    Operator(
        "layer_norm of rows",
        lambda x: jl.layer_norm(x, x.shape[-1:]),
        lambda x, _: _layer_norm(x, (3,)),
        lambda f, x: f.layer_norm(x, x.shape[-1:]),
        shapes=_ROWS,
        formats=("NCHW",),
    ),
    Operator(
        "bilinear x2",
        lambda x: jl.interpolate(x, scale_factor=2, mode="bilinear"),
        _bilinear,
        lambda f, x: f.interpolate(x, scale_factor=2, mode="bilinear"),
    ),
)


def _jax_functions(
    operator: Operator, format: jl.MemoryFormat, gradient: bool
) -> dict[str, Any]:
    channel = format.axes(1)[0]

    def ours(x: Any, *parameters: Any) -> Any:
        return stored(operator.ours(store(x, format), *parameters))[0]

    def plain(x: Any, *parameters: Any) -> Any:
        return operator.jnp(x, *parameters, channel)

    def pulled(f: Any) -> Any:
        return lambda ct, *operands: jax.vjp(f, *operands)[1](ct)

    functions = {"ours": ours, "jnp": plain}

    def forward(f: Any) -> Any:
        return lambda ct, *operands: f(*operands)

    wrap = pulled if gradient else forward
    return {name: jax.jit(wrap(f)) for name, f in functions.items()}


def _measure_case(
    operator: Operator,
    shape: tuple[int, ...],
    name: str,
    gradient: bool,
    device: jax.Device,
    timing: Timing,
    on_round: Callable[[], None],
) -> CaseResult:
    format = jl.MemoryFormat.named(name)
    axes = format.permutation
    assert axes is not None
    random = np.random.default_rng(0)
    x = random.standard_normal(shape, np.float32)
    parameters = [1 + random.standard_normal(shape[1], np.float32) for _ in "wb"]
    operands = [x, *(parameters if operator.parameters else [])]
    y = jax.eval_shape(operator.ours, *operands)
    ct = random.standard_normal(y.shape, np.float32)
    contenders: list[Contender] = []
    packed = [[np.transpose(v, axes) if v.ndim == 4 else v for v in (ct, *operands)]]
    sets = [[jax.device_put(v.copy(), device) for v in packed[0]] for _ in range(_SETS)]
    for family, f in _jax_functions(operator, format, gradient).items():
        compiled = f.lower(*sets[0]).compile()
        contenders.append(
            xla_program.contender(
                family,
                "ours" if family == "ours" else "peer",
                compiled,
                *sets,
                read=lambda out: np.asarray(out[0] if gradient else out),
            )
        )
    if torch is not None:
        contenders.append(
            _torch_contender(operator, ct, operands, name, gradient, axes)
        )
    expected: np.ndarray | None = None
    skipped = {}
    for contender in list(contenders):
        assert contender.read is not None
        found = contender.read(contender.launch(0))
        if expected is None:
            expected = found
        elif not np.allclose(found, expected, atol=1e-3):
            skipped[contender.label] = "differs from ours"
            contenders.remove(contender)
    samples = measure(contenders, timing, on_round)
    moved = x.nbytes + ct.nbytes * (2 if gradient else 1) + gradient * x.nbytes
    names = _names(operator, shape, name, gradient)
    return CaseResult(*names, moved, tuple(samples), skipped)


def _names(
    operator: Operator, shape: tuple[int, ...], format: str, gradient: bool
) -> tuple[str, str, dict[str, str]]:
    """The group, the name and what defines a case."""
    title = f"{operator.name} {'x'.join(map(str, shape))} {format}"
    config = {"shape": str(shape), "format": format, "dtype": "float32"}
    return "gradient" if gradient else "forward", title, config


def _torch_contender(
    operator: Operator,
    ct: np.ndarray,
    operands: list[np.ndarray],
    name: str,
    gradient: bool,
    axes: Sequence[int],
) -> Contender:
    layout = torch.channels_last if name == "NHWC" else torch.contiguous_format

    def tensor(v: np.ndarray) -> Any:
        t = torch.from_numpy(v.copy())
        return t.contiguous(memory_format=layout) if v.ndim == 4 else t

    sets = [[tensor(v) for v in (ct, *operands)] for _ in range(_SETS)]

    def launch(i: int) -> Any:
        given, *rest = sets[i % _SETS]
        if not gradient:
            with torch.no_grad():
                return operator.torch(torch.nn.functional, *rest)
        rest = [v.detach().requires_grad_() for v in rest]
        y = operator.torch(torch.nn.functional, *rest)
        return torch.autograd.grad(y, rest, given)[0]

    def read(result: Any) -> np.ndarray:
        return np.transpose(result.detach().numpy(), axes)

    return Contender("torch", "peer", launch, read=read, lingers=LINGERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases, shows and keeps what was measured; 1 if results differed."""
    options = runner.parser("operators", __doc__, seconds=0.8).parse_args(arguments)
    console = runner.console()
    device = jax.devices("cpu")[0]
    # torch's threads take a core for 6 to 10 ms
    timing = runner.timing(options, 15, sample_seconds=4e-3, settle_seconds=0.02)

    def work(
        operator: Operator, shape: tuple[int, ...], format: str, gradient: bool
    ) -> Work:
        def run(on_round: Callable[[], None]) -> CaseResult:
            given = operator, shape, format, gradient, device, timing, on_round
            return _measure_case(*given)

        return Work(*_names(operator, shape, format, gradient), run)

    cases = [
        work(operator, *given)
        for operator in OPERATORS
        for given in itertools.product(operator.shapes, operator.formats, (False, True))
    ]
    settings = dataclasses.asdict(timing)
    report = runner.record("operators", cases, options, settings, device, console)
    show_products(report, console)
    return int(any(case.skipped for case in report.cases))


if __name__ == "__main__":
    sys.exit(profiles.start(main))
