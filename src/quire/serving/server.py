"""The server process: bind, serve while the engine loads, drain, shut down in order.

The socket is bound first, so that a port in use is reported at once and not after a model was
loaded. HTTP answers from then on; probes report the progress of loading.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from quire.config import EngineConfig, ServerConfig
from quire.config.server import LOG_LEVELS
from quire.errors import EngineDead, QuireError, StartupError, told
from quire.logger import get_logger
from quire.serving.app import build_app
from quire.serving.drain import FLUSH_SECONDS, drain
from quire.serving.engine_protocol import EngineClient
from quire.serving.greeting import announce, greeting
from quire.serving.http_server import adopt_uvicorn_logs, http_server
from quire.serving.listener import bind, release
from quire.serving.server_state import ServerState
from quire.serving.service_report import ServiceReport
from quire.utils.process import GROUP_SIGNALS, leave_within
from quire.utils.service import ServiceManager

logger = get_logger(__name__)

EngineFactory = Callable[[EngineConfig], Awaitable[EngineClient]]

WATCH_SECONDS: Final = 0.1
"""Seconds between two checks whether the engine is alive."""
STOP_SECONDS: Final = 2.0
"""Seconds that the engine has to stop its core."""
HURRY_SECONDS: Final = 0.5
"""The same after a second signal."""
LEAVE_SECONDS: Final = 1.0
"""Seconds that threads which still work, such as on a long text, can delay the exit."""


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    engine_factory: EngineFactory | None = None,
) -> int:
    """Serve until a signal or the engine's end; returns the exit code of the process.

    0 after SIGTERM, SIGHUP or SIGINT, but 130 after a SIGINT while it was starting; otherwise the
    code of the error, which has been printed in one line (a taken port, a model that cannot be
    loaded, an engine that died, be it during the drain).

    Args:
        engine_config: What the engine runs.
        server_config: Where to listen and who may call.
        engine_factory: Starts an engine and returns it at once; `AsyncLLM.start` if left out.
    """
    try:
        listener = bind(server_config)
    except StartupError as error:
        return _give_up(error)
    adopt_uvicorn_logs(LOG_LEVELS[server_config.uvicorn_log_level])
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            server = _Server(listener, server_config)
            code = runner.run(server.run(engine_config, engine_factory or _start_engine))
        finally:
            release(listener, server_config)
        # The runner waits for threads when it closes, whatever they do.
        leaving = leave_within(LEAVE_SECONDS, code)
    leaving.cancel()
    return code


async def _start_engine(config: EngineConfig) -> EngineClient:
    from quire.engine.async_llm import AsyncLLM

    return await AsyncLLM.start(config)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every platform; asyncio's own loop does the same, slower
        return None
    return uvloop.new_event_loop


def _give_up(error: QuireError) -> int:
    print(f"quire serve: {told(error)}", file=sys.stderr, flush=True)
    return getattr(error, "exit_code", 1)


class _Server:
    """Runs HTTP and engine side by side, and ends both."""

    def __init__(self, listener: socket.socket, config: ServerConfig) -> None:
        self._listener = listener
        self._config = config
        self._state = ServerState(config)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._signal = 0
        self._http = http_server(build_app(self._state))
        self._report = ServiceReport(self._state, ServiceManager())

    async def run(self, config: EngineConfig, start: EngineFactory) -> int:
        """Serve; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in GROUP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.ensure_future(self._http.serve([self._listener]))
        reporting = asyncio.ensure_future(self._report.run())
        try:
            code = await self._supervise(config, start)
        except QuireError as error:
            code = _give_up(error)
        except Exception:
            logger.exception("the server stops because of an unexpected error")
            code = 1
        # Without a signal, the engine is dead: replies have only to be flushed.
        seconds = self._config.shutdown_timeout if self._signal else FLUSH_SECONDS
        await drain(self._state, self._http.unsent, seconds, self._hurry)
        if code == 0 and (death := self._engine_error()):
            code = _give_up(death)  # what it was to finish is lost
        await self._shut_down(serving)
        reporting.cancel()
        return code

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._hurry.set()
        else:
            self._signal = number
            self._begin_drain()
        self._stop.set()

    def _begin_drain(self) -> None:
        """At once, in the signal handler: probes that are asked next say unready."""
        seconds = self._config.shutdown_timeout
        self._state.begin_drain(seconds)
        self._report.look()
        if answering := self._state.answering:
            logger.info(
                "draining: %d request(s) have %g s to finish; a second signal ends them now",
                answering,
                seconds,
            )

    def _interrupted(self) -> int:
        """The exit code if a signal ended the start. SIGTERM and SIGHUP are no failure: a
        supervisor wanted it."""
        print("quire serve: stopped while starting", file=sys.stderr, flush=True)
        return 130 if self._signal == signal.SIGINT else 0

    async def _supervise(self, config: EngineConfig, start: EngineFactory) -> int:
        """Load, announce, and wait for a reason to end.

        Raises:
            StartupError: the engine cannot start.
            EngineDead: it died.
        """
        engine = await start(config)  # it loads on afterwards
        self._state.serve(engine)
        await self._unless_stopped(engine.wait_ready())
        if self._stop.is_set():
            return self._interrupted()
        self._state.mark_started()
        self._report.look()
        announce(greeting(self._config, self._listener, engine))
        while not self._stop.is_set():
            if error := self._engine_error():
                raise error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), WATCH_SECONDS)
        return 0

    async def _unless_stopped(self, work: Awaitable[None]) -> None:
        """Wait for `work`, or for a signal if that comes first."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _engine_error(self) -> QuireError | None:
        """Why an engine is dead, if one is."""
        dead = next((e for e in self._state.engines if e.state == "dead"), None)
        return None if dead is None else dead.error or EngineDead("the engine died")

    async def _shut_down(self, serving: asyncio.Future[None]) -> None:
        """Stop HTTP and the core."""
        hurry = self._hurry.is_set()
        self._http.should_exit = True
        self._http.force_exit = hurry or not self._state.answering
        seconds = HURRY_SECONDS if hurry else STOP_SECONDS
        stopping = [asyncio.ensure_future(_bounded(serving, seconds))]
        for engine in self._state.engines:
            stopping.append(asyncio.ensure_future(_bounded(engine.shutdown(), seconds)))
        await asyncio.gather(*stopping)


async def _bounded(work: Awaitable[None], seconds: float) -> None:
    """Let a part stop, but not forever; its failure must not keep the others from stopping."""
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        logger.warning("a part of the server did not stop within %.1f s", seconds)
    except Exception:
        logger.exception("a part of the server failed while stopping")
