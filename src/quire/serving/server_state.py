"""What every handler may reach, and whether the server takes requests now.

Knows nothing of routes or wire formats.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Final

from quire.config import PoolerSpec, ServerConfig
from quire.errors import EngineDead, NotFound, UnsupportedTask
from quire.observability.metrics.http_metrics import HttpMetrics
from quire.observability.metrics.prometheus import HttpText
from quire.serving.auth import KeyRing
from quire.serving.engine_protocol import EngineClient
from quire.serving.errors import EngineLoading, ShuttingDown
from quire.version import __version__

STALLED_AFTER: Final = 60.0
"""Seconds without a sign of progress after which a busy core counts as wedged: it speaks once per
step, and a step full of long prompts takes its time."""


class ServerState:
    """The server's one shared object.

    Args:
        config: Where the server listens and who may call.
        engine: The engine, or `None` until it has been started.
    """

    def __init__(self, config: ServerConfig, engine: EngineClient | None = None) -> None:
        self.config = config
        self.engine = engine
        self.keys = KeyRing(config.api_key)
        self.draining = False
        """Set on shutdown: readiness goes, and no new request is taken."""
        self.http = HttpMetrics()
        self.http_text = HttpText(self.http)
        self.in_flight = 0
        """Requests for generation that are being answered."""
        self.active_ids: set[str] = set()
        """Engine request ids of these, for the end of a drain."""
        self.created: Final = int(time.time())
        self._fingerprint: str | None = None

    def status(self) -> str:
        """`ready`, `loading`, `stalled`, `draining` or `dead`."""
        engine = self.engine
        if self.draining:
            return "draining"
        if engine is None or engine.state != "ready":
            return "loading" if engine is None else engine.state
        age = engine.last_step_age()
        return "stalled" if age is not None and age > STALLED_AFTER else "ready"

    def progress(self) -> tuple[str, int]:
        """While loading: phase, and how much of it is done in percent."""
        if self.engine is None:
            return "starting", 0
        phase, done, total = self.engine.progress
        return phase, min(100, 100 * done // total) if total > 0 else 0

    def unused_id(self, request_id: str) -> str:
        """The id, made unique if a request of that id is active: callers may repeat theirs."""
        if request_id not in self.active_ids:
            return request_id
        return f"{request_id}-{uuid.uuid4().hex[:8]}"

    def ready_engine(self) -> EngineClient:
        """The engine, if it takes requests.

        A stalled engine does: what it accepts is not lost.

        Raises:
            ShuttingDown, EngineLoading, EngineDead: it does not; all are 503.
        """
        status, engine = self.status(), self.engine
        if status == "draining":
            raise ShuttingDown()
        if status == "dead":
            raise EngineDead("The engine has stopped; the server is about to exit.")
        if engine is None or status == "loading":
            raise EngineLoading(*self.progress())
        return engine

    def check_model(self, name: str | None, engine: EngineClient) -> str:
        """The name to put into the reply.

        Raises:
            NotFound: no served model has this name.
        """
        names = engine.config.model.names
        if name is None:
            return names[0]
        if name not in names:
            served = ", ".join(f"`{known}`" for known in names)
            shown = name[:200] if name.isprintable() else ascii(name[:200])
            error = NotFound(
                f"The model `{shown}` does not exist. Served here: {served}.", param="model"
            )
            error.code = "model_not_found"
            raise error
        return name

    def fingerprint(self, engine: EngineClient) -> str:
        """`system_fingerprint`: equal for equal software and model configuration."""
        if self._fingerprint is None:
            text = f"{__version__} {engine.config.model}"
            self._fingerprint = f"fp_{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        return self._fingerprint


def require_runner(engine: EngineClient, runner: str) -> PoolerSpec | None:
    """How the model pools, if it is run for what is asked: `generate` or `pooling`.

    Raises:
        UnsupportedTask: it is not; says what it is run for.
    """
    pooler = engine.pooler
    if (pooler is not None) == (runner == "pooling"):
        return pooler
    name = engine.config.model.names[0]
    if pooler is None:
        raise UnsupportedTask(
            f"`{name}` generates text; embeddings, classes and scores need a pooling model, or a "
            "server started with --runner pooling.",
            param="model",
        )
    does = "gives embeddings" if pooler.task == "embed" else "classifies"
    raise UnsupportedTask(f"`{name}` {does}; it generates no text.", param="model")
