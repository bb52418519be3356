"""Who may call which route: roles of routes, and keys, which are compared in constant time.

Knows nothing of routes; decides from the headers of the ASGI scope alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import Enum

from quire.errors import Unauthorized


class Role(Enum):
    """The role that a route requires of its caller."""

    OPEN = "open"
    """Anyone; only for health probes and the version."""
    USER = "user"
    ADMIN = "admin"
    METRICS = "metrics"


Headers = Iterable[tuple[bytes, bytes]]


class KeyRing:
    """The accepted keys, of which only hashes are kept. Without any key, every caller is
    accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Headers) -> None:
        """Accept the caller, whatever the route's role, because every key has all roles.

        Raises:
            Unauthorized: keys are configured, and the caller sent none of them.
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
        """Identity of the caller for fair scheduling: which of several keys it has. Empty if there
        is at most one key."""
        if len(self._digests) < 2:
            return ""
        for token in _presented(headers):
            digest = hashlib.sha256(token).digest()
            fits = [hmac.compare_digest(digest, known) for known in self._digests]
            if any(fits):
                return f"key {fits.index(True)}"
        return ""

    def owner(self, headers: Headers) -> bytes:
        """Digest of the key that the caller has, which stays the same when keys are added. Empty if
        there are no keys."""
        for token in _presented(headers) if self._digests else ():
            digest = hashlib.sha256(token).digest()
            fits = [hmac.compare_digest(digest, known) for known in self._digests]
            if any(fits):
                return digest
        return b""


def _presented(headers: Headers) -> list[bytes]:
    """The first key of each way of sending one."""
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
