"""The progress bar of `LLM.generate`: requests done, and tokens per second in and out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from quire.outputs import RequestOutput
from quire.utils.timing import Clock, RealClock


class GenerateProgress:
    """Shows a bar on a terminal; elsewhere one line at the end, so that logs stay readable.

    Args:
        total: Requests to come.
        enabled: False shows nothing at all; something like `tqdm` makes the bar to show.
    """

    def __init__(
        self,
        total: int,
        enabled: bool | Callable[..., Any] = True,
        clock: Clock | None = None,
    ) -> None:
        self._total = total
        self._make = enabled if callable(enabled) else None
        self._enabled = bool(enabled) and total > 0
        self._clock = clock or RealClock()
        self._started = self._clock.now()
        self._done = self._tokens_in = self._tokens_out = 0
        self._bar: Any = None
        self._theirs: Any = None
        # a bar of ours, or one that the caller's class made
        self._task: Any = None

    def __enter__(self) -> GenerateProgress:
        if self._enabled and self._make is not None:
            self._theirs = self._make(total=self._total, desc="Processed prompts")
        elif self._enabled and sys.stderr.isatty():
            self._bar, self._task = _make_bar(self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._theirs is not None:
            self._theirs.close()
        elif self._bar is not None:
            self._bar.stop()
        elif self._enabled and kind is None:
            print(f"Processed prompts: {self._done}/{self._total}, {self.rates}", file=sys.stderr)

    def finish(self, output: RequestOutput) -> None:
        """Count a finished request."""
        self._done += 1
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(c.token_ids) for c in output.outputs)
        if self._theirs is not None:
            self._theirs.update(1)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rates=self.rates)

    @property
    def rates(self) -> str:
        """Tokens per second since the start."""
        elapsed = max(1e-9, self._clock.now() - self._started)
        return (
            f"est. speed input: {self._tokens_in / elapsed:.2f} toks/s, "
            f"output: {self._tokens_out / elapsed:.2f} toks/s"
        )


def _make_bar(total: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("Processed prompts:"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rates]}"),
        console=Console(stderr=True),
    )
    return bar, bar.add_task("prompts", total=total, rates="")
