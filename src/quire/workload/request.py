"""One request of a workload: what to ask, how long, when. Knows no server and no engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class WorkloadRequest:
    """What is asked once.

    Whoever sends it takes `prompt` if it is text, token ids or several texts; `messages`, if there
    are any, stand for it at chat routes.
    """

    prompt: str | list[int] | list[str]
    """Text, token ids, or the texts of one pooling request."""
    prompt_len: int
    """Tokens as the workload's tokenizer counts them; roughly, where words stand for tokens."""
    output_len: int
    """Tokens to generate at most."""
    arrival: float | None = None
    """Seconds since the beginning, where the dataset tells."""
    priority: int = 0
    messages: list[dict[str, Any]] | None = None
    """A conversation to continue."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request's body."""
    shared_prefix: int = 0
    """Tokens at the beginning that other requests of the workload begin with as well."""
