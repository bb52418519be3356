"""Progress of long work on stderr: a bar on a terminal, elsewhere a line for every quarter."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class CommandProgress:
    """Told how much is done; a new name, or nothing done, begins a new bar.

    Args:
        enabled: Whether anything is shown.
        patience: Seconds that work may take before anything is shown.
    """

    def __init__(self, enabled: bool = True, patience: float = 0.0) -> None:
        self._enabled = enabled
        self._patience = patience
        self._bar: Any = None
        self._task: Any = None
        self._what = ""
        self._quarter = 0
        self._started = time.monotonic()

    def __enter__(self) -> CommandProgress:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._stop()

    def seen(self, what: str, done: int, total: int) -> None:
        """So much of `what` is done."""
        if not self._enabled:
            return
        if what != self._what or done == 0:
            self._stop()
            self._what, self._quarter, self._started = what, 0, time.monotonic()
        seconds = time.monotonic() - self._started
        if seconds < self._patience:
            return
        if sys.stderr.isatty():
            self._move(what, done, total)
        elif (quarter := 4 * done // max(1, total)) > self._quarter:
            self._quarter = quarter
            print(f"{what}: {done:,} of {total:,}, {seconds:.1f} s", file=sys.stderr, flush=True)

    def requests(self, done: int, total: int) -> None:
        """So many requests are done."""
        self.seen("requests", done, total)

    def through(self, what: str, items: Iterable[T], total: int) -> Iterator[T]:
        """Give items on, and tell how many are done."""
        stride, done = max(1, total // 1000), 0
        self.seen(what, done, total)
        for done, item in enumerate(items, 1):
            yield item
            if done % stride == 0:
                self.seen(what, done, total)
        self.seen(what, done, total)
        self._stop()  # what comes next may take long and print

    def _move(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar, self._task = make_bar(what, total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._what = ""


def make_bar(what: str, total: int | None) -> tuple[Any, Any]:
    """A bar that is not shown yet, and its task; `total` is `None` while nobody knows it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    return bar, bar.add_task(what, total=total)
