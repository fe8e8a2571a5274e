# SPDX-License-Identifier: Apache-2.0
"""Image filters of PIX, and graph networks of Jraph."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs.program import Collection, Made, Program, normal


def _images(*shape: int, seed: int = 0) -> Any:
    return jax.nn.sigmoid(normal(*shape, seed=seed))


def _augments(dtype: Any) -> Made:
    import dm_pix

    def one(image: Any) -> Any:
        image = dm_pix.gaussian_blur(image, 2.0, 11.0)
        image = dm_pix.adjust_contrast(dm_pix.adjust_hue(image, 0.1), 1.2)
        return dm_pix.rot90(image)

    return jax.vmap(one), (_images(4, 128, 128, 3),)


def _warps(dtype: Any) -> Made:
    import dm_pix

    def warp(image: Any) -> Any:
        return dm_pix.elastic_deformation(
            jax.random.key(0), image, alpha=20.0, sigma=4.0
        )

    return jax.vmap(warp), (_images(2, 128, 128, 3),)


def _likeness(dtype: Any) -> Made:
    import dm_pix

    def loss(a: Any, b: Any) -> Any:
        return 1 - jnp.mean(dm_pix.ssim(a, b))

    return jax.value_and_grad(loss), (
        _images(2, 128, 128, 3),
        _images(2, 128, 128, 3, seed=1),
    )


def _graph(nodes: int, edges: int, width: int) -> Any:
    import jraph

    random = np.random.default_rng(0)
    ends = random.integers(0, nodes, (2, edges)).astype(np.int32)
    return jraph.GraphsTuple(
        normal(nodes, width),
        normal(edges, width, seed=1),
        jnp.asarray(ends[0]),
        jnp.asarray(ends[1]),
        normal(1, width, seed=2),
        jnp.asarray([nodes]),
        jnp.asarray([edges]),
    )


def _message_passing(dtype: Any) -> Made:
    """Two rounds of a full graph network; learnt."""
    import jraph

    graph, width = _graph(1024, 8192, 64), 64
    inputs = {"edge": 4 * width, "node": 4 * width, "all": 3 * width}
    p = {
        name: (normal(n, width, seed=i) / n**0.5, normal(width, width, seed=i) / 8)
        for i, (name, n) in enumerate(inputs.items())
    }

    def loss(p: Any, graph: Any) -> Any:
        def mlp(name: str) -> Any:
            def update(*features: Any) -> Any:
                hidden = jnp.tanh(jnp.concatenate(features, -1) @ p[name][0])
                return hidden @ p[name][1]

            return update

        net = jraph.GraphNetwork(mlp("edge"), mlp("node"), mlp("all"))
        for _ in range(2):
            graph = net(graph)
        return jnp.mean(graph.nodes**2)

    return jax.grad(loss), (p, graph)


def _graph_attention(dtype: Any) -> Made:
    import jraph

    graph, width = _graph(2048, 16384, 128), 128
    query, logit = normal(width, width) / width**0.5, normal(2 * width, 1, seed=1)

    def forward(query: Any, logit: Any, graph: Any) -> Any:
        net = jraph.GAT(
            lambda nodes: nodes @ query,
            lambda sent, received, _: jax.nn.leaky_relu(
                jnp.concatenate([sent, received], -1) @ logit / width
            ),
        )
        return net(net(graph)).nodes

    return forward, (query, logit, graph)


PIX = Collection(
    ("dm_pix",),
    (
        Program("blur, contrast, hue and turn, batch 4", _augments),
        Program("elastic deformation, batch 2", _warps),
        Program("SSIM, gradient, batch 2", _likeness),
    ),
)
JRAPH = Collection(
    ("jraph",),
    (
        Program("graph network, gradient, 8192 edges", _message_passing),
        Program("graph attention, 16384 edges", _graph_attention),
    ),
)
