"""How an HTTP API formats errors and frames streams, which is what differs between APIs around
their replies.

The row of a route names its dialect; the default is OpenAI's, which most clients expect. A path
that is not in the table but lies below a route gets the dialect of that route, so that a client
never has to read the errors of another API. Knows no route, and nothing of the content of replies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from quire.errors import QuireError
from quire.serving import errors


@dataclass(frozen=True, slots=True)
class Dialect:
    """The dialect of one API."""

    error: Callable[[QuireError, str], bytes]
    """Makes the JSON body of an error reply from the error and the id of the HTTP request."""
    stream_error: Callable[[QuireError, str], bytes]
    """Makes the frame of an error within a stream, whose status has been sent already."""
    stream_end: bytes = b""
    """The end of every stream, also after an error."""
    stream_type: bytes = b"text/event-stream; charset=utf-8"
    """Content type of streams."""
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """Headers of every reply that hold the id of the HTTP request."""


def _body(error: QuireError, request_id: str) -> bytes:
    return errors.encode(error)


def _event(error: QuireError, request_id: str) -> bytes:
    return b"data: " + errors.encode(error) + b"\n\n"


OPENAI: Final = Dialect(_body, _event, b"data: [DONE]\n\n")


class DialectTable:
    """The dialects of routes, by path.

    Args:
        routes: The dialect of each route's path; `{name}` in a path stands for any text.
    """

    def __init__(self, routes: Mapping[str, Dialect]) -> None:
        heads = {path.partition("{")[0].rstrip("/"): one for path, one in routes.items()}
        special = {head: one for head, one in heads.items() if one is not OPENAI}
        self._special = sorted(special.items(), key=lambda row: -len(row[0]))

    def find(self, path: str) -> Dialect:
        """The dialect of a path: that of the route at or above it, or else OpenAI's."""
        for head, dialect in self._special:
            if path.startswith(head) and path[len(head) : len(head) + 1] in ("", "/"):
                return dialect
        return OPENAI
