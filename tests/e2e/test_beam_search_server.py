"""Beam search on a real server: the bytes of `LLM.beam_search`, alone, in a crowd and when the
engine core is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from live_server import Server, serving
from patience import PATIENCE
from quire import LLM, BeamSearchParams

PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3,"]
BEAMS = {"use_beam_search": True, "n": 4, "max_tokens": 12}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


def ask(server: Server, body: dict[str, Any], path: str = "completions") -> Any:
    reply = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_it_is_what_llm_finds(server: Server) -> None:
    body = {"prompt": PROMPTS, **BEAMS, "return_token_ids": True, "logprobs": 2}
    choices = ask(server, {**body, "length_penalty": 2.0})["choices"]
    with LLM() as llm:
        found = llm.beam_search(PROMPTS, BeamSearchParams(4, 12, length_penalty=2.0))
        tokenizer = llm.get_tokenizer()
    sequences = [one for output in found for one in output.sequences]
    assert len(choices) == len(sequences) == 16
    for choice, one in zip(choices, sequences, strict=True):
        prompt = tokenizer.encode(PROMPTS[choice["index"] // 4])
        assert prompt + choice["token_ids"] == one.tokens
        assert choice["finish_reason"] == one.finish_reason
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(one.cum_logprob)
        assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"])


def test_chat(server: Server) -> None:
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": turn, **BEAMS, "logprobs": True, "top_logprobs": 1}
    found = ask(server, body, "chat/completions")
    assert "Paris" in found["choices"][0]["message"]["content"]
    texts = [one["message"]["content"] for one in found["choices"]]
    assert len(set(texts)) == 4
    greedy = ask(server, {"messages": turn, "temperature": 0, "max_tokens": 12}, "chat/completions")
    assert greedy["choices"][0]["message"]["content"] in texts


def test_stop_strings_and_stop_ids(server: Server) -> None:
    plain = ask(
        server, {"prompt": "1, 2, 3,", **BEAMS, "ignore_eos": True, "return_token_ids": True}
    )
    assert all(one["finish_reason"] == "length" for one in plain["choices"])
    text = plain["choices"][0]["text"]
    stop = text[3:6]
    cut = ask(server, {"prompt": "1, 2, 3,", **BEAMS, "ignore_eos": True, "stop": stop})
    stopped = [one for one in cut["choices"] if one["stop_reason"] == stop]
    assert stopped and all(stop not in one["text"] for one in cut["choices"])
    kept = ask(server, {"prompt": "1, 2, 3,", **BEAMS, "ignore_eos": True, "stop": stop,
                        "include_stop_str_in_output": True})  # fmt: skip
    assert any(one["text"].endswith(stop) for one in kept["choices"])
    token = plain["choices"][0]["token_ids"][2]
    ended = ask(server, {"prompt": "1, 2, 3,", **BEAMS, "ignore_eos": True,
                         "stop_token_ids": [token], "return_token_ids": True})  # fmt: skip
    found = [one for one in ended["choices"] if one["stop_reason"] == token]
    assert found and all(one["token_ids"][-1] == token for one in found)
    assert all(token not in one["token_ids"][:-1] for one in ended["choices"])
    reply = httpx.post(f"{server.url}/v1/completions", timeout=PATIENCE,
                       json={"prompt": "x", **BEAMS, "stop_token_ids": [10**6]})  # fmt: skip
    assert reply.status_code == 400 and "stop_token_ids" in reply.text


def test_echo_and_usage(server: Server) -> None:
    found = ask(server, {"prompt": PROMPTS[0], **BEAMS, "echo": True, "return_token_ids": True})
    assert all(one["text"].startswith(PROMPTS[0]) for one in found["choices"])
    usage = found["usage"]
    assert usage["completion_tokens"] == sum(len(one["token_ids"]) for one in found["choices"])
    assert usage["prompt_tokens"] == len(found["choices"][0]["prompt_token_ids"])


def told(reply: Any) -> Any:
    """What must be the same however often it is asked."""
    return reply["choices"], reply["seed"], reply["usage"]["completion_tokens"]


async def ask_all(url: str, crowd: int = 0, kill: Any = None) -> list[Any]:
    """The searches, beside other requests; `kill` ends the core while they run."""
    searches = [
        {"prompt": prompt, **BEAMS, "max_tokens": 40, "ignore_eos": True, "logprobs": 3,
         "length_penalty": penalty}
        for prompt in PROMPTS for penalty in (1.0, -0.5)
    ]  # fmt: skip
    others = [
        {"prompt": f"{i} Tell", "max_tokens": 60, "seed": i, "ignore_eos": True}
        for i in range(crowd)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:

        async def post(body: dict[str, Any]) -> Any:
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        async def killer() -> None:
            while kill is not None and kill():
                await asyncio.sleep(0.01)

        jobs = [post(body) for body in (*searches, *others)]
        *replies, _ = await asyncio.gather(*jobs, killer())
    return [told(reply) for reply in replies[: len(searches)]]


def test_a_crowd_and_a_killed_core_change_nothing() -> None:
    with serving("--no-enable-prefix-caching", "--max-num-seqs", "16") as server:
        alone = asyncio.run(ask_all(server.url))
        assert asyncio.run(ask_all(server.url, crowd=40)) == alone
        core, name = server.core(), "vllm:generation_tokens_total"
        limit = server.metric(name) + 300

        def kill() -> bool:
            if server.metric(name) < limit:
                return True
            os.kill(core.pid, signal.SIGKILL)
            return False

        assert asyncio.run(ask_all(server.url, kill=kill)) == alone
        assert "SIGKILL" in server.log, "nothing was killed"


def test_a_search_that_began_is_not_refused_later() -> None:
    """The queue takes one request beside those that run; rounds have four."""
    with serving("--max-num-seqs", "1", "--max-num-queued-reqs", "1") as server:
        found = ask(server, {"prompt": PROMPTS[0], **BEAMS})
        assert len(found["choices"]) == 4
