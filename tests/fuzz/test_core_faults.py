"""Whatever raises in an engine core for one request ends that request, and no other notices.

The core is that of an engine-core process, driven here without its threads. A fault is put at one
statement: either once, whoever is being worked on, or every time that the statement is run for one
request.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

import quire
from fuzz_kit import cases
from honest_worker import HonestWorker
from kept_frames import KeptFrames
from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.core import EngineCore
from quire.engine.cores.core_process import EngineCoreProcess
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    Call,
    EngineCoreRequest,
    FromCore,
    Outputs,
    Reply,
)
from quire.outputs import FinishReason
from quire.params import SamplingParams

SOURCE = Path(quire.__file__).parent
ENGINE = SOURCE / "engine"
FOLLOWED = frozenset(
    map(
        str,
        [*(SOURCE / "core").rglob("*.py"), ENGINE / "core.py"]
        + [ENGINE / "cores" / "parts.py", ENGINE / "verbs.py"],
    )
)
KINDS = (RuntimeError, MemoryError, KeyError)
CULPRIT = "r1"
ASKED = ("has_requests",)
"""Functions that only look at the queue and work for no request."""

Place = tuple[str, int]


class Faults:
    """Raises at statements of the engine core.

    Args:
        fires: Asked at each statement with its place, its number and whether it works for the
            culprit; what it returns is raised.
    """

    def __init__(self, fires: Callable[[Place, int, bool], Exception | None]) -> None:
        self._fires = fires
        self.num_statements = 0
        self.fired: list[Place] = []

    def follow(self) -> None:
        """From the next call of a function on. Python stops that once it has raised."""
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return self._line if code.co_filename in FOLLOWED and code.co_name not in ASKED else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            error = self._fires(place, self.num_statements, _works_for_culprit(frame))
            self.num_statements += 1
            if error is not None:
                self.fired.append(place)
                raise error
        return self._line


def _works_for_culprit(frame: FrameType) -> bool:
    request = frame.f_locals.get("request")
    return isinstance(request, Request | EngineCoreRequest) and request.request_id == CULPRIT


def request(name: str, prompt: list[int], max_tokens: int) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    return EngineCoreRequest(name, name, 0, prompt, params, 0.0)


class Rig:
    """An engine-core process without its threads, and who talks to it."""

    def __init__(self, rng: random.Random, sock: socket.socket, faults: Faults) -> None:
        stem = [300 + rng.randrange(5) for _ in range(40)]
        self.requests = {
            f"r{i}": request(
                f"r{i}",
                stem[: rng.randint(0, 40)] + rng.choices(range(300, 340), k=rng.randint(1, 30)),
                # The culprit is never the last: alone, it could not be told from a broken core.
                rng.randint(2, 10) if i == 1 else rng.randint(14, 24),
            )
            for i in range(5)
        }
        self.options = {
            "max_num_seqs": rng.choice([2, 8]),
            "max_num_batched_tokens": rng.choice([16, 48, 256]),
            "scheduling_policy": rng.choice(["fcfs", "sjf", "fair"]),
            "max_model_len": 96,
        }
        worker = HonestWorker(rng.choice([14, 40]), num_swap_blocks=rng.choice([0, 6]))
        self.worker, self.faults = worker, faults
        self.core = EngineCore(EngineConfig.from_options(**self.options), executor=worker)
        self.process = EngineCoreProcess(sock)
        self.process._sender = KeptFrames()
        self.heard: list[FromCore] = []
        self.ended: list[str] = []
        self._follow_changes()

    def _follow_changes(self) -> None:
        """Faults come from what is done, not from taking it back: that is tested elsewhere."""
        scheduler = self.core.scheduler
        begin, undo = scheduler.begin, scheduler.undo

        def followed() -> None:
            begin()
            self.faults.follow()

        def not_followed() -> None:
            sys.settrace(None)
            undo()

        scheduler.begin, scheduler.undo = followed, not_followed  # type: ignore[method-assign]

    def serve(self) -> dict[str, tuple[list[int], str | None]]:
        """Serve all requests; tokens and error of each."""
        messages: dict[int, list[Any]] = {
            0: [AddRequests(1, [self.requests["r0"], self.requests["r1"]])],
            1: [AddRequests(1, [self.requests["r2"]]), Call(1, 1, "ping")],
            2: [AddRequests(1, [self.requests["r3"], self.requests["r4"]])],
            3: [Call(1, 2, "set_limits", {"max_num_seqs": 4}), AbortRequests(1, ["r4"])],
        }
        try:
            for turn in range(500):
                for message in messages.pop(turn, []):
                    self.process._handle(self.core, message)
                if self.core.has_requests:
                    self.process._step(self.core)
                sys.settrace(None)
                if not messages and not self.core.scheduler.requests:
                    break
        finally:
            sys.settrace(None)
        told = self.told()
        assert {*self.ended, "r4"} == {*self.requests}
        self.core.scheduler.check_integrity()
        assert not self.worker.stale
        return told

    def told(self) -> dict[str, tuple[list[int], str | None]]:
        """Tokens and error of each request, as far as a front end has heard."""
        frames, self.process._sender.frames = self.process._sender.frames, []
        for frame in frames:
            self.heard.append(msgspec.msgpack.decode(frame[4:], type=FromCore))
        assert [m.number for m in self.heard] == [*range(1, len(self.heard) + 1)]
        tokens: dict[str, list[int]] = {name: [] for name in self.requests}
        errors: dict[str, str | None] = dict.fromkeys(self.requests)
        for message in self.heard:
            for output in message.outputs if isinstance(message, Outputs) else []:
                name = output.request_id
                assert name not in self.ended, "it goes on after its end"
                tokens[name] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ended.append(name)
                if output.finish_reason is FinishReason.ERROR:
                    errors[name] = output.error
        return {name: (tokens[name], errors[name]) for name in self.requests if name != "r4"}


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs


@cases(8)
def test_what_one_request_causes_ends_it_alone(rng: random.Random, sock: socket.socket) -> None:
    number = rng.getrandbits(32)
    places: set[Place] = set()

    def note(place: Place, _: int, culprit: bool) -> None:
        if culprit:
            places.add(place)

    expected = Rig(random.Random(number), sock, Faults(note)).serve()  # type: ignore[arg-type]
    assert len(places) > 60 and not any(error for _, error in expected.values())
    for chosen in rng.sample(sorted(places), 6):
        kind = rng.choice(KINDS)
        faults = Faults(
            lambda p, _, c, chosen=chosen, k=kind: k("x") if c and p == chosen else None
        )  # type: ignore[misc]
        rig = Rig(random.Random(number), sock, faults)
        try:
            got = rig.serve()
        except kind:
            # It raises only while others take its place. Who of them all is to blame is not to be
            # known, so the core gives up, and blames nobody.
            assert not any(error for _, error in rig.told().values())
            continue
        assert faults.fired, chosen
        tokens, error = got.pop(CULPRIT)
        whole, _ = expected[CULPRIT]
        assert tokens == whole[: len(tokens)], chosen
        assert (error and kind.__name__ in error) or tokens == whole, chosen
        assert got == {n: t for n, t in expected.items() if n != CULPRIT}, chosen


@cases(8)
def test_what_passes_ends_at_most_who_was_being_queued(
    rng: random.Random, sock: socket.socket
) -> None:
    number = rng.getrandbits(32)
    plain = Faults(lambda *_: None)
    expected = Rig(random.Random(number), sock, plain).serve()
    for _ in range(6):
        at, kind = rng.randrange(plain.num_statements), rng.choice(KINDS)
        faults = Faults(lambda p, n, c, at=at, kind=kind: kind("x") if n == at else None)  # type: ignore[misc]
        rig = Rig(random.Random(number), sock, faults)
        got = rig.serve()
        assert len(faults.fired) == 1
        failed = [name for name, (_, error) in got.items() if error]
        assert len(failed) <= 1
        for name, (tokens, error) in got.items():
            assert (tokens, error) == expected[name] or (not tokens and error), faults.fired
        replies = [m for m in rig.heard if isinstance(m, Reply)]
        assert [m.call_id for m in replies] == [1, 2]
