"""Meters by themselves: what is charged when, and what a share of the queue allows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.config.scheduler import SchedulerConfig
from quire.core.output import EngineCoreOutput
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.listeners import AcceptedRequest
from quire.engine.frontend.meter import Entry, Meter
from quire.engine.frontend.metering import Metering
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.messages import EngineCoreRequest
from quire.errors import KeyLimitReached, StepFailed
from quire.outputs import FinishReason
from quire.params import SamplingParams


class Party:
    """Sends requests on one meter, as a front end tells of them."""

    def __init__(self, metering: Metering, name: str = "ann", **config: Any) -> None:
        self.metering = metering
        self.config = SchedulerConfig(**{"max_num_seqs": 2, "max_num_queued_reqs": 8} | config)
        self.charged: list[int] = []
        self.meter = Meter(name, self.charged.append)
        self.unfinished: dict[str, bool] = {}
        """Internal id to whether it has no output."""

    def check(self) -> None:
        silent = [name for name, is_silent in self.unfinished.items() if is_silent]
        self.metering.check_integrity(self.unfinished, silent)

    def enter(self) -> Entry:
        self.metering.check_room(self.meter, self.config, lambda: 3.0)
        return Entry(self.meter)

    def submit(
        self, name: str, length: int = 10, n: int = 1, entry: Entry | None = None, **more: Any
    ) -> None:
        entry = entry or Entry(self.meter)
        params = SamplingParams()
        requests = [
            EngineCoreRequest(f"{name}{i}", name, i, [1] * length, params, 0.0) for i in range(n)
        ]
        try:
            self.metering.check(entry, requests, self.config, lambda: None)
        except KeyLimitReached:
            entry.close()
            raise
        processed = ProcessedInput(requests, None, params, 0, CheckedParams(params))
        self.metering.accepted(AcceptedRequest(name, processed, params, None, entry, **more))
        self.unfinished |= {request.request_id: True for request in requests}
        self.check()

    def step(self, *names: str, tokens: int = 1, last: bool = False, cached: int = 0) -> None:
        reason = FinishReason.STOP if last else None
        outputs = [
            EngineCoreOutput(n, [5] * tokens, finish_reason=reason, num_cached_tokens=cached)
            for n in names
        ]
        self.metering.stepped(outputs, None)
        for name in names:
            self.unfinished[name] = False
            if last:
                del self.unfinished[name]
        self.check()

    @property
    def tokens(self) -> tuple[int, int, int]:
        return self.meter.prompt_tokens, self.meter.cached_tokens, self.meter.generated_tokens


def test_prompts_are_charged_once_and_outputs_step_by_step() -> None:
    ann = Party(Metering())
    ann.submit("a", 10, n=3)
    assert ann.charged == [10]
    ann.step("a0", "a1", tokens=2, cached=8)
    ann.step("a0", "a1", "a2", last=True, cached=8)
    assert ann.charged == [10, 4, 3] and ann.tokens == (10, 8, 7)
    # A further step of the same request has its prompt and more.
    ann.submit("b", 50, continues=True)
    ann.step("b0", last=True, cached=48)
    assert ann.tokens == (10, 8, 8) and ann.charged[3:] == [1]
    assert ann.meter.num_unfinished == ann.meter.num_entering == 0


def test_what_comes_after_the_end_is_not_charged() -> None:
    ann = Party(Metering())
    ann.submit("a")
    ann.submit("b")
    ann.metering.closed(["a0", "nobody"])
    del ann.unfinished["a0"]
    ann.metering.stepped([EngineCoreOutput("a0", [1])], None)
    assert ann.tokens == (20, 0, 0)
    ann.metering.failed(StepFailed("gone"))
    ann.unfinished.clear()
    ann.check()
    assert ann.meter.num_unfinished == ann.meter.num_waiting == ann.meter.waiting_bytes == 0


def test_what_another_process_charged_is_not_charged_again() -> None:
    ann = Party(Metering())
    entry = Entry(ann.meter)
    ann.metering.adopt(entry, ["a0"])
    ann.unfinished["a0"] = False
    assert not entry.is_open
    ann.step("a0", tokens=3, last=True, cached=5)
    assert ann.tokens == (0, 0, 3)


def test_a_share_counts_those_at_the_door_and_those_without_output() -> None:
    ann = Party(Metering())
    ann.meter.share = 0.5
    entries = [ann.enter() for _ in range(3)]
    ann.submit("a", entry=entries[0], n=2)
    with pytest.raises(KeyLimitReached) as caught:
        ann.enter()
    assert caught.value.message == (
        "The key 'ann' has reached its limit queue_share=0.5: 4 of its requests wait, this request "
        "would add 1, and its share of 8 (--max-num-queued-reqs) is 4."
    )
    assert (caught.value.limit, caught.value.retry_after) == ("queue_share", 3.0)
    with pytest.raises(KeyLimitReached):  # the second completion has no room
        ann.submit("b", entry=entries[1], n=2)
    entries[2].close()
    entries[2].close()
    ann.submit("b", n=2)
    # With output they wait no more, but those beyond the seats do, whoever they are.
    ann.step("a0", "a1", "b0", "b1")
    ann.submit("c", n=2)
    with pytest.raises(KeyLimitReached, match="4 of its requests wait"):
        ann.enter()
    ann.step("c0", last=True)
    ann.enter()


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ({"max_num_queued_tokens": 100}, "prompt tokens wait"),
        ({"max_queued_bytes": 40000}, "bytes wait"),
    ],
)
def test_a_share_is_one_of_every_bound(limit: dict[str, int], told: str) -> None:
    ann = Party(Metering(), **limit)
    ann.meter.share = 0.5
    ann.submit("a", 90)  # a prompt alone is never refused for its length
    with pytest.raises(KeyLimitReached, match=told):
        ann.submit("b", 45 if "max_num_queued_tokens" in limit else 300)
    bob = Party(ann.metering, "bob", **limit)
    bob.metering.check_room(bob.meter, bob.config, lambda: None)
    bob.meter.share = 0.5
    bob.metering.check_room(bob.meter, bob.config, lambda: None)


def test_an_unbounded_queue_has_no_shares_and_the_smallest_is_one() -> None:
    ann = Party(Metering(), max_num_queued_reqs=-1)
    ann.meter.share = 0.001
    for index in range(50):
        ann.submit(f"a{index}-", entry=ann.enter())
    bob = Party(Metering(), max_num_queued_reqs=2)
    bob.meter.share = 0.001
    bob.enter()
    with pytest.raises(KeyLimitReached):
        bob.enter()


@pytest.mark.parametrize("seed", range(10))
def test_counts_agree_whatever_happens(seed: int) -> None:
    rng, metering = random.Random(seed), Metering()
    ann = Party(metering, max_num_queued_reqs=40)
    for number in range(300):
        ann.meter.share = rng.choice([None, 0.1, 0.5])
        names = sorted(ann.unfinished)
        chosen = rng.sample(names, min(len(names), rng.randrange(6)))
        if rng.random() < 0.5:
            try:
                ann.submit(f"r{number}-", rng.randrange(1, 9), rng.randrange(1, 4))
            except KeyLimitReached:
                assert ann.meter.num_waiting or ann.meter.num_unfinished > 2
        elif rng.random() < 0.7:
            ann.step(*chosen, last=rng.random() < 0.5, tokens=rng.randrange(3))
        else:
            metering.closed(chosen)
            for name in chosen:
                del ann.unfinished[name]
        ann.check()
        assert ann.meter.num_entering == 0
    assert sum(ann.charged) == ann.meter.prompt_tokens + ann.meter.generated_tokens
