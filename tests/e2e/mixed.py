"""A mix of requests that touches every sampling parameter, with prefixes in common."""

from __future__ import annotations

from typing import Any

STORY = "Once upon a time there was a small fox who lived at the edge of the forest. "
LONG = STORY * 6


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """`count` requests as {"prompt", "params"}; params are fields of SamplingParams."""
    return [_request(i) for i in range(count)]


def _request(i: int) -> dict[str, Any]:
    prompts = (
        "The capital of France is",
        STORY + f"One day it met {i} friends and",
        LONG + "The end? No:",
        f"{10 + i} + {20 + i % 7} =",
        "Repeat this text: the quick brown fox jumps over the lazy dog",
        LONG,
    )
    params: dict[str, Any] = {"max_tokens": 6 + i % 11, "ignore_eos": i % 3 == 0}
    params |= KINDS[i % len(KINDS)](i)
    return {"prompt": prompts[i % len(prompts)], "params": params}


KINDS = (
    lambda i: {"temperature": 0.0, "logprobs": 3},
    lambda i: {"temperature": 1.0, "seed": i, "logprobs": 0},
    lambda i: {"temperature": 0.8, "top_p": 0.9, "seed": i},
    lambda i: {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": i, "logprobs": 5},
    lambda i: {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    lambda i: {"temperature": 1.0, "frequency_penalty": 0.7, "seed": 1000 + i, "n": 2},
    lambda i: {"temperature": 0.0, "bad_words": ["the", "Paris"], "logit_bias": {300: 2.5}},
    lambda i: {"temperature": 1.0, "seed": i, "min_tokens": 5, "stop": ["e", "."]},
    lambda i: {"temperature": 0.0, "prompt_logprobs": 2},
    lambda i: {"temperature": 1.0, "seed": i, "allowed_token_ids": list(range(260, 600))},
)


def facts(output: Any) -> list[tuple[Any, ...]]:
    """Everything about a `RequestOutput` that must be the same under any load."""
    return [
        (
            c.index,
            c.text,
            tuple(c.token_ids),
            c.finish_reason,
            c.stop_reason,
            c.cumulative_logprob,
            None if c.logprobs is None else [list(p.items()) for p in c.logprobs],
            output.prompt_logprobs,
        )
        for c in output.outputs
    ]
