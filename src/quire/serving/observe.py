"""Routes that read the records: explanations, the timeline, the list of requests, the diagnosis.

Answers are computed on a thread from a copy, so streams of tokens do not wait for them.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import parse_qs

import msgspec

from quire.errors import InvalidRequest
from quire.serving.exchange import Exchange

TIMELINE_STEPS: Final = 1000
WINDOW_SECONDS: Final = 60.0
_TEXT: Final = b"text/plain; charset=utf-8"


def parameters(exchange: Exchange, *known: str) -> dict[str, str]:
    """The query string.

    Raises:
        InvalidRequest: a parameter is unknown or given twice.
    """
    query = exchange.scope["query_string"].decode("latin-1")
    given = parse_qs(query, keep_blank_values=True)
    for name, values in given.items():
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise InvalidRequest(f"unknown parameter {name[:100]!r}; known: {allowed}", param=name)
        if len(values) > 1:
            raise InvalidRequest(f"{name} is given {len(values)} times", param=name)
    return {name: values[0] for name, values in given.items()}


def _number(text: str | None, default: float, name: str) -> float:
    """A positive number of a query.

    Raises:
        InvalidRequest: it is not a positive number.
    """
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise InvalidRequest(f"{name} must be a positive number, got {text[:100]!r}", param=name)
    return value


async def list_requests(exchange: Exchange) -> None:
    """The unfinished requests: the state of each, and why it waits."""
    parameters(exchange)
    question = exchange.state.engine_for().question()
    states = await asyncio.to_thread(question.requests)
    await exchange.reply(msgspec.json.encode({"object": "list", "data": states}))


async def explain(exchange: Exchange) -> None:
    """Where the time of one request went; `format` is `json` or `text`."""
    form = parameters(exchange, "format").get("format", "json")
    if form not in ("json", "text"):
        raise InvalidRequest(f"format must be json or text, got {form[:100]!r}", param="format")
    request_id = exchange.scope["path_params"]["id"]
    told = await exchange.state.engine_for().explain(request_id)
    if form == "text":
        text = "\n\n".join(map(str, told)) + "\n"
        return await exchange.reply(text.encode(), content_type=_TEXT)
    await exchange.reply(msgspec.json.encode({"id": told[0].id, "completions": told}))


async def timeline(exchange: Exchange) -> None:
    """The last `steps` steps as a Chrome trace."""
    given = parameters(exchange, "steps").get("steps")
    steps = int(_number(given, TIMELINE_STEPS, "steps"))
    question = exchange.state.engine_for().question()
    # Thousands of events: encoding them belongs on the thread too.
    body = await asyncio.to_thread(lambda: msgspec.json.encode(question.timeline(steps)))
    await exchange.reply(body)


async def diagnosis(exchange: Exchange) -> None:
    """Figures of the last `seconds`, and the likely causes they point to."""
    from quire.observability.explain.diagnosis import diagnose

    given = parameters(exchange, "seconds").get("seconds")
    window = _number(given, WINDOW_SECONDS, "seconds")
    question = exchange.state.engine_for().question()
    signals = await asyncio.to_thread(question.signals, window)
    body = {"seconds": window, "signals": signals, "findings": diagnose(signals)}
    await exchange.reply(msgspec.json.encode(body))
