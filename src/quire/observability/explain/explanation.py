"""The explanation of one completion: its parts, its slowest step, and what the prefix cache gave
it.

`assemble.py` makes it from the records; `str()` gives it as text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from quire.observability.explain.parts import Part
from quire.observability.explain.wording import plural, seconds


class PrefixReport(msgspec.Struct):
    """What a request found in the prefix cache, or would find if it is still waiting."""

    num_tokens: int
    num_cached_tokens: int
    first_missing_block: int | None
    """Index of the first block that was not found whole; None if all that can be reused was
    found."""
    text: str
    expected: bool = False
    """True if the request is waiting: this is what it would find if it were admitted now."""
    first_difference: int | None = None
    """For a waiting request: position of the first token that differs from the nearest cached
    content."""


class Explanation(msgspec.Struct):
    """Where the time of one completion went."""

    id: str
    index: int
    internal_id: str
    state: str
    finish_reason: str | None
    seconds: float
    """Arrival to end, or to now."""
    ttft: float | None
    """From arrival to the end of the step that sampled the first token; None if not known."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    parts: list[Part]
    """In the order in which they began; their seconds add up to `seconds`."""
    slowest_step: dict[str, Any] | None
    """The slowest of the steps that computed for it."""
    prefix: PrefixReport | None

    def __str__(self) -> str:
        return "\n".join(lines(self))


def summary(e: Explanation) -> str:
    """The first line: what was measured."""
    end = f"ended ({e.finish_reason})" if e.finish_reason else f"{e.state}, so far"
    name = f"{e.id}[{e.index}]" if e.index else e.id
    first = f", first token after {seconds(e.ttft)}" if e.ttft is not None else ""
    return (
        f"request {name}: {seconds(e.seconds)}, {end}{first}; "
        f"{plural(e.num_prompt_tokens, 'prompt token')}, "
        f"{plural(e.num_output_tokens, 'output token')}, "
        f"{plural(e.num_preemptions, 'preemption')}"
    )


def slowest_sentence(step: dict[str, Any]) -> str:
    """The sentence on what made the slowest step slow."""
    text = (
        f"slowest step {step['step']}: {seconds(step['seconds'])} with "
        f"{plural(step['num_requests'], 'request')} and {plural(step['num_tokens'], 'token')}"
    )
    if step.get("core_wait_seconds"):
        text += f", {seconds(step['core_wait_seconds'])} of it waiting for a core"
    if step["because_of"] is None:
        return text
    return f"{text}, because of a {step['prompt_tokens']:,}-token prefill of {step['because_of']}"


def lines(e: Explanation) -> Iterable[str]:
    """The explanation as lines of text, the largest parts first."""
    yield summary(e)
    for part in sorted(e.parts, key=lambda part: -part.seconds):
        yield f"  {seconds(part.seconds):>8}  {part.share:>4.0%}  {part.text}"
    if e.slowest_step is not None:
        yield "  " + slowest_sentence(e.slowest_step)
    if e.prefix is not None:
        yield f"  prefix: {e.prefix.text}"
