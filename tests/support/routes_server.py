"""A model behind all routes, called without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from quire import AsyncLLM, EngineConfig
from quire.config import ServerConfig
from quire.serving.app import build_app
from quire.serving.server_state import ServerState


class RoutesServer:
    """A server that tests without an event loop of their own call.

    Args:
        runner: Its event loop; `close` comes before that ends.
        options: Of the engine.
        server: Of the server.
    """

    def __init__(self, runner: asyncio.Runner, options: dict[str, Any], **server: Any) -> None:
        self.run = runner.run
        config = EngineConfig.from_options(**{"generation_config": "vllm"} | options)
        self.engine = self.run(AsyncLLM.start(config))
        self.run(self.engine.wait_ready())
        app = build_app(ServerState(ServerConfig(**server), self.engine))
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=300
        )

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self.engine.shutdown())

    def get(self, path: str) -> str:
        return self.run(self.client.get(path)).text

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.run(self.client.post(path, json=body))

    def ask(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        """The reply, which must have this status."""
        reply = self.post(path, body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The data of the events, without `[DONE]`."""
        reply = self.post(path, body | {"stream": True})
        assert reply.status_code == 200, reply.text
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]
