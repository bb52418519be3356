"""How long the replacement of a core takes, from the death of one to the tokens of the next.

Knows parts, and ids of requests that have to go on; knows no processes and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from quire.engine.messages import EngineCoreRequest, Outputs
from quire.logger import get_logger
from quire.utils.timing import Clock

logger = get_logger(__name__)


class Recovery:
    """One replacement. It is over when the new core is ready and has continued every request that
    had output: then callers see tokens again.

    Args:
        epoch: Of the new core.
        begun: When the death of the old one was known.
        clock: Monotonic time.
        tell: Hears the seconds of each part of `quire.core.stats.RECOVERY_PARTS`, once, at the end.
    """

    def __init__(
        self, epoch: int, begun: float, clock: Clock, tell: Callable[[Mapping[str, float]], None]
    ) -> None:
        self.is_over = False
        self._epoch = epoch
        self._begun = begun
        self._clock = clock
        self._tell = tell
        self._parts: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._count = 0
        self._ready: float | None = None

    def wait_for(self, requests: Iterable[EngineCoreRequest]) -> None:
        """These go on in the new core. Those without output may be in its queue for any time."""
        self._waiting = {r.request_id for r in requests if r.output_token_ids}
        self._count = len(self._waiting)

    def ready(self, parts: Mapping[str, float]) -> None:
        """The core is ready; `parts` as it measured them."""
        self._ready = self._clock.now()
        self._parts = dict(parts)
        self._check()

    def heard(self, message: Outputs) -> None:
        """It has stepped."""
        self.forget(output.request_id for output in message.outputs)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more: they have tokens, or were ended."""
        self._waiting.difference_update(request_ids)
        self._check()

    def _check(self) -> None:
        if self.is_over or self._ready is None or self._waiting:
            return
        self.is_over = True
        now = self._clock.now()
        if self._count:
            self._parts["prefill"] = now - self._ready
        self._parts["total"] = now - self._begun
        parts = ", ".join(
            f"{name.replace('_', ' ')} {seconds:.2f}"
            for name, seconds in self._parts.items()
            if name != "total"
        )
        logger.info(
            "engine core %d took over in %.2f s (%s); %d requests go on where they stood",
            self._epoch,
            self._parts["total"],
            parts,
            self._count,
        )
        self._tell(self._parts)
