"""Figures about the last seconds of an engine, computed from its records for the doctor.

A figure that the records do not give is absent, so the doctor's rows can tell "fine" from "not
known". Draws no conclusions: that is for the rows of `diagnosis.py`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any, Final

from quire.config.scheduler import SchedulerConfig
from quire.core.admission import LIVE_LIMITS
from quire.core.facts import FactKind
from quire.core.request import RequestStatus
from quire.observability.recorder.lives import wait_name
from quire.observability.recorder.replay import Replay, Step
from quire.observability.recorder.ring import Recording, notable_wait

Signals = dict[str, Any]
"""Figures by name; seconds, shares from 0 to 1, counts and rates per second."""

MAX_NAMED: Final = 3


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that at least a share `q` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0


def weighted_quantile(values: Iterable[tuple[float, int]], q: float) -> float:
    """The same for values with multiplicity: pairs of (value, count)."""
    ordered = sorted(values)
    wanted, seen = q * sum(count for _, count in ordered), 0
    for value, count in ordered:
        seen += count
        if seen >= wanted:
            return value
    return 0.0


class _Window:
    """Accumulates figures over the steps in a window of time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.steps = 0
        self.busy = self.overhead = self.gaps = self.span = 0.0
        self.usage: list[float] = []
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.waits: dict[str, float] = defaultdict(float)
        self.stalls = 0
        self.preemptions = self.recomputed = self.scheduled = 0
        self.missed = 0
        self.core_wait = self.api_wait = math.nan
        self.evicted = self.queries = self.hits = self.drafts = self.accepted = 0
        self.ends: Counter[int] = Counter()
        self.decode_steps: list[float] = []
        self.slow: list[tuple[float, int, int]] = []
        # steps with decodes: seconds, prompt tokens, number of the largest chunk's request
        self.gaps_seen: list[tuple[float, int]] = []
        # seconds of each step with decodes, and how many requests waited that long for a token
        self.queue: list[float] = []
        self.ttft: list[tuple[float, int]] = []
        self.first_start = math.inf
        self.last_end = 0.0
        self.epoch = recording.epoch
        self._queued: dict[int, float] = {}
        self._had_work = False
        self._unread: list[Step] = []
        # steps of which is not known yet how long they waited for a core

    def after(self, end: float, epoch: int) -> _Window:
        """This window, continuing from the end of a step that does not count."""
        self.last_end, self.epoch = end, epoch
        return self

    def add(self, step: Step, inside: bool) -> None:
        """Add one step. Of a step outside the window, only what later steps need is kept."""
        self._lives(step, inside)
        if inside:
            self.first_start = min(self.first_start, step.row.start)
            self._costs(step)
            self._counts(step)
        self.last_end, self.epoch = step.row.end, step.row.epoch

    def _lives(self, step: Step, inside: bool) -> None:
        for fact in step.facts:
            if fact.kind == FactKind.QUEUED:
                self._queued[fact.request] = fact.time
            elif fact.kind == FactKind.ADMITTED and not fact.reason and inside:
                if fact.request in self._queued:
                    self.queue.append(max(0.0, fact.time - self._queued[fact.request]))
            elif fact.kind == FactKind.FINISHED:
                self._queued.pop(fact.request, None)
                if inside:
                    self.ends[fact.reason] += 1
            elif fact.kind == FactKind.PREEMPTED and inside:
                self.preemptions += 1
        for number, chunk in step.chunks.items():
            if chunk.last and not chunk.again and number in self._queued and inside:
                self.ttft.append((step.row.end - self._queued[number], number))

    def _costs(self, step: Step) -> None:
        row = step.row
        # Time in which there was nothing to do is no time of the engine.
        gap = max(0.0, row.start - self.last_end) if self._had_work else 0.0
        self._had_work = bool(row.num_running or row.num_waiting)
        self.steps += 1
        self.busy += row.step_seconds
        self.gaps += gap
        self.span += row.step_seconds + gap
        if gap:
            self.core_wait = _plus(self.core_wait, row.gap_wait_seconds)
        self.api_wait = _plus(self.api_wait, row.api_wait_seconds)
        if step.head is not None:
            self.waits[wait_name(step.head.reason)] += row.step_seconds
        self._unread.append(step)
        if not math.isnan(row.cpu_wait_seconds):
            self._read(row.cpu_wait_seconds / row.step_seconds if row.step_seconds else 0.0)

    def _read(self, waited: float) -> None:
        """Take what steps cost in the time that they had a core: that shows what they do. Those
        that were not read waited for the same share of their time as the one read after them."""
        for step in self._unread:
            row = step.row
            self.core_wait = _plus(self.core_wait, waited * row.step_seconds)
            worked = row.step_seconds
            worked -= notable_wait(waited * row.step_seconds, row.step_seconds)
            share = worked / row.step_seconds if row.step_seconds else 1.0
            self.overhead += (row.schedule_seconds + row.update_seconds) * share
            decodes = len(step.scheduled) - len(step.chunks)
            prompt = sum(chunk.tokens for chunk in step.chunks.values())
            if decodes:
                self.gaps_seen.append((row.step_seconds, decodes))
            if decodes and prompt:
                _, number = max((c.tokens, n) for n, c in step.chunks.items())
                self.slow.append((worked, prompt, number))
            elif decodes:
                self.decode_steps.append(worked)
        self._unread.clear()

    def _counts(self, step: Step) -> None:
        row = step.row
        self.usage.append(row.kv_cache_usage)
        self.running.append(row.num_running)
        self.waiting.append(row.num_waiting)
        self.stalls += bool(step.stalled)
        self.scheduled += row.num_scheduled_tokens
        self.recomputed += sum(c.tokens for c in step.chunks.values() if c.again)
        self.evicted += row.num_blocks_evicted
        self.missed += row.prefix_missed
        self.queries += row.prefix_queries
        self.hits += row.prefix_hits
        self.drafts += row.num_draft_tokens
        self.accepted += row.num_accepted_tokens

    def signals(self) -> Signals:
        """The accumulated figures."""
        self._read(math.nan)
        steps = max(1, self.steps)
        span = self.span or 1e-9
        found: Signals = {
            "steps": self.steps,
            "span_seconds": self.span,
            "busy_share": self.busy / span,
            "overhead_share": self.overhead / self.busy if self.busy else 0.0,
            "gap_share": self.gaps / span,
            "kv_usage_mean": sum(self.usage) / steps,
            "kv_usage_max": max(self.usage, default=0.0),
            "running_mean": sum(self.running) / steps,
            "running_max": max(self.running, default=0),
            "waiting_mean": sum(self.waiting) / steps,
            "waiting_max": max(self.waiting, default=0),
            "wait_share": {name: s / span for name, s in self.waits.items()},
            "stalled_share": self.stalls / steps,
            "preemptions": self.preemptions,
            "preemption_rate": self.preemptions / span,
            "recomputed_share": self.recomputed / max(1, self.scheduled),
            "blocks_evicted": self.evicted,
            "missed_tokens": self.missed,
            "missed_share": self.missed / max(1, self.scheduled),
            "prefix_queries": self.queries,
            "prefix_hit_rate": self.hits / self.queries if self.queries else 0.0,
            "finished": sum(self.ends.values()),
            "aborted": self.ends[RequestStatus.FINISHED_ABORTED],
            "failed": self.ends[RequestStatus.FINISHED_ERROR],
        }
        if self.drafts:
            found["draft_acceptance"] = self.accepted / self.drafts
        if self.ttft:
            waits = [seconds for seconds, _ in self.ttft]
            found |= {f"ttft_p{q}": quantile(waits, q / 100) for q in (50, 95, 99)}
            late, number = max(self.ttft)
            found |= {"latest_ttft": late, "latest_request": self._name(number)}
        if self.queue:
            found["queue_p95"] = quantile(self.queue, 0.95)
        return found | self._decoding()

    def _name(self, number: int) -> str:
        return self.recording.name(self.epoch, number)

    def _decoding(self) -> Signals:
        """How long running requests waited for their next token, and what made that slow."""
        everything = [*self.decode_steps, *(seconds for seconds, _, _ in self.slow)]
        if not everything:
            return {}
        usual = median(self.decode_steps) if self.decode_steps else median(everything)
        found: Signals = {
            "itl_p50": weighted_quantile(self.gaps_seen, 0.5),
            "itl_p99": weighted_quantile(self.gaps_seen, 0.99),
            "decode_step_p50": usual,
            "decode_steps": len(everything),
        }
        long = [s for s in everything if s > 3 * usual]
        spikes = [item for item in self.slow if item[0] > 3 * usual]
        if spikes:
            _, prompt, number = max(spikes)
            by_prefill = sum(s - usual for s, _, _ in spikes)
            found |= {
                "spikes": len(spikes),
                "spike_seconds": max(spikes)[0],
                "spike_prompt_tokens": prompt,
                "spike_seconds_per_token": median((s - usual) / tokens for s, tokens, _ in spikes),
                "spike_request": self._name(number),
                "spikes_by_prefill": by_prefill / sum(s - usual for s in long),
                "spike_time_share": by_prefill / (self.span or 1e-9),
            }
        return found


def read_signals(
    recording: Recording,
    limits: SchedulerConfig,
    window: float,
    now: float,
    num_gpu_blocks_override: int | None = None,
) -> Signals:
    """Figures of the steps that began in the last `window` seconds.

    Args:
        recording: The records.
        limits: The limits that hold now.
        window: Seconds.
        now: On the monotonic clock.
        num_gpu_blocks_override: The number of blocks, if it was set by hand.
    """
    gathered = _Window(recording)
    changed = -math.inf if recording.limits_changed is None else recording.limits_changed
    for step in Replay(recording):
        told = [fact.time for fact in step.facts if fact.kind == FactKind.LIMITS]
        if told:
            # Nothing from before tells what the limits of now do; nor do the waits of those who
            # came before.
            changed = max(changed, *told)
            gathered = _Window(recording).after(gathered.last_end, gathered.epoch)
        gathered.add(step, step.row.start >= max(now - window, changed))
    signals = gathered.signals()
    signals |= _machine(recording, gathered, max(now - window, changed))
    signals |= _reach(recording, gathered.first_start, changed, window, now)
    signals["idle_seconds"] = max(0.0, now - gathered.last_end) if len(recording) else None
    signals["num_gpu_blocks_override"] = num_gpu_blocks_override
    for name in (*LIVE_LIMITS, "enable_chunked_prefill"):
        signals[name] = getattr(limits, name)
    return signals


def _plus(total: float, value: float) -> float:
    """A sum that skips values that are not known (NaN)."""
    if math.isnan(value):
        return total
    return value if math.isnan(total) else total + value


def _machine(recording: Recording, gathered: _Window, since: float) -> Signals:
    """How long the engine waited for cores, and the load of the machine."""
    found: Signals = {}
    span = gathered.span or 1e-9
    for name, waited in (("core", gathered.core_wait), ("api", gathered.api_wait)):
        if not math.isnan(waited):
            found |= {f"{name}_wait_seconds": waited, f"{name}_wait_share": waited / span}
    readings = [reading for reading in recording.machine if reading.time >= since]
    if not readings:
        return found
    found["cores"] = readings[-1].cores
    seconds = sum(reading.seconds for reading in readings)
    loads = [reading.load for reading in readings if reading.load is not None]
    stolen = [r.stolen_seconds for r in readings if r.stolen_seconds is not None]
    throttled = [r.throttled_seconds for r in readings if r.throttled_seconds is not None]
    if loads:
        found["load"] = max(loads)
    if stolen:
        found["stolen_share"] = sum(stolen) / (seconds * readings[-1].cores)
    if throttled:
        found |= {"throttled_seconds": sum(throttled), "machine_seconds": seconds}
    return found


def _reach(
    recording: Recording, first_start: float, changed: float, window: float, now: float
) -> Signals:
    """How far back the steps that count reach, in seconds, and what limits it."""
    if changed > now - window:
        return {"seen_seconds": now - changed, "seen_since": "limits"}
    oldest = recording.row(0) if len(recording) else None
    if oldest is None or oldest.start <= now - window or first_start == math.inf:
        return {"seen_seconds": window, "seen_since": "window"}
    since = "start" if oldest.step == 1 else "records"
    return {"seen_seconds": now - oldest.start, "seen_since": since}
