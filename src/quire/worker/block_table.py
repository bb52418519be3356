"""Block tables of the running requests in one group of layers, and the slot of every token.

Block 0 is the null block: no token is ever written there, and table entries past a request's
last block point to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.utils.math import cdiv


class BlockTable:
    """The block ids of each row of the batch state.

    Args:
        num_rows: Number of requests there is room for at first; `grow` makes more.
        max_blocks: Blocks of the longest request.
        block_size: Tokens per block.
        window: Number of positions a token attends to, itself included; `None`: all up to itself.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, block_size: int, window: int | None = None
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.ids = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)

    def replace(self, row: int, block_ids: Sequence[int]) -> None:
        """Give a row a whole new table."""
        self.ids[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a row's table."""
        if not block_ids:
            return
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        assert end <= self.ids.shape[1], f"{end} blocks in a table for {self.ids.shape[1]}"
        self.ids[row, start:end] = block_ids
        self.num_blocks[row] = end

    def slot_mapping(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slots (`block id x block size + offset`) of tokens.

        Args:
            rows: `[T]`, the row of each token.
            positions: `[T]`, the position of each token in its request.

        Returns:
            int64 `[T]`.
        """
        indices, offsets = np.divmod(positions, self.block_size)
        blocks = self.ids[rows, indices].astype(np.int64)
        has_block = np.count_nonzero(blocks) == len(blocks)
        assert has_block, "a token without a block would overwrite the null block"
        slots: np.ndarray = blocks * self.block_size + offsets
        return slots

    def slots(self, rows: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """`slot_mapping` of one token of each row: a few numbers are looked up one by one, since
        operations on arrays cost more."""
        size, block_of = self.block_size, self.ids.item
        found = []
        for row, position in zip(rows, positions, strict=True):
            block = block_of(row, position // size)
            assert block, "a token without a block would overwrite the null block"
            found.append(block * size + position % size)
        return np.array(found, dtype=np.int64)

    def lines(self, rows: np.ndarray, computed: np.ndarray, max_len: int) -> np.ndarray:
        """Tables of some rows, int32 `[R, blocks]`: wide enough for `max_len` tokens.

        Blocks that no token from `computed [R]` on attends to may hold another request's tokens by
        now, so the null block takes their place.
        """
        lines: np.ndarray = self.ids[rows, : cdiv(max_len, self.block_size)]
        if self.window is not None:
            unseen = np.maximum(0, computed - self.window + 1) // self.block_size
            lines[np.arange(lines.shape[1]) < unseen[:, None]] = 0
        return lines

    def clear(self, num_rows: int) -> None:
        """Make empty tables for this many rows."""
        self.ids = np.zeros((num_rows, self.ids.shape[1]), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)

    def grow(self, num_rows: int) -> None:
        """Make room for more rows."""
        self.ids = grown(self.ids, num_rows)
        self.num_blocks = grown(self.num_blocks, num_rows)


def grown(array: np.ndarray, num_rows: int) -> np.ndarray:
    """A copy with more rows, the new ones zero."""
    bigger = np.zeros((num_rows, *array.shape[1:]), dtype=array.dtype)
    bigger[: len(array)] = array
    return bigger
