"""Who may call what: roles of routes, and keys compared in constant time.

Knows nothing of routes; decides from the headers of the ASGI scope alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import Enum

from quire.errors import Unauthorized


class Role(Enum):
    """What a route needs its caller to be."""

    OPEN = "open"
    """Anyone: only the health probes and the version."""
    USER = "user"
    ADMIN = "admin"
    METRICS = "metrics"


Headers = Iterable[tuple[bytes, bytes]]


class KeyRing:
    """The keys that are let in. Keeps hashes only; without any key everyone is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Headers) -> None:
        """Let the caller pass, whatever the route's role: every key has all roles.

        Raises:
            Unauthorized: keys are configured and none was sent that fits.
        """
        if not self._digests:
            return
        presented = _presented(headers)
        # No early exit: the time taken must not tell which key, or how much of it, was right.
        fits = False
        for token in presented:
            digest = hashlib.sha256(token).digest()
            for known in self._digests:
                fits |= hmac.compare_digest(digest, known)
        if not fits:
            given = "is wrong" if presented else "is missing"
            raise Unauthorized(
                f"The API key {given}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )

    def client(self, headers: Headers) -> str:
        """Which of several keys the caller has, for fair scheduling; empty if there is at most
        one key."""
        if len(self._digests) < 2:
            return ""
        for token in _presented(headers):
            digest = hashlib.sha256(token).digest()
            fits = [hmac.compare_digest(digest, known) for known in self._digests]
            if any(fits):
                return f"key {fits.index(True)}"
        return ""


def _presented(headers: Headers) -> list[bytes]:
    """The first key of each way to send one."""
    bearer: bytes | None = None
    plain: bytes | None = None
    for name, value in headers:
        if name == b"authorization" and bearer is None:
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                bearer = token.strip()
        elif name == b"x-api-key" and plain is None and value:
            plain = value
    return [token for token in (bearer, plain) if token is not None]
