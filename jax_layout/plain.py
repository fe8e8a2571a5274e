# SPDX-License-Identifier: Apache-2.0
"""jax's functions as they were when this package was imported.

What has a drop-in here is called by these names, so that the drop-in can take its
place in jax, `jax.lax.dot_general = jax_layout.dot_general`, and not call itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax.numpy as jnp
    from jax import lax, nn, ops
else:
    import types

    import jax

    jnp, lax, nn, ops = (
        types.SimpleNamespace(**vars(module))
        for module in (jax.numpy, jax.lax, jax.nn, jax.ops)
    )
