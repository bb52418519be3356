"""A KV cache of its own type, with scales in it, is allocated, copied, swapped and forgotten like
any other: nobody on the way knows what is in it."""

from dataclasses import replace

import pytest
import torch

from quire.attention.kv_cache import allocate_kv_cache, kv_cache_bytes
from quire.attention.paged import PagedAttention
from quire.config.kv_groups import form_groups
from quire.config.shape import KV_DTYPES, LayerKV, ModelShape
from quire.core.batch import ScheduledBatch, ScheduledCachedRequests
from quire.errors import ConfigError
from quire.kernels.dtypes import stored_dtype
from quire.kernels.kv_types import stored
from quire.models.families.llama import LlamaForCausalLM
from quire.models.registry import load_model
from quire.weights.dummy import random_checkpoint
from quire.worker.cache_blocks import CacheBlocks
from quire.worker.device import CpuDevice
from quire.worker.kv_transfer import make_transfer
from quire.worker.poison import poison

BLOCKS, SIZE, SWAPPED = 8, 4, 3
INT8 = LayerKV(2, 16, 16, dtype="int8")
"""With a scale behind each token's key head, and one behind its value head."""
FLOAT8 = LayerKV(2, 16, 16, dtype="float8_e4m3fn")
LAYERS = [replace(INT8, window=8), INT8, replace(INT8, window=8), LayerKV(2, 16, 16), FLOAT8]


def filled(layers, groups=None):
    """Caches, each with random tokens in all blocks."""
    generator = torch.Generator().manual_seed(0)
    caches = allocate_kv_cache(layers, BLOCKS, SIZE, "bfloat16", "cpu", groups)
    for cache in caches:
        key, value = torch.randn(2, BLOCKS, SIZE, 2, 16, generator=generator)
        cache.key.copy_(stored(key, cache.dtype))
        cache.value.copy_(stored(value, cache.dtype))
    return caches


def moves(**moves):
    """A batch that computes nothing."""
    return ScheduledBatch(0, [], ScheduledCachedRequests([], [], []), {}, 0, [], [], **moves)


def contents(caches, block):
    return [tensor[block].clone() for cache in caches for tensor in cache]


def alike(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_memory_is_what_the_layout_says():
    caches = filled(LAYERS)
    assert [cache.dtype for cache in caches] == [
        *[torch.int8] * 3, torch.bfloat16, torch.float8_e4m3fn,
    ]  # fmt: skip
    assert caches[0].key.shape == (BLOCKS, SIZE, 2, 16 + 4)
    assert INT8.bytes_per_token(2) == 2 * (32 + 8), "its own type, whatever the model's"
    taken = sum(tensor.nbytes for cache in caches for tensor in cache)
    assert taken == kv_cache_bytes(LAYERS, BLOCKS, SIZE, "bfloat16")
    assert all(stored_dtype(name).itemsize == size for name, size in KV_DTYPES.items())


def test_only_layers_of_one_layout_share_pages():
    groups = form_groups(LAYERS[:3])
    assert [group.layers for group in groups] == [(1,), (0,), (2,)]
    caches = allocate_kv_cache(LAYERS[:3], BLOCKS, SIZE, "bfloat16", "cpu", groups)
    for tensors in zip(*caches, strict=True):
        assert len({tensor.data_ptr() for tensor in tensors}) == 1
    assert len(form_groups([INT8, replace(INT8, window=8, dtype=None)])) == 1
    assert len(form_groups([INT8, replace(INT8, window=8, dtype="float8_e4m3fn")])) == 1


@pytest.mark.parametrize("in_file", [False, True])
def test_blocks_are_copied_swapped_out_and_in_unharmed(tmp_path, in_file):
    caches = filled(LAYERS)
    transfer = make_transfer(caches, SWAPPED, str(tmp_path) if in_file else None)
    blocks = CacheBlocks(caches, SIZE, CpuDevice(), None, transfer)
    before = [contents(caches, block) for block in range(BLOCKS)]
    batch = moves(swap_out=[(5, 2)], block_copies=[(1, 3, SIZE), (2, 4, 3)])
    moved = blocks.prepare(batch)
    assert moved.unwritten == []
    assert alike(contents(caches, 3), before[1])
    for now, source, old in zip(contents(caches, 4), before[2], before[4], strict=True):
        assert torch.equal(now[:3], source[:3]) and torch.equal(now[3:], old[3:])
    poison(caches, [5], 0, SIZE)
    assert not any(torch.equal(a, b) for a, b in zip(contents(caches, 5), before[5], strict=True))
    moved = blocks.prepare(moves(swap_in=[(2, 6)]))
    assert moved.unread == []
    assert alike(contents(caches, 6), before[5])
    assert all(alike(contents(caches, block), before[block]) for block in (0, 1, 2, 7))


def test_poison_spares_what_a_request_reads():
    caches = filled(LAYERS)
    before = [contents(caches, block) for block in range(BLOCKS)]
    poison(caches, [2, 4], SIZE + 1, SIZE)
    assert alike(contents(caches, 2), before[2])
    for now, old in zip(contents(caches, 4), before[4], strict=True):
        assert torch.equal(now[:1], old[:1])
        rest = now[1:]
        assert rest.isnan().all() if rest.is_floating_point() else (rest == 255).all()


def test_a_backend_that_does_not_read_it_is_not_chosen(tmp_path, monkeypatch):
    folder = random_checkpoint(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "kv_layers", lambda shape: (INT8, LayerKV(2, 16, 16)))
    poor = replace(PagedAttention.capabilities, cache_dtypes=frozenset({"bfloat16"}))
    monkeypatch.setattr(PagedAttention, "capabilities", poor)
    with pytest.raises(ConfigError, match="paged reads no KV cache in int8"):
        load_model(ModelShape.from_folder(folder), folder, "auto", "cpu")
