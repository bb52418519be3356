"""What an engine would say of itself at its start, found out without reading weights.

The worker that would run sizes its KV cache, from the configuration and the headers of the weights.
Knows no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import EngineConfig
from quire.executor.base import ExecutorInfo
from quire.worker.memory import plan_lines
from quire.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class SizedEngine:
    """An engine that could start."""

    config: EngineConfig
    """Resolved."""
    info: ExecutorInfo
    kv_tokens: int
    """That the KV cache holds; with windows, of requests of the greatest length."""
    max_concurrency: float
    """Requests of the greatest length at once."""
    lines: list[str]
    """What the engine logs about its KV cache."""

    @property
    def kv_bytes_per_token(self) -> float:
        """Of the KV cache."""
        return self.info.kv_cache_bytes / max(1, self.info.num_blocks * self.info.block_size)


def size_engine(config: EngineConfig, memory: int | None = None) -> SizedEngine:
    """Size an engine.

    Args:
        config: As given by the user, with the model on this machine (`located`).
        memory: Bytes that are free, instead of those that are.

    Raises:
        StartupError: it could not start; the message is that of the start.
    """
    shape = config.model.read_shape()
    resolved, _ = config.resolve(shape)
    worker = Worker(resolved, shape)
    try:
        plan = worker.size(memory)
    finally:
        worker.shutdown()
    info = ExecutorInfo(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_model_len=worker.max_model_len,
        vocab_size=shape.vocab_size,
        device=worker.device.name,
        place=worker.place,
        dtype=worker.dtype,
        weight_bytes=worker.weight_bytes,
        kv_cache_bytes=plan.bytes,
        kv_windows=plan.windows,
        num_swap_blocks=plan.num_swap_blocks,
    )
    lines = plan_lines(plan, info.device, info.max_model_len) if plan.bytes else []
    return SizedEngine(resolved, info, plan.tokens, plan.max_concurrency, lines)
