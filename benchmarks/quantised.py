"""Whole engines with int8 and int4 weights, the unquantised one being 1; and how far their
distributions are from it.

    python benchmarks/quantised.py --model DIR [--cases 1x16_65,...] [--rounds N] [--json]
    python benchmarks/quantised.py --quality [--model DIR] [--text FILE]

The engines live in one process and take turns, so what else the machine does falls on all of them.
A case is prompts x tokens in _ tokens out; a ratio is the median over rounds. `--quality` needs a
model that means something; it scores a text (by default what the unquantised model itself writes at
temperature 1) position by position: KLD is the mean of KL(unquantised || quantised) in nats over
the 20 likeliest tokens and the rest as one, `same_top` how often both hold the same token for the
likeliest.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path

from quire import LLM, SamplingParams

SCHEMES = (None, "int8", "int4")
CASES = ("1x16_65", "8x128_128", "32x128_128", "1x512_1")
START = "Once upon a time"
TOP = 20


def one(llm: LLM, case: str, seed: int) -> float:
    """Seconds of a case."""
    shape, out = case.split("_")
    prompts, length = map(int, shape.split("x"))
    rng = random.Random(seed)
    given = [
        {"prompt_token_ids": [rng.randrange(3, 2000) for _ in range(length)]}
        for _ in range(prompts)
    ]
    params = SamplingParams(temperature=0, max_tokens=int(out), ignore_eos=True)
    start = time.perf_counter()
    llm.generate(given, params, use_tqdm=False)
    return time.perf_counter() - start


def speed(model: str, cases: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """How many times as fast as the unquantised engine, by case and scheme."""
    how = {
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 2048,
    }
    engines = {scheme: LLM(model, quantization=scheme, **how) for scheme in SCHEMES}
    found = {}
    for case in cases:
        taken: dict[str | None, list[float]] = {scheme: [] for scheme in SCHEMES}
        for turn in range(rounds + 1):
            for scheme, llm in engines.items():
                seconds = one(llm, case, turn)
                if turn:  # the first warms up
                    taken[scheme].append(seconds)
        plain = taken[None]
        found[case] = {"seconds": statistics.median(plain)} | {
            scheme: statistics.median(a / b for a, b in zip(plain, taken[scheme], strict=True))
            for scheme in SCHEMES
            if scheme is not None
        }
        print(case, {name: round(value, 3) for name, value in found[case].items()}, flush=True)
    return found


def own_text(llm: LLM) -> list[list[int]]:
    """What the model writes, as ids."""
    params = [SamplingParams(temperature=1, seed=i, max_tokens=250) for i in range(24)]
    outputs = llm.generate([START] * len(params), params, use_tqdm=False)
    return [list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in outputs]


def quality(model: str, text: str | None) -> dict[str, dict[str, float]]:
    """KLD and the share of the same likeliest token, by scheme."""
    scores, pieces = {}, []
    for scheme in SCHEMES:
        with LLM(model, quantization=scheme, max_logprobs=TOP, enable_prefix_caching=False) as llm:
            if not pieces and text is None:
                pieces = own_text(llm)
            elif not pieces:
                ids = llm.get_tokenizer().encode(text)[:4000]
                pieces = [ids[i : i + 500] for i in range(0, len(ids), 500)]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP)
            given = [{"prompt_token_ids": piece} for piece in pieces]
            outputs = llm.generate(given, params, use_tqdm=False)
            scores[scheme] = [place for o in outputs for place in o.prompt_logprobs[1:]]
    found = {}
    for scheme in SCHEMES[1:]:
        pairs = list(zip(scores[None], scores[scheme], strict=True))
        found[scheme] = {
            "kld": statistics.fmean(_divergence(a, b) for a, b in pairs),
            "same_top": statistics.fmean(_top(a) == _top(b) for a, b in pairs),
            "positions": len(pairs),
        }
    return found


def _top(place: dict) -> int:
    return min(place, key=lambda token: place[token].rank)


def _divergence(plain: dict, other: dict) -> float:
    """Over the tokens that both name, and all others as one."""
    both = [t for t in plain if t in other]
    p = [math.exp(plain[t].logprob) for t in both]
    q = [math.exp(other[t].logprob) for t in both]
    p.append(max(1e-9, 1 - sum(p)))
    q.append(max(1e-9, 1 - sum(q)))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--text", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.quality:
        text = None if given.text is None else given.text.read_text("utf-8")
        found = quality(given.model, text)
    else:
        found = speed(given.model, given.cases.split(","), given.rounds)
    print(json.dumps(found, indent=2) if given.json else "", end="")
    if not given.json and given.quality:
        for scheme, numbers in found.items():
            print(scheme, {name: round(value, 5) for name, value in numbers.items()})


if __name__ == "__main__":
    main()
