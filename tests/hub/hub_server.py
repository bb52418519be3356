"""A small Hugging Face hub on loopback: model info, file metadata, downloads with ranges.

It can misbehave on request: break a connection half-way, demand a token, lose a file.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has and what it did."""

    files: dict[str, bytes]
    repo: str = "org/tiny"
    token: str | None = None
    """If set, what clients must send."""
    gated: bool = False
    lost: set[str] = field(default_factory=set)
    """Listed files whose download fails with 404."""
    break_after: dict[str, list[int]] = field(default_factory=dict)
    """For a file: after how many bytes each attempt breaks; attempts beyond the list succeed."""
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    log: list[str] = field(default_factory=list)
    """`METHOD path range` of every request."""
    url: str = ""

    def downloads(self) -> list[str]:
        return [line.split()[1].rpartition("/")[2] for line in self.log
                if line.startswith("GET") and "/resolve/" in line]  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        hub = self.hub
        hub.log.append(f"{self.command} {self.path} {self.headers.get('Range', '-')}")
        path = self.path.partition("?")[0]
        auth = self.headers.get("Authorization")
        if hub.gated:
            return self.refuse(403, "GatedRepo", "Access to this model is restricted.")
        if hub.token is not None and auth != f"Bearer {hub.token}":
            text = "Invalid credentials in Authorization header" if auth else "Invalid username"
            return self.refuse(401, None if auth else "RepoNotFound", text)
        if path.startswith(f"/api/models/{hub.repo}"):
            revision = path.partition("/revision/")[2] or "main"
            return self.info(revision)
        if path.startswith(f"/{hub.repo}/resolve/"):
            rest = path.removeprefix(f"/{hub.repo}/resolve/")
            revision, _, name = rest.partition("/")
            return self.file(name, body=body)
        self.refuse(404, "RepoNotFound", "Repository not found")

    def info(self, revision: str) -> None:
        hub = self.hub
        commit = hub.branches.get(revision, revision if revision == COMMIT else None)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        siblings = [{"rfilename": n, "size": len(d)} for n, d in sorted(hub.files.items())]
        data = json.dumps({"id": hub.repo, "modelId": hub.repo, "sha": commit,
                           "siblings": siblings, "private": False}).encode()  # fmt: skip
        self.reply(200, data, {"Content-Type": "application/json"}, body=True)

    def file(self, name: str, *, body: bool) -> None:
        hub = self.hub
        data = hub.files.get(name)
        if data is None or (name in hub.lost):
            return self.refuse(404, "EntryNotFound", "Entry not found")
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "X-Linked-Size": str(len(data)),
        }
        start = self.headers.get("Range", "")
        first = int(start.removeprefix("bytes=").partition("-")[0]) if start else 0
        status = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        breaks = hub.break_after.get(name) if body else None
        self.reply(status, data[first:], headers, body=body, stop=breaks.pop(0) if breaks else None)

    def refuse(self, status: int, code: str | None, text: str) -> None:
        headers = {"X-Error-Message": text} | ({"X-Error-Code": code} if code else {})
        self.reply(status, json.dumps({"error": text}).encode(), headers, body=True)

    def reply(
        self, status: int, data: bytes, headers: dict[str, str], *, body: bool,
        stop: int | None = None,
    ) -> None:  # fmt: skip
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data if stop is None else data[:stop])
            if stop is not None:
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Run the server; `hub.url` is its address."""
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
