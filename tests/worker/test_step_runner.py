"""What a head need not know: state, KV blocks, and that a failure is its request's alone."""

from fake_model import VOCAB, FakeModel, fake_caches, fold
from quire.core.batch import ScheduledBatch, ScheduledCachedRequests, ScheduledNewRequest
from quire.params import SamplingParams
from quire.worker.cache_blocks import CacheBlocks
from quire.worker.device import CpuDevice
from quire.worker.forward_pass import PagedForward
from quire.worker.input_batch import InputBatch
from quire.worker.step_runner import StepRunner

BLOCK = 8
CURSED = "r13"


class FoldHead:
    """Neither samples nor pools: gives what the fake model folded a prompt to, modulo 100."""

    def __init__(self):
        self.passes = []

    def wants_every_token(self):
        return False

    def finish(self, inputs, hidden, outcome):
        self.passes.append(list(inputs.req_ids))
        which = [i for i, count in zip(inputs.req_ids, inputs.samples, strict=True) if count]
        for req_id, value in zip(which, hidden.flatten().tolist(), strict=True):
            if req_id == CURSED:
                raise ValueError("this one never works")
            outcome.sampled[req_id] = [int(value) % 100]

    def commit(self, outcome, result):
        result.draft_token_ids = {req_id: [7] for req_id in outcome.sampled}


def run(head, prompts, counts):
    state = InputBatch(8, 64, BLOCK, VOCAB)
    device, caches = CpuDevice(), fake_caches(20, BLOCK)
    forward = PagedForward(FakeModel(), caches, BLOCK, device, {})
    runner = StepRunner(forward, head, state, CacheBlocks(caches, BLOCK, device), device)
    news = [
        ScheduledNewRequest(key, prompt, [], SamplingParams(seed=1), ([block],), 0)
        for block, (key, prompt) in enumerate(prompts.items(), start=1)
    ]
    batch = ScheduledBatch(1, news, ScheduledCachedRequests(), counts, sum(counts.values()), [], [])
    return runner.execute(batch)


def test_a_head_of_another_kind_gets_states_where_known_tokens_end():
    head = FoldHead()
    prompts = {"r1": [4, 5, 6], "r2": [7, 8, 9, 10]}
    result = run(head, prompts, {"r1": 3, "r2": 2})
    assert result.sampled_token_ids == {"r1": [fold([4, 5, 6]) % 100]}
    assert result.draft_token_ids == {"r1": [7]}
    assert head.passes == [["r1", "r2"]]


def test_a_request_that_makes_a_head_raise_fails_alone():
    head = FoldHead()
    prompts = {f"r{i}": [i, i] for i in (11, 12, 13, 14)}
    result = run(head, prompts, dict.fromkeys(prompts, 2))
    assert list(result.failed) == [CURSED]
    assert "ValueError" in result.failed[CURSED]
    good = {key: [fold(prompt) % 100] for key, prompt in prompts.items() if key != CURSED}
    assert result.sampled_token_ids == good
    assert head.passes[0] == list(prompts) and head.passes[-1] == ["r14"]
