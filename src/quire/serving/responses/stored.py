"""Routes over the responses that are kept: retrieve, delete, cancel, and the items of the input."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Final
from urllib.parse import parse_qs

import msgspec

from quire.errors import InvalidRequest
from quire.serving.decode import show
from quire.serving.exchange import Exchange
from quire.serving.responses.event_log import EventLog, frames_of
from quire.serving.responses.keeping import (
    BackgroundResponse,
    KeptResponse,
    decode,
    encode,
    find,
    owner,
)
from quire.serving.responses.schema import INCLUDED
from quire.serving.streaming import send_stream

DEFAULT_ITEMS: Final = 20
MAX_ITEMS: Final = 100


async def response(exchange: Exchange) -> None:
    """Retrieve or delete a response.

    Raises:
        NotFound: it is unknown, no longer kept, or another's.
    """
    name = exchange.scope["path_params"]["id"]
    if exchange.scope["method"] == "DELETE":
        await _delete(exchange, name)
        return
    query = _query(exchange, "stream", "starting_after", "include_obfuscation")
    if query.get("include_obfuscation", "false") != "false":
        raise InvalidRequest(
            "include_obfuscation must be false: events are not padded, got "
            f"{show(query['include_obfuscation'])}.",
            param="include_obfuscation",
        )
    stream = query.get("stream", "false")
    if stream not in ("true", "false"):
        raise InvalidRequest(f"stream must be true or false, got {show(stream)}.", param="stream")
    if stream == "false" and "starting_after" in query:
        raise InvalidRequest("starting_after needs stream to be true.", param="starting_after")
    found = find(exchange, name)
    if stream == "true":
        frames = _events(found, query.get("starting_after"))
        await exchange.unless_disconnected(send_stream(exchange, frames))
    else:
        await exchange.reply(_body(found))


def _events(found: KeptResponse | BackgroundResponse, after: str | None) -> AsyncGenerator[bytes]:
    """The events of a response after the one of this number, those to come included.

    Raises:
        InvalidRequest: it was not made as a stream in the background, or has no such event.
    """
    log: Sequence[bytes] | EventLog | None
    if isinstance(found, BackgroundResponse):
        log = found.log
    else:
        log = None if found.events is None else list(frames_of(found.events))
    if log is None:
        raise InvalidRequest(
            "stream must be false: only a response that was created with background and stream is "
            "retrieved as a stream.",
            param="stream",
        )
    first = 0 if after is None else _number(after, len(log)) + 1
    return log.read(first) if isinstance(log, EventLog) else _those(log[first:])


def _number(after: str, count: int) -> int:
    if not (after.isascii() and after.isdigit() and len(after) < 10 and int(after) < count):
        raise InvalidRequest(
            f"starting_after must be the sequence_number of an event, which are 0 to {count - 1} "
            f"now, got {show(after)}.",
            param="starting_after",
        )
    return int(after)


async def _those(frames: Sequence[bytes]) -> AsyncGenerator[bytes]:
    yield b"".join(frames)


def _body(found: KeptResponse | BackgroundResponse) -> bytes:
    return found.body if isinstance(found, KeptResponse) else encode(found.writer.body())


async def _delete(exchange: Exchange, name: str) -> None:
    found = find(exchange, name)
    if isinstance(found, BackgroundResponse):
        await _stop(found)
    exchange.state.responses.remove(owner(exchange), name)
    deleted = {"id": name, "object": "response", "deleted": True}
    await exchange.reply(msgspec.json.encode(deleted))


async def cancel(exchange: Exchange) -> None:
    """End a response that is made in the background; one that has ended stays as it is.

    Raises:
        NotFound: it is unknown, no longer kept, or another's.
        InvalidRequest: it was not made in the background.
    """
    name = exchange.scope["path_params"]["id"]
    found = find(exchange, name)
    if isinstance(found, BackgroundResponse):
        await _stop(found)
        found = find(exchange, name)
    elif not decode(found.body)["background"]:
        raise InvalidRequest(
            f"The response {show(name)} was not made in the background; only such responses can "
            "be cancelled. To end another, close its connection.",
            param="id",
        )
    await exchange.reply(_body(found))


async def _stop(running: BackgroundResponse) -> None:
    """End what makes a response, and wait until it is kept."""
    assert running.task is not None, "a background response without a task"
    running.task.cancel()
    await running.task


async def input_items(exchange: Exchange) -> None:
    """The items that a response's request gave, by default the last ones first.

    Raises:
        NotFound: the response, or the item after which to begin, is not there.
        InvalidRequest: a parameter is wrong.
    """
    query = _query(exchange, "after", "limit", "order")
    found = find(exchange, exchange.scope["path_params"]["id"])
    items = decode(found.items)
    if query.get("order", "desc") not in ("asc", "desc"):
        raise InvalidRequest(
            f'order must be "asc" or "desc", got {show(query["order"])}.', param="order"
        )
    if query.get("order", "desc") == "desc":
        items.reverse()
    if "after" in query:
        places = [i for i, item in enumerate(items) if item["id"] == query["after"]]
        if not places:
            raise InvalidRequest(
                f"after must be the id of an item, got {show(query['after'])}.", param="after"
            )
        items = items[places[0] + 1 :]
    limit = query.get("limit", str(DEFAULT_ITEMS))
    if not (limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= MAX_ITEMS):
        raise InvalidRequest(
            f"limit must be an integer from 1 to {MAX_ITEMS}, got {show(limit)}.", param="limit"
        )
    page = items[: int(limit)]
    told = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
    await exchange.reply(msgspec.json.encode(told))


def _query(exchange: Exchange, *known: str) -> dict[str, str]:
    """The query string, with `include` checked and left out.

    Raises:
        InvalidRequest: a parameter is unknown or given twice.
    """
    given = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for name, values in given.items():
        if name in ("include", "include[]"):
            for value in values:
                if INCLUDED.get(value, "unknown"):
                    raise InvalidRequest(
                        f"include: {show(value)} is not supported.", param="include"
                    )
        elif name not in known:
            allowed = ", ".join((*known, "include"))
            raise InvalidRequest(
                f"Unknown parameter {show(name[:100])}; known: {allowed}.", param=name[:100]
            )
        elif len(values) > 1:
            raise InvalidRequest(f"{name} is given {len(values)} times.", param=name)
    return {name: values[0] for name, values in given.items() if name in known}
