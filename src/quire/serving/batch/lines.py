"""The lines of batch files: a request in, its reply out. Knows neither files nor engines."""

from __future__ import annotations

import uuid
from collections.abc import Container
from typing import Any, Final

import msgspec

from quire.bounds import show
from quire.errors import QuireError
from quire.serving.decode import is_not_utf8

LATER: Final = ("stream", "background")
"""Fields by which a client asks for a reply in another way than one body."""


class BadLine(QuireError):
    """A line that is no request; the others go on."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class BatchLine(msgspec.Struct):
    """A request."""

    custom_id: str
    """The caller's name for it; no two of a file are equal."""
    method: str
    url: str
    """A route, such as `/v1/chat/completions`."""
    body: msgspec.Raw
    """As the route takes it, byte by byte."""


class _Later(msgspec.Struct):
    stream: Any = None
    background: Any = None


class _Named(msgspec.Struct):
    custom_id: Any = None


_line = msgspec.json.Decoder(BatchLine)
_named = msgspec.json.Decoder(_Named)
_later = msgspec.json.Decoder(_Later)


def read_line(data: bytes, urls: Container[str], told: str) -> BatchLine:
    """The request in a line.

    Args:
        data: The line.
        urls: Routes that it may ask for.
        told: These in words.

    Raises:
        BadLine: it is not JSON, lacks a field, or asks for what a batch cannot do.
    """
    try:
        line = _line.decode(data)
    except msgspec.ValidationError as error:
        raise BadLine(f"it is no request: {error}", _name_in(data)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"it is not valid JSON: {_why(error)}") from None
    if line.method.upper() != "POST":
        raise BadLine(f"method must be POST, got {show(line.method)}", line.custom_id)
    if line.url not in urls:
        raise BadLine(f"url must be one of {told}, got {show(line.url)}", line.custom_id)
    for name in LATER:
        if _asks(line.body, name):
            raise BadLine(
                f"{name} must be false in a batch, whose replies are whole", line.custom_id
            )
    return line


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if is_not_utf8(error):
        return "it is not UTF-8"
    return str(error).removeprefix("JSON is malformed: ")


def _name_in(data: bytes) -> str | None:
    try:
        found = _named.decode(data).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _asks(body: msgspec.Raw, name: str) -> bool:
    """Whether a field is set; what else is wrong with the body is for its route to say."""
    try:
        return bool(getattr(_later.decode(body), name))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


class _Error(msgspec.Struct):
    error: Any = None


_error = msgspec.json.Decoder(_Error)


def reply_line(line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    """A reply as a line: of one that failed, `error` repeats what the body says. JSON without a
    line break."""
    return _encoded(
        line.custom_id,
        {"status_code": status, "request_id": request_id, "body": msgspec.Raw(_one_line(body))},
        _error.decode(body).error if status >= 400 else None,
    )


def bad_line(number: int, error: BadLine) -> bytes:
    """What is said of a line that was no request."""
    said = {
        "code": "invalid_line",
        "message": f"Line {number}: {error.message}.",
        "type": "invalid_request_error",
        "line": number,
    }
    return _encoded(error.custom_id, None, said)


def _encoded(custom_id: str | None, response: Any, error: Any) -> bytes:
    return msgspec.json.encode(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )


def _one_line(body: bytes) -> bytes:
    """JSON has line breaks only between its parts."""
    if b"\n" not in body and b"\r" not in body:
        return body
    return msgspec.json.encode(msgspec.json.decode(body))
