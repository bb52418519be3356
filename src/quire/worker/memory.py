"""Computes the number of KV blocks from limits and measurements, or raises an error with the
numbers.

Knows no device and no tensor: the worker measures, this module decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from quire.config import CacheConfig
from quire.config.kv_groups import KVGroup, blocks_per_request, form_groups, page_bytes
from quire.config.shape import LayerKV
from quire.errors import NotEnoughMemory
from quire.logger import get_logger
from quire.utils.math import cdiv, human_bytes

logger = get_logger(__name__)

DEFAULT_SWAP_SPACE = 4.0
"""GiB of host memory behind the KV cache of a GPU."""
MOST_IDLE_BLOCKS = 2**20
"""Largest pool for models that keep nothing per token: more tokens than a step could compute."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the worker measured, in bytes."""

    device: str
    free: int
    """Free at start, before the weights were loaded."""
    weights: int
    default_limit: int | None
    """Largest KV cache on this device unless the user says otherwise."""
    swap_room: int | None = None
    """Free where the second tier would be, if that is not the device: host memory, or the disk of
    `--swap-dir`; `None`: not known."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The size of the KV cache."""

    num_blocks: int
    """Including block 0, the null block, which holds no tokens."""
    block_size: int
    bytes: int
    blocks_per_request: int
    """Blocks of one request of the greatest length, at most: a window gives some back."""
    max_model_len: int
    groups: tuple[KVGroup, ...]
    num_swap_blocks: int = 0
    """Blocks of the second tier."""

    @property
    def tokens(self) -> int:
        """Number of tokens that fit. With several groups or a window, this is for requests of the
        greatest length."""
        if self.windows == (None,):
            return (self.num_blocks - 1) * self.block_size
        return int(self.max_concurrency * self.max_model_len)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def max_concurrency(self) -> float:
        """Requests of the greatest length that fit at once."""
        return (self.num_blocks - 1) / self.blocks_per_request


def check_weights(facts: MemoryFacts, cache: CacheConfig) -> None:
    """Refuse weights that do not fit, before they are read.

    Raises:
        NotEnoughMemory: naming what is needed and available.
    """
    usable = int(facts.free * cache.gpu_memory_utilization)
    if facts.weights > usable:
        raise NotEnoughMemory(
            f"the weights need {human_bytes(facts.weights)}, but {human_bytes(usable)} may be used "
            f"({human_bytes(facts.free)} free x --gpu-memory-utilization "
            f"{cache.gpu_memory_utilization:g}): use a smaller model, --dtype bfloat16 if the "
            "weights are float32, or free some memory"
        )


def plan_kv_cache(
    layers: Sequence[LayerKV],
    cache: CacheConfig,
    facts: MemoryFacts,
    *,
    bytes_per_element: int,
    max_num_seqs: int,
    max_model_len: int,
    max_chunk_tokens: int,
) -> KVCachePlan:
    """Determine the groups of layers and the number of blocks.

    A step computes at most `max_chunk_tokens` of one request, so a group with a window holds at
    most these tokens and the window before them.

    `num_gpu_blocks_override` takes precedence, then `kv_cache_memory_bytes`. Otherwise the cache
    takes what the device can spare, but no more than `max_num_seqs` requests of `max_model_len`
    tokens can fill.

    Raises:
        NotEnoughMemory: not even one request of `max_model_len` tokens fits.
    """
    groups = form_groups(layers, hybrid=not cache.disable_hybrid_kv_cache_manager)
    windows = [group.window for group in groups]
    per_block = page_bytes(layers, groups, cache.block_size, bytes_per_element)

    def blocks_of(num_tokens: int) -> int:
        return blocks_per_request(windows, num_tokens, max_chunk_tokens, cache.block_size)

    per_request = blocks_of(max_model_len)
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = cache.kv_cache_memory_bytes // per_block
    else:
        num_blocks = min(_spare(cache, facts) // per_block, max_num_seqs * per_request + 1)
    if num_blocks < per_request + 1:
        lengths = range(cache.block_size, max_model_len, cache.block_size)
        longest = cache.block_size * bisect_right(lengths, num_blocks - 1, key=blocks_of)
        raise NotEnoughMemory(
            _too_little(num_blocks, per_request + 1, per_block, cache, max_model_len, longest)
        )
    size = num_blocks * per_block
    _check_fits(size, per_block, cache, facts)
    swap = _swap_bytes(cache, facts, size) // per_block
    return KVCachePlan(num_blocks, cache.block_size, size, per_request, max_model_len, groups, swap)


def _check_fits(size: int, per_block: int, cache: CacheConfig, facts: MemoryFacts) -> None:
    """Refuse a cache of a requested size that exceeds the memory there is.

    Raises:
        NotEnoughMemory: naming the requested size and the memory available.
    """
    room = max(0, facts.free - facts.weights)
    if size <= room:
        return
    if cache.num_gpu_blocks_override is not None:
        asked = f"--num-gpu-blocks-override {cache.num_gpu_blocks_override}"
        most = room // per_block
    else:
        asked, most = f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}", room
    raise NotEnoughMemory(
        f"{asked} is a KV cache of {human_bytes(size)}, but only {human_bytes(room)} is left of "
        f"the {human_bytes(facts.free)} of free memory beside weights of "
        f"{human_bytes(facts.weights)}: give at most {most}, or free some memory"
    )


def _swap_bytes(cache: CacheConfig, facts: MemoryFacts, pool: int) -> int:
    """Bytes of the second tier."""
    default = 0 if facts.device == "cpu" else DEFAULT_SWAP_SPACE
    wanted = int((default if cache.swap_space is None else cache.swap_space) * 2**30)
    spare = facts.swap_room
    if facts.device == "cpu" and cache.swap_dir is None:
        spare = max(0, facts.free - facts.weights - pool)
    if spare is None or wanted <= spare:
        return wanted
    if cache.swap_dir is not None:
        raise NotEnoughMemory(
            f"--swap-space {cache.swap_space:g} GiB does not fit on the disk of --swap-dir "
            f"{cache.swap_dir}: {human_bytes(spare)} is free; lower it, or give another folder"
        )
    raise NotEnoughMemory(
        f"--swap-space {wanted / 2**30:g} GiB does not fit beside weights and KV cache: "
        f"{human_bytes(spare)} of memory is left; lower it, or give --swap-dir to keep it in a file"
    )


def plan_without_cache(
    block_size: int, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> KVCachePlan:
    """Blocks for models that keep nothing per token (encoders). They exist only in the scheduler's
    books, and are enough for every step, because a request holds its blocks for one step."""
    per_request = cdiv(max_model_len, block_size)
    # A step holds no more than its tokens, nor than as many whole requests as may run.
    most = min(max_num_batched_tokens // block_size, max_num_seqs * per_request)
    num_blocks = min(most + max_num_seqs, MOST_IDLE_BLOCKS) + per_request + 1
    groups = (KVGroup(()),)
    return KVCachePlan(num_blocks, block_size, 0, per_request, max_model_len, groups)


def _spare(cache: CacheConfig, facts: MemoryFacts) -> int:
    spare = max(0, int(facts.free * cache.gpu_memory_utilization) - facts.weights)
    return spare if facts.default_limit is None else min(spare, facts.default_limit)


def _too_little(
    num_blocks: int,
    needed: int,
    per_block: int,
    cache: CacheConfig,
    max_model_len: int,
    longest: int,
) -> str:
    remedy = f"set --max-model-len {longest} or less, or raise " if longest else "raise "
    if cache.num_gpu_blocks_override is not None:
        remedy += f"--num-gpu-blocks-override to at least {needed}"
    elif cache.kv_cache_memory_bytes is not None:
        remedy += f"--kv-cache-memory-bytes to at least {needed * per_block}"
    else:
        remedy += (
            "--gpu-memory-utilization or, on a CPU, QUIRE_CPU_KVCACHE_SPACE (GiB), "
            "or free some memory"
        )
    return (
        f"the KV cache of one request of --max-model-len {max_model_len} needs "
        f"{human_bytes(needed * per_block)} ({needed} blocks), but only "
        f"{human_bytes(num_blocks * per_block)} ({num_blocks} blocks) is available; "
        f"the longest length that fits is {longest} tokens: {remedy}"
    )


def plan_lines(plan: KVCachePlan, device: str, max_model_len: int) -> list[str]:
    """What fits, in vLLM's words. With a GPU, the blocks of the second tier are called CPU
    blocks."""
    pool, second = ("CPU", "swap") if device == "cpu" else ("GPU", "CPU")
    return [
        f"{pool} KV cache size: {plan.tokens:,} tokens",
        f"# {pool} blocks: {plan.num_blocks}, # {second} blocks: {plan.num_swap_blocks}",
        f"Maximum concurrency for {max_model_len:,} tokens per request: "
        f"{plan.max_concurrency:.2f}x",
    ]


def log_plan(plan: KVCachePlan, device: str, max_model_len: int) -> None:
    """Log what fits."""
    for line in plan_lines(plan, device, max_model_len):
        logger.info("%s", line)
