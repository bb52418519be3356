"""Helpers for scheduler tests: no torch, one line to make a scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import Phase, settings

from quire.config.scheduler import SchedulerConfig
from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.kv.manager import KVCacheManager
from quire.core.output import EngineCoreOutput
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.params import SamplingParams
from quire.utils.timing import ManualClock

if os.environ.get("QUIRE_TEST_NO_SHRINK"):
    # Only whether a test fails is asked, not by which smallest example.
    settings.register_profile("no-shrink", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("no-shrink")


class Bench:
    """A scheduler with a scripted worker: token `t` of request `r` is `next_token(r, t)`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.last: ScheduledBatch | None = None
        self.check_every = 1
        """Steps from one check of the books to the next."""
        self._steps = 0

    def add(
        self,
        request_id: str,
        prompt: list[int] | int,
        *,
        priority: int = 0,
        arrival: float = 0.0,
        salt: str | None = None,
        outputs: list[int] | None = None,
        client: str = "",
        **params: object,
    ) -> Request:
        ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        defaults: dict[str, object] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        request = Request(
            request_id,
            ids,
            SamplingParams(**{**defaults, **params}),  # type: ignore[arg-type]
            arrival_time=arrival,
            priority=priority,
            cache_salt=salt,
            output_token_ids=outputs,
            client=client,
        )
        self.scheduler.add_request(request)
        return request

    def step(
        self,
        next_token: Callable[[Request], int] = lambda r: 1000 + r.num_output_tokens,
        failed: dict[str, str] | None = None,
    ) -> list[EngineCoreOutput]:
        batch = self.last = self.scheduler.schedule()
        sampled = {}
        for request_id in batch.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            if request.num_computed_tokens == request.num_tokens:
                sampled[request_id] = [next_token(request)]
        failed = {i: why for i, why in (failed or {}).items() if i in batch.num_scheduled_tokens}
        for request_id in failed:
            sampled.pop(request_id, None)
        outputs = self.scheduler.update(batch, BatchResult(sampled, failed=failed))
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = str(output.finish_reason)
        self._steps += 1
        if self._steps % self.check_every == 0:
            self.scheduler.check_integrity()
        return outputs

    def wait(self, seconds: float) -> None:
        clock = self.scheduler.clock
        assert isinstance(clock, ManualClock)
        clock.advance(seconds)

    def drain(self) -> list[str]:
        """Run to the end; gives the ids in order of admission, each as often as admitted."""
        order: list[str] = []
        for _ in range(5000):
            if not self.scheduler.requests:
                return order
            self.step()
            assert self.last is not None
            order += [new.req_id for new in self.last.scheduled_new_reqs]
        raise AssertionError("requests never finished")

    @property
    def scheduled(self) -> dict[str, int]:
        assert self.last is not None
        return self.last.num_scheduled_tokens

    def blocks(self, request_id: str) -> list[int]:
        return next(iter(self.scheduler.kv.get_block_ids(request_id)), [])


@pytest.fixture
def make() -> Callable[..., Bench]:
    """`make(num_blocks=11, block_size=16, budget=..., ...)` gives a `Bench`."""

    def build(
        num_blocks: int = 1000,
        block_size: int = 16,
        budget: int = 2048,
        seqs: int = 128,
        caching: bool = True,
        max_model_len: int = 8192,
        swap_blocks: int = 0,
        **config: object,
    ) -> Bench:
        kv = KVCacheManager(
            num_blocks, block_size, caching, max_model_len, num_swap_blocks=swap_blocks
        )
        limits = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs, **config)  # type: ignore[arg-type]
        return Bench(Scheduler(limits, kv, max_model_len=max_model_len, clock=ManualClock()))

    return build
