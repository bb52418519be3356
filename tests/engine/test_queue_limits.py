"""Queue limits as the API process sees them: what counts, what is refused, what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.output import EngineCoreOutput
from quire.engine.frontend.queue_limits import QueueLimits
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, TooManyRequests
from quire.params import SamplingParams


class Door:
    """Accepts requests as a server does."""

    def __init__(self, **config: Any) -> None:
        self.config = SchedulerConfig(max_num_seqs=2, **config)
        self.refused: list[str] = []
        self.limits = QueueLimits(self.refused.append)
        self.unfinished: set[str] = set()

    def submit(self, name: str, length: int = 10, n: int = 1) -> None:
        params = SamplingParams(max_tokens=4)
        requests = [
            EngineCoreRequest(f"{name}{i}", name, i, [1] * length, params, 0.0) for i in range(n)
        ]
        self.limits.check(requests, self.config, len(self.unfinished))
        self.limits.add(requests)
        self.unfinished.update(r.request_id for r in requests)

    def step(self, *names: str, num_waiting: int = 0) -> None:
        self.limits.step([EngineCoreOutput(f"{name}0", [5]) for name in names], num_waiting)

    def end(self, name: str) -> None:
        self.unfinished.discard(f"{name}0")
        self.limits.drop([f"{name}0"])


def test_requests_beyond_the_seats_wait() -> None:
    door = Door(max_num_queued_reqs=1)
    for name in "abc":
        door.submit(name)
    with pytest.raises(TooManyRequests) as caught:
        door.submit("d")
    assert caught.value.status == 429
    assert caught.value.message == (
        "The queue is full: 1 requests wait, this request would add 1, and the limit is 1 "
        "(--max-num-queued-reqs). Try again later."
    )
    assert door.refused == ["max_num_queued_reqs"]
    door.end("a")
    door.submit("d")


def test_what_waits_for_memory_counts_though_seats_are_free() -> None:
    door = Door(max_num_queued_reqs=1)
    door.submit("a")
    door.submit("b")
    door.step("a", num_waiting=1)
    door.end("a")
    with pytest.raises(TooManyRequests):
        door.submit("c")
    door.step("b", num_waiting=0)
    door.submit("c")


def test_all_completions_of_a_request_count() -> None:
    door = Door(max_num_queued_reqs=2)
    with pytest.raises(TooManyRequests, match="would add 5"):
        door.submit("a", n=5)
    door.submit("a", n=4)


def test_prompt_tokens_count_until_there_is_output() -> None:
    door = Door(max_num_queued_tokens=100)
    door.submit("long", 500)  # nothing is ahead of it
    with pytest.raises(TooManyRequests, match="500 prompt tokens wait .* would add 10, .* is 100"):
        door.submit("a", 10)
    assert door.refused == ["max_num_queued_tokens"]
    door.step("long")
    door.submit("a", 60)
    door.submit("b", 40)
    with pytest.raises(TooManyRequests):
        door.submit("c", 1)
    door.end("a")
    door.submit("c", 60)


def test_without_limits_nothing_is_refused() -> None:
    door = Door()
    for i in range(1000):
        door.submit(f"r{i}-", 1000)


def test_an_offline_engine_refuses_the_options() -> None:
    config = EngineConfig.from_options(max_num_queued_reqs=3)
    with pytest.raises(ConfigError, match="max_num_queued_reqs is a limit of servers"):
        LLMEngine(config)
