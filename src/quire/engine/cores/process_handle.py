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
from quire.engine.cores.pulse import Activity, Pulse
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


class CoreChild:
    """A process that is a core or can become one: our end of the socket to it, and its pulse.

    The two ends of a socket pair have no name in the file system: nobody else can connect, and
    nothing is left behind however either side ends.

    Args:
        weights: Descriptor of the memory for packed weights that it inherits, if there is any.

    Raises:
        OSError: the system allows no more processes, files or memory.
    """

    def __init__(self, weights: int | None = None) -> None:
        self.pulse = Pulse()
        self._ours, theirs = socket.socketpair()
        self._channel: wire.Channel | None = None
        inherited = [theirs.fileno(), self.pulse.descriptor]
        if weights is not None:
            inherited.append(weights)
        command = [sys.executable, "-m", "quire.engine.cores.core_main", *map(str, inherited)]
        try:
            # Blocking for a few milliseconds; asyncio's own spawning needs a child watcher.
            with theirs, group_signals_held():
                self.process = subprocess.Popen(command, pass_fds=inherited)
        except BaseException:
            self.close()
            self.pulse.close()
            raise

    async def open(self) -> wire.Channel:
        """The socket, in the event loop."""
        if self._channel is None:
            loop = asyncio.get_running_loop()
            _, self._channel = await loop.create_unix_connection(wire.Channel, sock=self._ours)
        return self._channel

    def close(self) -> None:
        """Close the socket, which is enough for a healthy process to end."""
        if self._channel is not None:
            self._channel.transport.close()
        else:
            self._ours.close()

    def end(self, grace: float) -> None:
        """Wait for the end of the process, which is killed after `grace` seconds; blocks."""
        terminate(self.process, grace)
        self.pulse.close()


class CoreProcess:
    """One engine-core process of one epoch, as `CoreHandle` says.

    Args:
        epoch: Counted from 1.
        on_message: Called in the event loop with every message of this process.
        on_exit: Called once, when the process has closed its end, with how it died.
    """

    def __init__(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> None:
        self.epoch = epoch
        self._on_message = on_message
        self._on_exit = on_exit
        self._child: CoreChild | None = None
        self._channel: wire.Channel | None = None
        self._early: list[bytes] = []
        # frames from before the event loop had the socket
        self._tasks: list[asyncio.Task[None]] = []
        self._signs: ProcessSigns | None = None
        self._decoder = msgspec.msgpack.Decoder[FromCore](FromCore)
        self._sent = 0
        # messages
        self._is_condemned = self._has_ended = False

    def start(self, config: EngineConfig) -> None:
        """Have a process load this configuration.

        Raises:
            OSError: the system allows no more processes, files or memory.
        """
        begun = time.monotonic()
        child = self._child = self.find_child(config)
        self.send(Start(self.epoch, config.to_dict(), begun))
        self._signs = ProcessSigns(child.process.pid)
        memory = MemoryWatch(child.process.pid)
        watcher = asyncio.create_task(_watch(memory))
        receiver = asyncio.create_task(self._receive(child, memory, watcher))
        self._tasks = [watcher, receiver]

    def find_child(self, config: EngineConfig) -> CoreChild:
        """The process that is to be the core: here a new one."""
        return CoreChild()

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
        if self._channel is None:
            self._early += frames
        elif not self._channel.transport.is_closing():
            self._channel.transport.writelines(frames)

    def observe(self, closely: bool) -> Observation | None:
        """What the core shows, and what the kernel says of its process."""
        if self._child is None or self._signs is None or self._has_ended:
            return None
        beat = self._child.pulse.read()
        pending = self._sent - beat.taken if beat is not None else 0
        loads = beat is not None and beat.phase is Activity.LOADING
        return Observation(beat, self._signs.look(closely, family=loads), pending)

    def condemn(self) -> None:
        """Have `ended` log its stacks and kill it."""
        self._is_condemned = True

    def stop(self) -> None:
        """Hear nothing more, and close the socket, which is enough for a healthy core to end."""
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.listen(None)
        if not self._is_condemned and self._child is not None:
            self._child.close()  # a condemned one would end before it has written its stacks

    async def ended(self, grace: float = 1.0) -> None:
        """Reap the process; `grace` seconds from now it is killed."""
        child = self._child
        if child is None or self._has_ended:
            return
        if self._is_condemned:
            await asyncio.to_thread(log_stacks, child.process.pid, child.pulse)
            child.process.kill()
            child.close()
        self._has_ended = True
        await asyncio.to_thread(child.end, grace)

    async def _receive(
        self, child: CoreChild, memory: MemoryWatch, watcher: asyncio.Task[None]
    ) -> None:
        channel = self._channel = await child.open()
        channel.transport.writelines(self._early)
        self._early.clear()
        channel.listen(self._hear)
        await channel.closed
        watcher.cancel()
        self._on_exit(self, describe(await self._exit_code(), memory))

    def _hear(self, frame: bytes) -> None:
        try:
            self._on_message(self._decoder.decode(frame))
        except Exception:
            # One bad message or one bad consumer must not stop all the others.
            logger.exception("a message of the engine core could not be handled")

    async def _exit_code(self) -> int | None:
        """Negative: ended by that signal; `None`: it still runs. A process that dies closes its
        socket a moment before it can be reaped."""
        assert self._child is not None, "started"
        loop = asyncio.get_running_loop()
        end = loop.time() + REAP_SECONDS
        while (code := self._child.process.poll()) is None and loop.time() < end:
            await asyncio.sleep(0.005)
        return code


async def _watch(memory: MemoryWatch) -> None:
    while True:
        memory.look()
        await asyncio.sleep(WATCH_SECONDS)
