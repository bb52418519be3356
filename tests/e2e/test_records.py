"""Records of real runs: explanations agree with the clock, the doctor with the load."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from live_server import QUIRE, Server, serving
from patience import PATIENCE, wait_for
from quire import LLM, SamplingParams
from quire.errors import NotFound
from quire.observability.explain.diagnosis import Finding, diagnose
from witness import Witness


def quire(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*QUIRE, *arguments], capture_output=True, text=True, timeout=PATIENCE)


def test_a_request_of_a_server_is_explained(server: Server) -> None:
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 200,
        "ignore_eos": True,
        "n": 2,
        "temperature": 1,
    }
    url, headers = f"{server.url}/v1/completions", {"X-Request-Id": "why"}
    witness = Witness(server.url)
    life = witness.asked("why")
    sent = httpx.post(url, json=body, headers=headers, timeout=PATIENCE)
    life.ended.not_after(time.monotonic())
    witness.close()
    assert sent.status_code == 200, sent.text
    told = quire("explain", "why", "--url", server.url, "--json")
    assert told.returncode == 0, told.stderr
    completions = json.loads(told.stdout)["completions"]
    assert [c["index"] for c in completions] == [0, 1]
    assert life.whole[0] <= completions[0]["seconds"] <= life.whole[1], "the caller's clock"
    for completion in completions:
        parts = completion["parts"]
        assert sum(p["seconds"] for p in parts) == pytest.approx(completion["seconds"], abs=1e-9)
        assert completion["num_output_tokens"] == 200 and completion["finish_reason"] == "length"
        assert sum(p["steps"] for p in parts if p["cause"].startswith("decode")) == 199


def test_other_commands_against_a_server(server: Server, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "trace.json"
    written = quire("timeline", "--url", server.url, "-o", str(path))
    assert written.returncode == 0, written.stderr
    assert json.loads(path.read_text("utf-8"))["traceEvents"]
    seen = quire("top", "--url", server.url, "--once", "--interval", "0.1")
    assert seen.returncode == 0 and "unfinished requests" in seen.stdout
    missing = quire("explain", "nobody", "--url", server.url)
    assert missing.returncode == 1 and "404" in missing.stderr


def names(found: list[Finding]) -> list[str]:
    """What is found besides that the machine has other things to do: where tests run, it may."""
    return [finding.name for finding in found if finding.name != "machine_starved"]


def test_an_overloaded_engine_and_a_healthy_one() -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    prompts = [[7 + i] * 30 for i in range(12)]
    with LLM(num_gpu_blocks_override=10, max_model_len=128, enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = diagnose(llm.llm_engine.question().signals(600))
        assert names(found)[:1] == ["kv_pool_too_small"]
        [last] = llm.explain(outputs[-1].request_id)
        worst = max(last.parts, key=lambda part: part.seconds)
        assert (worst.cause, worst.reason) == ("queued", "blocks")
        with pytest.raises(NotFound, match="there are: 11, 10"):
            llm.explain("none")
    with LLM() as llm:
        outputs = llm.generate(prompts[:4], params, use_tqdm=False)
        assert names(diagnose(llm.llm_engine.question().signals(600))) == []
        [first] = llm.explain("0")
        assert "decode" in str(first)
        assert first.seconds == pytest.approx(
            outputs[0].metrics.finished_ts - outputs[0].metrics.arrival_time, abs=1e-6
        )
        assert llm.timeline(10)["otherData"]["steps"] == 10


def test_one_that_waits_is_told_what_it_would_find() -> None:
    """The server asks its core while the request stands in the queue."""
    prompt = "The capital of France is Paris. The capital of Italy is Rome. "
    with serving("--max-num-seqs", "1") as server, ThreadPoolExecutor(2) as pool:
        url = f"{server.url}/v1/completions"

        def ask(name: str, text: str, tokens: int) -> int:
            body = {"prompt": text, "max_tokens": tokens, "ignore_eos": True}
            return httpx.post(
                url, json=body, headers={"X-Request-Id": name}, timeout=PATIENCE
            ).status_code

        assert ask("first", prompt + "One", 1) == 200
        jobs = [pool.submit(ask, "long", "Once", 1900)]
        wait_for(lambda: server.metric("vllm:num_requests_running"), "one that runs")
        jobs.append(pool.submit(ask, "me", prompt + "Two", 1))
        told: dict[str, Any] = {}
        while not told.get("prefix"):
            assert not jobs[1].done(), told
            reply = httpx.get(f"{server.url}/v1/requests/me/explain", timeout=PATIENCE)
            told = reply.json()["completions"][0] if reply.status_code == 200 else {}
        assert [job.result() for job in jobs] == [200, 200]
    assert told["state"] == "waiting" and told["prefix"]["expected"]
    assert 4 <= told["prefix"]["num_cached_tokens"] < told["prefix"]["num_tokens"]
    assert told["prefix"]["text"].startswith("if it came in now: ")
