"""Tokens and log-probabilities of a request are the same through the whole engine: alone, in a
batch, after prefix hits, after preemptions, in small pieces, with one thread or two."""

import random

import pytest

from quire import LLM, SamplingParams
from quire.kernels import compiled

WAYS = {
    "whole": {"max_num_batched_tokens": 2048},
    "pieces": {"max_num_batched_tokens": 24, "block_size": 8, "enable_prefix_caching": False},
    "large blocks": {"max_num_batched_tokens": 100, "block_size": 64, "max_num_seqs": 5},
    "preempted": {
        "num_gpu_blocks_override": 24,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
    },
}
"""How a request is computed."""
SWAPPED = WAYS["preempted"] | {"swap_space": 0.05, "preemption_mode": "swap"}


def requests(count):
    rng = random.Random(3)
    start = [rng.randrange(3, 2000) for _ in range(48)]
    for i in range(count):
        shared = start[: rng.choice([0, 0, 20, 48])]
        prompt = shared + [rng.randrange(3, 2000) for _ in range(rng.choice([1, 9, 30, 70]))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 40]),
            seed=i,
            max_tokens=rng.choice([4, 20, 40]),
            ignore_eos=True,
            logprobs=3,
        )
        yield {"prompt_token_ids": prompt}, params


def facts(output):
    answer = output.outputs[0]
    entries = [
        sorted((token, entry.logprob, entry.rank) for token, entry in place.items())
        for place in answer.logprobs
    ]
    return list(answer.token_ids), entries


def run(llm, jobs):
    prompts, params = zip(*jobs, strict=True)
    return [facts(o) for o in llm.generate(list(prompts), list(params), use_tqdm=False)]


WEIGHTS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""How weights are kept."""


def run_alone(options):
    jobs = list(requests(12))
    with LLM(**options, enable_prefix_caching=False) as llm:
        compiled.lib.set_num_threads(1, [])
        return jobs, [run(llm, [job])[0] for job in jobs]


@pytest.fixture(scope="module", params=WEIGHTS)
def weights(request, isa):
    if request.param.startswith("int") and isa not in (compiled.available_isas()[0], "avx2"):
        pytest.skip("tests/kernels compares the products of codes on the other ones")
    return WEIGHTS[request.param]


@pytest.fixture(scope="module")
def alone(isa, weights):
    return run_alone(weights)


@pytest.mark.parametrize("way", WAYS)
def test_together_as_alone(isa, weights, alone, way):
    if isa != compiled.available_isas()[0] and way not in ("pieces", "preempted"):
        pytest.skip("all ways are taken on the best instruction set")
    jobs, want = alone
    with LLM(**weights, disable_log_stats=False, **WAYS[way]) as llm:
        compiled.lib.set_num_threads(2, [])
        assert run(llm, jobs) == want
        # Once more: now prompts are found in the cache.
        assert run(llm, jobs[::-1]) == want[::-1]
        preemptions = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert (preemptions > 0) == (way == "preempted")


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_with_keys_and_values_of_one_byte(isa, kind):
    options = {"dtype": "bfloat16", "kv_cache_dtype": kind}
    jobs, want = run_alone(options)
    for way in (WAYS["pieces"], WAYS["whole"], SWAPPED):
        with LLM(**options, **way) as llm:
            compiled.lib.set_num_threads(2, [])
            assert run(llm, jobs) == want
            assert run(llm, jobs[::-1]) == want[::-1]
        if isa != compiled.available_isas()[0]:
            return
