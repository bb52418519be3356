"""Runs attacks one after the other, with a canary beside each, and reports what held.

A failing attack never keeps the others from running, and each has a time limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from quire.chaos.canary import Canary, request
from quire.chaos.faults import Fault, Seen, Size, faults
from quire.chaos.target import CHAT, COMPLETIONS, HttpTarget, ask, get
from quire.errors import StartupError

HOLDS, BROKEN = "holds", "does not hold"
LIMIT_SECONDS: Final = 900.0
"""Of one attack."""
RECOVERY_SECONDS: Final = 30.0
"""Within which the server must answer again after an attack."""


@dataclass
class Result:
    """One row of the report."""

    fault: str
    injected: str
    must: str
    state: str = HOLDS
    complaints: list[str] = field(default_factory=list)
    canaries: int = 0
    canaries_refused: int = 0
    canary_slowest_s: float = 0.0
    recovered_s: float | None = None
    """Seconds until the canary had its answer again, once the attack was over."""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


async def known_answer(url: str, model: str, key: str | None) -> Canary:
    """The server with the route that it has, and the answer that the canary must get.

    Raises:
        StartupError: nobody gives an answer there, or not the same one twice.
    """
    for route in (COMPLETIONS, CHAT):
        target = HttpTarget(url, model, key, route)
        reply = await ask(target, request(target))
        if reply.is_answer:
            break
    else:
        why = {0: "the connection breaks", -1: "nothing comes within 120 s"}
        told = why.get(reply.status, f"status {reply.status} {reply.body[:200]!r}")
        raise StartupError(f"{url} gives no answer to a plain request: {told}")
    again = [await ask(target, request(target)) for _ in range(2)]
    if any(one.text != reply.text for one in again):
        raise StartupError(
            f"{url} answers the same greedy request differently when nothing else happens; so no "
            "fault could be told from that"
        )
    return Canary(target, reply.text, again[-1].seconds)


async def run(
    known: Canary, chosen: Sequence[str], size: Size, on_result: Callable[[Result], None]
) -> list[Result]:
    """The chosen attacks, one after the other."""
    rows, results = faults(), []
    for name in chosen:
        results.append(await one(known, name, rows[name], size))
        on_result(results[-1])
    return results


async def one(known: Canary, name: str, fault: Fault, size: Size) -> Result:
    """One attack, and what must hold after it."""
    result, start = Result(name, fault.injected, fault.must), time.monotonic()
    canary = Canary(known.target, known.answer, known.usual)
    try:
        attack = asyncio.wait_for(fault.attack(known.target, size), LIMIT_SECONDS)
        seen: Seen = await canary.during(attack)
    except TimeoutError:
        seen = Seen([f"the attack was not over within {LIMIT_SECONDS:.0f} s"])
    except Exception as error:
        seen = Seen([f"{type(error).__name__}: {error}"])
    result.complaints, result.facts = seen.complaints, seen.facts
    result.complaints += [f"canary: {what}" for what in canary.wrong]
    result.canaries, result.canaries_refused = canary.asked, canary.refused
    result.canary_slowest_s = round(canary.slowest, 3)
    result.recovered_s = await _recovered(known)
    if result.recovered_s is None:
        result.complaints.append(f"no right answer within {RECOVERY_SECONDS:.0f} s afterwards")
    if (listed := await get(known.target, "/v1/models")).status != 200:
        result.complaints.append(f"/v1/models answers {listed.status} afterwards")
    result.state = BROKEN if result.complaints else HOLDS
    result.seconds = round(time.monotonic() - start, 1)
    return result


async def _recovered(known: Canary) -> float | None:
    """Seconds until the canary has its answer; `None` if it gets another, or none in time."""
    start = time.monotonic()
    while (now := time.monotonic() - start) < RECOVERY_SECONDS:
        reply = await ask(known.target, request(known.target), RECOVERY_SECONDS - now)
        if reply.is_answer:
            return round(time.monotonic() - start, 3) if reply.text == known.answer else None
        await asyncio.sleep(0.1)
    return None


HEADINGS: Final = ("fault", "state", "canaries", "slowest s", "recovered s", "seconds")


def table(results: Sequence[Result]) -> str:
    """The report as text: a table, and below it what does not hold and why."""
    rows = [HEADINGS] + [
        (
            r.fault, r.state, str(r.canaries), f"{r.canary_slowest_s:.2f}",
            "-" if r.recovered_s is None else f"{r.recovered_s:.2f}", f"{r.seconds:.0f}",
        )
        for r in results
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    for r in results:
        if r.complaints:
            lines.append(f"{r.fault}: {len(r.complaints)} complaints, first: {r.complaints[0]}")
    lines += [f"{r.fault}: {_in_words(r.facts)}" for r in results if r.facts]
    return "\n".join(lines)


def _in_words(facts: Mapping[str, Any]) -> str:
    """`disconnects 1000; statuses 400: 639, 404: 2`."""
    parts = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key}: {number}" for key, number in value.items())
        parts.append(f"{name.replace('_', ' ')} {'-' if value is None else value}")
    return "; ".join(parts)


def report(known: Canary, results: Sequence[Result]) -> dict[str, Any]:
    """The report as data for JSON."""
    return {
        "url": known.target.url, "model": known.target.model, "route": known.target.route,
        "canary": known.answer, "faults": [asdict(r) for r in results],
    }  # fmt: skip
