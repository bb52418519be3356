"""The end of reasoning, forced once its budget is spent."""

from __future__ import annotations

import gc
import random
import sys

import numpy as np
import pytest
import torch

from quire.params import SamplingParams
from quire.sampling.metadata import RequestSampling, SamplingMetadata
from quire.sampling.processors import forced_end
from quire.sampling.sampler import Sampler
from quire.sampling.thinking import ThinkingBudget
from quire.thinking import Thinking

VOCAB = 151_936


def slow(output: list[int], marks: Thinking, budget: int) -> int | None:
    """What must follow, found by reading everything: marks are looked for from left to right, and
    what is not one of them is reasoning or is not."""
    inside, used, start = marks.is_open, 0, 0
    for end in range(1, len(output) + 1):
        mark = marks.closing if inside else marks.opening
        used += inside
        if output[start:end][-len(mark) :] == mark:
            used -= len(mark) if inside else 0
            inside, start = not inside, end
    if not inside or used < budget:
        return None
    written = output[start:]
    for length in range(len(marks.closing) - 1, 0, -1):
        if written[-length:] == marks.closing[:length]:
            return marks.closing[length]
    return marks.closing[0]


@pytest.mark.parametrize("number", range(200))
def test_the_rule_against_one_that_reads_everything(number: int) -> None:
    rng = random.Random(number)
    mark = lambda: [rng.randrange(4) for _ in range(rng.choice([1, 1, 2, 3, 4]))]  # noqa: E731
    marks = Thinking(mark(), mark(), rng.random() < 0.5)
    budget = rng.choice([0, 0, 1, 3, 10, 100])
    state = ThinkingBudget(marks, budget)
    output: list[int] = []
    for _ in range(1000 if number < 10 else rng.randint(1, 120)):
        expected = slow(output, marks, budget)
        assert state.forced(np.array(output, np.int32)) == expected, (marks, budget, output)
        output.append(rng.randrange(5) if expected is None or rng.random() < 0.2 else expected)
        if rng.random() < 0.1:  # a draft was rejected, or a step is undone
            del output[-rng.randint(1, 3) :]
            output.append(rng.randrange(5))


def test_reasoning_has_at_most_its_budget_however_often_it_begins() -> None:
    marks, rng = Thinking([1, 2], [3, 4, 5], True), random.Random(7)
    for budget in (0, 1, 7, 50):
        state, output = ThinkingBudget(marks, budget), list[int]()
        while len(output) < 1000:
            token = state.forced(np.array(output, np.int32))
            output.append(rng.choice([1, 2, 1, 6, 7, 8]) if token is None else token)
        inside, used, at = True, 0, 0
        while at < len(output):
            mark = [3, 4, 5] if inside else [1, 2]
            if output[at : at + len(mark)] == mark:
                inside, at = not inside, at + len(mark)
            else:
                used, at = used + inside, at + 1
        assert used <= budget + 2, "only an end that has begun may stand beside it"


def request(**fields: object) -> RequestSampling:
    given = {"seed": 5, "thinking_token_budget": 3, "thinking": Thinking([1], [2], True)}
    return RequestSampling.from_params(SamplingParams(**given | fields), [9], VOCAB)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"allowed_token_ids": [7, 8]},
        {"bad_words_token_ids": [[2]]},
        {"logit_bias": {2: -100.0}},
        {"stop_token_ids": [2], "min_tokens": 9, "top_k": 1, "min_p": 0.9, "temperature": 2.0},
        {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    ],
)
def test_nothing_else_can_be_sampled_whatever_is_banned(fields: dict[str, object]) -> None:
    plain = RequestSampling.from_params(SamplingParams(seed=5), [9], VOCAB)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    outputs = [np.array(o, np.int32) for o in ([7, 7, 7], [7, 7], [2, 2, 2], [7, 7, 7])]
    rows = [request(**fields), request(**fields), request(**fields), plain]
    got = Sampler()(logits.clone(), SamplingMetadata.build(rows, outputs))
    assert not got.failed
    assert got.token_ids[0] == 2, "three tokens of reasoning"
    others = [RequestSampling.from_params(
        SamplingParams(seed=5, **fields), [9], VOCAB)] * 3 + [plain]  # fmt: skip
    free = Sampler()(logits.clone(), SamplingMetadata.build(others, outputs))
    assert got.token_ids[1:] == free.token_ids[1:], "others get what they would get without"


class OnlySeven:
    """A grammar that wants 7."""

    def allowed(self, output: np.ndarray) -> np.ndarray:
        mask = np.zeros(-(-VOCAB // 32), np.int32)
        mask[0] = 1 << 7
        return mask


def test_a_grammar_comes_before_the_budget() -> None:
    given = SamplingParams(seed=5, thinking_token_budget=0, thinking=Thinking([1], [2], True))
    held = RequestSampling.from_params(given, [9], VOCAB, OnlySeven())
    assert forced_end(held, np.zeros(0, np.int32)) is None
    logits = torch.zeros(1, VOCAB)
    got = Sampler()(logits, SamplingMetadata.build([held], [np.zeros(0, np.int32)]))
    assert got.token_ids == [7] and not got.failed


def test_a_token_costs_the_same_however_long_the_output() -> None:
    state, calls = ThinkingBudget(Thinking([1], [2], True), 10**6), 0
    output = np.full(4001, 7, np.int32)
    state.forced(output[:4000])

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal calls
        calls += 1
        return count

    before = sys.gettrace()
    gc.disable()  # what is collected meanwhile may call functions, too
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        state.forced(output)
    finally:
        sys.settrace(before)
        gc.enable()
    assert calls < 60


def test_who_has_no_budget_needs_no_step() -> None:
    assert (
        "thinking_budget"
        not in RequestSampling.from_params(SamplingParams(seed=1), [9], VOCAB).active
    )
