"""The server process: bind, serve while the engine loads, shut down in order.

The socket is bound first, so that a port in use is reported at once and not after a model was
loaded. HTTP answers from then on; probes report the progress of loading. The only module that
imports uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.config import EngineConfig, ServerConfig
from quire.config.server import LOG_LEVELS
from quire.errors import EngineDead, QuireError, StartupError, told
from quire.logger import get_logger
from quire.serving.app import build_app
from quire.serving.engine_protocol import EngineClient
from quire.serving.server_state import ServerState
from quire.utils.process import GROUP_SIGNALS

logger = get_logger(__name__)

EngineFactory = Callable[[EngineConfig], Awaitable[EngineClient]]

MAX_HEADER_BYTES: Final = 32 * 1024
HEADER_SECONDS: Final = 30.0
"""How long a request line with its headers may take, and a new connection until its first."""
KEEP_ALIVE_SECONDS: Final = 65
WATCH_SECONDS: Final = 0.1
"""Seconds between two checks whether the engine is alive, and whether draining is done."""
FLUSH_SECONDS: Final = 0.5
"""Seconds that aborted requests have to write their last output."""
STOP_SECONDS: Final = 2.0
"""Seconds that the engine has to stop its core."""
HURRY_SECONDS: Final = 0.5
"""The same after a second signal."""


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    engine_factory: EngineFactory | None = None,
) -> int:
    """Serve until a signal or the engine's end; returns the exit code of the process.

    0 after SIGTERM, SIGHUP or SIGINT, but 130 after a SIGINT while it was starting; otherwise the
    code of the error, which has been printed in one line (a taken port, a model that cannot be
    loaded, an engine that died).

    Args:
        engine_config: What the engine runs.
        server_config: Where to listen and who may call.
        engine_factory: Starts an engine and returns it at once; `AsyncLLM.start` if left out.
    """
    try:
        listener = bind(server_config)
    except StartupError as error:
        return _give_up(error)
    _adopt_uvicorn_logs(LOG_LEVELS[server_config.uvicorn_log_level])
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            supervisor = _Supervisor(listener, server_config)
            return runner.run(supervisor.run(engine_config, engine_factory or _start_engine))
    finally:
        listener.close()
        if server_config.uds:
            with contextlib.suppress(OSError):
                os.unlink(server_config.uds)


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


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket.

    Raises:
        StartupError: the address is taken, not ours, or not allowed.
    """
    if config.uds:
        return _bind_unix(config.uds)
    where = f"port {config.port} on {config.host}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"--host {config.host} is not an address: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {where}: {_remedy(error)}") from None
    return listener


def _remedy(error: OSError) -> str:
    return {
        errno.EADDRINUSE: "it is in use; stop what listens there, or choose another with --port "
        "(0 picks a free one)",
        errno.EACCES: "that needs privileges; choose a --port of at least 1024",
        errno.EADDRNOTAVAIL: "this machine does not have that address; choose another --host",
    }.get(error.errno or 0, error.strerror or "unknown reason")


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that no longer runs; leave everything else alone."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.EEXIST, "the file exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, "another server listens there; choose another path")
    os.unlink(path)


def _adopt_uvicorn_logs(level: int = logging.INFO) -> None:
    """Send uvicorn's warnings where ours go. Its greetings, which are all it logs at INFO, are
    dropped unless a lower level is set."""
    logs = logging.getLogger("uvicorn")
    logs.handlers = list(logging.getLogger("quire").handlers)
    logs.propagate = not logs.handlers
    logs.setLevel(logging.WARNING if level == logging.INFO else level)


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on the size of headers and the time they may take."""

    _header_bytes = 0
    _in_headers = True
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        self._start_clock()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_clock()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.send_400_response("The request's headers are too large.")

    def _start_clock(self) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which the supervisor has."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Supervisor:
    """Runs HTTP and engine side by side, and ends both."""

    def __init__(self, listener: socket.socket, config: ServerConfig) -> None:
        self._listener = listener
        self._config = config
        self._state = ServerState(config)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._signal = 0
        self._http = _HttpServer(
            uvicorn.Config(
                build_app(self._state),
                http=_Protocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )

    async def run(self, config: EngineConfig, start: EngineFactory) -> int:
        """Serve; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in GROUP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.ensure_future(self._http.serve([self._listener]))
        try:
            code = await self._supervise(config, start)
        except QuireError as error:
            code = _give_up(error)
        except Exception:
            logger.exception("the server stops because of an unexpected error")
            code = 1
        await self._shut_down(serving)
        return code

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._hurry.set()
        else:
            self._signal = number
        self._stop.set()

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
        _announce(greeting(self._config, self._listener, engine))
        while not self._stop.is_set():
            if engine.state == "dead":
                raise engine.error or EngineDead("the engine died")
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

    async def _shut_down(self, serving: asyncio.Future[None]) -> None:
        """Unready, drain, abort the rest, then HTTP and the core."""
        state = self._state
        state.draining = True
        await self._drained(self._config.shutdown_timeout)
        for engine in state.engines:
            for request_id in tuple(state.active_ids):
                with contextlib.suppress(QuireError):
                    await engine.abort(request_id)
        await self._drained(FLUSH_SECONDS, hurry=False)
        self._http.should_exit = True
        self._http.force_exit = not state.in_flight or self._hurry.is_set()
        seconds = HURRY_SECONDS if self._hurry.is_set() else STOP_SECONDS
        stopping = [asyncio.ensure_future(_bounded(serving, seconds))]
        for engine in state.engines:
            stopping.append(asyncio.ensure_future(_bounded(engine.shutdown(), seconds)))
        await asyncio.gather(*stopping)

    async def _drained(self, seconds: float, hurry: bool = True) -> None:
        """Wait until nothing is in flight, but not longer than the timeout or a second signal."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._state.in_flight and loop.time() < end:
            if hurry and self._hurry.is_set():
                return
            await asyncio.sleep(0.02)


async def _bounded(work: Awaitable[None], seconds: float) -> None:
    """Let a part stop, but not forever; its failure must not keep the others from stopping."""
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        logger.warning("a part of the server did not stop within %.1f s", seconds)
    except Exception:
        logger.exception("a part of the server failed while stopping")


def _announce(text: str) -> None:
    """Print, ignoring errors: a full disk behind stdout is no reason not to serve."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("stdout cannot be written: %s", error.strerror)
        # What stands in its buffer would fail again at exit, and change the exit code.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def greeting(config: ServerConfig, listener: socket.socket, engine: EngineClient) -> str:
    """The text printed when the server is ready: its address, and a request to paste."""
    if config.uds:
        place, options = "http://localhost", f" --unix-socket {config.uds}"
        shown = config.uds
    else:
        host, port = listener.getsockname()[:2]
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        name = f"[{name}]" if ":" in name and not name.startswith("[") else name
        shown = place = f"http://{name}:{port}"
        options = ""
    key = ' \\\n    -H "Authorization: Bearer $QUIRE_API_KEY"' if config.api_key else ""
    path, body = _example(engine)
    return (
        f"quire is ready at {shown}\n\n"
        f"  curl{options} {place}{path} \\\n"
        f"    -H 'Content-Type: application/json'{key} \\\n    -d '{body}'\n"
    )


def _example(engine: EngineClient) -> tuple[str, str]:
    """Path and body of a request that the model can answer."""
    name, text = engine.config.model.names[0], "What is the capital of France?"
    if engine.pooler is None:
        messages = f'[{{"role": "user", "content": "{text}"}}]'
        return "/v1/chat/completions", f'{{"model": "{name}", "messages": {messages}}}'
    path = "/v1/embeddings" if engine.pooler.task == "embed" else "/classify"
    return path, f'{{"model": "{name}", "input": "{text}"}}'
