# SPDX-License-Identifier: Apache-2.0
"""Programs of other people's libraries, with weights drawn at random.

What they need is the extra `models`; a collection that is not installed is left out.
"""

import importlib.util

from benchmarks.programs import (
    diffusion,
    equinox_nets,
    flax_nets,
    generators,
    haiku_nets,
    hugging_face,
    images_and_graphs,
    keras_nets,
)
from benchmarks.programs.program import Collection

COLLECTIONS = {
    "transformers": hugging_face.COLLECTION,
    "diffusers": diffusion.COLLECTION,
    "Keras": keras_nets.COLLECTION,
    "Haiku": haiku_nets.COLLECTION,
    "Flax": Collection(("flax", "optax"), flax_nets.PROGRAMS + generators.PROGRAMS),
    "Equinox": equinox_nets.COLLECTION,
    "PIX": images_and_graphs.PIX,
    "Jraph": images_and_graphs.JRAPH,
}


def missing(collection: Collection) -> list[str]:
    """What of it is not installed."""
    return [name for name in collection.modules if not importlib.util.find_spec(name)]
