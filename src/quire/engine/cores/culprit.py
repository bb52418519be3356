"""Finds the request that makes steps of a core raise, by steps with only some of the requests.

A step that raises has not happened, so it can be tried with other requests. What a step without
the others computes is what one with them would have: its outputs are told, and no work is lost.
The worker halves its own batches the same way (`quire.worker.step_runner`); this is for what raises
outside of it, while a step is planned, applied or told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from quire.engine.core import EngineCore
from quire.logger import get_logger

logger = get_logger(__name__)

MAX_TRIALS: Final = 64
"""Steps after which a search is given up."""
MAX_WITNESSES: Final = 4
"""Other requests that are tried alone to see whether it is a request's fault at all."""


def find_culprit(core: EngineCore, step: Callable[[], None]) -> str | None:
    """The id of the request with which a step raises, and without which others do not.

    Args:
        core: Whose last steps have raised.
        step: Runs one step and tells its outputs.

    Returns:
        `None` if no such request is found: what raises is no single request's fault, or there is
        nobody to compare the only request with. All requests wait to be computed again.
    """
    search = _Search(core, step)
    try:
        return search.run()
    finally:
        core.keep_only(None)


class _Search:
    def __init__(self, core: EngineCore, step: Callable[[], None]) -> None:
        self._core = core
        self._step = step
        self._anyone_passed = False

    def run(self) -> str | None:
        suspects = everybody = list(self._core.scheduler.requests)
        for _ in range(MAX_TRIALS):
            if not suspects:
                return None
            tried, rest = suspects[: len(suspects) // 2 or 1], suspects[len(suspects) // 2 or 1 :]
            computed = self._try(tried)
            if computed is not None:
                # Who had no room in that step is as suspect as before.
                suspects = rest + [name for name in tried if name not in computed]
            elif len(tried) > 1:
                suspects = tried
            else:
                return tried[0] if self._is_own_fault(tried[0], everybody) else None
        return None

    def _is_own_fault(self, suspect: str, everybody: list[str]) -> bool:
        """Whether anybody else can be computed. Otherwise the fault is the core's, and ending its
        requests one by one would lose what another core could finish."""
        others = [name for name in everybody if name != suspect]
        return self._anyone_passed or any(self._try([o]) for o in others[:MAX_WITNESSES])

    def _try(self, names: list[str]) -> set[str] | None:
        """Run a step with only these requests: those that it computed, or `None` if it raised."""
        self._core.keep_only(set(names))
        try:
            self._step()
        except Exception as error:
            logger.warning("a step of %d requests raised %s", len(names), type(error).__name__)
            return None
        left = self._core.scheduler.requests
        computed = {n for n in names if n not in left or left[n].num_computed_tokens > 0}
        self._anyone_passed |= bool(computed)
        return computed
