"""Leaves out of a stream that was rendered again what its client has already.

The rendering of another process may have grouped tokens otherwise, or have had the choices in
another order: what it had not written to the journal was computed again, at other times. The id of
an event says how many tokens of each choice came before it, so whether a client has the event is
decided for each choice alone. Only where one event holds tokens on both sides of the line it cannot
be.

Knows no HTTP.
"""

from __future__ import annotations

from typing import Final

from quire.errors import NotFound
from quire.serving.stream_positions import Position

_ID: Final = b"\nid: "


class Skip:
    """The events after a position.

    Args:
        event_id: Of the last event that the client has.

    Raises:
        NotFound: it is no such id.
    """

    def __init__(self, event_id: str) -> None:
        found = Position.read(event_id.partition(":")[2])
        if found is None:
            raise NotFound("Last-Event-ID is no id of an event.", param="Last-Event-ID")
        self._client = found
        self._rest = b""

    def feed(self, data: bytes, last: bool) -> bytes:
        """What the client has not got of the next bytes of the stream; whole events, unless it is
        the `last`.

        Raises:
            NotFound: an event is neither before nor after the position.
        """
        data = self._rest + data
        end = len(data) if last else data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return b""
        self._rest = data[end:]
        events = data[:end].split(b"\n\n")
        return b"".join([event + b"\n\n" for event in events if event and not self._has(event)])

    def _has(self, event: bytes) -> bool:
        at = event.rfind(_ID)
        place = event[at + len(_ID) :].decode("ascii", "replace").partition(":")[2]
        position = Position.read(place) if at >= 0 else None
        if position is None:
            return False  # a comment, or an error that ends the stream only here
        client = self._client
        stages = ("begin", "unit", "end")
        if position.stage != client.stage:
            return stages.index(position.stage) < stages.index(client.stage)
        if position.stage != "unit":
            return position.event <= client.event
        return self._has_unit(position, client)

    def _has_unit(self, unit: Position, client: Position) -> bool:
        choice = unit.choice
        start = unit.before[choice]
        end = start + unit.tokens
        if choice >= len(client.before):
            return False
        had = client.before[choice]
        if choice == client.choice:
            if (start, unit.tokens, unit.ends) == (had, client.tokens, client.ends):
                return unit.event <= client.event
            if start >= had + client.tokens:
                return False
        elif choice in client.ended:
            return True
        elif start >= had and (unit.tokens or unit.ends):
            return False
        if end <= had and not unit.ends:
            return True
        raise NotFound(
            "The stream was rendered again after a restart, with other borders between its events: "
            "it cannot go on after this one. Read it from its beginning.",
            param="Last-Event-ID",
        )
