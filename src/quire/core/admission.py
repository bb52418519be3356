"""Conditions of admission beside the order of the queue: the delay that batches prompts, and the
limits, which can be changed while requests run."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

from quire.bounds import read_field, show
from quire.config.engine import EngineConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.request import Request, RequestStatus
from quire.errors import ConfigError, InvalidRequest

LIVE_LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "long_prefill_token_threshold",
)
"""What can be changed while requests run."""


class DelayGate:
    """Holds waiting prompts back so that they are admitted together.

    It opens when the oldest has waited `factor` times as long as the last step with a prompt took.
    vLLM V0 calls the factor `scheduler_delay_factor`.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._arrivals: deque[Request] = deque()
        # in order of queueing; a request that no longer waits is dropped when it comes to the front
        self._started = 0.0
        self._had_prompt = False
        self._last_prompt_latency = 0.0

    def add(self, request: Request) -> None:
        """A request was queued."""
        # Nobody asks the gate while requests come one by one: it must not keep all of them.
        self._oldest()
        self._arrivals.append(request)

    def begin_step(self, now: float) -> None:
        """A step begins: the one before is over, and its duration is known."""
        if self._had_prompt:
            self._last_prompt_latency = now - self._started
        self._started = now

    def end_step(self, has_prompt: bool) -> None:
        """The step was put together."""
        self._had_prompt = has_prompt

    def is_open(self) -> bool:
        """Whether prompts may be admitted now. Preempted requests do not count: they have waited
        before."""
        oldest = self._oldest()
        if oldest is None:
            return True
        waited = self._started - oldest.queued_ts
        return waited >= self._factor * self._last_prompt_latency

    def _oldest(self) -> Request | None:
        """The first to come of those that still wait."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].status is not RequestStatus.WAITING:
            arrivals.popleft()
        return arrivals[0] if arrivals else None


def check_changes(
    config: SchedulerConfig,
    limits: Mapping[str, object],
    priorities: Mapping[str, object],
    max_model_len: int,
) -> None:
    """Refuse what the engine core would refuse, before it is sent there: a message cannot carry
    integers of any size.

    Raises:
        InvalidRequest: a limit or a priority is bad.
    """
    change_limits(config, limits, max_model_len)
    for priority in priorities.values():
        read_field("priority", priority)


def change_limits(
    config: SchedulerConfig, changes: Mapping[str, object], max_model_len: int
) -> SchedulerConfig:
    """The configuration with other limits.

    Raises:
        InvalidRequest: a limit is unknown, cannot be changed, or has a bad value.
    """
    for name, value in changes.items():
        if name not in LIVE_LIMITS:
            known = ", ".join(LIVE_LIMITS)
            raise InvalidRequest(f"{name} cannot be changed while running; can be: {known}")
        if name != "scheduling_policy" and isinstance(value, str):
            # The sections take text as a flag would; a message has numbers of its own.
            raise InvalidRequest(f"{name} must be an integer, got {show(value)}", param=name)
    if "scheduling_policy" in changes and config.scheduler_cls is not None:
        raise InvalidRequest(
            f"scheduling_policy cannot be changed: --scheduler-cls {config.scheduler_cls} decides"
        )
    try:
        changed = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    except ConfigError as error:
        raise InvalidRequest(error.message, param=error.param) from None
    budget = changed.max_num_batched_tokens
    if changed.max_num_seqs > budget:
        raise InvalidRequest(
            f"max_num_seqs {changed.max_num_seqs} is more than max_num_batched_tokens {budget}: "
            "each running request needs a token per step"
        )
    if not changed.enable_chunked_prefill and budget < max_model_len:
        raise InvalidRequest(
            f"max_num_batched_tokens {budget} is less than the context of {max_model_len}: without "
            "chunked prefill a whole prompt must fit one step"
        )
    if not changed.enable_chunked_prefill and changed.long_prefill_token_threshold:
        raise InvalidRequest(
            f"long_prefill_token_threshold must be 0 without chunked prefill, got "
            f"{changed.long_prefill_token_threshold}"
        )
    return changed


def with_limits(config: EngineConfig, limits: Mapping[str, Any]) -> tuple[EngineConfig, bool]:
    """The configuration with limits that the scheduler has taken, and whether one differs."""
    scheduler = dataclasses.replace(config.scheduler, **limits)
    return dataclasses.replace(config, scheduler=scheduler), scheduler != config.scheduler
