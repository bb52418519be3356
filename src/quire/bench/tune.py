"""Finds settings that meet latency targets: the simulator tries many, a live engine the best few.

Only settings that can be changed while requests run are tried, so that the engine starts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from msgspec import structs

from quire.bench.live_trace import play
from quire.bench.result import RequestRecord, summary
from quire.bench.slo import LatencyTargets
from quire.config import EngineConfig
from quire.core.admission import LIVE_LIMITS
from quire.engine.async_llm import AsyncLLM
from quire.errors import ConfigError
from quire.sim.scenario import with_settings
from quire.sim.sequences import Sequences
from quire.workload.trace import Trace, TraceRequest

BUDGETS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SEATS: Final = (2, 4, 8, 16, 32, 64, 128, 256)
THRESHOLDS: Final = (0, 32, 128, 512)
POLICIES: Final = ("fcfs", "sjf", "prefill_first")
KEPT: Final = 4
"""Settings of the first round that go on to the second."""

ROOM: Final = 0.9
"""Share of every target up to which a simulated setting counts as meeting it."""

Simulate = Callable[[str, Sequence[EngineConfig]], Sequence[dict[str, Any]]]
"""Given what is tried, and configurations: the result of a run with each of them."""


@dataclass(slots=True)
class Trial:
    """One setting, and what came of it."""

    settings: dict[str, Any]
    """Of `LIVE_LIMITS`."""
    simulated: dict[str, Any]
    excess: float
    """`LatencyTargets.excess` of the simulation."""
    distance: float = 0.0
    """From the present settings."""
    live: dict[str, Any] | None = None
    live_excess: float = float("inf")

    @property
    def is_enough(self) -> bool:
        """Whether the simulation meets the targets with some room."""
        return self.excess <= ROOM

    @property
    def rank(self) -> tuple[float, float, float]:
        """Smaller is better: first those that meet the targets with some room, by how little they
        change; then the others, by how little they miss."""
        # Who meets them serves all that comes, so throughput tells nothing. And the last tenth
        # decides nothing: no simulation is that exact.
        room = max(ROOM, self.excess)
        speed: float = self.simulated["output_throughput"]
        return (room, self.distance if room <= ROOM else 0.0, -speed)


def distance(settings: dict[str, Any], base: dict[str, Any]) -> float:
    """How far settings are from others: a doubling counts as much as another policy."""
    far = 0.0
    for name, value in settings.items():
        if isinstance(value, int):
            far += abs(math.log2(max(1, value) / max(1, base[name])))
        else:
            far += value != base[name]
    return far


def current(config: EngineConfig) -> dict[str, Any]:
    """The settings that a configuration has."""
    return {name: getattr(config.scheduler, name) for name in LIVE_LIMITS}


def candidates(config: EngineConfig) -> Iterator[dict[str, Any]]:
    """The first round: budgets and seats."""
    base = current(config)
    for budget in sorted({*BUDGETS, base["max_num_batched_tokens"]}):
        for seats in sorted({*SEATS, base["max_num_seqs"]}):
            if seats <= budget and seats <= config.scheduler.max_num_seqs:
                yield base | {"max_num_batched_tokens": budget, "max_num_seqs": seats}


def variations(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The second round: who goes first, and how much of a long prompt."""
    for policy in POLICIES:
        for threshold in THRESHOLDS:
            if threshold < settings["max_num_batched_tokens"]:
                yield settings | {
                    "scheduling_policy": policy,
                    "long_prefill_token_threshold": threshold,
                }


def tune(
    config: EngineConfig,
    simulate: Simulate,
    targets: LatencyTargets,
    play: Callable[[Sequence[Trial]], None],
    live: int,
    tell: Callable[[str], None],
) -> tuple[Trial, list[Trial]]:
    """Look for settings that meet targets, if the present ones do not.

    Args:
        config: Resolved.
        simulate: Runs the trace on the simulator.
        targets: To meet.
        play: Runs its busiest part on a live engine with the settings of each trial.
        live: How many settings other than the present ones it is to run; 0: no live engine.
        tell: Hears what was found.

    Returns:
        The present settings, and the best others; none, if the present ones are enough.
    """
    own = present(config, simulate, targets)
    if own.is_enough:
        if live:
            play([own])
        if not live or own.live_excess <= 1:
            tell("the present settings meet the targets: no others are tried")
            return own, []
        tell("the present settings meet the targets in the simulation only: others are tried")
    best = search(config, own, simulate, targets)[: live or 1]
    if live:
        play(best if own.live else [own, *best])
    return own, best


def present(config: EngineConfig, simulate: Simulate, targets: LatencyTargets) -> Trial:
    """The settings that a configuration has, on the simulator."""
    own = current(config)
    (result,) = simulate("simulating the present settings", [config])
    return Trial(own, result, targets.excess(result))


def search(
    config: EngineConfig, own: Trial, simulate: Simulate, targets: LatencyTargets
) -> list[Trial]:
    """Try other settings on the simulator.

    Args:
        config: Resolved.
        own: Its settings.
        simulate: Runs the trace.
        targets: To meet.

    Returns:
        The trials, the best first.
    """
    tried: dict[tuple[Any, ...], Trial] = {tuple(own.settings.values()): own}

    def attempt(what: str, all_settings: Iterable[dict[str, Any]]) -> None:
        fresh = {tuple(each.values()): each for each in all_settings}
        todo = {key: each for key, each in fresh.items() if key not in tried}
        results = simulate(what, [with_settings(config, each) for each in todo.values()])
        for (key, each), result in zip(todo.items(), results, strict=True):
            tried[key] = Trial(each, result, targets.excess(result), distance(each, own.settings))

    attempt("simulating budgets and seats", candidates(config))
    best = sorted(tried.values(), key=lambda trial: trial.rank)[:KEPT]
    attempt(
        "simulating policies and limits on long prompts",
        [varied for trial in best for varied in variations(trial.settings)],
    )
    _, *others = tried.values()
    return sorted(others, key=lambda trial: trial.rank)


def busiest(requests: Sequence[TraceRequest], seconds: float) -> list[TraceRequest]:
    """The requests of those seconds in which the most tokens come, prompts and outputs.

    Args:
        requests: As they came.
        seconds: How long; all of a shorter trace.

    Returns:
        They, the first at 0.
    """
    tokens = end = most = 0
    best = slice(0)
    for begin, first in enumerate(requests):
        while end < len(requests) and requests[end].arrival - first.arrival <= seconds:
            tokens += requests[end].prompt_len + requests[end].output_len
            end += 1
        if tokens > most:
            most, best = tokens, slice(begin, end)
        tokens -= first.prompt_len + first.output_len
    kept = requests[best]
    return [structs.replace(one, arrival=one.arrival - kept[0].arrival) for one in kept]


async def verify(
    config: EngineConfig,
    trials: Sequence[Trial],
    requests: Sequence[TraceRequest],
    trace: Trace,
    targets: LatencyTargets,
    tell: Callable[[str], None],
) -> None:
    """Play requests on a live engine with the settings of each trial, and note the results in them.

    Raises:
        StartupError: the engine cannot start.
    """
    llm = await AsyncLLM.start(replace(config))
    try:
        await llm.wait_ready()
        shape = config.model.read_shape()
        sequences = Sequences(trace.requests, trace.header.block_size, shape.vocab_size)
        await play(llm, [TraceRequest(0.0, 32, 8)] * 2, sequences, "warm-up")
        for index, trial in enumerate(trials):
            tell(f"live {index + 1} of {len(trials)}: {changed(trial.settings, config)}")
            await llm.set_limits(**trial.settings)
            if not await llm.reset_prefix_cache():
                raise ConfigError("the prefix cache could not be reset between two runs")
            records = await play(llm, requests, sequences, f"tune-{index}")
            trial.live = result_of(records, targets)
            trial.live_excess = targets.excess(trial.live)
    finally:
        await llm.shutdown()


def result_of(records: Sequence[RequestRecord], targets: LatencyTargets) -> dict[str, Any]:
    """All figures of a run."""
    ends = [record.end for record in records if record.end is not None]
    duration = max(ends, default=0.0) - min((r.start for r in records), default=0.0)
    return summary(records, duration, percentiles=targets.percentiles)


def changed(settings: dict[str, Any], config: EngineConfig) -> str:
    """Settings that differ from those of a configuration, for people."""
    base = current(config)
    words = [f"{name}={value}" for name, value in settings.items() if base[name] != value]
    return " ".join(words) or "as they are"
