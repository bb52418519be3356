"""Prompts of one HTTP request: each has its own random numbers, and one reported number repeats
them all."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from live_server import Server

PROMPT = "Once upon a time"
SAMPLED = {"temperature": 1, "max_tokens": 24, "ignore_eos": True}


def texts(server: Server, **body: Any) -> tuple[list[str], int]:
    """The texts of all choices in order, and the seed that was reported."""
    reply = httpx.post(f"{server.url}/v1/completions", json=SAMPLED | body, timeout=60)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return [choice["text"] for choice in reply.json()["choices"]], reply.json()["seed"]
    found: dict[int, str] = {}
    seeds = []
    for frame in reply.text.split("\n\n"):
        if frame and not frame.endswith("[DONE]"):
            chunk = json.loads(frame.removeprefix("data: "))
            seeds += [chunk["seed"]] if "seed" in chunk else []
            for choice in chunk["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)], seeds[0]


@pytest.mark.parametrize("given", [{}, {"seed": 7}, {"seed": 2**63 - 1}], ids=["none", "7", "max"])
def test_equal_prompts_differ_and_repeat(server: Server, given: dict[str, Any]) -> None:
    eight, seed = texts(server, prompt=[PROMPT] * 8, **given)
    assert len(set(eight)) == 8
    assert seed == given.get("seed", seed)
    assert given or seed < 2**53, "what was drawn survives readers with doubles"
    assert texts(server, prompt=[PROMPT] * 8, seed=seed) == (eight, seed)
    assert texts(server, prompt=[PROMPT] * 8, seed=seed, stream=True) == (eight, seed)
    assert texts(server, prompt=PROMPT, seed=seed) == (eight[:1], seed)
    assert texts(server, prompt=[PROMPT] * 3, seed=seed)[0] == eight[:3]


ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16}, "choices"
    ),
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 16}, "choices"),
    "/v1/responses": ({"input": PROMPT, "max_output_tokens": 16}, "output"),
    "/inference/v1/generate": (
        {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 16}}, "choices"
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_a_drawn_seed_is_told_by_every_api_and_repeats_it(server: Server, path: str) -> None:
    """As a program with doubles reads it, and from a stream as from a whole reply."""
    body, field = ROUTES[path]

    def told(**more: Any) -> tuple[int, Any]:
        reply = httpx.post(f"{server.url}{path}", json=body | more, timeout=60)
        assert reply.status_code == 200, reply.text
        made = reply.json()
        text = json.dumps(made[field])
        for name in ("id", "item_id"):  # of messages, which belong to one reply
            text = re.sub(rf'"{name}": "[^"]*"', "", text)
        return made["seed"], text

    def streamed() -> int:
        reply = httpx.post(f"{server.url}{path}", json=body | {"stream": True}, timeout=60)
        found = re.findall(r'"seed":(\d+)', reply.text)
        assert found, "the stream tells it, too"
        return int(found[0])

    seed, text = told()
    assert 0 <= seed < 2**53 and 0 <= streamed() < 2**53
    again = {"seed": int(float(seed))}
    if path == "/inference/v1/generate":
        again = {"sampling_params": {**body["sampling_params"], **again}}
    assert told(**again) == (seed, text)
    assert told()[0] != seed, "each request gets its own"


def test_choices_of_all_prompts_differ(server: Server) -> None:
    found, seed = texts(server, prompt=[PROMPT] * 4, n=3, seed=7)
    assert len(set(found)) == 12
    assert texts(server, prompt=PROMPT, n=3, seed=7)[0] == found[:3]


def test_neighbouring_seeds_share_no_prompt(server: Server) -> None:
    sweeps = [texts(server, prompt=[PROMPT] * 4, seed=seed)[0] for seed in (7, 8, 9)]
    assert len({text for sweep in sweeps for text in sweep}) == 12


def test_a_negative_seed_is_a_seed_like_others(server: Server) -> None:
    """Reported as given; alone and among choices it gives the same."""
    found, seed = texts(server, prompt=PROMPT, n=3, seed=-3)
    assert seed == -3 and len(set(found)) == 3
    assert texts(server, prompt=PROMPT, seed=-3)[0] == found[:1]
    assert texts(server, prompt=PROMPT, seed=-2)[0] == found[1:2]
