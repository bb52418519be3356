"""Assembles the explanation of one completion: where its time went, as parts that add up.

`story.py` cuts the time into episodes that touch, one cause each. Here they become parts, with
the names of requests instead of their numbers. `wording.py` puts the causes into words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.core.request import FINISH_REASONS, RequestStatus
from quire.observability.explain.explanation import Explanation, PrefixReport
from quire.observability.explain.parts import Blame, Cause, Part
from quire.observability.explain.story import Episode, Story
from quire.observability.explain.wording import expected_sentence, prefix_sentence, sentence
from quire.observability.recorder.lives import Life, wait_name
from quire.observability.recorder.ring import Recording

MAX_NAMED = 5
"""Number of other requests that a part names; further ones are only counted."""
MAX_SPANS = 200
"""Largest number of intervals of a part; if there are more, neighbours are merged."""


def explain(
    recording: Recording,
    internal_id: str,
    *,
    now: float | None = None,
    num_output_tokens: int | None = None,
) -> Explanation | None:
    """Explain one completion; None if the records do not know it.

    Args:
        recording: The records.
        internal_id: The completion to explain.
        now: The current time, if it has not ended.
        num_output_tokens: Number of output tokens so far, if it has not ended.
    """
    keys = {key for key, name in recording.names.items() if name == internal_id}
    accepted = recording.accepted.get(internal_id)
    if not keys and accepted is None:
        return None
    seen = recording.seen.get(internal_id)
    arrival = accepted.arrival if accepted else None
    story = Story(recording, keys, arrival, seen.time if seen else now)
    story.tell()
    return _report(story, internal_id, num_output_tokens)


def _report(story: Story, internal_id: str, num_outputs: int | None) -> Explanation:
    recording, life = story.recording, story.life
    accepted = recording.accepted.get(internal_id)
    seen = recording.seen.get(internal_id)
    arrival = story.arrival or 0.0
    end = story.cursor if story.cursor is not None else arrival
    total = end - arrival
    episodes = [p for p in story.episodes.values() if p.seconds or p.cause is Cause.PREEMPTED]
    status = life.status if life else 0
    reason = seen.reason if seen else _status_name(status)
    outputs = life.num_output_tokens if life and status else num_outputs
    return Explanation(
        id=recording.external(internal_id),
        index=accepted.index if accepted else 0,
        internal_id=internal_id,
        state="finished" if seen or status else story.state or "accepted",
        finish_reason=reason or None,
        seconds=total,
        ttft=None if story.first_token is None else story.first_token - arrival,
        num_prompt_tokens=life.num_prompt_tokens if life else 0,
        num_output_tokens=outputs or 0,
        num_preemptions=life.num_preemptions if life else 0,
        parts=[_part(story, p, arrival, total) for p in episodes],
        slowest_step=_slowest(story),
        prefix=_prefix(life, recording, story.evicted),
    )


def _status_name(status: int) -> str:
    return str(FINISH_REASONS.get(RequestStatus(status), "")) if status else ""


def _part(story: Story, episode: Episode, arrival: float, total: float) -> Part:
    recording = story.recording
    seconds = math.fsum(episode.seconds)
    ahead = episode.facts.pop("ahead", set())
    named = [
        Blame(recording.name(story.epoch, number), 0 if episode.holders else count)
        for number, count in (episode.holders or episode.blamed).most_common()
    ]
    if "for" in episode.facts:
        number = episode.facts["for"]
        episode.facts["for"] = recording.name(story.epoch, number) if number else None
        episode.facts["itself"] = number == story.number
    details: dict[str, Any] = {
        **episode.facts,
        "num_blamed": len(named),
        "num_ahead": len(ahead),
        "tokens": episode.facts.get("tokens", episode.tokens),
        "mean_batch": round(sum(episode.batches) / len(episode.batches), 1)
        if episode.batches
        else 0,
        "behind_others_seconds": episode.behind_others,
        "slowest_step": {"step": episode.slowest[1], "seconds": episode.slowest[0]},
    }
    part = Part(
        cause=str(episode.cause),
        reason=wait_name(episode.reason)
        if episode.cause in (Cause.QUEUED, Cause.STALLED)
        else None,
        seconds=seconds,
        share=seconds / total if total > 0 else 0.0,
        steps=len(episode.steps),
        text="",
        requests=named[:MAX_NAMED],
        spans=_spans(episode.spans, arrival),
        details=details,
    )
    part.text = sentence(part)
    return part


def _spans(spans: list[tuple[float, float]], arrival: float) -> list[tuple[float, float]]:
    """Intervals relative to arrival; neighbours are merged if there are too many to show."""
    size = math.ceil(len(spans) / MAX_SPANS) or 1
    groups = (spans[i : i + size] for i in range(0, len(spans), size))
    return [(group[0][0] - arrival, group[-1][1] - arrival) for group in groups]


def _slowest(story: Story) -> dict[str, Any] | None:
    if story.slowest is None:
        return None
    seconds, step = story.slowest
    others = [(c.tokens, n) for n, c in step.chunks.items() if n != story.number]
    tokens, number = max(others, default=(0, 0))
    starved = step.row.starved_seconds
    if starved > seconds / 2 or tokens <= max(
        step.scheduled[story.number], len(step.scheduled) - len(step.chunks)
    ):
        # No single other request is to blame: this request's own tokens or all decodes together
        # weigh more than the largest prompt, or the step mostly waited for a core.
        number = 0
    return {
        "step": step.row.step,
        "seconds": seconds,
        "num_requests": len(step.scheduled),
        "num_tokens": sum(step.scheduled.values()),
        "because_of": story.recording.name(story.epoch, number) if number else None,
        "prompt_tokens": tokens if number else 0,
        "core_wait_seconds": starved,
    }


def _prefix(life: Life | None, recording: Recording, evicted: int | None) -> PrefixReport | None:
    if life is None or life.admitted is None:
        return None
    block_size = recording.block_size
    total = life.num_prompt_tokens + life.num_prior_outputs
    whole = life.num_cached_tokens >= total - 1
    return PrefixReport(
        num_tokens=total,
        num_cached_tokens=life.num_cached_tokens,
        first_missing_block=None if whole else life.num_cached_blocks,
        text=prefix_sentence(
            total, life.num_cached_tokens, life.num_cached_blocks, block_size, whole, evicted
        )
        if recording.prefix_caching
        else "prefix caching is off (--no-enable-prefix-caching)",
    )


def expected_prefix(answer: Mapping[str, Any], block_size: int) -> PrefixReport:
    """What a waiting request would find in the prefix cache if it were admitted now.

    Args:
        answer: Fields of `quire.core.kv.answer.PrefixAnswer`.
        block_size: Tokens per KV block.
    """
    total, cached = answer["num_tokens"], answer["num_cached_tokens"]
    block, whole = answer["block_index"], cached >= total - 1
    said = prefix_sentence(total, cached, block, block_size, whole)
    return PrefixReport(
        num_tokens=total,
        num_cached_tokens=cached,
        first_missing_block=None if whole else block,
        text=expected_sentence(said, answer["first_difference"]),
        expected=True,
        first_difference=answer["first_difference"],
    )


def unread_prefix(num_tokens: int) -> PrefixReport:
    """The report for a waiting request that will not use the prefix cache, because it needs the
    log-probabilities of its whole prompt."""
    text = (
        "it does not use the prefix cache: prompt_logprobs needs every token of the prompt computed"
    )
    return PrefixReport(num_tokens, 0, 0, text, expected=True)
