"""What is kept of a response, so that it can be retrieved and continued.

Knows no reply and no route.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import NotFound
from quire.serving.decode import show
from quire.serving.exchange import Exchange
from quire.serving.responses.event_log import EventLog
from quire.serving.responses.items import Item, TurnsOfItems
from quire.serving.responses.response_reply import ResponseWriter

encode = msgspec.json.encode
decode = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response that has ended, as JSON: compact, and its size is known."""

    body: bytes
    """The response object."""
    items: bytes
    """The items of its input."""
    turns: bytes
    """The conversation before its output, without instructions, as turns of a template."""
    events: bytes | None = None
    """The events, if it was made as a stream in the background."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.body) + len(self.items) + len(self.turns) + len(self.events or b"")


@dataclass(slots=True)
class BackgroundResponse:
    """A response that is being made while nobody waits for it."""

    writer: ResponseWriter
    items: bytes
    log: EventLog | None = None
    """Its events, if it is made as a stream."""
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class ConversationInput:
    """A conversation up to its next reply."""

    items: list[Item]
    """What this request adds to it."""
    turns: list[dict[str, Any]]

    def kept(self, writer: ResponseWriter, events: bytes | None = None) -> KeptResponse:
        """What to keep of it with the reply."""
        return KeptResponse(encode(writer.body()), encode(self.items), encode(self.turns), events)


def owner(exchange: Exchange) -> bytes:
    """To whom a response belongs: the key that the caller has. Without keys all callers are one."""
    return exchange.caller.owner


def keep_response(exchange: Exchange, kept: KeptResponse, name: str) -> None:
    """Keep a response of the caller's."""
    exchange.state.responses.put(owner(exchange), name, kept, kept.size)


def find(exchange: Exchange, name: str, param: str = "id") -> KeptResponse | BackgroundResponse:
    """A response of the caller's.

    Raises:
        NotFound: it is unknown, no longer kept, or another's.
    """
    found = exchange.state.responses.get(owner(exchange), name)
    if not isinstance(found, KeptResponse | BackgroundResponse):
        raise NotFound(
            f"There is no response {show(name)}; responses are kept for a while, unless store is "
            "false.",
            param=param,
        )
    return found


def turns_after(kept: KeptResponse) -> list[dict[str, Any]]:
    """The conversation with the response in it."""
    return TurnsOfItems(decode(kept.turns)).add(decode(kept.body)["output"]).turns
