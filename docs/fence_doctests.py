# SPDX-License-Identifier: Apache-2.0
"""Shows the doctests of docstrings as code in the API reference."""

import re
from typing import Any

import griffe

# Up to the first blank line, as doctest itself has it.
_DOCTEST = re.compile(r"^>>> (?:.+\n?)+", re.M)


class FenceDoctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(
                lambda match: f"```pycon\n{match[0].rstrip()}\n```", obj.docstring.value
            )
