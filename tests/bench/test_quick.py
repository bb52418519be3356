"""`quire bench quick`, and benchmarks by their old names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_server import fake
from patience import PATIENCE
from quire.bench.own_server import own_server
from quire.bench.quick import LADDER, QuickStep, paragraph
from quire.cli.benches.quick import main
from quire.errors import ConfigError, StartupError

ROOT = Path(__file__).resolve().parents[2]


def step(users: int, ttft: float, tpot: float, failed: int = 0) -> QuickStep:
    return QuickStep(users, {
        "model_id": "m", "median_ttft_ms": ttft, "median_tpot_ms": tpot, "failed": failed,
        "completed": 3 * users - failed, "output_throughput": users * 1000 / tpot,
    })  # fmt: skip


def test_the_paragraph_says_how_many_users():
    steps = [step(1, 40, 10), step(2, 80, 20), step(4, 1500, 200)]
    assert paragraph(steps, "http://x", 64, 32) == (
        "m at http://x: somebody who asks alone sees the first word after 40 ms, and then 75 "
        "words a second, where people read about 4. It is fast enough for 2 users at the same "
        "moment: each waits 80 ms and gets 38 words a second; together that is about 270,000 "
        "words an hour. With 4 it is too slow: the first word takes 1.5 s, the rest comes at "
        "4 words a second. All 21 requests held. (Prompts of 64 tokens, replies of 32; "
        "medians.)"
    )
    assert "Even one user waits too long" in paragraph([step(1, 5000, 10)], "u", 1, 2)
    assert "More were not tried" in paragraph([step(1, 5, 5), step(2, 5, 5)], "u", 1, 2)
    assert "2 of 3 requests failed" in paragraph([step(1, 5, 5, failed=2)], "u", 1, 2)


def test_a_reply_that_comes_at_once_has_no_speed():
    fast, slow = (paragraph([step(1, wait, 1e-9)], "u", 1, 2) for wait in (40, 5000))
    assert "the first word after 40 ms, and then the rest at once. It is fast" in fast
    assert "the first word takes 5.0 s, the rest comes with it." in slow


def test_it_climbs_until_it_is_too_slow(capsys):
    with fake(tokens=6, gap=0.15) as server:
        assert main(["--base-url", server.url, "--output-len", "6"]) == 0
    assert "m at http://127.0.0.1" in capsys.readouterr().out
    with fake(status=429) as server:
        assert main(["--base-url", server.url, "--json"]) == 1
    (only,) = json.loads(capsys.readouterr().out)
    assert only["users"] == LADDER[0] and only["failed"] == 3


def test_a_server_that_answers_nothing_has_no_speed(capsys):
    with fake(status=429) as server:
        assert main(["--base-url", server.url]) == 1
        assert capsys.readouterr().out == (
            f"m at {server.url}: none of 3 requests succeeded, so there is nothing to say of its "
            "speed. The reason: 429: the queue is full.\n"
        )
    with fake(events=["null"]) as server:
        assert main(["--base-url", server.url, "--backend", "openai"]) == 1
    assert "The reason: the reply cannot be read: an event must be" in capsys.readouterr().out


def test_it_starts_a_server_of_its_own(capsys):
    assert main(["--seconds", "0.01", "--input-len", "8", "--output-len", "4"]) == 0
    out = capsys.readouterr().out
    assert "quire-demo at http://127.0.0.1" in out and "All 3 requests held" in out


def test_a_server_that_cannot_start_says_why():
    wanted = "ended with code 1: .*no model folder '/no/such'"
    with pytest.raises(StartupError, match=wanted), own_server(["/no/such"]):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-len", "0"], "--input-len must be at least 1, got 0"),
        (["--seconds", "0"], "--seconds must be above 0, got 0"),
        (["--backend", "openai-embeddings"], "does not stream"),
    ],
)
def test_bad_flags(arguments: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        main(arguments)


@pytest.mark.parametrize(
    "command",
    [
        [str(ROOT / "benchmarks" / "benchmark_serving.py")],
        ["-m", "quire.entrypoints.openai.api_server.benchmark"],
    ],
    ids=["script", "module"],
)
def test_old_names_lead_to_the_same_benchmark(command: list[str], tmp_path):
    talk = {"conversations": [{"value": "What is the capital of France, please?"},
                              {"value": "It is Paris, as everyone knows."}]}  # fmt: skip
    data: Any = tmp_path / "ShareGPT_V3_unfiltered_cleaned_split.json"
    data.write_text(json.dumps([talk]))
    with fake() as server:
        done = subprocess.run(
            [sys.executable, *command, "--backend", "openai", "--base-url", server.url,
             "--dataset", str(data), "--num-prompts", "2", "--trust-remote-code"],
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in (
        "Successful requests:", "Benchmark duration (s):", "Total input tokens:",
        "Total generated tokens:", "Request throughput (req/s):", "Input token throughput (tok/s):",
        "Output token throughput (tok/s):", "Time to First Token", "Mean TTFT (ms):",
        "Median TTFT (ms):", "P99 TTFT (ms):", "Time per Output Token", "Mean TPOT (ms):",
        "Median TPOT (ms):", "P99 TPOT (ms):",
    ):  # fmt: skip
        assert line in done.stdout


def test_the_server_has_its_old_module_name():
    done = subprocess.run(
        [sys.executable, "-m", "quire.entrypoints.openai.api_server", "--help=port"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "--port" in done.stdout
