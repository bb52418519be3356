"""The parts of an explanation: stretches of a request's time, each with one cause.

Data alone. `story.py` finds the causes, `assemble.py` fills the parts in, `wording.py` puts them
into words.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Cause(enum.StrEnum):
    """What a stretch of a request's life went to."""

    INTAKE = "intake"
    """Arrival at the frontend to the core's queue."""
    QUEUED = "queued"
    PREFILL = "prefill"
    RECOMPUTED = "recomputed"
    """Computing again what a preemption, or a dead core, had thrown away."""
    PREEMPTED = "preempted"
    """Waiting to come back after a preemption."""
    STALLED = "stalled"
    """Running, but the step had no tokens or blocks for it."""
    DECODE = "decode"
    DECODE_BESIDE_PREFILL = "decode_beside_prefill"
    """Decode steps that also computed prompts of others."""
    CORE_WAIT = "core_wait"
    """In a step whose threads were ready to run and got no core: other processes had them."""
    BETWEEN_STEPS = "between_steps"
    """From the end of a step to the beginning of the next."""
    DELIVERY = "delivery"
    """From the core's end of it to the frontend's."""
    UNDER_WAY = "under_way"
    """In a step that is not over, or that was running when it was aborted."""
    RESTART = "restart"
    """From the last step of a core that died to the queue of the next one."""
    EARLIER = "earlier"
    """Before the oldest record."""


class Blame(msgspec.Struct):
    """Another request that had to do with a part."""

    id: str
    tokens: int
    """Prompt tokens it computed meanwhile; 0 if it was in the way otherwise."""


class Part(msgspec.Struct):
    """Time with one cause."""

    cause: str
    """A `Cause`."""
    reason: str | None
    """For waiting: the `Wait` in small letters."""
    seconds: float
    share: float
    """Of the whole, 0 to 1."""
    steps: int
    """Engine steps that it covers, wholly or partly."""
    text: str
    requests: list[Blame]
    spans: list[tuple[float, float]]
    """Where it lies, in seconds since arrival."""
    details: dict[str, Any]
