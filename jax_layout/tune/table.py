# SPDX-License-Identifier: Apache-2.0
"""Writes a table of choices, whole or not at all."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jax_layout import choices
from jax_layout.tune.measure import Points


def machine(platform: str) -> dict[str, Any]:
    """What a table says of the processor or GPU that it was measured on."""
    if platform == "cpu":
        profile, processor = choices.profile(), choices.processor()
        return {
            "profile": profile,
            "processor": processor,
            "threads": choices.threads(),
        }
    device = jax.devices(platform)[0]
    kind = device.device_kind
    profile = re.sub("[^a-z0-9]+", "-", kind.lower()).strip("-")
    return {"profile": profile, "processor": kind, "threads": device.core_count}


def text(
    points: Points, quick: bool = False, measured_on: Mapping[str, Any] | None = None
) -> str:
    """The table of a machine, this one if left out, sorted, a point to a line."""
    head: dict[str, Any] = {
        "format": choices.FORMAT,
        "jaxlib": choices.jaxlib_minor(),
        **(machine("cpu") if measured_on is None else measured_on),
        "jax": jax.__version__,
        "quick": quick,
    }
    cases = collections.defaultdict(list)
    for work, ratios in sorted(points.items(), key=lambda p: (p[0].case, p[0].sizes)):
        rounded = {method: round(ratios[method], 3) for method in sorted(ratios)}
        cases[work.case].append(json.dumps([work.sizes, rounded]))
    fields = [
        f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()
    ]
    listed = [
        f"  {json.dumps(case)}: [\n   " + ",\n   ".join(lines) + "\n  ]"
        for case, lines in cases.items()
    ]
    fields.append(' "cases": {\n' + ",\n".join(listed) + "\n }")
    return "{\n" + ",\n".join(fields) + "\n}\n"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A new file that takes the place of `path` in the end, unless an error comes.

    Raises:
      OSError: the folder cannot be made, or written to; before anything is measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        try:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
