"""What each scheduling policy does to latency: `python benchmarks/policies.py [--markdown]`.

Drives the real scheduler on a manual clock. A step takes `STEP_SECONDS` plus `TOKEN_SECONDS` for
each of its tokens, so the numbers compare policies, not machines, and are the same everywhere.
The load is a little more than the engine can serve, from one client that sends most of it and
three that send little.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass, field

from quire.config.scheduler import POLICIES, SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.params import SamplingParams
from quire.utils.timing import ManualClock

STEP_SECONDS, TOKEN_SECONDS = 0.008, 0.00005
NUM_REQUESTS, ARRIVALS_PER_SECOND = 800, 20.0
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 1000, 4096
LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 1024}


@dataclass
class Job:
    request: Request
    times: list[float] = field(default_factory=list)
    """When each output token came."""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.request.arrival_time

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def make_jobs() -> list[Job]:
    """The same for every policy: a fifth of the prompts are long."""
    rng = random.Random(1)
    now, jobs = 0.0, []
    for i in range(NUM_REQUESTS):
        now += rng.expovariate(ARRIVALS_PER_SECOND)
        length = rng.randint(800, 3000) if rng.random() < 0.2 else rng.randint(32, 256)
        request = Request(
            f"r{i}",
            [rng.randrange(1000) for _ in range(length)],
            SamplingParams(max_tokens=rng.randint(8, 160), ignore_eos=True),
            arrival_time=now,
            priority=rng.choice([0, 1, 1, 1]),
            client="busy" if rng.random() < 0.8 else f"quiet{rng.randrange(3)}",
        )
        jobs.append(Job(request))
    return jobs


def simulate(**config: object) -> tuple[list[Job], int]:
    """Run the whole load; gives the jobs with their times, and the number of preemptions."""
    clock = ManualClock()
    kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, True, MAX_MODEL_LEN)
    limits = SchedulerConfig(**LIMITS, **config)  # type: ignore[arg-type]
    scheduler = Scheduler(limits, kv, max_model_len=MAX_MODEL_LEN, clock=clock)
    jobs = make_jobs()
    by_id = {job.request.request_id: job for job in jobs}
    coming = list(reversed(jobs))
    preempted = 0
    while coming or scheduler.requests:
        if not scheduler.requests and coming[-1].request.arrival_time > clock.now():
            clock.advance(coming[-1].request.arrival_time - clock.now())
        while coming and coming[-1].request.arrival_time <= clock.now():
            scheduler.add_request(coming.pop().request)
        batch = scheduler.schedule()
        clock.advance(STEP_SECONDS + TOKEN_SECONDS * batch.total_num_scheduled_tokens)
        preempted += len(batch.preempted_req_ids)
        requests = (scheduler.requests[i] for i in batch.num_scheduled_tokens)
        done = [r for r in requests if r.num_computed_tokens == r.num_tokens]
        for output in scheduler.update(batch, BatchResult({r.request_id: [7] for r in done})):
            by_id[output.request_id].times.append(clock.now())
    return jobs, preempted


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def p99(values: list[float]) -> float:
    """The smallest value that at least 99 % of them do not exceed."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def row(policy: str, **config: object) -> list[str]:
    jobs, preempted = simulate(scheduling_policy=policy, **config)
    ttft, tpot = [j.ttft for j in jobs], [j.tpot for j in jobs]
    quiet = mean([j.ttft for j in jobs if j.request.client != "busy"])
    urgent = mean([j.ttft for j in jobs if j.request.priority == 0])
    seconds = [mean(ttft), p99(ttft), quiet, urgent]
    return [
        policy + "".join(f", {name}" for name in config),
        *(f"{value:.2f}" for value in seconds),
        *(f"{1000 * value:.0f}" for value in (mean(tpot), p99(tpot))),
        str(preempted),
    ]


HEADER = [
    "policy", "TTFT mean, s", "TTFT p99, s", "TTFT quiet clients, s", "TTFT priority 0, s",
    "TPOT mean, ms", "TPOT p99, ms", "preemptions",
]  # fmt: skip


def table() -> list[list[str]]:
    rows = [row(policy) for policy in POLICIES]
    rows.insert(2, row("priority", priority_preemption=True))
    return [HEADER, *rows]


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    lines.insert(1, "|---" + "|--:" * (len(rows[0]) - 1) + "|")
    return "\n".join(lines) + "\n"


def plain(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + "\n"
        for cells in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    show = markdown if parser.parse_args().markdown else plain
    print(show(table()), end="")


if __name__ == "__main__":
    main()
