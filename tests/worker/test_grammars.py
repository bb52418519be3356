"""The grammars of an engine core: what fails a request, and what only interrupts the waiting."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from patience import PATIENCE, wait_for
from quire.errors import GrammarFailed
from quire.params import SamplingParams
from quire.structured.params import Grammar
from quire.worker import grammars
from quire.worker.grammars import GrammarStore


class Panic(BaseException):
    """As a library in Rust raises them."""


def broken() -> str:
    raise Panic("no tokenizer")


@pytest.fixture
def store() -> Iterator[GrammarStore]:
    made = GrammarStore(broken, 100, 4)
    yield made
    made.close()


PARAMS = SamplingParams(grammar=Grammar("regex", "{}"), seed=1)


def test_a_panic_while_compiling_fails_the_request(store: GrammarStore) -> None:
    with pytest.raises(GrammarFailed, match=r"compiling it failed \(Panic\)"):
        store.state(PARAMS)


def test_the_next_request_with_such_a_grammar_has_it_compiled_anew(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may be short for a moment, and grammars are those of many requests."""
    with pytest.raises(GrammarFailed):
        store.state(PARAMS)
    tries = []
    monkeypatch.setattr(store, "_compile", tries.append)
    wait_for(lambda: store.begin(PARAMS))
    assert tries == [PARAMS]


def test_what_interrupts_the_waiting_is_no_failure_of_a_grammar(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Alarm(Exception):
        """Raised by a handler of a signal, say."""

    def alarm(*_: object) -> None:
        raise Alarm

    store.begin(PARAMS)
    monkeypatch.setattr(Future, "exception", alarm)
    with pytest.raises(Alarm):
        store.state(PARAMS)


def asking_for(text: str) -> SamplingParams:
    return SamplingParams(grammar=Grammar("regex", text), seed=1)


def test_more_grammars_than_are_kept_are_compiled_once_each(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for its grammar comes again and again. If the line of those that wait is longer
    than what is kept, each would find its own forgotten, and begin anew: for ever."""
    turns, compiled = threading.Semaphore(0), []

    def compile_one(params: SamplingParams) -> object:
        assert turns.acquire(timeout=PATIENCE)
        compiled.append(params)
        return object()

    monkeypatch.setattr(store, "_compile", compile_one)
    monkeypatch.setattr(store, "_kept", 4)
    waiting = [asking_for(f"[{i}]") for i in range(10)]
    for _ in range(20):
        waiting = [params for params in waiting if not store.begin(params)]
        turns.release()
        store.wait(PATIENCE if waiting else 0)
    assert not waiting and len(compiled) == 10
    turns.release(50)
    assert len(store._grammars) == 10, "nobody has asked for another since"
    store.begin(asking_for("[a]"))
    assert len(store._grammars) == 4


def test_a_step_waits_for_its_own_grammar_alone(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled grammar that was forgotten is not behind all that wait to be compiled."""
    end, others_done = threading.Event(), threading.Event()

    def compile_one(params: SamplingParams) -> object:
        assert params.grammar is not None
        if params.grammar.text == "other":
            end.wait(PATIENCE)
            others_done.set()
        return params.grammar.text

    monkeypatch.setattr(store, "_compile", compile_one)
    monkeypatch.setattr(store, "_vocabulary", object())
    monkeypatch.setattr("quire.structured.state.GrammarState", lambda start, *_: start)
    store.begin(asking_for("other"))
    store.begin(asking_for("own"))
    try:
        got: object = store.state(asking_for("own"))
        assert got == "own"
        assert not others_done.is_set()
    finally:
        end.set()


def test_what_a_step_waits_for_is_not_forgotten_at_once(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was asked for first of all, and is there at once."""

    class Thread:
        def __init__(self, at_once: bool) -> None:
            self._at_once = at_once

        def submit(self, compile_one: object, params: SamplingParams) -> Future[object]:
            made: Future[object] = Future()
            if self._at_once:
                made.set_result(object())
            return made

    monkeypatch.setattr(store, "_thread", Thread)
    monkeypatch.setattr(store, "_kept", 1)
    monkeypatch.setattr(store, "_vocabulary", object())
    monkeypatch.setattr("quire.structured.state.GrammarState", lambda start, *_: start)
    for text in ("own", "other"):
        assert not store.begin(asking_for(text))
    store.state(asking_for("own"))
    assert list(store._grammars) == ["other", "own"]


def test_at_least_one_grammar_is_kept_however_long(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "KEPT_CHARS", 3)
    monkeypatch.setattr(store, "_compile", lambda params: object())
    for text in ("abcd", "bcde"):
        while not store.begin(asking_for(text)):
            store.wait(PATIENCE)
    assert list(store._grammars) == ["bcde"]
