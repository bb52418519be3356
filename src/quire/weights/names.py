"""How names in a checkpoint map to a model's parameters, as data.

A family states a `NameRules`; nothing here knows families or files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Merge:
    """Layers that checkpoints keep apart and the model stacks in one weight, in this order."""

    target: str
    parts: tuple[str, ...]


QKV: Final = Merge("qkv_proj", ("q_proj", "k_proj", "v_proj"))
GATE_UP: Final = Merge("gate_up_proj", ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class NameRules:
    """The differences between a checkpoint's names and the model's."""

    merges: tuple[Merge, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    """(checkpoint prefix, our prefix); the first that fits is replaced."""
    ignore: tuple[str, ...] = ()
    """Regular expressions of checkpoint names (after renaming) that carry nothing we need."""

    endings: tuple[tuple[str, str], ...] = ()
    """(checkpoint ending, our ending), applied before the prefixes."""

    def renamed(self, name: str) -> str:
        """A checkpoint's name in our spelling."""
        for old, new in self.endings:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        for old, new in self.renames:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def ignored(self, name: str) -> bool:
        """Whether a (renamed) name may be skipped."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignore)

    def sources(self, parameter: str) -> tuple[str, ...]:
        """Names under which a checkpoint holds a parameter: several if it is merged from parts."""
        pieces = parameter.split(".")
        for merge in self.merges:
            if merge.target in pieces:
                place = pieces.index(merge.target)
                head, tail = pieces[:place], pieces[place + 1 :]
                return tuple(".".join([*head, part, *tail]) for part in merge.parts)
        return (parameter,)
