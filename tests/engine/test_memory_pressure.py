"""When the machine's memory runs short, cached content that nobody holds goes, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fake_executor import FakeExecutor
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.memory_pressure import LONGEST_PAUSE, LOW, PAUSE, MemoryPressure
from quire.engine.messages import EngineCoreRequest
from quire.params import SamplingParams as Params
from quire.utils.timing import ManualClock


def test_looks_now_and_then_and_says_it_ever_less_often() -> None:
    left = LOW
    watch = MemoryPressure(lambda: left)
    assert watch.is_due(100.0) and watch.look(100.0) is None
    assert not watch.is_due(100.0 + PAUSE / 2) and watch.is_due(100.0 + PAUSE)
    left, now, pauses = LOW - 1, 200.0, []
    for _ in range(12):
        assert watch.look(now) == LOW - 1
        pause = next(n for n in itertools.count(1) if watch.is_due(now + n * PAUSE))
        pauses.append(pause * PAUSE)
        now += pauses[-1]
    assert pauses[:3] == [PAUSE, 2 * PAUSE, 4 * PAUSE] and pauses[-1] == LONGEST_PAUSE
    left = LOW
    assert watch.look(now) is None and watch.is_due(now + PAUSE)


class Machine(FakeExecutor):
    """Notes which blocks' memory is given back."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, n: prompt[n % len(prompt)])
        self.released: list[list[int]] = []

    def reset(self) -> None:
        self.known.clear()

    def release_memory(self, block_ids: list[int]) -> int:
        self.released.append(block_ids)
        return len(block_ids) * 4096


@pytest.fixture
def core() -> EngineCore:
    return EngineCore(EngineConfig.from_options(), executor=Machine(), clock=ManualClock())


def serve(core: EngineCore, name: str, length: int = 40) -> int:
    """Serves a prompt of its own kind; gives the tokens that it found in the cache."""
    prompt = [*range(5, 5 + length)]
    core.add_request(EngineCoreRequest(name, name, 0, prompt, Params(max_tokens=4, seed=1), 0.0))
    found = 0
    while core.has_requests:
        found += core.step()[1].prefix_hits
    return found


def test_what_nobody_holds_goes_and_what_runs_stays(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    machine, pool = core.executor, core.kv.block_pool
    assert isinstance(machine, Machine)
    assert serve(core, "first") == 0 and serve(core, "again") == 39
    prompt = [*range(1000, 1064)]
    long = EngineCoreRequest("long", "long", 0, prompt, Params(max_tokens=20, seed=1), 0.0)
    core.add_request(long)
    core.step()
    core._memory = MemoryPressure(lambda: 5 * 2**20)
    core.step()
    held = {b.block_id for b in pool.blocks if b.ref_cnt}
    (released,) = machine.released
    assert set(released) == set(range(1, pool.num_blocks)) - held and len(held) >= 5
    assert "only 5.0 MiB of memory are left" in caplog.text
    assert "dropped the cached content of 4 KV blocks" in caplog.text
    _, stats = core.step()
    assert stats.num_shed_blocks == 4 and core.step()[1].num_shed_blocks == 0
    while core.has_requests:
        tokens = machine.known["long"][1]
        core.step()
    core.scheduler.check_integrity()
    assert tokens == prompt[:20], "it ran on as if nothing had been"
    assert serve(core, "third") == 0, "it is gone"
    core._memory = MemoryPressure(lambda: LOW)
    assert serve(core, "fourth") == 39


def test_an_interrupted_drop_is_taken_back_or_done(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(core, "first", 100)
    pool, uncache, calls = core.kv.block_pool, core.kv.block_pool.uncache, itertools.count()

    def fails(block: Any) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        uncache(block)

    monkeypatch.setattr(pool, "uncache", fails)
    core._memory = MemoryPressure(lambda: 0)
    with pytest.raises(KeyboardInterrupt):
        serve(core, "second", 20)
    monkeypatch.undo()
    core.recover()
    core.scheduler.check_integrity()
    while core.has_requests:
        core.step()
    core.scheduler.check_integrity()


def test_a_failure_loses_no_output(
    core: EngineCore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(core.executor, "release_memory", fails)
    core._memory = MemoryPressure(lambda: 0)
    serve(core, "first")  # to its end
    assert "none could be given back" in caplog.text
    core.scheduler.check_integrity()


def test_the_same_tokens_with_hardly_any_memory() -> None:
    """The real cache's pages come and go under running requests."""
    llm = LLM(num_gpu_blocks_override=600, seed=3)
    prompts = [f"Once upon a time there were {n} small foxes" for n in range(8)] * 2
    params = SamplingParams(temperature=1, seed=7, max_tokens=60, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    watch = MemoryPressure(lambda: 0)
    watch.is_due = lambda now: True  # type: ignore[method-assign]
    core = llm.llm_engine.core
    core._memory = watch
    for _ in range(2):
        got = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        assert got == expected
    core.scheduler.check_integrity()
