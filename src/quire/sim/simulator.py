"""Runs a trace on the real scheduler, on a clock that is set ahead by what each step would take.

`Scheduler` and `KVCacheManager` are the engine's own (`quire.core.build`); only the executor is
replaced, by one that gives every request as many tokens as the trace says. Knows no model and no
text.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from quire.config import EngineConfig
from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.build import build_scheduler
from quire.core.request import Request, RequestStatus
from quire.core.stats import StepStats
from quire.params import SamplingParams
from quire.sim.sequences import Sequences
from quire.sim.step_time import StepShape, StepTimeModel, Succession
from quire.utils.timing import ManualClock
from quire.workload.trace import TraceRequest

OWN_TOKENS: Final = 2**31
"""Ids from here on are outputs that are like no other; `Sequences` makes smaller ones."""
GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""Multiples of it, without their whole parts, lie as evenly over 0 to 1 as any (H. Weyl, 1916)."""
IDLE_SECONDS: Final = 0.001
"""How far the clock is set ahead after a step with nothing in it."""
KEPT_PARAMS: Final = ("prompt_logprobs", "skip_reading_prefix_cache")
"""Sampling parameters that the scheduler's decisions depend on."""
MOST_PARAMS: Final = 4096
"""Different parameters that are kept, so that requests may share them."""


def kept_params(traced: TraceRequest) -> dict[str, Any]:
    """Those of a request."""
    return {name: traced.params[name] for name in KEPT_PARAMS if name in traced.params}


@dataclass(frozen=True, slots=True)
class Pool:
    """Sizes of the KV cache, as `quire.core.build.Sizes` wants them."""

    num_blocks: int
    kv_windows: tuple[int | None, ...] = (None,)
    num_swap_blocks: int = 0


@dataclass(slots=True)
class SimulatedRun:
    """What became of each request, in the order of their arrival. Seconds since the trace began."""

    arrivals: array[float] = field(default_factory=lambda: array("d"))
    first_tokens: array[float] = field(default_factory=lambda: array("d"))
    """When the caller had it; NaN if there was none."""
    ends: array[float] = field(default_factory=lambda: array("d"))
    prompt_lens: array[int] = field(default_factory=lambda: array("Q"))
    output_lens: array[int] = field(default_factory=lambda: array("Q"))
    cached_tokens: array[int] = field(default_factory=lambda: array("Q"))
    """Of the prompt, found in the prefix cache."""
    token_times: list[array[float]] = field(default_factory=list)
    """Of each request, when the caller had each token; empty unless asked for."""
    num_steps: int = 0
    num_preemptions: int = 0
    busy_seconds: float = 0.0
    duration: float = 0.0
    """From the first arrival to the last token."""
    most_running: int = 0
    most_waiting: int = 0
    num_refused: int = 0
    """Requests whose prompt the engine would refuse, because it fits neither the context nor the KV
    cache. They are not in the lists."""

    def __len__(self) -> int:
        return len(self.arrivals)


class _Live:
    """A request that has not ended."""

    __slots__ = ("index", "output", "request", "tokens")

    def __init__(self, index: int, request: Request, tokens: list[int] | None) -> None:
        self.index = index
        self.request = request
        self.tokens = tokens
        # its output, if others share it
        self.output = [-1]
        # else the one token that it gets again and again


class ForcedTokens:
    """Stands for an executor: every request gets the tokens that the trace says."""

    def __init__(self) -> None:
        self.live: dict[str, _Live] = {}

    def run(self, batch: ScheduledBatch, several: Mapping[str, int] | None = None) -> BatchResult:
        """What the batch produces.

        Args:
            batch: To be run.
            several: How many tokens a request gets, where it is not one.
        """
        live, sampled = self.live, {}
        for name in batch.num_scheduled_tokens:
            one = live[name]
            request = one.request
            known = len(request.all_token_ids)
            if request.num_computed_tokens < known:
                continue  # a chunk of its prompt
            tokens = one.tokens
            if tokens is None:
                sampled[name] = one.output
            else:
                at = known - request.num_prompt_tokens
                sampled[name] = [tokens[at]] if at < len(tokens) else one.output
        for name in sampled.keys() & (several or {}):
            one, count = live[name], (several or {})[name]
            at = len(one.request.all_token_ids) - one.request.num_prompt_tokens
            more = (one.tokens or [])[at : at + count]
            sampled[name] = more + one.output * (count - len(more))
        return BatchResult(sampled)


class Simulator:
    """Runs traces.

    Args:
        config: Resolved, so `max_model_len` is settled.
        pool: The KV cache.
        times: How long steps take.
        keep_token_times: Keep when each token came, and not only the first and the last.
        observe: Called with the statistics of each step; for timelines.
        pace: How long a step takes that begins at a time, usually takes so many seconds and has so
            many prompts, and how long a pause does; `None`: the machine is always as `times` says.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: Pool,
        times: StepTimeModel,
        *,
        keep_token_times: bool = False,
        observe: Callable[[StepStats], None] | None = None,
        pace: Callable[[float, float, int], float] | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.scheduler = build_scheduler(config, pool, self.clock)
        self.times = times
        self.executor = ForcedTokens()
        self.succession = Succession()
        self.outcome = SimulatedRun()
        self._observe = observe
        self._pace = pace
        self._keeps = keep_token_times
        self._drawn = [0.0, 0.0]
        # where in their spreads the last steps without and with prompts were drawn
        self._seen = 0.0
        # when the tokens of the last step were with their callers
        self._params: dict[tuple[Any, ...], SamplingParams] = {}

    def run(self, requests: Iterable[TraceRequest], sequences: Sequences) -> SimulatedRun:
        """Run requests to their end.

        Args:
            requests: In the order of arrival. They are taken as they come, so a generator of a
                million need not be a list.
            sequences: Their tokens.
        """
        coming = self._arrivals(requests)
        following = next(coming, None)
        clock, scheduler, outcome = self.clock, self.scheduler, self.outcome
        first = following[0] if following else 0.0
        while following is not None or scheduler.requests:
            if not scheduler.requests and following is not None and following[0] > clock.now():
                clock.advance(following[0] - clock.now())
                clock.advance(self.times.overheads.waking(self.succession.forgotten(clock.now())))
            now, is_busy, is_first = clock.now(), bool(scheduler.requests), True
            while following is not None and following[0] <= now:
                if self.takes(following[1]):
                    self.add(following[1], sequences)
                    if is_busy:
                        clock.advance(self._takes(self.times.overheads.taking_in(is_first)))
                    is_first = False
                else:
                    outcome.num_refused += 1
                following = next(coming, None)
            outcome.most_waiting = max(outcome.most_waiting, len(scheduler.waiting))
            if scheduler.requests:
                self.step()
        outcome.duration = max(0.0, clock.now() - first)
        return outcome

    def run_closed(
        self, requests: Iterable[TraceRequest], users: int, sequences: Sequences
    ) -> SimulatedRun:
        """Run requests of users who each send their next one when they have all of the last.

        Args:
            requests: In the order in which they are sent; their arrival does not count.
            users: Who send one at a time.
            sequences: Their tokens.
        """
        coming = (one for one in requests if self.takes(one))
        scheduler, clock = self.scheduler, self.clock
        while True:
            lacking, is_busy = users - len(scheduler.requests), bool(scheduler.requests)
            for number, traced in enumerate(itertools.islice(coming, lacking)):
                self.add(msgspec.structs.replace(traced, arrival=clock.now()), sequences)
                if is_busy:
                    clock.advance(self._takes(self.times.overheads.taking_in(number == 0)))
            if not scheduler.requests:
                break
            self.step()
        self.outcome.duration = clock.now()
        return self.outcome

    def _arrivals(self, requests: Iterable[TraceRequest]) -> Iterator[tuple[float, TraceRequest]]:
        delay = self.times.overheads.arrival
        return ((request.arrival + delay, request) for request in requests)

    # ---- requests ----------------------------------------------------------------------------

    def takes(self, traced: TraceRequest) -> bool:
        """Whether the engine would take a request: its prompt and one token must fit."""
        books = self.scheduler.books
        return traced.prompt_len < min(books.max_model_len, books.kv.capacity_tokens)

    def add(
        self,
        traced: TraceRequest,
        sequences: Sequences,
        name: str | None = None,
        status: RequestStatus = RequestStatus.WAITING,
        *,
        endless: bool = False,
        came_with: int = 0,
    ) -> None:
        """Queue a request, now.

        Args:
            traced: The request.
            sequences: Its tokens.
            name: Its id; a new one if there is none.
            status: In which it comes.
            endless: It goes on until somebody ends it.
            came_with: Output tokens that it has already, of an engine that is gone.
        """
        outcome = self.outcome
        index = len(outcome)
        prompt, output = sequences.make(traced, came_with > 0)
        # Zero-padded: policies compare the ids of requests that came at the same time.
        request = Request(
            name or f"{index:09}",
            prompt,
            self.params_of(traced, endless),
            arrival_time=traced.arrival,
            priority=traced.priority,
            client=traced.key,
            cache_salt=traced.cache_salt or None,
            output_token_ids=(output or [])[:came_with],
        )
        request.status = status
        live = _Live(index, request, output)
        live.output = [OWN_TOKENS + index % OWN_TOKENS]
        self.executor.live[request.request_id] = live
        self.scheduler.add_request(request)
        outcome.arrivals.append(traced.arrival)
        outcome.first_tokens.append(float("nan"))
        outcome.ends.append(float("nan"))
        outcome.prompt_lens.append(traced.prompt_len)
        outcome.output_lens.append(0)
        outcome.cached_tokens.append(0)
        if self._keeps:
            outcome.token_times.append(array("d"))

    def params_of(self, traced: TraceRequest, endless: bool = False) -> SamplingParams:
        """Parameters under which a request ends after the tokens of the trace."""
        kept = kept_params(traced)
        most = None if endless else max(1, traced.output_len)
        key = (most, *sorted(kept.items()))
        found = self._params.get(key)
        if found is None:
            if len(self._params) >= MOST_PARAMS:
                self._params.clear()
            found = SamplingParams(max_tokens=most, ignore_eos=True, seed=0, **kept)
            self._params[key] = found
        return found

    # ---- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        """One step, and the pause after it."""
        scheduler, clock, outcome = self.scheduler, self.clock, self.outcome
        start = clock.now()
        batch = scheduler.schedule()
        result = self.executor.run(batch)
        shape = self.succession.shape_of(batch, start, len(result.sampled_token_ids))
        seconds = self._seconds(shape) if shape.tokens else 0.0
        result.forward_seconds = seconds
        clock.advance(seconds if shape.tokens else IDLE_SECONDS)
        self.apply(batch, result, start, shape.idle)
        if not scheduler.requests:
            self.succession.idle(clock.now())
        clock.advance(self._takes(self.times.overheads.pause(shape, 0)))
        outcome.busy_seconds += seconds
        if shape.rows > outcome.most_running:
            outcome.most_running = shape.rows

    def _seconds(self, shape: StepShape) -> float:
        seconds, times, kind = self.times.seconds(shape), self.times, min(shape.prefills, 1)
        spread = times.prompt_spread if kind else times.spread
        if spread:
            # Not at random: by these steps any few draws lie evenly over the spread, so that a
            # dozen long prompts take on average what they should. The same for all settings
            # compared.
            self._drawn[kind] = at = (self._drawn[kind] + GOLDEN) % 1.0
            seconds *= spread[int(at * len(spread))]
        return self._takes(seconds, shape.prefills)

    def _takes(self, usual: float, prefills: int = 0) -> float:
        """Seconds of what begins now: a step with so many prompts, or a pause, which is as much
        longer in a slow spell as decodes are (docs/simulator.md)."""
        return usual if self._pace is None else self._pace(self.clock.now(), usual, prefills)

    def apply(self, batch: ScheduledBatch, result: BatchResult, start: float, idle: float) -> None:
        """Apply a result, now, and note what the callers get.

        Args:
            batch: Of a step.
            result: Of it.
            start: When it began.
            idle: Of its `StepShape`.
        """
        scheduler, outcome, live = self.scheduler, self.outcome, self.executor.live
        outputs = scheduler.update(batch, result)
        now, overheads = self.clock.now(), self.times.overheads
        rows = len(batch.num_scheduled_tokens)
        # Tokens go the same way one after the other: none overtakes those of a larger step.
        seen = max(self._seen, now + overheads.delivery(rows, idle))
        self._seen = seen
        for output in outputs:
            one = live[output.request_id]
            request = one.request
            known = len(request.all_token_ids) - request.num_prompt_tokens
            if known == 1:
                outcome.first_tokens[one.index] = seen
                outcome.cached_tokens[one.index] = max(0, request.num_cached_tokens)
            if self._keeps:
                outcome.token_times[one.index].append(seen)
            if output.finish_reason is not None:
                outcome.ends[one.index] = seen
                outcome.output_lens[one.index] = known
                del live[output.request_id]
        outcome.num_steps += 1
        outcome.num_preemptions += len(batch.preempted_req_ids)
        if self._observe is None:
            scheduler.facts.take()  # nobody reads the records
            return
        stats = scheduler.make_stats(batch, result, outputs)
        stats.start, stats.step_seconds = start, now - start
        self._observe(stats)
