"""One completion whose output cannot be processed, and one listener that raises, disturb nobody."""

from __future__ import annotations

from typing import Any

import pytest

from fake_core import FakeCore
from quire.config import EngineConfig
from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores.handle import OnExit, OnMessage
from quire.engine.cores.process_handle import CoreProcess
from quire.engine.frontend import output_processor
from quire.engine.frontend.front_end import FrontEnd
from quire.engine.messages import AbortRequests, AddRequests
from quire.errors import InvalidRequest
from quire.outputs import RequestOutput
from quire.params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
KINDS = [RuntimeError("x"), MemoryError(), KeyError("x")]


class Rig:
    """A front end with a journal, over a core that says what a test wants."""

    def __init__(self) -> None:
        cores: list[FakeCore] = []

        def make(epoch: int, on_message: OnMessage, on_exit: OnExit) -> FakeCore:
            cores.append(FakeCore(epoch, on_message, on_exit))
            return cores[-1]

        self.engine = AsyncLLM(EngineConfig.from_options(), entropy=b"x", make_core=make)
        self.frontend: FrontEnd = self.engine.frontend
        self.engine.supervisor.start()
        [self.core] = cores
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, name: str, **changes: Any) -> str:
        prompt = {"prompt_token_ids": [5, 6, 7]}
        processed = self.frontend.accept(name, prompt, PARAMS.replace(**changes))
        return processed.requests[0].request_id

    def take(self, *outputs: EngineCoreOutput) -> None:
        taken = self.frontend.take(outputs, None)
        self.frontend.release(taken)
        for output in taken.request_outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.frontend.check_integrity()

    @property
    def aborted(self) -> list[str]:
        return [i for m in self.core.inbox if isinstance(m, AbortRequests) for i in m.request_ids]

    def tokens(self, name: str) -> list[int]:
        return list(self.outputs[name][-1].outputs[0].token_ids)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig()


def new(name: str, *tokens: int) -> EngineCoreOutput:
    return EngineCoreOutput(name, list(tokens), [TokenLogprobs([t], [-1.0], 1) for t in tokens])


@pytest.mark.parametrize("error", KINDS, ids=repr)
@pytest.mark.parametrize(
    "where",
    ["_append_tokens", "_append_logprobs", "_note_scheduling", "_deliver"],
)
async def test_one_bad_completion_ends_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    names = [rig.add(n) for n in ("a", "b", "c")]
    processor = rig.frontend.output
    real = getattr(processor, where)
    told: list[str] = []

    def broken(*args: Any) -> Any:
        # The second output of the step is the bad one, whatever of it is being worked on.
        told.append("call")
        if len(told) == 2:
            raise error
        return real(*args)

    monkeypatch.setattr(processor, where, broken)
    rig.take(*(new(n, 9) for n in names))
    monkeypatch.setattr(processor, where, real)
    bad = rig.outputs["b"][-1]
    assert bad.finished and bad.error == output_processor.UNPROCESSED
    assert bad.outputs[0].finish_reason == "error"
    assert rig.tokens("a") == rig.tokens("c") == [9]
    assert rig.aborted == [names[1]]
    rig.take(*(new(n, 8) for n in names))
    assert rig.tokens("a") == rig.tokens("c") == [9, 8] and len(rig.outputs["b"]) == 1


@pytest.mark.parametrize("error", KINDS, ids=repr)
async def test_a_token_that_is_not_in_the_journal_is_not_sent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    names = [rig.add(n) for n in ("a", "b", "c")]
    rig.take(*(new(n, 9) for n in names))
    journal = rig.frontend.journal
    assert journal is not None

    class Full(list[int]):
        def __iadd__(self, more: Any) -> Any:
            raise error

    journal._entries[names[2]].output_token_ids = Full([9])
    rig.take(*(new(n, 8) for n in names))
    assert rig.tokens("a") == rig.tokens("b") == [9, 8]
    assert "written down" in (rig.outputs["c"][-1].error or "")
    assert rig.tokens("c") == [9] and rig.aborted == [names[2]]
    assert journal.tokens() == {names[0]: [9, 8], names[1]: [9, 8]}


async def test_a_listener_that_raises_keeps_nothing_from_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = rig.add("a")
    queue = rig.frontend.queue
    assert queue is not None

    def broken(*_: Any) -> None:
        raise KeyError("queue")

    monkeypatch.setattr(queue, "step", broken)
    taken = rig.frontend.take([new(name, 9)], None)
    assert taken.request_outputs[0].outputs[0].token_ids == [9] and not taken.aborts
    assert "failed" in caplog.text


async def test_prompt_logprobs_in_pieces_are_joined(rig: Rig) -> None:
    name = rig.add("a", prompt_logprobs=1, n=1)
    scores = [None, TokenLogprobs([6], [-1.0], 1), TokenLogprobs([7], [-2.0], 1)]
    first = EngineCoreOutput(name, [], new_prompt_logprobs=scores[:1], prompt_logprobs_start=0)
    rest = EngineCoreOutput(name, [], new_prompt_logprobs=scores[1:], prompt_logprobs_start=1)
    rig.take(first)
    assert not rig.outputs
    rig.take(first)  # as a core says that took the place of the one that died after the first
    rig.take(rest, new(name, 9))
    got = rig.outputs["a"][-1].prompt_logprobs
    assert got is not None and [None if p is None else list(p) for p in got] == [None, [6], [7]]


@pytest.mark.parametrize("bad", [2**70, "\ud800", object()], ids=["number", "text", "object"])
async def test_a_request_that_cannot_be_encoded_is_refused_before_anyone_hears_of_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, bad: Any
) -> None:
    process = CoreProcess(1, lambda _: None, lambda *_: None)
    heard: list[Any] = []
    monkeypatch.setattr(rig.core, "prepare", process.prepare)
    assert rig.frontend.journal is not None
    monkeypatch.setattr(rig.frontend.journal, "accepted", heard.append)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        rig.frontend.accept("a", {"prompt_token_ids": [5]}, PARAMS, client=bad)
    assert not heard and not rig.core.inbox
    rig.frontend.check_integrity(set())
    assert not any(isinstance(m, AddRequests) for m in rig.core.inbox)
