"""The route that the drills' servers have beside the product's: both sides' integrity checks, and
how long the refusals took that the HTTP side counted."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.observability.metrics.http_metrics import HttpMetrics
from quire.serving.auth import Role
from quire.serving.exchange import Exchange
from quire.serving.routes import POST, RouteSpec

_refusals: list[float] = []
_observe = HttpMetrics.observe


def _noted(self: HttpMetrics, handler: str, method: str, status: int | None, seconds: float,
           *sizes: Any) -> None:  # fmt: skip
    if status in (429, 503):
        _refusals.append(seconds)
    _observe(self, handler, method, status, seconds, *sizes)


HttpMetrics.observe = _noted  # type: ignore[method-assign]


async def _integrity(exchange: Exchange) -> None:
    engine = exchange.state.engine_for()
    engine.check_integrity()
    result = await engine.call("check_integrity")
    told = sorted(_refusals)
    if told:
        last = len(told) - 1
        result["refusal_seconds"] = {
            "p50": told[last // 2], "p99": told[int(last * 0.99)], "max": told[-1],
            "over_50_ms": sum(x > 0.05 for x in told),
        }  # fmt: skip
    await exchange.reply(msgspec.json.encode(result))


ROUTE = RouteSpec(POST, Role.ADMIN, _integrity)
