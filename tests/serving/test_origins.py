"""Web pages: which may read replies, and which may not even ask a server without keys."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from asgi_caller import Caller
from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.config.cli import add_server_flags, server_config
from quire.errors import ConfigError
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

COMPLETION = {"prompt": "x", "max_tokens": 1}
OPEN = ("/health", "/livez", "/version")


async def ask(config: ServerConfig, method: str = "POST", path: str = "/v1/completions",
              **headers: str) -> Caller:  # fmt: skip
    app = build_app(ServerState(config, FakeEngine()))
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    caller = Caller(app, method, path, COMPLETION if method == "POST" else None, given)
    await caller.task
    return caller


OURS = ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.8.8.8", "a.localhost:80"]
NOT_OURS = [
    "evil.com",
    "evil.com:8000",
    "10.0.0.1",
    "localhost.evil.com",
    "[::2]",
    "[",
    "@127.0.0.1x",
]


@pytest.mark.parametrize("host", OURS)
async def test_names_of_this_machine(host: str) -> None:
    assert (await ask(ServerConfig(), host=host)).status == 200


@pytest.mark.parametrize("host", NOT_OURS)
async def test_a_name_that_is_not_ours(host: str) -> None:
    caller = await ask(ServerConfig(), host=host)
    assert caller.status == 403
    error = caller.json["error"]
    assert (error["code"], error["param"]) == ("forbidden_origin", "host")
    assert "--allowed-hosts" in error["message"]
    for path in OPEN:
        assert (await ask(ServerConfig(), "GET", path, host=host)).status == 200


@pytest.mark.parametrize("origin", ["https://evil.com", "null", "http://localhost:3000", "x"])
async def test_a_page_of_another_origin(origin: str) -> None:
    caller = await ask(ServerConfig(), host="localhost:8000", origin=origin)
    assert caller.status == 403 and "--allowed-origins" in caller.json["error"]["message"]
    assert "access-control-allow-origin" not in caller.headers


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_its_own_page(scheme: str) -> None:
    origin = f"{scheme}://localhost:8000"
    assert (await ask(ServerConfig(), host="localhost:8000", origin=origin)).status == 200


GUARDLESS: list[dict[str, Any]] = [
    {"api_key": ["k"]}, {"uds": "/tmp/x"}, {"host": "0.0.0.0", "allow_unauthenticated": True},
]  # fmt: skip


@pytest.mark.parametrize("options", GUARDLESS)
async def test_others_are_not_guarded(options: dict[str, Any]) -> None:
    config = ServerConfig(**options)
    told = {"host": "evil.com", "origin": "https://evil.com", "authorization": "Bearer k"}
    assert (await ask(config, **told)).status == 200


async def test_what_the_operator_allows() -> None:
    config = ServerConfig(allowed_hosts=["Box.lan"], allowed_origins=["https://ui.lan"])
    assert (await ask(config, host="box.lan:8000")).status == 200
    assert (await ask(config, host="other.lan")).status == 403
    caller = await ask(config, host="localhost", origin="https://ui.lan")
    assert caller.status == 200
    assert caller.headers["access-control-allow-origin"] == "https://ui.lan"
    assert "x-request-id" in caller.headers["access-control-expose-headers"]
    assert (await ask(config, host="localhost", origin="https://ui.lan.evil")).status == 403
    everyone = ServerConfig(allowed_hosts=["*"], allowed_origins=["*"])
    assert (await ask(everyone, host="x.y", origin="https://z")).status == 200


async def test_a_browser_asks_first() -> None:
    config = ServerConfig(api_key=["k"], allowed_origins=["https://ui.lan"])
    asks = {"access_control_request_method": "POST", "access_control_request_headers": "x"}
    caller = await ask(config, "OPTIONS", origin="https://ui.lan", **asks)  # it sends no key
    assert caller.status == 200
    assert caller.headers["access-control-allow-origin"] == "https://ui.lan"
    assert (await ask(config, "OPTIONS", origin="https://evil.com", **asks)).status == 400
    without = await ask(ServerConfig(api_key=["k"]), "OPTIONS", origin="https://ui.lan", **asks)
    assert without.status == 401 and "access-control-allow-origin" not in without.headers


async def test_errors_can_be_read_too() -> None:
    config = ServerConfig(api_key=["k"], allowed_origins=["https://ui.lan"])
    caller = await ask(config, origin="https://ui.lan")
    assert caller.status == 401
    assert caller.headers["access-control-allow-origin"] == "https://ui.lan"


@pytest.mark.parametrize("origin", ["evil.com", "https://", "https://a/b", "", "://a"])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins must be"):
        ServerConfig(allowed_origins=[origin])


def test_credentials_for_everyone() -> None:
    with pytest.raises(ConfigError, match="--allow-credentials"):
        ServerConfig(allowed_origins=["*"], allow_credentials=True)


@pytest.mark.parametrize("given", [['["https://a.b", "http://c"]'], ["https://a.b", "http://c"]])
def test_the_flag_as_a_list_or_as_json(given: list[str]) -> None:
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_server_flags(parser)
    config = server_config(parser.parse_args(["--allowed-origins", *given]))
    assert config.allowed_origins == ["https://a.b", "http://c"]
