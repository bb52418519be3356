"""Probes for orchestrators, metrics and version. None of them takes a slot of the engine."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from quire.errors import QuireError
from quire.serving.errors import ServiceUnavailable
from quire.serving.exchange import Exchange
from quire.version import __version__

_VERSION: Final = msgspec.json.encode({"version": __version__})
_METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


async def livez(exchange: Exchange) -> None:
    """503 only if a restart of the process would help: its engine has stopped for good. While a
    model loads, a core is replaced or requests drain, a restart would only lose what is there. A
    process whose event loop hangs does not answer at all."""
    state = exchange.state
    await _reply(exchange, state.unready() if state.status() == "dead" else None)


async def readyz(exchange: Exchange) -> None:
    """200 when requests are accepted and computed, else 503 with the reason; while a model is
    loaded or a core is replaced, with the phase and its percentage."""
    await _reply(exchange, exchange.state.unready())


async def health(exchange: Exchange) -> None:
    """As `readyz`, but 200 while a core that died or hangs is replaced: many charts use this route
    for liveness, and killing the pod would lose the requests that the new core goes on with."""
    state = exchange.state
    await _reply(exchange, None if state.recovers else state.unready())


async def _reply(exchange: Exchange, error: QuireError | None) -> None:
    if error is not None:
        raise error
    await exchange.reply()


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
