"""Starts an engine for a batch, runs it, and brings the output where it belongs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import EngineConfig, ServerConfig
from quire.config.server import PROBES
from quire.engine.async_llm import AsyncLLM
from quire.logger import get_logger
from quire.serving.app import build_app
from quire.serving.batch.files import is_url, open_input, read_lines, upload
from quire.serving.batch.run import BatchRun
from quire.serving.batch.unfinished import Unfinished
from quire.serving.http_server import http_server
from quire.serving.listener import bind
from quire.serving.server_state import ServerState

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be done."""

    source: str
    """Path or URL of the requests."""
    target: str
    """Path or URL of the results."""
    output: Path
    """Where the results are made: the target, or a file that is uploaded from there."""
    engine: EngineConfig
    server: ServerConfig
    concurrency: int | None
    """Lines in work at once; `None`: twice `max_num_seqs`, so that the engine never waits."""
    metrics: bool
    """Whether probes and metrics are served meanwhile."""

    @property
    def unfinished(self) -> Path:
        """What is kept of a run that was interrupted."""
        return self.output.with_name(self.output.name + ".partial")


async def run_batch(batch: Batch, seen: Callable[[bool], None]) -> None:
    """Run a batch to its end, or until a signal cancels it; then what is done is kept.

    Args:
        batch: The batch.
        seen: Called for each line that is done, with whether it failed.

    Raises:
        QuireError: the engine cannot start or died, or a file is not what it should be.
        asyncio.CancelledError: a signal came.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with Unfinished(batch.unfinished, ", ".join(batch.engine.model.names)) as unfinished:
        if kept := len(unfinished):
            logger.info("%d line(s) are done already, in %s", kept, batch.unfinished)
        with open_input(batch.source) as file:
            state = ServerState(batch.server)
            app = build_app(state)
            async with _metrics(batch, app, state), await AsyncLLM.start(batch.engine) as engine:
                state.serve(engine)
                await engine.wait_ready()
                state.mark_started()
                concurrency = batch.concurrency or 2 * engine.config.scheduler.max_num_seqs
                lines = read_lines(file, batch.source, batch.server.max_body_bytes)
                run = BatchRun(app, state, unfinished, concurrency, seen)
                last = await run.run(lines)
        unfinished.finish(batch.output, last)
        if is_url(batch.target):
            await asyncio.to_thread(upload, batch.output, batch.target)
            batch.output.unlink()
        unfinished.delete()


@contextlib.asynccontextmanager
async def _metrics(batch: Batch, app: Any, state: ServerState) -> AsyncIterator[None]:
    """Serve probes and metrics, and nothing else, if that was asked for."""
    if not batch.metrics:
        yield
        return

    async def only_probes(scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["path"] in PROBES else "/not-served"
        await app({**scope, "path": path}, receive, send)

    server = http_server(only_probes, state.unread)
    listener = bind(batch.server)
    serving = asyncio.ensure_future(server.serve([listener]))
    host, port = listener.getsockname()[:2]
    logger.info("metrics: http://%s:%d/metrics", host, port)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
