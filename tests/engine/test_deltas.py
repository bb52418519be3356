"""Outputs that are nothing but text are told in short, and say the same as any other."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.frontend.stream import RequestStream, StreamBuffers
from quire.outputs import FinishReason, RequestOutput
from quire.params import RequestOutputKind, SamplingParams
from test_output_processor import DELTA, Frontend, core, ids

SCORED = [TokenLogprobs([65], [-0.5], 1)]
TEXTS = ["a", "b#", "", "#", "ä", "漢", "c d"]

one_step = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([*map(ids, TEXTS), ids("漢")[:1], ids("漢")[1:]]),
        st.sampled_from([None] * 9 + ["end", "preempted", "error"]),
    ),
    min_size=2,
    max_size=4,
    unique_by=lambda said: said[0],
)
asked = st.fixed_dictionaries(
    {"output_kind": st.sampled_from([DELTA] * 3 + list(RequestOutputKind))},
    optional={
        "n": st.just(2),
        "stop": st.sampled_from(["#", "b#c", "漢"]),
        "logprobs": st.just(0),
        "stream_interval": st.integers(1, 3),
        "min_tokens": st.integers(0, 3),
    },
)


def said(name: str, tokens: list[int], what: str | None, scored: bool) -> EngineCoreOutput:
    fields: dict[str, Any] = {"new_logprobs": SCORED * len(tokens)} if scored else {}
    if what == "end":
        fields["end"] = FinishReason.LENGTH
    elif what == "preempted":
        fields["num_preemptions"] = 1
    elif what == "error":
        fields |= {"end": FinishReason.ERROR, "error": "nan"}
    return core(name, tokens, **fields)


def by_id(outputs: Iterable[RequestOutput]) -> dict[str, RequestOutput]:
    return {output.request_id: output for output in outputs}


@settings(max_examples=150, deadline=None)
@given(st.lists(asked, min_size=4, max_size=4), st.lists(one_step, min_size=6, max_size=12))
def test_deltas_say_what_outputs_say(requests: list[dict[str, Any]], steps: list[Any]) -> None:
    plain, short = Frontend(), Frontend()
    names = []
    for i, fields in enumerate(requests):
        names.append(plain.add(str(i), seed=i, **fields).requests[-1].request_id)
        assert short.add(str(i), seed=i, **fields).requests[-1].request_id == names[-1]
    for step in steps:
        outputs = [said(names[i], t, what, "logprobs" in requests[i]) for i, t, what in step]
        expected = plain.step(*outputs)
        short.clock.advance(1.0)
        got = short.processor.process(outputs, short.clock.now(), deltas=True)
        short.processor.check_integrity()
        everything = [*got.request_outputs, *(delta.full() for delta in got.deltas)]
        assert len(by_id(everything)) == len(everything)
        assert by_id(everything) == by_id(expected.request_outputs)
        assert (got.aborts, got.iteration) == (expected.aborts, expected.iteration)


def test_a_stream_of_text_is_told_in_short_from_its_second_output() -> None:
    frontend = Frontend()
    name = frontend.add(seed=1).requests[0].request_id
    first = frontend.processor.process([core(name, "a")], 1.0, deltas=True)
    assert (len(first.request_outputs), first.deltas) == (1, [])
    more = [frontend.processor.process([core(name, "bc")], 1.0, deltas=True) for _ in range(3)]
    assert [(m.request_outputs, [(d.text, d.token_ids) for d in m.deltas]) for m in more] == [
        ([], [("bc", ids("bc"))])
    ] * 3
    last = frontend.processor.process([core(name, "d", end=FinishReason.LENGTH)], 1.0, deltas=True)
    assert last.request_outputs[0].finished
    assert not last.deltas


async def test_outputs_that_are_merged_for_a_slow_reader_leave_the_cores_as_they_are() -> None:
    """Listeners such as the journal on disk read them later."""
    frontend = Frontend()
    name = frontend.add(seed=1).requests[0].request_id
    buffers = StreamBuffers(None, lambda: None)
    checked = cast("Any", SimpleNamespace(params=SamplingParams(output_kind=DELTA)))
    stream = RequestStream("0", 1, checked, lambda _: None, buffers)
    steps = [core(name, text) for text in "abcdefghijklmnopqrstuvwxyz" * 4]
    for output in steps:
        got = frontend.processor.process([output], 1.0, deltas=True)
        for whole in got.request_outputs:
            stream.put(whole)
        for delta in got.deltas:
            stream.put_delta(delta)
    assert len(stream.unread()) < len(steps), "none was merged"
    assert [output.new_token_ids for output in steps] == [
        ids(text) for text in "abcdefghijklmnopqrstuvwxyz" * 4
    ]
