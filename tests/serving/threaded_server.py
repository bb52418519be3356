"""The HTTP server with a fake engine, on a real socket, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading

from fake_engine import FakeEngine
from patience import PATIENCE, wait_for
from quire.config import ServerConfig
from quire.serving.app import build_app
from quire.serving.http_server import adopt_uvicorn_logs, http_server
from quire.serving.listener import bind
from quire.serving.server_state import ServerState


class Running:
    """A server in a thread."""

    def __init__(self, config: ServerConfig) -> None:
        self.engine = FakeEngine()
        self.state = ServerState(config, self.engine)
        self.listener = bind(config)
        self.port = self.listener.getsockname()[1]
        self.server = http_server(build_app(self.state), self.state.unread)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)

    def _run(self) -> None:
        adopt_uvicorn_logs()
        asyncio.run(self.server.serve([self.listener]))

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(PATIENCE)
        self.listener.close()
