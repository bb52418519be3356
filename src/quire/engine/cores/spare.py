"""What outlives an engine core on this side: the memory of its weights, and maybe a spare process.

`CoreProcesses` makes each core of an engine. With `--warm-spare` it keeps a process ready that has
imported everything and mapped the weights. When a core is to be replaced, that process becomes the
next one at once, and another is made ready behind it, at low priority and only while the
machine has room for it. A spare is no core: it has no epoch and no KV cache, its death is no
core's death, and nobody waits for one that is not ready. Knows no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import msgspec

from quire.config import EngineConfig
from quire.engine.cores import wire
from quire.engine.cores.handle import CoreHandle, OnExit, OnMessage
from quire.engine.cores.kept_memory import KeptMemory
from quire.engine.cores.process_handle import CoreChild, CoreProcess
from quire.engine.messages import FromCore, Prepare, Prepared
from quire.engine.starvation import Machine
from quire.logger import get_logger
from quire.utils.host import available_memory
from quire.utils.timing import RealClock

logger = get_logger(__name__)

LOOK_SECONDS: Final = 1.0
"""Between two looks at whether the machine has room, and whether the spare still lives."""
LONGEST_PAUSE: Final = 60.0
"""Between two attempts, if spares die or cannot be started."""
SPARE_BYTES: Final = 512 << 20
"""Memory that must be free before a spare is started, twice what one takes."""
MOST_THROTTLED: Final = 0.05
"""Share of the time in which a CPU quota held processes up, from which on none is started. Where
there is no quota, its low priority is enough."""


class Room:
    """Whether the machine has room for a spare."""

    def __init__(self) -> None:
        self._machine = Machine()
        self._clock = RealClock()

    def __call__(self) -> bool:
        """Ask regularly: it answers for the time since the last call, at first with no."""
        seen = self._machine.read(self._clock.now())
        if seen is None:
            return False
        throttled = seen.throttled_seconds or 0.0
        return throttled <= MOST_THROTTLED * seen.seconds and available_memory() >= SPARE_BYTES


class CoreProcesses:
    """Makes engine cores in processes of their own.

    Args:
        warm_spare: Keep a spare.
        room: Asked every second while there is none, whether one may be started.
        new_child: Starts a process that inherits this descriptor.
    """

    def __init__(
        self,
        warm_spare: bool,
        room: Callable[[], bool] | None = None,
        new_child: Callable[[int | None], CoreChild] = CoreChild,
    ) -> None:
        self._room = room or (Room() if warm_spare else bool)
        self._new_child = new_child
        self._kept = KeptMemory()
        self._config: EngineConfig | None = None
        self._keeps_spare = warm_spare
        self._keeper: asyncio.Task[None] | None = None
        self._spare: CoreChild | None = None
        self._is_prepared = False
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def spare(self) -> str:
        """`off`; `none` (it will be started when the machine has room), `starting` or `ready`."""
        if not self._keeps_spare:
            return "off"
        if self._spare is None:
            return "none"
        return "ready" if self._is_prepared else "starting"

    def make(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> CoreHandle:
        """See `MakeCore`."""
        return _Core(self, epoch, on_message, on_exit)

    def core_is_ready(self) -> None:
        """The core works: there may be a spare behind it."""
        if self._keeps_spare and self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """End the spare, and let go of the weights."""
        await self._stop_keeper()
        self._drop_spare()
        await asyncio.gather(*self._leaving)
        self._kept.close()

    # ---- a core ------------------------------------------------------------------------------

    def child_for(self, config: EngineConfig) -> CoreChild:
        """A process for the next core: the spare, if it is ready.

        Raises:
            OSError: there is none, and the system allows no more processes, files or memory.
        """
        self._config = config
        if self._keeper is not None:
            self._keeper.cancel()  # until this one is ready
            self._keeper = None
        spare, self._spare = self._spare, None
        if spare is not None:
            if self._is_prepared and spare.process.poll() is None:
                return spare
            self._leave(spare)
        return self._new_child(self._kept.for_core())

    # ---- the spare ---------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Have a spare, until a core needs it."""
        pause = LOOK_SECONDS
        while True:
            await asyncio.sleep(pause)
            if not self._room():
                pause = LOOK_SECONDS
                continue
            worked = await self._have_spare()
            pause = LOOK_SECONDS if worked else min(2 * pause, LONGEST_PAUSE)

    async def _have_spare(self) -> bool:
        """Start a spare and stay until it has ended; returns whether it had become ready."""
        assert self._config is not None, "there is a core"
        try:
            self._spare = spare = self._new_child(self._kept.filled())
        except OSError as error:
            logger.debug("no spare core could be started: %s", error)
            return False
        self._is_prepared = False
        with contextlib.suppress(OSError):
            self._is_prepared = await _prepare(spare, self._config)
        was_ready = self._is_prepared
        if was_ready:
            logger.debug("a spare core is ready, process %d", spare.process.pid)
        while self._is_prepared and spare.process.poll() is None:
            await asyncio.sleep(LOOK_SECONDS)
        logger.debug("the spare core has ended")
        self._drop_spare()
        return was_ready

    async def _stop_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        self._is_prepared = False
        if spare is not None:
            self._leave(spare)

    def _leave(self, child: CoreChild) -> None:
        child.close()
        leaving = asyncio.get_running_loop().create_task(asyncio.to_thread(child.end, 0.0))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)


class _Core(CoreProcess):
    """A core whose process `CoreProcesses` finds, once its configuration is known."""

    def __init__(
        self, processes: CoreProcesses, epoch: int, on_message: OnMessage, on_exit: OnExit
    ) -> None:
        super().__init__(epoch, on_message, on_exit)
        self._processes = processes

    def find_child(self, config: EngineConfig) -> CoreChild:
        """The spare, or a new one."""
        return self._processes.child_for(config)


async def _prepare(child: CoreChild, config: EngineConfig) -> bool:
    """Have a process prepare; returns whether it did."""
    channel = await child.open()
    channel.transport.write(wire.encode(Prepare(0, config.to_dict())))
    frame = await channel.frame()
    return frame is not None and isinstance(msgspec.msgpack.decode(frame, type=FromCore), Prepared)
