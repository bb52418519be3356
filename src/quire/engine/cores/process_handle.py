"""The frontend's side of an engine-core process: start it, talk to it, notice its end.

Knows processes and frames; knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from quire.config import EngineConfig
from quire.engine.cores import wire
from quire.engine.cores.death import Death, MemoryWatch, describe
from quire.engine.messages import FromCore, Start
from quire.logger import get_logger
from quire.utils.process import group_signals_held, terminate

logger = get_logger(__name__)

WATCH_SECONDS: Final = 0.5
"""How often the memory of a core is read: a few microseconds each time."""
REAP_SECONDS: Final = 1.0
"""What a core that has closed its socket gets to end, before it counts as running."""


class CoreProcess:
    """One engine-core process of one epoch.

    The two ends of a socket pair have no name in the file system: nobody else can connect, and
    nothing is left behind however either side ends.

    Args:
        on_message: Called in the event loop with every message of this process.
        on_exit: Called once, when the process has closed its end, with how it died.
    """

    def __init__(
        self,
        epoch: int,
        on_message: Callable[[FromCore], None],
        on_exit: Callable[[CoreProcess, Death], None],
    ) -> None:
        self.epoch = epoch
        self._on_message = on_message
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, config: EngineConfig) -> None:
        """Spawn the process and send it its configuration."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "quire.engine.cores.core_process",
                str(theirs.fileno()),
            ]
            # Blocking for a few milliseconds, once; asyncio's own spawning needs a child watcher.
            with group_signals_held():
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self.send(Start(self.epoch, config.to_dict()))
        memory = MemoryWatch(self._process.pid)
        self._receiver = asyncio.create_task(self._receive(reader, memory))
        self._watcher = asyncio.create_task(_watch(memory))

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs. Negative: ended by that signal."""
        return self._process.poll() if self._process else None

    def send(self, message: Any) -> None:
        """Send a message. A core that is gone is noticed by the receiver, not here."""
        assert self._writer is not None, "not started"
        if not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    async def stop(self, grace: float = 1.0) -> None:
        """End the process and reap it.

        Closing the socket is enough for a healthy one; `grace` seconds later it is killed.
        """
        for task in (self._receiver, self._watcher):
            if task is not None:
                task.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(terminate, self._process, grace)

    async def _receive(self, reader: asyncio.StreamReader, memory: MemoryWatch) -> None:
        decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        while (frame := await wire.receive_async(reader)) is not None:
            try:
                self._on_message(decoder.decode(frame))
            except Exception:
                # One bad message or one bad consumer must not stop all the others.
                logger.exception("a message of the engine core could not be handled")
        if self._watcher is not None:
            self._watcher.cancel()
        self._on_exit(self, describe(await self._ended(), memory))

    async def _ended(self) -> int | None:
        """The exit code: a process that dies closes its socket a moment before it can be reaped."""
        loop = asyncio.get_running_loop()
        end = loop.time() + REAP_SECONDS
        while (code := self.exit_code) is None and loop.time() < end:
            await asyncio.sleep(0.005)
        return code


async def _watch(memory: MemoryWatch) -> None:
    while True:
        memory.look()
        await asyncio.sleep(WATCH_SECONDS)
