"""What structured outputs cost.

First the mask: time to make it and to apply it, per token and row, with a vocabulary of 151,936
over texts of JSON. Then a batch of 32 with the embedded model: tokens per second of JSON, and of
free text with the same sampling.

    python benchmarks/structured_outputs.py
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "structured"))

from quire import LLM, SamplingParams
from quire.sampling.masks import addends
from vocabularies import large, state

WORDS = ["small", "fox", "who", "lived", "edge", "forest", "met", "old", "owl", "asked", "river"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "story": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["mammal", "bird", "fish"]},
    },
    "required": ["name", "story", "age", "tags", "kind"],
    "additionalProperties": False,
}


def value(rng: random.Random) -> dict[str, Any]:
    """A value of the schema."""
    return {
        "name": " ".join(rng.choices(WORDS, k=2)),
        "story": " ".join(rng.choices(WORDS, k=40)),
        "age": rng.randint(1, 99),
        "tags": rng.choices(WORDS, k=4),
        "kind": "bird",
    }


def mask_cost() -> None:
    """Make and apply the mask at every token of 20 texts."""
    vocabulary = large()
    logits, rng = torch.randn(vocabulary.vocab_size), random.Random(0)
    make, apply = [], []
    for _ in range(20):
        tokens = vocabulary.tokens.tokenize_str(json.dumps(value(rng)))
        found = state(vocabulary, forces=False, json=SCHEMA)
        output = np.array(tokens, np.int32)
        for i in range(len(tokens)):
            begun = time.perf_counter()
            words = found.allowed(output[:i])
            made = time.perf_counter()
            logits.add_(torch.from_numpy(addends(words, vocabulary.vocab_size)))
            apply.append(time.perf_counter() - made)
            make.append(made - begun)
            logits.normal_()
    for name, times in (("make", make), ("apply", apply)):
        mean, median = statistics.fmean(times) * 1e6, statistics.median(times) * 1e6
        print(f"{name:6} {mean:7.1f} us mean  {median:7.1f} us median")
    print(f"both   {statistics.fmean(make) * 1e6 + statistics.fmean(apply) * 1e6:7.1f} us mean")


def throughput() -> None:
    """32 requests at once, JSON and free text by turns, the best of three each."""
    wish = {"temperature": 1.0, "max_tokens": 200, "ignore_eos": True}
    best = {"free": 0.0, "json": 0.0}
    with LLM() as llm:
        for turn in range(4):
            for kind in best:
                form = {"json": SCHEMA} if kind == "json" else None
                params = [
                    SamplingParams(**wish, seed=i, structured_outputs=form) for i in range(32)
                ]
                begun = time.perf_counter()
                outputs = llm.generate(["Once upon a time"] * 32, params, use_tqdm=False)
                rate = sum(len(o.outputs[0].token_ids) for o in outputs)
                rate /= time.perf_counter() - begun
                if turn:
                    best[kind] = max(best[kind], rate)
    ratio = best["json"] / best["free"]
    print(f"free {best['free']:.0f} tokens/s, JSON {best['json']:.0f} tokens/s: {ratio:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    mask_cost()
    throughput()
