"""Errors that only a server has, and the place where errors become bytes.

Texts come from the error classes. Exceptions that were not raised on purpose are never shown; the
client gets an id under which the log has the exception.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from quire.errors import (
    EngineDead,
    EngineError,
    PayloadTooLarge,
    QuireError,
    RequestError,
    TooManyRequests,
)

UNKNOWN_WAIT: Final = 1.0
"""Seconds after which to try again where nothing better is known."""
LONGEST_WAIT: Final = 3600.0
Headers = list[tuple[bytes, bytes]]


class MethodNotAllowed(RequestError):
    """The route exists, but not for this method."""

    status = 405
    type = "MethodNotAllowed"

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"The method {method} is not allowed here; allowed: {allowed}.")
        self.allowed = allowed


class UnsupportedMediaType(RequestError):
    """The body is not declared as JSON.

    This matters: a web page can send any other type to any server its reader can reach, and only
    for JSON does the browser ask that server first.
    """

    status = 415
    type = "UnsupportedMediaType"

    def __init__(self, given: str) -> None:
        got = f"got {given[:100]!r}" if given else "got none"
        super().__init__(f"The body must be sent as `Content-Type: application/json`, {got}.")


class UnsupportedEncoding(RequestError):
    """The body is compressed. It is not unpacked: a small one could become any size."""

    status = 415
    type = "UnsupportedMediaType"

    def __init__(self, given: str) -> None:
        super().__init__(
            f"The body must be sent as it is, without Content-Encoding, got {given[:100]!r}.",
            param="Content-Encoding",
        )


class RequestTimeout(RequestError):
    """The body did not arrive in time."""

    status = 408
    type = "RequestTimeout"


class DeadlineExceeded(RequestError):
    """The caller's deadline passed before there was anything to return."""

    status = 504
    type = "RequestTimeout"
    code = "deadline_exceeded"

    def __init__(self, milliseconds: int) -> None:
        super().__init__(
            f"The deadline of {milliseconds} ms (X-Request-Deadline-Ms) passed before the request "
            "had any output."
        )


class ServiceUnavailable(EngineError):
    """The server cannot answer now; trying again later can succeed."""

    status = 503
    type = "ServiceUnavailable"


class EngineLoading(ServiceUnavailable):
    """The model is being loaded."""

    code = "engine_loading"

    def __init__(self, phase: str, percent: int, retry_after: float = 1.0) -> None:
        super().__init__(f"The model is loading: {phase}, {percent} %.")
        self.extra = {"phase": phase, "percent": percent}
        self.retry_after = retry_after
        """Seconds."""


class EngineReplacing(ServiceUnavailable):
    """The engine core died or hung, and another one takes its place. Only probes say so, because
    requests are accepted meanwhile."""

    code = "engine_replacing"

    def __init__(self, phase: str, percent: int) -> None:
        super().__init__(f"The engine core is being replaced: {phase}, {percent} %.")
        self.extra = {"phase": phase, "percent": percent}


class EngineStalled(ServiceUnavailable):
    """The engine shows no progress."""

    code = "engine_stalled"

    def __init__(self) -> None:
        super().__init__("The engine shows no progress.")


class EngineGone(EngineDead):
    """The engine has stopped for good, so the server is about to exit."""

    def __init__(self, retry_after: float = 1.0) -> None:
        super().__init__("The engine has stopped; the server is about to exit.")
        self.retry_after = retry_after
        """Seconds."""


class NoDescriptors(ServiceUnavailable):
    """The process has hardly any file descriptors left for connections."""

    code = "no_descriptors"

    def __init__(self, retry_after: float = 1.0) -> None:
        super().__init__(
            "The server has hardly any file descriptors left. Close connections, or raise the "
            "limit (`ulimit -n`)."
        )
        self.retry_after = retry_after
        """Seconds."""


class ShuttingDown(ServiceUnavailable):
    """The server is shutting down and accepts no new requests."""

    code = "shutting_down"

    def __init__(self, retry_after: float = 1.0) -> None:
        super().__init__("The server is shutting down and accepts no new requests.")
        self.retry_after = retry_after
        """Seconds."""


class CutShort(ServiceUnavailable):
    """The server shut down before a request that it had accepted was finished."""

    code = "shutting_down"

    def __init__(self, retry_after: float = 1.0) -> None:
        super().__init__(
            "The server shut down before this request was finished. The output so far is right, "
            "but not complete; send the request again."
        )
        self.retry_after = retry_after
        """Seconds."""


class LeftInJournal(ServiceUnavailable):
    """The server shut down before a request was finished, and the next one goes on with it."""

    code = "left_in_journal"

    def __init__(self, stream_id: str, retry_after: float = 1.0) -> None:
        super().__init__(
            "The server shut down before this request was finished. It is in the journal and goes "
            f"on when the server is started again: fetch the rest with GET /v1/streams/{stream_id} "
            "and the last event's id as Last-Event-ID."
        )
        self.retry_after = retry_after
        """Seconds."""


class StreamHandedOver(ServiceUnavailable):
    """Another process goes on with a stream. Nobody reads it here, so nobody is told."""

    code = "stream_handed_over"

    def __init__(self) -> None:
        super().__init__("Another process of this server goes on with the stream.")


class StreamsReturning(ServiceUnavailable):
    """A stream is still with the process before this one."""

    code = "streams_returning"

    def __init__(self) -> None:
        super().__init__(
            "The process before this one still has this stream: it comes here as soon as that "
            "process knows that its client has gone. Try again."
        )
        self.retry_after = 1.0
        """Seconds."""


class NotClaimed(ServiceUnavailable):
    """Nobody asked for a request that went on from the journal."""

    code = "not_claimed"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The request went on after a restart, and nobody asked for it within {seconds:g} s "
            "(--journal-claim-timeout)."
        )


class IdempotencyKeyReused(RequestError):
    """The key was given with another request before."""

    status = 422
    type = "UnprocessableEntity"
    code = "idempotency_key_reused"

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key was used with another path or body. Send the same request again "
            "for the same reply, or a new key with a new request.",
            param="Idempotency-Key",
        )


class OtherRequest(RequestError):
    """The client goes on with a stream, and the request is not the one that opened it."""

    status = 422
    type = "UnprocessableEntity"
    code = "other_request"

    def __init__(self) -> None:
        super().__init__(
            "The stream that Last-Event-ID names was opened with another path or body. Send the "
            "same request again, or GET /v1/streams/{id}.",
            param="Last-Event-ID",
        )


class ReaderReplaced(RequestError):
    """Newer connections read the same stream."""

    status = 409
    type = "ConflictError"
    code = "reader_replaced"

    def __init__(self, most: int) -> None:
        super().__init__(
            f"A stream has at most {most} readers at a time; newer ones took the place of this one."
        )


class StreamDeleted(RequestError):
    """The client ended its stream."""

    status = 409
    type = "ConflictError"
    code = "stream_deleted"

    def __init__(self) -> None:
        super().__init__("The stream was ended by DELETE /v1/streams/{id}.")


class KeptBytesExceeded(ServiceUnavailable):
    """A reply that was kept for nobody took too much memory."""

    code = "kept_bytes_exceeded"

    def __init__(self, held: int, most: int) -> None:
        super().__init__(
            f"The request was ended: {held} bytes of its reply were kept for its readers, and all "
            f"kept replies together may have {most} (--max-kept-bytes)."
        )


class InternalError(QuireError):
    """An exception that was not raised on purpose; the log has it under `error_id`."""

    code = "internal_error"

    def __init__(self, error_id: str) -> None:
        super().__init__(f"The server failed on this request. The log has more under {error_id}.")


def envelope(error: QuireError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code or error.status,
            **getattr(error, "extra", {}),
        }
    }


def encode(error: QuireError) -> bytes:
    """The envelope as JSON."""
    return msgspec.json.encode(envelope(error))


def headers(error: QuireError) -> Headers:
    """Headers that tell clients when to try again, or that it is useless."""
    result: Headers = []
    if isinstance(error, TooManyRequests) or error.status == 503:
        known = getattr(error, "retry_after", None)
        seconds = UNKNOWN_WAIT if known is None else max(0.001, known)
        if not getattr(error, "exact", False):
            seconds = min(seconds, LONGEST_WAIT)
        # Rounded up to whole milliseconds: who came sooner would be refused once more.
        milliseconds = math.ceil(round(1000 * seconds, 9))
        result.append((b"retry-after", str(-(-milliseconds // 1000)).encode()))
        result.append((b"retry-after-ms", str(milliseconds).encode()))
    elif 400 <= error.status < 500 and error.status != 408:
        result.append((b"x-should-retry", b"false"))
    if error.status == 401:
        result.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        result.append((b"allow", error.allowed.encode()))
    if isinstance(error, NoDescriptors):
        result.append((b"connection", b"close"))
    if isinstance(error, (PayloadTooLarge, RequestTimeout)):
        # What is left of the body would otherwise be read only to be thrown away.
        result.append((b"connection", b"close"))
    return result
