"""The outermost layer: keys, request id, mount path, access log, and handling of every error.

It denies by default: a path that is not on the open list needs a key before it is even routed. So a
caller without a key gets 401 for an unknown path, and not 404. It decides by the raw ASGI path; who
may call is told by `auth` and `origins`. What a caller with a key may not call, the route itself
refuses. Knows no handler.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any
from urllib.parse import quote

from quire.errors import QuireError
from quire.logger import get_logger
from quire.observability.metrics.http_metrics import NO_ROUTE
from quire.serving.auth import Role
from quire.serving.dialect import DialectTable
from quire.serving.errors import InternalError, NoDescriptors
from quire.serving.exchange import KEY, NO_DESCRIPTORS, ClientDisconnect, Exchange, Scope
from quire.serving.origins import OriginGuard
from quire.serving.server_state import ServerState

logger = get_logger(__name__)


class Gate:
    """ASGI middleware around all routes.

    Args:
        app: The application behind the gate.
        state: The server's state.
        open_paths: Paths that need no key.
        dialects: How errors are formatted on which paths, also before anything is routed.
    """

    def __init__(
        self, app: Any, state: ServerState, open_paths: frozenset[str], dialects: DialectTable
    ) -> None:
        self._app = app
        self._state = state
        self._open = open_paths
        self._dialects = dialects
        self._guard = OriginGuard(state.config)
        self._root = state.config.root_path.rstrip("/")
        self._logs = state.config.logs_access
        self._quiet = state.config.unlogged_paths

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        exchange = Exchange(self._unmounted(scope), receive, send, self._state)
        exchange.scope[KEY] = exchange
        exchange.dialect = self._dialects.find(exchange.scope["path"])
        exchange.before_end = lambda: self._count(exchange, time.monotonic() - started)
        try:
            await self._serve(exchange, receive, send)
        except ClientDisconnect:
            pass
        finally:
            exchange.leave()
            self._log(exchange)
            if exchange.before_end is not None:  # the caller went away before the end
                exchange.before_end()
            # Circles would be left to the garbage collector, and every request waits for that.
            exchange.before_end = None
            del exchange.scope[KEY]

    async def _serve(self, exchange: Exchange, receive: Any, send: Any) -> None:
        try:
            if exchange.scope["path"] not in self._open:
                exchange.adopt_request_id()
                self._guard.check(exchange.scope["headers"])
                exchange.caller = self._state.keys.caller(exchange.scope["headers"])
                if NO_DESCRIPTORS in exchange.scope:
                    raise NoDescriptors
            else:
                exchange.caller = self._state.keys.stranger
            await self._app(exchange.scope, receive, send)
        except ClientDisconnect:
            raise
        except QuireError as error:
            await self._fail(exchange, error)
        except Exception:
            error_id = uuid.uuid4().hex[:12]
            logger.exception("request %s failed, error id %s", exchange.request_id, error_id)
            await self._fail(exchange, InternalError(error_id))

    async def _fail(self, exchange: Exchange, error: QuireError) -> None:
        exchange.failed(error)
        if exchange.status is None:
            if error.status == 503 and not _is_probe(exchange):
                self._state.http.observe_unavailable(error.code or "none")
            await exchange.fail(error)
        elif not exchange.finished:
            # Too late for a status, and only streams can carry an error: cut the connection.
            raise error

    def _unmounted(self, scope: Scope) -> Scope:
        """The scope without the mount path, if a proxy left that path in place."""
        path = scope["path"]
        if self._root and path.startswith(self._root + "/"):
            path = path[len(self._root) :]
        return {**scope, "path": path, "root_path": ""}

    def _count(self, exchange: Exchange, seconds: float) -> None:
        """Count the request in the metrics. Probes and scrapes are left out, because they would
        outnumber the rest."""
        endpoint = exchange.scope.get("endpoint")
        if _is_probe(exchange):
            return
        self._state.http.observe(
            getattr(endpoint, "path", NO_ROUTE),
            exchange.scope["method"],
            exchange.status,
            seconds,
            exchange.bytes_in,
            exchange.bytes_out,
        )

    def _log(self, exchange: Exchange) -> None:
        if not self._logs:
            return
        scope = exchange.scope
        client = scope.get("client") or ("local", 0)
        logger.log(
            logging.DEBUG if scope["path"] in self._quiet else logging.INFO,
            '%s:%d - "%s %s HTTP/%s" %s %s',
            client[0],
            client[1],
            scope["method"],
            quote(scope["path"]),
            scope.get("http_version", "1.1"),
            exchange.status or "disconnected",
            exchange.request_id,
        )


def _is_probe(exchange: Exchange) -> bool:
    endpoint = exchange.scope.get("endpoint")
    return getattr(endpoint, "role", Role.USER) in (Role.OPEN, Role.METRICS)
