"""Queue limits as the API process sees them: what counts, what is refused, what is counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.output import EngineCoreOutput
from quire.engine.frontend.drain_rate import DrainRate
from quire.engine.frontend.queue_limits import QueueLimits
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, DeadlineUnreachable, TooManyRequests
from quire.params import SamplingParams
from quire.utils.timing import ManualClock


def request(name: str, tokens: list[int]) -> EngineCoreRequest:
    return EngineCoreRequest(name, name, 0, tokens, SamplingParams(max_tokens=4), 0.0)


class Door:
    """Accepts requests as a server does."""

    def __init__(self, **config: Any) -> None:
        self.config = SchedulerConfig(**{"max_num_seqs": 2} | config)
        self.refused: list[str] = []
        self.clock = ManualClock()
        self.limits = QueueLimits(self.refused.append, self.clock)
        self.unfinished: set[str] = set()

    def submit(self, name: str, length: int = 10, n: int = 1, **more: Any) -> None:
        params = SamplingParams(max_tokens=4, **more)
        requests = [
            EngineCoreRequest(f"{name}{i}", name, i, [1] * length, params, 0.0) for i in range(n)
        ]
        self.limits.check(requests, self.config, len(self.unfinished))
        self.limits.add(requests)
        self.unfinished.update(r.request_id for r in requests)

    def step(self, *names: str, num_waiting: int = 0) -> None:
        self.limits.step([EngineCoreOutput(f"{name}0", [5]) for name in names], num_waiting)

    def wait(self) -> float | None:
        return self.limits.wait(self.config, len(self.unfinished))

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


def test_bytes_count_with_the_lists_of_the_parameters() -> None:
    door = Door(max_queued_bytes=100_000)
    door.submit("a", allowed_token_ids=list(range(2000)))  # nothing is ahead of it
    with pytest.raises(TooManyRequests, match="88592 bytes wait .* would add 48192, .* is 100000"):
        door.submit("b", 1000)
    assert door.refused == ["max_queued_bytes"]
    door.submit("c", 10)
    door.step("a")
    door.submit("b", 1000)


def test_limits_are_on_unless_turned_off() -> None:
    door = Door()
    door.submit("a", 2**23)
    with pytest.raises(TooManyRequests, match="--max-num-queued-tokens"):
        door.submit("b", 2**23 + 1)
    door = Door(max_num_queued_reqs=-1, max_num_queued_tokens=-1, max_queued_bytes=-1)
    shared = [1] * 2**23
    for i in range(4):
        door.limits.add([request(f"r{i}", shared)])
    door.submit("b", 10)
    door = Door(max_num_seqs=1)
    for i in range(2**15 + 1):
        door.unfinished.add(f"r{i}")
    with pytest.raises(TooManyRequests, match="limit is 32768 "):
        door.submit("b")


def test_a_refusal_tells_how_long_the_queue_takes() -> None:
    door = Door(max_num_queued_reqs=3)
    for name in "abcde":
        door.submit(name, 100)
    with pytest.raises(TooManyRequests, match="Try again later") as caught:
        door.submit("f")
    assert caught.value.retry_after is None, "nothing was measured"
    door.clock.advance(4.0)
    door.step("a", "b", num_waiting=3)
    with pytest.raises(TooManyRequests, match="in about 8 s") as caught:
        door.submit("f")
    # Half a request per second, and 4 have to leave before a sixth has one of the two seats.
    assert caught.value.retry_after == pytest.approx(8.0)


def test_the_wait_is_that_of_tokens_where_seats_are_free() -> None:
    door = Door(max_num_seqs=100)
    assert door.wait() == 0.0
    door.submit("a", 1000)
    door.submit("b", 3000)
    assert door.wait() is None
    door.clock.advance(2.0)
    door.step("a")
    assert door.wait() == pytest.approx(6.0)
    door.step("b")
    assert door.wait() == 0.0


def test_an_idle_hour_and_aborted_requests_say_nothing_about_the_rate() -> None:
    door = Door(max_num_seqs=100)
    door.submit("a", 1000)
    door.clock.advance(1.0)
    door.step("a")
    door.clock.advance(3600.0)
    door.submit("b", 1000)
    door.submit("c", 4000)
    door.end("c")
    assert door.wait() == pytest.approx(1.0)


def test_a_deadline_that_cannot_be_met_is_refused_with_both_numbers() -> None:
    door = Door(max_num_seqs=100)
    door.submit("a", 1000)
    door.submit("b", 3000)
    door.limits.check_deadline(0.001, door.config, 2)  # nothing was measured, nothing is refused
    door.clock.advance(2.0)
    door.step("a")
    door.limits.check_deadline(6.5, door.config, 2)
    with pytest.raises(DeadlineUnreachable, match=r"about 6\.0 s .* in 5\.5 s") as caught:
        door.limits.check_deadline(5.5, door.config, 2)
    assert caught.value.retry_after == pytest.approx(0.5)
    assert door.refused == ["deadline"]


STEPS = st.lists(st.tuples(st.integers(0, 400), st.floats(0.05, 3.0)), min_size=20, max_size=60)


@given(st.floats(0.5, 1000.0), STEPS)
def test_a_constant_rate_is_measured_exactly(rate: float, steps: list[tuple[int, float]]) -> None:
    drain, now = DrainRate(), 100.0
    drain.busy(now)
    for _, seconds in steps:
        now += seconds
        drain.drained(now, round(1e6 * rate * seconds), 1)
    assert drain.seconds_for(now, 10**6, 0) == pytest.approx(1 / rate, rel=1e-3)


@given(st.floats(0.01, 100.0), st.floats(0.01, 100.0))
def test_what_is_long_ago_is_forgotten(before: float, after: float) -> None:
    drain, now = DrainRate(), 0.0
    drain.busy(now)
    for rate in (before, after):
        for _ in range(200):
            now += 1.0
            drain.drained(now, round(1e6 * rate), 1)
    assert drain.seconds_for(now, 10**6, 0) == pytest.approx(1 / after, rel=1e-3)


@given(STEPS, st.lists(st.floats(0.0, 20.0), max_size=10))
def test_while_nothing_leaves_the_wait_only_grows(
    steps: list[tuple[int, float]], pauses: list[float]
) -> None:
    drain, now = DrainRate(), 0.0
    drain.busy(now)
    for tokens, seconds in steps:
        now += seconds
        drain.drained(now, tokens, 1)
    waits = [drain.seconds_for(now, 500, 3)]
    for pause in pauses:
        now += pause
        waits.append(drain.seconds_for(now, 500, 3))
    known = [wait for wait in waits if wait is not None]
    assert known == sorted(known) and all(wait >= 0 for wait in known)


def test_the_defaults_refuse_no_ordinary_queue() -> None:
    door = Door()
    for i in range(1000):
        door.submit(f"r{i}-", 1000)


def test_an_offline_engine_refuses_the_options() -> None:
    config = EngineConfig.from_options(max_num_queued_reqs=3)
    with pytest.raises(ConfigError, match="max_num_queued_reqs is a limit of servers"):
        LLMEngine(config)
