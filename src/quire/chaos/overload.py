"""More requests than the server can serve: capacity first, then many times that.

Clients of the first phase ask one request after the other; those of the second come at a fixed
rate, whether earlier ones were answered or not, as callers of a service do.
"""

from __future__ import annotations

import asyncio
import json
import time
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
    """Seconds until each refusal, sorted in the end."""
    untold: int = 0
    """Refusals without Retry-After."""
    lost: list[str] = field(default_factory=list)
    """Replies that are neither an answer nor a refusal."""

    def take(self, reply: HttpReply) -> None:
        """Count a reply."""
        if reply.is_answer:
            self.answered += 1
        elif reply.status in REFUSALS:
            self.refusals.append(reply.seconds)
            self.untold += "retry-after" not in reply.headers
        else:
            self.lost.append(f"status {reply.status} after {reply.seconds:.1f} s: {reply.text!r}")


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
    told = Offered(capacity, rate, seconds, goodput=0.0)
    answers: list[float] = []
    # Nothing of a request is kept but numbers. Python would look through the rest, in the end for
    # tenths of a second at a time, and what should have been sent meanwhile would come at once.

    async def one(start: float) -> None:
        reply = await pool.exchange(sent, seconds=120)
        told.take(reply)
        if reply.is_answer:
            answers.append(time.monotonic() - start)

    start, num_sent = time.monotonic(), 0
    async with asyncio.TaskGroup() as group:  # keeps what runs, and raises what was raised
        while (now := time.monotonic() - start) < seconds:
            while num_sent < now * rate:
                num_sent += 1
                group.create_task(one(start))
            await asyncio.sleep(1 / rate)
        told.seconds = time.monotonic() - start
    await pool.close()
    told.goodput = sum(at <= told.seconds for at in answers) / told.seconds
    told.refusals.sort()
    return told


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
