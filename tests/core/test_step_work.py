"""What a step costs per running request, counted: lines, calls and objects, not seconds."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from quire.config.scheduler import SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.params import SamplingParams

PROMPT = 20
BLOCK = 64


class Decoding:
    """So many requests, all decoding and far from the end of their blocks."""

    def __init__(self, running: int) -> None:
        kv = KVCacheManager(2 * running + 1, BLOCK, max_model_len=1024)
        limits = SchedulerConfig(max_num_batched_tokens=running * PROMPT, max_num_seqs=running)
        self.scheduler = Scheduler(limits, kv, max_model_len=1024)
        self.names = [f"request-{i}" for i in range(running)]
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        for index, name in enumerate(self.names):
            prompt = [index % 2000, index // 2000, *range(PROMPT - 2)]
            self.scheduler.add_request(Request(name, prompt, params))
        for _ in range(3):
            self.step(self.result())

    def result(self) -> BatchResult:
        return BatchResult({name: [7] for name in self.names})

    def step(self, result: BatchResult) -> tuple[object, ...]:
        """All that the engine core asks of the scheduler in a step, and what it gets."""
        self.scheduler.begin()
        batch = self.scheduler.schedule()
        outputs = self.scheduler.update(batch, result)
        stats = self.scheduler.make_stats(batch, result, outputs)
        change = self.scheduler.books.change
        self.scheduler.commit()
        assert len(outputs) == len(self.names) == len(self.scheduler.running)
        return batch, outputs, stats, change


def count_work(running: int) -> Counter[str]:
    """Lines and calls of Python in one quiet step."""
    decoding = Decoding(running)
    result, seen = decoding.result(), Counter[str]()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        seen[event] += 1
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        decoding.step(result)
    finally:
        sys.settrace(before)
    return seen


def test_a_quiet_decode_costs_the_same_however_many_run() -> None:
    few, more, many = (count_work(n) for n in (16, 64, 256))
    assert few["call"] == more["call"] == many["call"], "a call for every running request"
    each = (more["line"] - few["line"]) / 48
    assert (many["line"] - more["line"]) / 192 == each, "the work per request grows"
    assert each <= 30, "a quiet decode is a walk through two short loops"


@pytest.mark.parametrize("running", [512])
def test_a_quiet_decode_makes_nothing_for_the_collector(running: int) -> None:
    """Its runs would cost more than the rest of a step: each looks through all that is new."""
    decoding = Decoding(running)
    result = decoding.result()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        gc.collect()
        before = gc.get_count()[0]
        kept = decoding.step(result)
        made = gc.get_count()[0] - before
    finally:
        if was_enabled:
            gc.enable()
    assert kept and made < running / 4, "an object for every running request"
