# SPDX-License-Identifier: Apache-2.0
"""Learns to write as Python's manual does, and writes: a decoder-only transformer.

    python -m examples.generate
    python -m examples.generate --size 1b --batch 1 8 --tokens 24 --rounds 2

The network is of Llama's shape (RMS norm, rotary positions, grouped heads, gated MLP),
in bfloat16 with one byte per token. "small" learns from the help topics that come with
Python for as long as asked; "1b" has random weights, and its text is noise. The same
network then reads a prompt and writes, with this package's calls, with plain JAX's and,
if it is installed, in PyTorch, by turns. Printed: what it wrote, and tokens per second;
beside those written, how much of their time reading all weights once takes, where they
are more than caches hold.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_layout as jl
from benchmarks.harness import LINGERS
from benchmarks.peers import sweep_peer

Params = dict[str, Any]
Array = jax.Array
PROMPT = "The assignment statement "
LEARNING_RATE = 2e-3
LARGE = 256 << 20  # bytes, more than a cache holds


@dataclasses.dataclass(frozen=True)
class Size:
    """What a network is made of."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int = 256

    @property
    def features(self) -> int:
        return self.width // self.heads


SIZES = {
    "small": Size(layers=4, width=256, heads=4, key_heads=2, hidden=704),
    "1b": Size(16, 2048, 32, 8, 8192, 32_000),
}


@dataclasses.dataclass(frozen=True)
class Library:
    """The calls that the two networks differ in."""

    einsum: Callable[..., Array]
    attention: Callable[..., Array]
    update: Callable[[Array, Array, Array], Array]


def _update(cache: Array, new: Array, position: Array) -> Array:
    """As one writes it in plain JAX."""
    place = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(place)(cache, new, position)


OURS = Library(jl.einsum, jl.dot_product_attention, jl.update_cache)
PLAIN = Library(jnp.einsum, jax.nn.dot_product_attention, _update)


def random_params(size: Size, seed: int = 0) -> Params:
    """bfloat16 weights; layers are stacked."""
    shapes = {
        "query": (size.width, size.heads, size.features),
        "key": (size.width, size.key_heads, size.features),
        "value": (size.width, size.key_heads, size.features),
        "out": (size.heads, size.features, size.width),
        "gate": (size.width, size.hidden),
        "up": (size.width, size.hidden),
        "down": (size.hidden, size.width),
    }
    random = np.random.default_rng(seed)

    def weights(*shape: int, fan_in: int) -> Array:
        x = random.standard_normal(shape, np.float32) / np.sqrt(fan_in)
        return jnp.asarray(x, jnp.bfloat16)

    def layer() -> Params:
        fans = {"out": size.width, "down": size.hidden}
        made = {
            name: weights(*shape, fan_in=fans.get(name, size.width))
            for name, shape in shapes.items()
        }
        ones = jnp.ones(size.width, jnp.bfloat16)
        return made | {"norm1": ones, "norm2": ones}

    return {
        "embedding": weights(size.vocabulary, size.width, fan_in=1),
        "layers": [layer() for _ in range(size.layers)],
        "norm": jnp.ones(size.width, jnp.bfloat16),
        "head": weights(size.width, size.vocabulary, fan_in=size.width),
    }


def rms_norm(x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * weight


def rotary(x: Array, positions: Array) -> Array:
    """Turns pairs of features by their position (Su et al., arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def network(
    library: Library,
    params: Params,
    tokens: Array,
    caches: list[tuple[Array, Array]] | None = None,
    position: Array | None = None,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Scores of the next token after each; caches, if given, with the new rows."""
    einsum = library.einsum
    count = tokens.shape[1]
    first = jnp.zeros(tokens.shape[:1], jnp.int32) if position is None else position
    positions = first[:, None] + jnp.arange(count)
    x = params["embedding"][tokens]
    written = []
    for i, layer in enumerate(params["layers"]):
        y = rms_norm(x, layer["norm1"])
        q, k, v = (
            einsum("btd,dnh->btnh", y, layer[name])
            for name in ("query", "key", "value")
        )
        q, k = rotary(q, positions), rotary(k, positions)
        if caches is None or position is None:
            attended = library.attention(q, k, v, is_causal=True)
        else:
            k, v = (
                library.update(cache, new, position)
                for cache, new in zip(caches[i], (k, v), strict=True)
            )
            attended = library.attention(
                q, k, v, key_value_seq_lengths=position + count
            )
        written.append((k, v))
        x = x + einsum("btnh,nhd->btd", attended, layer["out"])
        y = rms_norm(x, layer["norm2"])
        gate = jax.nn.silu(einsum("btd,df->btf", y, layer["gate"]))
        hidden = gate * einsum("btd,df->btf", y, layer["up"])
        x = x + einsum("btf,fd->btd", hidden, layer["down"])
    logits = einsum("btd,dv->btv", rms_norm(x, params["norm"]), params["head"])
    return logits.astype(jnp.float32), written


# --- learning


def text() -> np.ndarray:
    """The help topics of Python, as bytes."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics.values()).encode(), np.uint8)


def learn(
    size: Size, seconds: float, console: Console, length: int = 256, batch: int = 8
) -> Params:
    """Learns to tell the next byte: Adam, on float32 copies of the weights."""
    corpus = text()
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), random_params(size))
    moments = jax.tree.map(lambda x: (jnp.zeros_like(x), jnp.zeros_like(x)), params)

    def loss(params: Params, tokens: Array) -> Array:
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        scores, _ = network(OURS, narrow, tokens[:, :-1])
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(scores), tokens[:, 1:, None], axis=-1
        )
        return -chosen.mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, moments: Any, tokens: Array, count: Array
    ) -> tuple[Params, Any, Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens)

        def move(w: Array, m: tuple[Array, Array], g: Array) -> tuple[Array, Any]:
            mean, square = 0.9 * m[0] + 0.1 * g, 0.99 * m[1] + 0.01 * g * g
            scale = jnp.sqrt(square / (1 - 0.99**count)) + 1e-8
            rate = LEARNING_RATE * jnp.minimum(1, count / 20)
            return w - rate * mean / (1 - 0.9**count) / scale, (mean, square)

        moved = jax.tree.map(move, params, moments, gradients)
        first, second = (
            jax.tree.map(lambda _, pair, i=i: pair[i], params, moved) for i in (0, 1)
        )
        return first, second, value

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("learning", total=seconds)
        end = time.monotonic() + seconds
        count, value = 0, 0.0
        while time.monotonic() < end or count == 0:
            count += 1
            starts = random.integers(0, corpus.size - length - 1, batch)
            tokens = np.stack([corpus[i : i + length + 1] for i in starts])
            params, moments, lost = step(
                params, moments, tokens.astype(np.int32), jnp.float32(count)
            )
            value = float(lost)
            left = max(0.0, end - time.monotonic())
            bar.update(
                task,
                completed=seconds - left,
                description=f"learning, loss {value:.2f}",
            )
    console.print(f"{count} steps, loss {value:.2f} per byte", highlight=False)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


# --- writing


class Writer:
    """Reads prompts and writes, with the calls of one library."""

    def __init__(self, library: Library, size: Size, params: Params, most: int) -> None:
        self.params, self.size, self.most = params, size, most

        def read(params: Params, tokens: Array) -> tuple[Array, Any]:
            scores, rows = network(library, params, tokens)
            room = ((0, 0), (0, most - tokens.shape[1]), (0, 0), (0, 0))
            caches = [(jnp.pad(k, room), jnp.pad(v, room)) for k, v in rows]
            return jnp.argmax(scores[:, -1], -1).astype(jnp.int32), caches

        def write(
            params: Params, caches: Any, token: Array, first: Array, count: int
        ) -> tuple[Any, Array]:
            def one(carried: Any, at: Array) -> tuple[Any, Array]:
                caches, token = carried
                position = jnp.full(token.shape, at)
                scores, caches = network(
                    library, params, token[:, None], caches, position
                )
                next_token = jnp.argmax(scores[:, -1], -1).astype(jnp.int32)
                return (caches, next_token), token

            places = first + jnp.arange(count, dtype=jnp.int32)
            (caches, _), written = jax.lax.scan(one, (caches, token), places)
            return caches, written.T

        self._read = jax.jit(read)
        self._write = jax.jit(write, static_argnums=4, donate_argnums=1)

    def __call__(self, tokens: np.ndarray, count: int) -> tuple[Array, float, float]:
        """What it writes, and the seconds of reading and of writing."""
        start = time.perf_counter()
        token, caches = jax.block_until_ready(self._read(self.params, tokens))
        middle = time.perf_counter()
        first = jnp.int32(tokens.shape[1])
        _, written = self._write(self.params, caches, token, first, count)
        written.block_until_ready()
        return written, middle - start, time.perf_counter() - middle


WriterOfAny = Callable[[np.ndarray, int], tuple[Any, float, float]]


def writers(size: Size, params: Params, most: int) -> dict[str, WriterOfAny]:
    """By the name of the library."""
    found: dict[str, WriterOfAny] = {
        "jax_layout": Writer(OURS, size, params, most),
        "plain JAX": Writer(PLAIN, size, params, most),
    }
    try:
        from examples.generate_torch import TorchWriter
    except ImportError:
        return found
    return found | {"PyTorch": TorchWriter(params, most)}


def sweep(size: Size, params: Params) -> Callable[[], float] | None:
    """Seconds to read what a step reads: all weights, and of the embedding a row."""
    read = [
        x for x in jax.tree.leaves(params | {"embedding": []}) if x.size > size.width
    ]
    if sum(x.nbytes for x in read) < LARGE or jax.default_backend() != "cpu":
        return None
    try:
        [contender, *_] = sweep_peer.contenders([read])
    except OSError:  # no compiler
        return None

    def seconds() -> float:
        start = time.perf_counter()
        contender.launch(0)
        return time.perf_counter() - start

    return seconds


@dataclasses.dataclass
class Measured:
    """Seconds of each turn: of reading and writing by library, and of the sweep."""

    read: dict[str, list[float]]
    write: dict[str, list[float]]
    sweep: list[float]


def measure(
    size: Size,
    params: Params,
    tokens: np.ndarray,
    count: int,
    rounds: int,
    console: Console,
) -> tuple[np.ndarray, Measured]:
    """What the first sequence becomes, and how long it takes."""
    found = writers(size, params, tokens.shape[1] + count)
    weights = sweep(size, params)
    times = Measured({name: [] for name in found}, {name: [] for name in found}, [])
    with Progress(console=console, transient=True) as bar:
        turns = range(-1, rounds)  # the first compiles
        for turn in bar.track(turns, description="reading and writing"):
            for name, writer in found.items():
                written, read, write = writer(tokens, count)
                if name == "jax_layout":
                    wrote = np.asarray(written[0])
                if name == "PyTorch":
                    time.sleep(LINGERS)  # its threads wait in a loop for more work
                if turn >= 0:
                    times.read[name].append(read)
                    times.write[name].append(write)
                if weights is not None and turn >= 0:
                    times.sweep += [weights() for _ in range(3)]
    return wrote, times


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seconds", type=float, default=60, help="to learn")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1], help="sequences at a time"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens to read")
    parser.add_argument("--tokens", type=int, default=256, help="to write")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    console = Console()
    size = SIZES[options.size]
    if options.size == "small":
        params = learn(size, options.seconds, console)
    else:
        params = random_params(size)
    corpus = text()[: options.prompt - len(PROMPT)]
    prompt = np.concatenate([corpus, np.frombuffer(PROMPT.encode(), np.uint8)])
    table = Table("tokens per second", "batch", "read", "write", box=box.SIMPLE)
    table.add_column("weights, % of write")
    for batch in options.batch:
        tokens = np.tile(prompt.astype(np.int32), (batch, 1))
        wrote, times = measure(
            size, params, tokens, options.tokens, options.rounds, console
        )
        for name in times.read:
            read, write = (
                statistics.median(x) for x in (times.read[name], times.write[name])
            )
            row = [name, f"{batch}", f"{tokens.size / read:,.0f}"]
            row.append(f"{batch * options.tokens / write:,.1f}")
            if times.sweep:
                share = statistics.median(times.sweep) * options.tokens / write
                row.append(f"{100 * share:.0f}")
            table.add_row(*row)
    if size.vocabulary == 256:
        console.print(PROMPT, style="bold", end="")
        console.print(bytes(wrote.astype(np.uint8)).decode(errors="replace"))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
