"""Who may call what: every route, every role, every way of writing a path; over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from starlette.routing import Route

from asgi_caller import Caller as Sent
from fake_engine import FakeEngine
from patience import PATIENCE
from quire.config import ServerConfig
from quire.config.key_file import digest_of
from quire.serving import routes
from quire.serving.app import ROUTES, build_app
from quire.serving.auth import Role
from quire.serving.exchange import Exchange
from quire.serving.routes import Endpoint, RouteSpec
from quire.serving.server_state import ServerState
from threaded_server import Running

OPEN = {"/", "/openapi.json", "/docs", "/livez", "/readyz", "/health", "/ping", "/version"}
FILE_KEYS = {"user": "file-user", "admin": "file-admin", "metrics": "file-metrics"}
MAY = {
    "user": {Role.OPEN, Role.USER},
    "metrics": {Role.OPEN, Role.METRICS},
    "admin": set(Role),
}
IDS = ("{id:path}", "{id}")


@dataclass
class Reply:
    status: int
    text: str


def ask(
    port: int,
    method: str,
    target: str,
    key: str | None = None,
    host: str = "localhost",
    *more: str,
) -> Reply:
    """Send a request line as it is, without a client that would tidy the path."""
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}", "connection: close"]
    lines += ["content-length: 0", "content-type: application/json", *more]
    lines += [f"authorization: Bearer {key}"] if key else []
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        data = b""
        while more := connection.recv(65536):
            data += more
    return Reply(int(data.split(b" ", 2)[1]), data.decode("utf-8", "replace"))


@pytest.fixture(scope="module")
def filed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a key file, and a key of each role in it."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"{role}:{digest_of(key.encode()).hex()}:{role}" for role, key in FILE_KEYS.items()]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    made = Running(ServerConfig(port=0, api_key_file=str(path)))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with keys of the command line alone."""
    made = Running(ServerConfig(port=0, api_key=["plain-user"], admin_api_key=["plain-admin"]))
    yield made
    made.stop()


def table() -> list[tuple[str, str, Role]]:
    """Method, path and role of every route."""
    rows = []
    for name in ROUTES:
        spec, path = ROUTES.get(name), name
        for one in IDS:
            path = path.replace(one, "some-id")
        rows += [(method, path, spec.role) for method in spec.methods]
    return rows


def tricks(path: str) -> list[str]:
    """Other ways of writing a path, some of which mean the same to some program."""
    last = path[-1:] if path != "/" else ""
    coded = f"%{ord(last):02x}" if last else ""
    return [
        path,
        f"{path[:-1]}{coded}" if coded else path,
        f"{path.upper()}",
        f"/{path}",
        f"{path}/",
        f"{path};a=b",
        f"{path}?x=/livez",
        f"{path}#/livez",
        f"{path}%00",
        f"{path}%20",
        f"{path}%3f/livez",
        f"/livez/..{path}",
        f"/livez/%2e%2e{path}",
        f"/livez%2f..{path}",
        f"/livez/.%2e{path}",
        f"/.{path}",
        f"/%2e{path}",
        path.replace("/", "%2f"),
        path.replace("/", "\\"),
        f"http://other.host{path}",
        f"http://livez{path}",
        f"//livez{path}",
        f"/v1{path}",
        f"/v1/..{path}",
        f"/v1/.{path}",
        f"/api{path}",
        f"/api//{path}",
        f"/api/..{path}",
        f"/api/livez/..{path}",
        path.replace("/", "%252f"),
        f"/livez/%252e%252e{path}",
        f"/livez/..;/..{path}",
        f"/;{path}",
        path.swapcase(),
        path.title(),
        f"{path}.",
        f"{path}..",
        f"{path}/.",
        f"{path}//",
        f"{path}%2f",
        f"{path}%5c",
        f"{path}.json",
        f"%00{path}",
        f"/livez%00{path}",
        f"/livez%0d%0a{path}",
        f"/livez/%c0%ae%c0%ae{path}",  # dots in UTF-8 that is too long
        f"/livez/%e3%80%82%e3%80%82{path}",  # ideographic full stops
        f"/livez/%ef%bc%8e%ef%bc%8e{path}",  # full-width ones
        path.replace("/", "%ef%bc%8f"),  # full-width solidus
        f"/livez/\u00b7\u00b7{path}",
        f"https://localhost{path}",
        f"HTTP://LOCALHOST{path}",
        f"http://key@localhost{path}",
        f"http:{path}",
        "*",
    ]


OVERRIDES = (
    "x-original-url", "x-rewrite-url", "x-original-uri", "x-forwarded-path", "x-forwarded-uri",
    "x-forwarded-prefix", "x-script-name",
)  # fmt: skip
"""Headers in which some servers look for a path."""
METHODS = ("x-http-method-override", "x-http-method", "x-method-override")
UPGRADES = (
    "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
    "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__",
)


def test_every_route_has_a_role_and_few_are_open() -> None:
    found = {}
    for route in build_app(ServerState(ServerConfig(), FakeEngine())).routes:
        assert isinstance(route, Route)
        assert isinstance(route.app, Endpoint), f"{route.path} is not from the table"
        assert isinstance(route.app.role, Role), f"{route.path} has no role"
        found[route.path] = route.app.role
    assert set(found) == set(ROUTES)
    assert {path for path, role in found.items() if role is Role.OPEN} == OPEN


def test_without_a_key_nothing_but_the_open_routes_answers(filed: Running) -> None:
    """Whatever the path is written like: the answers are those of open routes, or 401."""
    for method, path, role in table():
        for target in tricks(path):
            reply = ask(filed.port, method, target)
            allowed = {401, 400} if role is not Role.OPEN else {401, 400, 200, 404, 405}
            assert reply.status in allowed, (method, target, reply.status)
    for method, path, role in table():
        plain_status = ask(filed.port, method, path).status
        assert (plain_status == 401) == (role is not Role.OPEN), (method, path)


@pytest.mark.parametrize("role", FILE_KEYS)
def test_each_role_gets_to_its_routes_and_to_no_other(filed: Running, role: str) -> None:
    for method, path, needed in table():
        reply = ask(filed.port, method, path, FILE_KEYS[role])
        refused = needed not in MAY[role]
        assert (reply.status == 403) == refused, (method, path, reply.status)
        assert reply.status != 401, (method, path)
        if refused:
            assert '"code":"role_missing"' in reply.text or "permission_error" in reply.text
            assert f"the role {needed.value}" in reply.text
            assert "x-should-retry: false" in reply.text
        for target in tricks(path)[1:] if refused else ():
            status = ask(filed.port, method, target, FILE_KEYS[role]).status
            # What is not the route itself may be another one that the role may call, or nothing.
            assert status in {400, 403, 404, 405}, (method, target, status)


def test_tricks_find_the_route_for_a_key_that_may(filed: Running) -> None:
    """Some tricks are the same path, for otherwise the refusals above would show nothing."""
    answered = {
        target
        for target in tricks("/v1/models")
        if ask(filed.port, "GET", target, FILE_KEYS["user"]).status == 200
    }
    same = {"/v1/models", "/v1/model%73", "/v1/models?x=/livez", "http://other.host/v1/models"}
    assert same <= answered


@pytest.mark.parametrize("host", ["livez", "a/livez?x=", "", "evil#/health", "127.0.0.1/livez"])
def test_the_host_header_plays_no_part(filed: Running, host: str) -> None:
    assert ask(filed.port, "GET", "/v1/models", host=host).status in (400, 401)
    assert ask(filed.port, "GET", "/limits", FILE_KEYS["user"], host).status in (400, 403)


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "DELETE", "TRACE", "PATCH"])
def test_no_method_goes_around_the_role(filed: Running, method: str) -> None:
    assert ask(filed.port, method, "/limits").status == 401
    assert ask(filed.port, method, "/limits", FILE_KEYS["user"]).status in (403, 405)


@pytest.mark.parametrize("header", OVERRIDES)
def test_no_header_names_another_path(filed: Running, header: str) -> None:
    for method, path, role in table():
        if role is Role.OPEN:
            continue
        to_open = ask(filed.port, method, path, None, "localhost", f"{header}: /livez")
        assert to_open.status in (400, 401), (method, path)
        if Role.USER is not role:
            to_mine = ask(
                filed.port, method, path, FILE_KEYS["user"], "localhost", f"{header}: /v1/models"
            )
            assert to_mine.status == 403, (method, path)
        from_open = ask(filed.port, "GET", "/livez", None, "localhost", f"{header}: {path}")
        assert (from_open.status, from_open.text.partition("\r\n\r\n")[2]) == (200, ""), path


@pytest.mark.parametrize("header", METHODS)
def test_no_header_names_another_method(filed: Running, header: str) -> None:
    for method, path, role in table():
        for other in {"GET", "HEAD", "POST", "OPTIONS"} - {method}:
            more = f"{header}: {method}"
            assert ask(filed.port, other, path, None, "localhost", more).status in (
                {200, 405} if role is Role.OPEN else {400, 401}
            ), (other, path)
    for more in (f"{header}: POST", f"{header}: DELETE"):
        assert (
            ask(filed.port, "GET", "/v1/models", FILE_KEYS["user"], "localhost", more).status == 200
        )


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_no_upgrade_goes_around_the_role(filed: Running, upgrade: str) -> None:
    for method, path, role in table():
        nobody = ask(filed.port, method, path, None, "localhost", upgrade).status
        assert nobody in ({200, 400, 405, 503} if role is Role.OPEN else {400, 401}), (path, nobody)
        user = ask(filed.port, method, path, FILE_KEYS["user"], "localhost", upgrade).status
        assert user != 101 and (role in MAY["user"] or user in (400, 403)), (path, user)


def test_with_keys_of_the_command_line_metrics_are_open(plain: Running) -> None:
    for method in ("GET", "HEAD"):
        assert ask(plain.port, method, "/metrics").status == 200
    for target in tricks("/metrics"):
        assert ask(plain.port, "GET", target).status in (200, 400, 401), target
    assert ask(plain.port, "GET", "/load").status == 401
    assert ask(plain.port, "GET", "/load", "plain-user").status == 200


def test_with_keys_of_the_command_line_operators_need_their_own(plain: Running) -> None:
    for method, path, role in table():
        reply = ask(plain.port, method, path, "plain-user")
        assert (reply.status == 403) == (role is Role.ADMIN), (method, path)
        if reply.status == 403:
            assert "--admin-api-key" in reply.text
        assert ask(plain.port, method, path, "plain-admin").status not in (401, 403), path


def test_a_mount_path_opens_nothing() -> None:
    """With `--root-path`: no way of writing the prefix leads around a key, nothing fails, and no
    reply tells of the inside."""
    running = Running(ServerConfig(port=0, api_key=["u"], admin_api_key=["a"], root_path="/api"))
    try:
        for method, path, role in table():
            for target in (f"/api{path}", *tricks(path)):
                if role not in (Role.OPEN, Role.METRICS):
                    reply = ask(running.port, method, target)
                    assert reply.status in (400, 401), (method, target, reply.status)
                    for inside in ("Traceback", "Error(", ".py", "/src/", "0x7f"):
                        assert inside not in reply.text, (target, reply.text)
        assert ask(running.port, "GET", "/api/v1/models", "u").status == 200
        assert ask(running.port, "GET", "/api/limits", "u").status == 403
    finally:
        running.stop()


def test_without_keys_everybody_may_call_everything() -> None:
    running = Running(ServerConfig(port=0))
    try:
        for method, path, _ in table():
            assert ask(running.port, method, path).status not in (401, 403), path
    finally:
        running.stop()


async def _handler(exchange: Exchange) -> None:
    await exchange.reply(b"{}")


@pytest.mark.parametrize("role", [Role.USER, Role.ADMIN, Role.METRICS])
async def test_a_plugins_route_has_its_role(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"/extra": RouteSpec(("GET",), role, _handler)}
    monkeypatch.setattr(routes, "plugin_routes", lambda table: found)
    app = build_app(ServerState(ServerConfig(api_key=["u"], admin_api_key=["a"]), FakeEngine()))
    for key, may in (("u", role is not Role.ADMIN), ("a", True)):
        sent = Sent(app, "GET", "/extra", headers={"x-api-key": key})
        await sent.task
        assert sent.status == (200 if may else 403)


async def test_a_route_that_nobody_decided_on_is_refused() -> None:
    """If a request gets past the gate without its caller being known, no route answers it."""
    state = ServerState(ServerConfig(), FakeEngine())
    app = build_app(state)
    for route in app.routes:
        assert isinstance(route, Route)
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        exchange = Exchange(scope, None, None, state)
        scope["quire.exchange"] = exchange  # type: ignore[assignment]
        with pytest.raises(Exception, match="needs the role") as caught:
            await route.app(scope, None, None)  # type: ignore[arg-type]
        assert getattr(caught.value, "status", 0) == 403
