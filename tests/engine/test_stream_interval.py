"""`stream_interval`: how many tokens make an output of a stream due."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.frontend.output_processor import OutputProcessor
from quire.outputs import FinishReason, RequestOutput
from test_output_processor import ALPHABET, CUMULATIVE, DELTA, FINAL_ONLY, TOKENIZER, Frontend, core

LENGTH = FinishReason.LENGTH


def run(frontend: Frontend, internal: str, pieces: list[list[int]]) -> list[RequestOutput]:
    """The outputs of a completion that gets its tokens in these pieces and ends with the last."""
    outputs: list[RequestOutput] = []
    for place, piece in enumerate(pieces):
        end = LENGTH if place == len(pieces) - 1 else None
        scores = [TokenLogprobs([token], [-0.5], 1) for token in piece]
        outputs += frontend.step(
            core(internal, piece, end=end, new_logprobs=scores)
        ).request_outputs
    return outputs


def lengths(outputs: list[RequestOutput]) -> list[int]:
    return [len(output.outputs[0].token_ids) for output in outputs]


def internal_of(frontend: Frontend, **fields: Any) -> str:
    (request,) = frontend.add(max_tokens=1000, prompt=[1, 2], **fields).requests
    return request.request_id


def one_by_one(count: int) -> list[list[int]]:
    return [[i % 90] for i in range(count)]


def test_the_first_token_and_the_end_come_at_once() -> None:
    frontend = Frontend()
    outputs = run(frontend, internal_of(frontend, stream_interval=4, logprobs=0), one_by_one(11))
    assert lengths(outputs) == [1, 4, 4, 2]
    assert [len(output.outputs[0].logprobs or ()) for output in outputs] == [1, 4, 4, 2]
    assert [output.finished for output in outputs] == [False] * 3 + [True]


def test_an_interval_longer_than_the_output() -> None:
    frontend = Frontend()
    outputs = run(frontend, internal_of(frontend, stream_interval=10**6), one_by_one(900))
    assert lengths(outputs) == [1, 899]


def test_whole_outputs_so_far() -> None:
    frontend = Frontend()
    internal = internal_of(frontend, stream_interval=4, output_kind=CUMULATIVE)
    assert lengths(run(frontend, internal, one_by_one(11))) == [1, 5, 9, 11]
    internal = internal_of(frontend, stream_interval=4, output_kind=FINAL_ONLY)
    assert lengths(run(frontend, internal, one_by_one(11))) == [11]


@pytest.mark.parametrize(("own", "server", "expected"), [(2, 3, 3), (3, 2, 3), (None, 3, 3)])
def test_the_longer_of_two_intervals(own: int | None, server: int, expected: int) -> None:
    frontend = Frontend()
    frontend.processor = OutputProcessor(TOKENIZER, frontend.clock, stream_interval=server)
    outputs = run(frontend, internal_of(frontend, stream_interval=own), one_by_one(10))
    assert lengths(outputs) == [1, *[expected] * 3]


@pytest.mark.parametrize("seed", range(30))
def test_joined_outputs_are_the_same_for_any_interval(seed: int) -> None:
    """Tokens, text with characters of several tokens, and log-probabilities; tokens come in pieces
    of any length, and a stop string may hold text back."""
    rng = random.Random(seed)
    tokens = [rng.randrange(len(ALPHABET)) for _ in range(1000)]
    cuts = sorted(rng.sample(range(1, 1000), 700))
    pieces = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, 1000], strict=True)]
    joined = []
    for interval in (1, 2, 7, 100):
        frontend = Frontend()
        internal = internal_of(frontend, stream_interval=interval, logprobs=0, stop=["zzz"])
        choices = [output.outputs[0] for output in run(frontend, internal, pieces)]
        assert interval == 1 or all(len(c.token_ids) >= interval for c in choices[1:-1])
        joined.append(
            (
                "".join(c.text for c in choices),
                [t for c in choices for t in c.token_ids],
                [p for c in choices for p in c.logprobs or ()],
            )
        )
    assert joined[0] == joined[1] == joined[2] == joined[3]


def test_completions_of_a_request_have_intervals_of_their_own() -> None:
    frontend = Frontend()
    done = frontend.add(max_tokens=1000, prompt=[1, 2], stream_interval=3, n=2, temperature=1)
    first, second = (request.request_id for request in done.requests)
    assert len(frontend.step(core(first, [5]), core(second, [6])).request_outputs[0].outputs) == 2
    assert not frontend.step(core(first, [5]), core(second, [6])).request_outputs
    (output,) = frontend.step(core(first, [5, 5]), core(second, [6])).request_outputs
    assert [(c.index, len(c.token_ids)) for c in output.outputs] == [(0, 3)]
    (output,) = frontend.step(core(second, [6], end=LENGTH)).request_outputs
    assert [(c.index, len(c.token_ids)) for c in output.outputs] == [(1, 3)]


def test_an_abort_brings_what_was_held_back() -> None:
    frontend = Frontend()
    internal = internal_of(frontend, stream_interval=8)
    for piece in one_by_one(5):
        frontend.step(core(internal, piece))
    _, output = frontend.processor.abort("r")
    assert output is not None and lengths([output]) == [4]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_steps_that_did_not_happen(seed: int, kind: Any) -> None:
    """A step that is undone takes its output back, whether or not it had brought one; what was
    delivered before is not delivered again."""
    rng = random.Random(seed)
    frontend = Frontend()
    internal = internal_of(frontend, stream_interval=4, output_kind=kind)
    tokens = [rng.randrange(len(ALPHABET)) for _ in range(60)]
    outputs: list[RequestOutput] = []
    done = 0
    while done < len(tokens):
        count = min(rng.choice((1, 1, 1, 2, 5)), len(tokens) - done)
        end = LENGTH if done + count == len(tokens) else None
        step = EngineCoreOutput(internal, tokens[done : done + count], finish_reason=end)
        if rng.random() < 0.4:
            frontend.step(step)
            frontend.processor.rewind({internal: done})
        outputs += frontend.step(step).request_outputs
        done += count
    choices = [output.outputs[0] for output in outputs]
    if kind is CUMULATIVE:
        assert choices[-1].token_ids == tokens
    else:
        assert [t for c in choices for t in c.token_ids] == tokens
        assert "".join(c.text for c in choices) == TOKENIZER.decode(tokens)
    assert all(n >= 4 for n in lengths(outputs)[1:-1])
