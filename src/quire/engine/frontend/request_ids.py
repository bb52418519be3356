"""The two ids of a request: the caller's, and the one that the engine core knows it by.

Callers may send one id twice, so the core's ids carry the number of the request besides.
"""

from __future__ import annotations

from typing import Final

from quire.engine.frontend.refusal import refuse, shown

MAX_REQUEST_ID_LENGTH: Final = 256


def check_request_id(request_id: object) -> None:
    """Refuse an id that is no string of sane length and content.

    Raises:
        InvalidRequest: it is empty, too long, or holds control characters or half characters.
    """
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_REQUEST_ID_LENGTH:
        rule = f"must be a string of 1 to {MAX_REQUEST_ID_LENGTH} characters"
        refuse("request_id", f"{rule}, got {shown(request_id)}.")
    if not request_id.isprintable():
        refuse("request_id", f"must hold printable characters only, got {shown(request_id)}.")


def internal_id(request_id: str, number: int) -> str:
    """The core's id of request `number` of this process; it wraps after 2**32."""
    return f"{request_id}-{number % 2**32:08x}"
