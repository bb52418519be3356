"""One token of each request, from the worker's memory to the next one in one native call: the
tokens and the cache of a forward pass, a head and the sampler's steps."""

import itertools
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_run import load, name_of
from quire import LLM, SamplingParams
from quire.attention.kv_cache import allocate_kv_cache
from quire.core.batch import ScheduledNewRequest
from quire.kernels import scopes
from quire.kernels.decoder import NOT_FINITE, OUT_OF_RANGE
from quire.kernels.request_rows import LastTokens
from quire.sampling import Sampler, SamplingMetadata
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
GREEDY = SamplingParams(temperature=0, seed=0)
PICKED = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.3, "min_p": 0.2},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.5},
]
"""What a pick takes care of, one by one; used in pairs."""
PAIRS = [{"temperature": 0} | a | b for a, b in itertools.combinations(PICKED, 2)]


class Run:
    """Requests with prompts, all but the last token of each computed."""

    def __init__(self, model, prompts, params=(), longest=LONGEST):
        self.model, self.ids = model, [f"r{i}" for i in range(len(prompts))]
        layers = model.kv_layers(model.shape)
        windows = {layer.window for layer in layers}
        self.batch = InputBatch(len(prompts), longest, BLOCK, model.shape.vocab_size, [*windows])
        width = longest // BLOCK
        free = [*range(1, 1 + width * len(prompts))]
        random.Random(7).shuffle(free)
        params = params or [GREEDY] * len(prompts)
        for i, prompt, each in zip(self.ids, prompts, params, strict=True):
            blocks = ([free.pop() for _ in range(width)],)
            self.batch.add(ScheduledNewRequest(i, prompt, [], each, blocks, 0))
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
        requests, outputs = self.known(ids)
        if not any(request.active for request in requests):
            return self.model.compute_likeliest(hidden).tolist()
        logits = self.model.compute_logits(hidden).clone()
        found = Sampler(self.model.ops)(logits, SamplingMetadata.build(requests, outputs))
        assert not found.failed
        return found.token_ids

    def at_once(self, ids):
        last = self.batch.last_tokens(ids, [1] * len(ids))
        picks = None
        requests, outputs = self.known(ids)
        if any(request.active for request in requests):
            assert all(request.is_picked for request in requests)
            picks = [r.pick_after(output) for r, output in zip(requests, outputs, strict=True)]
        return self.model.tokens_after(last, self.caches, picks)

    def known(self, ids):
        rows = [self.batch.row_of[i] for i in ids]
        return [self.batch.sampling_of(row) for row in rows], self.batch.outputs(rows)


def bits(run):
    return [t.contiguous().view(torch.uint8) for pair in run.caches for t in pair]


def check(folder, params=(), **options):
    rng = random.Random(5)
    prompts = [[rng.randrange(51) for _ in range(n)] for n in (1, 15, 16, 40, 70)]
    # A model makes one call of its layers over one cache.
    one, other = (Run(load(folder, **options), prompts, params) for _ in range(2))
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


@pytest.mark.parametrize("first", range(0, len(PAIRS), 4))
def test_with_everything_that_a_pick_takes_care_of(isa, first, tmp_path):
    some = [SamplingParams(seed=i, **pair) for i, pair in enumerate(PAIRS[first : first + 4])]
    folder = random_checkpoint(tmp_path, KINDS["odd sizes"] | {"torch_dtype": "bfloat16"})
    check(folder, [GREEDY] * (5 - len(some)) + some)


def test_long_outputs_of_a_large_vocabulary(tmp_path):
    """1000 tokens, of which hundreds are distinct and so have their own penalties."""
    changes = {"vocab_size": 151_936, "torch_dtype": "bfloat16", "max_position_embeddings": 1024}
    folder = random_checkpoint(tmp_path, KINDS["tied"] | changes)
    params = [{"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}]
    params += [{"temperature": 0.6, "top_p": 0.95, "presence_penalty": 1.5}]
    params += [{"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.4}]
    params = [SamplingParams(seed=i, **p) for i, p in enumerate(params)]
    prompts = [[i, 5, 8 * i + 1, 7] for i in range(3)]
    one, other = (Run(load(folder), prompts, params, 1024) for _ in range(2))
    for _ in range(1000):
        tokens = one.in_parts(one.ids)
        assert other.at_once(one.ids).token_ids == tokens
        one.took(one.ids, tokens)
        other.took(one.ids, tokens)
    assert all(len(set(output.tolist())) > 200 for output in one.known(one.ids)[1])


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

    def ask(rows, positions):
        return run.model.tokens_after(LastTokens(requests, rows, positions), run.caches, None)

    for rows, positions in (([0, 1], [2, LONGEST + 5]), ([0, 9], [2, 2]), ([-1], [0]), ([0], [-1])):
        with pytest.raises(IndexError, match="no token or no block"):
            ask(rows, positions)
    requests.blocks[1, 1] = 0
    with pytest.raises(IndexError, match="no token or no block"):
        ask([0, 1], [2, 19])
    requests.tokens[0, 2] = 10**6
    with pytest.raises(IndexError, match="no embedding"):
        ask([0], [2])
    for a, b in zip(before, bits(run), strict=True):
        assert torch.equal(a, b)


def test_requests_that_moved_are_found(tmp_path):
    """More requests than there was room for: the worker's memory is elsewhere then."""
    model = load(random_checkpoint(tmp_path, {"torch_dtype": "bfloat16"}))
    run = Run(model, [[1, 2, 3]])
    first = run.at_once(run.ids).token_ids
    old = run.batch.request_rows()
    run.batch.add(ScheduledNewRequest("new", [9, 9], [], GREEDY, ([3],), 0))
    assert run.batch.request_rows() is not old
    old.tokens[:] = 7  # nobody reads it any more
    assert run.at_once(run.ids).token_ids == first


def count(llm, monkeypatch):
    """How often a pass was one call; with `None` in it, how often the sampler's steps followed."""
    steps = llm.llm_engine.core.executor._worker._runner._steps
    shortcut, sample, seen = steps._shortcut, steps._head.sample, []

    def counted(req_ids, counts):
        taken = shortcut(req_ids, counts)
        seen.append(taken is not None)
        return taken

    def sampled(*args):
        seen.append(None)
        return sample(*args)

    monkeypatch.setattr(steps, "_shortcut", counted)
    monkeypatch.setattr(steps._head, "sample", sampled)
    return seen


PROMPTS = [{"prompt_token_ids": [3 + i, 5, 8 * i + 1]} for i in range(12)]


def generate(llm, params=(), max_tokens=40):
    params = params or [{"temperature": 0}]
    each = [params[i % len(params)] for i in range(len(PROMPTS))]
    own = [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i, **p)
        for i, p in enumerate(each)
    ]
    return [o.outputs[0] for o in llm.generate(PROMPTS, own, use_tqdm=False)]


@pytest.mark.parametrize("pick", [None, {"temperature": 1.0}, {"repetition_penalty": 1.2}])
def test_one_logit_that_is_not_finite_is_seen(isa, pick, tmp_path):
    """Of one token that nobody would pick: all rows have it."""
    changes = KINDS["apart"] | {"torch_dtype": "bfloat16", "vocab_size": 300}
    folder = random_checkpoint(tmp_path, changes)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for bad in (float("nan"), float("inf"), float("-inf")):
        head = tensors["lm_head.weight"].clone()
        head[217, 3] = bad
        save_file(tensors | {"lm_head.weight": head}, file)
        params = [GREEDY if pick is None else SamplingParams(seed=1, **pick)] * 2
        run = Run(load(folder), [[1, 2, 3], [4] * 20], params)
        assert run.at_once(run.ids).token_ids == [NOT_FINITE] * 2


OTHERS = [
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "min_tokens": 9, "stop_token_ids": [7]},
    {"temperature": 0.8, "logit_bias": {7: 3.0}},
    {"temperature": 0.8, "bad_words": ["the"]},
    {"temperature": 0, "structured_outputs": {"regex": "[ab]{30,60}"}},
]
"""What takes the sampler's steps."""


def test_the_engine_takes_it_for_all_steps_but_those_of_prompts(monkeypatch):
    with LLM(max_model_len=256, num_gpu_blocks_override=200) as llm:
        seen = count(llm, monkeypatch)
        alone = generate(llm)
        assert seen.count(True) >= 38 and None not in seen
        seen.clear()
        picked = [{"temperature": 0}, *PAIRS[::2]]
        sampled = generate(llm, picked)
        assert seen.count(True) >= 38 and None not in seen
        mixed = []
        for other in OTHERS:
            seen.clear()
            mixed.append(generate(llm, [{"temperature": 0}, other]))
            assert True in seen and None in seen, "the model is one call, then come the steps"
        monkeypatch.setattr(llm.llm_engine.core.executor._worker._runner._steps, "_shortcut", None)
        assert [o.token_ids for o in sampled] == [o.token_ids for o in generate(llm, picked)]
        for other, found in zip(OTHERS, mixed, strict=True):
            usual = generate(llm, [{"temperature": 0}, other])
            assert [o.token_ids for o in found] == [o.token_ids for o in usual]
            assert [o.logprobs for o in found] == [o.logprobs for o in usual]
            assert [o.token_ids for o in found[::2]] == [o.token_ids for o in alone[::2]]


def test_logits_out_of_range_fail_alone_and_as_ever(monkeypatch):
    """The pick only says that they are: what is wrong is told by the sampler."""
    with LLM(max_model_len=256, num_gpu_blocks_override=200) as llm:
        steps = llm.llm_engine.core.executor._worker._runner._steps
        batch, ask = steps._input_batch, llm.llm_engine.core.executor._worker._runner.model
        seen, tokens_after = [], ask.tokens_after

        def watched(*args):
            found = tokens_after(*args)
            seen.append(found.token_ids)
            return found

        monkeypatch.setattr(ask, "tokens_after", watched)
        sampled = {"temperature": 0.9, "frequency_penalty": 0.5}
        whole = generate(llm, [sampled])
        assert len(seen) >= 38 and OUT_OF_RANGE not in sum(seen, [])
        seen.clear()
        # No parameter can do that to usual logits.
        shortcut = steps._shortcut

        def spoilt(req_ids, counts):
            if len(seen) == 20 and len(req_ids) > 4:
                request = batch.sampling_of(batch.row_of[req_ids[4]])
                request.counts._counts[0] = -np.inf
            return shortcut(req_ids, counts)

        monkeypatch.setattr(steps, "_shortcut", spoilt)
        broken = generate(llm, [sampled])
        assert OUT_OF_RANGE in sum(seen, []) and NOT_FINITE not in sum(seen, [])
        assert [o.finish_reason for o in broken].count("error") == 1
        for one, other in zip(whole, broken, strict=True):
            assert one.token_ids[: len(other.token_ids)] == other.token_ids
            assert len(other.token_ids) == 40 or other.finish_reason == "error"


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}])
def test_a_request_without_numbers_fails_alone(params, monkeypatch):
    """Its keys are spoilt in the middle of decoding."""
    with LLM(max_model_len=256, num_gpu_blocks_override=200) as llm:
        runner = llm.llm_engine.core.executor._worker._runner
        cache = runner._steps._blocks._kv_caches[0]
        whole = generate(llm, [params])
        shortcut, steps, batch = runner._steps._shortcut, [], runner.input_batch

        def spoilt(req_ids, counts):
            steps.append(len(req_ids))
            if len(steps) == 20:
                row = batch.row_of[req_ids[4]]
                cache.value[int(batch.block_tables[0].ids[row, 0])] = float("nan")
            return shortcut(req_ids, counts)

        monkeypatch.setattr(runner._steps, "_shortcut", spoilt)
        broken = generate(llm, [params])
        ended = [o.finish_reason for o in broken]
        assert ended.count("error") == 1 and steps[-1] == len(PROMPTS) - 1
        for one, other in zip(whole, broken, strict=True):
            assert one.token_ids[: len(other.token_ids)] == other.token_ids
            assert len(other.token_ids) == 40 or other.finish_reason == "error"
        again = [o.token_ids for o in generate(llm, [params])]
        assert np.array_equal(again, [o.token_ids for o in whole])
