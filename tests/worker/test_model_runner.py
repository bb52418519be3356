"""The runner under random schedules, against a plain twin; logprobs; failures of one request."""

import math
import random

import numpy as np
import pytest
import torch

from fake_model import VOCAB, FakeModel, fake_caches, fold, logits_of
from quire.config import SchedulerConfig
from quire.core.batch import ScheduledBatch, ScheduledCachedRequests, ScheduledNewRequest
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.params import SamplingParams
from quire.sampling import RequestSampling, Sampler, SamplingMetadata, gather_logprobs
from quire.worker.block_table import BlockTable
from quire.worker.cache_blocks import CacheBlocks
from quire.worker.device import CpuDevice
from quire.worker.input_batch import InputBatch
from quire.worker.model_runner import ModelRunner

MAX_LEN = 64
BLOCK = 8


def make_runner(model=None, num_blocks=40, max_num_seqs=8):
    state = InputBatch(max_num_seqs, MAX_LEN, BLOCK, VOCAB)
    return ModelRunner(model or FakeModel(), fake_caches(num_blocks, BLOCK), state, CpuDevice())


def expected_tokens(prompt, params, count):
    """The same tokens by the plain twin: one row, no cache."""
    request = RequestSampling.from_params(params, prompt, VOCAB)
    output, logprobs = [], []
    while len(output) < count:
        logits = torch.from_numpy(logits_of(fold(prompt + output)))[None].clone()
        meta = SamplingMetadata.build([request], [np.array(output, dtype=np.int32)])
        result = Sampler()(logits, meta)
        output.append(result.token_ids[0])
        logprobs.append(result.logprobs[0])
    return output, logprobs


def expected_prompt_logprobs(prompt, count):
    from quire.kernels.dispatch import ops

    entries = [None]
    for i in range(1, len(prompt)):
        row = ops.log_softmax(torch.from_numpy(logits_of(fold(prompt[:i])))[None])
        entries += gather_logprobs(row, torch.tensor(prompt[i : i + 1]), [count])
    return entries


def plain(entries):
    return [e and (list(e.token_ids), list(e.logprobs), e.rank) for e in entries]


def random_params(rng):
    return SamplingParams(
        seed=rng.getrandbits(60),
        max_tokens=rng.randint(1, 20),
        temperature=rng.choice([0.0, 0.8, 1.5]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logprobs=rng.choice([None, 0, 2, -1]),
        prompt_logprobs=rng.choice([None, None, 0, 3]),
        eos_token_ids=[3],
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 1]),
        bad_words_token_ids=rng.choice([None, [[4, 5], [6]]]),
    )


def scoring(rng, prompt, params):
    """The same parameters, some of them with tokens to score in the prompt."""
    start = rng.randrange(len(prompt))
    rows = [
        [rng.randrange(-1, VOCAB) for _ in range(rng.randrange(4))] for _ in prompt[start + 1 :]
    ]
    if rng.random() < 0.5 or not any(rows):
        return params
    return params.replace(prompt_logprob_token_ids=rows, prompt_logprob_start=start or None)


def expected_scores(prompt, params):
    from quire.kernels.dispatch import ops

    rows, start = params.prompt_logprob_token_ids, params.prompt_logprob_start or 0
    scores = np.full((len(rows), max(map(len, rows))), -np.inf, dtype=np.float32)
    for i, ids in enumerate(rows):
        row = torch.from_numpy(logits_of(fold(prompt[: start + i + 1])))[None]
        logprobs = ops.log_softmax(row)[0]
        for j, token in enumerate(ids):
            if token >= 0:
                scores[i, j] = logprobs[token]
    return scores


class Engine:
    """Scheduler and runner, stepped by hand."""

    def __init__(self, runner, num_blocks, budget, max_num_seqs, caching=True, threshold=0):
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=threshold,
        )
        kv = KVCacheManager(num_blocks, BLOCK, caching, MAX_LEN)
        self.scheduler = Scheduler(config, kv, max_model_len=MAX_LEN)
        self.runner = runner
        self.tokens, self.logprobs, self.prompt_logprobs, self.scored = {}, {}, {}, {}
        self.errors = {}
        self.preemptions = 0

    def add(self, request_id, prompt, params):
        self.scheduler.add_request(Request(request_id, list(prompt), params))

    def step(self):
        batch = self.scheduler.schedule()
        self.preemptions += len(batch.preempted_req_ids)
        result = self.runner.execute(batch)
        for output in self.scheduler.update(batch, result):
            key = output.request_id
            self.tokens.setdefault(key, []).extend(output.new_token_ids)
            self.logprobs.setdefault(key, []).extend(output.new_logprobs or [])
            if output.new_prompt_logprobs is not None:
                assert key not in self.prompt_logprobs
                self.prompt_logprobs[key] = output.new_prompt_logprobs
            if output.scored is not None:
                assert key not in self.scored
                self.scored[key] = output.scored.array()
            if output.error:
                self.errors[key] = output.error
        return batch, result

    def run(self, limit=3000):
        for _ in range(limit):
            if not self.scheduler.has_requests:
                break
            self.step()
        assert not self.scheduler.requests
        self.scheduler.check_integrity()
        assert len(self.runner.input_batch) == 0
        assert not self.runner.input_batch.prompt_logprobs and not self.runner.input_batch.scored


def check_request(engine, key, prompt, params):
    tokens = engine.tokens[key]
    expected, logprobs = expected_tokens(prompt, params, len(tokens))
    assert tokens == expected
    if params.logprobs is not None:
        assert plain(engine.logprobs[key]) == plain(logprobs)
    else:
        assert not engine.logprobs[key]
    if params.prompt_logprobs is not None:
        wanted = expected_prompt_logprobs(prompt, params.prompt_logprobs)
        assert plain(engine.prompt_logprobs[key]) == plain(wanted)
    else:
        assert key not in engine.prompt_logprobs
    if params.prompt_logprob_token_ids is not None:
        wanted = expected_scores(prompt, params)
        assert engine.scored[key].tobytes() == wanted.tobytes()
        assert engine.scored[key].shape == wanted.shape
    else:
        assert key not in engine.scored
    stopped = tokens[-1] == 3 and not params.ignore_eos
    assert stopped or len(tokens) == params.max_tokens or len(prompt) + len(tokens) == MAX_LEN


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_give_the_twins_tokens(seed):
    rng = random.Random(seed)
    num_blocks = rng.choice([10, 14, 40])
    seqs = rng.choice([2, 4, 8])
    engine = Engine(
        make_runner(num_blocks=num_blocks, max_num_seqs=seqs),
        num_blocks,
        budget=rng.choice([8, 13, 50]),
        max_num_seqs=seqs,
        caching=rng.random() < 0.7,
        threshold=rng.choice([0, 5]),
    )
    shared = [rng.randrange(VOCAB) for _ in range(24)]
    requests = {}
    for i in range(14):
        head = shared[: rng.choice([0, 8, 16, 24])]
        prompt = head + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 25))]
        requests[f"r{i}"] = prompt, scoring(rng, prompt, random_params(rng))
        engine.add(f"r{i}", *requests[f"r{i}"])
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run()
    for key, (prompt, params) in requests.items():
        check_request(engine, key, prompt, params)


def test_preemption_happens_and_changes_nothing():
    rng = random.Random(99)
    engine = Engine(make_runner(num_blocks=9), 9, budget=64, max_num_seqs=8)
    requests = {}
    for i in range(8):
        params = random_params(rng).replace(max_tokens=20, ignore_eos=True)
        prompt = [rng.randrange(VOCAB) for _ in range(10)]
        requests[f"r{i}"] = prompt, scoring(rng, prompt, params)
        engine.add(f"r{i}", *requests[f"r{i}"])
    engine.run()
    assert engine.preemptions > 3
    for key, (prompt, params) in requests.items():
        check_request(engine, key, prompt, params)


def batch_of(new=(), cached=(), finished=(), preempted=(), counts=None):
    return ScheduledBatch(
        step=1,
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=ScheduledCachedRequests(
            [c[0] for c in cached], [c[1] for c in cached], [c[2] for c in cached]
        ),
        num_scheduled_tokens=counts or {},
        total_num_scheduled_tokens=sum((counts or {}).values()),
        preempted_req_ids=list(preempted),
        finished_req_ids=list(finished),
    )


def new_request(key, prompt, blocks, output=(), computed=0, **params):
    params.setdefault("seed", 1)
    params.setdefault("temperature", 0.0)
    return ScheduledNewRequest(
        key, list(prompt), list(output), SamplingParams(**params), (list(blocks),), computed
    )


def test_logits_only_where_a_token_is_sampled():
    model = FakeModel()
    runner = make_runner(model)
    prompt = list(range(20))
    result = runner.execute(
        batch_of([new_request("a", prompt, [1, 2, 3]), new_request("b", prompt[:5], [4])],
                 counts={"a": 12, "b": 5})
    )  # fmt: skip
    assert list(result.sampled_token_ids) == ["b"]
    assert model.rows_of_logits == 1
    runner.execute(batch_of(cached=[("a", (), 12)], counts={"a": 7}))
    assert model.rows_of_logits == 1
    result = runner.execute(batch_of(cached=[("a", (), 19)], counts={"a": 1}))
    assert list(result.sampled_token_ids) == ["a"]
    assert result.forward_seconds > 0


def test_a_batch_without_tokens_only_drops_state():
    model = FakeModel()
    runner = make_runner(model)
    runner.execute(batch_of([new_request("a", [1, 2], [1])], counts={"a": 2}))
    assert len(runner.input_batch) == 1
    result = runner.execute(batch_of(finished=["a", "never heard of"]))
    assert result.sampled_token_ids == {}
    assert len(runner.input_batch) == 0
    assert model.calls == 1


def test_replayed_outputs_stay_outputs():
    prompt, params = [1, 2, 3], {"temperature": 1.0, "frequency_penalty": 1.0, "seed": 4,
                                 "repetition_penalty": 1.5}  # fmt: skip
    whole, _ = expected_tokens(prompt, SamplingParams(**params), 8)
    for kept in range(8):
        runner = make_runner()
        new = new_request(
            "a", prompt, [1, 2], output=whole[:kept], prompt_logprobs=1,
            prompt_logprob_token_ids=[[5], [6]], **params,
        )  # fmt: skip
        result = runner.execute(batch_of([new], counts={"a": 3 + kept}))
        assert result.sampled_token_ids == {"a": [whole[kept]]}
        # Prompt log-probabilities went out with the first token, before the replay.
        assert ("a" in result.prompt_logprobs) == ("a" in result.scored) == (kept == 0)


def test_a_request_that_returns_replaces_what_was_known():
    runner = make_runner()
    runner.execute(batch_of([new_request("a", [1, 2, 3], [1])], counts={"a": 3}))
    again = new_request("a", [9, 8], [5, 6, 7])
    result = runner.execute(batch_of([again], counts={"a": 2}))
    assert result.sampled_token_ids["a"] == [int(logits_of(fold([9, 8])).argmax())]
    assert len(runner.input_batch) == 1


def test_more_requests_than_rows_are_taken():
    runner = make_runner(max_num_seqs=1)
    news = [new_request(f"r{i}", [i, i + 1], [i + 1]) for i in range(5)]
    result = runner.execute(batch_of(news, counts={n.req_id: 2 for n in news}))
    for i in range(5):
        assert result.sampled_token_ids[f"r{i}"] == [int(logits_of(fold([i, i + 1])).argmax())]
    state = runner.input_batch
    assert len(set(state.row_of.values())) == 5


def test_prompt_positions_from_the_cache_have_no_logprobs():
    runner = make_runner()
    prompt = list(range(12))
    runner.execute(batch_of([new_request("a", prompt, [1, 2])], counts={"a": 12}))
    new = new_request("b", prompt, [1, 3], computed=8, prompt_logprobs=0)
    result = runner.execute(batch_of([new], counts={"b": 4}))
    wanted = expected_prompt_logprobs(prompt, 0)
    assert plain(result.prompt_logprobs["b"]) == plain([None] * 9 + wanted[9:])


def test_prompt_logprob_slabs_change_nothing(monkeypatch):
    monkeypatch.setattr("quire.worker.prompt_scores._PROMPT_SLAB", 3 * VOCAB)
    runner = make_runner()
    prompt = list(range(11))
    new = new_request("a", prompt, [1, 2], prompt_logprobs=2)
    result = runner.execute(batch_of([new], counts={"a": 11}))
    assert plain(result.prompt_logprobs["a"]) == plain(expected_prompt_logprobs(prompt, 2))
    scored = {"prompt_logprob_token_ids": [[i, 9] for i in range(8)], "prompt_logprob_start": 2}
    new = new_request("b", prompt, [3, 4], **scored)
    result = runner.execute(batch_of([new], counts={"b": 11}))
    wanted = expected_scores(prompt, SamplingParams(**scored))
    assert result.scored["b"].array().tobytes() == wanted.tobytes()


class Counting(FakeModel):
    """Counts the steps that make logits, and those that only find the likeliest tokens."""

    def __init__(self):
        super().__init__()
        self.with_logits = self.without = 0

    def compute_logits(self, hidden, keep=None):
        self.with_logits += keep is not None
        return super().compute_logits(hidden)

    def compute_likeliest(self, hidden):
        self.without += 1
        return super().compute_likeliest(hidden)


@pytest.mark.parametrize(
    ("neighbour", "needs_logits"),
    [
        ({}, False),
        ({"temperature": 1.0}, True),
        ({"logprobs": 0}, True),
        ({"logit_bias": {5: 1.0}}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"min_tokens": 5, "eos_token_ids": [3]}, True),
        ({"allowed_token_ids": [1, 2]}, True),
        ({"bad_words_token_ids": [[4]]}, True),
    ],
    ids=str,
)
def test_greedy_requests_alone_need_no_logits(neighbour, needs_logits):
    """Their tokens are the same with and without."""
    model, prompt = Counting(), [5, 6, 7]
    greedy = SamplingParams(seed=1, temperature=0, max_tokens=6, ignore_eos=True)
    other = SamplingParams(**{"seed": 2, "temperature": 0, "max_tokens": 6} | neighbour)
    engine = Engine(make_runner(model), 40, budget=200, max_num_seqs=8)
    engine.add("greedy", prompt, greedy)
    engine.add("other", [9, 9], other)
    engine.run()
    assert engine.tokens["greedy"] == expected_tokens(prompt, greedy, 6)[0]
    if needs_logits:
        assert model.with_logits
    else:
        assert model.without and not model.with_logits


class Faulty(FakeModel):
    """Raises, or spoils logits, whenever a poisoned token takes part in a step."""

    def __init__(self, poison, error=None, value=0.0):
        super().__init__()
        self.poison, self.error, self.value = poison, error, value

    def forward(self, input_ids, positions, kv_caches, metadata):
        poisoned = (input_ids == self.poison).nonzero().flatten().tolist()
        if poisoned and self.error:
            raise self.error
        hidden = super().forward(input_ids, positions, kv_caches, metadata)
        if poisoned:
            hit = metadata.token_request[poisoned]
            hidden[torch.isin(metadata.select(metadata.token_request), hit)] = -1.0
        return hidden

    def compute_logits(self, hidden, keep=None):
        logits = super().compute_logits(hidden)
        logits[hidden.flatten() < 0, 3] = self.value
        return logits


POISON = 49


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_greedy_request_without_numbers_fails_alone(value):
    engine = Engine(make_runner(Faulty(POISON, value=value)), 40, budget=200, max_num_seqs=8)
    greedy = SamplingParams(seed=1, temperature=0, max_tokens=6, ignore_eos=True)
    engine.add("bad", [1, POISON, 2], greedy)
    engine.add("good", [5, 6, 9], greedy)
    engine.run()
    assert list(engine.errors) == ["bad"] and engine.errors["bad"].startswith("numerical:")
    assert engine.tokens["good"] == expected_tokens([5, 6, 9], greedy, 6)[0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"error": RuntimeError("secret detail")}, "internal error in the model step"),
        ({"error": MemoryError()}, "internal error in the model step (MemoryError)"),
        ({"value": math.nan}, "numerical:"),
        ({"value": math.inf}, "numerical:"),
    ],
)
@pytest.mark.parametrize("place", [0, 3, 6])
def test_only_the_request_that_raises_fails(fault, reason, place):
    rng = random.Random(place)
    engine = Engine(make_runner(Faulty(POISON, **fault)), 40, budget=200, max_num_seqs=8)
    requests = {}
    for i in range(7):
        prompt = [rng.randrange(40) for _ in range(rng.randint(3, 12))]
        if i == place:
            prompt[1] = POISON
        params = random_params(rng).replace(
            bad_words_token_ids=[[POISON]], prompt_logprobs=(None, 1)[i % 2]
        )
        requests[f"r{i}"] = prompt, params
        engine.add(f"r{i}", prompt, params)
    _, result = engine.step()
    culprit = f"r{place}"
    assert list(result.failed) == [culprit]
    assert result.failed[culprit].startswith(reason)
    assert "secret" not in result.failed[culprit]
    engine.run()
    assert list(engine.errors) == [culprit]
    for key in requests.keys() - {culprit}:
        check_request(engine, key, *requests[key])


def test_a_request_that_shares_blocks_with_the_one_that_fails():
    model = Faulty(POISON, error=RuntimeError())
    model.strict = False  # it reads blocks that were never filled, before the scheduler knows
    engine = Engine(make_runner(model), 40, budget=200, max_num_seqs=8)
    head = list(range(BLOCK))
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=4)
    engine.add("bad", [*head, 1, POISON], params)
    engine.add("good", [*head, 1, 2], params)
    _, result = engine.step()
    assert list(result.failed) == ["bad"]
    engine.run()
    check_request(engine, "good", [*head, 1, 2], params)


def test_halves_run_in_order():
    # The second request reads a block that the first fills in the very same step.
    engine = Engine(make_runner(Faulty(POISON, error=RuntimeError())), 40, 200, 8)
    head = list(range(BLOCK))
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=4)
    requests = {"writer": [*head, 1], "reader": [*head, 2], "bad": [POISON]}
    for key, prompt in requests.items():
        engine.add(key, prompt, params)
    batch, result = engine.step()
    assert batch.prefix_hits == BLOCK
    assert list(result.failed) == ["bad"]
    engine.run()
    for key in ("writer", "reader"):
        check_request(engine, key, requests[key], params)


def test_a_bad_number_in_a_prompt_chunk_fails_the_request_that_asked_for_its_logprobs():
    runner = make_runner(Faulty(POISON, value=math.nan))
    prompt = [1, POISON, *range(10)]
    news = [
        new_request("asked", prompt, [1, 2], prompt_logprobs=1),
        new_request("other", range(12), [3, 4], prompt_logprobs=1),
    ]
    result = runner.execute(batch_of(news, counts={"asked": 6, "other": 6}))
    assert list(result.failed) == ["asked"]
    assert result.failed["asked"].startswith("numerical:")


def test_a_step_too_large_for_memory_is_done_in_parts():
    class Tight(FakeModel):
        def forward(self, input_ids, *rest):
            if len(input_ids) > 12:
                raise MemoryError
            return super().forward(input_ids, *rest)

    engine = Engine(make_runner(Tight()), 40, budget=200, max_num_seqs=8)
    rng = random.Random(1)
    requests = {f"r{i}": ([i, i, i + 1, i], random_params(rng)) for i in range(7)}
    for key, (prompt, params) in requests.items():
        engine.add(key, prompt, params)
    engine.run()
    assert not engine.errors
    for key, request in requests.items():
        check_request(engine, key, *request)


def test_a_request_that_cannot_be_taken_in_fails_alone():
    runner = make_runner()
    bad = new_request("bad", [2**40], [1])  # no int32 token id
    good = new_request("good", [1, 2], [2])
    result = runner.execute(batch_of([bad, good], counts={"bad": 1, "good": 2}))
    assert list(result.failed) == ["bad"]
    assert list(result.sampled_token_ids) == ["good"]
    assert list(runner.input_batch.row_of) == ["good"]


def test_a_token_without_a_block_is_noticed():
    table = BlockTable(num_rows=1, max_blocks=4, block_size=BLOCK)
    table.append(0, [3])
    rows = np.zeros(2, dtype=np.int64)
    assert table.slot_mapping(rows, np.array([0, 7])).tolist() == [24, 31]
    with pytest.raises(AssertionError, match="null block"):
        table.slot_mapping(rows, np.array([7, 8]))
    with pytest.raises(AssertionError, match="5 blocks in a table for 4"):
        table.append(0, [4, 5, 6, 7])


def test_preempted_requests_are_forgotten_and_rows_used_again():
    runner = make_runner(max_num_seqs=2)
    for i in range(10):
        new = new_request("a", [i, 1], [1])
        result = runner.execute(batch_of([new], counts={"a": 2}))
        assert result.sampled_token_ids["a"] == [int(logits_of(fold([i, 1])).argmax())]
        if i % 2:
            runner.execute(batch_of(preempted=["a"]))
            assert len(runner.input_batch) == 0
    assert len(runner.input_batch.sampling) == 2


def test_reset_forgets_everything():
    runner = make_runner()
    runner.execute(batch_of([new_request("a", [1, 2], [1], prompt_logprobs=1)], counts={"a": 1}))
    runner.reset()
    assert len(runner.input_batch) == 0
    assert runner.input_batch.prompt_logprobs == {}


def test_block_copies_read_all_before_they_write():
    """Block 1 goes to 2 while 2 goes to 3: 3 gets what was in 2 before."""
    cache = torch.arange(5.0).repeat_interleave(4).reshape(5, 4, 1, 1)
    keys, values = cache.clone(), -cache.clone()
    CacheBlocks([(keys, values)], 4, CpuDevice()).copy([(1, 2, 3), (2, 3, 2)])
    assert keys[2].flatten().tolist() == [1, 1, 1, 2]
    assert keys[3].flatten().tolist() == [2, 2, 3, 3]
    assert values[3].flatten().tolist() == [-2, -2, -3, -3]


class NoFew:
    """A mask that leaves out the likeliest tokens of a greedy request."""

    def __init__(self, banned):
        bits = np.ones(64, dtype=np.uint8)
        bits[list(banned)] = 0
        self.words = np.packbits(bits, bitorder="little").view(np.uint32)

    def allowed(self, output):
        return self.words


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_mask_holds_for_greedy_requests_and_touches_no_other(temperature):
    """The shortcut of greedy requests knows no masks, so a mask must keep a step from taking it."""
    model = Counting()
    runner = make_runner(model)
    news = [new_request(key, [5, 6, 7], [block], temperature=temperature)
            for key, block in (("masked", 1), ("plain", 2))]  # fmt: skip
    best = int(logits_of(fold([5, 6, 7])).argmax())
    add = runner.input_batch.add

    def add_masked(new):
        add(new)
        if new.req_id == "masked":
            row = runner.input_batch.row_of["masked"]
            sampling = RequestSampling.from_params(
                new.sampling_params, new.prompt_token_ids, VOCAB, NoFew([best])
            )
            runner.input_batch.sampling[row] = sampling

    runner.input_batch.add = add_masked
    tokens = runner.execute(batch_of(news, counts={"masked": 3, "plain": 3})).sampled_token_ids
    assert tokens["masked"] != [best]
    plain = SamplingParams(seed=1, temperature=temperature)
    assert tokens["plain"] == expected_tokens([5, 6, 7], plain, 1)[0]
    assert model.with_logits == 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_mask_that_leaves_nothing_or_raises_fails_its_request_alone(temperature):
    class Broken:
        def allowed(self, output):
            raise RuntimeError("no grammar")

    reasons = {}
    for mask in (NoFew(range(64)), Broken()):
        runner = make_runner()
        news = [new_request(f"r{i}", [i, 6, 7], [i + 1], temperature=temperature) for i in range(5)]
        runner.execute(batch_of(news, counts={n.req_id: 2 for n in news}))
        row = runner.input_batch.row_of["r2"]
        runner.input_batch.sampling[row] = RequestSampling.from_params(
            news[2].sampling_params, [2, 6, 7], VOCAB, mask
        )
        cached = [(n.req_id, (), 2) for n in news]
        result = runner.execute(batch_of(cached=cached, counts={n.req_id: 1 for n in news}))
        assert list(result.failed) == ["r2"]
        assert sorted(result.sampled_token_ids) == ["r0", "r1", "r3", "r4"]
        reasons[type(mask)] = result.failed["r2"]
    assert reasons[NoFew].startswith("no token can be sampled")
    assert reasons[Broken].startswith("internal error in the model step (RuntimeError)")
