"""What the service manager is told of the server: ready, loading how far, draining, alive.

Knows how the server is, and no sockets.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from quire.serving.server_state import ServerState
from quire.utils.service import ServiceManager
from quire.utils.timing import Clock, RealClock

LOOK_SECONDS: Final = 0.5
"""Seconds between two looks at the server."""
LOADING_SECONDS: Final = 120
"""Seconds that loading may stand still. systemd gives a start 90 s by default, which a large model
exceeds; every sign of progress extends that."""
STOP_SECONDS: Final = 5
"""Seconds that an exit takes after the drain, with a margin."""


class ServiceReport:
    """Tells a service manager when something has changed, and that the server is alive.

    Args:
        state: Of the server.
        manager: Who is told.
        clock: Monotonic time.
    """

    def __init__(
        self, state: ServerState, manager: ServiceManager, clock: Clock | None = None
    ) -> None:
        self._state = state
        self._manager = manager
        self._clock = clock or RealClock()
        self._told: dict[str, str | int] = {}
        self._was_ready = False
        self._alive_at = float("-inf")
        self._main_pid: int | None = None

    def become_main(self) -> None:
        """This process has taken the service over from another one."""
        self._main_pid = os.getpid()

    def leave(self) -> None:
        """Another process has taken the service over from this one."""
        self._manager.leave()

    async def run(self) -> None:
        """Look again and again; returns at once if nobody wants to know."""
        while self._manager.listens:
            self.look()
            watchdog = self._manager.watchdog_seconds
            await asyncio.sleep(min(LOOK_SECONDS, watchdog / 4 if watchdog else LOOK_SECONDS))

    def look(self) -> None:
        """Tell what has changed since the last look."""
        fields = self._fields()
        if fields != self._told:
            self._told = fields
            self._manager.tell(**fields)
        self._say_alive()

    def _fields(self) -> dict[str, str | int]:
        state = self._state
        status = state.status()
        if status in ("loading", "replacing"):
            phase, percent = state.progress()
            told: dict[str, str | int] = {"STATUS": f"{status}: {phase}, {percent} %"}
            if not self._was_ready:
                told["EXTEND_TIMEOUT_USEC"] = LOADING_SECONDS * 1_000_000
            return told
        if status == "draining":
            seconds = int(state.config.shutdown_timeout) + STOP_SECONDS
            return {
                "STOPPING": 1,
                "STATUS": f"draining: {state.answering} request(s)",
                "EXTEND_TIMEOUT_USEC": seconds * 1_000_000,
            }
        if status == "ready" and state.start_seconds is not None:
            self._was_ready = True
        if not self._was_ready:
            return {"STATUS": status}
        main: dict[str, str | int] = {} if self._main_pid is None else {"MAINPID": self._main_pid}
        return {**main, "READY": 1, "STATUS": status}

    def _say_alive(self) -> None:
        """At half of the interval. As long as `/livez` is 200: whoever is not told restarts the
        process. The event loop says it, so one that hangs does not."""
        interval = self._manager.watchdog_seconds
        now = self._clock.now()
        if interval and self._state.status() != "dead" and now - self._alive_at >= interval / 2:
            self._alive_at = now
            self._manager.tell(WATCHDOG=1)
