"""The request headers that ask for a reply to be kept, or name one that is.

Knows no reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from quire.errors import InvalidRequest
from quire.serving.decode import show
from quire.serving.limits import IDEMPOTENCY_KEY
from quire.serving.stream_positions import MAX_ID

_SWITCH: Final = {b"true": True, b"1": True, b"false": False, b"0": False}
_NAMES: Final = frozenset((b"x-resumable", b"idempotency-key", b"last-event-id"))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wants to be kept."""

    key: str | None
    """Its `Idempotency-Key`."""
    asked: bool
    """Whether the request says so, or only the configuration."""
    last_event_id: str | None
    """The last event that it has of a stream."""


def read_wishes(headers: Iterable[tuple[bytes, bytes]], by_default: bool) -> Wishes | None:
    """The wishes of a request; `None` if nothing is to be kept.

    Args:
        headers: Of the request, names in lower case.
        by_default: Whether replies are kept that nobody asks for.

    Raises:
        InvalidRequest: a header has a bad value.
    """
    given = {name: value for name, value in headers if name in _NAMES}
    if not given:
        return Wishes(None, False, None) if by_default else None
    keep = _switch(given[b"x-resumable"]) if b"x-resumable" in given else None
    key = _key(given[b"idempotency-key"]) if b"idempotency-key" in given else None
    last = read_event_id(given[b"last-event-id"]) if given.get(b"last-event-id") else None
    if not (keep or key or last) and (keep is False or not by_default):
        return None
    return Wishes(key, bool(keep or key), last)


def read_event_id(given: bytes) -> str:
    """An id of an event.

    Raises:
        InvalidRequest: it cannot be one.
    """
    if len(given) > MAX_ID or not given.isascii():
        raise InvalidRequest(
            f"Last-Event-ID must be an id of a stream's event, at most {MAX_ID} bytes of ASCII, "
            f"got {len(given)} bytes.",
            param="Last-Event-ID",
        )
    return given.decode("ascii")


def _switch(given: bytes) -> bool:
    keep = _SWITCH.get(given.strip().lower())
    if keep is None:
        raise InvalidRequest(
            f"X-Resumable must be true or false, got {show(given.decode('latin-1'))}.",
            param="X-Resumable",
        )
    return keep


def _key(given: bytes) -> str:
    IDEMPOTENCY_KEY.check(len(given), "Idempotency-Key")
    key = given.decode("latin-1")
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"Idempotency-Key must be visible ASCII characters, got {show(key)}.",
            param="Idempotency-Key",
        )
    return key
