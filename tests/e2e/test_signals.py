"""Signals to a server's whole process group, as terminals, systemd and containers send them."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from typing import Any

import httpx
import psutil
import pytest

from live_server import Server, serving
from patience import PATIENCE, wait_for

LONG = (1900, 16)
"""Tokens and choices of what is still under way when a test has seen what it waits for."""


def to_group(server: Server, number: int) -> None:
    os.killpg(server.process.pid, number)


class Request:
    """A streamed completion, or several at once, read on a thread."""

    def __init__(self, url: str, max_tokens: int = 700, n: int = 1) -> None:
        self._body = {
            "model": "quire-demo", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True,
            "seed": 1, "stream": True, "n": n, "temperature": 1,
        }  # fmt: skip
        self.text, self.finish, self.error = "", "", ""
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()
        wait_for(lambda: self.text)

    def _read(self, url: str) -> None:
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=self._body, timeout=PATIENCE
            ) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self._note(json.loads(line[6:]))
        except httpx.HTTPError as error:
            self.error = str(error)

    def _note(self, event: dict[str, Any]) -> None:
        self.error += str(event.get("error", ""))
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_drain_finishes_its_requests(number: int) -> None:
    """The signal reaches the core too; it must go on until the requests are done."""
    with serving("--shutdown-timeout", "600", own_group=True) as server:
        request = Request(server.url)
        family = server.family()
        to_group(server, number)
        request.join()
        assert (request.finish, request.error) == ("length", ""), server.log
        assert server.process.wait(PATIENCE) == 0
        assert not psutil.wait_procs(family, timeout=PATIENCE)[1]
        assert "died" not in server.log and "Traceback" not in server.log
        name = signal.Signals(number).name
        assert f"{name}: ending; 1 request(s) have 600 s to finish" in server.log


def test_a_second_signal_ends_the_drain() -> None:
    with serving("--shutdown-timeout", "600", own_group=True) as server:
        request = Request(server.url, *LONG)
        family = server.family()
        to_group(server, signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/readyz", timeout=PATIENCE).status_code == 503)
        assert not request.finish
        to_group(server, signal.SIGTERM)
        request.join()
        assert not request.finish and "shutting_down" in request.error
        assert server.process.wait(PATIENCE) == 0
        assert not psutil.wait_procs(family, timeout=PATIENCE)[1]
        assert "died" not in server.log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_core_loads(number: int, code: int) -> None:
    """As soon as the core's process exists: its interpreter has hardly begun."""
    with serving(own_group=True) as server:
        api = psutil.Process(server.process.pid)
        wait_for(api.children)
        core = api.children()[0]
        to_group(server, number)
        assert server.process.wait(PATIENCE) == code, server.log
        assert not psutil.wait_procs([core], timeout=PATIENCE)[1]
    assert "Traceback" not in server.log and "died" not in server.log
    assert server.log.count("stopped while starting") == 1


def test_a_core_outlives_signals_but_not_its_parent() -> None:
    """Under nohup a hang-up is nothing to the server either."""
    with serving(own_group=True, ignored=signal.SIGHUP) as server:
        request = Request(server.url, *LONG)
        core = server.family()[1]
        to_group(server, signal.SIGHUP)
        for number in (signal.SIGTERM, signal.SIGINT):
            core.send_signal(number)
        seen = len(request.text)
        wait_for(lambda: len(request.text) > seen)
        assert httpx.get(f"{server.url}/readyz", timeout=PATIENCE).status_code == 200
        server.process.kill()
        assert not psutil.wait_procs([core], timeout=PATIENCE)[1]
        request.join()
        assert request.error


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "out of memory"),
        (signal.SIGSEGV, "Fatal Python error"),
    ],
)
def test_the_end_of_a_core_is_told_with_its_likely_cause(number: int, told: str) -> None:
    with serving(
        "--core-restart-limit",
        "0",
    ) as server:
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        core = server.family()[1]
        core.send_signal(number)
        assert server.process.wait(PATIENCE) == 1
        server.stop()
    last = server.lines[-1]
    assert last.startswith("quire serve: the engine core died (")
    assert signal.Signals(number).name in last and told in last
    if number == signal.SIGKILL:
        held = re.search(r"It held (\d+)\.\d MiB when last seen", last)
        assert held and int(held.group(1)) > 50  # torch alone is more
    else:
        assert any("Fatal Python error: Segmentation fault" in line for line in server.lines[:-1])
