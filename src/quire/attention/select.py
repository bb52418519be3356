"""Which attention backend serves a model: the first whose capabilities fit, and why not others.

Knows the table of backends, nothing of their insides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.attention.base import AttentionBackend, AttentionNeed
from quire.errors import ConfigError
from quire.registry import Registry

BACKENDS: Final[Registry[type[AttentionBackend]]] = Registry(
    "attention backend", {"reference": "quire.attention.reference:ReferenceAttention"}
)
"""Best first."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend that serves, and the reasons against those before it in the table."""

    backend: AttentionBackend
    rejected: tuple[tuple[str, str], ...]


def select_backend(need: AttentionNeed, name: str | None = None) -> Selection:
    """Choose a backend; `name` narrows the choice to one.

    Raises:
        ConfigError: there is no backend of that name, or none serves `need`.
    """
    rejected: list[tuple[str, str]] = []
    for candidate in [name] if name else BACKENDS:
        backend = BACKENDS.get(candidate)()
        reason = backend.capabilities.refusal(need)
        if reason is None:
            return Selection(backend, tuple(rejected))
        rejected.append((candidate, reason))
    reasons = "; ".join(f"{candidate} {reason}" for candidate, reason in rejected)
    raise ConfigError(f"no attention backend serves this model: {reasons}")
