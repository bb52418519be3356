"""What requests may ask for, the same through `LLM`, completions, chat and tokens in and out, as a
whole and as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from routes_server import RoutesServer

PROMPT = "The capital of France is"
OPTIONS: dict[str, Any] = {"max_model_len": 2048}


@pytest.fixture(scope="module")
def server() -> Iterator[RoutesServer]:
    with asyncio.Runner() as runner:
        made = RoutesServer(runner, OPTIONS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(**OPTIONS, generation_config="vllm")
    yield made
    made.shutdown()


SAMPLED: dict[str, Any] = {
    "temperature": 0.9, "seed": 11, "max_tokens": 1000, "ignore_eos": True,
    "frequency_penalty": 0.3, "top_p": 0.95,
}  # fmt: skip
NAMED = [5, 300, 17, 2047, 5]


def test_named_log_probabilities_at_every_door(server: RoutesServer, llm: LLM) -> None:
    """A thousand tokens with penalties and two choices: the same numbers everywhere."""
    fields = SAMPLED | {"logprob_token_ids": NAMED, "n": 2}
    (output,) = llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)
    distinct = {5, 300, 17, 2047}
    for choice in output.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == 1000
        for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
            assert set(position) == distinct | {token} and position[token].rank is not None
    whole = server.ask("/v1/completions", {"prompt": PROMPT, "return_token_ids": True, **fields})
    ids = server.ask(
        "/inference/v1/generate",
        {"token_ids": output.prompt_token_ids, "sampling_params": fields},
    )
    for choice, text, tokens in zip(output.outputs, whole["choices"], ids["choices"], strict=True):
        assert choice.token_ids == text["token_ids"] == tokens["token_ids"]
        assert choice.logprobs is not None
        expected = [sorted(lp.logprob for lp in p.values()) for p in choice.logprobs]
        written = tokens["logprobs"]["content"]
        assert [sorted(t["logprob"] for t in p["top_logprobs"]) for p in written] == expected
        assert [max(p) for p in expected] == [
            max(p.values()) for p in text["logprobs"]["top_logprobs"]
        ]
    pieces = server.stream("/v1/completions", {"prompt": PROMPT, "stream_interval": 7, **fields})
    for index, text in enumerate(whole["choices"]):
        mine = [
            c["choices"][0] for c in pieces if c["choices"] and c["choices"][0]["index"] == index
        ]
        joined = [p for c in mine for p in (c["logprobs"] or {}).get("top_logprobs", ())]
        assert joined == text["logprobs"]["top_logprobs"]


def test_named_log_probabilities_of_chat(server: RoutesServer) -> None:
    ask = {
        "messages": [{"role": "user", "content": "What is 23 + 45?"}], "max_tokens": 8,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    for more, count in (
        ({}, 4), ({"logprobs": True}, 4), ({"logprobs": True, "top_logprobs": 4}, 4),
        ({"logprobs": True, "top_logprobs": 6}, 9),
    ):  # fmt: skip
        body = ask | more | {"logprob_token_ids": [70, 71, 72, 73]}
        (choice,) = server.ask("/v1/chat/completions", body)["choices"]
        content = choice["logprobs"]["content"]
        assert len(content) == 8
        for entry in content:
            assert count <= len(entry["top_logprobs"]) <= 11
        chunks = server.stream("/v1/chat/completions", body)
        told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"]]
        assert [entry for found in told if found for entry in found["content"]] == content


def test_named_ids_of_another_vocabulary(server: RoutesServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        error = server.ask(path, body | {"logprob_token_ids": [2048]}, 400)["error"]
        assert error["param"] == "logprob_token_ids"
        assert "at most 2047, got 2048" in error["message"]


@pytest.mark.parametrize("interval", [2, 16, 10**6])
def test_an_interval_changes_no_content(server: RoutesServer, interval: int) -> None:
    fields = SAMPLED | {"max_tokens": 200, "n": 2}
    for path, ask in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell a story."}]}),
    ):
        texts: list[list[str]] = []
        for extra in ({}, {"stream_interval": interval}):
            joined = ["", ""]
            chunks = server.stream(path, {**ask, **fields, **extra})
            counts = [0, 0]
            for chunk in chunks:
                for choice in chunk["choices"]:
                    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    joined[choice["index"]] += text
                    counts[choice["index"]] += bool(text)
            texts.append(joined)
            if extra:  # the first token, the intervals, and the rest
                assert max(counts) <= 2 + 199 // interval
        assert texts[0] == texts[1]


def test_an_interval_of_the_server() -> None:
    with asyncio.Runner() as runner:
        made = RoutesServer(runner, OPTIONS | {"stream_interval": 50})
        for own, most in ((1, 6), (100, 4)):
            chunks = made.stream("/v1/completions", SAMPLED | {
                "prompt": PROMPT, "stream_interval": own, "return_token_ids": True,
                "max_tokens": 201,
            })  # fmt: skip
            sizes = [len(c["choices"][0]["token_ids"]) for c in chunks if c["choices"]]
            sizes = [size for size in sizes if size]
            assert sum(sizes) == 201 and sizes[0] == 1 and len(sizes) <= most
        made.close()
