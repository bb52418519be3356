"""The server process: bind, serve while the engine loads, drain, shut down in order.

The socket is bound first, so that a port in use is reported at once and not after a model was
loaded. HTTP answers from then on; probes report the progress of loading. Where a server answers at
`--handover-socket`, its listening socket is taken over instead, once the model is loaded.
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
from quire.engine.frontend.disk.disk_journal import DiskJournal, JournalOptions
from quire.errors import ConfigError, EngineDead, QuireError, StartupError, told
from quire.logger import get_logger
from quire.serving.app import build_app
from quire.serving.auth import KeyRing
from quire.serving.drain import FLUSH_SECONDS, drain
from quire.serving.engine_protocol import EngineClient
from quire.serving.greeting import announce, greeting
from quire.serving.handover import HandoverPoint, has_predecessor, take_listener
from quire.serving.http_server import adopt_uvicorn_logs, http_server
from quire.serving.journal_replay import JournalReplay
from quire.serving.listener import bind, release
from quire.serving.server_state import ServerState
from quire.serving.service_report import ServiceReport
from quire.serving.tls import Tls
from quire.utils.collector import PacedCollection, keep_present
from quire.utils.process import GROUP_SIGNALS, leave_within, raise_descriptor_limit
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
        keys = KeyRing(server_config)
        has_one = has_predecessor(server_config)
        tls = None if server_config.ssl_certfile is None else Tls(server_config)
        journal = _open_journal(server_config, waits=has_one)
        listener = None if has_one else bind(server_config)
    except (StartupError, ConfigError) as error:
        return _give_up(error)
    raise_descriptor_limit()
    adopt_uvicorn_logs(LOG_LEVELS[server_config.uvicorn_log_level])
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        server = _Server(listener, server_config, journal, keys, tls)
        try:
            code = runner.run(server.run(engine_config, engine_factory or _start_engine))
        finally:
            server.release()
        # The runner waits for threads when it closes, whatever they do.
        leaving = leave_within(LEAVE_SECONDS, code)
    leaving.cancel()
    return code


def _open_journal(config: ServerConfig, waits: bool) -> DiskJournal | None:
    if config.journal_dir is None:
        return None
    options = JournalOptions(
        config.journal_dir, config.journal_fsync, config.journal_max_bytes, config.journal_key_file
    )
    return DiskJournal(options, waits)


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

    def __init__(
        self,
        listener: socket.socket | None,
        config: ServerConfig,
        journal: DiskJournal | None,
        keys: KeyRing,
        tls: Tls | None,
    ) -> None:
        self._listener = listener
        # `None` until it is taken over from another server
        self._config = config
        self._state = ServerState(config, keys=keys)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._left_at = 0.0
        # when the listening socket was handed over, on the event loop's clock
        self._signal = 0
        app = build_app(self._state)
        self._tls = tls
        self._http = http_server(app, self._state.unread, None if tls is None else tls.context)
        self._journal = journal
        self._replay: JournalReplay | None = None
        if journal is not None:
            self._replay = JournalReplay(self._state, journal, app.router)
            self._state.kept.pending = self._replay
        self._report = ServiceReport(self._state, ServiceManager())
        self._handover: HandoverPoint | None = None
        self._serving: asyncio.Future[None] | None = None
        self._beside: list[asyncio.Future[None]] = []
        # what runs until the end

    def release(self) -> None:
        """Close the listening socket and remove its name, unless another process has it now."""
        if self._listener is not None:
            release(self._listener, self._config, keep_name=self._state.handed_over)

    async def run(self, config: EngineConfig, start: EngineFactory) -> int:
        """Serve; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in GROUP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal, number)
        try:
            if self._listener is not None:
                self._accept(self._listener)
            code = await self._supervise(config, start)
        except QuireError as error:
            code = _give_up(error)
        except Exception:
            logger.exception("the server stops because of an unexpected error")
            code = 1
        await drain(self._state, self._http.unsent, self._drain_seconds(), self._hurry)
        if code == 0 and (death := self._engine_error()):
            code = _give_up(death)  # what it was to finish is lost
        await self._shut_down()
        return code

    def _drain_seconds(self) -> float:
        """How long running requests may still take."""
        if self._signal:
            return self._config.shutdown_timeout
        # Either they had `--handover-timeout`, or the engine is dead and replies are only flushed.
        return 0.0 if self._state.handed_over else FLUSH_SECONDS

    def _accept(self, listener: socket.socket) -> None:
        """Serve HTTP on a socket, and offer it to the next server.

        Raises:
            StartupError: `--handover-socket` cannot be used.
        """
        self._listener = listener
        self._serving = asyncio.ensure_future(self._http.serve([listener]))
        self._beside += (
            asyncio.ensure_future(self._report.run()),
            asyncio.ensure_future(self._state.keys.watch()),
        )
        if self._tls is not None and self._config.enable_ssl_refresh:
            self._beside.append(asyncio.ensure_future(self._tls.watch()))
        if self._config.handover_socket is not None:
            path = self._config.handover_socket
            self._handover = HandoverPoint(path, listener, self._why_kept, self._hand_over)

    async def _take_over(self) -> None:
        """Accept connections on another server's socket; on one of our own if it has ended.

        Raises:
            StartupError: it refuses, or there is no socket.
        """
        taken = await asyncio.to_thread(take_listener, self._config)
        self._accept(bind(self._config) if taken is None else taken.listener)
        if taken is None:
            return
        await self._http.accepting()
        self._report.become_main()
        taken.confirm()
        logger.info("took the listening socket over from process %d", taken.predecessor)

    def _why_kept(self) -> str | None:
        """Why the listening socket cannot be handed over now."""
        if self._state.start_seconds is None:
            return "it is still loading its model"
        return "it is ending" if self._stop.is_set() else None

    def _hand_over(self, successor: int) -> None:
        """Another process accepts connections now."""
        logger.info(
            "process %d has taken the listening socket over; %d connection(s) and %d request(s) "
            "have %g s to finish",
            successor,
            self._http.num_connections,
            self._state.answering,
            self._config.handover_timeout,
        )
        self._state.handed_over = True
        self._state.kept.give_away()
        self._report.leave()
        self._http.stop_accepting()
        self._left_at = asyncio.get_running_loop().time()

    def _has_left(self) -> bool:
        """Whether nothing is left to do after a hand-over, or no time for it. A connection on which
        nothing happens is closed by its client, or after `KEEP_ALIVE_SECONDS` by uvicorn: to close
        it here could cross with a request."""
        if not self._state.handed_over:
            return False
        passed = asyncio.get_running_loop().time() - self._left_at
        busy = self._http.num_connections or self._state.answering or self._state.in_flight
        return not busy or passed >= self._config.handover_timeout

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
        logger.info(
            "%s: ending; %d request(s) have %g s to finish, a second signal ends them at once",
            signal.Signals(self._signal).name,
            self._state.answering,
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
        if self._journal is not None and not self._stop.is_set():
            engine.keep_journal(self._journal)
            self._state.journal = self._state.kept.journal = journal = self._journal
            self._state.http.journal_now = lambda: journal.state
        if self._listener is None and not self._stop.is_set():
            await self._take_over()
        if self._replay is not None and not self._stop.is_set():
            await self._replay.begin()
        if self._stop.is_set() or self._listener is None:
            return self._interrupted()
        keep_present()
        collection = PacedCollection(lambda: self._state.answering > 0)
        self._beside.append(asyncio.ensure_future(collection.run()))
        self._state.mark_started()
        self._report.look()
        names = next(iter(self._state.models.values())).parsers.names
        announce(greeting(self._config, self._listener, engine, names))
        while not (self._stop.is_set() or self._has_left()):
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

    async def _shut_down(self) -> None:
        """Stop HTTP and the core."""
        hurry = self._hurry.is_set()
        if self._replay is not None:
            self._replay.close()
        if self._handover is not None:
            self._handover.close()
        self._http.should_exit = True
        self._http.force_exit = hurry or not self._state.answering
        seconds = HURRY_SECONDS if hurry else STOP_SECONDS
        stopping = []
        if self._serving is not None:
            stopping.append(asyncio.ensure_future(_bounded(self._serving, seconds)))
        for engine in self._state.engines:
            stopping.append(asyncio.ensure_future(_bounded(engine.shutdown(), seconds)))
        await asyncio.gather(*stopping)
        for task in self._beside:
            task.cancel()


async def _bounded(work: Awaitable[None], seconds: float) -> None:
    """Let a part stop, but not forever; its failure must not keep the others from stopping."""
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        logger.warning("a part of the server did not stop within %.1f s", seconds)
    except Exception:
        logger.exception("a part of the server failed while stopping")
