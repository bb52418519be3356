"""Outputs that end because they repeat themselves: the rule, against one that looks at everything
again, and what the scheduler makes of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from quire.core.repetition import RepetitionWatch
from quire.core.request import Request
from quire.errors import InvalidRequest
from quire.params import RepetitionDetectionParams, SamplingParams

Make = Callable[..., Any]
LOOP = {"max_pattern_size": 4, "min_count": 3}


def repeats(output: list[int], params: RepetitionDetectionParams) -> bool:
    """The rule as vLLM states it, at the price of looking at everything."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        tail = output[-size * params.min_count :]
        if tail == output[-size:] * params.min_count:
            return True
    return False


def random_output(rng: random.Random, length: int) -> list[int]:
    """Of few tokens, with loops that begin, break off and go on."""
    kinds, output = rng.choice([1, 2, 3, 50]), list[int]()
    while len(output) < length:
        piece = [rng.randrange(kinds) for _ in range(rng.choice([1, 2, 3, 7, 30]))]
        output += piece * rng.choice([1, 1, 2, 3, 9])
        if rng.random() < 0.3:
            output.append(rng.randrange(kinds))
    return output[:length]


@pytest.mark.parametrize("number", range(150))
def test_the_rule_against_one_that_looks_at_everything(number: int) -> None:
    rng = random.Random(number)
    longest = rng.choice([1, 2, 3, 8, 40])
    params = RepetitionDetectionParams(
        longest, rng.choice([0, 1, rng.randint(0, longest)]), rng.choice([2, 2, 3, 5, 20])
    )
    prompt = [rng.randrange(3) for _ in range(rng.choice([0, 1, 10]))]
    output = random_output(rng, 1000 if number < 10 else rng.randint(1, 120))
    watch = RepetitionWatch(params, len(prompt))
    tokens = list(prompt)
    for at, token in enumerate(output, start=1):
        tokens.append(token)
        expected = repeats(output[:at], params)
        assert watch.is_repeating(tokens) == expected, (params, output[:at])
        if rng.random() < 0.1:  # a request that comes back
            watch = RepetitionWatch(params, len(prompt))
        if rng.random() < 0.05:  # a step that is undone, or several
            del tokens[len(tokens) - rng.randint(0, min(3, at)) :]
            tokens += output[len(tokens) - len(prompt) : at]


def test_the_prompt_does_not_count(make: Make) -> None:
    bench = make()
    bench.add("a", [7, 7, 7, 7], max_tokens=9, repetition_detection=LOOP)
    for _ in range(3):
        assert not bench.finished
        bench.step(lambda request: 7)
    assert bench.finished == {"a": "repetition"} and bench.tokens["a"] == [7, 7, 7]


def test_it_ends_at_the_token_that_completes_the_last_pattern(make: Make) -> None:
    bench = make(block_size=8)
    text = [*range(100, 137), *[1, 2, 3] * 5]
    bench.add("a", 5, max_tokens=99, repetition_detection={**LOOP, "min_pattern_size": 2})
    bench.add("plain", 5, max_tokens=44)
    while bench.scheduler.requests:
        outputs = bench.step(lambda request: text[request.num_output_tokens])
        for output in outputs:
            if str(output.finish_reason) == "repetition":
                assert output.stop_reason == "repetition_detected"
    assert bench.finished == {"a": "repetition", "plain": "length"}
    assert bench.tokens["a"] == text[: 37 + 9] and len(bench.tokens["plain"]) == 44


@pytest.mark.parametrize(
    ("more", "reason", "count"),
    [
        ({"min_tokens": 20}, "repetition", 20),
        ({"max_tokens": 3}, "length", 3),
        ({"stop_token_ids": [5]}, "stop", 1),
    ],
)
def test_other_reasons_to_end(make: Make, more: dict[str, Any], reason: str, count: int) -> None:
    bench = make()
    bench.add("a", 5, **{"max_tokens": 99, "repetition_detection": LOOP, **more})
    while bench.scheduler.requests:
        bench.step(lambda request: 5)
    assert bench.finished == {"a": reason} and len(bench.tokens["a"]) == count


def test_a_request_that_comes_back_ends_at_the_same_token(make: Make) -> None:
    bench = make()
    before = [1, 2, 3, 9, 9]
    bench.add("a", 5, max_tokens=99, outputs=before, repetition_detection=LOOP)
    bench.step(lambda request: 9)
    assert bench.finished == {"a": "repetition"}


def test_a_token_takes_as_many_comparisons_as_the_longest_pattern_has_tokens() -> None:
    """The worst output: one token, which a shortest pattern of 600 keeps from ending at once."""
    params = RepetitionDetectionParams(1000, 600, 50)
    watch, tokens, lines = RepetitionWatch(params, 0), [5] * 4000, 0
    watch.is_repeating(tokens)
    tokens.append(5)

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        watch.is_repeating(tokens)
    finally:
        sys.settrace(before)
    assert lines < 10 * 1000, "the work grows with the output, or with min_count"


def test_who_does_not_ask_is_not_watched() -> None:
    plain = Request("a", [1], SamplingParams())
    assert plain.repetitions is None
    assert Request("b", [1], SamplingParams(repetition_detection={})).repetitions is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_pattern_size": 2049, "min_count": 2}, "max_pattern_size .* 0 to 2048, got 2049"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count must be at least 2, got 1"),
        ({"max_pattern_size": 3}, "min_count must be at least 2, got 0"),
        ({"max_pattern_size": 3, "min_pattern_size": 4}, r"at most max_pattern_size \(3\), got 4"),
        ({"max_pattern_size": 1.5}, "max_pattern_size must be an integer from 0 to 2048, got 1.5"),
        ({"size": 3}, "no field 'size'; its fields are max_pattern_size"),
        (5, "an object of its fields, got 5"),
    ],
)  # fmt: skip
def test_bad_values_name_the_limit_and_the_value(given: object, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        SamplingParams(repetition_detection=given)
    assert str(caught.value.param).startswith("repetition_detection")


def test_values_that_ask_for_nothing() -> None:
    for given in (None, {}, RepetitionDetectionParams(), {"max_pattern_size": 0, "min_count": 5}):
        assert SamplingParams(repetition_detection=given).repetition_detection is None
