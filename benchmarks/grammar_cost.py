"""What the masks of grammars with `::=` cost per token and row, with a vocabulary of 151,936.

python benchmarks/grammar_cost.py

With tokens learned by BPE, and with those put together at random, which no tokenizer has: see
`structured_outputs.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "structured"))

import structured_outputs

from quire.params import StructuredOutputsParams
from quire.structured.compiler import Vocabulary
from test_ebnf import EXAMPLES
from vocabularies import large

NAMES = ("JSON", "JSON, with loops", "arithmetic", "SQL")


def main() -> None:
    """Both vocabularies."""
    file = structured_outputs.learned(Path.home() / ".cache/quire-benchmarks/learned.json")
    print("learned tokens")
    of_examples(Vocabulary(file.read_text("utf-8"), structured_outputs.VOCAB_SIZE, [0]))
    print("random tokens")
    of_examples(large())


def of_examples(vocabulary: Vocabulary) -> None:
    """Each example five times; of each mask the fastest."""
    for name, (grammar, text) in zip(NAMES, EXAMPLES, strict=True):
        settled = vocabulary.settle(StructuredOutputsParams(grammar=grammar))
        tokens = vocabulary.tokens.tokenize_str(text)
        times: list[list[float]] = [[] for _ in tokens]
        begun = time.perf_counter()
        start = vocabulary.compile(settled)
        compiled = time.perf_counter() - begun
        for _ in range(5):
            matcher = start.deep_copy()
            for token, taken in zip(tokens, times, strict=True):
                begun = time.thread_time()
                matcher.compute_bitmask()
                taken.append(time.thread_time() - begun)
                matcher.consume_token(token)
        best = [min(taken) * 1e6 for taken in times]
        print(
            f"{name:17} compiled in {compiled * 1e3:5.1f} ms; mask: {statistics.fmean(best):6.1f}"
            f" us mean, {statistics.median(best):6.1f} median, {max(best):7.1f} at most"
        )


if __name__ == "__main__":
    main()
