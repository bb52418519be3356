"""Prompts of one HTTP request: each has its own random numbers, and one reported number repeats
them all."""

from __future__ import annotations

import json
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


def test_choices_of_all_prompts_differ(server: Server) -> None:
    found, seed = texts(server, prompt=[PROMPT] * 4, n=3, seed=7)
    assert len(set(found)) == 12
    assert texts(server, prompt=PROMPT, n=3, seed=7)[0] == found[:3]


def test_neighbouring_seeds_share_no_prompt(server: Server) -> None:
    sweeps = [texts(server, prompt=[PROMPT] * 4, seed=seed)[0] for seed in (7, 8, 9)]
    assert len({text for sweep in sweeps for text in sweep}) == 12
