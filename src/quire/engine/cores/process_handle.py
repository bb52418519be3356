"""A core in a process of its own: start it, talk to it, notice its end.

Knows processes and frames; knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from quire.config import EngineConfig
from quire.engine.cores import wire
from quire.engine.cores.death import MemoryWatch, describe
from quire.engine.cores.handle import OnExit, OnMessage
from quire.engine.cores.parts import encode_to_core
from quire.engine.cores.pulse import Pulse
from quire.engine.cores.signs import ProcessSigns
from quire.engine.cores.stacks import log_stacks
from quire.engine.cores.watchdog import Observation
from quire.engine.messages import FromCore, Start, ToCore
from quire.errors import InvalidRequest
from quire.logger import get_logger
from quire.utils.process import group_signals_held, terminate

logger = get_logger(__name__)

WATCH_SECONDS: Final = 0.5
"""How often the memory of a core is read: a few microseconds each time."""
REAP_SECONDS: Final = 1.0
"""What a core that has closed its socket gets to end, before it counts as running."""


class CoreProcess:
    """One engine-core process of one epoch, as `CoreHandle` says.

    The two ends of a socket pair have no name in the file system: nobody else can connect, and
    nothing is left behind however either side ends.

    Args:
        epoch: Counted from 1.
        on_message: Called in the event loop with every message of this process.
        on_exit: Called once, when the process has closed its end, with how it died.
    """

    def __init__(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> None:
        self.epoch = epoch
        self._on_message = on_message
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._ours: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._early: list[bytes] = []
        # frames from before the event loop had the socket
        self._tasks: list[asyncio.Task[None]] = []
        self._pulse: Pulse | None = None
        self._signs: ProcessSigns | None = None
        self._sent = 0
        # messages
        self._is_condemned = False

    def start(self, config: EngineConfig) -> None:
        """Spawn the process and send it its configuration.

        Raises:
            OSError: the system allows no more processes, files or memory.
        """
        begun = time.monotonic()
        self._pulse = Pulse()
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "quire.engine.cores.core_main",
                str(theirs.fileno()),
                str(self._pulse.descriptor),
            ]
            # Blocking for a few milliseconds, once; asyncio's own spawning needs a child watcher.
            with group_signals_held():
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno(), self._pulse.descriptor]
                )
        self.send(Start(self.epoch, config.to_dict(), begun))
        self._signs = ProcessSigns(self._process.pid)
        memory = MemoryWatch(self._process.pid)
        watcher = asyncio.create_task(_watch(memory))
        receiver = asyncio.create_task(self._receive(self._ours, memory, watcher))
        self._tasks = [watcher, receiver]

    def send(self, message: ToCore) -> None:
        """Send a message. A core that is gone is noticed by the receiver, not here."""
        self.prepare(message)()

    def prepare(self, message: ToCore) -> Callable[[], None]:
        """Encode a message, and return what sends it.

        Raises:
            InvalidRequest: it cannot be encoded, or is over the limit of a message.
        """
        try:
            frames = encode_to_core(message)
        except InvalidRequest:
            raise
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"the request cannot be sent to the engine core: {error}"
            ) from error
        return lambda: self._send(frames)

    def _send(self, frames: list[bytes]) -> None:
        self._sent += len(frames)
        if self._writer is None:
            self._early += frames
        elif not self._writer.is_closing():
            self._writer.writelines(frames)

    def observe(self, closely: bool) -> Observation | None:
        """What the core shows, and what the kernel says of its process."""
        if self._pulse is None or self._signs is None:
            return None
        beat = self._pulse.read()
        pending = self._sent - beat.taken if beat is not None else 0
        return Observation(beat, self._signs.look(closely), pending)

    def condemn(self) -> None:
        """Have `ended` log its stacks and kill it."""
        self._is_condemned = True

    def stop(self) -> None:
        """Hear nothing more, and close the socket, which is enough for a healthy core to end."""
        for task in self._tasks:
            task.cancel()
        if not self._is_condemned:  # it would end before it has written its stacks
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        elif self._ours is not None:
            self._ours.close()

    async def ended(self, grace: float = 1.0) -> None:
        """Reap the process; `grace` seconds from now it is killed."""
        if self._process is not None:
            if self._is_condemned and self._pulse is not None:
                await asyncio.to_thread(log_stacks, self._process.pid, self._pulse)
                self._process.kill()
            await asyncio.to_thread(terminate, self._process, grace)
        self._close()
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    async def _receive(
        self, ours: socket.socket, memory: MemoryWatch, watcher: asyncio.Task[None]
    ) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writer.writelines(self._early)
        self._early.clear()
        decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        while (frame := await wire.receive_async(reader)) is not None:
            try:
                self._on_message(decoder.decode(frame))
            except Exception:
                # One bad message or one bad consumer must not stop all the others.
                logger.exception("a message of the engine core could not be handled")
        watcher.cancel()
        self._on_exit(self, describe(await self._exit_code(), memory))

    async def _exit_code(self) -> int | None:
        """Negative: ended by that signal; `None`: it still runs. A process that dies closes its
        socket a moment before it can be reaped."""
        assert self._process is not None, "started"
        loop = asyncio.get_running_loop()
        end = loop.time() + REAP_SECONDS
        while (code := self._process.poll()) is None and loop.time() < end:
            await asyncio.sleep(0.005)
        return code


async def _watch(memory: MemoryWatch) -> None:
    while True:
        memory.look()
        await asyncio.sleep(WATCH_SECONDS)
