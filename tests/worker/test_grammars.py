"""The grammars of an engine core: what fails a request, and what only interrupts the waiting."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from quire.errors import GrammarFailed
from quire.params import SamplingParams
from quire.structured.params import Grammar
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
