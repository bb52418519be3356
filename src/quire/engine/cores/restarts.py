"""How often a core that died is replaced. Knows neither cores nor requests."""

from __future__ import annotations

from collections import deque

from quire.config import RecoveryConfig
from quire.errors import QuireError
from quire.logger import get_logger
from quire.utils.timing import Clock

logger = get_logger(__name__)


class RestartBudget:
    """Says of each death whether the core is to be replaced.

    A core that dies again and again will not be better the next time, and whoever watches the
    server can do more than it can: move to another machine, give more memory. So the number of
    deaths within a time is limited.

    Args:
        config: The limits.
        clock: Monotonic time.
    """

    def __init__(self, config: RecoveryConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._deaths: deque[float] = deque()
        # of the last `core_restart_window` seconds

    def __call__(self, error: QuireError) -> bool:
        """Whether the core that died of `error` is to be replaced; counts its death."""
        now, limit = self._clock.now(), self._config.core_restart_limit
        window = self._config.core_restart_window
        while self._deaths and self._deaths[0] <= now - window:
            self._deaths.popleft()
        if len(self._deaths) >= limit:
            if limit:
                logger.error(
                    "the engine core died more than %d times within %g s "
                    "(--core-restart-limit, --core-restart-window): giving up",
                    limit,
                    window,
                )
            return False
        self._deaths.append(now)
        logger.warning(
            "replacing the engine core, %d of at most %d times within %g s; requests go on",
            len(self._deaths),
            limit,
            window,
        )
        return True
