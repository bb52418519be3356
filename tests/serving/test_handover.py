"""A server hands its listening socket to the next one: nothing is refused, nothing is cut off."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from patience import PATIENCE, wait_for
from server_process import CHAT, Process, busy, free_port, serve, start_stream

__all__ = ["serve"]
Serve = Callable[..., Process]


@pytest.fixture
def pair(serve: Serve, tmp_path: Path) -> Callable[..., Process]:
    """Servers with one address and one hand-over socket."""
    port, path = str(free_port()), str(tmp_path / "handover")

    def start(how: str = "well", seconds: float = 600, **more: str) -> Process:
        where, door = more.get("where", port), more.get("door", path)
        return serve(how, where, 600.0, None, door, str(seconds))

    return start


def is_taken(process: Process) -> bool:
    return "has taken the listening socket over" in process.output


def test_streams_end_where_they_began_and_new_ones_begin_at_the_successor(pair: Serve) -> None:
    first = pair()
    url = first.url()
    thread, lines = start_stream(url)
    wait_for(lambda: busy(url))
    kept = httpx.Client(base_url=url, timeout=PATIENCE)
    assert "connection" not in kept.get("/version").headers

    second = pair()
    assert second.url() == url
    wait_for(lambda: is_taken(first))
    assert not busy(url), "a new connection is the successor's"
    late, late_lines = start_stream(url)
    wait_for(lambda: busy(url))
    again = kept.get("/load")
    assert again.json()["server_load"] == 1, "an old connection is served where it was made"
    assert again.headers["connection"] == "close"
    kept.close()

    first.go_on()
    assert first.end() == 0
    thread.join(PATIENCE)
    assert '"finish_reason":"stop"' in lines[-2]
    second.go_on()
    late.join(PATIENCE)
    assert '"finish_reason":"stop"' in late_lines[-2]
    second.signal()
    assert second.end() == 0


class Clients:
    """Ask again and again, each request on a connection of its own."""

    def __init__(self, url: str, count: int) -> None:
        self.outcomes: list[object] = []
        self._url, self._enough = url, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._enough.is_set():
            try:
                body = CHAT | {"stream": False}
                reply = httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=PATIENCE)
                self.outcomes.append(reply.json()["choices"][0]["message"]["content"])
            except Exception as error:
                self.outcomes.append(error)

    def stop(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(PATIENCE)


def test_nothing_is_refused_in_hand_overs_under_load(pair: Serve, tmp_path: Path) -> None:
    server = pair()
    url = server.url()
    server.go_on()
    clients = Clients(url, 4)
    for _ in range(4):
        successor = pair()
        successor.url()
        successor.go_on()
        assert server.end() == 0
        server, asked = successor, len(clients.outcomes)
        wait_for(lambda asked=asked: len(clients.outcomes) > asked + 20)
    clients.stop()
    assert set(clients.outcomes) == {"abcdefghij"}
    server.signal()
    assert server.end() == 0
    assert not (tmp_path / "handover").exists(), "the last one cleans up"


def test_a_successor_that_fails_changes_nothing(pair: Serve) -> None:
    first = pair()
    url = first.url()
    second = pair("no-model")
    assert second.end() == 1
    third = pair("loads-forever")
    wait_for(lambda: third.popen.poll() is None and httpx.get(f"{url}/readyz"))
    third.signal(signal.SIGKILL)
    third.end()
    assert httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 200
    assert not is_taken(first)


def test_a_successor_that_dies_with_the_socket_changes_nothing(pair: Serve, tmp_path: Path) -> None:
    first = pair()
    url = first.url()
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(PATIENCE)
        door.connect(str(tmp_path / "handover"))
        door.sendall(b"take\n")
        said, fds, _, _ = socket.recv_fds(door, 100, 1)
        assert said.startswith(f"I {first.popen.pid} 127.0.0.1:".encode())
        os.close(fds[0])
    assert httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 200
    assert pair().url() == url
    wait_for(lambda: is_taken(first))


@pytest.mark.parametrize("junk", [b"", b"hand it over\n", b"serving\n", b"\xff" * 500])
def test_junk_at_the_socket_is_no_question(pair: Serve, tmp_path: Path, junk: bytes) -> None:
    first = pair()
    url = first.url()
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(str(tmp_path / "handover"))
        door.sendall(junk)
        door.shutdown(socket.SHUT_WR)
        door.settimeout(PATIENCE)
        assert door.recv(100) == b""
    assert httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 200
    assert not is_taken(first)


def test_another_address_is_told_before_anything_is_loaded(pair: Serve) -> None:
    first = pair()
    url = first.url()
    second = pair(where=str(free_port()))
    assert second.end() == 1
    assert second.output.count("\n") == 1 and url.removeprefix("http://") in second.output
    assert "--port" in second.output


def test_a_file_that_is_no_socket_stays(pair: Serve, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("precious")
    process = pair(door=str(file))
    assert process.end() == 1
    assert "not a socket" in process.output and file.read_text() == "precious"


def test_after_a_hand_over_time_is_limited(pair: Serve) -> None:
    first = pair(seconds=0)
    url = first.url()
    thread, lines = start_stream(url)
    wait_for(lambda: busy(url))
    pair().url()
    assert first.end() == 0
    thread.join(PATIENCE)
    assert '"shutting_down"' in lines[-2] and lines[-1] == "data: [DONE]"


def test_a_unix_socket_keeps_its_name(pair: Serve, tmp_path: Path) -> None:
    where = str(tmp_path / "http")
    first = pair(where=where)
    wait_for(lambda: "ready at" in first.output)
    second = pair(where=where)
    wait_for(lambda: "ready at" in second.output)
    assert first.end() == 0
    transport = httpx.HTTPTransport(uds=where)
    with httpx.Client(transport=transport, timeout=PATIENCE) as client:
        assert client.get("http://x/readyz").status_code == 200
    second.signal()
    assert second.end() == 0
    assert not Path(where).exists()


def test_the_service_manager_hears_who_serves_now(serve: Serve, tmp_path: Path) -> None:
    path, door, port = str(tmp_path / "n"), str(tmp_path / "handover"), str(free_port())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.settimeout(PATIENCE)
        there.bind(path)
        env = {"NOTIFY_SOCKET": path}
        first = serve("well", port, 0.0, env, door, "600")
        while "READY=1\n" not in there.recv(4096).decode():
            pass
        second = serve("well", port, 0.0, env, door, "600")
        while (said := there.recv(4096).decode()) and "MAINPID" not in said:
            assert "STOPPING" not in said
        assert said == f"MAINPID={second.popen.pid}\nREADY=1\nSTATUS=ready\n"
        assert first.end() == 0
        second.signal()
        while "STOPPING=1\n" not in (said := there.recv(4096).decode()):
            assert "STATUS=ready" not in said, "of the first, which has left"
        assert second.end() == 0
