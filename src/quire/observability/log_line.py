"""The human line every few seconds, and the optional line per step.

The stat line carries vLLM's fields in vLLM's order, then the names older documents use. Each
field is a row of `FIELDS`. Time comes from a clock that is asked, so no thread exists here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from quire.core.stats import IterationStats, StepStats
from quire.logger import get_logger
from quire.observability.sinks import HitRate
from quire.utils.timing import Clock, RealClock

logger = get_logger(__name__)


@dataclass(slots=True)
class Interval:
    """What happened since the last line."""

    device: str
    last: StepStats = field(default_factory=StepStats)
    seconds: float = 1.0
    prompt_tokens: int = 0
    """Computed ones: cache hits do not count."""
    generation_tokens: int = 0
    preemptions: int = 0
    hit_rate: float = 0.0


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
    Field("%s KV cache usage: %.1f%%", lambda i: (i.device.upper(), 100 * i.last.kv_cache_usage)),
    Field("Prefix cache hit rate: %.1f%%", lambda i: 100 * i.hit_rate),
    # The older documents' words.
    Field("Swapped: %d reqs", lambda i: i.last.num_swapped),
    Field("Pending: %d reqs", lambda i: i.last.num_waiting),
)


class LogLine:
    """Logs one line per interval: at INFO if anything was computed, else at DEBUG.

    Args:
        interval: Seconds between lines.
        device: Word before "KV cache usage"; shown in upper case.
        engine: Number of the engine in the head of the line.
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
            self._now.last = step
            self._now.prompt_tokens += step.num_prompt_tokens
            self._now.generation_tokens += step.num_generation_tokens
            self._now.preemptions += step.num_preempted
            self._hits.extend(step.prefix_lookups)
        self.tick()

    def tick(self) -> None:
        """Log if the interval is over. To be called now and then while the engine is idle."""
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
        self._device = device.upper()
        self._log = log or logger

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Log what the step computed and how long it took."""
        if step is None:
            return
        self._log.info(
            "Iteration(%d): %d context tokens, %d generation tokens, %d running requests, "
            "%d waiting requests, iteration elapsed time: %.2f ms, %s KV cache usage: %.1f%%",
            step.step,
            step.num_prompt_tokens,
            step.num_generation_tokens,
            step.num_running,
            step.num_waiting,
            1000 * step.step_seconds,
            self._device,
            100 * step.kv_cache_usage,
        )
