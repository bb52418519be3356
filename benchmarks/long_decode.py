"""How much faster a whole engine decodes long contexts with a smaller KV cache.

    python benchmarks/long_decode.py --model DIR [--requests 16] [--context 8192]
        [--kinds auto,fp8,int8_per_token_head] [--quantization int8] [--rounds N]

One engine for each type of keys and values, all in this process; they take turns, a few steps each.
Prompts are not computed: the cache is filled with numbers, so a case of a quarter of an hour begins
at once. What is timed are whole steps, scheduler and sampling included. Prints the medians and how
many times as fast as with the first type.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from kv_types import fill

from quire import LLM, SamplingParams
from quire.kernels.cache_tensors import KVCache
from quire.worker.forward_pass import PagedForward

STEPS = 4
"""Of one engine before it is another's turn."""


def skip_prompts() -> list[KVCache]:
    """From now on steps with prompts compute nothing, in any engine of this process; gives the
    caches of the one that ran last."""
    forward, found = PagedForward.__call__, []

    def called(self: Any, inputs: Any, every_token: bool) -> torch.Tensor:
        found[:] = self._kv_caches
        if len(inputs.input_ids) == len(inputs.seq_lens):
            return forward(self, inputs, every_token)
        width = self._model.shape.hidden_size
        return torch.zeros(len(inputs.wanted), width, dtype=self._model.dtype)

    PagedForward.__call__ = called
    return found


class Engine:
    """One that decodes requests of so long a context."""

    def __init__(self, options: argparse.Namespace, kind: str, caches: list[KVCache]) -> None:
        steps = 2 + STEPS * options.rounds
        length = options.context + steps
        self._llm = LLM(
            options.model, kv_cache_dtype=kind, max_model_len=length + 1,
            max_num_seqs=options.requests, max_num_batched_tokens=options.context * 2,
            num_gpu_blocks_override=1 + options.requests * -(-length // 16), block_size=16,
            enable_prefix_caching=False, enable_chunked_prefill=True,
            quantization=options.quantization,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        for number in range(options.requests):
            tokens = [3 + (number + i) % 1000 for i in range(options.context - 1)]
            self._llm.llm_engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
        core = self._llm.llm_engine.core
        while any(
            r.num_computed_tokens < options.context - 1 for r in core.scheduler.requests.values()
        ):
            self.step()
        for cache in caches:
            fill(cache.key)
            fill(cache.value)
        self.step()

    def step(self) -> None:
        self._llm.llm_engine.step()

    def timed(self) -> float:
        """Seconds of a step, the mean of a few."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        return (time.perf_counter() - start) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kinds", default="auto,fp8,int8_per_token_head")
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    caches = skip_prompts()
    kinds = options.kinds.split(",")
    engines = {kind: Engine(options, kind, caches) for kind in kinds}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind in kinds[:: -1 if number % 2 else 1]:
            taken[kind].append(engines[kind].timed())
    weights = options.quantization or "the model's type"
    print(f"{options.requests} requests of {options.context} tokens, weights in {weights}")
    for kind, seconds in taken.items():
        ratios = sorted(a / b for a, b in zip(taken[kinds[0]], seconds, strict=True))
        print(
            f"{kind:20} {1e3 * statistics.median(seconds):8.1f} ms a step  "
            f"{options.requests / statistics.median(seconds):7.1f} tokens/s  "
            f"{statistics.median(ratios):5.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
