"""The real scheduler on a simulated clock, with its records: what happened is known exactly."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from quire.config.scheduler import SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request, RequestStatus
from quire.core.scheduler import Scheduler
from quire.core.stats import FinishedRequestStats, IterationStats
from quire.observability.explain.assemble import explain
from quire.observability.explain.explanation import Explanation
from quire.observability.recorder.ring import StepRecords
from quire.params import SamplingParams
from quire.utils.timing import ManualClock


def cost(tokens: int) -> float:
    """Seconds of the forward pass: a fixed part, then 0.1 ms per token."""
    return 0.005 + 1e-4 * tokens


class Rig:
    """An engine without a model."""

    def __init__(
        self,
        num_blocks: int = 1000,
        budget: int = 2048,
        seqs: int = 64,
        caching: bool = False,
        steps: int = 4096,
        seconds: Callable[[int], float] = cost,
        **config: object,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs, **config)  # type: ignore[arg-type]
        self.num_blocks, self.caching, self.seconds = num_blocks, caching, seconds
        self.records = StepRecords(steps)
        self.arrivals: dict[str, float] = {}
        self.ends: dict[str, float] = {}
        self.worked: dict[str, list[float]] = {}
        """By internal id: seconds of the steps that the request was in."""
        self.epoch = 0
        self.start_core()

    def start_core(self) -> None:
        """A new core; requests of the one before are gone, as when it dies."""
        self.epoch += 1
        self.records.begin_core(self.epoch)
        kv = KVCacheManager(self.num_blocks, 16, self.caching, 8192)
        self.scheduler = Scheduler(self.config, kv, max_model_len=8192, clock=self.clock)

    def add(
        self,
        name: str,
        prompt: int | list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        outputs: list[int] | None = None,
        intake: float = 0.0003,
        compiles: bool = False,
        arrival: float | None = None,
    ) -> str:
        """Queue a request that arrived now, or at `arrival`, before; its internal id."""
        ids = list(range(prompt)) if isinstance(prompt, int) else prompt
        if isinstance(prompt, int):
            ids = [crc32(name.encode()) % 1000 + i for i in ids]
        internal = f"{name}-0000000a"
        if internal not in self.arrivals:
            self.arrivals[internal] = self.clock.now() if arrival is None else arrival
            self.records.accept(name, 0, internal, self.arrivals[internal])
        self.clock.advance(intake)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(
            internal, ids, params, arrival_time=self.arrivals[internal], priority=priority,
            output_token_ids=outputs,
        )  # fmt: skip
        if compiles:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.scheduler.add_request(request)
        return internal

    def step(
        self,
        delivery: float = 0.0002,
        drafts: int = 0,
        starved: float | None = None,
        pause: float | None = None,
    ) -> None:
        """One step.

        Args:
            delivery: Seconds after it.
            drafts: Tokens.
            starved: Seconds in which it had no core; None: nobody reads that.
            pause: Seconds before it, all of them waiting for a core.
        """
        self.clock.advance(pause or 0.0)
        start = self.clock.now()
        batch = self.scheduler.schedule()
        self.clock.advance(1e-4)
        forward = self.seconds(batch.total_num_scheduled_tokens)
        self.clock.advance(forward + (starved or 0.0))
        sampled, guesses = {}, {}
        for name in batch.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            tried = len(batch.scheduled_spec_tokens.get(name, ()))
            if request.num_computed_tokens == request.num_tokens + tried:
                sampled[name] = [7] * (1 + tried // 2)
                if drafts:
                    guesses[name] = [7] * drafts
        result = BatchResult(sampled, draft_token_ids=guesses, forward_seconds=forward)
        outputs = self.scheduler.update(batch, result)
        self.clock.advance(5e-5)
        stats = self.scheduler.make_stats(batch, result, outputs)
        stats.schedule_seconds, stats.update_seconds = 1e-4, 5e-5
        stats.step_seconds = self.clock.now() - start
        stats.cpu_wait_seconds, stats.gap_wait_seconds = starved, pause
        for name in batch.num_scheduled_tokens:
            self.worked.setdefault(name, []).append(stats.step_seconds)
        self.clock.advance(delivery)
        ended = [o.request_id for o in outputs if o.finish_reason is not None]
        self.records.record(stats, self._ended(ended, "length"))

    def abort(self, name: str) -> None:
        """End a request from outside, as the frontend does."""
        internal = f"{name}-0000000a"
        if internal in self.scheduler.requests:
            self.records.record(None, self._ended([internal], "abort"))
            self.clock.advance(0.0001)
            self.scheduler.finish_requests([internal], RequestStatus.FINISHED_ABORTED)

    def _ended(self, names: list[str], reason: str) -> IterationStats:
        now = self.clock.now()
        self.ends |= dict.fromkeys(names, now)
        return IterationStats(
            finished=[
                FinishedRequestStats(
                    reason, now - self.arrivals[n], 0, 0, 0, 0, 1, 1, 0, 0, 1, 4, request_id=n
                )
                for n in names
            ]
        )

    def drain(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.requests:
                return
            self.step()
        raise AssertionError("requests never finished")

    def explain(self, name: str) -> Explanation:
        internal = f"{name}-0000000a"
        now = None if internal in self.ends else self.clock.now()
        told = explain(self.records.snapshot(), internal, now=now)
        assert told is not None
        return told

    def part(self, name: str, cause: str, reason: str | None = None):  # type: ignore[no-untyped-def]
        """The one part of a cause."""
        found = [p for p in self.explain(name).parts if p.cause == cause and p.reason == reason]
        assert len(found) == 1, [(p.cause, p.reason, p.text) for p in self.explain(name).parts]
        return found[0]
