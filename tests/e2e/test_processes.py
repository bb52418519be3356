"""Processes: none torch where it must not be, none left behind, none that works for nothing."""

from __future__ import annotations

import json
import os
import re
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
from patience import PATIENCE, wait_for

START_CPU_SECONDS = 6.0
"""What a start up to the first token may work, over all processes. It takes 2; how long that is
in seconds of a clock `benchmarks/startup.py` says."""
IDLE_WAKEUPS = 60
"""How often a second the threads of an idle server may wake up. They do 21 times."""
IDLE_CPU = 0.05
"""The part of one core that they may take. It is below 0.01; what spins takes all it gets."""


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def wakeups(processes: list[psutil.Process]) -> int:
    """How often their threads have stopped to wait for something."""
    threads = [t for p in processes for t in Path(f"/proc/{p.pid}/task").iterdir()]
    texts = [(t / "status").read_text() for t in threads]
    found = [re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.M) for text in texts]
    return sum(int(match[1]) for match in found if match)


def stream_first_token(url: str) -> None:
    """Return when the first piece of text has arrived."""
    body = {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    return
    raise AssertionError("no token came")


def test_a_start_up_to_the_first_token_is_little_work() -> None:
    with serving() as server:
        stream_first_token(server.url)
        spent = cpu_seconds(server.family())
    assert spent < START_CPU_SECONDS


def test_the_api_process_has_no_torch(server: Server) -> None:
    stream_first_token(server.url)
    api, *rest = server.family()
    maps = Path(f"/proc/{api.pid}/maps").read_text()
    assert "torch" not in maps
    titles = [" ".join(process.cmdline()).strip() for process in rest]
    # Another test of this server may have asked for a grammar, which a process of its own compiles.
    assert [t for t in titles if "quire::Grammars" not in t] == ["quire::EngineCore"], titles
    assert "torch" in Path(f"/proc/{rest[0].pid}/maps").read_text()


_CLIENT = """
import json, sys, httpx
reply = httpx.post(sys.argv[1] + "/v1/completions", json=json.loads(sys.argv[2]), timeout=600)
print(reply.status_code, reply.json()["error"]["code"])
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_ends_all_processes(signum: int) -> None:
    """Without a `--shutdown-timeout` it does not wait for the requests: they end with an error."""
    body = {"model": "quire-demo", "prompt": "a", "max_tokens": 1900, "n": 32}
    body |= {"ignore_eos": True, "temperature": 1}
    with serving("--shutdown-timeout", "0") as server:
        command = [sys.executable, "-c", _CLIENT, server.url, json.dumps(body)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: server.metric("vllm:num_requests_running") or client.poll(), "running")
        family = server.family()
        server.process.send_signal(signum)
        assert server.process.wait(PATIENCE) == 0
        assert gone(family)
        assert client.communicate(timeout=PATIENCE)[0] == "503 shutting_down\n"


def test_a_port_in_use_is_one_line() -> None:
    """It is all that is said: the model has not been loaded first."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*QUIRE, "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert port in done.stderr and "in use" in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stdout + done.stderr


def test_an_idle_engine_sleeps(server: Server) -> None:
    """It neither polls nor spins. On a busy machine it could only do less of both."""
    stream_first_token(server.url)
    server.wait_idle()
    family = server.family()
    start, awake, worked = time.monotonic(), wakeups(family), cpu_seconds(family)
    time.sleep(3)
    awake, worked = wakeups(family) - awake, cpu_seconds(family) - worked
    seconds = time.monotonic() - start
    assert awake < IDLE_WAKEUPS * seconds
    assert worked < IDLE_CPU * seconds


def test_environment_is_not_needed(tmp_path: Path) -> None:
    """No HOME, no cache folder, a read-only working directory."""
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [*QUIRE, "complete", "The capital of France is", "--max-tokens", "4"],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
