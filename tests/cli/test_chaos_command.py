"""`quire chaos` against toy servers: a sound one, and one for each defect that it must notice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.chaos import faults as table
from quire.chaos.faults import Size
from quire.chaos.run import Result
from quire.chaos.run import table as report_table
from quire.chaos.target import HttpReply, HttpTarget
from quire.cli import main as cli
from quire.cli.chaos import main

ANSWER = " Paris."
TINY = Size(aborts=4, readers=2, partial=3, cases=30, rounds=2, seconds=0.3)
Body = dict[str, Any]
Defect = Callable[["Toy", Body | None, dict[str, str]], tuple[int, Body] | None]


class Toy:
    """An OpenAI-compatible server of one answer, and a defect.

    Args:
        defect: Told each request; what it returns is sent instead of the right reply.
        key: Without it, 401.
        chat_only: There is no `/v1/completions`.
    """

    def __init__(
        self, defect: Defect | None = None, key: str | None = None, chat_only: bool = False
    ) -> None:
        self.defect, self.key, self.chat_only = defect, key, chat_only
        self.seen = 0
        self.running = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (ValueError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line, *rest = head.decode("latin-1").split("\r\n")
        method, path, _ = line.split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (one.partition(":") for one in rest)}
        raw = b""
        if headers.get("transfer-encoding"):
            while size := int(await reader.readline(), 16):
                raw += (await reader.readexactly(size + 2))[:-2]
                if len(raw) > 2**21:
                    return
        elif length := int(headers.get("content-length", 0)):
            raw = await reader.readexactly(length)
        status, reply = await self.reply(method, path, raw, headers)
        extra = "Retry-After: 1\r\n" if status == 429 else ""
        text = json.dumps(reply).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n{extra}\r\n".encode())
        writer.write(text)
        await writer.drain()

    async def reply(
        self, method: str, path: str, raw: bytes, headers: dict[str, str]
    ) -> tuple[int, Body]:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return 401, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "toy"}]}
        if path not in ("/v1/completions", "/v1/chat/completions") or (
            self.chat_only and "chat" not in path
        ):
            return 404, {}
        self.seen += 1
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        self.running += 1
        try:
            await asyncio.sleep(0.002)
            if self.defect and (found := self.defect(self, body, headers)):
                return found
        finally:
            self.running -= 1
        if not isinstance(body, dict) or not (body.get("prompt") or body.get("messages")):
            return 400, {"error": {"message": "bad"}}
        return 200, {"choices": [{"index": 0, "text": ANSWER, "finish_reason": "stop"}]}


@contextmanager
def serving(toy: Toy) -> Iterator[str]:
    """Its URL while the block runs."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(toy.serve, "127.0.0.1", 0, limit=2**22))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:

        async def end() -> None:
            server.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.SIZES, "small", TINY)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.delenv("QUIRE_ADMIN_API_KEY", raising=False)


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return {row["fault"]: row for row in json.loads(capsys.readouterr().out)["faults"]}


@pytest.mark.parametrize("toy", [Toy(), Toy(key="k1"), Toy(chat_only=True)])
def test_a_sound_server(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """Every attack holds, whatever route and key the server has."""
    key = ["--api-key", toy.key] if toy.key else []
    with serving(toy) as url:
        assert main([url, "--size", "small", "--json", *key]) == 0
    rows = told(capsys)
    assert list(rows) == list(table.faults())
    assert all(row["state"] == "holds" and row["canaries"] for row in rows.values())
    assert toy.seen > 300


def another_answer(toy: Toy, body: Body | None, headers: dict[str, str]) -> Any:
    if toy.seen > 20:  # in the middle of the attack, and for good
        return 200, {"choices": [{"index": 0, "text": " Rome.", "finish_reason": "stop"}]}
    return None


def fails_on_bad_json(toy: Toy, body: Body | None, headers: dict[str, str]) -> Any:
    return (500, {"error": {}}) if body is None else None


def tells_a_path(toy: Toy, body: Body | None, headers: dict[str, str]) -> Any:
    return (400, {"error": {"message": 'File "/app/x.py"'}}) if body is None else None


def refuses_without_a_time(toy: Toy, body: Body | None, headers: dict[str, str]) -> Any:
    return (503, {}) if toy.running > 3 else None


def swaps_by_id(toy: Toy, body: Body | None, headers: dict[str, str]) -> Any:
    if headers.get("x-request-id") == "same":
        return 200, {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
    return None


def dies_of_it(toy: Toy, body: Body | None, headers: dict[str, str]) -> Any:
    if isinstance(body, dict) and body.get("logit_bias"):
        toy.key = "nobody knows it"
    return None


DEFECTS: dict[str, tuple[Defect, str]] = {
    "another answer": (another_answer, "distinct-values"),
    "5xx": (fails_on_bad_json, "bad-json"),
    "a path in a reply": (tells_a_path, "bad-json"),
    "a refusal without a time": (refuses_without_a_time, "overload"),
    "answers that follow ids": (swaps_by_id, "ids"),
    "gone afterwards": (dies_of_it, "token-ids"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_noticed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.chaos.run.RECOVERY_SECONDS", 0.5)
    defect, fault = DEFECTS[name]
    with serving(Toy(defect)) as url:
        assert main([url, "--size", "small", "--json", "--fault", fault]) == 1
    assert told(capsys)[fault]["complaints"]


def test_a_server_that_differs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def random_answer(toy: Toy, body: Body | None, headers: dict[str, str]) -> Any:
        text = str(toy.seen)
        return 200, {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}

    with serving(Toy(random_answer)) as url:
        assert cli.main(["chaos", url]) == 1
    assert "differently when nothing else happens" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Dead, another path, no key: one line each."""
    assert cli.main(["chaos", "http://127.0.0.1:9"]) == 1
    with serving(Toy()) as url:
        assert cli.main(["chaos", url + "/other"]) == 1
    with serving(Toy(key="k")) as url:
        assert cli.main(["chaos", url]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for line, part in zip(lines, ("cannot reach", "answers 404", "answers 401"), strict=True):
        assert part in line


def test_another_machine_needs_a_yes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chaos", "http://192.0.2.1:8000"]) == 2 or capsys.readouterr()
    assert (
        HttpTarget("http://localhost:1", "").is_local and HttpTarget("http://[::1]:1", "").is_local
    )
    assert HttpTarget("http://127.1.2.3:1/v1", "").is_local
    for url in ("http://192.0.2.1", "http://localhost.example.com", "http://10.0.0.1:8000"):
        assert not HttpTarget(url, "").is_local
        assert cli.main(["chaos", url]) != 0
        assert "--yes" in capsys.readouterr().err


def test_wrong_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chaos", "--fault", "disconnect"]) == 2
    assert "did you mean" in capsys.readouterr().err.lower()
    assert cli.main(["chaos", "--size", "huge"]) == 2
    assert cli.main(["chaos", "--fault", "list"]) == 0
    assert "slow-readers" in capsys.readouterr().out


def test_the_report_tells_what_was_seen_in_words() -> None:
    facts = {"statuses": {400: 12, 404: 3}, "refusal_p99_s": None, "answered": 7}
    lines = report_table([Result("bad-json", "x", "y", facts=facts)]).splitlines()
    assert lines[-1] == "bad-json: statuses 400: 12, 404: 3; refusal p99 s -; answered 7"


@pytest.mark.parametrize(
    ("body", "text", "whole"),
    [
        (b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"delta":{"content":"b"},'
         b'"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n', "ab<stop>", True),
        (b'data: {"choices":[{"text":"a"}]}\n\n', "a", False),
        (b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: {"error":{"code":1}}\n',
         "a<stop><error {'code': 1}>", False),
        (b'{"choices":[{"message":{"content":"c"},"finish_reason":"length"}]}', "c<length>", True),
    ],
)  # fmt: skip
def test_what_a_reply_says(body: bytes, text: str, whole: bool) -> None:
    reply = HttpReply(200, body=body, is_complete=True)
    assert reply.text == text and reply.is_answer is whole
    assert not HttpReply(200, body=body, is_complete=False).is_answer
