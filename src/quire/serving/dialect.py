"""How an HTTP API says errors and frames streams: what differs between APIs around their replies.

A route names its dialect in its row; the default is OpenAI's, which clients of most servers expect.
Knows no route and nothing of what is in replies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.errors import QuireError
from quire.serving import errors


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API's."""

    error: Callable[[QuireError], bytes]
    """JSON body of a reply that is an error."""
    stream_error: Callable[[QuireError], bytes]
    """The same within a stream, whose status is long sent: a frame."""
    stream_end: bytes = b""
    """Ends every stream, also after an error."""
    stream_type: bytes = b"text/event-stream; charset=utf-8"
    """Content type of streams."""


def _event(error: QuireError) -> bytes:
    return b"data: " + errors.encode(error) + b"\n\n"


OPENAI: Final = Dialect(errors.encode, _event, b"data: [DONE]\n\n")
