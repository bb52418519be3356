"""No message between the processes is large: what would be travels in pieces that join to the same,
and what cannot be cut is an error of its own request."""

from __future__ import annotations

import msgspec
import pytest

from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.cores import wire
from quire.engine.cores.parts import encode_outputs, encode_to_core
from quire.engine.messages import AddRequests, EngineCoreRequest, Outputs, ToCore
from quire.errors import InvalidRequest
from quire.outputs import FinishReason, Pooled
from quire.params import SamplingParams


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 4000)
    monkeypatch.setattr(wire, "MAX_FRAME", 12_000)


def scores(count: int, width: int = 10) -> list[TokenLogprobs | None]:
    return [TokenLogprobs([i] * width, [-0.5] * width, 1) for i in range(count)]


def told(
    outputs: list[EngineCoreOutput], stats: StepStats | None = None
) -> tuple[list[Outputs], list[str]]:
    frames, failed = encode_outputs(3, 7, outputs, stats)
    assert all(len(frame) <= wire.MAX_FRAME + wire.HEADER for frame in frames)
    messages = [msgspec.msgpack.decode(f[wire.HEADER :], type=Outputs) for f in frames]
    assert [m.number for m in messages] == [*range(7, 7 + len(messages))]
    assert {m.epoch for m in messages} == {3}
    assert [m.stats is not None for m in messages[:-1]] == [False] * (len(messages) - 1)
    assert (messages[-1].stats is not None) == (stats is not None)
    return messages, failed


def test_a_small_step_is_one_message() -> None:
    outputs = [EngineCoreOutput("a", [5]), EngineCoreOutput("b", [6])]
    stats = StepStats(step=4)
    assert told(outputs, stats) == ([Outputs(3, 7, outputs, stats)], [])
    assert told([], stats)[0][0].outputs == []


def test_many_outputs_are_spread() -> None:
    outputs = [EngineCoreOutput(f"request {i}", [i] * 50) for i in range(300)]
    messages, failed = told(outputs, StepStats())
    assert len(messages) > 3 and not failed
    assert max(wire.size_of(m) for m in messages) <= wire.PART_BYTES
    assert [o for m in messages for o in m.outputs] == outputs


@pytest.mark.parametrize("num_tokens", [0, 1, 90])
def test_one_large_output_travels_in_pieces(num_tokens: int) -> None:
    prompt = [None, *scores(200)]
    output = EngineCoreOutput(
        "a",
        list(range(num_tokens)),
        scores(num_tokens),  # type: ignore[arg-type]
        prompt,
        FinishReason.STOP,
        "x",
        12,
        1.5,
        2.5,
        1,
        scored=Pooled((2, 3), b"\x01" * 24),
    )
    before, after = EngineCoreOutput("b", [1]), EngineCoreOutput("c", [2])
    messages, failed = told([before, output, after], StepStats())
    assert max(wire.size_of(m) for m in messages) <= wire.PART_BYTES and not failed
    got = [o for m in messages for o in m.outputs]
    assert got[0] == before and got[-1] == after
    pieces = got[1:-1]
    assert len(pieces) > 5
    assert [t for p in pieces for t in p.new_token_ids] == output.new_token_ids
    assert [s for p in pieces for s in p.new_logprobs or []] == output.new_logprobs
    assert [s for p in pieces for s in p.new_prompt_logprobs or []] == prompt
    before_it = 0
    for piece in pieces:
        if piece.new_prompt_logprobs:
            assert piece.prompt_logprobs_start == before_it
            before_it += len(piece.new_prompt_logprobs)
    assert {p.queued_ts for p in pieces} == {1.5} and {p.num_cached_tokens for p in pieces} == {12}
    assert [p.scored for p in pieces] == [None] * (len(pieces) - 1) + [output.scored]
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (FinishReason.STOP, "x")
    for piece in pieces:
        assert len(piece.new_logprobs or []) == len(piece.new_token_ids)


def test_what_cannot_be_cut_is_one_large_message_up_to_the_limit() -> None:
    pooled = Pooled((1500,), b"\x00" * 6000)
    output = EngineCoreOutput("a", [], finish_reason=FinishReason.STOP, pooled=pooled)
    messages, failed = told([EngineCoreOutput("b", [1]), output])
    assert [o.pooled for m in messages for o in m.outputs] == [None, pooled] and not failed


def test_beyond_it_is_the_error_of_that_request() -> None:
    output = EngineCoreOutput("a", [], pooled=Pooled((5000,), b"\x00" * 20_000))
    other = EngineCoreOutput("b", [1])
    messages, failed = told([output, other], StepStats())
    assert failed == ["a"]
    error, same = (o for m in messages for o in m.outputs)
    assert same == other
    assert error.finish_reason is FinishReason.ERROR and error.pooled is None
    assert error.error is not None and "limit of 8000 bytes" in error.error


def request(name: str, num_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(name, name, 0, [1] * num_tokens, SamplingParams(), 0.0)


def test_many_requests_are_spread() -> None:
    requests = [request(str(i), 500) for i in range(40)]
    frames = encode_to_core(AddRequests(2, requests))
    assert len(frames) > 5 and max(map(len, frames)) <= wire.PART_BYTES
    messages = [msgspec.msgpack.decode(f[wire.HEADER :], type=ToCore) for f in frames]
    assert [r for m in messages for r in m.requests] == requests


def test_a_request_over_the_limit_is_refused_with_the_limit() -> None:
    assert len(encode_to_core(AddRequests(2, [request("a", 10_000)]))) == 1
    with pytest.raises(InvalidRequest, match=r"over the limit of 12000 bytes"):
        encode_to_core(AddRequests(2, [request("a", 13_000)]))
    with pytest.raises(InvalidRequest, match=r"over the limit of 12000 bytes"):
        encode_to_core(AddRequests(2, [request("a", 13_000), request("b", 1)]))
