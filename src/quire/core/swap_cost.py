"""Whether a preempted request is better swapped out or computed again, by measured costs.

Seconds per token computed come from steps with prompts, seconds per block copied from steps that
moved blocks; both are moving averages. Until a copy has been measured it counts as free, so the
first one becomes the measurement. Knows no blocks and no requests.
"""

from __future__ import annotations

from typing import Final

from quire.core.batch import BatchResult, ScheduledBatch

_WEIGHT: Final = 0.2
"""Of the latest measurement in an average."""


class SwapCost:
    """Measured costs, and the choice they make.

    Args:
        mode: `auto`, or `recompute` or `swap` to force one.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.seconds_per_token = 0.0
        self.seconds_per_block = 0.0

    def observe(self, batch: ScheduledBatch, result: BatchResult) -> None:
        """Learn from a step."""
        moved = len(batch.swap_out) + len(batch.swap_in)
        if moved and result.swap_seconds:
            each = result.swap_seconds / moved
            self.seconds_per_block = _averaged(self.seconds_per_block, each)
        # In a step of mostly decodes a token costs more than it would when recomputed.
        total = batch.total_num_scheduled_tokens
        if result.forward_seconds and 2 * batch.num_prompt_tokens > total:
            each = result.forward_seconds / total
            self.seconds_per_token = _averaged(self.seconds_per_token, each)

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """For a request with so many computed tokens in so many blocks."""
        if self.mode != "auto":
            return self.mode == "swap"
        # There and back again.
        return 2 * num_blocks * self.seconds_per_block <= num_tokens * self.seconds_per_token


def _averaged(average: float, latest: float) -> float:
    return latest if not average else average + _WEIGHT * (latest - average)
