"""Batches over a fake engine: lines, what is kept of an unfinished run, and how much is in work."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.errors import ConfigError, EngineDead, EngineError, TooManyRequests
from quire.serving.app import build_app
from quire.serving.batch import run as runs
from quire.serving.batch.files import count_lines, open_input, read_lines, shown, upload
from quire.serving.batch.lines import BadLine, read_line, reply_line
from quire.serving.batch.run import READ_AHEAD, BatchRun, batch_urls
from quire.serving.batch.unfinished import Unfinished, digest_of
from quire.serving.server_state import ServerState

TEXT = "/v1/completions"


def row(name: str = "a", url: str = TEXT, **body: Any) -> bytes:
    given = {"prompt": "hi", "max_tokens": 2, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": given}).encode()


# ---- lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said", "name"),
    [
        (b"{", "it is not valid JSON: Input data was truncated", None),
        (b'{"custom_id": "a",}', "it is not valid JSON: ", None),
        (b"\xff\xfe{}", "it is not valid JSON", None),
        (b'{"custom_id": "\xff"}', "it is not valid JSON: it is not UTF-8", None),
        (b'"text"', "it is no request: Expected `object`, got `str`", None),
        (b'{"method": "POST"}', "missing required field `custom_id`", None),
        (b'{"custom_id": 5}', "Expected `str`, got `int`", None),
        (b'{"custom_id": "b", "method": "POST"}', "missing required field `url`", "b"),
        (b'{"custom_id": "b", "method": "POST", "url": "/"}', "missing required field `body`", "b"),
        (row().replace(b"POST", b"GET"), "method must be POST, got 'GET'", "a"),
        (row(url="/v1/chats"), "url must be one of X, got '/v1/chats'", "a"),
        (row(stream=True), "stream must be false in a batch", "a"),
        (row(background=True), "background must be false in a batch", "a"),
        (b'{"x": ' + b"[" * 100_000, "nested too deeply", None),
    ],
)
def test_bad_lines(data: bytes, said: str, name: str | None) -> None:
    with pytest.raises(BadLine) as caught:
        read_line(data, {TEXT}, "X")
    assert said in caught.value.message and caught.value.custom_id == name


def test_a_body_is_passed_on_byte_by_byte() -> None:
    data = (
        b'{"custom_id":"a","extra":1,"url":"/v1/completions","method":"post","body":{ "x" :1.50 }}'
    )
    assert bytes(read_line(data, {TEXT}, "").body) == b'{ "x" :1.50 }'
    assert bytes(read_line(data.replace(b'{ "x" :1.50 }', b'"no"'), {TEXT}, "").body) == b'"no"'


def test_a_reply_is_one_line() -> None:
    line = read_line(row(), {TEXT}, "")
    for body in (b'{"a": 1}', b'{"a":\r\n 1}', b'{\n"error": null}'):
        made = reply_line(line, 200, "i", body)
        assert b"\n" not in made and b"\r" not in made
        assert json.loads(made)["response"]["body"] == json.loads(body)
    assert b'{"a": 1}' in reply_line(line, 200, "i", b'{"a": 1}'), "byte by byte"


def test_lines_of_a_file() -> None:
    data = (
        b"\xef\xbb\xbf{1}\r\n\n  \n" + b"x" * 50 + b"\n" + b"y" * 10 + b"\n" + b"z" * 11 + b"\nend"
    )
    found = list(read_lines(io.BytesIO(data), "f", 10))
    assert found == [(1, b"{1}"), (4, None), (5, b"y" * 10), (6, None), (7, b"end")]


def test_the_routes_of_a_batch() -> None:
    found = batch_urls()
    wanted = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
    )
    assert {*wanted, "/score", "/rerank", "/v2/rerank", "/v1/responses", "/v1/messages"} <= {*found}
    assert not {"/limits", "/reset_prefix_cache", "/metrics", "/v1/responses/{id}/cancel"} & {
        *found
    }


# ---- what is kept --------------------------------------------------------------------------------


def test_an_unfinished_run_is_continued(tmp_path: Path) -> None:
    path, output = tmp_path / "out.partial", tmp_path / "out"
    with Unfinished(path, "m") as first:
        assert not len(first)
        first.add(3, digest_of(b"three"), b'{"n":3,"error":null}')
        first.add(1, digest_of(b"one"), b'{"n":1,"error":{"a":null}}')
    whole = path.read_bytes()
    path.write_bytes(whole + b'2 0123456789abcdef {"n":2,"err')
    with Unfinished(path, "m") as second:
        assert len(second) == 2 and path.read_bytes() == whole, "what was cut off is dropped"
        assert second.has(3, digest_of(b"three")) and not second.has(2, digest_of(b"two"))
        assert second.failed(1) and not second.failed(3)
        second.add(2, digest_of(b"two"), b'{"n":2,"error":null}')
        second.finish(output, 3)
        assert [json.loads(line)["n"] for line in output.read_bytes().splitlines()] == [1, 2, 3]
        second.delete()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_first_write_may_be_cut_off(tmp_path: Path, cut: int) -> None:
    with Unfinished(tmp_path / "p", "model") as made:
        made.add(1, digest_of(b""), b"{}")
    data = (tmp_path / "p").read_bytes()
    (tmp_path / "p").write_bytes(data[:cut])
    with Unfinished(tmp_path / "p", "model") as made:
        assert not len(made)
        made.add(1, digest_of(b""), b"{}")
    assert (tmp_path / "p").read_bytes() == data


def test_what_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "p"
    with Unfinished(path, "one") as made:
        made.add(2, digest_of(b"x"), b"{}")
        with pytest.raises(ConfigError, match="another process is writing"):
            Unfinished(path, "one")
        with pytest.raises(ConfigError, match="line 2 of the input is not the one that"):
            made.has(2, digest_of(b"y"))
        with pytest.raises(ConfigError, match="has a result of line 2, and the input has 1 lines"):
            made.finish(tmp_path / "out", 1)
    with pytest.raises(ConfigError, match="begun with the model one, and this is the model two"):
        Unfinished(path, "two")
    path.write_text("mine\n")
    with pytest.raises(ConfigError, match="begun with another program"):
        Unfinished(path, "one")
    assert path.read_text() == "mine\n", "a file that is not ours stays as it is"
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        Unfinished(tmp_path / "no" / "p", "one")


# ---- the run -------------------------------------------------------------------------------------


class Bench:
    """Runs batches over a fake engine."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.engine = FakeEngine()
        self.state = ServerState(ServerConfig(**config), self.engine)
        self.unfinished = Unfinished(folder / "p", "m")
        self.seen: list[bool] = []
        self.taken = 0

    def lines(self, rows: list[bytes]) -> Iterator[tuple[int, bytes | None]]:
        for number, data in enumerate(rows, 1):
            self.taken = number
            yield number, data

    async def run(self, rows: list[bytes], concurrency: int = 4) -> list[Any]:
        run = BatchRun(
            build_app(self.state), self.state, self.unfinished, concurrency, self.seen.append
        )
        last = await run.run(self.lines(rows))
        output = self.unfinished.path.with_name("out")
        self.unfinished.finish(output, last)
        return [json.loads(line) for line in output.read_bytes().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.unfinished:
        yield made


async def test_good_and_bad_lines(bench: Bench) -> None:
    rows = [row("a"), b"{", row("b"), row("a"), row("c", max_tokens=-1), row("d", url="/x")]
    found = await bench.run(rows)
    assert [one["custom_id"] for one in found] == ["a", None, "b", "a", "c", "d"]
    assert [one["response"] and one["response"]["status_code"] for one in found] == [
        200, None, 200, None, 400, None,
    ]  # fmt: skip
    assert found[0]["error"] is None and found[0]["response"]["body"]["choices"][0]["text"] == "He"
    assert found[0]["response"]["request_id"] in found[0]["response"]["body"]["id"]
    assert found[1]["error"]["message"].startswith("Line 2: it is not valid JSON")
    assert found[3]["error"]["message"] == "Line 4: its custom_id is that of line 1 too."
    assert found[4]["error"] == found[4]["response"]["body"]["error"]
    assert "max_tokens" in found[4]["error"]["message"]
    assert bench.seen.count(True) == 4 and len(bench.seen) == 6
    assert len({one["id"] for one in found}) == 6
    assert len(bench.engine.submitted) == 2


async def test_a_bounded_number_is_in_work(bench: Bench) -> None:
    bench.engine.hang.clear()
    task = asyncio.ensure_future(bench.run([row(str(i)) for i in range(500)], 7))
    while len(bench.engine.submitted) < 7:
        await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(bench.engine._tasks) == 7 and bench.taken <= READ_AHEAD
    bench.engine.hang.set()
    assert len(await task) == 500 and bench.taken == 500


async def test_what_is_done_is_not_asked_again(bench: Bench) -> None:
    rows = [row(str(i)) for i in range(6)]
    before = await bench.run(rows[:4])
    assert len(bench.engine.submitted) == 4
    after = await bench.run(rows)
    assert len(bench.engine.submitted) == 6 and after[:4] == before


async def test_what_is_cancelled_is_kept_as_far_as_it_is(bench: Bench) -> None:
    rows = [row(str(i)) for i in range(8)]
    task = asyncio.ensure_future(bench.run(rows, 2))
    while len(bench.seen) < 3:
        await asyncio.sleep(0)
    bench.engine.hang.clear()
    while len(bench.engine._tasks) < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    done = len(bench.unfinished)
    assert 3 <= done < 8 and not bench.engine._tasks, "the rest was aborted"
    bench.engine.hang.set()
    count = len(bench.engine.submitted)
    assert len(await bench.run(rows)) == 8
    assert len(bench.engine.submitted) == count + 8 - done


async def test_a_busy_server_is_asked_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            bench.engine.refuse = None

    bench.engine.refuse = TooManyRequests("The queue is full.", retry_after=3)
    monkeypatch.setattr(runs, "asyncio", _Patched(sleep))
    (found,) = await bench.run([row()])
    assert found["response"]["status_code"] == 200 and pauses == [3.0, 3.0]


class _Patched:
    """asyncio with another sleep."""

    def __init__(self, sleep: Any) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


async def test_a_dead_engine_ends_the_run_and_is_no_result(bench: Bench) -> None:
    await bench.run([row("a")])
    bench.engine.state, bench.engine.error = "dead", EngineDead("killed")
    with pytest.raises(EngineDead, match="killed"):
        await bench.run([row("a"), row("b")])
    assert len(bench.unfinished) == 1


async def test_keys_do_not_lock_it_out(tmp_path: Path) -> None:
    made = Bench(tmp_path, api_key=["secret"])
    with made.unfinished:
        (found,) = await made.run([row()])
    assert found["response"]["status_code"] == 200


# ---- URLs ----------------------------------------------------------------------------------------


class Web(BaseHTTPRequestHandler):
    """Gives a file, and takes one; refuses as often as it is told."""

    given = b""
    taken: list[bytes] = []
    refusals = 0

    def do_GET(self) -> None:
        self.send_response(404 if "missing" in self.path else 200)
        self.send_header("Content-Length", str(len(self.given)))
        self.end_headers()
        self.wfile.write(self.given)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = 200
        if Web.refusals:
            Web.refusals, status = Web.refusals - 1, 500
        else:
            Web.taken.append(body)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Web)
    Web.taken, Web.refusals = [], 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_urls_are_read_and_written(web: str, tmp_path: Path) -> None:
    Web.given = b"one\ntwo"
    with open_input(f"{web}/in") as file:
        assert [data for _, data in read_lines(file, web, 100)] == [b"one", b"two"]
    assert count_lines(f"{web}/in") is None
    (tmp_path / "out").write_bytes(b"result")
    pauses: list[float] = []
    Web.refusals = 2
    upload(tmp_path / "out", f"{web}/out", pauses.append)
    assert Web.taken == [b"result"] and len(pauses) == 2
    Web.refusals = 5
    with pytest.raises(
        EngineError, match=r"/out does not take the result \(status 500\); it is in"
    ):
        upload(tmp_path / "out", f"{web}/out?key=secret", pauses.append)


def test_an_input_that_cannot_be_read(web: str, tmp_path: Path) -> None:
    for where, said in (
        (str(tmp_path / "no"), "no cannot be read: No such file or directory"),
        (str(tmp_path), "cannot be read: Is a directory"),
        (f"{web}/missing?key=secret", "/missing answers with status 404$"),
        ("http://127.0.0.1:1/x", "cannot be read: .*refused"),
    ):
        with pytest.raises(ConfigError, match=said) as caught, open_input(where):
            pass
        assert "secret" not in caught.value.message
    assert shown("https://me:pass@h.org:1/p?k=v") == "https://h.org:1/p"
