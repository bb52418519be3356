"""The application: every route in one table, each with the role it needs.

Knows which handler serves which path, but not what handlers do.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import NotFound
from quire.registry import Registry
from quire.serving import admin, home, observe, probes, stream_routes
from quire.serving.anthropic import messages
from quire.serving.anthropic.dialect import ANTHROPIC
from quire.serving.auth import Role
from quire.serving.dialect import DialectTable
from quire.serving.errors import MethodNotAllowed
from quire.serving.exchange import Exchange
from quire.serving.middleware import Gate
from quire.serving.openai import chat, completions, models, tokenize
from quire.serving.pooling import classify, embeddings, score
from quire.serving.responses import create, stored
from quire.serving.responses.dialect import RESPONSES
from quire.serving.routes import GET, POST, RouteSpec, UnknownPath, make_route, plugin_routes
from quire.serving.server_state import ServerState


async def _home(exchange: Exchange) -> None:
    """The page at `/`: what this server is, and the routes that say what they are for."""
    routes = {path: ROUTES.get(path) for path in ROUTES}
    routes |= await asyncio.to_thread(plugin_routes, ROUTES)
    await home.home(exchange, routes)


_USER, _ADMIN, _METRICS, _OPEN = Role.USER, Role.ADMIN, Role.METRICS, Role.OPEN
_TEXT, _POOLED = "generate", "pooling"

ROUTES: Final[Registry[RouteSpec]] = Registry(
    "route",
    {
        "/v1/chat/completions": RouteSpec(
            POST, _USER, chat.chat_completions, "a conversation, get the next turn", _TEXT
        ),
        "/v1/completions": RouteSpec(
            POST, _USER, completions.completions, "a text, get its continuation", _TEXT
        ),
        "/v1/messages": RouteSpec(
            POST,
            _USER,
            messages.messages,
            "a conversation, as Anthropic's clients send it",
            _TEXT,
            ANTHROPIC,
        ),
        "/v1/messages/count_tokens": RouteSpec(
            POST, _USER, messages.count_tokens, dialect=ANTHROPIC
        ),
        "/v1/responses": RouteSpec(
            POST,
            _USER,
            create.create_response,
            "a conversation, as a response that is kept",
            _TEXT,
            RESPONSES,
        ),
        "/v1/responses/input_tokens": RouteSpec(
            POST, _USER, create.input_tokens, dialect=RESPONSES
        ),
        "/v1/responses/{id}": RouteSpec(
            ("GET", "DELETE"), _USER, stored.response, dialect=RESPONSES
        ),
        "/v1/responses/{id}/cancel": RouteSpec(POST, _USER, stored.cancel, dialect=RESPONSES),
        "/v1/responses/{id}/input_items": RouteSpec(
            GET, _USER, stored.input_items, dialect=RESPONSES
        ),
        "/tokenize": RouteSpec(POST, _USER, tokenize.tokenize, "a text, get its tokens", _TEXT),
        "/detokenize": RouteSpec(POST, _USER, tokenize.detokenize),
        "/v1/embeddings": RouteSpec(
            POST, _USER, embeddings.embeddings, "texts, get embeddings", _POOLED
        ),
        "/pooling": RouteSpec(POST, _USER, embeddings.pooling),
        "/classify": RouteSpec(
            POST, _USER, classify.classify, "texts, get labels and probabilities", _POOLED
        ),
        "/score": RouteSpec(
            POST, _USER, score.score, "pairs of texts, get how well they go together", _POOLED
        ),
        "/v1/score": RouteSpec(POST, _USER, score.score),
        "/rerank": RouteSpec(
            POST, _USER, score.rerank, "a query and documents, get the documents in order", _POOLED
        ),
        "/v1/rerank": RouteSpec(POST, _USER, score.rerank),
        "/v2/rerank": RouteSpec(POST, _USER, score.rerank),
        "/v1/models": RouteSpec(GET, _USER, models.list_models, "the names of the model"),
        "/v1/models/{id:path}": RouteSpec(GET, _USER, models.retrieve_model),
        "/v1/streams/{id:path}": RouteSpec((*GET, "DELETE"), _USER, stream_routes.stream),
        "/limits": RouteSpec((*GET, *POST), _ADMIN, admin.limits),
        "/reset_prefix_cache": RouteSpec(POST, _ADMIN, admin.reset_prefix_cache),
        "/explain_prefix": RouteSpec(POST, _ADMIN, admin.explain_prefix),
        "/v1/requests": RouteSpec(
            GET, _ADMIN, observe.list_requests, "what runs and what waits, and why"
        ),
        "/v1/requests/{id:path}/explain": RouteSpec(GET, _ADMIN, observe.explain),
        "/v1/timeline": RouteSpec(GET, _ADMIN, observe.timeline),
        "/v1/diagnosis": RouteSpec(GET, _ADMIN, observe.diagnosis),
        "/start_profile": RouteSpec(POST, _ADMIN, admin.start_profile),
        "/stop_profile": RouteSpec(POST, _ADMIN, admin.stop_profile),
        "/": RouteSpec(GET, _OPEN, _home),
        "/livez": RouteSpec(GET, _OPEN, probes.livez),
        "/readyz": RouteSpec(GET, _OPEN, probes.readyz),
        "/health": RouteSpec(GET, _OPEN, probes.health, "200 when requests are taken"),
        "/ping": RouteSpec((*GET, *POST), _OPEN, probes.health),
        "/version": RouteSpec(GET, _OPEN, probes.version),
        "/metrics": RouteSpec(GET, _METRICS, probes.metrics, "Prometheus text"),
        "/load": RouteSpec(GET, _METRICS, probes.load),
    },
    error=NotFound,
    plugins="route",
    instance_of="quire.serving.routes:RouteSpec",
)
"""Path to route."""


def build_app(state: ServerState) -> Starlette:
    """The ASGI application over `state`."""
    rows = {path: ROUTES.get(path) for path in ROUTES}
    open_paths = frozenset(path for path, spec in rows.items() if spec.role is Role.OPEN)
    dialects = DialectTable({path: spec.dialect for path, spec in rows.items()})
    app = Starlette(
        routes=[make_route(path, spec) for path, spec in rows.items()],
        middleware=[Middleware(Gate, state=state, open_paths=open_paths, dialects=dialects)],
        exception_handlers={HTTPException: _routing_error},
    )
    app.router.redirect_slashes = False
    app.router.default = UnknownPath(app.router, ROUTES)
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    """Turn the router's refusal of a method into our error; the gate sends the reply."""
    assert isinstance(error, HTTPException) and error.status_code == 405, error
    allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    raise MethodNotAllowed(request.method, allowed)
