"""The stream of one request: deltas merge where nobody reads, bytes are bounded, others go on."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest

from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.stream import MERGE_BEYOND, MOST_MERGED, RequestStream, StreamBuffers
from quire.errors import EngineDead, QuireError, SlowReader
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.params import RequestOutputKind, SamplingParams


class Engine:
    """Makes streams over one set of buffers."""

    def __init__(self, limit: int | None = None) -> None:
        self.ended = 0
        self.aborted: list[str] = []
        self.buffers = StreamBuffers(limit, self._count)
        self.streams: dict[str, RequestStream] = {}

    def _count(self) -> None:
        self.ended += 1

    def stream(self, name: str = "a", kind: Any = RequestOutputKind.DELTA) -> RequestStream:
        checked = CheckedParams(SamplingParams(output_kind=kind))
        self.streams[name] = RequestStream(name, 1, checked, self._abort, self.buffers)
        return self.streams[name]

    def _abort(self, name: str) -> None:
        self.aborted.append(name)
        self.streams[name].put(delta(0, reason="abort"))  # as `AsyncLLM` does


def delta(*tokens: int, reason: str | None = None, index: int = 0, top: int = 0) -> RequestOutput:
    text = "".join(chr(97 + token % 26) for token in tokens)
    logprobs = [{t + i: Logprob(-1.0 - i) for i in range(top)} for t in tokens] if top else None
    total = float(tokens[-1]) if tokens else None
    completion = CompletionOutput(index, text, list(tokens), total, logprobs, reason)
    return RequestOutput("a", None, [1, 2], [completion], reason is not None, num_cached_tokens=2)


async def everything(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


def fold(outputs: list[RequestOutput]) -> dict[int, Any]:
    """What a client has in the end, however it was cut."""
    choices: dict[int, Any] = {}
    for output in outputs:
        for c in output.outputs:
            text, ids, logprobs, *_ = choices.get(c.index, ("", [], []))
            all_logprobs = logprobs + (c.logprobs or [])
            sums = (c.cumulative_logprob, c.finish_reason)
            choices[c.index] = (text + c.text, ids + c.token_ids, all_logprobs, *sums)
    return choices


async def test_who_keeps_up_gets_each_output_as_it_came() -> None:
    engine = Engine(limit=1)
    stream, sent = engine.stream(), [delta(i) for i in range(50)] + [delta(reason="stop")]
    got = []
    for output in sent:
        stream.put(output)
        got.append(await anext(stream))
    assert all(one is other for one, other in zip(got, sent, strict=True))
    assert await everything(stream) == [] and engine.buffers.num_bytes == 0


async def test_a_reader_that_waits_is_woken_and_may_be_cancelled() -> None:
    stream = Engine().stream()
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.put(output := delta(1, reason="stop"))
    assert await reading is output


@pytest.mark.parametrize("seed", range(20))
async def test_merging_changes_nothing_but_where_replies_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    top, n = rng.choice([0, 3]), rng.choice([1, 2, 3])
    sent, open_choices = [], list(range(n))
    while open_choices:
        index, tokens = (
            rng.choice(open_choices),
            [rng.randrange(99) for _ in range(rng.choice([0, 1, 7]))],
        )
        ends = rng.random() < 0.01
        if ends:
            open_choices.remove(index)
        output = delta(*tokens, reason="length" if ends else None, index=index, top=top)
        output.finished = not open_choices
        sent.append(output)
    expected = fold(copy.deepcopy(sent))
    engine = Engine()
    stream, got = engine.stream(), []
    for output in sent:
        stream.put(output)
        if rng.random() < 0.02:
            got.append(await anext(stream))
        assert engine.buffers.num_bytes == sum(held.size for held in stream._held)
    tokens = sum(len(c.token_ids) for output in sent for c in output.outputs)
    assert len(stream._held) <= MERGE_BEYOND + 1 + tokens / MOST_MERGED
    for item in stream.unread():
        assert sum(len(c.token_ids) for c in item.outputs) < MOST_MERGED + 7
    got += await everything(stream)
    assert fold(got) == expected and got[-1].finished
    assert engine.buffers.num_bytes == 0 and not engine.buffers._behind


async def test_cumulative_outputs_replace_each_other() -> None:
    engine = Engine()
    stream = engine.stream(kind=RequestOutputKind.CUMULATIVE)
    sent = [delta(*range(i)) for i in range(200)] + [delta(*range(200), reason="stop")]
    for output in sent:
        stream.put(output)
    got = await everything(stream)
    assert got[-1] is sent[-1] and len(got) <= MERGE_BEYOND + 1 and len(got[-1].outputs) == 1


async def test_an_error_comes_after_all_that_was_said_before() -> None:
    for error in (EngineDead("gone"), delta(reason="error")):
        stream = Engine().stream()
        for i in range(100):
            stream.put(delta(i))
        if isinstance(error, RequestOutput):
            error.error = "broken"
        stream.put(error)
        got, failed = [], None
        try:
            async for output in stream:
                got.append(output)
        except EngineDead as dead:
            failed = dead
        if isinstance(error, RequestOutput):
            assert got.pop() is error
        else:
            assert failed is error
        assert fold(got)[0][1] == list(range(100))


async def test_the_slowest_is_ended_and_the_others_lose_nothing() -> None:
    engine = Engine(limit=200_000)
    slow, slower, quick = (engine.stream(name) for name in ("slow", "slower", "quick"))
    for i in range(2000):
        quick.put(delta(i))
        assert fold([await anext(quick)])[0][1] == [i]
        if i % 2:
            slow.put(delta(i))
        slower.put(delta(i))
        slower.put(delta(i))
        assert engine.buffers.num_bytes <= 200_000
    assert (engine.aborted, engine.ended) == (["slower"], 1)
    first = await anext(slower)
    assert fold([first])[0][1] == [0], "what comes before the error is the beginning, without a gap"
    with pytest.raises(SlowReader, match=r"\d+ bytes were waiting .* leave 200000 \(--max-buff"):
        await anext(slower)
    with pytest.raises(StopAsyncIteration):
        await anext(slower)
    slow.put(delta(reason="stop"))
    assert fold(await everything(slow))[0][1] == list(range(1, 2000, 2))
    assert engine.buffers.num_bytes == 0


async def test_a_finished_reply_that_nobody_fetches_is_dropped_without_an_abort() -> None:
    engine = Engine(limit=10_000)
    stream = engine.stream("a")
    for i in range(8):
        stream.put(delta(i))
    stream.put(delta(reason="stop"))
    other = engine.stream("b")
    for i in range(8):
        other.put(delta(i))
    assert engine.ended == 1 and engine.aborted == []
    await anext(stream)
    with pytest.raises(SlowReader):
        await anext(stream)


async def test_log_probabilities_count() -> None:
    sizes = []
    for top in (0, 20):
        engine = Engine()
        stream = engine.stream()
        for i in range(1000):
            stream.put(delta(i, top=top))
        sizes.append(engine.buffers.num_bytes)
        await stream.aclose()
        assert engine.buffers.num_bytes == 0 and engine.aborted == ["a"]
    assert sizes[1] > 50 * sizes[0], sizes


async def test_nothing_is_limited_without_a_limit() -> None:
    engine = Engine(limit=None)
    stream = engine.stream()
    for i in range(20_000):
        stream.put(delta(i, top=5))
    stream.put(delta(reason="stop"))
    assert len(fold(await everything(stream))[0][1]) == 20_000


def test_the_error_is_one_of_ours() -> None:
    assert issubclass(SlowReader, QuireError) and SlowReader.status == 408
