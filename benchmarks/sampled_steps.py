"""How much longer a decode step takes whose tokens are sampled than one that takes the likeliest.

    python benchmarks/sampled_steps.py --model DIR [--quantization int4] [--requests 1 8]

One engine takes turns: some steps of greedy requests, then as many of each way to sample, over and
over, so that a machine whose speed changes slows all alike. Printed for each number of requests and
each way: the median milliseconds of a step, and of what it takes longer than the greedy one of the
same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Final

from quire import LLM, SamplingParams
from quire.bench.engine.options import own_options

WAYS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k, top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "and repetition": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    "presence": {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5},
    "greedy, logprobs": {"temperature": 0, "logprobs": 5},
}
"""What clients and the defaults of well-known models send. Logits of random weights are flat: top-p
without top-k keeps tens of thousands of tokens there, where a trained model's keeps a few."""
PROMPT: Final = 128
STEPS: Final = 16
SKIPPED: Final = 2
"""Steps before those that are timed: the prompt's, and the first that is not."""


class Engine:
    """Runs a few steps of requests of one kind."""

    def __init__(self, options: argparse.Namespace) -> None:
        most = max(options.requests)
        llm = LLM(options.model, dtype="bfloat16", max_model_len=PROMPT + STEPS + SKIPPED + 2,
                  max_num_batched_tokens=most * PROMPT, max_num_seqs=most,
                  kv_cache_memory_bytes=options.kv_mib << 20,
                  **own_options(options.quantization))  # fmt: skip
        self._engine = llm.llm_engine

    def seconds(self, requests: int, way: dict[str, Any]) -> float:
        """Of a step, the mean."""
        for number in range(requests):
            params = SamplingParams(
                max_tokens=STEPS + SKIPPED + 1, ignore_eos=True, seed=number, **way
            )
            prompt = [number + 10, *range(100, 99 + PROMPT)]
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for _ in range(SKIPPED):
            self._engine.step()
        start = time.perf_counter()
        for _ in range(STEPS):
            self._engine.step()
        seconds = (time.perf_counter() - start) / STEPS
        while self._engine.has_unfinished_requests:
            self._engine.step()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", default="bf16", help="a format of `quire bench engine`")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kv-mib", type=int, default=256, help="of keys and values")
    options = parser.parse_args()
    engine = Engine(options)
    for requests in options.requests:
        taken: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(options.rounds):
            for name, way in WAYS.items():
                taken[name].append(engine.seconds(requests, way))
        for name, seconds in taken.items():
            longer = [one - greedy for one, greedy in zip(seconds, taken["greedy"], strict=True)]
            of_step, more = (1e3 * statistics.median(x) for x in (seconds, longer))
            print(f"{requests:2} requests, {name:16} {of_step:6.2f} ms a step, {more:+.2f}")


if __name__ == "__main__":
    main()
