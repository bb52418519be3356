"""What a replacement of the core is said to have taken."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from quire.core.output import EngineCoreOutput
from quire.core.stats import RECOVERY_PARTS
from quire.engine.cores.recovery import Recovery
from quire.engine.cores.start_parts import StartParts
from quire.engine.messages import EngineCoreRequest, Outputs
from quire.params import SamplingParams
from quire.utils.timing import ManualClock


def request(name: str, *tokens: int) -> EngineCoreRequest:
    params = SamplingParams()
    return EngineCoreRequest(name, name, 0, [1], params, 0.0, output_token_ids=list(tokens))


def output(name: str) -> Outputs:
    return Outputs(2, 1, [EngineCoreOutput(name, [5])])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10.0)


@pytest.fixture
def told() -> list[Mapping[str, float]]:
    return []


@pytest.fixture
def recovery(clock: ManualClock, told: list[Mapping[str, float]]) -> Recovery:
    return Recovery(2, clock.now(), clock, told.append)


def test_it_is_over_when_all_who_had_output_have_more(recovery, clock, told) -> None:
    recovery.wait_for([request("a", 1), request("b", 1, 2), request("queued")])
    clock.advance(2)
    recovery.ready({"imports": 1.5})
    clock.advance(1)
    recovery.heard(output("a"))
    assert not recovery.is_over and told == []
    clock.advance(1)
    recovery.heard(output("b"))
    recovery.heard(output("b"))
    assert recovery.is_over and told == [{"imports": 1.5, "prefill": 2.0, "total": 4.0}]


def test_nobody_waits_for_what_was_aborted(recovery, clock, told) -> None:
    recovery.wait_for([request("a", 1), request("b", 1)])
    recovery.forget(["a"])
    recovery.ready({})
    recovery.heard(output("b"))
    assert told == [{"prefill": 0.0, "total": 0.0}]


def test_an_idle_core_is_replaced_when_the_next_is_ready(recovery, clock, told) -> None:
    recovery.wait_for([request("queued")])
    clock.advance(3)
    recovery.ready({"weights": 1.0})
    assert told == [{"weights": 1.0, "total": 3.0}]


def test_parts_of_a_start() -> None:
    clock = ManualClock(10.0)
    parts = StartParts(9.0, clock)
    parts.end("process", 9.5)
    clock.advance(1)
    parts.end("imports")
    for phase in ("Loading weights", "Loading weights", "Allocating KV cache"):
        clock.advance(1)
        parts.hear(phase)
    clock.advance(1)
    parts.end_loading()
    expected = {"process": 0.5, "imports": 1.5, "config": 1.0, "weights": 2.0, "kv_cache": 1.0}
    assert parts.seconds == expected
    assert set(expected) < set(RECOVERY_PARTS)
