"""Errors and headers as clients of the Messages API expect them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quire.errors import QuireError
from quire.serving.dialect import Dialect
from quire.serving.named_events import named_event

TYPES: Final[dict[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's word for a status; any other from 500 is an `api_error`, and below an
`invalid_request_error`."""


def _envelope(error: QuireError, request_id: str) -> dict[str, Any]:
    """What follows `"type": "error"`. The field and the code are ours; clients ignore them."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    told: dict[str, Any] = {
        "type": TYPES.get(error.status, default),
        "message": error.message,
        **({"param": error.param} if error.param is not None else {}),
        **({"code": error.code} if error.code is not None else {}),
        **getattr(error, "extra", {}),
    }
    return {"error": told, "request_id": request_id}


def _body(error: QuireError, request_id: str) -> bytes:
    return msgspec.json.encode({"type": "error", **_envelope(error, request_id)})


def _event(error: QuireError, request_id: str) -> bytes:
    return named_event("error", _envelope(error, request_id))


ANTHROPIC: Final = Dialect(_body, _event, id_headers=(b"request-id", b"x-request-id"))
"""Streams end with `message_stop`, or with an `error` event."""
