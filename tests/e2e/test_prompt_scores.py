"""Tokens that a request names are scored in its prompt: the same numbers through `LLM` and HTTP,
alone, in a crowd, in chunks, after a prefix hit, preempted, and after kill -9 of the core."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from routes_server import RoutesServer
from thinking_model import core

PATH = "/inference/v1/generate"
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "block_size": 16}

SMALL = {
    "num_gpu_blocks_override": 130, "scheduler_reserve_full_isl": False,
    "max_num_batched_tokens": 256, "long_prefill_token_threshold": 32,
}  # fmt: skip
"""Room for less than all prompts, which come in side by side."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[RoutesServer]:
    with asyncio.Runner() as runner:
        made = RoutesServer(runner, OPTIONS | {"max_num_batched_tokens": 48, "max_num_seqs": 8})
        yield made
        made.close()


def prompts() -> list[list[int]]:
    """They share beginnings, and the first is long."""
    rng = random.Random(7)
    head = [rng.randrange(300, 2000) for _ in range(300)]
    made = [[*head[: 40 * i], *(rng.randrange(300, 2000) for _ in range(30))] for i in range(8)]
    return [[*head, *(rng.randrange(300, 2000) for _ in range(1100))], *made]


def asked(prompt: list[int], seed: int, **fields: Any) -> SamplingParams:
    """Candidates for the end of a prompt, in rows of different lengths."""
    rng = random.Random(seed)
    start = rng.randrange(len(prompt) - 2)
    rows = [[rng.randrange(-1, 2048) for _ in range(rng.randrange(5))] for _ in prompt[start + 1 :]]
    rows[0] = [prompt[start + 1], -1, 5]
    return SamplingParams(
        max_tokens=150, seed=seed, ignore_eos=True, prompt_logprob_token_ids=rows,
        prompt_logprob_start=start, **fields,
    )  # fmt: skip


def scores(llm: LLM, ids: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
    found = []
    for output in outputs:
        numbers = output.prompt_token_id_logprobs
        assert numbers is not None and numbers.dtype == np.float32
        found.append((numbers.shape, numbers.tobytes(), output.outputs[0].token_ids))
    return found


def test_they_are_the_logprobs_of_the_prompt(llm: LLM) -> None:
    """Of its own tokens and of the likeliest, which `prompt_logprobs` gives."""
    prompt = prompts()[5]
    plain = SamplingParams(max_tokens=1, prompt_logprobs=3)
    (known,) = llm.generate({"prompt_token_ids": prompt}, plain, use_tqdm=False)
    assert known.prompt_logprobs is not None
    positions = [position for position in known.prompt_logprobs[11:] if position]
    assert len(positions) == len(prompt) - 11
    width = max(map(len, positions))
    rows = np.array([[*p, *[-1] * (width - len(p))] for p in positions])
    params = SamplingParams(
        max_tokens=1, prompt_logprob_token_ids=rows, prompt_logprob_start=10, n=2, temperature=1
    )
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    expected = [
        [*(entry.logprob for entry in p.values()), *[-np.inf] * (width - len(p))] for p in positions
    ]
    assert output.num_cached_tokens == 10, "the cache may have what comes before"
    assert output.prompt_token_id_logprobs is not None
    assert output.prompt_token_id_logprobs.tolist() == expected


def test_the_same_numbers_alone_in_a_crowd_in_chunks_and_preempted(llm: LLM) -> None:
    ids = prompts()
    params = [asked(p, i) for i, p in enumerate(ids)]
    alone = [scores(llm, [p], [one])[0] for p, one in zip(ids, params, strict=True)]
    assert scores(llm, ids, params) == alone, "their beginnings are in the cache now"
    for options in (
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        SMALL | {"preemption_mode": "recompute"},
        SMALL | {"preemption_mode": "swap", "swap_space": 0.02},
    ):
        with LLM(**OPTIONS, **options, disable_log_stats=False) as other:
            assert scores(other, ids, params) == alone, options
            preempted = sum(
                metric.value for metric in other.get_metrics()
                if metric.name == "vllm:num_preemptions"
            )  # fmt: skip
            assert (preempted > 0) == ("preemption_mode" in options)


def test_tokens_in_and_out(server: RoutesServer, llm: LLM) -> None:
    prompt = prompts()[3]
    params = asked(prompt, 3, prompt_logprobs=1)
    ((shape, data, tokens),) = scores(llm, [prompt], [params])
    fields: dict[str, Any] = {
        name: getattr(params, name)
        for name in ("max_tokens", "seed", "ignore_eos", "prompt_logprobs",
                     "prompt_logprob_token_ids", "prompt_logprob_start")
    }  # fmt: skip
    body = {"token_ids": prompt, "sampling_params": fields}
    reply = server.ask(PATH, body)
    found = np.load(io.BytesIO(base64.b64decode(reply["prompt_token_id_logprobs"])))
    assert (found.shape, found.tobytes()) == (shape, data)
    assert reply["choices"][0]["token_ids"] == tokens
    told = reply["prompt_logprobs"]
    assert told[0] is None and len(told) == len(prompt)
    less = fields | {"prompt_logprob_token_ids": None, "prompt_logprob_start": None}
    chunks = server.stream(PATH, {"token_ids": prompt, "sampling_params": less})
    assert [c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c] == [told]
    start = fields["prompt_logprob_start"]
    assert found[0, 0] == np.float32(told[start + 1][str(prompt[start + 1])]["logprob"])
    error = server.ask(PATH, body | {"stream": True}, 400)["error"]
    assert error["param"] == "stream"
    fields["prompt_logprob_start"] += 1
    error = server.ask(PATH, body, 400)["error"]
    assert error["param"] == "sampling_params.prompt_logprob_token_ids"
    assert "rows" in error["message"]
    for route, own in (("/v1/completions", {"prompt": prompt}), ("/v1/chat/completions",
                       {"messages": [{"role": "user", "content": "x"}]})):  # fmt: skip
        error = server.ask(route, own | {"prompt_logprob_token_ids": [[1]]}, 400)["error"]
        assert error["param"] == "prompt_logprob_token_ids", "as in vLLM, not of OpenAI's routes"


def test_kill_9_of_the_core(server: RoutesServer, llm: LLM) -> None:
    """While the prompt is computed, most likely, and after it."""
    prompt = prompts()[0]
    params = asked(prompt, 8).replace(max_tokens=220)
    ((shape, data, tokens),) = scores(llm, [prompt], [params])

    async def run() -> Any:
        stream = server.engine.generate(
            {"prompt_token_ids": prompt}, params, f"killed-{os.getpid()}"
        )
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.02)
        core().send_signal(signal.SIGKILL)
        output, killed = await first, False
        async for output in stream:
            if not killed and len(output.outputs[0].token_ids) > 100:
                core().send_signal(signal.SIGKILL)
                killed = True
        return output

    output = server.run(run())
    found = output.prompt_token_id_logprobs
    assert (found.shape, found.tobytes(), output.outputs[0].token_ids) == (shape, data, tokens)
