"""Requests that kill cores: found among the others, who go on."""

from __future__ import annotations

import random

import pytest

from quire.core.output import EngineCoreOutput
from quire.engine.frontend.quarantine import Quarantine
from quire.engine.messages import EngineCoreRequest
from quire.errors import POISON
from quire.outputs import FinishReason
from quire.params import SamplingParams


class Drill:
    """Cores that die of culprits at a token, and a front end's journal."""

    def __init__(self, count: int, culprits: dict[str, int], seed: int = 0) -> None:
        self.quarantine = Quarantine()
        self.rng = random.Random(seed)
        names = [f"r{i}" for i in range(count)]
        self.outputs: dict[str, list[int]] = {name: [] for name in names}
        self.culprits = culprits
        self.core = set(names)
        self.ended: list[str] = []
        self.deaths = 0

    def requests(self) -> list[EngineCoreRequest]:
        params = SamplingParams()
        return [
            EngineCoreRequest(n, n, 0, [1], params, 0.0, output_token_ids=list(tokens))
            for n, tokens in self.outputs.items()
        ]

    def step(self) -> None:
        """A token for some who are in the core; or it dies of one of them."""
        chosen = [name for name in self.core if self.rng.random() < 0.8]
        if any(len(self.outputs[n]) == self.culprits.get(n) for n in chosen):
            return self.die()
        done = []
        for name in chosen:
            self.outputs[name].append(7)
            done.append(EngineCoreOutput(name, [7]))
            if len(self.outputs[name]) == 20:
                done[-1].finish_reason = FinishReason.LENGTH
                del self.outputs[name]
                self.core.remove(name)
        self.quarantine.stepped(done, None)
        self.core |= {r.request_id for r in self.quarantine.released()}
        self.quarantine.check_integrity(self.outputs)

    def die(self, has_worked: bool = True) -> None:
        self.deaths += 1
        now, last = self.quarantine.hand_over(self.requests(), has_worked)
        assert all(len(r.output_token_ids) == len(self.outputs[r.request_id]) for r in now)
        self.core = {r.request_id for r in now}
        assert len(self.core) == len(now), "nobody is handed over twice"
        for output in last:
            assert output.error == POISON and output.finish_reason is FinishReason.ERROR
            self.ended.append(output.request_id)
            del self.outputs[output.request_id]
        self.quarantine.check_integrity(self.outputs)

    def run(self) -> None:
        for _ in range(2000):
            if not self.outputs:
                return
            self.step()
        raise AssertionError(f"{self.outputs} never end")


@pytest.mark.parametrize("position", [0, 1, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_the_culprit_is_taken_out_and_all_others_end(count: int, position: int) -> None:
    for seed in range(20):
        culprit = f"r{seed % count}"
        drill = Drill(count, {culprit: position}, seed)
        drill.run()
        assert drill.ended == [culprit]
        assert drill.deaths <= 3 + count.bit_length() + 1


def test_who_kills_before_its_first_token_has_killed_twice() -> None:
    drill = Drill(1, {"r0": 0})
    drill.run()
    assert drill.deaths == 2


def test_several_culprits() -> None:
    for seed in range(20):
        drill = Drill(40, {"r3": 0, "r17": 4, "r39": 4}, seed)
        drill.run()
        assert sorted(drill.ended) == ["r17", "r3", "r39"]


def test_deaths_from_outside_are_nobodys_fault_if_there_was_progress() -> None:
    for seed in range(20):
        drill = Drill(8, {}, seed)
        for _ in range(12):
            drill.die()
            before = {name: len(tokens) for name, tokens in drill.outputs.items()}
            while any(len(drill.outputs.get(n, "longer" * 9)) == k for n, k in before.items()):
                drill.step()
        drill.run()
        assert not drill.ended


def test_a_core_that_dies_while_it_loads_blames_nobody() -> None:
    drill = Drill(2, {})
    for _ in range(9):
        drill.die(has_worked=False)
        assert drill.core == {"r0", "r1"}
    drill.run()
    assert not drill.ended


def test_suspects_may_be_aborted() -> None:
    """Whoever waits or is tried may end from outside; those who wait still get their turn."""
    for seed in range(50):
        drill = Drill(16, {"r5": 0}, seed)
        for _ in range(200):
            drill.step()
            if drill.outputs and drill.rng.random() < 0.1:
                name = drill.rng.choice(list(drill.outputs))
                del drill.outputs[name]
                drill.core.discard(name)
                drill.quarantine.closed([name])
                drill.core |= {r.request_id for r in drill.quarantine.released()}
                drill.quarantine.check_integrity(drill.outputs)
        drill.run()
        assert drill.ended in ([], ["r5"])


def test_who_waits_here_comes_back_with_the_priority_of_now() -> None:
    drill = Drill(4, {})
    drill.die()
    drill.die()
    waiting = {f"r{i}" for i in range(4)} - drill.core
    assert waiting, "some wait while others are tried"
    for name in drill.outputs:
        drill.quarantine.set_priority(name, 7)
    drill.quarantine.closed(list(drill.core))
    released = drill.quarantine.released()
    assert {r.request_id for r in released} == waiting
    assert {r.priority for r in released} == {7}
