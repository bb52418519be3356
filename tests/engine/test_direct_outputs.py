"""Outputs that are handled where the engine brings them come in order, and lose nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from quire.engine.frontend.stream import RequestStream, StreamBuffers
from quire.errors import StepFailed
from quire.outputs import CompletionOutput, RequestOutput


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
