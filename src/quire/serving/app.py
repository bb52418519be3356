"""The application: every route in one table, each with the role it needs.

Knows which handler serves which path, and nothing of what handlers do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import NotFound
from quire.serving import admin, home, observe, probes
from quire.serving.auth import Role
from quire.serving.errors import MethodNotAllowed
from quire.serving.exchange import KEY, Exchange, Scope
from quire.serving.middleware import Gate
from quire.serving.openai import chat, completions, models, tokenize
from quire.serving.pooling import classify, embeddings, score
from quire.serving.server_state import ServerState

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One row of the table."""

    path: str
    methods: tuple[str, ...]
    role: Role
    handler: Handler


_GET, _POST = ("GET",), ("POST",)

ROUTES: Final = (
    RouteSpec("/v1/chat/completions", _POST, Role.USER, chat.chat_completions),
    RouteSpec("/v1/completions", _POST, Role.USER, completions.completions),
    RouteSpec("/v1/models", _GET, Role.USER, models.list_models),
    RouteSpec("/v1/models/{id:path}", _GET, Role.USER, models.retrieve_model),
    RouteSpec("/v1/embeddings", _POST, Role.USER, embeddings.embeddings),
    RouteSpec("/pooling", _POST, Role.USER, embeddings.pooling),
    RouteSpec("/classify", _POST, Role.USER, classify.classify),
    RouteSpec("/score", _POST, Role.USER, score.score),
    RouteSpec("/v1/score", _POST, Role.USER, score.score),
    RouteSpec("/rerank", _POST, Role.USER, score.rerank),
    RouteSpec("/v1/rerank", _POST, Role.USER, score.rerank),
    RouteSpec("/v2/rerank", _POST, Role.USER, score.rerank),
    RouteSpec("/tokenize", _POST, Role.USER, tokenize.tokenize),
    RouteSpec("/detokenize", _POST, Role.USER, tokenize.detokenize),
    RouteSpec("/limits", ("GET", "POST"), Role.ADMIN, admin.limits),
    RouteSpec("/reset_prefix_cache", _POST, Role.ADMIN, admin.reset_prefix_cache),
    RouteSpec("/explain_prefix", _POST, Role.ADMIN, admin.explain_prefix),
    RouteSpec("/v1/requests", _GET, Role.ADMIN, observe.list_requests),
    RouteSpec("/v1/requests/{id:path}/explain", _GET, Role.ADMIN, observe.explain),
    RouteSpec("/v1/timeline", _GET, Role.ADMIN, observe.timeline),
    RouteSpec("/v1/diagnosis", _GET, Role.ADMIN, observe.diagnosis),
    RouteSpec("/start_profile", _POST, Role.ADMIN, admin.start_profile),
    RouteSpec("/stop_profile", _POST, Role.ADMIN, admin.stop_profile),
    RouteSpec("/metrics", _GET, Role.METRICS, probes.metrics),
    RouteSpec("/load", _GET, Role.METRICS, probes.load),
    RouteSpec("/", _GET, Role.OPEN, home.home),
    RouteSpec("/livez", _GET, Role.OPEN, probes.livez),
    RouteSpec("/readyz", _GET, Role.OPEN, probes.health),
    RouteSpec("/health", _GET, Role.OPEN, probes.health),
    RouteSpec("/ping", ("GET", "POST"), Role.OPEN, probes.health),
    RouteSpec("/version", _GET, Role.OPEN, probes.version),
)


class Endpoint:
    """A handler as an ASGI application, together with the role of its route."""

    def __init__(self, spec: RouteSpec) -> None:
        self.role = spec.role
        self.path = spec.path
        self._handler = spec.handler

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request."""
        await self._handler(scope[KEY])


def build_app(state: ServerState) -> Starlette:
    """The ASGI application over `state`."""
    routes = [Route(spec.path, Endpoint(spec), methods=list(spec.methods)) for spec in ROUTES]
    open_paths = frozenset(spec.path for spec in ROUTES if spec.role is Role.OPEN)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, state=state, open_paths=open_paths)],
        exception_handlers={HTTPException: _routing_error},
    )
    app.router.redirect_slashes = False
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    """Turn the router's errors into ours; the gate replies."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        raise MethodNotAllowed(request.method, allowed)
    path = quote(request.scope["path"][:200], errors="replace")
    raise NotFound(f"There is nothing at {path}. GET / says what there is.")
