"""What it costs to be able to watch, and what it costs to watch.

- Nobody watches: microseconds per step that the ring of records adds with 64 decode requests
  running, as a share of a step of 20 ms; the same of reading how long threads waited for a core
  (here of one thread); generation with the embedded model, records on and off.
- Everybody watches: ten scrapes a second and a full trace, on a server in windows with and without
  (`observe_server.py`), with a model whose step takes about 20 ms and with the embedded one; and
  the CPU time of making the spans of one step.

    python benchmarks/observe_cost.py            a table
    python benchmarks/observe_cost.py --json     one JSON object
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence

import observe_server

from quire.config.scheduler import SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.facts import FactKind, unpack
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.stats import FinishedRequestStats, StepStats
from quire.engine.starvation import StarvationWatch
from quire.observability.recorder.ring import StepRecords
from quire.observability.traces.builder import TraceBuilder, TracedRequest
from quire.observability.traces.otlp_wire import request_bytes, span_bytes
from quire.observability.traces.spans import Span
from quire.params import SamplingParams

RUNNING = 64
STEP_SECONDS = 0.020
RING = 1024
LIFE = 128
"""Output tokens of a request: every other step one ends and one comes in."""


def real_steps(count: int) -> list[StepStats]:
    """Statistics of steps of the real scheduler with requests coming and going."""
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=RUNNING)
    scheduler = Scheduler(config, KVCacheManager(4096, 16), max_model_len=4096)
    params = SamplingParams(max_tokens=LIFE, ignore_eos=True)
    steps = []
    for number in range(count):
        if number % (LIFE // RUNNING) == 0:
            scheduler.add_request(Request(f"request-{number:08x}", [number] * 64, params))
        batch = scheduler.schedule()
        done = (scheduler.requests[i] for i in batch.num_scheduled_tokens)
        ready = [r.request_id for r in done if r.num_computed_tokens == r.num_tokens]
        result = BatchResult({name: [7] for name in ready})
        outputs = scheduler.update(batch, result)
        steps.append(scheduler.make_stats(batch, result, outputs))
    assert steps[-1].num_running >= RUNNING - 2
    return steps


def record_us() -> tuple[float, float]:
    """Mean microseconds per step: while the ring fills, and once it is full."""
    steps = real_steps(4 * RING)
    records = StepRecords(RING)
    times = []
    for step in steps:
        start = time.perf_counter()
        records.record(step, None)
        times.append(time.perf_counter() - start)
    # Means, as the cost comes in bursts; the scheduler has filled up after LIFE steps.
    return statistics.mean(times[LIFE:RING]) * 1e6, statistics.mean(times[2 * RING :]) * 1e6


def watch_us() -> dict[str, float]:
    """Mean microseconds per step of reading how long its threads waited for a core: in steps that
    follow each other, and in steps of which each follows a pause."""
    found = {}
    for name, pause in (("watch", 0.0), ("watch_after_pause", 0.002)):
        watch, stats, spent, now = StarvationWatch(), StepStats(), 0.0, 0.0
        for _ in range(4 * RING):
            start = time.perf_counter()
            watch.begin(now)
            watch.end(stats, now + STEP_SECONDS)
            spent += time.perf_counter() - start
            now += STEP_SECONDS + pause
        found[f"{name}_us"] = round(spent / (4 * RING) * 1e6, 2)
    return found


def tokens_per_second(rounds: int) -> dict[str, float]:
    """Best generation speed of the embedded model with records on and off, in turns.

    The best, because whatever else the machine does only makes a round slower; and a second
    engine without records, because its distance to the first tells what the figures are worth.
    """
    from quire import LLM

    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0)
    engines = {"on": LLM(), "off": LLM(record_steps=0), "off_again": LLM(record_steps=0)}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        turn = list(engines.items())
        for name, llm in turn[number % 3 :] + turn[: number % 3]:
            prompts = [[9 + number, 20 + i] * 8 for i in range(RUNNING)]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if number:  # the first round warms up
                speeds[name].append(RUNNING * 32 / (time.perf_counter() - start))
    for llm in engines.values():
        llm.shutdown()
    return {name: max(values) for name, values in speeds.items()}


def trace_us(traced: bool) -> tuple[float, float]:
    """Mean CPU microseconds per step of following it and making its spans, and spans per step;
    without traced requests there are none, but the steps are followed all the same."""
    steps = real_steps(RING)
    builder = TraceBuilder("all", 1.0 if traced else 0.0)
    names: dict[int, str] = {}
    spent, count = 0.0, 0
    for step in steps:
        begun = time.thread_time()
        for number, name in step.names:
            names[number] = name
            builder.accept(TracedRequest(name, (name,), step.start, {"gen_ai.request.model": "m"}))
        spans = builder.step(step) + builder.end(_ended(step, names))
        _write(spans)
        spent += time.thread_time() - begun
        count += len(spans)
    return spent / RING * 1e6, count / RING


def _ended(step: StepStats, names: dict[int, str]) -> list[FinishedRequestStats]:
    now = step.start + step.step_seconds
    return [
        FinishedRequestStats(
            "length", 1.0, 0.0, 0.1, 0.9, 1.0, 64, LIFE, 0, 0, 1, LIFE,
            request_id=names[fact.request], finished_ts=now,
        )
        for fact in unpack(step.facts)
        if fact.kind == FactKind.FINISHED
    ]  # fmt: skip


def _write(spans: Sequence[Span]) -> None:
    if spans:
        request_bytes([span_bytes(span, 0) for span in spans], {}, ("quire", "0"))


def watched_servers(pairs: int) -> list[dict[str, object]]:
    """A server with steps of a real model's length, and the worst case."""
    parser = argparse.ArgumentParser()
    observe_server.add_flags(parser)
    return [
        observe_server.run(parser.parse_args(["--model", model, "--pairs", str(pairs)]))
        for model in ("step20ms", "")
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with the model; 0: none")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of watched windows; 0: none")
    options = parser.parse_args(arguments)
    gc.freeze()
    result = nobody(options.rounds)
    for name, traced in (("traced", True), ("untraced", False)):
        spent, spans = trace_us(traced)
        result |= {f"{name}_us_per_step": round(spent, 1), f"{name}_spans": round(spans, 1)}
    servers = watched_servers(options.pairs) if options.pairs else []
    if options.json:
        print(json.dumps({**result, "servers": servers}))
        return
    tell(result)
    for server in servers:
        print(observe_server.describe(server))


def nobody(rounds: int) -> dict[str, float]:
    """What records cost while nobody reads them."""
    filling, full = record_us()
    result: dict[str, float] = {
        "filling_us": round(filling, 2),
        "full_us": round(full, 2),
        "share_of_step_percent": round(100 * full / 1e6 / STEP_SECONDS, 4),
    }
    result |= watch_us()
    watched = result["watch_us"] / 1e6 / STEP_SECONDS
    result["watch_share_of_step_percent"] = round(100 * watched, 4)
    if rounds:
        speed = tokens_per_second(rounds)
        result |= {f"tokens_per_second_{name}": round(value, 1) for name, value in speed.items()}
    return result


def tell(result: dict[str, float]) -> None:
    print(f"{RUNNING} running, {LIFE} output tokens each, a ring of {RING} steps")
    print(
        f"ring fills: {result['filling_us']:.1f} us per step; ring full: {result['full_us']:.1f} us"
    )
    print(f"that is {result['share_of_step_percent']} % of a step of {1e3 * STEP_SECONDS:.0f} ms")
    print(
        f"waiting for cores: {result['watch_us']} us per step, {result['watch_after_pause_us']} us "
        f"after a pause; {result['watch_share_of_step_percent']} % of a step"
    )
    if "tokens_per_second_on" in result:
        print(
            f"embedded model: {result['tokens_per_second_on']} tokens/s with records, "
            f"{result['tokens_per_second_off']} and {result['tokens_per_second_off_again']} without"
        )
    print(
        f"a full trace: {result['traced_us_per_step']} us of CPU per step for "
        f"{result['traced_spans']:.0f} spans; with no traced request "
        f"{result['untraced_us_per_step']} us"
    )


if __name__ == "__main__":
    main()
