"""A scheduler with its KV cache manager, from a configuration and the sizes that were settled.

Engine and simulator make theirs here, so that what is simulated is what runs. Knows no executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.config import EngineConfig
from quire.core.kv.manager import KVCacheManager
from quire.core.kv.residency import BlockResidency
from quire.core.scheduler import Scheduler
from quire.utils.timing import Clock


class Sizes(Protocol):
    """What was settled on a machine."""

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        ...

    @property
    def kv_windows(self) -> Sequence[int | None]:
        """Of each group of layers, the positions that a token sees; `None`: all before it."""
        ...

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of the second tier."""
        ...


def build_scheduler(
    config: EngineConfig, sizes: Sizes, clock: Clock, *, max_in_flight: int = 1
) -> Scheduler:
    """The scheduler of one engine core.

    Args:
        config: Resolved.
        sizes: Of its KV cache.
        clock: Monotonic time.
        max_in_flight: Batches that the executor takes at once.
    """
    length, observed = config.model.max_model_len, config.observability
    assert length is not None, "resolve() settles it"
    kv = KVCacheManager(
        sizes.num_blocks,
        config.cache.block_size,
        config.cache.enable_prefix_caching,
        length,
        sizes.kv_windows,
        config.scheduler.max_num_batched_tokens,
        sizes.num_swap_blocks,
        BlockResidency(observed.kv_cache_metrics_sample, clock)
        if observed.kv_cache_metrics
        else None,
    )
    return Scheduler(
        config.scheduler, kv, max_model_len=length, clock=clock, max_in_flight=max_in_flight
    )
