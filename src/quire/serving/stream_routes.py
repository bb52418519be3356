"""`/v1/streams/{id}`: the rest of a reply whose client lost its connection, and its end.

What a reply says was rendered by the API that was asked; here it is only passed on.
"""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from quire.errors import InvalidRequest
from quire.serving.exchange import Exchange
from quire.serving.kept_streams import KeptReply
from quire.serving.stream_headers import read_event_id


async def stream(exchange: Exchange) -> None:
    """`GET` sends the reply from the event after `Last-Event-ID` or `?after=`, or all of it, live
    if it is still being made. `DELETE` ends and forgets it.

    Raises:
        NotFound: it is not kept, or not the caller's, or does not keep that event.
    """
    kept = await _find(exchange)
    if exchange.scope["method"] == "DELETE":
        exchange.state.kept.delete(kept)
        return await exchange.reply(msgspec.json.encode({"id": kept.id, "deleted": True}))
    await exchange.follow(kept, "id", _after(exchange))


async def _find(exchange: Exchange) -> KeptReply:
    stream_id, kept = exchange.scope["path_params"]["id"], exchange.state.kept
    await kept.look_for(stream_id)
    return kept.find(stream_id, exchange.caller.owner)


def _after(exchange: Exchange) -> str:
    """The last event that the client has; empty if it has none."""
    asked = parse_qs(exchange.scope["query_string"]).get(b"after", [])
    given = [value for value in (exchange.header(b"last-event-id"), *asked) if value]
    if len(set(given)) > 1:
        raise InvalidRequest(
            "Last-Event-ID and ?after= name different events: send one of them.", param="after"
        )
    return read_event_id(given[0]) if given else ""
