"""What only shows in minutes: many faults one after the other, overload, a thousand slow readers.

Rows of the same kind as those of `faults.py`, with the same conditions after them; `make
chaos-long` runs them.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable

from conditions import Trial
from faults import RESTARTS, Driver, Fault, Size, target
from mixed_load import CANARY, client, culprit, run_one
from quire.chaos.hostile import send_ids
from quire.chaos.malformed import malformed
from quire.chaos.overload import over_offer
from quire.chaos.vanishing import disconnect_storm, partial_requests, read_never

MINUTES = {"short": 0.3, "usual": 2.0, "long": 30.0}
"""Of the soak with a fault a minute, by size."""
LOAD = 0.8
"""Part of the capacity that is asked for in it."""
REFUSAL_SECONDS = 0.05

# ---- faults of all kinds -------------------------------------------------------------------------


async def _kill(trial: Trial, rng: random.Random) -> None:
    trial.server.hurt_core()


async def _pause(trial: Trial, rng: random.Random) -> None:
    trial.server.hurt_core(signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(0.5, 5))
    trial.server.hurt_core(signal.SIGCONT)


async def _culprit(trial: Trial, rng: random.Random) -> None:
    async with client(trial.server.url) as http:
        out = await run_one(http, culprit(rng.choice(("raise", "memory", "nan", "inf", "die"))))
    trial.must(not out.is_whole, "a culprit got an answer")


async def _vanish(trial: Trial, rng: random.Random) -> None:
    await disconnect_storm(target(trial), 200)


async def _never_read(trial: Trial, rng: random.Random) -> None:
    async with read_never(target(trial), 50):
        await asyncio.sleep(10)


async def _never_finish(trial: Trial, rng: random.Random) -> None:
    async with partial_requests(target(trial), 100):
        await asyncio.sleep(10)


async def _nonsense(trial: Trial, rng: random.Random) -> None:
    found = await malformed(target(trial), 300, seed=rng.randrange(10**6))
    trial.must(not found.bad, f"bad replies, the first: {found.bad[:1]}")


async def _ids(trial: Trial, rng: random.Random) -> None:
    for complaint in await send_ids(target(trial), 3):
        trial.must(False, complaint)


ANY: dict[str, Callable[[Trial, random.Random], Awaitable[None]]] = {
    "kill": _kill, "pause": _pause, "culprit": _culprit, "vanish": _vanish,
    "never read": _never_read, "never finish": _never_finish, "nonsense": _nonsense, "ids": _ids,
}  # fmt: skip
"""What a minute may bring."""


def many_faults(minutes: float) -> Driver:
    """One random fault a minute while clients ask for `LOAD` of what the server can give."""

    async def drive(trial: Trial, size: Size) -> None:
        rng, load = random.Random(4), trial.load
        load.keeps_all = False
        seconds = max(3.0, min(20.0, minutes * 10))
        await asyncio.sleep(seconds / 2)
        before = load.num_done
        await asyncio.sleep(seconds)
        load.rate = LOAD * (load.num_done - before) / seconds
        happened: dict[str, int] = {}
        start, period = time.monotonic(), min(60.0, minutes * 60 / 6)
        while (now := time.monotonic()) - start < minutes * 60 and trial.lives:
            name = rng.choice(list(ANY))
            happened[name] = happened.get(name, 0) + 1
            await ANY[name](trial, rng)
            await asyncio.sleep(max(0.0, now + period - time.monotonic()))
        trial.facts |= {
            "requests_per_s": round(load.rate, 1), "faults": happened,
            "minutes": round((time.monotonic() - start) / 60, 1),
        }  # fmt: skip
        load.rate = None

    return drive


# ---- more than it can serve ----------------------------------------------------------------------


def overload(seconds: float) -> Driver:
    """Ten times the capacity."""

    async def drive(trial: Trial, size: Size) -> None:
        trial.load.resting = True
        told = await over_offer(
            target(trial), seconds=seconds, warm_seconds=max(6.0, seconds / 10), max_tokens=256
        )
        trial.load.resting = False
        inside = (trial.server.integrity() or {}).get("refusal_seconds") or {}
        seen = [round(told.refusals[int(q * len(told.refusals))], 4) for q in (0.5, 0.99)]
        trial.facts |= {
            "capacity_per_s": round(told.capacity, 2), "offered_per_s": round(told.rate, 1),
            "goodput_share": round(told.goodput / told.capacity, 3), "answered": told.answered,
            "refused": len(told.refusals), "refusal_s_in_the_server": inside,
            "refusal_s_at_the_client_p50_p99": seen,
        }  # fmt: skip
        trial.must(not told.lost, f"{len(told.lost)} neither answered nor refused: {told.lost[:1]}")
        trial.must(not told.untold, f"{told.untold} refusals without Retry-After")
        trial.must(
            told.goodput >= 0.95 * told.capacity,
            f"{told.goodput:.1f} answers/s under overload, {told.capacity:.1f} without",
        )
        slow = inside.get("max", 0)
        trial.must(slow <= REFUSAL_SECONDS, f"a refusal took {slow * 1000:.0f} ms in the server")

    return drive


# ---- readers that never read ---------------------------------------------------------------------


async def _latencies(trial: Trial, count: int) -> list[float]:
    async with client(trial.server.url) as http:
        return sorted([(await run_one(http, CANARY)).seconds for _ in range(count)])


async def slow_beside(trial: Trial, size: Size) -> None:
    """A thousand streams that nobody reads, and what another client notices once they are full."""
    trial.load.resting = trial.load.canary_rests = True
    await asyncio.sleep(3)
    before = await _latencies(trial, 200)
    held = trial.server.held().rss_mib
    async with read_never(target(trial), size.slow_readers):
        quiet = await asyncio.to_thread(_has_settled, trial)
        grown = trial.server.held().rss_mib - held
        beside = await _latencies(trial, 200)
    trial.load.resting = trial.load.canary_rests = False
    await asyncio.sleep(2)
    p50, p99 = [(round(x[100] * 1000, 1), round(x[198] * 1000, 1)) for x in (before, beside)]
    trial.facts |= {
        "ms_p50_p99_before": p50, "ms_p50_p99_beside": p99, "settled": quiet,
        "rss_mib_while_slow": round(grown, 1),
    }  # fmt: skip
    trial.rss_mib = max(trial.rss_mib, 0.2 * size.slow_readers)
    trial.must(grown < 256, f"RSS grew by {grown:.0f} MiB while nobody read")
    trial.must(
        beside[100] < 1.1 * before[100],
        f"a request took {beside[100] * 1000:.1f} ms beside slow readers, {before[100] * 1000:.1f}"
        " without (p50)",
    )


def _has_settled(trial: Trial) -> bool:
    """Wait until nothing is generated for those that do not read."""
    end = time.monotonic() + 180
    while time.monotonic() < end:
        if trial.server.metric("vllm:num_requests_running") == 0:
            return True
        time.sleep(0.5)
    return False


FULL = ("--max-num-queued-reqs", "64")


def soaks(size: str) -> dict[str, Fault]:
    """The rows by name."""
    minutes = MINUTES[size]
    return {
        "S1": Fault(
            f"a random fault a minute at {LOAD:.0%} load for {minutes:g} minutes", "-",
            "all of them", many_faults(minutes), RESTARTS, promised=True,
        ),
        "S2": Fault(
            f"ten times the capacity for {minutes * 10:.0f} s",
            "95 % of it as goodput; refusals within 50 ms with Retry-After", "queue limits",
            overload(minutes * 10), FULL, may_refuse=True,
        ),
        "S3": Fault(
            "a thousand readers that never read", "RSS + 256 MiB at most; p50 of others + 10 %",
            "bounded buffers", slow_beside,
        ),
    }  # fmt: skip
