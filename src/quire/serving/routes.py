"""What a route is, and how a path finds one.

The table itself is in `app.py`. Routes of plugins are looked up when a path is not in the table,
and when `GET /` lists all routes. Knows no handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import msgspec
from starlette.routing import Route, Router

from quire.errors import ConfigError, NotFound, QuireError
from quire.logger import get_logger
from quire.registry import Registry
from quire.serving.absent_routes import refuse_absent
from quire.serving.auth import Role
from quire.serving.dialect import OPENAI, Dialect
from quire.serving.exchange import KEY, Answered, Exchange, Scope
from quire.spelling import did_you_mean

logger = get_logger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
GET: Final = ("GET",)
POST: Final = ("POST",)


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One row of the table. Its name there is its path; `{id:path}` in it stands for any text."""

    methods: tuple[str, ...]
    role: Role
    handler: Handler
    about: str = ""
    """What the route is for; `GET /` lists the routes that have this text."""
    runner: str | None = None
    """`generate` or `pooling`, if only models run that way serve it."""
    dialect: Dialect = OPENAI
    """How it formats errors and frames streams."""
    body: type[msgspec.Struct] | None = None
    """Type of the JSON body that `POST` takes, for `GET /openapi.json`. A handler that asks a verb
    knows it itself."""
    bodies: tuple[type[msgspec.Struct], ...] = ()
    """The same for a route that takes one of several types."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the query and their JSON types, for the same document."""
    replies: tuple[str, ...] = ("application/json",)
    """Content types of its replies, for the same document; none if they are empty."""


class Endpoint:
    """A handler as an ASGI application, together with the role of its route, without which nobody
    gets to the handler."""

    def __init__(self, path: str, spec: RouteSpec) -> None:
        self.role = spec.role
        self.path = path
        self._handler = spec.handler
        self._dialect = spec.dialect

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request.

        Raises:
            RoleMissing: it is for callers of another role.
        """
        exchange: Exchange = scope[KEY]
        exchange.dialect = self._dialect
        exchange.caller.require(self.role)
        with suppress(Answered):
            await self._handler(exchange)


def make_route(path: str, spec: RouteSpec) -> Route:
    """A row for the router."""
    return Route(path, Endpoint(path, spec), methods=list(spec.methods))


def plugin_routes(table: Registry[RouteSpec]) -> dict[str, RouteSpec]:
    """The routes that plugins add, by path. One that cannot be used is logged and left out."""
    found, built_in = {}, set(table)
    for path in table.names():
        if path in built_in:
            continue
        try:
            spec = table.get(path)
            _check(path, spec)
        except QuireError as error:
            logger.error("%s", error.message)
        else:
            found[path] = spec
    return found


def _check(path: str, spec: RouteSpec) -> None:
    """Refuse a plugin's route that the server cannot offer.

    Raises:
        ConfigError: what is wrong with it.
    """
    if not path.startswith("/"):
        raise ConfigError(f"the plugin's route {path!r} must begin with a slash")
    if spec.role is Role.OPEN:
        # Without a key a fixed list of paths is reached: installing a package makes it no longer.
        raise ConfigError(f"the plugin's route {path} is open to everybody; it must need a key")


class UnknownPath:
    """Called for paths the router does not know: adds the routes of plugins the first time, then
    routes again."""

    def __init__(self, router: Router, table: Registry[RouteSpec]) -> None:
        self._router = router
        self._table = table
        self._adding: asyncio.Task[dict[str, RouteSpec]] | None = None

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Route once more, or reply that the path is unknown.

        Raises:
            NotFound: neither the table nor a plugin has the path.
        """
        if not scope.get("quire.plugins_asked"):
            scope["quire.plugins_asked"] = True
            if await self._add():
                return await self._router.app(scope, receive, send)
        refuse_absent(scope["path"])
        path = quote(scope["path"][:200], errors="replace")
        hint = did_you_mean(scope["path"], self._table)
        raise NotFound(f"There is nothing at {path}{hint or '.'} GET / says what there is.")

    async def _add(self) -> dict[str, RouteSpec]:
        """Add the routes of plugins. They are imported on a thread, so that streams continue
        meanwhile."""
        if self._adding is None:
            self._adding = asyncio.create_task(self._import())
        return await asyncio.shield(self._adding)

    async def _import(self) -> dict[str, RouteSpec]:
        found = await asyncio.to_thread(plugin_routes, self._table)
        self._router.routes += [make_route(path, spec) for path, spec in found.items()]
        return found
