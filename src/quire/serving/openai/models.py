"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange


def _card(name: str, engine: EngineClient, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": engine.config.model.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
        "permission": [],
    }


async def list_models(exchange: Exchange) -> None:
    """All served names."""
    engine, created = exchange.state.ready_engine(), exchange.state.created
    cards = [_card(name, engine, created) for name in engine.config.model.names]
    await exchange.reply(msgspec.json.encode({"object": "list", "data": cards}))


async def retrieve_model(exchange: Exchange) -> None:
    """One served name; it may contain slashes.

    Raises:
        NotFound: it is not served.
    """
    engine = exchange.state.ready_engine()
    name = exchange.state.check_model(exchange.scope["path_params"]["id"], engine)
    await exchange.reply(msgspec.json.encode(_card(name, engine, exchange.state.created)))
