"""Groups of layers from the scheduler to the caches, with a model that reads what a window sees."""

import random

import pytest
import torch

from fake_model import VOCAB, fold, logits_of
from quire.attention.kv_cache import allocate_kv_cache, kv_cache_bytes
from quire.config import SchedulerConfig
from quire.config.kv_groups import blocks_per_request, form_groups
from quire.config.shape import LayerKV
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.kernels.dispatch import ops
from quire.kernels.rows import largest_columns
from quire.params import SamplingParams
from quire.worker.device import CpuDevice
from quire.worker.input_batch import InputBatch
from quire.worker.model_runner import ModelRunner

MAX_LEN, BLOCK, CHUNK = 160, 8, 24
WINDOWS = (12, 20, None, 12, 20, None, 12)
LAYERS = [LayerKV(1, 1, 1, window) for window in WINDOWS]


class WindowedModel:
    """Each layer keeps (token + 1 + its index, position) and folds what its window shows."""

    ops = ops

    def forward(self, input_ids, positions, kv_caches, metadata):
        hidden = [fold([])] * len(positions)
        for layer, (keys, values) in enumerate(kv_caches):
            meta = metadata.of_layer(layer)
            assert (meta.slot_mapping >= BLOCK).all(), "null block written"
            keys.view(-1)[meta.slot_mapping] = (input_ids + 1 + layer).float()
            values.view(-1)[meta.slot_mapping] = positions.float()
        for layer, (keys, values) in enumerate(kv_caches):
            meta = metadata.of_layer(layer)
            for token, request in enumerate(meta.token_request.tolist()):
                end = int(positions[token]) + 1
                context = torch.arange(max(0, end - (WINDOWS[layer] or end)), end)
                blocks = meta.block_table[request].long()[context // BLOCK]
                slots = blocks * BLOCK + context % BLOCK
                assert torch.equal(values.view(-1)[slots].long(), context), f"layer {layer}"
                seen = (keys.view(-1)[slots].long() - 1 - layer).tolist()
                hidden[token] = fold([hidden[token], fold(seen)])
        return metadata.select(torch.tensor(hidden, dtype=torch.float64).unsqueeze(1))

    def compute_logits(self, hidden, keep=None):
        return torch.stack([torch.from_numpy(logits_of(int(v))) for v in hidden.flatten()])

    def tokens_after(self, last, kv_caches, picks):
        return None

    def logits_after(self, last, kv_caches):
        return None

    def compute_likeliest(self, hidden):
        return largest_columns(self.compute_logits(hidden))


def expected(prompt, count):
    """Greedy tokens by the plain twin: no cache."""
    tokens = list(prompt)
    for _ in range(count):
        value = fold([])
        for window in WINDOWS:
            value = fold([value, fold(tokens[-(window or len(tokens)) :])])
        tokens.append(int(logits_of(value).argmax()))
    return tokens[len(prompt) :]


class Engine:
    def __init__(self, hybrid, spare=0, caching=True):
        self.groups = form_groups(LAYERS, hybrid)
        windows = [group.window for group in self.groups]
        num_blocks = blocks_per_request(windows, MAX_LEN, CHUNK, BLOCK) + 1 + spare
        caches = allocate_kv_cache(LAYERS, num_blocks, BLOCK, "float32", "cpu", self.groups)
        unique = {t.data_ptr(): t.nbytes for pair in caches for t in pair}
        size = kv_cache_bytes(LAYERS, num_blocks, BLOCK, "float32", self.groups)
        assert sum(unique.values()) == size
        self.bytes = size
        state = InputBatch(4, MAX_LEN, BLOCK, VOCAB, windows)
        layers = [group.layers for group in self.groups]
        self.runner = ModelRunner(WindowedModel(), caches, state, CpuDevice(), layers)
        config = SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=4)
        kv = KVCacheManager(num_blocks, BLOCK, caching, MAX_LEN, windows, CHUNK)
        self.scheduler = Scheduler(config, kv, max_model_len=MAX_LEN)
        self.preemptions = self.hits = self.copies = 0

    def run(self, prompts, count):
        tokens = {name: [] for name in prompts}
        params = SamplingParams(seed=1, temperature=0.0, max_tokens=count, ignore_eos=True)
        for name, prompt in prompts.items():
            self.scheduler.add_request(Request(name, prompt, params))
        while self.scheduler.has_requests:
            batch = self.scheduler.schedule()
            self.preemptions += len(batch.preempted_req_ids)
            self.hits += batch.prefix_hits
            self.copies += len(batch.block_copies)
            for output in self.scheduler.update(batch, self.runner.execute(batch)):
                assert output.error is None
                tokens[output.request_id] += output.new_token_ids
            self.scheduler.check_integrity()
        return tokens


def some_prompts(rng, count):
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    return {
        f"r{i}": shared[: rng.choice([0, 30, 60])]
        + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        for i in range(count)
    }


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_any_schedule_gives_the_tokens_of_the_plain_twin(hybrid, caching):
    prompts = some_prompts(random.Random(5), 10)
    engine = Engine(hybrid, spare=3, caching=caching)
    tokens = engine.run(prompts, 30)
    for name, prompt in prompts.items():
        assert tokens[name] == expected(prompt, 30)
    assert engine.preemptions > 0
    if caching:
        assert engine.hits > 0 and engine.copies > 0


def test_groups_need_less_memory_for_the_same_length():
    hybrid, whole = Engine(hybrid=True), Engine(hybrid=False)
    assert len(hybrid.groups) == 4 and len(whole.groups) == 1
    assert hybrid.bytes < 0.75 * whole.bytes


def test_a_block_of_one_group_can_go_to_any_other():
    """Several rounds through a pool that is just large enough mix the groups' blocks."""
    rng = random.Random(8)
    engine = Engine(hybrid=True)
    seen = set()
    for turn in range(4):
        prompts = {f"{turn}-{n}": p for n, p in some_prompts(rng, 3).items()}
        tokens = engine.run(prompts, 12)
        for name, prompt in prompts.items():
            assert tokens[name] == expected(prompt, 12)
        pool = engine.scheduler.kv.block_pool
        seen |= {(b.block_id, b.origin.group) for b in pool.blocks if b.origin}
    assert len(seen) > 1.5 * pool.num_blocks


def test_the_null_block_stands_for_what_the_window_has_passed():
    state = InputBatch(1, MAX_LEN, BLOCK, VOCAB, (None, 12))
    table = state.block_tables[1]
    table.append(0, [3, 4, 5, 6])
    rows, computed = torch.zeros(1, dtype=torch.int64).numpy(), torch.tensor([27]).numpy()
    assert table.lines(rows, computed, 28).tolist() == [[0, 0, 5, 6]]
    assert table.ids[0, :4].tolist() == [3, 4, 5, 6]
