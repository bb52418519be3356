"""An explanation: what the parts, the slowest step and the prefix cache say of one completion.

`assemble.py` makes it from records; `str()` of it is the text that `quire explain` prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from quire.observability.explain.parts import Part
from quire.observability.explain.wording import plural, seconds


class PrefixReport(msgspec.Struct):
    """What the prefix cache gave, or would give to a request that waits."""

    num_tokens: int
    num_cached_tokens: int
    first_missing_block: int | None
    """Index of the first block not found whole; None if everything that can be reused was."""
    text: str
    expected: bool = False
    """The request waits: this is what it would find if it came in now."""
    first_difference: int | None = None
    """For one that waits: the first token that differs from the nearest cached content."""


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
    """Arrival to the end of the step that gave the first token; None if that is not known."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    parts: list[Part]
    """In the order in which they began; their seconds add up to `seconds`."""
    slowest_step: dict[str, Any] | None
    """Of the steps in which it computed."""
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
    """What made its slowest step slow."""
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
    """The explanation as text: the largest parts first."""
    yield summary(e)
    for part in sorted(e.parts, key=lambda part: -part.seconds):
        yield f"  {seconds(part.seconds):>8}  {part.share:>4.0%}  {part.text}"
    if e.slowest_step is not None:
        yield "  " + slowest_sentence(e.slowest_step)
    if e.prefix is not None:
        yield f"  prefix: {e.prefix.text}"
