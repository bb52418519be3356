"""Prompts that come again: `quire bench prefix-caching` and `quire bench long-document-qa`.

Both run the repeated prompts once on a warm engine and tell the time and how many prompt tokens
were found in the cache. The orders of repetition are those of vLLM's scripts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from quire.bench.offline.drive import DriveOutcome, Job, random_prompts
from quire.bench.offline.options import LongDocumentOptions, PrefixCachingOptions
from quire.bench.result import summary
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.workload.request import WorkloadRequest

T = TypeVar("T")


def repeated(items: Sequence[T], count: int, mode: str, seed: int) -> list[T]:
    """Each item `count` times: `tile` (1 2 1 2), `interleave` (1 1 2 2) or `random`."""
    if mode == "interleave":
        return [item for item in items for _ in range(count)]
    found = list(items) * count
    if mode == "random":
        random.Random(seed).shuffle(found)
    return found


def prefix_jobs(
    options: PrefixCachingOptions, vocab_size: int, requests: Sequence[WorkloadRequest] = ()
) -> list[Job]:
    """Random prompts with a prefix in common, or those of a file; each `repeat_count` times.

    Args:
        options: How many and how long.
        vocab_size: Of random ids.
        requests: Of the file; those outside the range of lengths are left out.

    Raises:
        ConfigError: no request of the file has a length in the range.
    """
    rng = np.random.default_rng(options.seed)
    low, high = options.lengths
    if requests:
        kept = [request for request in requests if low <= request.prompt_len <= high]
        if not kept:
            raise ConfigError(
                f"--dataset-path: no prompt has {low} to {high} tokens (--input-length-range)"
            )
        found = [(r.prompt, r.prompt_len) for r in kept[: options.num_prompts]]
    else:
        prefix = random_prompts(1, options.prefix_len, vocab_size, rng)[0]
        lengths = rng.integers(low, high + 1, options.num_prompts) - options.prefix_len
        ids = [[*prefix, *random_prompts(1, int(n), vocab_size, rng)[0]] for n in lengths]
        found = [(one, len(one)) for one in ids]
    if options.sort:
        found.sort(key=lambda one: one[1])
    mode = "tile" if options.sort else "random"
    return _jobs(
        repeated(found, options.repeat_count, mode, options.seed),
        options.output_len, not options.disable_detokenize,
    )  # fmt: skip


def document_jobs(options: LongDocumentOptions, vocab_size: int) -> list[Job]:
    """Random documents, each of its own from the first token on, in the order asked for."""
    rng = np.random.default_rng(options.shuffle_seed)
    length = options.document_length
    documents = [
        (d, length) for d in random_prompts(options.num_documents, length, vocab_size, rng)
    ]
    order = repeated(documents, options.repeat_count, options.repeat_mode, options.shuffle_seed)
    return _jobs(order, options.output_len, not options.disable_detokenize)


def _jobs(prompts: Sequence[tuple[Any, int]], output_len: int, detokenize: bool) -> list[Job]:
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=output_len, detokenize=detokenize
    )
    return [Job(prompt, params, prompt_len=length) for prompt, length in prompts]


def cache_result(outcome: DriveOutcome) -> dict[str, Any]:
    """The figures of `bench serve`, and of prompt tokens how many were looked up and found."""
    asked = sum(step.prefix_queries for step in outcome.steps)
    found = sum(step.prefix_hits for step in outcome.steps)
    return {
        "elapsed_time": outcome.duration,
        "num_requests": len(outcome.records),
        "prefix_queries": asked,
        "prefix_hits": found,
        "prefix_hit_rate": found / asked if asked else 0.0,
        **summary(outcome.records, outcome.duration),
    }


def cache_text(result: dict[str, Any], first_line: str) -> str:
    """What both commands print; the first line is that of vLLM's script."""
    return (
        f"{first_line}\n"
        f"Requests: {result['num_requests']}, failed: {result['failed']}, "
        f"{result['total_input_tokens']} prompt tokens\n"
        f"Prefix cache: {result['prefix_hits']} of {result['prefix_queries']} prompt tokens found "
        f"({result['prefix_hit_rate']:.1%})\n"
        f"Throughput: {result['request_throughput']:.2f} requests/s, "
        f"{result['total_token_throughput']:.2f} total tokens/s; mean TTFT "
        f"{result['mean_ttft_ms']:.2f} ms"
    )
