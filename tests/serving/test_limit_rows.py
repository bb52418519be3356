"""Each row of the table of limits, at the limit and one over, over sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from patience import PATIENCE
from quire.config import ServerConfig
from quire.serving import limits
from quire.serving.body_scan import PIECE, SMALL, BodyScan, pieces
from quire.serving.limits import Limit
from threaded_server import Running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ONE: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "temperature": 1}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
PADDING = "x" * SMALL
"""Makes a body long enough to be counted."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    made = Running(ServerConfig(port=0, max_body_bytes=16 << 20))
    made.engine.max_model_len = 10**7
    yield made
    made.stop()


def ask(port: int, path: str, body: bytes, *headers: str) -> tuple[int, str]:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", "connection: close", *headers]
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        data = b""
        while more := connection.recv(1 << 20):
            data += more
    return int(data.split(b" ", 2)[1]), data.partition(b"\r\n\r\n")[2].decode()


def nested(levels: int) -> dict[str, Any]:
    """Arguments that make the body so many levels deep; the outermost object and that of the
    arguments are two."""
    inner: Any = 1
    for _ in range(levels - 2):
        inner = [inner]
    return TALK | {"chat_template_kwargs": {"a": inner, "b": PADDING}}


def header_of(size: int) -> tuple[str, dict[str, Any], str]:
    """A request whose line and headers are counted as so many bytes."""
    body = len(json.dumps(ONE))
    lines = ["host: localhost", "content-type: application/json", f"content-length: {body}"]
    rest = sum(len(line) + 2 for line in [*lines, "connection: close", "x-filler: "])
    return TEXT, ONE, "x-filler: " + "a" * (size - rest - len(TEXT) - 16)


ROWS: dict[str, Any] = {
    "HEADER_BYTES": header_of,
    "DEPTH": lambda n: (CHAT, nested(n)),
    # The body, the list of messages, a message and the arguments are objects or arrays, too.
    "CONTAINERS": lambda n: (
        CHAT, TALK | {"chat_template_kwargs": {"a": [[]] * (n - 5)}}),
    "ENTRIES": lambda n: (
        CHAT, TALK | {"chat_template_kwargs": {"a": [{f"k{i}": 1 for i in range(n - 6)}]}}),
    # One comma fewer than elements.
    "VALUES": lambda n: (TEXT, ONE | {"prompt": [1] * (n - 1)}),
    "LABEL": lambda n: (TEXT, ONE | {"user": "u" * n}),
    "REQUEST_ID": lambda n: (TEXT, ONE | {"request_id": "r" * n}),
    "METADATA": lambda n: (CHAT, TALK | {"metadata": {f"k{i}": "v" for i in range(n)}}),
    "PROMPTS": lambda n: (TEXT, ONE | {"prompt": ["a"] * n}),
    "TOOLS": lambda n: (CHAT, TALK | {"tools": [
        {"type": "function", "function": {"name": f"f{i}"}} for i in range(n)]}),
    "LIST_IDS": lambda n: (TEXT, ONE | {"allowed_token_ids": [1] * n}),
    "IDEMPOTENCY_KEY": lambda n: (TEXT, ONE | {"stream": True}, "idempotency-key: " + "k" * n),
    "SENT_AT_ONCE": lambda n: (TEXT, ONE | {
        "n": 1024, "allowed_token_ids": list(range(256)),
        "bad_words": ["w" * (n // 1024 - 256)] + (["w"] if n % 1024 else [])}),
    "COPIED": lambda n: (TEXT, ONE | {
        "prompt": ["a"] * 1024, "bad_words": ["w" * (n // 1024)] + (["v"] if n % 1024 else [])}),
    # A token for each letter, and one before them.
    "FANNED_OUT": lambda n: (TEXT, ONE | {"n": 2, "prompt": "a" * (-(-n // 2) - 1)}),
    "SCORED": lambda n: (TEXT, ONE | {"prompt_logprobs": 15, "prompt": "a" * (-(-n // 16) - 1)}),
}  # fmt: skip
ELSEWHERE = {"INPUTS": "tests/pooling/test_http.py"}
"""Rows of what this server does not serve, and where they are tested."""


def rows() -> dict[str, Limit]:
    return {name: row for name, row in vars(limits).items() if isinstance(row, Limit)}


def test_every_row_is_here() -> None:
    assert set(rows()) == set(ROWS) | set(ELSEWHERE)


@pytest.mark.parametrize("name", ROWS)
def test_the_limit_is_allowed_and_one_more_is_refused(server: Running, name: str) -> None:
    row, make = rows()[name], ROWS[name]
    for given in (row.most, row.most + 1):
        path, body, *headers = make(given)
        status, text = ask(server.port, path, json.dumps(body).encode(), *headers)
        if given == row.most:
            assert status == 200, text[:500]
        else:
            assert status == 400, text[:500]
            said = json.loads(text)["error"]["message"] if text.startswith("{") else text
            told = said.partition("got ")[2]
            assert str(row.most) in said and told, text
            assert told.startswith('"') or int(told.split()[0].rstrip(".")) > row.most, text


@pytest.mark.parametrize("size", [1, 7, 1000, PIECE])
def test_strings_and_pieces_do_not_matter(size: int) -> None:
    """Commas, brackets and quotes in strings do not count, wherever a piece ends."""
    text = r'{"a":"[[[,,,:\"\\","b":[1,2,{"c\\\"":"}]"}],"d":["\\","\\\\\"",[]]}'
    json.loads(text)
    scan = BodyScan()
    for start in range(0, len(text), size):
        scan.feed(text[start : start + size].encode())
    found = (scan._containers, scan._values, scan._entries, scan._depth, scan._in_string)
    assert found == (5, 6, 4, 0, False)


def test_a_body_is_counted_in_pieces() -> None:
    found = list(pieces(b"a" * (2 * PIECE + 1)))
    assert [len(piece) for piece in found] == [PIECE, PIECE, 1]


def test_escapes_take_no_longer_than_text() -> None:
    """Each byte is looked at once, also where a piece ends within a string of quotes."""
    scan = BodyScan()
    scan.feed(b'["')
    for _ in range(64):
        scan.feed(b'\\"' * (PIECE // 2))
    assert scan._in_string and scan._containers == 1


def test_a_body_that_is_refused_while_it_arrives_need_not_end(server: Running) -> None:
    """The refusal comes though the client has sent only part of what it announced."""
    body = b'{"prompt":[' + b"1," * 1_100_000
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body) + 1000}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        connection.settimeout(PATIENCE)
        data = b""
        while b"1048576 values" not in data:
            more = connection.recv(65536)
            assert more, data
            data += more
