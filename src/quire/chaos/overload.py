"""More requests than the server can serve: capacity first, then many times that.

Clients of the first phase ask one request after the other; those of the second come at a fixed
rate, whether earlier ones were answered or not, as callers of a service do.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.chaos.target import HttpReply, HttpTarget, KeptConnections

REFUSALS = (429, 503)


@dataclass
class Offered:
    """What came of an over-offer."""

    capacity: float
    """Answers per second when asked by as many clients as it can serve."""
    rate: float
    """Requests per second that were offered."""
    seconds: float
    goodput: float
    """Answers per second while more was offered."""
    answered: int = 0
    refusals: list[float] = field(default_factory=list)
    """Seconds until each refusal, sorted."""
    untold: int = 0
    """Refusals without Retry-After."""
    lost: list[str] = field(default_factory=list)
    """Replies that are neither an answer nor a refusal."""


async def over_offer(
    target: HttpTarget,
    *,
    times: float = 10,
    seconds: float = 20,
    warm_seconds: float = 10,
    at_once: int = 64,
    max_tokens: int = 128,
    most_rate: float = 400,
) -> Offered:
    """Measure capacity, then offer `times` as much.

    Args:
        times: Of the capacity.
        seconds: Of the over-offer.
        warm_seconds: Of the measurement before it.
        at_once: Clients of that measurement.
        max_tokens: Of each answer.
        most_rate: Requests per second that this side can send.
    """
    body = target.ask_for_text("Once upon a time", max_tokens=max_tokens, temperature=0)
    sent = target.post(target.route, json.dumps(body | {"ignore_eos": True}).encode())
    pool = KeptConnections(target)
    capacity = await _capacity(pool, sent, warm_seconds, at_once)
    rate = min(times * capacity, most_rate)
    replies: list[tuple[float, HttpReply]] = []

    async def one(start: float) -> None:
        reply = await pool.exchange(sent, seconds=120)
        replies.append((time.monotonic() - start, reply))

    start = time.monotonic()
    tasks: list[asyncio.Task[None]] = []
    while (now := time.monotonic() - start) < seconds:
        while len(tasks) < now * rate:
            tasks.append(asyncio.create_task(one(start)))
        await asyncio.sleep(1 / rate)
    span = time.monotonic() - start
    await asyncio.gather(*tasks)
    await pool.close()
    in_time = sum(1 for at, reply in replies if at <= span and reply.is_answer)
    told = Offered(capacity, rate, span, in_time / span)
    _sort(told, [reply for _, reply in replies])
    return told


def _sort(told: Offered, replies: Sequence[HttpReply]) -> None:
    for reply in replies:
        if reply.is_answer:
            told.answered += 1
        elif reply.status in REFUSALS:
            told.refusals.append(reply.seconds)
            told.untold += "retry-after" not in reply.headers
        else:
            told.lost.append(f"status {reply.status} after {reply.seconds:.1f} s: {reply.text!r}")
    told.refusals.sort()


async def _capacity(pool: KeptConnections, sent: bytes, seconds: float, at_once: int) -> float:
    done: list[float] = []
    start = time.monotonic()

    async def work() -> None:
        while time.monotonic() - start < seconds:
            if (await pool.exchange(sent, seconds=120)).is_answer:
                done.append(time.monotonic() - start)

    await asyncio.gather(*(work() for _ in range(at_once)))
    # From the first third on, when all seats are taken, to the last answer.
    late = [at for at in done if at > seconds / 3]
    span = max(late, default=0.0) - seconds / 3
    return len(late) / span if span > 0 else len(done) / seconds
