"""Whole engines with int8 and int4 weights, the unquantised one being 1; and how far their
distributions are from it.

    python benchmarks/quantised.py --model DIR [--cases 1x16_65,...] [--rounds N] [--json]
    python benchmarks/quantised.py --quality [--model DIR] [--text FILE] [--markdown]

The engines live in one process and take turns, so what else the machine does falls on all of them.
A case is prompts x tokens in _ tokens out; a ratio is the median over rounds. `--quality` needs a
model that means something; it scores a text (by default what the unquantised model itself writes at
temperature 1) under every scheme and type of keys and values, position by position, as `quire eval`
does. `int4, GPTQ` is what `quire quantize` writes, made with other text of the same kind.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from quire import LLM, EngineConfig, SamplingParams
from quire.compress.command import QuantizeOptions, quantize
from quire.config import ModelConfig
from quire.evaluation.compare import compare
from quire.evaluation.scored_model import ScoredModel
from quire.evaluation.windows import Windows, cut

SCHEMES = (None, "int8", "int4")
QUALITY = {
    "int8": {"quantization": "int8"},
    "int4, groups of 32": {"quantization": "int4"},
    "int4, groups of 64": {"quantization": "int4", "quantization_config": {"group_size": 64}},
    "int4, groups of 128": {"quantization": "int4", "quantization_config": {"group_size": 128}},
    "fp8_per_tensor": {"quantization": "fp8_per_tensor"},
    "fp8_per_channel": {"quantization": "fp8_per_channel"},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "mxfp8": {"quantization": "mxfp8"},
    "mxfp4": {"quantization": "mxfp4"},
    "--kv-cache-dtype fp8": {"kv_cache_dtype": "fp8"},
    "--kv-cache-dtype fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "--kv-cache-dtype int8_per_token_head": {"kv_cache_dtype": "int8_per_token_head"},
}
"""What is judged, as options of the engine."""
WRITTEN = {
    "int8, quire quantize": {"scheme": "int8"},
    "int4, GPTQ, groups of 32": {"scheme": "int4", "group": 32},
    "int4, GPTQ, groups of 128": {"scheme": "int4", "group": 128},
    "mixed, budget 0.002": {"budget": 0.002},
}
"""And as `quire quantize` writes it."""
CASES = ("1x16_65", "8x128_128", "32x128_128", "1x512_1")
START = "Once upon a time"


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
    """Scores and bits per weight, by what is judged."""
    with LLM(model) as llm:
        if text is None:
            windows = Windows(own_text(llm), 1)
        else:
            windows = cut(llm.get_tokenizer(), text, 500, 8)
    length = max(map(len, windows.ids))
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ScoredModel(EngineConfig.from_options(model=model), length) as reference,
    ):
        for name, options in QUALITY.items():
            found[name] = judged({"model": model, **options}, windows, length, reference)
        for name, options in WRITTEN.items():
            out = Path(folder) / name.replace(" ", "-")
            given = ModelConfig(model=model)
            quantize(given, QuantizeOptions(out, **options), lambda *_: None)
            found[name] = judged({"model": str(out)}, windows, length, reference)
    return found


def judged(
    options: dict, windows: Windows, length: int, reference: ScoredModel
) -> dict[str, float]:
    """One row."""
    with ScoredModel(EngineConfig.from_options(**options), length) as model:
        scores = compare(windows, model.passes, reference.passes)
        forms = model.forms.values()
        bits = 8 * sum(f.nbytes for f in forms) / sum(f.weights for f in forms)
    return {**scores.to_dict(), "bits_per_weight": bits}


def as_markdown(found: dict[str, dict[str, float]]) -> str:
    """A table."""
    rows = [
        f"| {name} | {row['bits_per_weight']:.1f} | {row['kld']:.5f} | {row['kld_p99']:.3f} | "
        f"{100 * row['same_top']:.1f} % | {row['perplexity']:.4f} |"
        for name, row in found.items()
    ]
    head = ["| | bits per weight | KLD, nats | its 99th percentile | same top token | perplexity |"]
    plain = next(iter(found.values()))
    last = f"| as it was | 16.0 | 0 | 0 | 100 % | {plain['reference_perplexity']:.4f} |"
    return "\n".join([*head, "|---|---:|---:|---:|---:|---:|", *rows, last])


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--text", type=Path, default=None)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.quality:
        text = None if given.text is None else given.text.read_text("utf-8")
        found = quality(given.model, text)
    else:
        found = speed(given.model, given.cases.split(","), given.rounds)
    if given.markdown and given.quality:
        print(as_markdown(found))
        return
    print(json.dumps(found, indent=2) if given.json else "", end="")
    if not given.json and given.quality:
        for scheme, numbers in found.items():
            print(scheme, {name: round(value, 5) for name, value in numbers.items()})


if __name__ == "__main__":
    main()
