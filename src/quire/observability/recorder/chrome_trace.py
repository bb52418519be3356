"""Recorded steps as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

The format: "Trace Event Format", JSON object form, complete events (`ph` "X") with microseconds,
counters ("C") and names of tracks ("M"). Process 1 is the engine, with one track for the steps and
their phases. Process 2 holds the requests, with one track per slot; requests that do not overlap in
time share a slot.
"""

from __future__ import annotations

import heapq
from typing import Any, Final

from quire.core.facts import FactKind, Wait
from quire.observability.recorder.lives import wait_name
from quire.observability.recorder.replay import Replay, Step
from quire.observability.recorder.ring import Recording

ENGINE: Final = 1
REQUESTS: Final = 2
PHASES: Final = ("schedule", "forward", "sample", "update")

Event = dict[str, Any]


def timeline(recording: Recording) -> dict[str, Any]:
    """The trace of all steps of a recording.

    Time 0 is the beginning of the first step; `otherData` has it in seconds on the monotonic
    clock.
    """
    origin = recording.row(0).start if len(recording) else 0.0
    trace = _Trace(recording, origin)
    replay = Replay(recording)
    trace.begin(replay)
    for step in replay:
        trace.add(step)
    trace.close()
    events = [_name("process_name", ENGINE, 0, "engine"), _name("thread_name", ENGINE, 1, "steps")]
    events.append(_name("process_name", REQUESTS, 0, "requests"))
    tracks = (_name("thread_name", REQUESTS, t, f"slot {t}") for t in range(1, trace.num_slots + 1))
    return {
        "traceEvents": [*events, *tracks, *trace.events],
        "displayTimeUnit": "ms",
        "otherData": {"clock": "monotonic", "origin_seconds": origin, "steps": len(recording)},
    }


def _name(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


class _Track:
    """What a request is doing, and since when."""

    __slots__ = ("args", "name", "slot", "start", "steps", "until")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.name = ""
        self.start = self.until = 0.0
        self.steps = 0
        self.args: dict[str, Any] = {}


class _Trace:
    def __init__(self, recording: Recording, origin: float) -> None:
        self.events: list[Event] = []
        self.num_slots = 0
        self._recording = recording
        self._origin = origin
        self._tracks: dict[tuple[int, int], _Track] = {}
        self._free: list[int] = []
        self._end = origin
        self._epoch = 0

    # ---- requests ----------------------------------------------------------------------------

    def begin(self, replay: Replay) -> None:
        """Add the requests that were there before the first step."""
        self._epoch = self._recording.epoch
        for number, life in replay.lives.lives.items():
            running = life.state == "running"
            self._state(number, self._origin, "decode" if running else _waiting(life.state))

    def _track(self, number: int) -> _Track:
        key = (self._epoch, number)
        track = self._tracks.get(key)
        if track is None:
            if self._free:
                slot = heapq.heappop(self._free)
            else:
                self.num_slots = slot = self.num_slots + 1
            track = self._tracks[key] = _Track(slot)
        return track

    def _state(self, number: int, time: float, name: str, **args: Any) -> None:
        """From `time` on the request does this. If it did so before, the event goes on."""
        track = self._track(number)
        if track.name != name or name == "prefill":
            self._flush(self._epoch, number, track, time)
            track.name, track.start, track.steps = name, time, 0
            track.args = {}
        track.args.update(args)
        track.steps += 1

    def _flush(self, epoch: int, number: int, track: _Track, time: float) -> None:
        """Write down what the request did up to `time`."""
        if track.name and time > track.start:
            request = self._recording.name(epoch, number)
            args = {"request": request, "steps": track.steps, **track.args}
            self._span(REQUESTS, track.slot, f"{track.name} {request}", track.start, time, args)
        track.name = ""

    def _leave(self, number: int, time: float) -> None:
        track = self._tracks.pop((self._epoch, number), None)
        if track is not None:
            self._flush(self._epoch, number, track, time)
            heapq.heappush(self._free, track.slot)

    # ---- steps -------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        """One step: its phases, and what it meant to every request."""
        row = step.row
        if row.epoch != self._epoch:
            self.close()
            self._epoch = row.epoch
        self._engine(step)
        ended = []
        for fact in step.facts:
            if fact.kind == FactKind.QUEUED:
                self._state(fact.request, fact.time, "queue", prompt_tokens=fact.a)
            elif fact.kind == FactKind.PREEMPTED:
                winner = self._recording.name(row.epoch, fact.other) if fact.other else None
                name = "swapped" if fact.c else "preempted"
                self._state(fact.request, row.start, name, by=winner)
            elif fact.kind == FactKind.FINISHED:
                ended.append(fact)
            elif fact.kind == FactKind.WAITS and fact.reason != Wait.COMPILED:
                self._track(fact.request).args["wait"] = wait_name(fact.reason)
        self._batch(step)
        for fact in ended:
            self._leave(fact.request, max(row.end, fact.time))
        self._end = row.end

    def _batch(self, step: Step) -> None:
        row = step.row
        for number, tokens in step.scheduled.items():
            chunk = step.chunks.get(number)
            if chunk is None:
                self._state(number, row.start, "decode")
            else:
                name = "recompute" if chunk.again else "prefill"
                self._state(number, row.start, name, tokens=tokens, computed_before=chunk.before)
        if step.stalled:
            running = {key[1] for key, t in self._tracks.items() if t.name in _BUSY}
            for number in running - step.scheduled.keys():
                self._state(number, row.start, "stalled", wait=wait_name(step.stalled))

    def _engine(self, step: Step) -> None:
        row = step.row
        args = {
            "requests": len(step.scheduled),
            "tokens": row.num_scheduled_tokens,
            "prompt_tokens": row.num_prompt_tokens,
            "generated_tokens": row.num_generation_tokens,
            "preempted": row.num_preempted,
            "waited_for_a_core_ms": round(1e3 * row.starved_seconds, 3),
        }
        self._span(ENGINE, 1, f"step {row.step}", row.start, row.end, args)
        at = row.start
        for phase in PHASES:
            took: float = getattr(row, f"{phase}_seconds")
            start = max(at, row.end - took) if phase == "update" else at
            at = min(row.end, start + took)
            if at > start:
                self._span(ENGINE, 1, phase, start, at, {})
        gauges = {"running": row.num_running, "waiting": row.num_waiting}
        for name, values in (
            ("requests", gauges),
            ("kv_cache_usage", {"usage": row.kv_cache_usage}),
        ):
            event = {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": self._us(row.end)}
            self.events.append(event | {"args": values})

    def _span(
        self, process: int, track: int, name: str, start: float, end: float, args: dict[str, Any]
    ) -> None:
        self.events.append(
            {
                "ph": "X", "name": name, "cat": name.split(" ")[0], "pid": process, "tid": track,
                "ts": self._us(start), "dur": round((end - start) * 1e6, 3), "args": args,
            }
        )  # fmt: skip

    def _us(self, time: float) -> float:
        return round((time - self._origin) * 1e6, 3)

    def close(self) -> None:
        """Write down what was going on at the end."""
        for (epoch, number), track in self._tracks.items():
            self._flush(epoch, number, track, max(self._end, track.start))
            heapq.heappush(self._free, track.slot)
        self._tracks.clear()


_BUSY: Final = ("prefill", "recompute", "decode", "stalled")


def _waiting(state: str) -> str:
    return "queue" if state == "waiting" else state
