"""The stat line every few seconds, and the optional lines per step and per batch size.

The stat line carries vLLM's fields in vLLM's order, then the words that older versions of vLLM
used. Each field is a row of `FIELDS`. There is no thread here: the caller asks often enough, and a
clock says whether a line is due.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from quire.core.stats import IterationStats, StepStats
from quire.logger import get_logger
from quire.observability.sinks import HitRate
from quire.utils.timing import Clock, RealClock

logger = get_logger(__name__)

KEPT_TIMES: Final = 1024
"""Forward times kept for each batch size; the median is over these, the most recent ones."""


@dataclass(slots=True)
class Interval:
    """What happened since the last line."""

    device: str
    last: StepStats = field(default_factory=StepStats)
    seconds: float = 1.0
    prompt_tokens: int = 0
    """Computed prompt tokens; cache hits do not count."""
    generation_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    corrupted: int = 0
    """Requests that failed on numbers that were not finite."""
    hit_rate: float = 0.0

    def add(self, step: StepStats) -> None:
        """Count one step."""
        self.last = step
        self.prompt_tokens += step.num_prompt_tokens
        self.generation_tokens += step.num_generation_tokens
        self.preemptions += step.num_preempted
        self.drafts += step.num_drafts
        self.draft_tokens += step.num_draft_tokens
        self.accepted_tokens += step.num_accepted_tokens


@dataclass(frozen=True, slots=True)
class Field:
    """One part of the line: `text % read(interval)`, present when `when(interval)`."""

    text: str
    read: Callable[[Interval], object]
    when: Callable[[Interval], bool] = lambda interval: True


FIELDS: Final = (
    Field("Avg prompt throughput: %.1f tokens/s", lambda i: i.prompt_tokens / i.seconds),
    Field("Avg generation throughput: %.1f tokens/s", lambda i: i.generation_tokens / i.seconds),
    Field("Running: %d reqs", lambda i: i.last.num_running),
    Field("Waiting: %d reqs", lambda i: i.last.num_waiting),
    Field("Preemptions: %d", lambda i: i.preemptions, when=lambda i: i.preemptions > 0),
    Field("%s: %.1f%%", lambda i: (cache_words(i.device), 100 * i.last.kv_cache_usage)),
    Field("Prefix cache hit rate: %.1f%%", lambda i: 100 * i.hit_rate),
    Field("Corrupted: %d reqs", lambda i: i.corrupted, when=lambda i: i.corrupted > 0),
    Field(
        "Draft acceptance rate: %.1f%%",
        lambda i: 100 * i.accepted_tokens / i.draft_tokens,
        when=lambda i: i.draft_tokens > 0,
    ),
    Field(
        "Mean acceptance length: %.2f",
        lambda i: 1 + i.accepted_tokens / i.drafts,
        when=lambda i: i.drafts > 0,
    ),
    Field(
        "CPU KV cache usage: %.1f%%",
        lambda i: 100 * i.last.swap_usage,
        when=lambda i: i.last.swap_usage > 0 or i.last.num_swapped > 0,
    ),
    # The words of older versions of vLLM.
    Field("Swapped: %d reqs", lambda i: i.last.num_swapped),
    Field("Pending: %d reqs", lambda i: i.last.num_waiting),
)


def cache_words(device: str) -> str:
    """What the lines call the main KV pool. On a CPU its name has no prefix, because vLLM's
    `CPU KV cache usage` means the second tier."""
    return "KV cache usage" if device == "cpu" else "GPU KV cache usage"


class LogLine:
    """Logs one line per interval: at INFO if anything was computed, else at DEBUG.

    Args:
        interval: Seconds between lines.
        device: `cpu` or `cuda`; decides what the line calls the KV cache.
        engine: Number of the engine, shown at the beginning of the line.
        clock: Where time comes from.
        log: Where lines go.
    """

    def __init__(
        self,
        interval: float = 10.0,
        device: str = "cpu",
        engine: int = 0,
        clock: Clock | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        self._seconds = interval
        self._device = device
        self._head = f"Engine {engine:03d}: "
        self._clock = clock or RealClock()
        self._log = log or logger
        self._hits = HitRate()
        self._since = self._clock.now()
        self._now = Interval(device)
        self._was_busy = False

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Add one step to the interval, and log if it is over."""
        if step is not None:
            self._now.add(step)
            self._hits.extend(step.prefix_lookups)
        if iteration is not None and iteration.finished:
            self._now.corrupted += sum(f.corrupted for f in iteration.finished)
        self.tick()

    def tick(self) -> None:
        """Log if the interval is over. Call this now and then while the engine is idle."""
        seconds = self._clock.now() - self._since
        if seconds >= self._seconds:
            self._emit(seconds)

    def _emit(self, seconds: float) -> None:
        now = self._now
        now.seconds, now.hit_rate = seconds, self._hits.value
        busy = bool(now.prompt_tokens or now.generation_tokens)
        # The line after the last busy one is shown too: it says that work has ended.
        level = logging.INFO if busy or self._was_busy else logging.DEBUG
        self._log.log(level, "%s", self._head + render(now))
        self._was_busy = busy
        self._since = self._clock.now()
        self._now = Interval(self._device, last=now.last)


def render(interval: Interval) -> str:
    """The fields that apply, joined by commas."""
    return ", ".join(f.text % f.read(interval) for f in FIELDS if f.when(interval))


class IterationLog:
    """One line per step, for `--enable-logging-iteration-details`."""

    def __init__(self, device: str = "cpu", log: logging.Logger | None = None) -> None:
        self._words = cache_words(device)
        self._log = log or logger

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Log what the step computed and how long it took."""
        if step is None:
            return
        self._log.info(
            "Iteration(%d): %d context requests, %d context tokens, %d generation requests, "
            "%d generation tokens, iteration elapsed time: %.2f ms, %s: %.1f%%, "
            "%d running requests, %d waiting requests",
            step.step,
            step.num_prefills,
            step.num_prompt_tokens,
            step.num_scheduled_requests - step.num_prefills,
            step.num_scheduled_tokens - step.num_prompt_tokens,
            1000 * step.step_seconds,
            self._words,
            100 * step.kv_cache_usage,
            step.num_running,
            step.num_waiting,
        )


class BatchSizeLog:
    """Forward time by the number of tokens in a step, for `QUIRE_LOG_BATCHSIZE_INTERVAL`.

    Args:
        interval: Seconds between lines.
        clock: Where time comes from.
        log: Where lines go.
    """

    def __init__(
        self, interval: float, clock: Clock | None = None, log: logging.Logger | None = None
    ) -> None:
        self._seconds = interval
        self._clock = clock or RealClock()
        self._log = log or logger
        self._since = self._clock.now()
        self._times: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Keep the time of a step that computed something, and log if the interval is over."""
        if step is not None and step.num_scheduled_tokens:
            size = step.num_scheduled_tokens
            kept = self._times.setdefault(size, deque(maxlen=KEPT_TIMES))
            kept.append(step.forward_seconds)
            self._counts[size] = self._counts.get(size, 0) + 1
        if self._clock.now() - self._since >= self._seconds:
            self._since = self._clock.now()
            self._emit()

    def _emit(self) -> None:
        """The most frequent sizes first. Sizes seen once are left out: one time is no median."""
        sizes = sorted(self._counts, key=lambda size: -self._counts[size])
        rows = [
            (size, self._counts[size], round(1000 * statistics.median(self._times[size]), 2))
            for size in sizes
            if self._counts[size] > 1
        ]
        if rows:
            self._log.info(
                "Batchsize forward time stats (batchsize, count, median_time(ms)): %s", rows
            )
