"""Which requests are logged: not probes and scrapes, unless somebody wants them."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine
from quire.cli.parser import Parser
from quire.config import ServerConfig
from quire.config.cli import add_server_flags, server_config
from quire.config.server import PROBES
from quire.errors import ConfigError
from quire.serving.app import ROUTES, build_app
from quire.serving.auth import Role
from quire.serving.http_server import adopt_uvicorn_logs
from quire.serving.server_state import ServerState


async def logged(caplog: pytest.LogCaptureFixture, config: ServerConfig) -> set[str]:
    """Paths of the requests that are logged at INFO when every route is asked once."""
    app = build_app(ServerState(config, FakeEngine()))
    transport = httpx.ASGITransport(app)
    paths = [re.sub(r"\{.*?\}", "x", path) for path in ROUTES]
    caplog.set_level(logging.INFO, logger="quire.serving.middleware")
    caplog.clear()
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in (*paths, "/nothing"):
            await client.get(path)
    lines = [r.getMessage() for r in caplog.records if r.name == "quire.serving.middleware"]
    return {line.split('"')[1].split()[1] for line in lines}


async def test_probes_and_scrapes_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    everything = {re.sub(r"\{.*?\}", "x", path) for path in ROUTES} | {"/nothing"}
    assert everything > PROBES
    assert await logged(caplog, ServerConfig()) == everything - PROBES


async def test_whoever_wants_them_has_them(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(disable_access_log_for_endpoints="")
    assert await logged(caplog, config) > PROBES
    config = ServerConfig(disable_access_log_for_endpoints=" /health, /v1/models,")
    found = await logged(caplog, config)
    assert "/metrics" in found and not found & {"/health", "/v1/models"}


@pytest.mark.parametrize(
    "options",
    [{"disable_uvicorn_access_log": True}, *({"uvicorn_log_level": level} for level in (
        "warning", "error", "critical"
    ))],
)  # fmt: skip
async def test_nothing_is_logged(caplog: pytest.LogCaptureFixture, options: Any) -> None:
    assert await logged(caplog, ServerConfig(**options)) == set()


@pytest.mark.parametrize("level", ["trace", "debug", "info"])
async def test_requests_are_info(caplog: pytest.LogCaptureFixture, level: str) -> None:
    assert "/v1/models" in await logged(caplog, ServerConfig(uvicorn_log_level=level))


async def test_a_mounted_probe_is_a_probe(caplog: pytest.LogCaptureFixture) -> None:
    app = build_app(ServerState(ServerConfig(root_path="/llm"), FakeEngine()))
    transport = httpx.ASGITransport(app)
    caplog.set_level(logging.INFO, logger="quire.serving.middleware")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/llm/health")).status_code == 200
    assert not [r for r in caplog.records if r.name == "quire.serving.middleware"]


@pytest.mark.parametrize(
    ("given", "level"),
    [("trace", 5), ("debug", 10), ("info", 30), ("warning", 30), ("error", 40), ("critical", 50)],
)
def test_what_uvicorn_says_itself(given: str, level: int) -> None:
    from quire.config.server import LOG_LEVELS

    logs = logging.getLogger("uvicorn")
    before = logs.handlers, logs.propagate, logs.level
    try:
        adopt_uvicorn_logs(LOG_LEVELS[given])
        assert logging.getLogger("uvicorn.error").getEffectiveLevel() == level
    finally:
        logs.handlers, logs.propagate = before[:2]
        logs.setLevel(before[2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"uvicorn_log_level": "loud"}, "critical, got 'loud'"),
        ({"disable_access_log_for_endpoints": "/health,metrics"}, "got 'metrics'"),
    ],
)
def test_bad_values(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert words in caught.value.message


def test_the_flags_are_read() -> None:
    parser = Parser("serve", "test")
    add_server_flags(parser)
    given = ["--disable-uvicorn-access-log", "--disable-access-log-for-endpoints", "/health,/x"]
    config = server_config(parser.parse_args([*given, "--uvicorn-log-level", "error"]))
    assert config.disable_uvicorn_access_log and config.uvicorn_log_level == "error"
    assert config.unlogged_paths == {"/health", "/x"}
    assert server_config(parser.parse_args([])).unlogged_paths == PROBES
    none = parser.parse_args(["--disable-access-log-for-endpoints", "None"])
    assert server_config(none).unlogged_paths == PROBES
    empty = parser.parse_args(["--disable-access-log-for-endpoints", ""])
    assert server_config(empty).unlogged_paths == set()


def test_probes_are_routes_without_a_user() -> None:
    roles = {path: ROUTES.get(path).role for path in ROUTES}
    assert {path for path, role in roles.items() if role in (Role.OPEN, Role.METRICS)} == {
        *PROBES,
        "/",
        "/openapi.json",
        "/docs",
    }
