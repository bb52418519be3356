"""Puts causes into words: one sentence per part of an explanation.

Knows the numbers of a part, but not how they were found. `_SENTENCES` has one row per cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from quire.core.facts import Loss
from quire.observability.explain.parts import Cause, Part


def seconds(value: float) -> str:
    """A duration for reading: `2.3 s`, `212 ms`, `85 µs`."""
    if value >= 1:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`, `2,048 tokens`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _ids(part: Part, only: Callable[[int], bool] = lambda tokens: True) -> str:
    chosen = [b for b in part.requests if only(b.tokens)]
    names = [f"{b.id} ({plural(b.tokens, 'token')})" if b.tokens else b.id for b in chosen]
    more = part.details["num_blamed"] - len(part.requests)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _behind(part: Part) -> str:
    """` behind 3 prefills (a, b, c)`, or nothing."""
    prefills = sum(b.tokens > 0 for b in part.requests)
    more = part.details["num_blamed"] - len(part.requests)
    if prefills:
        return f" behind {plural(prefills + more, 'prefill')} ({_ids(part, lambda t: t > 0)})"
    return ""


_WAITS: Final[dict[str, str]] = {
    "budget": "the step's token budget was used up (--max-num-batched-tokens)",
    "blocks": (
        "too few free KV blocks ({whose} {needed} and {available} were free), held by {holders}"
    ),
    "max_num_seqs": "all {available} --max-num-seqs places were taken, by {holders}",
    "preemption": "a running request was being preempted, and a step that preempts admits none",
    "policy": "the scheduling policy or --scheduler-delay-factor held it back",
    "grammar": "its grammar was being compiled, so it was not in the queue yet",
    "step": "it arrived while a step was running",
}


def _queued(part: Part) -> str:
    why = _WAITS[part.reason or "step"].format(
        whose=_whose(part),
        needed=part.details.get("needed", "?"),
        available=part.details.get("available", "?"),
        holders=_ids(part) or "others",
    )
    ahead = part.details["num_ahead"]
    turns = f" ({ahead:,} of them in turn)" if ahead > 1 else ""
    line = f"; it was blocked by the request at the head of the queue{turns}" if ahead else ""
    return f"queued{_behind(part)}: {why}{line}"


def _whose(part: Part) -> str:
    """Whose need the numbers are: those of the head of the queue, the last time its admission was
    tried."""
    return "the head of the queue needed" if part.details["num_ahead"] else "it needed"


def _stalled(part: Part) -> str:
    what = "token budget" if part.reason == "budget" else "KV blocks"
    return f"running, but {plural(part.steps, 'step')} had no {what} left for it{_behind(part)}"


def _preemption(part: Part) -> str:
    """`preempted at step 812 for request Y`."""
    details = part.details
    if "step" not in details:
        return "restart of the engine core"
    step = f"preemption at step {details['step']}"
    if details.get("itself"):
        return f"{step}, where it gave way itself, as the last of the running requests"
    return f"{step} for request {details['for']}" if details["for"] else step


_LOSSES: Final = {
    Loss.BLOCKS: "KV blocks had run out",
    Loss.URGENCY: "the other request has priority",
    Loss.FAILURE: "it shared blocks with a request that failed",
    Loss.UNDONE: "the step it was in was interrupted and is done again",
}


def _preempted(part: Part) -> str:
    details = part.details
    why = _LOSSES.get(details.get("loss", 0), "")
    how = "swapped out" if details.get("swapped") else f"{plural(details['tokens'], 'token')} lost"
    return f"waited to be admitted again after the {_preemption(part)} ({how}; {why})"


def _recomputed(part: Part) -> str:
    return f"computed {plural(part.details['tokens'], 'token')} again after the {_preemption(part)}"


def _prefill(part: Part) -> str:
    text = f"prefill of {plural(part.details['tokens'], 'token')} in {plural(part.steps, 'step')}"
    shared = _ids(part, lambda tokens: tokens > 0)
    return f"{text}, together with {shared}" if shared else text


def _decode(part: Part) -> str:
    slowest = part.details["slowest_step"]
    return (
        f"decode, {plural(part.steps, 'step')} at mean batch {part.details['mean_batch']:g}, "
        f"slowest {seconds(slowest['seconds'])} (step {slowest['step']})"
    )


def _beside(part: Part) -> str:
    return f"{_decode(part)} because of prompt tokens of {_ids(part)} in the same steps"


_SENTENCES: Final[dict[str, Callable[[Part], str]]] = {
    Cause.INTAKE: lambda part: "from its arrival to the queue of the engine core",
    Cause.QUEUED: _queued,
    Cause.PREFILL: _prefill,
    Cause.RECOMPUTED: _recomputed,
    Cause.PREEMPTED: _preempted,
    Cause.STALLED: _stalled,
    Cause.DECODE: _decode,
    Cause.DECODE_BESIDE_PREFILL: _beside,
    Cause.CORE_WAIT: lambda part: (
        "waiting for a core, which other work on this machine had, in "
        + (plural(part.steps, "step") if part.steps else "pauses between steps")
    ),
    Cause.BETWEEN_STEPS: lambda part: (
        "between steps, while the engine received requests and sent tokens"
    ),
    Cause.DELIVERY: lambda part: "from its last step to the end of the response",
    Cause.UNDER_WAY: lambda part: "in a step that has not ended, or was cut short",
    Cause.RESTART: lambda part: "until a new engine core had it in the queue",
    Cause.EARLIER: lambda part: "running before the oldest record (--record-steps keeps more)",
}


def sentence(part: Part) -> str:
    """The sentence for a part, without its duration."""
    return _SENTENCES[part.cause](part)


def prefix_sentence(
    total: int, hit: int, blocks: int, block_size: int, whole: bool, evicted: int | None = None
) -> str:
    """The sentence on what was found in the prefix cache, and why no more.

    Args:
        total: Tokens looked up.
        hit: Tokens found.
        blocks: Whole blocks found.
        block_size: Tokens per block.
        whole: Whether all that can be reused was found. The last token is always computed.
        evicted: Number of cached blocks evicted before; None if not known.
    """
    if whole and hit:
        return f"all of the prefix was cached: {hit:,} of {total:,} tokens"
    if hit > blocks * block_size:
        return (
            f"{hit:,} of {total:,} tokens were cached; at token {hit}, inside block {blocks}, the "
            "prompt differs from what is cached"
        )
    if hit:
        return (
            f"{hit:,} of {total:,} tokens were cached; no cached block continues them (block "
            f"{blocks}): {_or_evicted('what follows was never computed', evicted)}"
        )
    never = "no earlier prompt with its cache_salt begins like this one"
    return f"nothing was cached: {_or_evicted(never, evicted)}"


def _or_evicted(never: str, evicted: int | None) -> str:
    """Why a block was not found: both possible causes, or the only one left."""
    if evicted == 0:
        return f"{never} (no block has been evicted)"
    since = f"evicted since ({plural(evicted, 'block')} were)" if evicted else "evicted since"
    return f"{never}, or it was {since}"


def expected_sentence(said: str, first_difference: int | None) -> str:
    """The same sentence for a waiting request.

    Args:
        said: The result of `prefix_sentence`.
        first_difference: The first token that differs from the nearest cached content, if any.
    """
    where = f"; the nearest cached content differs at token {first_difference}"
    return f"if it came in now: {said}{where if first_difference is not None else ''}"
