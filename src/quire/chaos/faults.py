"""The attacks of `quire chaos`: a table. A row does one thing to a server and says what it saw.

Rows need nothing but an address. What must hold after each (the canary's answer, a server that
still answers) is checked by `quire.chaos.run`, the same for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from quire.chaos.hostile import (
    CASES,
    distinct_values,
    endless_body,
    send_hostile,
    send_ids,
)
from quire.chaos.malformed import Replies, bad_http, bad_json, malformed
from quire.chaos.overload import over_offer
from quire.chaos.target import HttpTarget
from quire.chaos.vanishing import byte_by_byte, disconnect_storm, partial_requests, read_never


@dataclass(frozen=True)
class Size:
    """How much of everything a run does."""

    aborts: int
    readers: int
    partial: int
    cases: int
    rounds: int
    seconds: float
    """Of attacks that last."""


SIZES: Final = {
    "small": Size(aborts=60, readers=16, partial=24, cases=120, rounds=2, seconds=3),
    "usual": Size(aborts=1000, readers=100, partial=200, cases=1500, rounds=10, seconds=15),
    "large": Size(aborts=10000, readers=1000, partial=2000, cases=50000, rounds=100, seconds=120),
}


@dataclass
class Seen:
    """What an attack saw."""

    complaints: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


Attack = Callable[[HttpTarget, Size], Awaitable[Seen]]


@dataclass(frozen=True)
class Fault:
    """One row."""

    injected: str
    must: str
    """Beside what must hold after every attack."""
    attack: Attack


async def calm(target: HttpTarget, size: Size) -> Seen:
    """Nothing: what differs now differs by itself."""
    await asyncio.sleep(min(5.0, size.seconds))
    return Seen()


async def disconnects(target: HttpTarget, size: Size) -> Seen:
    """Clients vanish."""
    return Seen(facts={"disconnects": await disconnect_storm(target, size.aborts)})


async def slow_readers(target: HttpTarget, size: Size) -> Seen:
    """Clients never read."""
    async with read_never(target, size.readers) as count:
        await asyncio.sleep(size.seconds)
    return Seen(facts={"readers": count})


async def slow_senders(target: HttpTarget, size: Size) -> Seen:
    """Clients never finish what they send."""
    async with partial_requests(target, size.partial) as count:
        await asyncio.sleep(size.seconds)
    return Seen(facts={"senders": count})


async def tiny_chunks(target: HttpTarget, size: Size) -> Seen:
    """A good request, byte by byte."""
    reply = await byte_by_byte(target)
    seen = Seen(facts={"status": reply.status, "seconds": round(reply.seconds, 2)})
    if reply.status not in (200, 400, 411, 413):
        seen.complaints.append(f"a request in chunks of one byte got status {reply.status}")
    return seen


async def no_end(target: HttpTarget, size: Size) -> Seen:
    """A body without an end."""
    status, taken = await endless_body(target)
    seen = Seen(facts={"status": status, "mebibytes_taken": taken >> 20})
    if taken >= 2**28:
        seen.complaints.append(f"the server took {taken >> 20} MiB of one body and wanted more")
    return seen


async def bad_bytes(target: HttpTarget, size: Size) -> Seen:
    """Bytes that are not HTTP."""
    return _judged(await malformed(target, size.cases // 2, bad_http))


async def bad_fields(target: HttpTarget, size: Size) -> Seen:
    """JSON with values that do not belong there."""
    return _judged(await malformed(target, size.cases, bad_json))


async def ids(target: HttpTarget, size: Size) -> Seen:
    """Ids that collide."""
    return Seen(await send_ids(target, size.rounds), {"rounds": size.rounds})


async def values(target: HttpTarget, size: Size) -> Seen:
    """Another value each time."""
    return _judged(await distinct_values(target, size.cases))


async def hostile(name: str, target: HttpTarget, size: Size) -> Seen:
    """One row of `CASES`."""
    return _judged(await send_hostile(target, name))


async def overload(target: HttpTarget, size: Size) -> Seen:
    """More than it can serve."""
    told = await over_offer(
        target, seconds=size.seconds, warm_seconds=max(1.0, size.seconds / 2), at_once=32
    )
    late = told.refusals[int(0.99 * len(told.refusals))] if told.refusals else None
    facts = {
        "capacity_per_s": round(told.capacity, 1), "offered_per_s": round(told.rate, 1),
        "goodput_per_s": round(told.goodput, 1), "answered": told.answered,
        "refused": len(told.refusals), "refusal_p99_s": late and round(late, 3),
    }  # fmt: skip
    seen = Seen(told.lost[:], facts)
    if told.untold:
        seen.complaints.append(f"{told.untold} refusals without Retry-After")
    return seen


def _judged(found: Replies) -> Seen:
    told = {str(status): count for status, count in sorted(found.statuses.items())}
    return Seen(found.bad, {"statuses": told})


def faults() -> dict[str, Fault]:
    """The rows by name, in the order in which they run."""
    return {
        "calm": Fault("nothing", "-", calm),
        "disconnects": Fault("clients vanish at random phases", "-", disconnects),
        "slow-readers": Fault("clients that never read", "-", slow_readers),
        "slow-senders": Fault("headers, bodies and chunks without an end", "-", slow_senders),
        "tiny-chunks": Fault("a request in chunks of one byte", "200, 400, 411 or 413",
                             tiny_chunks),
        "endless-body": Fault("a body without an end", "cut within 256 MiB", no_end),
        "bad-http": Fault("bytes that are not quite HTTP", "no 5xx, no silence, no stack",
                          bad_bytes),
        "bad-json": Fault("fields with wrong values", "no 5xx, no silence, no stack", bad_fields),
        "ids": Fault("ids and salts that collide", "each gets its own answer", ids),
        "distinct-values": Fault("other free fields each time", "no 5xx", values),
        **{
            name: Fault(what, "no 5xx, no silence, no stack", partial(hostile, name))
            for name, (what, _) in CASES.items()
        },
        "overload": Fault("ten times the requests that it can serve",
                          "an answer, or 429 or 503 with Retry-After", overload),
    }  # fmt: skip
