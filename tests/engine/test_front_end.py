"""The front end's promises that need no core: all or nobody, in one order, and no call from within
a step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fake_executor import FakeExecutor
from quire.config import EngineConfig
from quire.core.batch import BatchResult, ScheduledBatch
from quire.engine.frontend.journal import Journal
from quire.engine.frontend.listeners import Listener, ListenerTable
from quire.engine.llm_engine import LLMEngine
from quire.errors import Conflict
from quire.params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7]


class Loud(Listener):
    """Notes what it hears."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self._name, self._heard = name, heard

    def closed(self, internal_ids: Any) -> None:
        self._heard.append(self._name)


def test_listeners_hear_in_the_order_of_the_table() -> None:
    heard: list[str] = []
    table = ListenerTable([Loud("a", heard), Journal(), Loud("b", heard), Loud("c", heard)])
    table.closed(["x"])
    assert heard == ["a", "b", "c"]
    table.aborted("x")
    assert heard == ["a", "b", "c"], "nobody overrides it"


class Interrupting(FakeExecutor):
    """Raises a signal in the middle of a step, if told to."""

    armed = False

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        result = super().execute(batch)
        if self.armed:
            self.armed = False
            signal.raise_signal(signal.SIGALRM)
        return result

    def reset(self) -> None:
        self.known.clear()


@pytest.fixture
def engine() -> LLMEngine:
    config = EngineConfig.from_options(disable_log_stats=True)
    return LLMEngine(config, executor=Interrupting(lambda prompt, n: 400 + n))


@pytest.fixture
def on_alarm() -> Iterator[Callable[[Callable[[], Any]], None]]:
    before = signal.getsignal(signal.SIGALRM)
    yield lambda act: signal.signal(signal.SIGALRM, lambda *_: act())  # type: ignore[func-returns-value]
    signal.signal(signal.SIGALRM, before)


def drain(engine: LLMEngine) -> list[int]:
    tokens: list[int] = []
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.request_id == "a":
                tokens = list(output.outputs[0].token_ids)
        engine.frontend.check_integrity()
    return tokens


def arm(engine: LLMEngine) -> None:
    engine.core.executor.armed = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "act",
    [
        lambda engine: engine.step(),
        lambda engine: engine.add_request("b", PROMPT, PARAMS),
        lambda engine: engine.abort_request(["a"]),
        lambda engine: engine.call("ping", {}),
        lambda engine: engine.shutdown(),
    ],
    ids=["step", "add_request", "abort_request", "call", "shutdown"],
)
@pytest.mark.parametrize("caught", [True, False])
def test_a_signal_handler_cannot_call_into_its_own_step(
    engine: LLMEngine, on_alarm: Any, act: Callable[[LLMEngine], Any], caught: bool
) -> None:
    """The step goes on if the handler takes the refusal, and is undone if that gets through."""
    refused: list[str] = []

    def handler() -> None:
        try:
            act(engine)
        except Conflict as error:
            refused.append(error.message)
            if not caught:
                raise

    on_alarm(handler)
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    arm(engine)
    if caught:
        engine.step()
    else:
        with pytest.raises(Conflict, match="from within its own step"):
            engine.step()
        assert engine.core.scheduler.requests
    assert len(refused) == 1
    assert drain(engine) == list(range(400, 406))
    engine.core.scheduler.check_integrity()
    engine.shutdown()


def test_nor_while_outputs_are_handed_over(
    engine: LLMEngine, on_alarm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Conflict] = []

    def handler() -> None:
        with pytest.raises(Conflict) as caught:
            engine.step()
        refused.append(caught.value)

    on_alarm(handler)
    report, tokens = engine.frontend.report, []

    def interrupted(*what: Any) -> None:
        signal.raise_signal(signal.SIGALRM)
        report(*what)

    engine.add_request("a", PROMPT, PARAMS)
    monkeypatch.setattr(engine.frontend, "report", interrupted)
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    assert tokens == list(range(400, 406)) and len(refused) == 7


def test_it_may_between_two_steps(engine: LLMEngine, on_alarm: Any) -> None:
    on_alarm(lambda: engine.add_request("b", PROMPT, PARAMS))
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    signal.raise_signal(signal.SIGALRM)
    assert engine.get_num_unfinished_requests() == 2
    assert drain(engine) == list(range(400, 406))


@pytest.mark.parametrize("where", ["records", "listeners", "core"])
def test_all_know_of_a_request_or_nobody(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    front = engine.frontend
    holder, name = {
        "records": (front.records, "accept"),
        "listeners": (front._tell, "accepted"),
        "core": (engine.core.scheduler, "add_request"),
    }[where]
    real = getattr(holder, name)

    def interrupted(*what: Any) -> None:
        real(*what)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request("a", PROMPT, PARAMS)
    assert not front.output.num_unfinished and not engine.core.scheduler.requests
    front.check_integrity()
    engine.add_request("a", PROMPT, PARAMS)
    assert drain(engine) == list(range(400, 406))
