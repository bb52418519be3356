"""What grammars whose masks take long cost per token and row, with a vocabulary of 151,936.

    python benchmarks/grammar_cost.py

Grammars with `::=`, regular expressions, calls of strict tools, and JSON with limited strings, in
microseconds of CPU time:

- `mask`: to make the mask;
- what sampling one row at temperature 1 takes longer with the grammar than without: `made` if the
  mask is made and then the token picked; `asked` if the token is picked and the grammar asked about
  it, where the model wants the token that comes next; `refused` where it wants none that the
  grammar allows, so that the mask is made after all.

Each token's cost is the smallest of five runs. With tokens learned by BPE, and with those put
together at random, which no tokenizer has: see `structured_outputs.py`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
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


def of_cases(vocabulary: Vocabulary) -> None:
    """A row for each case: mean and median of each column."""
    for name, (form, text) in cases().items():
        grammar = vocabulary.settle(StructuredOutputsParams(**form))
        tokens = vocabulary.tokens.tokenize_str(text)
        costs = {
            "mask": of_masks(vocabulary, grammar, tokens),
            "made": of_sampling(vocabulary, grammar, tokens, asked=False, wanted=True),
            "asked": of_sampling(vocabulary, grammar, tokens, asked=True, wanted=True),
            "refused": of_sampling(vocabulary, grammar, tokens, asked=True, wanted=False),
        }
        told = "   ".join(
            f"{column} {statistics.fmean(row):6.1f}, {statistics.median(row):6.1f}"
            for column, row in costs.items()
        )
        print(
            f"{name:23} {'asks first' if grammar.is_costly else 'makes it':10} {told}", flush=True
        )


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
    vocabulary: Vocabulary, grammar: Grammar, tokens: list[int], *, asked: bool, wanted: bool
) -> list[float]:
    """Microseconds that sampling each token takes longer with the grammar; forced tokens, which are
    not sampled, cost what it takes to find them."""
    sampler, size = Sampler(), vocabulary.vocab_size
    logits = torch.randn(32, size)  # a batch, not to stay in the nearest cache
    params = SamplingParams(seed=0, max_tokens=9999)
    free = RequestSampling.from_params(params, [], size)
    start = vocabulary.compile(grammar)
    output = np.array(tokens, np.int32)
    costs = np.zeros((RUNS, len(tokens), 3))
    for turn in costs:
        state = GrammarState(start, vocabulary, is_costly=asked)
        held = RequestSampling.from_params(params, [], size, state)
        for at, cost in enumerate(turn):
            row, so_far = logits[at % 32 : at % 32 + 1], output[:at]
            begun = time.thread_time()
            forced = state.forces_after(so_far)
            cost[0] = time.thread_time() - begun
            if not forced:
                before = float(row[0, tokens[at]])
                row[0, tokens[at]] = WANTED if wanted else before
                _once(sampler, row, free, so_far)  # both find the row in the cache
                cost[1] = _once(sampler, row, held, so_far)
                cost[2] = _once(sampler, row, free, so_far)
                row[0, tokens[at]] = before
    follow, with_it, without = costs.min(0).T * 1e6
    return list(follow + with_it - without)


def _once(
    sampler: Sampler, row: torch.Tensor, request: RequestSampling, output: np.ndarray
) -> float:
    """Seconds that sampling takes."""
    begun = time.thread_time()
    sampler(row, SamplingMetadata.build([request], [output]))
    return time.thread_time() - begun


if __name__ == "__main__":
    main()
