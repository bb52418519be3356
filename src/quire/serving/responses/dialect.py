"""Errors of the Responses API: OpenAI's, and in streams an event of their own."""

from __future__ import annotations

import dataclasses
from typing import Final

from quire.errors import QuireError
from quire.serving.dialect import OPENAI
from quire.serving.named_events import named_event


def _event(error: QuireError, request_id: str) -> bytes:
    code = error.code or str(error.status)
    return named_event("error", {"code": code, "message": error.message, "param": error.param})


RESPONSES: Final = dataclasses.replace(OPENAI, stream_error=_event, stream_end=b"")
"""Streams end with the event that says how the response ended."""
