"""Simulates one trace under many settings, in as many processes as there are cores.

Knows no targets: `quire.bench.tune` says what is tried and which settings are good.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_all_start_methods, get_context
from typing import Any, Final

from quire.bench.result import summary
from quire.cli.progress import CommandProgress
from quire.cli.simulate import records_of_run, simulate
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.sim.simulator import Pool
from quire.sim.step_time import StepTimeModel
from quire.utils.host import available_cores
from quire.utils.process import die_with_parent
from quire.workload.trace import Trace

ALONE: Final = 20_000
"""Output tokens of a trace up to which starting processes takes longer than they save."""
MOST_PROCESSES: Final = 16
"""In the end each has the trace in its own memory, whoever shares it at first."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """A trace, and everything that is the same under all settings."""

    trace: Trace
    pool: Pool
    times: StepTimeModel
    percentiles: Sequence[float]
    """That results are to have."""

    def __call__(self, config: EngineConfig) -> dict[str, Any]:
        """The result of a run with a configuration."""
        done = simulate(self.trace, config, self.pool, self.times)
        return summary(records_of_run(done), done.duration, percentiles=self.percentiles)


class ManySimulations:
    """Runs a simulation under many settings, and shows how far it is.

    Args:
        simulation: To run.
        progress: Shows it.
    """

    def __init__(self, simulation: Simulation, progress: CommandProgress) -> None:
        self._simulation = simulation
        self._progress = progress

    def __call__(self, what: str, configs: Sequence[EngineConfig]) -> list[dict[str, Any]]:
        """The results under each of these settings, in their order.

        Args:
            what: Is tried; for the progress.
            configs: The settings.

        Raises:
            QuireError: a process was killed.
        """
        with self._results(configs) as results:
            return list(self._progress.through(what, results, len(configs)))

    @contextmanager
    def _results(self, configs: Sequence[EngineConfig]) -> Iterator[Iterable[dict[str, Any]]]:
        processes = min(available_cores(), len(configs), MOST_PROCESSES)
        tokens = sum(request.output_len for request in self._simulation.trace.requests)
        if processes < 2 or tokens <= ALONE:
            yield map(self._simulation, configs)
            return
        # Forked where that exists: they share the trace, and do not import whatever program this is
        # again. A simulation takes no lock that another thread could hold meanwhile.
        how = get_context("fork" if "fork" in get_all_start_methods() else None)
        pool = ProcessPoolExecutor(processes, how, _begin, (self._simulation, os.getpid()))
        try:
            with pool, _not_outlived():
                yield pool.map(_run, configs)
        except BrokenProcessPool:
            raise QuireError(
                "a process that simulated was killed, most likely because memory ran out: each "
                f"of {processes} holds the trace"
            ) from None


@contextmanager
def _not_outlived() -> Iterator[None]:
    """End the pool's processes on any exception; it would wait for what they do."""
    try:
        yield
    except BaseException:
        for process in active_children():
            process.terminate()
        raise


_simulation: Simulation
"""Of this process, if it is one of a pool."""


def _begin(simulation: Simulation, parent: int) -> None:
    global _simulation
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback
    _simulation = simulation


def _run(config: EngineConfig) -> dict[str, Any]:
    return _simulation(config)
