"""What a front end may know of an engine core: the handle, whatever is behind it.

Implementations: `CoreProcess` (a process of its own), `InlineCore` (in the caller's process), and a
fake in the tests. A core elsewhere, on another host say, is one more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.config import EngineConfig
from quire.engine.cores.death import Death
from quire.engine.cores.watchdog import Observation
from quire.engine.messages import FromCore, ToCore

OnMessage = Callable[[FromCore], None]
"""Hears every message of a core, in its order."""


class CoreHandle(Protocol):
    """One engine core, from its start to its end. It is never started twice: a replacement is
    another core with another epoch."""

    @property
    def epoch(self) -> int:
        """Which core this is, counted from 1; all its messages carry it."""
        ...

    def start(self, config: EngineConfig) -> None:
        """Begin to load. Progress, then `Ready` or `Failure`, come as messages.

        Args:
            config: As given by the user.

        Raises:
            OSError: the core cannot even begin.
        """
        ...

    def send(self, message: ToCore) -> None:
        """Bring a message to the core; one that is still loading gets it later. Never raises
        because the core is gone: `on_exit` tells that."""
        ...

    def prepare(self, message: ToCore) -> Callable[[], None]:
        """Encode a message, and return what brings it to the core.

        Raises:
            InvalidRequest: it cannot be encoded, or is over the limit of a message.
        """
        ...

    def observe(self, closely: bool) -> Observation | None:
        """What is to be seen of its progress from outside, without asking it; `None` if there is no
        way to see any. `closely`: look at each of its threads."""
        ...

    def condemn(self) -> None:
        """It is stuck: when it is stopped, what it was doing goes to the log, and it is ended by
        force at once."""
        ...

    def stop(self) -> None:
        """Have it end. Neither a message nor an exit is heard afterwards. Safe to call twice."""
        ...

    async def ended(self, grace: float = 1.0) -> None:
        """Wait, after `stop`, until everything it held is free.

        Args:
            grace: Seconds after which it is ended by force.
        """
        ...


OnExit = Callable[[CoreHandle, Death], None]
"""Called once if a core ends that was not told to, with how it died."""
MakeCore = Callable[[int, OnMessage, OnExit], CoreHandle]
"""Makes the handle of an epoch, whose core is not started yet."""
