"""The trace is one that Perfetto can show: tracks without overlaps, and nothing missing."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.frontend.questions import Question
from quire.errors import InvalidRequest
from record_rig import Rig


@pytest.fixture
def rig() -> Rig:
    made = Rig(num_blocks=10, budget=24, seqs=3)
    for i in range(6):
        made.add(f"r{i}", 20 + 9 * i, 40)
    made.drain()
    return made


def trace(rig: Rig, steps: int = 10_000) -> list[dict[str, Any]]:
    made = Question(rig.records, [], rig.clock.now(), EngineConfig()).timeline(steps)
    return json.loads(json.dumps(made))["traceEvents"]  # type: ignore[no-any-return]


def test_one_track_per_slot_without_overlaps(rig: Rig) -> None:
    spans = [e for e in trace(rig) if e["ph"] == "X" and e["pid"] == 2]
    slots: dict[int, list[dict[str, Any]]] = {}
    for event in spans:
        slots.setdefault(event["tid"], []).append(event)
    assert len(slots) == 6
    for events in slots.values():
        events.sort(key=lambda e: e["ts"])
        for one, next_ in pairwise(events):
            assert one["ts"] + one["dur"] <= next_["ts"] + 0.01
    kinds = {(e["cat"], e["args"]["request"]) for e in spans}
    assert {("prefill", f"r{i}") for i in range(6)} <= kinds
    assert {("decode", f"r{i}") for i in range(6)} <= kinds
    assert {kind for kind, _ in kinds} >= {"queue", "prefill", "decode", "preempted", "recompute"}


def test_phases_lie_within_their_step(rig: Rig) -> None:
    spans = [e for e in trace(rig) if e["ph"] == "X" and e["pid"] == 1]
    steps = [e for e in spans if e["cat"] == "step"]
    assert len(steps) == len(rig.records)
    for name in ("schedule", "forward", "update"):
        phases = [e for e in spans if e["cat"] == name]
        assert len(phases) == len(steps)
        for step, phase in zip(steps, phases, strict=True):
            assert step["ts"] <= phase["ts"]
            assert phase["ts"] + phase["dur"] <= step["ts"] + step["dur"] + 0.01


def test_the_last_steps_alone(rig: Rig) -> None:
    events = trace(rig, 7)
    assert sum(e["ph"] == "X" and e["cat"] == "step" for e in events) == 7
    assert any(e["ph"] == "X" and e["cat"] == "decode" for e in events)
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0


def test_no_steps_are_refused(rig: Rig) -> None:
    with pytest.raises(InvalidRequest, match="steps must be at least 1, got 0"):
        trace(rig, 0)


def test_an_empty_ring_is_an_empty_trace() -> None:
    assert all(e["ph"] == "M" for e in trace(Rig()))
