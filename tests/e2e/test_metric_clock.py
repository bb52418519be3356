"""TTFT, ITL and TPOT of the metrics agree with a client's own clock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from live_server import Server, serving
from patience import PATIENCE
from witness import Life, Witness

REQUESTS, TOKENS = 6, 400
NAMES = (
    "time_to_first_token_seconds",
    "request_time_per_output_token_seconds",
    "inter_token_latency_seconds",
)


def ask(url: str, witness: Witness, number: int) -> None:
    body = {
        "model": "quire-demo",
        "prompt": f"Request {number}: tell me a story.",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"X-Request-Id": f"r{number}"}
    life = witness.asked(f"r{number}")
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE
    ) as reply:
        lines = reply.iter_lines()
        life.answered([time.monotonic() for line in lines if line.startswith("data: {")])


def totals(server: Server) -> dict[str, float]:
    names = [f"{name}_{part}" for name in NAMES for part in ("sum", "count")]
    values = server.metrics(*(f"vllm:{name}" for name in names))
    return dict(zip(names, values, strict=True))


def test_metrics_agree_with_a_clients_clock() -> None:
    """Requests that queue for one seat, so that waiting and decoding both take long: the sums lie
    between the least and the most that the client knows them to be."""
    with serving("--max-num-seqs", "1") as server, ThreadPoolExecutor(REQUESTS) as pool:
        witness = Witness(server.url)
        jobs = [pool.submit(ask, server.url, witness, i) for i in range(REQUESTS)]
        for job in jobs:
            job.result()
        witness.close()
        told = totals(server)
    lives: list[Life] = list(witness.lives.values())
    # a step's output may reach the client's stream merged with the next
    assert told["inter_token_latency_seconds_count"] == REQUESTS * (TOKENS - 1)
    assert told["time_to_first_token_seconds_count"] == REQUESTS
    assert told["request_time_per_output_token_seconds_count"] == REQUESTS
    expected = {
        "time_to_first_token_seconds": [life.ttft for life in lives],
        "inter_token_latency_seconds": [life.decode for life in lives],
        "request_time_per_output_token_seconds": [
            (least / (TOKENS - 1), most / (TOKENS - 1)) for least, most in map(_decode, lives)
        ],
    }
    for name, spans in expected.items():
        least, most = sum(s[0] for s in spans), sum(s[1] for s in spans)
        assert least <= told[f"{name}_sum"] <= most, name


def _decode(life: Life) -> tuple[float, float]:
    return life.decode
