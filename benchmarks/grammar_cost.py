"""What grammars cost per token and row, with a vocabulary of 151,936.

    python benchmarks/grammar_cost.py

In microseconds of CPU time:

- `mask`: to make the mask;
- what sampling at temperature 1 takes longer for a row with the grammar than without, for one row,
  and for each of 32: `made` if the mask is made and then the token picked; `asked` if the token is
  picked and the grammar asked about it, where the model wants the token that comes next;
  `filtered`: the same for one row with top-k, top-p, penalties and a bias; `refused` where it wants
  no token that the grammar allows, so that the mask is made after all.

Each token's cost is the smallest of five runs. With tokens learned by BPE, and with those put
together at random, which no tokenizer has: see `structured_outputs.py`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "structured"))

import structured_outputs

from quire.params import SamplingParams, StructuredOutputsParams
from quire.sampling import RequestSampling, Sampler, SamplingMetadata
from quire.structured.compiler import Vocabulary
from quire.structured.params import Grammar
from quire.structured.state import GrammarState
from test_ebnf import EXAMPLES
from vocabularies import large

NAMES: Final = ("JSON in EBNF", "the same with loops", "arithmetic", "SQL")
RUNS: Final = 5
FILTERS: Final[dict[str, Any]] = {
    "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05, "presence_penalty": 0.5,
    "logit_bias": {5: 1.0},
}  # fmt: skip
"""Of the column `filtered`."""
WANTED: Final = 40.0
"""Logit of the token that comes next, where the model wants it; the others' are about 1."""


def cases() -> dict[str, tuple[dict[str, Any], str]]:
    """Forms and a text of each."""
    person = structured_outputs.value(random.Random(0))
    told = json.dumps(person)
    content = {"type": "json_schema", "json_schema": structured_outputs.PERSON}
    begin, end = '<tool_call>\n{"name": "tell", "arguments": ', "}\n</tool_call>"
    tag = {"begin": begin, "content": content, "end": end}
    tags = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}
    story = " ".join(person["story"].split() * 2)
    found: dict[str, tuple[dict[str, Any], str]] = {
        name: ({"grammar": grammar}, text)
        for name, (grammar, text) in zip(NAMES, EXAMPLES, strict=True)
    }
    found["words of a regex"] = {"regex": "[a-z]{1,20}( [a-z]{1,20})*"}, story
    found["free text, then a call"] = (
        {"structural_tag": {"type": "structural_tag", "format": tags}},
        f"I look. {story}\n{begin}{told}{end}",
    )
    found["JSON"] = {"json": structured_outputs.PERSON}, told
    found["JSON, maxLength"] = {"json": structured_outputs.limited(structured_outputs.PERSON)}, told
    return found


def main() -> None:
    """Both vocabularies."""
    torch.set_num_threads(1)
    file = structured_outputs.learned(Path.home() / ".cache/quire-benchmarks/learned.json")
    print("learned tokens")
    of_cases(Vocabulary(file.read_text("utf-8"), structured_outputs.VOCAB_SIZE, [0]))
    print("random tokens")
    of_cases(large())


@dataclass(frozen=True)
class Way:
    """How tokens are sampled, for one column."""

    asked: bool = True
    wanted: bool = True
    num_rows: int = 1
    filters: dict[str, Any] = field(default_factory=dict)


WAYS: Final = {
    "made": Way(asked=False),
    "made of 32": Way(asked=False, num_rows=32),
    "asked": Way(),
    "asked of 32": Way(num_rows=32),
    "filtered": Way(filters=FILTERS),
    "refused": Way(wanted=False),
}


def of_cases(vocabulary: Vocabulary) -> None:
    """A row for each case: mean and median of each column."""
    for name, (form, text) in cases().items():
        grammar = vocabulary.settle(StructuredOutputsParams(**form))
        tokens = vocabulary.tokens.tokenize_str(text)
        costs = {"mask": of_masks(vocabulary, grammar, tokens)}
        for column, way in WAYS.items():
            costs[column] = of_sampling(vocabulary, grammar, tokens, way)
        told = "   ".join(
            f"{column} {statistics.fmean(row):.0f}, {statistics.median(row):.0f}"
            for column, row in costs.items()
        )
        print(f"{name:23} {told}", flush=True)


def of_masks(vocabulary: Vocabulary, grammar: Grammar, tokens: list[int]) -> list[float]:
    """Microseconds of each mask."""
    times: list[list[float]] = [[] for _ in tokens]
    start = vocabulary.compile(grammar)
    for _ in range(RUNS):
        matcher = start.deep_copy()
        for token, taken in zip(tokens, times, strict=True):
            begun = time.thread_time()
            matcher.compute_bitmask()
            taken.append((time.thread_time() - begun) * 1e6)
            assert matcher.consume_token(token), "the text is one of the grammar's"
    return [min(taken) for taken in times]


def of_sampling(
    vocabulary: Vocabulary, grammar: Grammar, tokens: list[int], way: Way
) -> list[float]:
    """Microseconds that sampling each token takes longer with the grammar, for each row; forced
    tokens, which are not sampled, cost what it takes to find them."""
    sampler, size, count = Sampler(), vocabulary.vocab_size, way.num_rows
    logits = torch.randn(32, size)  # a batch, not to stay in the nearest cache
    params = SamplingParams(seed=0, max_tokens=9999, **way.filters)
    free = [RequestSampling.from_params(params, [0], size) for _ in range(count)]
    start = vocabulary.compile(grammar)
    output = np.array(tokens, np.int32)
    costs = np.zeros((RUNS, len(tokens), 3))
    for turn in costs:
        states = [GrammarState(start, vocabulary) for _ in range(count)]
        for state in states:
            state.asked_first = way.asked
        held = [RequestSampling.from_params(params, [0], size, state) for state in states]
        for at, cost in enumerate(turn):
            first = at % (33 - count)
            rows, so_far = logits[first : first + count], [output[:at]] * count
            begun = time.thread_time()
            forced = [state.forces_after(output[:at]) for state in states]
            cost[0] = time.thread_time() - begun
            if not any(forced):
                given = rows.clone()
                given[:, tokens[at]] = WANTED if way.wanted else given[:, tokens[at]]
                _once(sampler, given.clone(), free, so_far)  # both find the rows in the cache
                cost[1] = _once(sampler, given.clone(), held, so_far)
                cost[2] = _once(sampler, given, free, so_far)
    follow, with_it, without = costs.min(0).T * 1e6 / count
    return list(follow + with_it - without)


def _once(
    sampler: Sampler,
    logits: torch.Tensor,
    requests: list[RequestSampling],
    outputs: list[np.ndarray],
) -> float:
    """Seconds that sampling takes."""
    begun = time.thread_time()
    sampler(logits, SamplingMetadata.build(requests, outputs))
    return time.thread_time() - begun


if __name__ == "__main__":
    main()
