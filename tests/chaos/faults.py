"""The faults: a table. A row says what is injected, what must be true beside the seven conditions,
and which mechanism of the server carries it.

A row without a driver is not built, and the report says so. `promised` rows must hold: a run fails
if one does not. The numbers are those of `docs/reliability.md`.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from bombs import bomb_asks, bomb_template, helpers_rest, kill_helpers
from chaos_server import has_flag
from conditions import Trial
from mixed_load import (
    COMPLETIONS,
    Ask,
    Outcome,
    client,
    culprit,
    has_own_answer,
    run_one,
    run_resumable,
)
from quire.chaos.hostile import CASES, distinct_values, endless_body, send_hostile, send_ids
from quire.chaos.malformed import malformed
from quire.chaos.target import HttpTarget
from quire.chaos.vanishing import byte_by_byte, disconnect_storm, partial_requests, read_never
from surroundings import (
    Surroundings,
    break_weights,
    fill_disk,
    jump_clock,
    memory_group,
    movable_clock,
    no_descriptors,
    own_weights,
    press_memory,
    small_disk,
)


@dataclass(frozen=True)
class Size:
    """How much of everything a run does."""

    kills: int
    stop_seconds: float
    aborts: int
    slow_readers: int
    partial: int
    cases: int
    calm_seconds: float
    streams: int


SIZES = {
    "short": Size(2, 20, 60, 20, 20, 150, 1, 16),
    "usual": Size(40, 20, 1500, 200, 300, 3000, 5, 64),
    "long": Size(200, 20, 10000, 1000, 10000, 100000, 60, 64),
}
"""By name: the subset in the tests, `make chaos`, and `make chaos-long`."""
Driver = Callable[[Trial, Size], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """One row."""

    injected: str
    must: str
    """Beside the conditions."""
    mechanism: str
    driver: Driver | None = None
    args: tuple[str, ...] = ()
    """Further flags of the server."""
    promised: bool = False
    streams: int | None = None
    """Clients at once; by default as the run's size says."""
    around: Surroundings | None = None
    """What is prepared before the server starts."""
    may_refuse: bool = False
    """Load may be refused with 429 or 503."""


# ---- the core ------------------------------------------------------------------------------------


async def calm(trial: Trial, size: Size) -> None:
    """No fault: what the harness itself does may break nothing."""
    await asyncio.sleep(size.calm_seconds)


async def _tokens_pass(trial: Trial, count: int, seconds: float = 60) -> bool:
    """Wait until so many events have come, or the server has gone."""
    aim, end = len(trial.load.events) + count, time.monotonic() + seconds
    while len(trial.load.events) < aim:
        if time.monotonic() > end or not trial.lives:
            return False
        await asyncio.sleep(0.005)
    return True


async def kill_core(trial: Trial, size: Size) -> None:
    rng = random.Random(1)
    done = 0
    for _ in range(size.kills):
        if not await _tokens_pass(trial, rng.randrange(5, 400)):
            break
        at = time.monotonic()
        if not trial.server.hurt_core():
            break
        done += 1
        await _tokens_pass(trial, 1)
        trial.struck.append((at, time.monotonic()))
    trial.facts["kills"] = done
    trial.must(done == size.kills, f"only {done} of {size.kills} kills: the server was gone")


async def stop_core(trial: Trial, size: Size) -> None:
    await _tokens_pass(trial, 100)
    first, at = trial.server.core(), time.monotonic()
    assert first is not None
    first.send_signal(signal.SIGSTOP)
    # What it has written already still arrives: what counts is whether there is more than that.
    await asyncio.sleep(0.5)
    moved = await _tokens_pass(trial, 50, size.stop_seconds)
    trial.struck.append((at, time.monotonic()))
    if first.is_running():  # it may wake, and say what it was about to
        await asyncio.sleep(max(0.0, at + size.stop_seconds - time.monotonic()))
        first.send_signal(signal.SIGCONT)
    trial.must(moved, f"no stream went on in the {size.stop_seconds:.0f} s of the stop")
    await _tokens_pass(trial, 50)


def _is_culprit_error(out: Outcome, kind: str) -> bool:
    return not out.is_whole and out.status != 0 and kind in str(out.error)


async def poison(trial: Trial, size: Size) -> None:
    await _tokens_pass(trial, 100)
    at = time.monotonic()
    async with client(trial.server.url) as http:
        out = await run_one(http, culprit("die"))
    trial.struck.append((at, time.monotonic()))
    trial.facts["culprit"] = f"status {out.status}: {str(out.error)[:120]}"
    trial.must("poison_request" in str(out.error), "the culprit did not end as a poison_request")
    await _tokens_pass(trial, 50)


async def _one_fails(trial: Trial, *kinds: str) -> None:
    await _tokens_pass(trial, 50)
    core = trial.server.core()
    async with client(trial.server.url) as http:
        outs = await asyncio.gather(*(run_one(http, culprit(kind)) for kind in kinds * 3))
        for kind, out in zip(kinds * 3, outs, strict=True):
            trial.must(not out.is_whole and out.status >= 500, f"{kind} ended with {out.status}")
            trial.facts[kind] = f"{out.status}: {str(out.error)[:100]}"
    trial.must(core == trial.server.core(), "the core was replaced")


async def forward_raises(trial: Trial, size: Size) -> None:
    await _one_fails(trial, "raise", "memory")


async def not_a_number(trial: Trial, size: Size) -> None:
    await _one_fails(trial, "nan", "inf")


# ---- life ----------------------------------------------------------------------------------------


async def terminate(trial: Trial, size: Size) -> None:
    """The load stops asking; what was asked before the signal must be answered in full."""
    await _tokens_pass(trial, 100)
    trial.expected_exit = 0
    trial.facts["family"] = trial.server.family()[1:]
    trial.load.stopping = True
    at = time.monotonic()
    trial.server.process.send_signal(signal.SIGTERM)
    async with client(trial.server.url) as http:
        late = []
        while trial.lives and time.monotonic() < at + 60:
            ask = Ask("late", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "temperature": 0})
            late.append((time.monotonic() - at, await run_one(http, ask)))
            await asyncio.sleep(0.05)
    trial.facts["drained_seconds"] = round(time.monotonic() - at, 2)
    refused = [out for _, out in late if out.status == 503]
    taken = [when for when, out in late if out.status == 200]
    trial.facts["refused_with_503"] = len(refused)
    trial.must(not taken or max(taken) < 0.5, "new requests were served while it drained")
    trial.must(bool(refused), "no new request got a 503 while it drained")
    trial.must(all(out.retry_after for out in refused), "a 503 without Retry-After")
    trial.must(not trial.lives, "it did not end within 60 s")


async def kill_api(trial: Trial, size: Size) -> None:
    """Clients that come back, while the API process is killed and started again. The rest of the
    load is not resumable, and only shows that the new process serves it as the old one did."""
    trial.allowed = lambda out: out.status in (0, 503) or isinstance(out.error, str)
    trial.no_reply_is_allowed = trial.is_restarted = True
    rng = random.Random(4)
    asks = [(i, ask) for i, ask in enumerate(trial.load.asks) if ask.body.get("stream")]
    async with client(trial.server.url) as http:
        for _ in range(times := max(2, size.kills // 4)):
            tasks = [asyncio.ensure_future(run_resumable(http, ask)) for _, ask in asks]
            await asyncio.sleep(0.3 + rng.random())
            at = time.monotonic()
            trial.server.process.kill()
            await asyncio.to_thread(trial.server.succeed)
            trial.struck.append((at, time.monotonic()))
            for (index, ask), out in zip(asks, await asyncio.gather(*tasks), strict=True):
                trial.must(out.is_whole, f"{ask.name}: {out.status} {str(out.error)[:120]}")
                if out.is_whole and has_own_answer(ask):
                    trial.must(out == trial.load.expected[index], f"{ask.name}: other bytes")
    trial.facts["kills"], trial.facts["resumable"] = times, times * len(asks)


async def hand_over(trial: Trial, size: Size) -> None:
    """One server after the other takes the socket over; each of the old ones ends with code 0."""
    times = min(5, max(1, size.kills // 10))
    for _ in range(times):
        await _tokens_pass(trial, 100)
        old = trial.server.process
        await asyncio.to_thread(trial.server.succeed)
        code = await asyncio.to_thread(old.wait, 120)
        trial.must(code == 0, f"the old server ended with code {code}")
    trial.facts["hand_overs"] = times
    await _tokens_pass(trial, 100)


def target(trial: Trial) -> HttpTarget:
    """The trial's server, for clients that know no more of it than its address."""
    return HttpTarget(trial.server.url, "quire-demo")


# ---- clients -------------------------------------------------------------------------------------


async def aborts(trial: Trial, size: Size) -> None:
    trial.facts["disconnects"] = await disconnect_storm(target(trial), size.aborts)


async def slow_readers(trial: Trial, size: Size) -> None:
    before = trial.server.held().rss_mib
    async with read_never(target(trial), size.slow_readers):
        await asyncio.sleep(max(3.0, size.calm_seconds))
        grown = trial.server.held().rss_mib - before
    trial.facts["rss_mib_while_slow"] = round(grown, 1)
    trial.rss_mib = max(trial.rss_mib, 0.2 * size.slow_readers)
    trial.must(grown < 256, f"RSS grew by {grown:.0f} MiB while nobody read")


async def slow_senders(trial: Trial, size: Size) -> None:
    before = trial.server.held().rss_mib
    async with partial_requests(target(trial), size.partial):
        await asyncio.sleep(max(3.0, size.calm_seconds))
        grown = trial.server.held().rss_mib - before
    trial.must(grown < 64, f"RSS grew by {grown:.0f} MiB of requests that never ended")
    tiny = await byte_by_byte(target(trial))
    trial.must(tiny.status == 200, f"a request in chunks of one byte got status {tiny.status}")
    status, taken = await endless_body(target(trial))
    trial.facts["endless_body"] = f"status {status} after {taken >> 20} MiB"
    trial.must(status >= 0 and taken < 2**28, "a body without an end was read on and on")


async def fuzz(trial: Trial, size: Size) -> None:
    # The first grammars and bodies of megabytes: a step of up to 86 MiB, no more with ten times the
    # cases.
    trial.rss_mib = 160
    core = trial.server.core()
    found = await malformed(target(trial), size.cases)
    for name in CASES:
        hostile = await send_hostile(target(trial), name)
        found.statuses.update(hostile.statuses)
        found.bad += hostile.bad
    many = await distinct_values(target(trial), size.cases // 4)
    found.statuses.update(many.statuses)
    found.bad += many.bad
    trial.facts["replies"] = {str(k): v for k, v in sorted(found.statuses.items())}
    trial.must(not found.bad, f"{len(found.bad)} bad replies, the first: {found.bad[:1]}")
    trial.must(core == trial.server.core(), "the core was replaced")


MOST_KEPT_MIB = 256
"""What the first grammars may leave for good: libraries, compiled patterns, threads."""


async def bombs(trial: Trial, size: Size) -> None:
    """Two waves. What the first leaves, the second must not leave again."""
    core, before = trial.server.core(), trial.server.held()
    await _wave_of_bombs(trial, size)
    trial.server.wait_quiet()
    kept = trial.server.held()
    trial.facts["rss_mib_of_the_first"] = round(kept.rss_mib - before.rss_mib, 1)
    trial.must(
        kept.rss_mib < before.rss_mib + MOST_KEPT_MIB,
        f"the first wave left {kept.rss_mib - before.rss_mib:.0f} MiB",
    )
    trial.before = replace(trial.before, rss_mib=kept.rss_mib, threads=kept.threads)
    await _wave_of_bombs(trial, size)
    trial.must(core == trial.server.core(), "the core was replaced")


async def _wave_of_bombs(trial: Trial, size: Size) -> None:
    asks = bomb_asks(max(30, size.cases // 5))
    async with client(trial.server.url) as http:
        sent = [asyncio.create_task(run_one(http, ask)) for ask in asks]
        killed = await kill_helpers(trial.server.process.pid, 2)
        outs = await asyncio.gather(*sent)
    replies = Counter(trial.facts.get("replies", {})) + Counter(str(out.status) for out in outs)
    trial.facts["replies"] = dict(sorted(replies.items()))
    trial.facts["helpers killed"] = trial.facts.get("helpers killed", 0) + killed
    for ask, out in zip(asks, outs, strict=True):
        fits = out.is_whole if out.status == 200 else out.status in (400, 429)
        trial.must(fits, f"{ask.name} got {out.status}, {out.error}")
        trial.must("template" not in ask.name or out.status != 200, f"{ask.name} was served")
    trial.must(killed > 0, "no helper was killed: the drill shows less than it should")
    trial.must(await helpers_rest(trial.server.process.pid), "helpers work on after the last reply")


async def hostile_ids(trial: Trial, size: Size) -> None:
    for complaint in await send_ids(target(trial), rounds=max(3, size.kills // 2)):
        trial.must(False, complaint)


# ---- room ----------------------------------------------------------------------------------------


async def scarce_blocks(trial: Trial, size: Size) -> None:
    await asyncio.sleep(max(4.0, size.calm_seconds))
    count = trial.server.metric("vllm:num_preemptions")
    trial.facts["preemptions"] = int(count)
    trial.must(count > 0, "nothing was preempted: the drill shows nothing")


async def never_fits(trial: Trial, size: Size) -> None:
    body = {"prompt": [305] * 600, "max_tokens": 1400, "temperature": 0}
    async with client(trial.server.url) as http:
        outs = await asyncio.gather(
            *(run_one(http, Ask("big", COMPLETIONS, body)) for _ in range(8))
        )
    trial.facts["refused"] = sorted({out.status for out in outs})
    trial.must(all(out.status == 400 for out in outs), "a request that can never fit was taken")


async def memory_pressure(trial: Trial, size: Size) -> None:
    await press_memory(trial, max(6.0, size.calm_seconds))


async def full_disk(trial: Trial, size: Size) -> None:
    await fill_disk(trial, max(2.0, size.calm_seconds))


async def clock_jumps(trial: Trial, size: Size) -> None:
    await jump_clock(trial, max(3.0, size.calm_seconds))


async def weights(trial: Trial, size: Size) -> None:
    await break_weights(trial, max(4.0, size.calm_seconds))


async def descriptors(trial: Trial, size: Size) -> None:
    await no_descriptors(trial, max(3.0, size.calm_seconds))


RESTARTS = ("--core-restart-limit", "100000")
CACHE = ("--kv-cache-memory-bytes", str(64 * 2**20))
"""The cache is memory that is touched bit by bit: a small one is soon as large as it gets."""
FEW = ("--num-gpu-blocks-override", "40", "--max-model-len", "512")
"""Pools of 640 tokens, for requests of up to about 200."""


def faults() -> dict[str, Fault]:
    """The rows by name. Flags that this version does not have are left out."""
    replaces = has_flag(RESTARTS[0])
    raised = RESTARTS if replaces else ()
    return {
        "F0": Fault("nothing", "-", "-", calm, promised=True),
        "F1": Fault(
            "kill -9 of the core at a random token", "every kill is survived",
            "replacement of the core", kill_core, raised, promised=replaces,
        ),
        "F2": Fault("kill -9 of a tensor-parallel worker", "as F1", "several workers"),
        "F3": Fault(
            "SIGSTOP of the core", "streams go on during the stop", "watchdog by progress",
            stop_core, raised, promised=has_flag("--core-stall-timeout"),
        ),
        "F4": Fault(
            "kill -9 of the API process", "clients that come back get the rest, byte for byte",
            "journal on disk", kill_api,
            ("--journal-dir", "{folder}/journal", "--port", "{port}"), promised=True,
        ),
        "F5": Fault(
            "a request that kills the core each time", "it ends as poison_request", "quarantine",
            poison, raised, promised=replaces,
        ),
        "F6": Fault(
            "SIGTERM under load", "what was accepted ends; new requests get 503 + Retry-After",
            "drain", terminate, ("--shutdown-timeout", "60"), promised=True,
        ),
        "F7": Fault(
            "clients disconnect at random phases", "-", "abort on disconnect", aborts,
            promised=True,
        ),
        "F8": Fault(
            "clients that never read", "RSS grows by less than 256 MiB", "bounded buffers",
            slow_readers, promised=True,
        ),
        "F9": Fault(
            "partial headers and bodies, one-byte chunks", "RSS grows by less than 64 MiB",
            "limits of the HTTP server", slow_senders, promised=True,
        ),
        "F10": Fault(
            "malformed HTTP and fuzzed JSON on all routes", "no 5xx, no hang, the same core",
            "input gate", fuzz, promised=True,
        ),
        "F11": Fault(
            "bombs of grammars, patterns and templates; their helpers killed at work",
            "each served or refused, one clear 4xx; helpers idle after; the same core",
            "killable helpers", bombs, promised=True, around=bomb_template, may_refuse=True,
        ),
        "F12": Fault(
            "an exception and a MemoryError in one request's forward pass",
            "that request alone gets a 5xx; the same core", "bisected step", forward_raises,
            promised=True,
        ),
        "F13": Fault(
            "NaN and Inf logits in one row", "that request alone gets a 5xx; the same core",
            "check of logits", not_a_number, promised=True,
        ),
        "F14": Fault(
            "KV blocks for a few of all requests", "some are preempted", "preemption",
            scarce_blocks, FEW, promised=True,
        ),
        "F15": Fault(
            "requests that can never fit", "400 at admission", "input gate", never_fits, FEW,
            promised=True,
        ),
        "F16": Fault(
            "a memory limit 24 MiB above what is used",
            "if the kernel ends a process, then the core", "replacement of the core",
            memory_pressure, raised, around=memory_group, may_refuse=True,
        ),
        "F17": Fault(
            "a full and a read-only disk for logs, metrics, caches and temporary files",
            "the log goes on once there is room", "optional sinks", full_disk,
            around=small_disk, promised=True,
        ),
        "F18": Fault(
            "clock jumps of seconds, hours and days", "deadlines do not misfire; the same core",
            "monotonic clocks", clock_jumps, around=movable_clock, promised=True,
        ),
        "F19": Fault("an adapter that is missing or corrupt", "404 or 400", "adapters"),
        "F20": Fault(
            "weights truncated, flipped, replaced and removed",
            "at start: refused with the tensor or file; later: the same core", "checked headers",
            weights, around=own_weights, promised=True,
        ),
        "F21": Fault(
            "no file descriptors left", "not busy, answers once there are some",
            "accept under EMFILE", descriptors, promised=True,
        ),
        "F22": Fault(
            "duplicate and hostile request ids and salts", "answers never swap",
            "ids of the server's own", hostile_ids, promised=True,
        ),
        "F23": Fault("a bad network to the core", "resumes", "cores on other hosts"),
        "F24": Fault(
            "a new version takes the socket", "the old one ends with code 0",
            "hand-over of sockets", hand_over, ("--handover-socket", "{folder}/handover"),
            promised=True,
        ),
    }  # fmt: skip
