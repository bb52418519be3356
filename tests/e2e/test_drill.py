"""The incident drill of vLLM guides, on a real server: `quire doctor` and `quire explain` name the
true cause of an overload and of a p99 spike, and find nothing on a healthy server.

Every explanation is held against the caller's own clock as well.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from live_server import QUIRE, Server, serving
from patience import PATIENCE, wait_for
from witness import Life, Witness

LAST = 24
"""Number of the last request of the overload."""
CHAT_TOKENS, LONG_PROMPTS = 900, 12
"""So more than one step of a hundred has a long prompt, if each caller's come one by one."""


def quire(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [*QUIRE, *arguments, "--url", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def explained(url: str, name: str) -> dict[str, Any]:
    told = quire("explain", name, "--json", url=url)
    assert told.returncode == 0, told.stderr
    (completion,) = json.loads(told.stdout)["completions"]
    return completion


class Callers:
    """Streaming callers, each on a thread.

    Args:
        server: Whom they ask.
        watched: Names of requests whose times are to be known well.
    """

    def __init__(self, server: Server, *watched: str) -> None:
        self.server, self.url = server, server.url
        self._client = httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_connections=None))
        self._pool = ThreadPoolExecutor(100)
        self._random = random.Random(7)
        self._watched = watched
        self._witness = Witness(server.url)
        self.asked: dict[str, Future[None]] = {}

    def ask(self, name: str, prompt: int, tokens: int) -> Future[None]:
        """A prompt of random tokens: nothing of it is cached."""
        body = {"prompt": [self._random.randrange(300, 2000) for _ in range(prompt)]}
        self.asked[name] = self._pool.submit(self._stream, name, body | {"max_tokens": tokens})
        return self.asked[name]

    def _stream(self, name: str, body: dict[str, Any]) -> None:
        body |= {"ignore_eos": True, "temperature": 0, "stream": True}
        headers = {"X-Request-Id": name}
        url = f"{self.url}/v1/completions"
        life = self._witness.asked(name, name in self._watched)
        with self._client.stream("POST", url, json=body, headers=headers) as reply:
            assert reply.status_code == 200, f"{reply.read()!r}\n{self.server.log[-2000:]}"
            lines = reply.iter_lines()
            life.answered([time.monotonic() for line in lines if line.startswith("data: {")])

    def wait(self) -> dict[str, Life]:
        """What is known of the requests, once all have their answer."""
        for future in self.asked.values():
            future.result()
        self._pool.shutdown()
        self._witness.close()
        self._client.close()
        return self._witness.lives


def assert_agrees(told: dict[str, Any], life: Life) -> None:
    """The parts add up, and to what the caller knows."""
    assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["seconds"])
    assert life.whole[0] <= told["seconds"] <= life.whole[1]
    assert life.ttft[0] <= told["ttft"] <= life.ttft[1]
    spans = sorted(span for part in told["parts"] for span in part["spans"])
    assert spans[0][0] == pytest.approx(0, abs=1e-6)
    assert spans[-1][1] == pytest.approx(told["seconds"])


def causes(said: str) -> dict[str, list[str]]:
    """Evidence and remedy by cause, the likeliest first, as the doctor prints them. That the
    machine has other things to do is left out: where tests run, it may."""
    found = {}
    lines = said.splitlines()
    for number, line in enumerate(lines):
        head, _, cause = line.partition(": ")
        if head in ("likely cause", "also") and not cause.startswith("the machine is starved"):
            found[cause] = lines[number + 2 : number + 4]
    return found


@pytest.fixture(scope="module")
def overload() -> Iterator[tuple[Server, dict[str, Life], dict[str, Any]]]:
    """Many requests on a KV pool that holds one or two, long enough to come faster than they end on
    any machine."""
    with serving("--num-gpu-blocks-override", "24", "--max-model-len", "256") as server:
        callers = Callers(server, f"r{LAST}")
        for i in range(LAST + 1):
            callers.ask(f"r{i}", prompt=70, tokens=150)
            time.sleep(0.01)
        told = {"state": "accepted"}
        while told["state"] == "accepted" and not callers.asked[f"r{LAST}"].done():
            reply = httpx.get(f"{server.url}/v1/requests/r{LAST}/explain", timeout=PATIENCE)
            told = reply.json()["completions"][0] if reply.status_code == 200 else told
        yield server, callers.wait(), told


def test_overload_the_doctor_names_the_pool(overload: Any) -> None:
    server, _, _ = overload
    said = quire("doctor", "--watch", "0.1", "--seconds", "600", url=server.url)
    assert said.returncode == 1, said.stdout + said.stderr
    found = causes(said.stdout)
    assert list(found)[0] == "the KV cache is too small for the requests that run at once"
    evidence, remedy = found[list(found)[0]]
    assert (
        "KV cache usage up to 100 %" in evidence
        and "of the time requests waited for KV blocks" in evidence
    )
    assert "--num-gpu-blocks-override (now 24)" in remedy
    assert "long prompts share steps with decodes" not in said.stdout
    assert "look closer: quire explain cmpl-r" in said.stdout
    told = json.loads(quire("doctor", "--watch", "0.1", "--json", url=server.url).stdout)
    names = [finding["name"] for finding in told["findings"]]
    assert [name for name in names if name != "machine_starved"][0] == "kv_pool_too_small"


def test_overload_explain_names_the_wait(overload: Any) -> None:
    server, seen, _ = overload
    told = explained(server.url, f"r{LAST}")
    assert_agrees(told, seen[f"r{LAST}"])
    worst = max(told["parts"], key=lambda part: part["seconds"])
    assert (worst["cause"], worst["reason"]) == ("queued", "blocks")
    assert worst["details"]["num_ahead"] > 3 and worst["details"]["num_blamed"] > 3
    assert "too few free KV blocks (the head of the queue needed" in worst["text"]
    assert all(blame["id"].startswith("cmpl-r") for blame in worst["requests"])
    text = quire("explain", f"r{LAST}", url=server.url).stdout
    assert text.startswith(f"request cmpl-r{LAST}-0: ") and "held by cmpl-r" in text
    assert "prefix: nothing was cached" in text


def test_overload_explain_names_the_preemption(overload: Any) -> None:
    server, seen, _ = overload
    for name in seen:
        told = explained(server.url, name)
        again = next((part for part in told["parts"] if part["cause"] == "recomputed"), None)
        if again is not None:
            break
    else:
        pytest.fail("nobody was preempted and had to compute again")
    assert_agrees(told, seen[name])
    (lost,) = [
        part
        for part in told["parts"]
        if part["cause"] == "preempted" and part["details"]["step"] == again["details"]["step"]
    ]
    assert f"after the preemption at step {lost['details']['step']}" in lost["text"]
    assert "for request cmpl-r" in lost["text"] or "gave way" in lost["text"]
    assert told["num_preemptions"] > 0 and again["details"]["tokens"] > 0


def test_overload_a_waiting_request_was_explained(overload: Any) -> None:
    _, _, told = overload
    assert told["state"] == "waiting" and told["finish_reason"] is None
    assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["seconds"])
    assert {part["cause"] for part in told["parts"]} <= {
        "intake",
        "queued",
        "between_steps",
        "under_way",
    }


@pytest.fixture(scope="module")
def spikes() -> Iterator[tuple[Server, dict[str, Life], dict[str, Any]]]:
    """Four chats, and four callers that send prompts which fill the context, each the next one as
    soon as it has its answer: how fast the machine is must not matter. None waits for the steps'
    budget."""
    with serving("--max-num-batched-tokens", "8192") as server:
        callers = Callers(server, "chat0")
        callers.ask("warm-up", prompt=500, tokens=2).result()
        chats = [callers.ask(f"chat{i}", prompt=12, tokens=CHAT_TOKENS) for i in range(4)]

        def ask_again(caller: int) -> None:
            for number in range(LONG_PROMPTS):
                if not all(chat.done() for chat in chats):
                    callers.ask(f"long{caller}-{number}", prompt=2000, tokens=2).result()

        told: dict[str, Any] = {}

        def under_way() -> bool:
            reply = httpx.get(f"{server.url}/v1/requests/chat0/explain", timeout=PATIENCE)
            told.update(reply.json()["completions"][0] if reply.status_code == 200 else {})
            return bool(told.get("num_output_tokens"))

        wait_for(under_way, "a chat's first token")
        threads = [threading.Thread(target=ask_again, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield server, callers.wait(), told


def test_spikes_the_doctor_names_the_prefills(spikes: Any) -> None:
    server, seen, _ = spikes
    said = quire("doctor", "--watch", "0.1", "--seconds", "600", url=server.url)
    assert said.returncode == 1, said.stdout + said.stderr
    found = causes(said.stdout)
    # That they use up the budget is true as well, and may weigh more.
    evidence, remedy = found["long prompts share steps with decodes"]
    assert "prompt tokens, mostly of cmpl-long" in evidence
    advice = re.search(r"--max-num-batched-tokens \(now 8192; try (\d+)\)", remedy)
    assert advice is not None and int(advice[1]) <= 4096, (
        "how much less the machine's speed decides"
    )
    assert "KV cache is too small" not in said.stdout


def test_spikes_explain_names_the_long_prompts(spikes: Any) -> None:
    server, seen, _ = spikes
    told = explained(server.url, "chat0")
    assert_agrees(told, seen["chat0"])
    parts = {part["cause"]: part for part in told["parts"]}
    beside = parts["decode_beside_prefill"]
    assert beside["requests"][0]["id"].startswith("cmpl-long")
    assert beside["seconds"] / beside["steps"] > 3 * (
        parts["decode"]["seconds"] / parts["decode"]["steps"]
    )
    slowest = told["slowest_step"]
    assert slowest["seconds"] >= beside["details"]["slowest_step"]["seconds"]
    if slowest["core_wait_seconds"] > slowest["seconds"] / 2:
        # On a busy machine the slowest step may be one that waited for a core.
        assert slowest["because_of"] is None and "core_wait" in parts
        return
    assert slowest["because_of"].startswith("cmpl-long") and slowest["prompt_tokens"] >= 1000
    text = quire("explain", "chat0", url=server.url).stdout
    assert f"-token prefill of {slowest['because_of']}" in text


def test_spikes_a_running_request_was_explained(spikes: Any) -> None:
    _, _, told = spikes
    assert told["state"] == "running" and 0 < told["num_output_tokens"] < CHAT_TOKENS
    assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["seconds"])


def test_a_healthy_server_has_no_finding(server: Server) -> None:
    callers = Callers(server, "h7")
    for i in range(16):
        callers.ask(f"h{i}", prompt=30, tokens=40)
    seen = callers.wait()
    said = quire("doctor", "--watch", "0.1", "--seconds", "3", url=server.url)
    assert causes(said.stdout) == {}, said.stdout + said.stderr
    assert ("nothing stands out" in said.stdout) == (said.returncode == 0)
    told = explained(server.url, "h7")
    assert_agrees(told, seen["h7"])
    waits = {part["reason"] for part in told["parts"] if part["cause"] == "queued"}
    assert waits <= {"step"}, "it waited for nothing but the end of a step"
