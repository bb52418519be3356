"""Outputs that repeat themselves end alike at every front door, and `n` is limited at each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidRequest
from quire.params import RepetitionDetectionParams
from routes_server import RoutesServer

LOOP = {"max_pattern_size": 4, "min_count": 3}
ASKED = "Repeat this text: fox fox fox fox fox fox"
"""The embedded model does, and so ends early."""
TURNS = [{"role": "user", "content": ASKED}]


@pytest.fixture(scope="module")
def server() -> Iterator[RoutesServer]:
    with asyncio.Runner() as runner:
        made = RoutesServer(runner, {}, max_n_sequences=6)
        yield made
        made.close()


@pytest.fixture(scope="module")
def prompt_ids() -> list[int]:
    with LLM() as llm:
        params = SamplingParams(
            temperature=0, max_tokens=40, repetition_detection=RepetitionDetectionParams(**LOOP)
        )
        (output,) = llm.chat(TURNS, params, use_tqdm=False)
        one = output.outputs[0]
        assert (one.finish_reason, one.stop_reason) == ("repetition", "repetition_detected")
        assert one.text.split() == ["fox"] * 4  # the first is another token
        return output.prompt_token_ids


def test_http(server: RoutesServer, prompt_ids: list[int]) -> None:
    asked = {"temperature": 0, "repetition_detection": LOOP}
    body = server.ask("/v1/chat/completions", {"messages": TURNS, **asked})
    choice = body["choices"][0]
    assert choice["message"]["content"] == "fox fox fox fox"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    body = server.ask("/v1/completions", {"prompt": prompt_ids, "max_tokens": 40, **asked})
    choice = body["choices"][0]
    assert choice["text"] == "fox fox fox fox" and choice["finish_reason"] == "repetition"
    body = server.ask(
        "/inference/v1/generate",
        {"token_ids": prompt_ids, "sampling_params": {"max_tokens": 40, **asked}},
    )
    choice = body["choices"][0]
    assert len(choice["token_ids"]) == 4 and choice["finish_reason"] == "repetition"


def test_streams(server: RoutesServer) -> None:
    body = {"messages": TURNS, "temperature": 0, "repetition_detection": LOOP}
    chunks = server.stream("/v1/chat/completions", body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "repetition"
    assert "".join(c["delta"].get("content") or "" for c in choices) == "fox fox fox fox"


def test_other_apis_tell_it_as_an_answer_that_was_cut(server: RoutesServer) -> None:
    asked = {"temperature": 0, "repetition_detection": LOOP}
    body = server.ask("/v1/messages", {"messages": TURNS, "max_tokens": 40, **asked})
    assert body["stop_reason"] == "max_tokens" and body["content"][0]["text"] == "fox fox fox fox"
    body = server.ask("/v1/responses", {"input": ASKED, **asked})
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "repetition"}


def test_metrics_count_it(server: RoutesServer) -> None:
    def count(text: str) -> float:
        lines = [line for line in text.splitlines() if 'finished_reason="repetition"' in line]
        return float(lines[0].split()[-1])

    before = count(server.get("/metrics"))
    body = {"messages": TURNS, "temperature": 0, "repetition_detection": LOOP}
    name = server.ask("/v1/chat/completions", body)["id"]
    assert count(server.get("/metrics")) == before + 1
    told = server.get(f"/v1/requests/{name}/explain")
    assert "repetition" in told


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURNS, "n": 7}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 4}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 7}}),
    ],
)
def test_a_server_limits_completions(server: RoutesServer, path: str, body: dict[str, Any]) -> None:
    message = server.ask(path, body, 400)["error"]["message"]
    assert "at most 6 completions (prompts times n; --max-n-sequences), got" in message


def test_the_environment_limits_n(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SamplingParams(n=16384).n == 16384
    with pytest.raises(InvalidRequest, match="at most 16384 .QUIRE_MAX_N_SEQUENCES., got 16385"):
        SamplingParams(n=16385)
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "3")
    assert SamplingParams(n=3).n == 3
    with pytest.raises(InvalidRequest, match="n must be at most 3 .*, got 4"):
        SamplingParams(n=4)
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "20000")
    assert SamplingParams(n=20000).n == 20000
