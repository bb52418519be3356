"""Token ids that no model has, wherever a request may name one: a clear refusal each time, and the
streams of others keep their bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import httpx

from live_server import Server

VOCAB_SIZE: Final = 2048
CANARIES: Final = 32
Stream = tuple[str, list[int]]
BAD: Final[list[Any]] = [-1, VOCAB_SIZE, 2**31, 2**63, 2**64, 1.5, "x", "1", True, None, [1], {}]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ONE: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}


def bodies(bad: Any) -> list[tuple[str, dict[str, Any]]]:
    """A request for each field that holds ids, with this one among good ones."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path, good in ((TEXT, ONE), (CHAT, TALK)):
        for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            found.append((path, good | {name: [5, bad]}))
        if isinstance(bad, (int, float, str)) and bad != "1" and bad is not True:
            found.append((path, good | {"logit_bias": {"5": 1, str(bad): 1}}))
    found.append((TEXT, ONE | {"prompt": [5, bad]}))
    found.append((TEXT, ONE | {"prompt": [[5], [5, bad]]}))
    found.append(("/detokenize", {"tokens": [5, bad]}))
    few = {"max_tokens": 2}
    for fields in (
        {"token_ids": [5, bad], "sampling_params": few},
        {"token_ids": [5], "sampling_params": few | {"stop_token_ids": [bad]}},
        {"token_ids": [5], "sampling_params": few | {"stop_token_ids": {"5": bad}}},
        {"token_ids": [5], "sampling_params": few | {"allowed_token_ids": [bad, 5]}},
    ):
        found.append(("/inference/v1/generate", fields))
    return found


async def canary(client: httpx.AsyncClient, seed: int, tokens: int) -> Stream:
    body = {"prompt": f"Story {seed}:", "max_tokens": tokens, "seed": seed, "temperature": 1,
            "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
    text, tokens_seen = "", []
    async with client.stream("POST", TEXT, json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
                    tokens_seen += choice["token_ids"] or []
    return text, tokens_seen


async def test_other_streams_keep_their_bytes(server: Server) -> None:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        alone = [await canary(client, seed, 200) for seed in range(CANARIES)]
        streams = [asyncio.ensure_future(canary(client, seed, 200)) for seed in range(CANARIES)]
        for bad in BAD:
            for path, body in bodies(bad):
                raw = json.dumps(body).encode()
                headers = {"content-type": "application/json"}
                reply = await client.post(path, content=raw, headers=headers)
                case = (path, body, reply.text)
                assert reply.status_code in (400, 422), case
                message = reply.json()["error"]["message"]
                assert message and "Traceback" not in message and "/src/" not in message, case
        together = await asyncio.gather(*streams)
        assert together == alone
        assert all(len(tokens) == 200 for _, tokens in together)
        largest = ONE | {"prompt": [VOCAB_SIZE - 1], "stop_token_ids": [VOCAB_SIZE - 1]}
        assert (await client.post(TEXT, json=largest)).status_code == 200
