"""The life of a server process: bind, load, serve, drain, end; with the right exit codes."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from patience import PATIENCE, wait_for
from quire.config import ServerConfig
from quire.errors import StartupError
from quire.serving.listener import bind
from server_process import CHAT, Process, busy, free_port, is_up, serve, start_stream

__all__ = ["serve"]


def test_serves_and_ends_cleanly(serve: Callable[..., Process]) -> None:
    process = serve()
    url = process.url()
    process.go_on()
    assert f"curl {url}/v1/chat/completions" in process.output
    command = process.output[process.output.index("curl") :].split("\n\n")[0]
    done = subprocess.run(
        ["bash", "-c", command.replace("curl", "curl -s", 1)],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "abcdefghij"
    process.signal()
    assert process.end() == 0
    assert "engine stopped" in process.output and "Traceback" not in process.output


def test_answers_while_loading(serve: Callable[..., Process]) -> None:
    port = free_port()
    process = serve("loads-forever", str(port))
    wait_for(lambda: is_up(port))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
        wait_for(lambda: "weights" in client.get("/readyz").text)
        assert client.get("/livez").status_code == 200
        reply = client.post("/v1/chat/completions", json=CHAT)
        assert (reply.status_code, reply.json()["error"]["percent"]) == (503, 25)
    process.signal()
    assert process.end() == 0
    assert "engine stopped" in process.output


def test_taken_port_is_told_at_once(serve: Callable[..., Process]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = serve(where=str(port))
        assert process.end() == 1
        with pytest.raises(StartupError):
            bind(ServerConfig(port=port))
    assert process.output.count("\n") == 1, "nothing has been started before"
    assert str(port) in process.output and "--port" in process.output


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("no-model", 1, "quire serve: there is no model folder 'x'\n"),
        ("bug", 1, "a bug"),
        ("dies", 1, "quire serve: the engine died"),
    ],
)
def test_engine_failures_end_the_process(
    serve: Callable[..., Process], how: str, code: int, words: str
) -> None:
    process = serve(how)
    if how == "dies":
        process.url()
        process.go_on()
    assert process.end() == code
    assert words in process.output
    if how == "no-model":
        assert "Traceback" not in process.output


def assert_cut_short(lines: list[str]) -> None:
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["code"] == "shutting_down" and "before this request was finished" in str(error)
    assert not any('"finish_reason":"' in line for line in lines), "that would look like an end"


def test_without_patience_streams_end_with_an_error(serve: Callable[..., Process]) -> None:
    process = serve()
    url = process.url()
    thread, lines = start_stream(url)
    wait_for(lambda: busy(url))
    process.signal()
    assert process.end() == 0, "though the stream stands still"
    thread.join(PATIENCE)
    assert lines[-1] == "data: [DONE]"
    assert_cut_short(lines)


def test_drain_lets_streams_finish_and_refuses_new_ones(serve: Callable[..., Process]) -> None:
    process = serve(drain=600)
    url = process.url()
    thread, lines = start_stream(url)
    wait_for(lambda: busy(url))
    process.signal()
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        wait_for(lambda: client.get("/readyz").status_code == 503)
        refused = client.post("/v1/chat/completions", json=CHAT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in refused.headers
    process.go_on()
    assert process.end() == 0, "before the ten minutes are over"
    thread.join(PATIENCE)
    assert '"finish_reason":"stop"' in lines[-2]


def test_second_signal_ends_the_patience(serve: Callable[..., Process]) -> None:
    process = serve("stuck", drain=600)
    url = process.url()
    thread, lines = start_stream(url)
    wait_for(lambda: busy(url))
    process.signal()
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        wait_for(lambda: client.get("/readyz").status_code == 503)
    process.signal()
    assert process.end() == 0, "even with an engine that does not stop"
    thread.join(PATIENCE)
    assert_cut_short(lines)


def test_a_reply_that_is_cut_short_is_a_503(serve: Callable[..., Process]) -> None:
    process = serve()
    url = process.url()
    replies: list[httpx.Response] = []
    body = CHAT | {"stream": False}

    def ask() -> None:
        replies.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: busy(url))
    process.signal()
    assert process.end() == 0
    thread.join(PATIENCE)
    assert (replies[0].status_code, replies[0].json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in replies[0].headers


def test_a_drain_sends_what_a_slow_client_has_not_read(
    serve: Callable[..., Process], tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    process = serve(where=path, drain=600)
    wait_for(lambda: "ready at" in process.output)
    process.go_on()
    large = {"stream": False, "n": 128, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(CHAT | large).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\nconnection: close\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(path)
        slow.sendall(head.encode() + body)
        slow.recv(1)  # the whole reply has been handed to the transport
        process.signal()
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, timeout=PATIENCE) as client:
            wait_for(lambda: client.get("http://x/readyz").status_code == 503)
            for _ in range(100):  # it would be gone by then
                assert client.get("http://x/readyz").status_code == 503
        text = b""
        while piece := slow.recv(2**20):
            text += piece
    assert process.end() == 0
    reply, content = text.split(b"\r\n\r\n", 1)
    length = re.search(rb"content-length: (\d+)", reply)
    assert length and int(length[1]) == len(content) > 2**19, "more than the kernel buffers"


def test_a_death_during_the_drain_is_a_failure(serve: Callable[..., Process]) -> None:
    process = serve("dies", drain=600)
    url = process.url()
    thread, lines = start_stream(url)
    wait_for(lambda: busy(url))
    process.signal()
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        wait_for(lambda: client.get("/readyz").status_code == 503)
    process.go_on()
    assert process.end() == 1
    thread.join(PATIENCE)
    assert '"engine_dead"' in lines[-2] and "quire serve: the engine died" in process.output


def test_a_thread_that_hangs_does_not_delay_the_exit(serve: Callable[..., Process]) -> None:
    process = serve("hung-thread")
    process.url()
    process.signal()
    assert process.end() == 0


def test_the_service_manager_is_told(serve: Callable[..., Process], tmp_path: Path) -> None:
    path = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.settimeout(PATIENCE)
        there.bind(path)
        process = serve(drain=600, env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "40000"})

        def heard(word: str) -> str:
            while word not in (text := there.recv(4096).decode()):
                assert "STOPPING" not in text
            return text

        assert "EXTEND_TIMEOUT_USEC" in heard("STATUS=loading: weights, 25 %\n")
        heard("READY=1\nSTATUS=ready\n")
        url = process.url()
        for _ in range(3):
            heard("WATCHDOG=1\n")
        thread, _ = start_stream(url)
        wait_for(lambda: busy(url))
        process.signal()
        assert "STATUS=draining: 1 request(s)\n" in heard("STOPPING=1\n")
        process.go_on()
        assert process.end() == 0
        thread.join(PATIENCE)


def test_the_service_manager_is_told_however_short_the_drain(
    serve: Callable[..., Process], tmp_path: Path
) -> None:
    path = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(path)
        process = serve(env={"NOTIFY_SOCKET": path})
        process.url()
        process.signal()
        assert process.end() == 0
        there.setblocking(False)
        told = ""
        while "STOPPING=1" not in told:
            told = there.recv(4096).decode()  # nothing more comes: it would raise


def test_engine_death_reaches_streams(serve: Callable[..., Process]) -> None:
    process = serve("dies")
    url = process.url()
    thread, lines = start_stream(url)
    wait_for(lambda: busy(url))
    process.go_on()
    assert process.end() == 1
    thread.join(PATIENCE)
    assert lines[-1] == "data: [DONE]" and '"engine_dead"' in lines[-2]


def test_unix_socket(serve: Callable[..., Process], tmp_path: Path) -> None:
    path = tmp_path / "s"
    process = serve(where=str(path))
    wait_for(lambda: "ready at" in process.output)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE) as client:
        assert client.get("http://x/health").status_code == 200
    second = serve(where=str(path))
    assert second.end() == 1 and "another server listens" in second.output
    process.popen.kill()
    process.popen.wait()
    third = serve(where=str(path))
    wait_for(lambda: "ready at" in third.output)
    third.signal()
    assert third.end() == 0
    assert not path.exists()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("x")
    with pytest.raises(StartupError, match="not a socket"):
        bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "x"


def test_bad_addresses() -> None:
    for host, word in (("no.such.host.invalid", "not an address"), ("192.0.2.1", "--host")):
        with pytest.raises(StartupError, match=word):
            bind(ServerConfig(host=host, port=0, allow_unauthenticated=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_port_zero_picks_one(host: str) -> None:
    with bind(ServerConfig(host=host, port=0)) as listener:
        assert listener.getsockname()[1] > 0
