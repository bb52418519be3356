"""Limits through the engine: the control verb, the API process's copy, the door of a server."""

from __future__ import annotations

import asyncio

import pytest

from fake_executor import FakeExecutor
from patience import PATIENCE
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, InvalidRequest, NotFound, QuireError, TooManyRequests
from quire.params import SamplingParams


def make_core(**options: object) -> EngineCore:
    return EngineCore(EngineConfig.from_options(**options), executor=FakeExecutor(lambda p, n: 7))


def add(core: EngineCore, name: str, length: int, client: str = "") -> None:
    params = SamplingParams(max_tokens=3, seed=1)
    core.add_request(EngineCoreRequest(name, name, 0, [5] * length, params, 0.0, client=client))


def test_the_verb_changes_limits_while_requests_run() -> None:
    core = make_core(max_num_seqs=1)
    for name, length in (("a", 5), ("b", 40), ("c", 3)):
        add(core, name, length)
    core.step()
    assert core.call("set_limits", {"scheduling_policy": "sjf", "max_num_seqs": 2}) == {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 2048,
        "scheduling_policy": "sjf",
        "long_prefill_token_threshold": 0,
    }
    outputs, stats = core.step()
    assert [o.request_id for o in outputs] == ["a", "c"]
    assert stats.num_waiting == 1


def test_what_was_settled_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        make_core(max_num_seqs=64, max_num_batched_tokens=32)
    assert "max_model_len = 2048 (from the model's config)" in caplog.messages
    why = "each running request needs a token of --max-num-batched-tokens"
    assert f"max_num_seqs = 32 ({why})" in caplog.messages


@pytest.mark.parametrize("limits", [{"max_num_seqs": 0}, {"block_size": 8}, {"max_num_seqs": None}])
def test_the_verb_refuses_bad_limits(limits: dict[str, object]) -> None:
    core = make_core()
    before = core.scheduler.config
    with pytest.raises(InvalidRequest):
        core.call("set_limits", limits)
    assert core.scheduler.config is before


def test_the_client_reaches_the_scheduler() -> None:
    core = make_core(scheduling_policy="fair", max_num_seqs=1)
    for i in range(3):
        add(core, f"loud{i}", 600, "loud")
    add(core, "quiet", 600, "quiet")
    order: list[str] = []
    while core.has_requests:
        outputs, _ = core.step()
        order += [o.request_id for o in outputs if o.finish_reason]
    assert order.index("quiet") == 1


def test_a_bad_policy_class_is_refused_before_the_model_is_loaded() -> None:
    class Unloadable(FakeExecutor):
        def start(self, progress: object = None) -> object:  # type: ignore[override]
            raise AssertionError("the model was loaded")

    config = EngineConfig.from_options(scheduler_cls="json:JSONDecoder")
    with pytest.raises(ConfigError, match="is not a subclass of quire.core.policies.Policy"):
        EngineCore(config, executor=Unloadable(lambda p, n: 7))


async def test_a_server_engine_refuses_at_its_limit_and_follows_changes() -> None:
    config = EngineConfig.from_options(max_num_seqs=1, max_num_queued_reqs=1)
    async with await AsyncLLM.start(config) as engine:
        await engine.wait_ready()
        params = SamplingParams(max_tokens=1900, ignore_eos=True)  # longer than what follows takes
        streams = [await engine.submit("One", params, f"r{i}") for i in range(2)]
        with pytest.raises(TooManyRequests, match="1 requests wait"):
            await engine.submit("Two", params, "r2")
        assert b'reason="max_num_queued_reqs"} 1.0' in engine.metrics_text()
        with pytest.raises(QuireError, match="--max-num-seqs must be at least 1, got 0"):
            await engine.set_limits(max_num_seqs=0)
        limits = await engine.set_limits(max_num_seqs=2, scheduling_policy="priority")
        assert limits["max_num_seqs"] == 2
        assert engine.config.scheduler.scheduling_policy == "priority"
        signals = engine.question().signals(60.0)
        assert (signals["steps"], signals["seen_since"]) == (0, "limits"), "what was before is over"
        await anext(streams[1])  # it has been admitted: nobody waits any more
        short = SamplingParams(max_tokens=20, ignore_eos=True)
        streams.append(await engine.submit("Two", short, "r2"))
        await streams[1].aclose()
        assert await last_length(streams[2]) == 20
        assert engine.frontend.records.snapshot().row(-1).api_wait_seconds >= 0
        await streams[0].aclose()
        assert not engine.num_unfinished
        engine.check_integrity()


async def test_priorities_change_while_requests_wait() -> None:
    config = EngineConfig.from_options(max_num_seqs=1, scheduling_policy="priority")
    async with await AsyncLLM.start(config) as engine:
        await engine.wait_ready()
        long = SamplingParams(max_tokens=1900, ignore_eos=True)
        ends: list[str] = []

        async def run(name: str, priority: int) -> None:
            params = long if name == "first" else SamplingParams(max_tokens=2, ignore_eos=True)
            stream = await engine.submit("One", params, name, priority=priority)
            async for output in stream:
                if output.finished:
                    ends.append(name)

        tasks = [asyncio.create_task(run(n, p)) for n, p in (("first", 0), ("b", 1), ("c", 2))]
        async with asyncio.timeout(PATIENCE):
            while len(engine.frontend.journal.replay()) < 3:
                await asyncio.sleep(0.001)
        with pytest.raises(NotFound, match="no unfinished request has the id 'nobody'"):
            await engine.set_limits({"c": 0, "nobody": 0}, max_num_seqs=3)
        assert engine.config.scheduler.max_num_seqs == 1
        await engine.set_limits({"c": 0})
        assert engine.frontend.records.snapshot().limits_changed is None, "no limit has changed"
        assert [e.priority for e in engine.frontend.journal.replay()] == [0, 1, 0]
        await asyncio.gather(*tasks)
        assert ends == ["first", "c", "b"]


async def last_length(stream: object) -> int:
    async for output in stream:  # type: ignore[attr-defined]
        length = len(output.outputs[0].token_ids)
    return length


async def test_numbers_of_any_size_change_nothing_and_harm_nobody() -> None:
    config = EngineConfig.from_options(scheduling_policy="priority")
    async with await AsyncLLM.start(config) as engine:
        await engine.wait_ready()
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        stream = await engine.submit("One", params, "r", priority=2**63 - 1)
        await anext(stream)
        before = engine.config.scheduler
        for bad in (
            {"max_num_batched_tokens": 2**31}, {"max_num_batched_tokens": 10**30},
            {"max_num_seqs": 2**64}, {"max_num_seqs": True}, {"max_num_seqs": 2.0},
            {"long_prefill_token_threshold": 2**31}, {"priorities": {"r": 2**63}},
            {"priorities": {"r": 10**30}}, {"priorities": {"r": "1"}},
        ):  # fmt: skip
            name = next(iter(bad)).replace("priorities", "priority")
            with pytest.raises(InvalidRequest, match=name.replace("_", ".")):
                await engine.set_limits(**bad)  # type: ignore[arg-type]
        assert engine.config.scheduler == before
        widest = {"max_num_batched_tokens": 2**31 - 1, "max_num_seqs": 2**20}
        told = await engine.set_limits({"r": -(2**63)}, **widest)
        assert widest.items() <= told.items()
        assert await last_length(stream) == 20
