# SPDX-License-Identifier: Apache-2.0
"""Shows docstrings' doctests as code in the API reference, and links the pages."""

import re
from pathlib import Path
from typing import Any

import griffe

# Up to the first blank line, as doctest itself has it.
_DOCTEST = re.compile(r"^>>> (?:.+\n?)+", re.M)
_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


class FenceDoctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _DOCTEST.sub(
                lambda match: f"```pycon\n{match[0].rstrip()}\n```", obj.docstring.value
            )
            obj.docstring.value = _PAGE.sub(_link, text)


def _link(match: re.Match[str]) -> str:
    page = Path(__file__).parent / f"{match[1]}.md"
    title = page.read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}]({page.stem}.html)"
