"""Decides by measured costs whether a preempted request is swapped out or computed again.

The cost of computing a token is measured in steps that are mostly prompts, the cost of copying a
block in steps that moved blocks; both are moving averages, in seconds. Copying counts as free
until it has been measured, so that a first copy is made and can be measured. Knows no blocks and
no requests.
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
        # Decodes are bound by memory: in a step of mostly decodes a token costs much more than it
        # would in the prompt that a recomputed request is.
        total = batch.total_num_scheduled_tokens
        if result.forward_seconds and 2 * batch.num_prompt_tokens > total:
            each = result.forward_seconds / total
            self.seconds_per_token = _averaged(self.seconds_per_token, each)

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to swap a request out that has so many computed tokens in so many blocks."""
        if self.mode != "auto":
            return self.mode == "swap"
        # Each block is copied out and, later, back in.
        return 2 * num_blocks * self.seconds_per_block <= num_tokens * self.seconds_per_token


def _averaged(average: float, latest: float) -> float:
    return latest if not average else average + _WEIGHT * (latest - average)
