"""What a kept reply needs to outlive its process: the HTTP request as it came, without credentials,
and its place in the journal on disk.

Knows no routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from quire.engine.frontend.disk.disk_journal import DiskJournal
from quire.engine.frontend.disk.stored import Resumption, StoredStream
from quire.errors import QuireError

_NOT_KEPT: Final = frozenset(
    (b"authorization", b"x-api-key", b"proxy-authorization", b"cookie", b"last-event-id")
    + (b"x-request-deadline-ms", b"content-length", b"transfer-encoding", b"expect")
)
"""Headers that are secret, or were about that connection."""


class StoredRequest(msgspec.Struct, array_like=True):
    """An HTTP request whose reply is kept, as the journal holds it."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    owner: bytes
    """Digest of the key that opened it."""
    digest: bytes
    """Of path and body."""
    key: str | None
    """Its `Idempotency-Key`."""
    asked: bool
    request_id: str
    created: int
    """Seconds since 1970, as the reply says."""


def told_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Those that another process needs to give the same reply."""
    return [(name, value) for name, value in headers if name not in _NOT_KEPT]


@dataclass(slots=True)
class Recovered:
    """A reply that another process kept, on its way through its route."""

    stream: StoredStream
    request: StoredRequest
    refusal: QuireError | None = None
    """Why it cannot go on."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when clients can find the reply."""


@dataclass(slots=True)
class Durable:
    """A kept reply in the journal."""

    journal: DiskJournal
    stream_id: str
    opening: bytes
    """A `StoredRequest`, encoded."""
    stored: StoredStream | None = None
    """What another process has already generated, if the reply is rendered again."""

    def expect(self, request_ids: Sequence[str]) -> None:
        """These requests are about to be submitted for it, one for each prompt."""
        self.journal.expect(self.stream_id, self.opening, request_ids)

    def resumption(self, prompt: int) -> Resumption | None:
        """What there is of a prompt already."""
        if self.stored is None or (stored := self.stored.prompts.get(prompt)) is None:
            return None
        return Resumption(stored, self.stored.steps_of(prompt))
