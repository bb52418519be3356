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
from quire.serving import admin, home, observe, openapi, probes, server_info, stream_routes, usage
from quire.serving.absent_routes import refuse_absent
from quire.serving.anthropic import messages
from quire.serving.anthropic.dialect import ANTHROPIC
from quire.serving.anthropic.schema import CountTokensRequest, MessagesRequest
from quire.serving.auth import Role
from quire.serving.dialect import DialectTable
from quire.serving.errors import MethodNotAllowed
from quire.serving.exchange import Exchange
from quire.serving.inference import tokens
from quire.serving.inference.tokens import TokensRequest
from quire.serving.invocations import invocations
from quire.serving.middleware import Gate
from quire.serving.openai import chat, chat_batch, completions, models, tokenize
from quire.serving.openai.schema import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.serving.origins import cors_layers
from quire.serving.pooling import classify, embeddings, score
from quire.serving.pooling.schema import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.serving.responses import create, stored
from quire.serving.responses.dialect import RESPONSES
from quire.serving.responses.schema import InputTokensRequest, ResponsesRequest
from quire.serving.routes import GET, POST, RouteSpec, UnknownPath, make_route, plugin_routes
from quire.serving.server_state import ServerState


async def _home(exchange: Exchange) -> None:
    """The page at `/`: what this server is, and the routes that say what they are for."""
    await home.home(exchange, await _all_routes())


async def _all_routes() -> dict[str, RouteSpec]:
    """The table, and the routes of plugins, which are imported on a thread."""
    routes = {path: ROUTES.get(path) for path in ROUTES}
    return routes | await asyncio.to_thread(plugin_routes, ROUTES)


async def _openapi(exchange: Exchange) -> None:
    """The routes as an OpenAPI document."""
    await openapi.openapi(exchange, await _all_routes())


async def _docs(exchange: Exchange) -> None:
    """The routes as a page."""
    await openapi.docs(exchange, await _all_routes())


_USER, _ADMIN, _METRICS, _OPEN = Role.USER, Role.ADMIN, Role.METRICS, Role.OPEN
_TEXT, _POOLED = "generate", "pooling"
_STREAMED: Final = ("application/json", "text/event-stream")

ROUTES: Final[Registry[RouteSpec]] = Registry(
    "route",
    {
        "/v1/chat/completions": RouteSpec(
            POST,
            _USER,
            chat.chat_completions,
            "a conversation, get the next turn",
            _TEXT,
            body=ChatRequest,
            replies=_STREAMED,
        ),
        "/v1/chat/completions/batch": RouteSpec(
            POST,
            _USER,
            chat_batch.batch_chat_completions,
            "several conversations, get the next turn of each",
            _TEXT,
            body=BatchChatRequest,
        ),
        "/v1/completions": RouteSpec(
            POST,
            _USER,
            completions.completions,
            "a text, get its continuation",
            _TEXT,
            body=CompletionRequest,
            replies=_STREAMED,
        ),
        "/v1/messages": RouteSpec(
            POST,
            _USER,
            messages.messages,
            "a conversation, as Anthropic's clients send it",
            _TEXT,
            ANTHROPIC,
            body=MessagesRequest,
            replies=_STREAMED,
        ),
        "/v1/chat/completions/render": RouteSpec(
            POST, _USER, chat.render_chat_request, body=ChatRequest
        ),
        "/v1/completions/render": RouteSpec(
            POST, _USER, completions.render_completion_request, body=CompletionRequest
        ),
        "/v1/messages/render": RouteSpec(
            POST, _USER, messages.render_message_request, dialect=ANTHROPIC, body=MessagesRequest
        ),
        "/inference/v1/generate": RouteSpec(
            POST,
            _USER,
            tokens.generate_tokens,
            "token ids, get those that follow",
            _TEXT,
            body=TokensRequest,
            replies=_STREAMED,
        ),
        "/v1/messages/count_tokens": RouteSpec(
            POST, _USER, messages.count_tokens, dialect=ANTHROPIC, body=CountTokensRequest
        ),
        "/v1/responses": RouteSpec(
            POST,
            _USER,
            create.create_response,
            "a conversation, as a response that is kept",
            _TEXT,
            RESPONSES,
            body=ResponsesRequest,
            replies=_STREAMED,
        ),
        "/v1/responses/input_tokens": RouteSpec(
            POST, _USER, create.input_tokens, dialect=RESPONSES, body=InputTokensRequest
        ),
        "/v1/responses/{id}": RouteSpec(
            ("GET", "DELETE"),
            _USER,
            stored.response,
            dialect=RESPONSES,
            query={"stream": "boolean", "starting_after": "integer"},
            replies=_STREAMED,
        ),
        "/v1/responses/{id}/cancel": RouteSpec(POST, _USER, stored.cancel, dialect=RESPONSES),
        "/v1/responses/{id}/input_items": RouteSpec(
            GET,
            _USER,
            stored.input_items,
            dialect=RESPONSES,
            query={"after": "string", "limit": "integer", "order": "string"},
        ),
        "/tokenize": RouteSpec(
            POST, _USER, tokenize.tokenize, "a text, get its tokens", _TEXT, body=TokenizeRequest
        ),
        "/detokenize": RouteSpec(POST, _USER, tokenize.detokenize, body=DetokenizeRequest),
        "/v1/embeddings": RouteSpec(
            POST,
            _USER,
            embeddings.embeddings,
            "texts, get embeddings",
            _POOLED,
            body=EmbeddingRequest,
        ),
        "/pooling": RouteSpec(POST, _USER, embeddings.pooling, body=PoolingRequest),
        "/classify": RouteSpec(
            POST,
            _USER,
            classify.classify,
            "texts, get labels and probabilities",
            _POOLED,
            body=ClassificationRequest,
        ),
        "/score": RouteSpec(
            POST,
            _USER,
            score.score,
            "pairs of texts, get how well they go together",
            _POOLED,
            body=ScoreRequest,
        ),
        "/v1/score": RouteSpec(POST, _USER, score.score, body=ScoreRequest),
        "/rerank": RouteSpec(
            POST,
            _USER,
            score.rerank,
            "a query and documents, get the documents in order",
            _POOLED,
            body=RerankRequest,
        ),
        "/v1/rerank": RouteSpec(POST, _USER, score.rerank, body=RerankRequest),
        "/v2/rerank": RouteSpec(POST, _USER, score.rerank, body=RerankRequest),
        "/invocations": RouteSpec(
            POST,
            _USER,
            invocations,
            "any of these requests, known by its fields, as SageMaker does",
            bodies=(
                ChatRequest,
                CompletionRequest,
                EmbeddingRequest,
                ClassificationRequest,
                ScoreRequest,
                RerankRequest,
            ),
            replies=_STREAMED,
        ),
        "/v1/models": RouteSpec(GET, _USER, models.list_models, "the names of the model"),
        "/v1/models/{id:path}": RouteSpec(GET, _USER, models.retrieve_model),
        "/v1/streams/{id:path}": RouteSpec(
            (*GET, "DELETE"), _USER, stream_routes.stream, replies=_STREAMED
        ),
        "/server_info": RouteSpec(
            GET, _ADMIN, server_info.server_info, query={"config_format": "string"}
        ),
        "/limits": RouteSpec((*GET, *POST), _ADMIN, admin.limits, body=admin.LimitsRequest),
        "/reset_prefix_cache": RouteSpec(POST, _ADMIN, admin.reset_prefix_cache),
        "/explain_prefix": RouteSpec(POST, _ADMIN, admin.explain_prefix),
        "/v1/requests": RouteSpec(
            GET, _ADMIN, observe.list_requests, "what runs and what waits, and why"
        ),
        "/v1/requests/{id:path}/explain": RouteSpec(
            GET,
            _ADMIN,
            observe.explain,
            query={"format": "string"},
            replies=("application/json", "text/plain"),
        ),
        "/v1/usage": RouteSpec(GET, _USER, usage.usage, "what keys have used, and may use"),
        "/v1/timeline": RouteSpec(GET, _ADMIN, observe.timeline, query={"steps": "integer"}),
        "/v1/diagnosis": RouteSpec(GET, _ADMIN, observe.diagnosis, query={"seconds": "number"}),
        "/start_profile": RouteSpec(POST, _ADMIN, admin.start_profile),
        "/stop_profile": RouteSpec(POST, _ADMIN, admin.stop_profile),
        "/": RouteSpec(GET, _OPEN, _home, replies=("application/json", "text/html")),
        "/openapi.json": RouteSpec(GET, _OPEN, _openapi, "these routes, for programs"),
        "/docs": RouteSpec(GET, _OPEN, _docs, "these routes, to read", replies=("text/html",)),
        "/livez": RouteSpec(GET, _OPEN, probes.livez, replies=()),
        "/readyz": RouteSpec(GET, _OPEN, probes.readyz, replies=()),
        "/health": RouteSpec(GET, _OPEN, probes.health, "200 when requests are taken", replies=()),
        "/ping": RouteSpec((*GET, *POST), _OPEN, probes.health, replies=()),
        "/version": RouteSpec(GET, _OPEN, probes.version),
        "/metrics": RouteSpec(
            GET, _METRICS, probes.metrics, "Prometheus text", replies=("text/plain",)
        ),
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
    if state.keys.metrics_are_open:
        open_paths |= {"/metrics"}
    dialects = DialectTable({path: spec.dialect for path, spec in rows.items()})
    app = Starlette(
        routes=[make_route(path, spec) for path, spec in rows.items()],
        middleware=[
            *cors_layers(state.config),
            Middleware(Gate, state=state, open_paths=open_paths, dialects=dialects),
        ],
        exception_handlers={HTTPException: _routing_error},
    )
    app.router.redirect_slashes = False
    app.router.default = UnknownPath(app.router, ROUTES)
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    """Turn the router's refusal of a method into our error; the gate sends the reply."""
    assert isinstance(error, HTTPException) and error.status_code == 405, error
    refuse_absent(request.url.path)
    allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    raise MethodNotAllowed(request.method, allowed)
