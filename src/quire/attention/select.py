"""Which attention backend serves a model: the first whose capabilities fit, and why not others.

Knows the table of backends, nothing of their insides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.attention.base import AttentionBackend, AttentionNeed
from quire.errors import ConfigError
from quire.kernels.dispatch import Ops
from quire.kernels.dispatch import ops as default
from quire.registry import Registry

BACKENDS: Final[Registry[type[AttentionBackend]]] = Registry(
    "attention backend",
    {"paged": "quire.attention.paged:PagedAttention"},
    plugins="attention_backend",
)
"""Best first. One of a plugin serves only if it is named: to install a package changes no bytes."""

NAMES: Final = {
    "CPU_ATTN": ("paged", frozenset({"cpu"})),
    "FLASH_ATTN": ("paged", frozenset({"cpu", "cuda"})),
}
"""vLLM's names of what the backends do, and the devices that have it under that name. Ours is flash
attention: softmax over spans of keys as they are read, never over a whole row of scores."""
_OLD_NAMES: Final = {"reference": "paged"}
"""What rows were called before; still taken."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend that serves, and the reasons against those before it in the table."""

    backend: AttentionBackend
    rejected: tuple[tuple[str, str], ...]


def select_backend(need: AttentionNeed, name: str | None = None, ops: Ops = default) -> Selection:
    """Choose a backend.

    Args:
        need: What it must be able to do.
        name: A row's, one of `NAMES`, or `auto`: narrows the choice to one.
        ops: The model's operations; by default those of the process.

    Raises:
        ConfigError: there is no backend of that name, or none serves `need`.
    """
    rejected: list[tuple[str, str]] = []
    given = name if name != "auto" else None
    for candidate in [_row_of(given, need.device)] if given else BACKENDS:
        backend = BACKENDS.get(candidate)
        reason = backend.capabilities.refusal(need)
        if reason is None:
            return Selection(backend(ops), tuple(rejected))
        rejected.append((candidate, reason))
    reasons = "; ".join(f"{candidate} {reason}" for candidate, reason in rejected)
    raise ConfigError(f"no attention backend serves this model: {reasons}")


def _row_of(name: str, device: str) -> str:
    """The row that a name stands for.

    Raises:
        ConfigError: none, on this device.
    """
    name = _OLD_NAMES.get(name, name)
    if name in BACKENDS:
        return name
    row, devices = NAMES.get(name.upper(), (None, frozenset()))
    if row is None or device not in devices:
        here = [known for known, (_, where) in NAMES.items() if device in where]
        known = ", ".join(["auto", *here, *BACKENDS])
        raise ConfigError(
            f"the attention backend (--attention-backend, QUIRE_ATTENTION_BACKEND) on {device} "
            f"must be one of {known}, got {name!r}"
        )
    return row
