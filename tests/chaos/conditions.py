"""What must hold after every fault: seven conditions, each a function from a trial to complaints.

A trial is one fault under load, with everything that was seen of it. A condition that holds has no
complaint. Conditions know nothing of single faults: what a fault allows (a refusal, a request that
ends with its own error) stands in its row, and the trial carries it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from chaos_server import ChaosServer, Held, settled
from mixed_load import SECRET, Load, Outcome, has_own_answer
from surroundings import Around

READY_SECONDS = 2.0
"""`/readyz` must tell within this that the server cannot serve."""
RSS_MIB = 96.0
"""What memory may grow by in a trial: the KV cache that fills, and what an allocator keeps."""
MISSED = 3
"""Probes in a row without an answer that count, as for Kubernetes; a starved machine misses one."""
SPARE_FDS = 8
SPARE_THREADS = 4
IDLE_CPU = 0.3
"""Part of one processor that an idle server may use; what spins takes all it gets."""


@dataclass
class Probe:
    """What a probe said, and when, in seconds of the monotonic clock."""

    at: float
    path: str
    status: int


class Watch:
    """Asks the probes again and again, on a thread."""

    PATHS = ("/livez", "/health", "/readyz")

    def __init__(self, server: ChaosServer) -> None:
        self.seen: list[Probe] = []
        self._server = server
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._enough.wait(0.1):
            for path in self.PATHS:
                at = time.monotonic()
                self.seen.append(Probe(at, path, self._server.status(path)))

    def other_than_200(self, path: str, since: float, until: float) -> Counter[int]:
        """Statuses that a probe gave in a span of time, except 200."""
        return Counter(
            p.status
            for p in self.seen
            if p.path == path and since <= p.at <= until and p.status != 200
        )

    def most_missed(self, path: str) -> int:
        """The most probes in a row without an answer."""
        answered = "".join("1" if p.status else "0" for p in self.seen if p.path == path)
        return max(map(len, answered.split("1")))


@dataclass
class Trial:
    """One fault, and what was seen of it."""

    server: ChaosServer
    load: Load
    canary: Outcome
    before: Held
    watch: Watch
    expected_exit: int | None = None
    """The exit code that ends the trial; `None`: the server lives on."""
    is_restarted: bool = False
    """The server itself was started again, and loaded its model again."""
    around: Around = field(default_factory=Around)
    """What the server was started with for this fault."""
    no_reply_is_allowed: bool = False
    """Connections may end before a reply has begun: such a request was never accepted."""
    may_refuse: bool = False
    """Load may be refused with 429 or 503 and Retry-After."""
    rss_mib: float = RSS_MIB
    """What memory may grow by."""
    recovery_limit: float = 30.0
    """Seconds that streams may stand still for one fault."""
    struck: list[tuple[float, float]] = field(default_factory=list)
    """From when to when the core was not able to work, for each time that it was hurt."""
    complaints: list[str] = field(default_factory=list)
    """What the fault's own row asks for beside the conditions, and does not hold."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures for the report."""
    retold: dict[int, Outcome] = field(default_factory=dict)
    """By position in `load.done`: what the request gives when asked again with its seed."""
    cpu_idle: float = 0.0

    def allowed(self, out: Outcome) -> bool:
        """Whether an outcome that is no whole answer is right under this fault."""
        if out.status in (429, 503) and self.may_refuse:
            return out.retry_after is not None
        return self.no_reply_is_allowed and out.status == 0 and not out.choices

    def must(self, holds: bool, what: str) -> None:
        """Note what the fault's own row asks for."""
        if not holds:
            self.complaints.append(what)

    @property
    def lives(self) -> bool:
        return self.server.process.poll() is None

    def recoveries(self) -> list[float]:
        """For each strike, the longest time in which no stream brought anything; none of a server
        that is gone."""
        found: list[float] = []
        if not self.lives:
            return found
        events = sorted(self.load.events)
        starts = [at for at, _ in self.struck]
        for start, end in zip(starts, [*starts[1:], float("inf")], strict=False):
            span = [start, *(e for e in events if start <= e <= end)]
            found.append(max((b - a for a, b in zip(span, span[1:], strict=False)), default=0.0))
        return found

    def gaps(self) -> list[float]:
        """Times between events of the same stream, over all streams."""
        return sorted(
            b - a
            for _, out in self.load.done
            for a, b in zip(out.arrivals, out.arrivals[1:], strict=False)
        )


def nothing_lost(trial: Trial) -> Iterator[str]:
    """Every accepted request ends with an answer, or with an error that the fault's row allows."""
    for index, out in trial.load.done:
        ask = trial.load.asks[index]
        if not out.is_whole and not trial.allowed(out):
            yield f"{ask.name}: status {out.status}, error {str(out.error)[:160]}"


def same_bytes(trial: Trial) -> Iterator[str]:
    """What arrived is what a run without faults gives; of what was cut off, the beginning."""
    for position, (index, out) in enumerate(trial.load.done):
        ask = trial.load.asks[index]
        if has_own_answer(ask):
            expected = trial.load.expected[index]
        elif position in trial.retold:
            expected = trial.retold[position]
        else:
            continue
        if out.is_whole and out != expected:
            yield f"{ask.name}: {difference(out, expected)}"
        elif not out.is_whole:
            for choice, told in out.choices.items():
                if not expected.choices[choice][0].startswith(told[0]):
                    yield f"{ask.name}[{choice}]: what came before the error is not the beginning"


def difference(got: Outcome, expected: Outcome) -> str:
    """The first thing that differs."""
    for index, told in expected.choices.items():
        if index not in got.choices:
            return f"no choice {index}"
        for part, a, b in zip(
            ("text", "finish_reason", "stop_reason", "logprobs"), got.choices[index], told,
            strict=True,
        ):  # fmt: skip
            if a != b:
                return f"[{index}].{part}: {len(str(a))} characters, {len(str(b))} expected"
    return "usage or prompt_logprobs"


def no_leak(trial: Trial) -> Iterator[str]:
    """Blocks, descriptors, threads, processes, shared memory and RSS are as before."""
    if not trial.lives:
        yield from _nothing_left(trial)
        return
    found = trial.server.integrity()
    if found is None:
        yield "the integrity check failed or did not answer"
    elif found["running"] or found["waiting"] or found["free_blocks"] != found["total_blocks"]:
        yield f"held at idle: {found}"
    before, now = trial.before, trial.server.held()
    settled(lambda: trial.server.held().fds <= before.fds + SPARE_FDS, 10)
    now = trial.server.held()
    trial.facts["rss_mib_grown"] = round(now.rss_mib - before.rss_mib, 1)
    if now.processes != before.processes or now.zombies:
        yield f"{now.processes} processes and {now.zombies} zombies, {before.processes} before"
    if now.threads > before.threads + SPARE_THREADS:
        yield f"{now.threads} threads, {before.threads} before"
    if now.fds > before.fds + SPARE_FDS:
        yield f"{now.fds} descriptors, {before.fds} before"
    if now.rss_mib > before.rss_mib + trial.rss_mib:
        yield f"RSS {now.rss_mib:.0f} MiB, {before.rss_mib:.0f} before"
    if now.shm != before.shm:
        yield f"/dev/shm: {sorted(now.shm ^ before.shm)}"


def _nothing_left(trial: Trial) -> Iterator[str]:
    children = trial.facts.pop("family", [])
    _, alive = psutil.wait_procs(children, timeout=3)
    if alive:
        yield f"{len(alive)} processes survive the server"
    if trial.server.held_shm():
        yield f"/dev/shm: {sorted(trial.server.held_shm())}"


def bystanders_untouched(trial: Trial) -> Iterator[str]:
    """A second client with a known answer gets it, every time."""
    for out in trial.load.canaries:
        if out != trial.canary and not trial.allowed(out):
            yield f"canary: status {out.status}, error {str(out.error)[:160]}"
    if not trial.load.canaries:
        yield "the canary was never asked"


def truthful_signals(trial: Trial) -> Iterator[str]:
    """Probes and exit code say what is so."""
    if trial.expected_exit is not None or not trial.lives:
        code = trial.server.process.poll()
        if code != trial.expected_exit:
            yield f"exit code {code}, {trial.expected_exit} expected"
        return
    end = time.monotonic()
    for path in ("/livez", "/health"):
        wrong = trial.watch.other_than_200(path, 0, end)
        if trial.no_reply_is_allowed or trial.watch.most_missed(path) < MISSED:
            wrong.pop(0, None)  # nobody was told anything untrue
        if trial.is_restarted and path == "/health":
            wrong.pop(503, None)  # while the next process loads its model
        if wrong:
            yield f"{path} said {dict(wrong)}, though no restart would have helped"
    if trial.server.status("/readyz") != 200:
        yield "/readyz is not 200 after recovery"
    for start, until in trial.struck:
        if until - start > READY_SECONDS + 1 and not trial.watch.other_than_200(
            "/readyz", start, until + 1
        ):
            yield f"/readyz stayed 200 though nothing worked for {until - start:.1f} s"


def bounded(trial: Trial) -> Iterator[str]:
    """Recovery within the row's limit, and idle processors afterwards."""
    if not trial.lives:
        return
    longest = max(trial.recoveries(), default=0.0)
    if longest > trial.recovery_limit:
        yield f"streams stood still for {longest:.1f} s, {trial.recovery_limit:.0f} s allowed"
    if trial.cpu_idle > IDLE_CPU:
        yield f"{trial.cpu_idle:.2f} processors are busy at idle"


def no_content_in_logs(trial: Trial) -> Iterator[str]:
    """No word of a prompt in anything that was logged."""
    if SECRET in trial.server.log:
        yield "a prompt stands in the log"


CONDITIONS: dict[str, Callable[[Trial], Iterator[str]]] = {
    "nothing lost": nothing_lost,
    "same bytes": same_bytes,
    "no leak": no_leak,
    "bystanders": bystanders_untouched,
    "signals": truthful_signals,
    "bounded": bounded,
    "no content": no_content_in_logs,
}
"""Checked after every fault, in this order."""


async def idle_cpu(server: ChaosServer, seconds: float = 1.0) -> float:
    """Processors that the server uses now."""
    family = server.family()
    before, start = _cpu(family), time.monotonic()
    await asyncio.sleep(seconds)
    return (_cpu(family) - before) / (time.monotonic() - start)


def _cpu(family: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in family if p.is_running())
