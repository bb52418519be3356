"""Processes: none torch where it must not be, none left behind, none too slow."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from live_server import QUIRE, Server, serving


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def stream_first_token(url: str) -> None:
    """Return when the first piece of text has arrived."""
    body = {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    return
    raise AssertionError("no token came")


def test_first_token_within_three_seconds_of_process_start() -> None:
    """The best of three: the machine may be busy with something else."""
    times = []
    for _ in range(3):
        with serving() as server:
            stream_first_token(server.url)
            times.append(time.monotonic() - server.started)
        if times[-1] <= 3.0:
            return
    raise AssertionError(f"first streamed token after {times} s")


def test_the_api_process_has_no_torch(server: Server) -> None:
    stream_first_token(server.url)
    api, *rest = server.family()
    maps = Path(f"/proc/{api.pid}/maps").read_text()
    assert "torch" not in maps
    assert len(rest) == 1, "one engine core and nothing else"
    assert "torch" in Path(f"/proc/{rest[0].pid}/maps").read_text()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_ends_all_processes(signum: int) -> None:
    with serving() as server:
        url = server.url
        body = {"model": "quire-demo", "prompt": "a", "max_tokens": 1500, "ignore_eos": True}
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", _CLIENT, url, json.dumps(body)], stdout=subprocess.DEVNULL
            )
            for _ in range(2)
        ]
        deadline = time.monotonic() + 20
        while server.metric("vllm:num_requests_running") < 2 and time.monotonic() < deadline:
            pass
        family = server.family()
        start = time.monotonic()
        server.process.send_signal(signum)
        assert server.process.wait(3) == 0
        assert gone(family, 3 - (time.monotonic() - start))
        for client in clients:
            client.wait(10)


_CLIENT = """
import json, sys, httpx
try:
    httpx.post(sys.argv[1] + "/v1/completions", json=json.loads(sys.argv[2]), timeout=60)
except httpx.HTTPError:
    pass
"""


def test_nothing_survives_kill_9_of_the_api_process() -> None:
    with serving() as server:
        stream_first_token(server.url)
        family = server.family()
        assert len(family) == 2
        server.process.kill()
        assert gone(family, 3)


def test_kill_9_while_loading_leaves_nothing() -> None:
    with serving() as server:
        deadline = time.monotonic() + 10
        while len(server.family()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        family = server.family()
        server.process.kill()
        assert gone(family, 3)


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        start = time.monotonic()
        done = subprocess.run(
            [*QUIRE, "serve", "--port", port], capture_output=True, text=True, timeout=20
        )
    assert done.returncode != 0
    assert time.monotonic() - start < 5
    assert port in done.stderr and "in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_idle_engine_sleeps(server: Server) -> None:
    stream_first_token(server.url)
    server.wait_idle()
    family = server.family()

    def cpu() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in family)

    # A collection or a page of statistics may fall into one span: the quietest of a few counts.
    spent = []
    for _ in range(3):
        before = cpu()
        time.sleep(2)
        spent.append(cpu() - before)
    assert min(spent) <= 0.02, f"more than 1 % of a core while idle: {spent} s in 2 s each"


def test_environment_is_not_needed(tmp_path: Path) -> None:
    """No HOME, no cache folder, a read-only working directory."""
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [*QUIRE, "complete", "The capital of France is", "--max-tokens", "4"],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
