# SPDX-License-Identifier: Apache-2.0
"""Where an instruction is: its neighbours, the user's line, the module around it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

from jax_layout import _backends
from jax_layout.explain.hlo import Instruction, Module
from jax_layout.optimize.values import SCOPE

# Frames below these are not the user's.
_LIBRARIES = tuple(
    os.path.dirname(str(file)) + os.sep
    for file in (jax.__file__, jax.lib.__file__, _backends.__file__)
)
# Every layer of a kind has the same line there.
_LAYERS = re.compile(r"[/\\](site|dist)-packages[/\\](flax|haiku|equinox|keras)[/\\]")
# Only a name for the buffer, or only another dtype, of the operand.
_PASSING = frozenset(
    "parameter bitcast get-tuple-element reshape copy transpose convert".split()
)
# Scopes that jax opens for functions of its own.
_CALLS = frozenset(
    "while body cond scan checkpoint rematted_computation remat2 eval_jaxpr "
    "closed_call core_call custom_jvp_call custom_vjp_call shard_map".split()
) | {SCOPE}


class Place(NamedTuple):
    """An instruction, and where it is."""

    module: Module
    computation: str
    at: Instruction

    def near(self, instruction: Instruction) -> Place:
        return self._replace(at=instruction)

    def users(self) -> list[Place]:
        users = self.module.users[self.computation].get(self.at.name, [])
        return [self.near(i) for i in users]

    def operands(self) -> list[Place]:
        names = self.module.names[self.computation]
        return [self.near(names[o]) for o in self.at.operands if o in names]

    @property
    def parts(self) -> tuple[Instruction, ...]:
        """It, and what it consists of if it is a fusion."""
        return (self.at, *self.module.fused(self.at))

    @property
    def passing(self) -> bool:
        """Whether it is its operand, as far as the cause of a reorder goes."""
        parts = self.module.fused(self.at) or (self.at,)
        return all(i.opcode in _PASSING for i in parts)

    @property
    def inside(self) -> bool:
        """Whether it is in a loop or a branch."""
        return self.module.trips[self.computation].inside

    @property
    def argument(self) -> str:
        """The name of the program's argument that this is, "" if it is none."""
        if self.computation != self.module.entry:
            return ""
        if self.at.opcode == "parameter":
            return self.at.op_name or f"argument {self.at.literal}"
        operands = self.operands()
        return operands[0].argument if self.passing and operands else ""

    @property
    def donated(self) -> bool:
        """Whether a result takes the memory of this argument."""
        at = self.at
        if at.opcode == "parameter":
            main = self.computation == self.module.entry
            return main and int(at.literal) in self.module.donated
        operands = self.operands()
        return self.passing and bool(operands) and operands[0].donated

    @property
    def line(self) -> str:
        """The user's "file:line", "" if XLA has none for it."""
        for part in self.parts:
            frames = self.module.frames(part)
            if line := user_line((frame.file, frame.line) for frame in frames):
                return line
        return ""

    @property
    def scope(self) -> str:
        """The module of the program, as `module_of` names it."""
        names = (part.op_name for part in self.parts)
        # Those of arguments are no paths.
        paths = (name for name in names if name.startswith("jit("))
        return next(filter(None, map(module_of, paths)), "")


def user_line(frames: Iterable[tuple[str, int]]) -> str:
    """The user's "file:line" of a stack.

    Where a layer of a library for neural networks is applied, if that is known: its
    own line is the same for all.

    Args:
      frames: files and lines, the innermost first.
    """
    known = [f for f in frames if not f[0].startswith(_LIBRARIES)]
    applied = [f for f in known if not _LAYERS.search(f[0])]
    file, line = next(iter(applied or known), ("", 0))
    return f"{file}:{line}" if file else ""


def module_of(op_name: str) -> str:
    """The scopes around an operation, without those that jax opens itself.

    They are those of `jax.named_scope`: Flax, Haiku and Equinox open one for every
    module.

    >>> module_of("jit(f)/transpose(jvp(Net))/Block_0/while/body/up/dot_general")
    'Net/Block_0/up'
    """
    return "/".join(_scopes(op_name.split("/")[:-1]))


def _scopes(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        while found := re.fullmatch(r"(?!jit\()\w+\((.*)\)", name):
            name = found[1]  # of a transformation
        jaxs = name in _CALLS or re.fullmatch(r"branch_\d+_fun|jit\(.*", name)
        if name and not jaxs and "->" not in name:  # an einsum's
            yield name


def origin(place: Place) -> tuple[str, str]:
    """The user's line of an instruction, and the module of the program that it is in.

    Of an instruction that XLA made, those of the nearest one that it serves.
    """
    level = [place]
    seen: set[str] = set()
    scope = ""
    for _ in range(4):
        for p in level:
            scope = scope or p.scope
            if line := p.line:
                return line, scope
        seen |= {p.at.name for p in level}
        near = {n.at.name: n for p in level for n in (*p.users(), *p.operands())}
        level = [p for name, p in near.items() if name not in seen]
    return "", scope
