"""Core outputs become what callers get: kinds, stop strings, logprobs, timings, aborts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from circles import circles
from quire.config import ModelConfig, ModelShape
from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.core.stats import FinishedRequestStats
from quire.engine.frontend.input_processor import InputProcessor
from quire.engine.frontend.output_processor import OutputProcessor, ProcessedOutputs
from quire.engine.frontend.processed_input import ProcessedInput
from quire.errors import InvalidRequest
from quire.outputs import FinishReason, Logprob, Pooled, RequestOutput
from quire.params import RequestOutputKind, SamplingParams
from quire.tokenizer import Tokenizer
from quire.utils.timing import ManualClock

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ID = {c: i for i, c in enumerate(ALPHABET)}
EOS = 256


def make_tokenizer() -> Tokenizer:
    """One token per byte and an end-of-sequence token."""
    backend = Backend(models.BPE(ID, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"})


TOKENIZER = make_tokenizer()
SHAPE = ModelShape("A", 260, 8, 8, 1, 1, 1, 8, 1000, eos_token_ids=(EOS,))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


class Frontend:
    """A gate, an output processor and a clock, and the words a core would say."""

    def __init__(self, tokenizer: Tokenizer | None = TOKENIZER) -> None:
        self.clock = ManualClock(100.0)
        self.gate = InputProcessor(
            ModelConfig(), SHAPE, tokenizer, max_model_len=1000, generation_defaults={}
        )
        self.processor = OutputProcessor(tokenizer, self.clock)

    def add(self, request_id: str = "r", prompt: Any = "abc", **fields: Any) -> ProcessedInput:
        fields = {"output_kind": DELTA, "max_tokens": 100} | fields
        processed = self.gate.process(
            request_id, prompt, SamplingParams(**fields), arrival_time=self.clock.now()
        )
        self.processor.check_unused(request_id)
        self.processor.add(processed)
        return processed

    def step(self, *outputs: EngineCoreOutput, after: float = 1.0) -> ProcessedOutputs:
        self.clock.advance(after)
        done = self.processor.process(outputs, self.clock.now())
        self.processor.check_integrity()
        return done

    def say(self, request_id: str, text: str, **fields: Any) -> RequestOutput:
        """One core output with these tokens, and the one request output it gives."""
        (output,) = self.step(core(request_id, text, **fields)).request_outputs
        return output


def core(request_id: str, text: str | list[int] = "", **fields: Any) -> EngineCoreOutput:
    """A core output; `end` is short for the finish reason."""
    tokens = ids(text) if isinstance(text, str) else text
    reason = fields.pop("end", None)
    return EngineCoreOutput(request_id, tokens, finish_reason=reason, **fields)


def texts(outputs: list[RequestOutput]) -> list[list[tuple[int, str]]]:
    return [[(c.index, c.text) for c in o.outputs] for o in outputs]


# --- one completion -----------------------------------------------------------------------------


def test_deltas() -> None:
    frontend = Frontend()
    done = frontend.add(prompt="abc", seed=7)
    internal = done.requests[0].request_id
    first = frontend.say(internal, "He", num_cached_tokens=2)
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("r", "abc", ids("abc"))
    assert (first.seed, first.num_cached_tokens, first.finished) == (7, 2, False)
    last = frontend.say(internal, "y", end=FinishReason.LENGTH)
    assert [o.outputs[0].text for o in (first, last)] == ["He", "y"]
    assert [o.outputs[0].token_ids for o in (first, last)] == [ids("He"), ids("y")]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "length")
    assert last.num_cached_tokens == 2
    assert frontend.processor.num_unfinished == 0


def test_cumulative_and_final() -> None:
    frontend = Frontend()
    a = frontend.add("a", output_kind=CUMULATIVE).requests[0].request_id
    b = frontend.add("b", output_kind=FINAL_ONLY).requests[0].request_id
    one = frontend.step(core(a, "He"), core(b, "He"))
    two = frontend.step(
        core(a, "y", end=FinishReason.STOP, stop_reason=5), core(b, "y", end=FinishReason.LENGTH)
    )
    assert texts(one.request_outputs) == [[(0, "He")]]
    assert [o.request_id for o in two.request_outputs] == ["a", "b"]
    # a stop token adds no text, but is among the token ids
    assert texts(two.request_outputs) == [[(0, "He")], [(0, "Hey")]]
    assert [o.outputs[0].token_ids for o in two.request_outputs] == [ids("Hey")] * 2
    assert two.request_outputs[0].outputs[0].stop_reason == 5


def test_outputs_are_not_changed_later() -> None:
    frontend = Frontend()
    internal = frontend.add(output_kind=CUMULATIVE, logprobs=0).requests[0].request_id
    scored = [TokenLogprobs([1], [-1.0], 1)]
    first = frontend.say(internal, "H", new_logprobs=scored)
    frontend.say(internal, "e", new_logprobs=scored)
    assert first.outputs[0].token_ids == ids("H")
    assert first.outputs[0].logprobs is not None and len(first.outputs[0].logprobs) == 1
    assert first.metrics is not None and first.metrics.num_generation_tokens == 1


def test_an_output_without_news_is_no_output() -> None:
    frontend = Frontend()
    internal = frontend.add().requests[0].request_id
    done = frontend.step(core(internal))
    assert done.request_outputs == []
    assert (done.iteration.num_prompt_tokens, done.iteration.time_to_first_token) == (0, [])


def test_two_outputs_of_one_request_in_a_batch_become_one() -> None:
    frontend = Frontend()
    internal = frontend.add().requests[0].request_id
    done = frontend.step(core(internal, "a"), core(internal, "b", end=FinishReason.LENGTH))
    assert texts(done.request_outputs) == [[(0, "ab")]]


def test_tokens_without_text_are_news() -> None:
    frontend = Frontend()
    internal = frontend.add(stop="stop").requests[0].request_id
    output = frontend.say(internal, "ab")
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", ids("ab"))
    assert frontend.say(internal, "c", end=FinishReason.LENGTH).outputs[0].text == "abc"


def test_without_a_tokenizer() -> None:
    frontend = Frontend(tokenizer=None)
    internal = frontend.add(prompt=[1, 2], logprobs=1).requests[0].request_id
    scored = [TokenLogprobs([9, 8], [-1.0, -0.5], 2)]
    (output,) = frontend.step(core(internal, [9], new_logprobs=scored)).request_outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [9])
    assert output.outputs[0].logprobs == [{9: Logprob(-1.0, 2, None), 8: Logprob(-0.5, 1, None)}]


# --- stop strings -------------------------------------------------------------------------------


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one##")])
def test_a_stop_string_ends_the_request_here_and_in_the_core(include: bool, text: str) -> None:
    frontend = Frontend()
    fields = {"stop": ["##", "@"], "include_stop_str_in_output": include, "logprobs": 0}
    internal = frontend.add(**fields).requests[0].request_id
    scored = [TokenLogprobs([i], [-1.0], 1) for i in ids("one##two")]
    done = frontend.step(core(internal, "one##two", new_logprobs=scored))
    (output,) = done.request_outputs
    completion = output.outputs[0]
    assert done.aborts == [internal]
    assert (completion.text, completion.token_ids) == (text, ids("one##"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "##")
    assert completion.logprobs is not None and len(completion.logprobs) == 5
    assert completion.cumulative_logprob == -5.0
    assert done.iteration.num_generation_tokens == 5
    assert [f.finish_reason for f in done.iteration.finished] == ["stop"]
    # what the core still had under way is ignored
    late = frontend.step(core(internal, "more", end=FinishReason.ABORT))
    assert (late.request_outputs, late.aborts) == ([], [])
    assert (late.iteration.num_generation_tokens, late.iteration.finished) == (0, [])


def test_the_core_is_not_told_to_abort_what_it_has_ended() -> None:
    frontend = Frontend()
    internal = frontend.add(stop="#").requests[0].request_id
    done = frontend.step(core(internal, "a#", end=FinishReason.LENGTH))
    assert done.aborts == []
    assert done.request_outputs[0].outputs[0].finish_reason == "stop"
    assert done.request_outputs[0].outputs[0].stop_reason == "#"


def test_min_tokens_come_before_stop_strings() -> None:
    frontend = Frontend()
    internal = frontend.add(stop="#", min_tokens=3).requests[0].request_id
    assert frontend.step(core(internal, "#a#")).aborts == []
    assert frontend.step(core(internal, "b#")).aborts == [internal]


# --- log-probabilities --------------------------------------------------------------------------


def test_logprobs() -> None:
    frontend = Frontend()
    internal = frontend.add(logprobs=2).requests[0].request_id
    first = TokenLogprobs([ID["c"], ID["a"], ID["b"]], [-3.0, -0.5, -1.0], 7)
    second = TokenLogprobs([ID["a"], ID["a"], EOS], [-0.25, -0.25, -4.0], 1)
    one = frontend.say(internal, "c", new_logprobs=[first]).outputs[0]
    two = frontend.say(internal, "a", new_logprobs=[second], end=FinishReason.LENGTH).outputs[0]
    assert one.logprobs == [
        {
            ID["c"]: Logprob(-3.0, 7, "c"),
            ID["a"]: Logprob(-0.5, 1, "a"),
            ID["b"]: Logprob(-1.0, 2, "b"),
        }
    ]
    assert list(one.logprobs[0]) == [ID["c"], ID["a"], ID["b"]]
    assert two.logprobs == [{ID["a"]: Logprob(-0.25, 1, "a"), EOS: Logprob(-4.0, 2, "<eos>")}]
    assert (one.cumulative_logprob, two.cumulative_logprob) == (-3.0, -3.25)


def test_logprobs_that_nobody_asked_for_are_absent() -> None:
    frontend = Frontend()
    internal = frontend.add().requests[0].request_id
    output = frontend.say(internal, "c").outputs[0]
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_prompt_logprobs(kind: RequestOutputKind) -> None:
    """All outputs carry them, but of deltas only the first."""
    frontend = Frontend()
    internal = frontend.add(prompt="ab", prompt_logprobs=0, output_kind=kind).requests[0].request_id
    scores = [None, TokenLogprobs([ID["b"]], [-2.0], 3)]
    expected = [None, {ID["b"]: Logprob(-2.0, 3, "b")}]
    one = frontend.step(core(internal, "x", new_prompt_logprobs=scores)).request_outputs
    two = frontend.step(core(internal, "y", end=FinishReason.LENGTH)).request_outputs
    got = [output.prompt_logprobs for output in one + two]
    assert (
        got == {CUMULATIVE: [expected] * 2, DELTA: [expected, None], FINAL_ONLY: [expected]}[kind]
    )


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_scores_of_named_tokens(kind: RequestOutputKind) -> None:
    """As prompt log-probabilities, which may come before them, in pieces."""
    frontend = Frontend()
    internal = frontend.add(
        prompt="ab", prompt_logprobs=0, prompt_logprob_token_ids=[[5, 6]], output_kind=kind
    ).requests[0].request_id  # fmt: skip
    scores = [None, TokenLogprobs([ID["b"]], [-2.0], 3)]
    scored = Pooled((1, 2), b"\x00\x00\x80\xbf\x00\x00\x00\xc0")
    piece = core(internal, "", new_prompt_logprobs=scores, prompt_logprobs_start=0)
    first = frontend.step(piece).request_outputs
    one = frontend.step(core(internal, "x", scored=scored)).request_outputs
    two = frontend.step(core(internal, "y", end=FinishReason.LENGTH)).request_outputs
    got = [o.prompt_token_id_logprobs for o in first + one + two]
    told = [None if found is None else found.tolist() for found in got]
    numbers = [[-1.0, -2.0]]
    assert (
        told
        == {
            CUMULATIVE: [None, numbers, numbers], DELTA: [None, numbers, None],
            FINAL_ONLY: [numbers],
        }[kind]
    )  # fmt: skip


# --- several completions ------------------------------------------------------------------------


def children(frontend: Frontend, **fields: Any) -> list[str]:
    return [r.request_id for r in frontend.add(**fields).requests]


def test_deltas_of_several_completions() -> None:
    frontend = Frontend()
    a, b, c = children(frontend, n=3)
    one = frontend.step(core(c, "c1"), core(a, "a1"))
    two = frontend.step(core(b, "b1", end=FinishReason.LENGTH), core(a, "a2"))
    three = frontend.step(core(a, end=FinishReason.STOP), core(c, "c2", end=FinishReason.LENGTH))
    assert texts(one.request_outputs) == [[(0, "a1"), (2, "c1")]]
    assert texts(two.request_outputs) == [[(0, "a2"), (1, "b1")]]
    assert texts(three.request_outputs) == [[(0, ""), (2, "c2")]]
    outputs = [s.request_outputs[0] for s in (one, two, three)]
    assert [o.finished for o in outputs] == [False, False, True]
    assert [c.finish_reason for c in outputs[1].outputs] == [None, "length"]


def test_cumulative_and_final_outputs_hold_all_completions() -> None:
    frontend = Frontend()
    a, b = children(frontend, n=2, output_kind=CUMULATIVE)
    assert texts(frontend.step(core(b, "x")).request_outputs) == [[(0, ""), (1, "x")]]
    done = frontend.step(core(b, "y", end=FinishReason.LENGTH))
    assert texts(done.request_outputs) == [[(0, ""), (1, "xy")]]
    done = frontend.step(core(a, "z", end=FinishReason.LENGTH))
    assert texts(done.request_outputs) == [[(0, "z"), (1, "xy")]]
    assert done.request_outputs[0].finished

    a, b = children(frontend, n=2, output_kind=FINAL_ONLY)
    assert frontend.step(core(b, "x", end=FinishReason.LENGTH)).request_outputs == []
    done = frontend.step(core(a, "z", end=FinishReason.LENGTH))
    assert texts(done.request_outputs) == [[(0, "z"), (1, "x")]]


def test_ended_requests_leave_no_circles() -> None:
    frontend = Frontend()

    def play() -> None:
        a, b = children(frontend, n=2, output_kind=CUMULATIVE)
        frontend.step(core(a, "x", end=FinishReason.LENGTH))
        frontend.step(core(b, "y", end=FinishReason.LENGTH))
        frontend.add("gone")
        frontend.processor.abort("gone")

    play()
    with circles(times=20) as found:
        for _ in range(20):
            play()
        frontend.step()  # until then the last could come back
    assert not found


def test_a_stop_string_ends_only_its_completion() -> None:
    frontend = Frontend()
    a, b = children(frontend, n=2, stop="#")
    done = frontend.step(core(a, "1#"), core(b, "2"))
    assert done.aborts == [a]
    assert not done.request_outputs[0].finished
    last = frontend.step(core(b, "3", end=FinishReason.LENGTH)).request_outputs[0]
    assert last.finished and texts([last]) == [[(1, "3")]]


# --- errors and aborts --------------------------------------------------------------------------


def test_a_failed_completion_brings_its_error() -> None:
    frontend = Frontend()
    a, b = children(frontend, n=2)
    one = frontend.say(a, "", end=FinishReason.ERROR, error="numerical: NaN in logits")
    assert (one.error, one.finished) == ("numerical: NaN in logits", False)
    assert one.outputs[0].finish_reason == "error"
    two = frontend.say(b, "x", end=FinishReason.LENGTH)
    assert (two.error, two.finished) == ("numerical: NaN in logits", True)


def test_an_output_that_breaks_us_ends_only_its_request() -> None:
    frontend = Frontend()
    bad = frontend.add("bad", logprobs=1).requests[0].request_id
    good = frontend.add("good").requests[0].request_id
    broken = [TokenLogprobs([1, 2], [-1.0], 1)]
    done = frontend.step(core(bad, "x", new_logprobs=broken), core(good, "y"))
    assert done.aborts == [bad]
    first, second = done.request_outputs
    assert (first.outputs[0].finish_reason, first.finished) == ("error", True)
    assert first.error is not None and "processed" in first.error
    assert texts([second]) == [[(0, "y")]]
    assert frontend.processor.num_unfinished == 1


def test_abort() -> None:
    frontend = Frontend()
    a, b, c = children(frontend, n=3, stop="####")
    frontend.step(core(a, "aa", end=FinishReason.LENGTH), core(b, "bbbb"))
    frontend.clock.advance(5.0)
    internal, output = frontend.processor.abort("r")
    assert internal == [b, c]
    assert output is not None and output.finished
    # the text held back for the stop string comes with the end
    assert texts([output]) == [[(1, "bbb"), (2, "")]]
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]
    frontend.processor.check_integrity()
    assert frontend.processor.num_unfinished == 0
    late = frontend.step(core(b, "more"))
    assert late.request_outputs == []
    finished = late.iteration.finished
    assert [(f.finish_reason, f.e2e_time) for f in finished] == [("abort", 6.0)] * 2
    assert frontend.processor.abort("r") == ([], None)
    assert frontend.processor.abort("never heard of") == ([], None)


@pytest.mark.parametrize("kind", [CUMULATIVE, FINAL_ONLY])
def test_abort_of_whole_outputs(kind: RequestOutputKind) -> None:
    frontend = Frontend()
    a, b = children(frontend, n=2, output_kind=kind)
    frontend.step(core(a, "a", end=FinishReason.LENGTH), core(b, "b"))
    internal, output = frontend.processor.abort("r")
    assert internal == [b]
    assert output is not None and texts([output]) == [[(0, "a"), (1, "b")]]
    assert [c.finish_reason for c in output.outputs] == ["length", "abort"]


def test_aborts_are_counted_even_when_the_core_is_idle() -> None:
    frontend = Frontend()
    frontend.add()
    frontend.clock.advance(2.0)
    frontend.processor.abort("r")
    (finished,) = frontend.processor.take_stats().finished
    assert finished == FinishedRequestStats(
        finish_reason="abort",
        e2e_time=2.0,
        queue_time=0.0,
        prefill_time=0.0,
        decode_time=0.0,
        inference_time=0.0,
        num_prompt_tokens=3,
        num_generation_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        n=1,
        max_tokens=100,
        request_id="r-00000000",
        longest=0,
        finished_ts=102.0,
    )
    assert frontend.processor.take_stats().finished == []


def test_an_active_id_cannot_be_used_twice() -> None:
    frontend = Frontend()
    first = frontend.add("same").requests[0].request_id
    with pytest.raises(InvalidRequest, match="'same' is in use") as caught:
        frontend.add("same")
    assert caught.value.param == "request_id"
    assert frontend.processor.num_unfinished == 1
    assert frontend.processor.internal_ids("same")
    frontend.say(first, "x", end=FinishReason.LENGTH)
    assert not frontend.processor.internal_ids("same")
    second = frontend.add("same").requests[0].request_id
    assert frontend.step(core(first, "old")).request_outputs == []  # the old one's words
    assert frontend.say(second, "new").outputs[0].text == "new"


# --- timings ------------------------------------------------------------------------------------


def test_timings_and_statistics() -> None:
    frontend = Frontend()  # the request arrives at 100
    internal = frontend.add(prompt="abcd", max_tokens=9).requests[0].request_id
    when = {"queued_ts": 100.5, "scheduled_ts": 101.5, "num_cached_tokens": 3}
    one = frontend.step(core(internal, "ab", **when), after=3.0)  # 103
    later = when | {"scheduled_ts": 104.0, "num_cached_tokens": 0, "num_preemptions": 2}
    two = frontend.step(core(internal, "c", **later), after=4.0)  # 107
    three = frontend.step(core(internal, end=FinishReason.LENGTH, **later), after=1.0)  # 108

    assert (one.iteration.num_prompt_tokens, one.iteration.num_cached_tokens) == (4, 3)
    assert (one.iteration.num_generation_tokens, two.iteration.num_generation_tokens) == (2, 1)
    assert (one.iteration.time_to_first_token, one.iteration.inter_token_latency) == ([3.0], [])
    assert (two.iteration.time_to_first_token, two.iteration.inter_token_latency) == ([], [4.0])
    assert two.iteration.num_prompt_tokens == 0
    assert three.iteration.inter_token_latency == []
    assert three.iteration.finished == [
        FinishedRequestStats(
            finish_reason="length",
            e2e_time=8.0,
            queue_time=1.0,
            prefill_time=1.5,
            decode_time=4.0,
            inference_time=5.5,
            num_prompt_tokens=4,
            num_generation_tokens=3,
            num_cached_tokens=3,
            num_preemptions=2,
            n=1,
            max_tokens=9,
            request_id="r-00000000",
            longest=3,
            finished_ts=108.0,
            first_token_ts=103.0,
        )
    ]
    metrics = three.request_outputs[0].metrics
    assert metrics is not None
    assert dataclasses.astuple(metrics) == (100, 100.5, 101.5, 103, 107, 108, 3, 2)
    assert metrics.first_token_latency == 3.0


def test_a_clock_that_starts_at_zero() -> None:
    """Zero is a time like any other: simulations start there."""
    frontend = Frontend()
    frontend.clock = ManualClock(0.0)
    internal = frontend.add().requests[0].request_id
    one = frontend.step(core(internal, "a"), after=0.0)
    two = frontend.step(core(internal, "b", end=FinishReason.LENGTH), after=2.0)
    assert (one.iteration.time_to_first_token, two.iteration.time_to_first_token) == ([0.0], [])
    assert two.iteration.inter_token_latency == [2.0]
    assert two.iteration.finished[0].decode_time == 2.0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_cached_tokens_of_the_second_tier_are_told_apart(tier: str) -> None:
    frontend = Frontend()
    frontend.processor._second_tier = tier
    a, b = children(frontend, n=2, prompt="abcd")
    done = frontend.step(
        core(a, "x", num_cached_tokens=3, num_promoted_tokens=2),
        core(b, "y", num_cached_tokens=3, num_promoted_tokens=1),
    )
    assert done.iteration.num_cached_tokens == 6
    assert done.iteration.promoted_tokens == {tier: 3}
    after = frontend.step(core(a, "z", num_promoted_tokens=2))
    assert after.iteration.promoted_tokens == {}, "counted once"


def test_each_completion_is_counted() -> None:
    frontend = Frontend()
    a, b = children(frontend, n=2, prompt="abcd")
    done = frontend.step(
        core(a, "x", end=FinishReason.LENGTH),
        core(b, "y", end=FinishReason.LENGTH, num_cached_tokens=2),
    )
    assert done.iteration.num_prompt_tokens == 8
    assert done.iteration.num_cached_tokens == 2
    assert done.iteration.time_to_first_token == [1.0, 1.0]
    assert [f.n for f in done.iteration.finished] == [2, 2]


# --- integrity ----------------------------------------------------------------------------------


def test_integrity_check_sees_leftovers() -> None:
    frontend = Frontend()
    internal = frontend.add().requests[0].request_id
    completion = frontend.processor._completions[internal]
    frontend.say(internal, "x", end=FinishReason.LENGTH)
    frontend.processor._completions[internal] = completion
    with pytest.raises(AssertionError, match="not the running"):
        frontend.processor.check_integrity()

    frontend = Frontend()
    frontend.add()
    frontend.processor._completions.clear()
    with pytest.raises(AssertionError):
        frontend.processor.check_integrity()


words = st.text(alphabet="ab#你🙂", min_size=0, max_size=6)
events = st.lists(st.tuples(st.integers(0, 2), words, st.booleans()), max_size=12)


@given(
    kind=st.sampled_from(list(RequestOutputKind)),
    n=st.integers(1, 3),
    stop=st.sampled_from([None, "#", ["a#", "b"]]),
    steps=st.lists(events, max_size=6),
    abort=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_every_kind_tells_the_same_story(
    kind: RequestOutputKind,
    n: int,
    stop: Any,
    steps: list[list[tuple[int, str, bool]]],
    abort: bool,
) -> None:
    """Whatever the kind and the order, a caller ends up with the completions that a plain
    one-by-one reading of the tokens gives, and nothing is left behind."""
    frontend = Frontend()
    internal = children(frontend, n=n, stop=stop, output_kind=kind)
    fed: list[list[int]] = [[] for _ in internal]
    ended = [False] * n
    received: list[RequestOutput] = []
    for step in steps:
        batch = []
        for child, text, end in step:
            child %= n
            batch.append(core(internal[child], text, end=FinishReason.LENGTH if end else None))
            if not ended[child]:
                fed[child] += ids(text)
                ended[child] = end
        done = frontend.step(*batch)
        received += done.request_outputs
        for i, name in enumerate(internal):
            ended[i] |= name in done.aborts
    if frontend.processor.internal_ids("r"):
        last = frontend.processor.abort("r")[1] if abort else None
        for i, name in enumerate(internal):
            if not abort and not ended[i]:
                received += frontend.step(core(name, end=FinishReason.LENGTH)).request_outputs
        received += [last] if last else []
    frontend.processor.check_integrity()
    assert frontend.processor.num_unfinished == 0
    assert [o.finished for o in received] == [False] * (len(received) - 1) + [True]
    check_story(kind, n, stop, fed, received)


def check_story(
    kind: RequestOutputKind, n: int, stop: Any, fed: list[list[int]], received: list[RequestOutput]
) -> None:
    for index in range(n):
        parts = [c for o in received for c in o.outputs if c.index == index]
        if kind is not DELTA:
            parts = parts[-1:]
        text = "".join(c.text for c in parts)
        tokens = [t for c in parts for t in c.token_ids]
        whole = TOKENIZER.decode(fed[index])
        stops = [stop] if isinstance(stop, str) else stop or []
        cut = min(
            ((whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole), default=None
        )
        assert text == (whole if cut is None else whole[: cut[1]])
        assert tokens == fed[index][: len(tokens)]
        assert parts[-1].finish_reason is not None
        if cut is None:
            assert tokens == fed[index]
        else:
            assert parts[-1].finish_reason == "stop"
            assert TOKENIZER.decode(tokens) == whole[: cut[0]]
