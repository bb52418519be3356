"""Probes for orchestrators, metrics and version. None of them takes a slot of the engine."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from quire.errors import EngineDead
from quire.serving.errors import EngineLoading, EngineStalled, ServiceUnavailable, ShuttingDown
from quire.serving.exchange import Exchange
from quire.version import __version__

_VERSION: Final = msgspec.json.encode({"version": __version__})
_METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


async def livez(exchange: Exchange) -> None:
    """200 as long as the process answers."""
    await exchange.reply()


async def health(exchange: Exchange) -> None:
    """200 when the model is loaded and the core shows progress, else 503 with the reason."""
    state = exchange.state
    status = state.status()
    if status == "ready":
        await exchange.reply()
    elif status == "loading":
        raise EngineLoading(*state.progress())
    elif status == "draining":
        raise ShuttingDown()
    elif status == "stalled":
        raise EngineStalled()
    else:
        raise EngineDead("The engine has stopped.")


async def version(exchange: Exchange) -> None:
    """The version of quire."""
    await exchange.reply(_VERSION)


async def metrics(exchange: Exchange) -> None:
    """Prometheus text."""
    engine = exchange.state.engine
    if engine is None:
        raise ServiceUnavailable("The engine has not started yet.")
    own = exchange.state.http_text
    # Rendering takes milliseconds: not on the loop that streams tokens.
    text = await asyncio.to_thread(lambda: engine.metrics_text() + own.render())
    await exchange.reply(text, content_type=_METRICS_TYPE)


async def load(exchange: Exchange) -> None:
    """How many requests for generation are being answered."""
    await exchange.reply(msgspec.json.encode({"server_load": exchange.state.in_flight}))
