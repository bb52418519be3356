"""The first promise: a request's tokens and log-probabilities do not depend on what else runs,
on chunking, on prefix hits or on preemption. Bits are compared."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mixed import facts, mixed_requests
from quire import LLM, SamplingParams

REQUESTS = mixed_requests(64)
SWAP = {
    "num_gpu_blocks_override": 24,
    "max_model_len": 256,
    "swap_space": 0.1,
    "preemption_mode": "swap",
}


def run(llm: LLM, requests: list[dict[str, Any]]) -> list[Any]:
    """All at once."""
    outputs = llm.generate(
        [r["prompt"] for r in requests],
        [SamplingParams(**r["params"]) for r in requests],
        use_tqdm=False,
    )
    return [facts(o) for o in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 2048},
        {"max_num_batched_tokens": 2048, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False, "block_size": 8},
        {"max_num_batched_tokens": 100, "block_size": 64, "max_num_seqs": 7},
        {"num_gpu_blocks_override": 24, "max_model_len": 256, "max_num_batched_tokens": 64},
        {
            "num_gpu_blocks_override": 24,
            "max_model_len": 256,
            "enable_prefix_caching": False,
        },
        SWAP,
        {**SWAP, "enable_prefix_caching": False, "swap_dir": "/tmp"},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_together_as_alone(alone_facts: list[Any], options: dict[str, Any]) -> None:
    with LLM(disable_log_stats=False, **options) as llm:
        together = run(llm, REQUESTS)
        scheduler = llm.llm_engine.core.scheduler
        scheduler.check_integrity()
        assert scheduler.kv.usage == 0.0
        values = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    for request, got, expected in zip(REQUESTS, together, alone_facts, strict=True):
        assert got == expected, f"{request} differs under {options}"
    if "num_gpu_blocks_override" in options:
        assert values["vllm:num_preemptions"] > 0, "the pool was meant to be too small"
    if "swap_space" in options:
        assert values["vllm:kv_blocks_swapped_in"] > 0, "the tier was meant to be used"


def test_a_full_disk_costs_only_time(
    alone_facts: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from quire.worker import kv_transfer

    monkeypatch.setattr(
        kv_transfer, "_nameless_file", lambda folder: os.open("/dev/full", os.O_RDWR)
    )
    with LLM(disable_log_stats=False, **SWAP, swap_dir="/tmp") as llm:
        together = run(llm, REQUESTS)
        llm.llm_engine.core.scheduler.check_integrity()
        failures = [m.value for m in llm.get_metrics() if m.name == "vllm:kv_swap_failures"]
    assert together == alone_facts
    assert failures[0] > 0
    assert len([r for r in caplog.records if "No space left" in r.message]) == 1
    assert len([r for r in caplog.records if "second KV tier cannot be written" in r.message]) == 1


def test_a_second_run_hits_the_cache_and_gives_the_same(alone_facts: list[Any]) -> None:
    with LLM() as llm:
        run(llm, REQUESTS)
        outputs = llm.generate([r["prompt"] for r in REQUESTS], use_tqdm=False)
        assert sum(o.num_cached_tokens for o in outputs) > 1000
        assert run(llm, REQUESTS) == alone_facts


def test_a_reported_seed_repeats_an_unseeded_request() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, n=3)
    with LLM() as llm:
        first, other = llm.generate(["Once upon a time"] * 2, params, use_tqdm=False)
        assert first.seed != other.seed
        (again,) = llm.generate(
            ["Once upon a time"], params.replace(seed=first.seed), use_tqdm=False
        )
    assert facts(again) == facts(first)
    assert facts(other) != facts(first)
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3


def test_nine_tokens_repeated_are_found_and_a_miss_is_explained() -> None:
    """The documents' demonstration of prefix reuse, with a prompt shorter than a block."""
    prompt = list(range(300, 309))
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(3)]
        answer = llm.explain_prefix([*prompt[:6], 999, 999])
    assert [o.num_cached_tokens for o in outputs] == [0, 8, 8]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert (answer["num_cached_tokens"], answer["first_difference"]) == (6, 6)
    assert (answer["cached_token_id"], answer["given_token_id"]) == (306, 999)
