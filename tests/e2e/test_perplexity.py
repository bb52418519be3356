"""Native kernels in the model's own type say of a text what plain torch says in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.kernels import compiled
from quire.kernels.dispatch import ops, select

pytestmark = pytest.mark.skipif(compiled.lib is None, reason="the native kernels are not built")
PROMPTS = [
    "Once upon a time", "The capital of France is", "What is 23 + 45?", "Hello", "One day a fox",
    "The capital of Japan is", "There was a little girl who", "What is 7 + 12?",
]  # fmt: skip
LIMIT = 1e-3
"""Of the perplexity, relative."""


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    before = ops.name
    yield
    select(before)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Generated: at temperature 1 the model's own distribution, so a perplexity worth comparing."""
    select("native")
    with LLM() as llm:
        params = [
            SamplingParams(temperature=1, seed=i, max_tokens=300, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]


def perplexity(texts: list[list[int]], kernels: str, dtype: str) -> float:
    select(kernels)
    prompts = [{"prompt_token_ids": ids} for ids in texts]
    with LLM(dtype=dtype) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
    found = [
        entry[token].logprob
        for output, ids in zip(outputs, texts, strict=True)
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert len(found) > 2000
    return math.exp(-sum(found) / len(found))


@pytest.fixture(scope="module")
def plain(texts: list[list[int]]) -> float:
    return perplexity(texts, "reference", "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_perplexity_is_that_of_plain_torch(
    texts: list[list[int]], plain: float, dtype: str
) -> None:
    native = perplexity(texts, "native", dtype)
    assert 1.2 < plain < 50, "a text that says nothing compares nothing"
    assert abs(native / plain - 1) < LIMIT, (dtype, native, plain)
