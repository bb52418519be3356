"""Outputs that are handled where the engine brings them come in order, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from fake_core import FakeCore
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores.handle import OnExit, OnMessage
from quire.engine.frontend.stream import RequestStream, StreamBuffers
from quire.errors import StepFailed
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import RequestOutputKind, SamplingParams


def output(text: str, finished: bool = False, count: int = 1) -> RequestOutput:
    reason = "length" if finished else None
    some = [CompletionOutput(i, text, [1], finish_reason=reason) for i in range(count)]
    return RequestOutput("a", None, [1], some, finished)


class Rig:
    """A stream, whose reader and whose direct taker write down what they get."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []
        self.takes = True
        self.aborted: list[str] = []
        buffers = StreamBuffers(None, lambda: None)
        self.stream = RequestStream("a", 1, cast("Any", None), self.aborted.append, buffers)
        self.stream.direct = self._take
        self.reader = asyncio.ensure_future(self._read())

    def _take(self, output: RequestOutput) -> bool:
        if output.outputs[0].text == "bad":
            raise ValueError("it cannot be rendered")
        if self.takes:
            self.taken.append(("direct", output.outputs[0].text))
        return self.takes

    async def _read(self) -> None:
        async for one in self.stream:
            self.taken.append(("reader", one.outputs[0].text))


async def test_a_reader_that_waits_is_not_woken() -> None:
    rig = Rig()
    rig.stream.put(output("0"))  # nobody waits yet
    await asyncio.sleep(0)
    for text in "12":
        rig.stream.put(output(text))
    rig.takes = False
    rig.stream.put(output("3"))
    rig.takes = True
    rig.stream.put(output("4"))  # the reader has 3 before it
    await asyncio.sleep(0)
    rig.stream.put(output("5"))
    rig.stream.put(output("6", finished=True))
    await rig.reader
    assert [text for _, text in rig.taken] == list("0123456")
    how = ["reader", "direct", "direct", "reader", "reader", "direct", "reader"]
    assert [who for who, _ in rig.taken] == how


async def test_what_is_not_plain_is_the_readers() -> None:
    rig = Rig()
    await asyncio.sleep(0)
    rig.stream.put(output("both", count=2))
    await asyncio.sleep(0)
    rig.stream.put(StepFailed("it failed"))
    with pytest.raises(StepFailed):
        await rig.reader
    assert rig.taken == [("reader", "both")]


async def test_a_fault_is_the_readers() -> None:
    rig = Rig()
    await asyncio.sleep(0)
    rig.stream.put(output("1"))
    rig.stream.put(output("bad"))
    rig.stream.put(output("2"))
    with pytest.raises(ValueError, match="rendered"):
        await rig.reader
    assert rig.taken == [("direct", "1")]
    await rig.stream.aclose()
    assert rig.aborted == ["a"]


class Short:
    """A `Delta` of a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.token_ids = [1]

    def full(self) -> RequestOutput:
        return output(self.text)


async def test_text_alone_needs_no_output() -> None:
    rig, shown = Rig(), []
    takes = True

    def take(text: str, num_tokens: int) -> bool:
        if text == "bad":
            raise ValueError("it cannot be written")
        if takes:
            shown.append((text, num_tokens))
        return takes

    rig.stream.direct_text = take
    rig.stream.put_delta(cast("Any", Short("0")))  # nobody waits yet
    await asyncio.sleep(0)
    rig.stream.put_delta(cast("Any", Short("1")))
    rig.stream.put(output("2"))
    takes = False
    rig.stream.put_delta(cast("Any", Short("3")))
    assert shown == [("1", 1)]
    rig.stream.put_delta(cast("Any", Short("bad")))
    rig.takes = False
    rig.stream.put_delta(cast("Any", Short("4")))
    with pytest.raises(ValueError, match="written"):
        await rig.reader
    assert rig.taken == [("reader", "0"), ("direct", "2"), ("direct", "3")]


class WritingPipe:
    """Writes down what it is to send, and what the journal has at that moment."""

    is_paused = False

    def __init__(self, name: str, said: list[Any], tokens: Callable[[], Any]) -> None:
        self._name, self._said, self._tokens = name, said, tokens

    def send_chunk(self, data: bytes) -> None:
        if data == b"worse":
            raise OSError("the connection is broken")
        self._said.append(("sent", self._name, data, self._tokens()))


async def test_a_step_is_sent_in_one_go_after_the_last_of_it_is_rendered() -> None:
    cores: list[FakeCore] = []

    def make(epoch: int, on_message: OnMessage, on_exit: OnExit) -> FakeCore:
        cores.append(FakeCore(epoch, on_message, on_exit))
        return cores[-1]

    engine = AsyncLLM(EngineConfig.from_options(), entropy=b"x", make_core=make)
    engine.supervisor.start()
    journal = engine.frontend.journal
    assert journal is not None
    said: list[Any] = []
    pipes = {}
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, ignore_eos=True, max_tokens=9)

    async def read(stream: RequestStream) -> None:
        async for _ in stream:
            pass

    def take_for(name: str, stream: RequestStream, words: list[bytes]) -> Callable[..., bool]:
        def take(text: str, num_tokens: int) -> bool:
            said.append(("rendered", name))
            if (word := words.pop(0)) == b"bad":
                raise ValueError("it cannot be rendered")
            stream.outbox.waiting.append((pipes[name], word))
            return True

        return take

    words = {"a": [b"a1", b"worse"], "b": [b"b1", b"bad"], "c": [b"c1", b"c2"]}
    readers = []
    for name in words:
        stream = await engine.submit({"prompt_token_ids": [5]}, params, name)
        stream.direct_text = take_for(name, stream, words[name])
        (internal,) = engine.frontend.internal_ids(name)
        pipes[name] = WritingPipe(name, said, lambda i=internal: len(journal.tokens()[i]))
        readers.append(asyncio.ensure_future(read(stream)))
    core = cores[0]
    while core.state != "ready":
        core.load()
    core.take(), core.take(), core.take()
    for _ in range(3):
        core.step()
        while core.outbox:
            core.give()
        engine.check_integrity()
        await asyncio.sleep(0)
    rendered = [("rendered", name) for name in words]
    first = [("sent", name, name.encode() + b"1", 2) for name in words]
    assert said == [*rendered, *first, *rendered, ("sent", "c", b"c2", 3)]
    for reader in readers:
        reader.cancel()
