"""`Supervisor`: keeps an engine core for a front end, and knows which one is there.

It owns the epoch, the start of a core and the news of its end. A core can be replaced by another of
the next epoch, which gets the limits of now and the unfinished requests with their output so far.
Whether that is done when a core dies is up to `replaces`. Knows no text, streams or processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import RecoveryConfig
from quire.engine.cores.death import Death
from quire.engine.cores.handle import CoreHandle, MakeCore
from quire.engine.cores.pending_calls import PendingCalls, Then
from quire.engine.cores.recovery import Recovery
from quire.engine.cores.watchdog import Stall, Watchdog
from quire.engine.live_config import LiveConfig
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    EngineCoreRequest,
    Failure,
    FromCore,
    Outputs,
    Progress,
    Ready,
    Reply,
    ToCore,
)
from quire.errors import EngineDead, QuireError, StartupError
from quire.logger import get_logger
from quire.utils.timing import Clock

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CoreEvents:
    """What a supervisor tells, and the one thing it asks. All are called in the event loop."""

    started: Callable[[int], None]
    """A core of this epoch has been started."""
    loading: Callable[[str, int, int], None]
    """It loads: phase, bytes done, bytes in all."""
    ready: Callable[[dict[str, Any]], None]
    """It is ready; what its executor says of itself."""
    stalled: Callable[[str], None]
    """It is stuck, in this way (`quire.engine.cores.watchdog.KINDS`)."""
    outputs: Callable[[Outputs], None]
    """A step of it has produced something. Each step is heard once, in order."""
    replay: Callable[[bool], list[EngineCoreRequest]]
    """Asked when a core takes the place of another: what it has to take over. Told whether the one
    before it died at work, and not while it loaded."""
    recovered: Callable[[Mapping[str, float]], None]
    """A replacement is over: the seconds of its parts (`quire.core.stats.RECOVERY_PARTS`)."""
    dead: Callable[[QuireError], None]
    """The core is gone and is not replaced. Told once; nothing comes after it."""


def _nowhere() -> None:
    """There is no core."""


def never(error: QuireError) -> bool:
    """The engine ends with its core."""
    return False


class Supervisor:
    """One core at a time.

    Args:
        live: The configuration. A core is started with what holds at that moment.
        events: Who hears of the core.
        make_core: Makes the handle of an epoch.
        clock: Monotonic time.
        replaces: Asked with the error whether a core that died is to be replaced.
    """

    def __init__(
        self,
        live: LiveConfig,
        events: CoreEvents,
        make_core: MakeCore,
        clock: Clock,
        replaces: Callable[[QuireError], bool] = never,
    ) -> None:
        self.epoch = 0
        """Of the core that is there; 0 before the first."""
        self.state = "loading"
        """`loading`, `ready`, `replacing` (it was ready, and its core is being replaced) or
        `dead`."""
        self.progress: tuple[str, int, int] = ("starting", 0, 0)
        """While loading or replacing: phase, done, total."""
        self.info: dict[str, Any] = {}
        """What the core reported when it was ready: blocks, device, memory."""
        self.error: QuireError | None = None
        """Why the engine is dead."""
        self._live = live
        self._events = events
        self._make_core = make_core
        self._clock = clock
        self._replaces = replaces
        self._core: CoreHandle | None = None
        self._number = 0
        # of the last message heard of this epoch
        self._calls = PendingCalls()
        self._settled = asyncio.Event()
        timeout = live.now.recovery.core_stall_timeout
        self._watchdog = Watchdog(timeout or RecoveryConfig().core_stall_timeout, clock)
        self._ends_stalled = timeout > 0
        self._told_of = 0
        # the epoch whose stall has been told
        self._leaving: set[asyncio.Task[None]] = set()
        self._recovery: Recovery | None = None
        # the replacement that is under way

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first core.

        Raises:
            OSError: it cannot even begin.
        """
        self._start_core()

    async def wait_ready(self) -> None:
        """Wait until the core that is there is ready.

        Raises:
            StartupError: it cannot start; its own reason.
            EngineDead: it has stopped.
        """
        await self._settled.wait()
        if self.error is not None:
            raise self.error

    def respawn(self, why: QuireError) -> None:
        """Put a core of the next epoch in the place of this one, whatever state that is in. It
        goes on with every unfinished request where its callers stand.

        Args:
            why: What ends the control verbs that the old core will not answer. None of them has
                changed anything that the new core could know of.
        """
        assert self._core is not None, "start() makes the first"
        begun = self._clock.now()
        has_worked = self.state == "ready"
        self._dismiss(self._core)
        self._calls.fail(why)
        # Before the first core was ready, nobody has been promised anything.
        self.state = "loading" if self.state == "loading" else "replacing"
        self.progress = ("starting", 0, 0)
        self._settled.clear()
        try:
            self._start_core()
        except OSError as error:
            logger.error("an engine core could not be started: %s", error)
            return self.end(EngineDead("the engine core died, and no other could be started"))
        self._recovery = Recovery(self.epoch, begun, self._clock, self._events.recovered)
        if requests := self._events.replay(has_worked):
            self._recovery.wait_for(requests)
            self.send(AddRequests(self.epoch, requests))

    def end(self, error: QuireError) -> None:
        """Give the core up. Everything that waits for it gets `error`."""
        if self.state == "dead":
            return
        self.state, self.error = "dead", error
        self._calls.fail(error)
        self._settled.set()
        self._events.dead(error)

    async def shutdown(self) -> None:
        """End the core, and wait until it and its predecessors have."""
        self.end(EngineDead("the engine was shut down"))
        if self._core is not None:
            self._dismiss(self._core)
        await asyncio.gather(*self._leaving)

    def _start_core(self) -> None:
        self.epoch += 1
        self._number = 0
        self._watchdog.watch_new(computes=True)
        self._core = self._make_core(self.epoch, self._on_message, self._on_exit)
        self._core.start(self._live.given)
        self._events.started(self.epoch)

    def _dismiss(self, core: CoreHandle) -> None:
        core.stop()
        leaving = asyncio.get_running_loop().create_task(core.ended())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    # ---- to the core -------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise if the engine has stopped.

        Raises:
            QuireError: why.
        """
        if self.state == "dead":
            raise self.error or EngineDead("the engine has stopped")

    def send(self, message: ToCore) -> None:
        """Bring a message to the core that is there; nowhere if there is none."""
        if self._recovery is not None and isinstance(message, AbortRequests):
            self._recovery.forget(message.request_ids)
        self.prepare(message)()

    def prepare(self, message: ToCore) -> Callable[[], None]:
        """Encode a message, and return what brings it to the core that is there now.

        Raises:
            InvalidRequest: it cannot be encoded, or is over the limit of a message.
        """
        if self.state == "dead":
            return _nowhere
        assert self._core is not None, "start() makes one"
        return self._core.prepare(message)

    async def call(self, verb: str, args: dict[str, Any], then: Then | None = None) -> Any:
        """Run a control verb in the core.

        Args:
            verb, args: What is called.
            then: Gets the result at the moment the core's reply is heard, so that nothing the core
                says or suffers afterwards comes first; also if the caller has gone meanwhile.

        Raises:
            QuireError: the verb failed, or the core died.
        """
        self.check_alive()
        call, future = self._calls.make(self.epoch, verb, args, then)
        self.send(call)
        return await future

    # ---- progress ----------------------------------------------------------------------------

    @property
    def is_stalled(self) -> bool:
        """Whether the core that is there has made no progress for too long, or nearly."""
        return self.state == "ready" and self._watchdog.is_stalled

    def check_progress(self) -> None:
        """Look at the core, and end it if it is stuck. To be called every `LOOK_SECONDS`."""
        if self._core is None or self.state == "dead":
            return
        seen = self._core.observe(self._watchdog.looks_closely)
        stall = None if seen is None else self._watchdog.look(seen, self._number)
        if stall is not None:
            self._on_stall(self._core, stall)

    def _on_stall(self, core: CoreHandle, stall: Stall) -> None:
        if self._told_of != self.epoch:
            self._told_of = self.epoch
            logger.error("the engine core is stuck (%s) %s", stall.kind, stall.what)
            self._events.stalled(stall.kind)
        if self._ends_stalled:
            core.condemn()
            self._on_death(self._stall_error(stall))

    def _stall_error(self, stall: Stall) -> QuireError:
        if self.state != "loading":
            return EngineDead(f"the engine core was stuck ({stall.kind})")
        phase, done, total = self.progress
        share = f", {100 * done // total} %" if total else ""
        return StartupError(
            f"the engine core got stuck in its start ({phase}{share}) {stall.what}. The log has "
            "its stacks; --core-stall-timeout 0 lets it go on for ever"
        )

    # ---- of the core -------------------------------------------------------------------------

    def _on_message(self, message: FromCore) -> None:
        if message.epoch != self.epoch or self.state == "dead" or message.number <= self._number:
            return  # of a core that was replaced, or heard before
        if message.number != self._number + 1:
            # The tokens in between are lost to us, but the core would go on after them.
            self._on_death(EngineDead("a message of the engine core was lost"))
            return
        self._number = message.number
        match message:
            case Outputs(stats=stats):
                if stats is not None:
                    self._watchdog.record(stats)
                self._events.outputs(message)
                if self._recovery is not None:
                    self._recover(message)
            case Reply():
                self._calls.answer(message)
            case Progress(phase=phase, done=done, total=total):
                self.progress = (phase, done, total)
                self._events.loading(phase, done, total)
            case Ready(info=info, parts=parts):
                self._on_ready(info)
                if self._recovery is not None:
                    self._recovery.ready(parts)
            case Failure():
                self._on_death(message.error())

    def _on_ready(self, info: dict[str, Any]) -> None:
        self.info = info
        self._watchdog.watch_new(computes=info.get("device") == "cpu")
        self._events.ready(info)
        self.state, self.progress = "ready", ("ready", 1, 1)
        self._settled.set()

    def _recover(self, message: Outputs) -> None:
        assert self._recovery is not None
        self._recovery.heard(message)
        if self._recovery.is_over:
            self._recovery = None

    def _on_exit(self, core: CoreHandle, death: Death) -> None:
        if core is not self._core or self.state == "dead":
            return
        logger.error("the engine core died (%s). %s", death.what, death.why)
        self._on_death(EngineDead(f"the engine core died ({death.what})", advice=death.why))

    def _on_death(self, error: QuireError) -> None:
        if self._replaces(error):
            self.respawn(error)
        else:
            self.end(error)
