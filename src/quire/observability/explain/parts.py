"""The parts of an explanation: portions of a request's time, each with one cause.

This is data only. `story.py` finds the causes, `assemble.py` fills in the parts, `wording.py` puts
them into words.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Cause(enum.StrEnum):
    """What a portion of a request's time was spent on."""

    INTAKE = "intake"
    """From arrival at the frontend to the core's queue."""
    QUEUED = "queued"
    PREFILL = "prefill"
    RECOMPUTED = "recomputed"
    """Computing again what was lost to a preemption or a dead core."""
    PREEMPTED = "preempted"
    """Waiting to be admitted again after a preemption."""
    STALLED = "stalled"
    """Running, but the step had no token budget or no blocks for it."""
    DECODE = "decode"
    DECODE_BESIDE_PREFILL = "decode_beside_prefill"
    """Decode steps that also computed prompts of others."""
    CORE_WAIT = "core_wait"
    """In a step whose threads were ready to run but had no core, because other processes had
    them."""
    BETWEEN_STEPS = "between_steps"
    """From the end of a step to the beginning of the next."""
    DELIVERY = "delivery"
    """From its end in the core to its end in the frontend."""
    UNDER_WAY = "under_way"
    """In a step that has not ended, or had not when the request was aborted."""
    RESTART = "restart"
    """From the last step of a core that died to the queue of the next core."""
    EARLIER = "earlier"
    """Before the oldest record."""


class Blame(msgspec.Struct):
    """Another request that is to blame for a part."""

    id: str
    tokens: int
    """Prompt tokens it computed meanwhile; 0 if it was in the way by other means."""


class Part(msgspec.Struct):
    """The time that one cause took."""

    cause: str
    """A `Cause`."""
    reason: str | None
    """Of `queued` and `stalled`: the name of the `Wait`, in lower case."""
    seconds: float
    share: float
    """Share of the completion's whole time, 0 to 1."""
    steps: int
    """Engine steps that it covers, wholly or partly."""
    text: str
    requests: list[Blame]
    spans: list[tuple[float, float]]
    """When it happened: intervals in seconds since arrival."""
    details: dict[str, Any]
