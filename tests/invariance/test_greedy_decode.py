"""One token of each request, from the worker's memory to the likeliest next one in one native call:
the tokens and the cache of a forward pass and a head."""

import random

import numpy as np
import pytest
import torch

from paged_run import load, name_of
from quire import LLM, SamplingParams
from quire.attention.kv_cache import allocate_kv_cache
from quire.core.batch import ScheduledNewRequest
from quire.kernels import scopes
from quire.weights.dummy import random_checkpoint
from quire.worker.device import CpuDevice
from quire.worker.forward_pass import PagedForward
from quire.worker.input_batch import InputBatch

KINDS = {
    "tied": {"tie_word_embeddings": True},
    "apart": {"tie_word_embeddings": False},
    "odd sizes": {"hidden_size": 50, "head_dim": 10, "intermediate_size": 33, "vocab_size": 51},
    "window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 30,
    },
}
BLOCK, LONGEST = 16, 96


class Run:
    """Requests with prompts, all but the last token of each computed."""

    def __init__(self, model, prompts):
        self.model, self.ids = model, [f"r{i}" for i in range(len(prompts))]
        layers = model.kv_layers(model.shape)
        windows = {layer.window for layer in layers}
        self.batch = InputBatch(len(prompts), LONGEST, BLOCK, model.shape.vocab_size, [*windows])
        width = LONGEST // BLOCK
        free = [*range(1, 1 + width * len(prompts))]
        random.Random(7).shuffle(free)
        params = SamplingParams(temperature=0, seed=0)
        for i, prompt in zip(self.ids, prompts, strict=True):
            blocks = ([free.pop() for _ in range(width)],)
            self.batch.add(ScheduledNewRequest(i, prompt, [], params, blocks, 0))
        self.caches = allocate_kv_cache(
            layers, 1 + width * len(prompts), BLOCK, name_of(model), "cpu"
        )
        self.forward = PagedForward(model, self.caches, BLOCK, CpuDevice(), {})
        before = {i: len(p) - 1 for i, p in zip(self.ids, prompts, strict=True) if len(p) > 1}
        self.forward(self.batch.select([*before], [*before.values()]), False)
        self.done = {i: before.get(i, 0) for i in self.ids}
        for i in self.ids:
            self.batch.advance(i, self.done[i], ())

    def took(self, ids, tokens):
        for i, token in zip(ids, tokens, strict=True):
            self.batch.append_tokens(i, [token])
            self.done[i] += 1
            self.batch.advance(i, self.done[i], ())

    def in_parts(self, ids):
        hidden = self.forward(self.batch.select(ids, [1] * len(ids)), False)
        return self.model.compute_likeliest(hidden).tolist()

    def at_once(self, ids):
        places = self.batch.greedy_places(ids, [1] * len(ids))
        return self.model.likeliest_after(self.batch.request_rows(), *places, self.caches)


def bits(run):
    return [t.contiguous().view(torch.uint8) for pair in run.caches for t in pair]


def check(folder, **options):
    rng = random.Random(5)
    prompts = [[rng.randrange(51) for _ in range(n)] for n in (1, 15, 16, 40, 70)]
    # A model makes one call of its layers over one cache.
    one, other = (Run(load(folder, **options), prompts) for _ in range(2))
    for _ in range(20):  # over the ends of blocks, some of the requests at a time
        ids = rng.sample(one.ids, rng.randrange(1, 6))
        tokens = one.in_parts(ids)
        found = other.at_once(ids)
        assert found is not None, "this was meant to be one call"
        assert found.token_ids == tokens and found.head_seconds > 0
        one.took(ids, tokens)
        other.took(ids, tokens)
        for a, b in zip(bits(one), bits(other), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_forward_pass_and_a_head(isa, kind, dtype, tmp_path):
    check(random_checkpoint(tmp_path, KINDS[kind] | {"torch_dtype": dtype}))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("kind", ["tied", "apart"])
def test_of_codes_too(isa, kind, quantization, tmp_path):
    folder = random_checkpoint(tmp_path, KINDS[kind] | {"torch_dtype": "bfloat16"})
    check(folder, quantization=quantization)


@pytest.mark.parametrize("family", ["granite", "gemma"])
def test_not_of_models_that_do_more(family, tmp_path):
    """To logits, or to embeddings. Then nothing is written, and the step goes its usual way."""
    changes = {"architectures": [f"{family.title()}ForCausalLM"], "model_type": family}
    if family == "granite":
        changes |= {"logits_scaling": 3.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    run = Run(load(random_checkpoint(tmp_path, changes | {"torch_dtype": "bfloat16"})), [[1, 2, 3]])
    before = [b.clone() for b in bits(run)]
    assert run.model._model._run is not None, "all layers are one call"
    assert run.at_once(run.ids) is None
    for one, other in zip(before, bits(run), strict=True):
        assert torch.equal(one, other)


def test_not_while_names_are_on_nor_over_another_cache(tmp_path, monkeypatch):
    run = Run(load(random_checkpoint(tmp_path, {"torch_dtype": "bfloat16"})), [[1, 2, 3]])
    assert run.at_once(run.ids) is not None
    caches, run.caches = run.caches, [*run.caches]
    assert run.at_once(run.ids) is None, "layers were made one call for other caches"
    run.caches = caches
    monkeypatch.setattr(scopes._scopes, "is_on", True)
    assert run.at_once(run.ids) is None


def test_what_is_not_there_is_refused_before_anything_is_written(tmp_path):
    run = Run(load(random_checkpoint(tmp_path, {"torch_dtype": "bfloat16"})), [[1, 2, 3], [4] * 20])
    before = [b.clone() for b in bits(run)]
    requests = run.batch.request_rows()
    ask = run.model.likeliest_after
    for rows, positions in (([0, 1], [2, LONGEST + 5]), ([0, 9], [2, 2]), ([-1], [0]), ([0], [-1])):
        with pytest.raises(IndexError, match="no token or no block"):
            ask(requests, rows, positions, run.caches)
    requests.blocks[1, 1] = 0
    with pytest.raises(IndexError, match="no token or no block"):
        ask(requests, [0, 1], [2, 19], run.caches)
    requests.tokens[0, 2] = 10**6
    with pytest.raises(IndexError, match="no embedding"):
        ask(requests, [0], [2], run.caches)
    for a, b in zip(before, bits(run), strict=True):
        assert torch.equal(a, b)


def test_requests_that_moved_are_found(tmp_path):
    """More requests than there was room for: the worker's memory is elsewhere then."""
    model = load(random_checkpoint(tmp_path, {"torch_dtype": "bfloat16"}))
    run = Run(model, [[1, 2, 3]])
    first = run.at_once(run.ids).token_ids
    old = run.batch.request_rows()
    params = SamplingParams(temperature=0, seed=0)
    run.batch.add(ScheduledNewRequest("new", [9, 9], [], params, ([3],), 0))
    assert run.batch.request_rows() is not old
    old.tokens[:] = 7  # nobody reads it any more
    assert run.at_once(run.ids).token_ids == first


def count(llm):
    steps = llm.llm_engine.core.executor._worker._runner._steps
    shortcut, seen = steps._shortcut, []

    def counted(req_ids, counts):
        taken = shortcut(req_ids, counts)
        seen.append(taken is not None)
        return taken

    steps._shortcut = counted
    return seen


PROMPTS = [{"prompt_token_ids": [3 + i, 5, 8 * i + 1]} for i in range(12)]


def generate(llm, others=()):
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    params = [others[i % len(others)] if others and i % 2 else greedy for i in range(len(PROMPTS))]
    return [o.outputs[0] for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_the_engine_takes_it_for_steps_of_greedy_requests():
    with LLM(max_model_len=256, num_gpu_blocks_override=200) as llm:
        seen = count(llm)
        alone = generate(llm)
        assert seen.count(True) >= 38, "all but prompts"
        seen.clear()
        sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
        scored = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=10)
        mixed = generate(llm, [sampled, scored])
        assert True in seen and False in seen
        steps = llm.llm_engine.core.executor._worker._runner._steps
        steps._shortcut = None
        usual = generate(llm, [sampled, scored])
    assert [o.token_ids for o in mixed] == [o.token_ids for o in usual]
    assert [o.logprobs for o in mixed] == [o.logprobs for o in usual]
    assert [o.token_ids for o in mixed[::2]] == [o.token_ids for o in alone[::2]]


def test_a_request_without_numbers_fails_alone(monkeypatch):
    """Its keys are spoilt in the middle of decoding."""
    with LLM(max_model_len=256, num_gpu_blocks_override=200) as llm:
        runner = llm.llm_engine.core.executor._worker._runner
        cache = runner._steps._blocks._kv_caches[0]
        whole = generate(llm)
        shortcut, steps, batch = runner._steps._shortcut, [], runner.input_batch

        def spoilt(req_ids, counts):
            steps.append(len(req_ids))
            if len(steps) == 20:
                row = batch.row_of[req_ids[4]]
                cache.value[int(batch.block_tables[0].ids[row, 0])] = float("nan")
            return shortcut(req_ids, counts)

        monkeypatch.setattr(runner._steps, "_shortcut", spoilt)
        broken = generate(llm)
        ended = [o.finish_reason for o in broken]
        assert ended.count("error") == 1 and steps[-1] == len(PROMPTS) - 1
        for one, other in zip(whole, broken, strict=True):
            assert one.token_ids[: len(other.token_ids)] == other.token_ids
            assert len(other.token_ids) == 40 or other.finish_reason == "error"
        assert np.array_equal([o.token_ids for o in generate(llm)], [o.token_ids for o in whole])
