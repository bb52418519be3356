"""Hostile bodies for every route of a real server: refused in one sentence, nothing disturbed.

A canary beside them must give the same bytes as ever, and the next scrape must have counted it.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote_from_bytes, urlsplit

import httpx
import pytest

from fuzz_kit import cases
from hostile import GOOD, LARGE, LARGE_FOR, WHOLE, spoil
from leaks import leaks
from live_server import Server, serving
from patience import PATIENCE
from quire.serving.app import ROUTES

JSON = {"content-type": "application/json"}
CANARY = {"prompt": "Once upon a time", "temperature": 1, "seed": 5, "max_tokens": 8, "logprobs": 2}
SECRET = [1901, 1902, 1903, 1904, 1905, 1906, 1907, 1908]
"""Tokens of another caller's prompt."""
LIMITS = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "scheduling_policy": "fcfs",
          "long_prefill_token_threshold": 0}  # fmt: skip


class Target:
    """The server, a client that stays connected, and what the canary said first."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.client = httpx.Client(base_url=server.url, timeout=PATIENCE)
        self.expected = self._sing()

    def _sing(self) -> Any:
        reply = self.client.post("/v1/completions", json=CANARY)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"]

    def _counted(self) -> list[float]:
        """Requests so far, as the HTTP side and the engine have counted them."""
        lines = self.client.get("/metrics").text.splitlines()
        http = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'
        rows = (http, "vllm:request_success_total")
        return [sum(float(x.split()[-1]) for x in lines if x.startswith(row)) for row in rows]

    def check_canary(self) -> None:
        """The same bytes as in the beginning, and a scrape right after has counted them."""
        self.client.post("/limits", json=LIMITS)
        before = self._counted()
        assert self._sing() == self.expected
        assert self._counted() == [count + 1 for count in before]

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> httpx.Response:
        """Send what may be nonsense; the reply is never the server's failure."""
        reply = self.client.request(method, path, content=body, headers={**JSON, **headers})
        assert reply.status_code < 500, (path, body[:200], reply.text[:500])
        assert path in DESCRIBED or not leaks(reply.text), (path, leaks(reply.text), body[:200])
        if reply.status_code >= 400:
            check_envelope(reply, {"message", "type"} if "/messages" in path else OPENAI_ERROR)
        else:
            assert "internal_error" not in reply.text and "step_failed" not in reply.text
        return reply


DESCRIBED = ("/openapi.json", "/docs")
"""They quote docstrings."""
OPENAI_ERROR = {"message", "type", "param", "code"}


def check_envelope(reply: httpx.Response, fields: set[str] = OPENAI_ERROR) -> None:
    """The API's error object, with one readable sentence or two in it."""
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) >= fields
    message = error["message"]
    assert 10 < len(message) < 700, message
    assert "Traceback" not in message and "\n" not in message and "object at 0x" not in message


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    # A short context: a body that asks for all the tokens there can be costs little.
    with serving("--max-model-len", "128", "--num-gpu-blocks-override", "400") as server:
        made = Target(server)
        with contextlib.closing(made.client):
            yield made
        assert "error id" not in server.log and "Traceback" not in server.log


@pytest.mark.parametrize("path", GOOD)
def test_bodies_that_no_route_takes(target: Target, path: str) -> None:
    for name, body in (WHOLE | (LARGE if path in LARGE_FOR else {})).items():
        reply = target.send("POST", path, body)
        assert 400 <= reply.status_code < 500, (name, reply.text[:200])
    target.check_canary()


@pytest.mark.parametrize("path", GOOD)
def test_bodies_of_other_types_and_lengths(target: Target, path: str) -> None:
    for given in ("text/plain", "application/x-www-form-urlencoded", "application/xml", ""):
        reply = target.send("POST", path, b'{"prompt": "a"}', **{"content-type": given})
        assert reply.status_code == 415
    assert target.send("POST", path, b"[" * (4 * 2**20 + 1)).status_code == 413
    target.check_canary()


@cases(40)
def test_good_bodies_gone_wrong(target: Target, rng: random.Random) -> None:
    for _ in range(8):
        path = rng.choice([*GOOD, "/v1/chat/completions", "/v1/completions"])
        target.send("POST", path, spoil(rng, GOOD[path]))
    target.check_canary()


@cases(6)
def test_bodies_where_none_is_wanted_and_odd_addresses(target: Target, rng: random.Random) -> None:
    for name in ROUTES:
        if "profile" in name:
            continue  # may be configured, then it writes files
        odd = quote_from_bytes(rng.randbytes(rng.randint(1, 40)))
        path = re.sub(r"\{.*?\}", odd or "x", name)
        field = rng.choice(["steps", "seconds", "format", "x", odd])
        value = rng.choice(["-1", "0", "1e999", "nan", "9" * 400, "", "\ud83d", odd, "inf", "1e-9"])
        query = f"?{field}={value}" * rng.randint(0, 1)
        for method in (*ROUTES.get(name).methods, "PUT", "DELETE"):
            target.send(method, path + query.encode("utf-8", "replace").decode(), b'{"a": NaN}')
    target.check_canary()


@cases(4)
def test_connections_that_end_too_early(target: Target, rng: random.Random) -> None:
    where = urlsplit(target.url)
    for path in GOOD:
        body = spoil(rng, GOOD[path])
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        length = rng.choice([str(len(body) + 9), "-1", "1" * 30, "x"])
        data = (head + f"content-length: {length}\r\n\r\n").encode() + body
        with socket.create_connection((where.hostname, where.port or 80), PATIENCE) as made:
            made.sendall(data[: rng.randrange(1, len(data) + 1)])
    target.check_canary()


def test_no_route_tells_the_tokens_of_another_caller(target: Target) -> None:
    secret = {"prompt": SECRET, "max_tokens": 1, "request_id": "secret"}
    target.client.post("/v1/completions", json=secret)
    asked = {"prompt": [*SECRET[:4], 7, 7, 7, 7]}
    reply = target.client.post("/explain_prefix", json=asked)
    assert (reply.json()["first_difference"], reply.json()["num_cached_tokens"]) == (4, 4)
    replies = [reply, target.client.get("/v1/requests/secret/explain")]
    paths = [path for path in ROUTES if "GET" in ROUTES.get(path).methods and "{" not in path]
    # The description of the routes is the same for everyone, and names fields as `token_ids`.
    replies += [target.send("GET", path) for path in paths if path != "/openapi.json"]
    told = [r.json() for r in replies if r.headers.get("content-type") == "application/json"]
    assert len(told) >= 8 and not any(map(_holds_secret, told))


def _holds_secret(value: Any) -> bool:
    """Whether there is a list of the prompt's tokens in it, or a token by its name."""
    if isinstance(value, dict):
        tokens = [value[name] for name in value if "token_id" in name]
        return bool(tokens) or any(map(_holds_secret, value.values()))
    if isinstance(value, list):
        pairs = zip(value, value[1:], strict=False)
        return (*SECRET[4:6],) in pairs or any(map(_holds_secret, value))
    return False
