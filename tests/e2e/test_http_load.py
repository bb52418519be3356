"""64 mixed requests at once over HTTP: all finish, as alone, and every KV block is free after."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx

from quire import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Server
from mixed import mixed_requests

REQUESTS = mixed_requests(64)


def body(request: dict[str, Any]) -> dict[str, Any]:
    params = {k: v for k, v in request["params"].items() if k != "prompt_logprobs"}
    if "logit_bias" in params:
        params["logit_bias"] = {str(k): v for k, v in params["logit_bias"].items()}
    return {"model": "quire-demo", "prompt": request["prompt"], "return_token_ids": True, **params}


async def post_all(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        replies = await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))
    assert [r.status_code for r in replies] == [200] * len(bodies)
    return [r.json() for r in replies]


def test_64_at_once_as_alone(server: Server) -> None:
    replies = asyncio.run(post_all(server.url, [body(r) for r in REQUESTS]))
    server.wait_idle()
    with LLM(enable_prefix_caching=False) as llm:
        for request, reply in zip(REQUESTS, replies, strict=True):
            params = {k: v for k, v in request["params"].items() if k != "prompt_logprobs"}
            (alone,) = llm.generate(request["prompt"], SamplingParams(**params), use_tqdm=False)
            got = [(c["text"], c["token_ids"], c["finish_reason"]) for c in reply["choices"]]
            want = [(c.text, c.token_ids, c.finish_reason) for c in alone.outputs]
            assert got == want, request


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
            httpx.AsyncClient(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=forever) as reply,
        ):
            async for line in reply.aiter_lines():
                if line.startswith("data:"):
                    return

    before = server.metric('vllm:request_success_total{engine="0",finished_reason="abort"')

    async def storm() -> None:
        await asyncio.gather(*(leave_early() for _ in range(10)))

    asyncio.run(storm())
    server.wait_idle(10)
    after = server.metric('vllm:request_success_total{engine="0",finished_reason="abort"')
    assert after - before == 10
