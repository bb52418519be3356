"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serving.exchange import Exchange
from quire.serving.server_state import ServedModel


def _card(model: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": model.engine.config.model.model,
        "parent": None,
        "max_model_len": model.engine.max_model_len,
        "permission": [],
    }


async def list_models(exchange: Exchange) -> None:
    """All served names."""
    exchange.state.model_for()  # not before it can answer requests
    created = exchange.state.created
    cards = [_card(model, created) for model in exchange.state.models.values()]
    await exchange.reply(msgspec.json.encode({"object": "list", "data": cards}))


async def retrieve_model(exchange: Exchange) -> None:
    """One served name; it may contain slashes.

    Raises:
        NotFound: it is not served.
    """
    model = exchange.state.model_for(exchange.scope["path_params"]["id"])
    await exchange.reply(msgspec.json.encode(_card(model, exchange.state.created)))
