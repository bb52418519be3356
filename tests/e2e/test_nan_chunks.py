"""A prompt's chunk that computes NaN leaves nothing in the prefix cache, whatever becomes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from late_executor import LateExecutor
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import EngineCoreRequest
from quire.executor.base import make_executor
from quire.params import PoolingParams, SamplingParams
from quire.worker.forward_pass import PagedForward

PROMPT = [100 + k % 150 for k in range(200)]
CHUNK = 64


def engine(**options: Any) -> LLMEngine:
    given = {"max_num_batched_tokens": CHUNK, "kv_cache_memory_bytes": 2**24} | options
    return LLMEngine(EngineConfig.from_options(disable_log_stats=True, **given))


def run(made: LLMEngine, name: str, params: SamplingParams | PoolingParams) -> Any:
    """The last output of a request with the prompt."""
    made.add_request(name, {"prompt_token_ids": PROMPT}, params)
    while True:
        for output in made.step():
            if output.request_id == name and output.finished:
                return output


def spoil(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Have the forward pass write `value` into the keys and values of a request's first tokens, and
    into the states of all tokens that see them."""
    forward = PagedForward.__call__

    def spoiled(self: Any, inputs: Any, every_token: bool) -> Any:
        hidden = forward(self, inputs, every_token)
        for cache in self._kv_caches:
            for tensor in cache:
                tensor.flatten(0, 1)[inputs.slot_mappings[0][:8]] = value
        hidden[:] = value
        return hidden

    monkeypatch.setattr(PagedForward, "__call__", spoiled)


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
KINDS = {
    "plain": ({}, GREEDY),
    "prompt logprobs": ({}, GREEDY.replace(prompt_logprobs=1)),
    "pooling": ({"runner": "pooling"}, PoolingParams()),
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_whose_chunk_was_not_finite_is_computed_anew(
    kind: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, params = KINDS[kind]
    made = engine(**options)
    with monkeypatch.context() as patched:
        spoil(patched, value)
        made.add_request("bad", {"prompt_token_ids": PROMPT}, params)
        outputs = made.step()
        made.abort_request(["bad"])
    assert [o.request_id for o in outputs if o.finished] == ["bad"], "it fails at that chunk"
    assert "numerical:" in str(outputs[-1].error)
    good = run(made, "good", params)
    assert good.error is None and good.num_cached_tokens in (0, None)
    expected = run(engine(enable_prefix_caching=False, **options), "good", params)
    assert good.outputs == expected.outputs and good.pooled == expected.pooled
    assert good.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("depth", [2, 3])
def test_nor_does_it_if_its_request_is_aborted_with_the_chunk_in_flight(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.from_options(
        max_num_batched_tokens=CHUNK, kv_cache_memory_bytes=2**24, disable_log_stats=True
    )
    shape = config.model.read_shape()
    inner = make_executor(config.resolve(shape)[0], shape)
    executor = LateExecutor(inner, depth, seed=1)
    executor.eager = 0.0
    core = EngineCore(config, executor=executor)

    def ask(name: str) -> None:
        core.add_request(EngineCoreRequest(name, name, 0, PROMPT, GREEDY.replace(seed=1), 0.0))

    with monkeypatch.context() as patched:
        spoil(patched, math.nan)
        ask("bad")
        core.step()  # the first chunk, with the next ones in flight
        assert core.scheduler.num_in_flight == 0, "it failed, and all was taken back"
        ask("worse")
        scheduled = core.scheduler.num_changes
        with core._change():
            core._submit()
        assert core.scheduler.num_changes > scheduled and core.scheduler.num_in_flight == 1
        core.abort_requests(["worse"])
        while core.has_requests:
            core.step()
    tokens: list[int] = []
    ask("good")
    while core.has_requests:
        for output in core.step()[0]:
            assert output.error is None and output.num_cached_tokens == 0
            tokens += output.new_token_ids
    (expected,) = run(engine(enable_prefix_caching=False), "good", GREEDY).outputs
    assert tokens == list(expected.token_ids)
    core.shutdown()


def test_chunks_that_are_finite_stay_in_the_prefix_cache() -> None:
    made = engine()
    made.add_request("left", {"prompt_token_ids": PROMPT}, GREEDY)
    made.step()
    made.abort_request(["left"])
    good = run(made, "good", GREEDY)
    assert good.num_cached_tokens == CHUNK
    assert good.outputs == run(engine(enable_prefix_caching=False), "good", GREEDY).outputs
