"""64 mixed requests at once over HTTP: all finish, as alone, and every KV block is free after."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from live_server import Server, serving
from mixed import mixed_requests
from patience import PATIENCE
from quire import CompletionOutput, RequestOutput

REQUESTS = mixed_requests(64)


def body(request: dict[str, Any]) -> dict[str, Any]:
    params = {k: v for k, v in request["params"].items() if k != "prompt_logprobs"}
    if "logit_bias" in params:
        params["logit_bias"] = {str(k): v for k, v in params["logit_bias"].items()}
    return {"model": "quire-demo", "prompt": request["prompt"], "return_token_ids": True, **params}


async def post_all(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        replies = await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))
    assert [r.status_code for r in replies] == [200] * len(bodies)
    return [r.json() for r in replies]


def seen(choice: dict[str, Any]) -> tuple[Any, ...]:
    """What a reply says of one completion, as the library says it."""
    logprobs = choice["logprobs"] and choice["logprobs"]["token_logprobs"]
    reason = choice["finish_reason"], choice["stop_reason"]
    return choice["index"], choice["text"], choice["token_ids"], *reason, logprobs


def expected(completion: CompletionOutput) -> tuple[Any, ...]:
    logprobs = completion.logprobs and [
        position[token].logprob
        for position, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    reason = completion.finish_reason, completion.stop_reason
    return completion.index, completion.text, completion.token_ids, *reason, logprobs


SMALL = ["--num-gpu-blocks-override", "24", "--max-model-len", "256"]


@pytest.mark.parametrize(
    "args",
    [
        ["--max-num-batched-tokens", "2048"],
        ["--max-num-batched-tokens", "16"],
        ["--max-num-batched-tokens", "2048", "--no-enable-prefix-caching"],
        SMALL,
        [*SMALL, "--max-num-batched-tokens", "64", "--no-enable-prefix-caching"],
    ],
    ids=" ".join,
)
def test_64_at_once_as_alone(args: list[str], alone: list[RequestOutput]) -> None:
    with serving(*args) as server:
        replies = asyncio.run(post_all(server.url, [body(r) for r in REQUESTS]))
        server.wait_idle()
        preemptions = server.metric("vllm:num_preemptions_total")
    assert "integrity check failed" not in server.log
    assert (preemptions > 0) == (args[:4] == SMALL)
    for request, reply, output in zip(REQUESTS, replies, alone, strict=True):
        got = [seen(choice) for choice in reply["choices"]]
        assert got == [expected(completion) for completion in output.outputs], request


def test_an_unseeded_request_can_be_repeated_by_its_reported_seed(server: Server) -> None:
    unseeded = {
        "model": "quire-demo",
        "prompt": "Once upon a time",
        "max_tokens": 20,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    first, second = asyncio.run(post_all(server.url, [unseeded, unseeded]))
    assert first["seed"] != second["seed"]
    (again,) = asyncio.run(post_all(server.url, [{**unseeded, "seed": first["seed"]}]))
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert second["choices"][0]["token_ids"] != first["choices"][0]["token_ids"]


def test_disconnect_aborts_and_frees(server: Server) -> None:
    async def leave_early() -> None:
        forever = {
            "model": "quire-demo",
            "prompt": "Once upon a time",
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=forever) as reply,
        ):
            async for line in reply.aiter_lines():
                if line.startswith("data:"):
                    return

    before = server.metric('vllm:request_success_total{engine="0",finished_reason="abort"')

    async def storm() -> None:
        await asyncio.gather(*(leave_early() for _ in range(10)))

    asyncio.run(storm())
    server.wait_idle()
    after = server.metric('vllm:request_success_total{engine="0",finished_reason="abort"')
    assert after - before == 10
