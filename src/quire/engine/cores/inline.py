"""A core in the caller's process, which its caller steps: what `LLM` uses.

Nothing happens between two calls, so a profiler around them sees all the work. Knows no front end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.config import EngineConfig
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.core import EngineCore
from quire.engine.cores.handle import OnMessage
from quire.engine.cores.obey import obey
from quire.engine.messages import FromCore, Outputs, Progress, Ready, ToCore
from quire.executor.base import Executor
from quire.utils.timing import Clock


class InlineCore:
    """One core of one epoch, as `CoreHandle` says. What the core raises, its caller gets.

    Args:
        epoch: Counted from 1.
        on_message: Hears the messages. An exception out of it during a step undoes the step.
        executor, clock: Replaceable in tests.
    """

    def __init__(
        self,
        epoch: int,
        on_message: OnMessage,
        *,
        executor: Executor | str = "inline",
        clock: Clock | None = None,
    ) -> None:
        self.epoch = epoch
        self._on_message = on_message
        self._executor = executor
        self._clock = clock
        self._number = 0
        self.core: EngineCore
        """Once started."""

    def start(self, config: EngineConfig) -> None:
        """Load, to the end.

        Raises:
            StartupError: the configuration, the model folder or the memory does not allow a start.
        """
        self.core = EngineCore(
            config, executor=self._executor, clock=self._clock, progress=self._progress
        )
        self._tell(Ready(self.epoch, self._number + 1, self.core.info.to_dict()))

    def send(self, message: ToCore) -> None:
        """Have the core take a message, at once."""
        reply = obey(self.core, message, self._number + 1)
        if reply is not None:
            self._tell(reply)

    def prepare(self, message: ToCore) -> Callable[[], None]:
        """What has the core take a message; nothing is encoded within a process."""
        return partial(self.send, message)

    def step(self) -> None:
        """Run one step; its outputs are a message within it, so either both happen or neither."""
        self.core.step_into(self._outputs)
        self.core.look_after()

    def observe(self, closely: bool) -> None:
        """Who steps it is the only one who could look."""

    def condemn(self) -> None:
        """Nobody watches it."""

    def stop(self) -> None:
        """Let go of the model."""
        self.core.shutdown()

    async def ended(self, grace: float = 1.0) -> None:
        """It has, when `stop` returns."""

    def _outputs(self, outputs: list[EngineCoreOutput], stats: StepStats) -> None:
        number = self._number + 1
        self._on_message(Outputs(self.epoch, number, outputs, stats))
        self._number = number

    def _progress(self, phase: str, done: int, total: int) -> None:
        self._tell(Progress(self.epoch, self._number + 1, phase, done, total))

    def _tell(self, message: FromCore) -> None:
        # Counted when it was heard: the message of a step that is undone is as if never said.
        self._on_message(message)
        self._number += 1
