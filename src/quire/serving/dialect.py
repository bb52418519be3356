"""How an HTTP API formats errors and frames streams, which is what differs between APIs around
their replies.

The row of a route names its dialect; the default is OpenAI's, which most clients expect. Knows no
route, and nothing of the content of replies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.errors import QuireError
from quire.serving import errors


@dataclass(frozen=True, slots=True)
class Dialect:
    """The dialect of one API."""

    error: Callable[[QuireError], bytes]
    """Makes the JSON body of an error reply."""
    stream_error: Callable[[QuireError], bytes]
    """Makes the frame of an error within a stream, whose status has been sent already."""
    stream_end: bytes = b""
    """The end of every stream, also after an error."""
    stream_type: bytes = b"text/event-stream; charset=utf-8"
    """Content type of streams."""


def _event(error: QuireError) -> bytes:
    return b"data: " + errors.encode(error) + b"\n\n"


OPENAI: Final = Dialect(errors.encode, _event, b"data: [DONE]\n\n")
