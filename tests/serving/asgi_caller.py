"""Clients on bare ASGI that read as many bytes as they like, and then hang up."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

_EVENT_ID = re.compile(rb"\nid: (.*)$")


class Caller:
    """One request, in a task of its own.

    Args:
        app: The application.
        method, path: Of the request.
        body: As JSON; none if `None`.
        headers: Besides the content type.
        cut: Bytes of the reply's body after which the connection breaks.
    """

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data = b""
        self.is_complete = False
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.begun = asyncio.Event()
        self._cut = cut
        self._body: bytes | None = b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        given = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "root_path": "", "query_string": query.encode(), "http_version": "1.1",
            "scheme": "http", "headers": [(k.encode(), v.encode()) for k, v in given.items()],
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if self.gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            self.begun.set()
            return
        self.data += message.get("body", b"")
        if self._cut is not None and len(self.data) >= self._cut:
            self.data = self.data[: self._cut]
            self.gone.set()
        elif not message.get("more_body", False):
            self.is_complete = True
            self.gone.set()

    @property
    def json(self) -> Any:
        """The body, if it is JSON."""
        return json.loads(self.data)

    @property
    def stream_id(self) -> str:
        """Of the reply."""
        return self.headers["x-stream-id"]

    def whole_events(self) -> tuple[bytes, str]:
        """What was received up to the last complete event, and its id; empty if there is none."""
        whole = self.data[: self.data.rfind(b"\n\n") + 2] if b"\n\n" in self.data else b""
        return whole, last_id(whole)


def last_id(events: bytes) -> str:
    """Id of the last of some events."""
    found = _EVENT_ID.search(events.rstrip(b"\n").rpartition(b"\n\n")[2])
    return found.group(1).decode() if found else ""


def event_ids(events: bytes) -> list[str]:
    """Ids of all events, in order."""
    return [last_id(event) for event in events.split(b"\n\n") if event]


def without_ids(events: bytes) -> bytes:
    """The events as they are of a stream that is not kept."""
    return re.sub(rb"\nid: [^\n]*\n", b"\n", events)
