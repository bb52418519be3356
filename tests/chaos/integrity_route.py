"""The route that the drills' servers have beside the product's: both sides' integrity checks."""

from __future__ import annotations

import msgspec

from quire.serving.auth import Role
from quire.serving.exchange import Exchange
from quire.serving.routes import POST, RouteSpec


async def _integrity(exchange: Exchange) -> None:
    engine = exchange.state.engine_for()
    engine.check_integrity()
    result = await engine.call("check_integrity")
    await exchange.reply(msgspec.json.encode(result))


ROUTE = RouteSpec(POST, Role.ADMIN, _integrity)
