"""What a gate makes of a request that it admits."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.frontend.checked import CheckedParams
from quire.engine.messages import EngineCoreRequest
from quire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """An admitted request."""

    requests: list[EngineCoreRequest]
    """One per completion."""
    prompt_text: str | None
    """The prompt as the caller gave it, if it was text."""
    params: SamplingParams
    """The whole request's parameters with everything filled in."""
    seed: int
    """Seed in force; completion `i` uses `seed + i`."""
    checked: CheckedParams
    """The same parameters before anything of this prompt came in, for further prompts."""
