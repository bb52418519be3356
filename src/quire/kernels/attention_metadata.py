"""What every attention backend reads about one step: lengths, block tables, slots.

Knows no request ids, no scheduler and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """R requests with T tokens in one flat batch, in order, without padding."""

    query_start_loc: Tensor
    """`[R + 1]` int32: request r owns tokens `query_start_loc[r] .. query_start_loc[r + 1]`."""
    seq_lens: Tensor
    """`[R]` int32: context length after this step."""
    block_table: Tensor
    """`[R, max_blocks]` int32; entries past a request's blocks are never read."""
    slot_mapping: Tensor
    """`[T]` int64: where each token's key and value go (block * block_size + offset)."""
    token_request: Tensor
    """`[T]` int64: row of each token's request."""
    positions: Tensor
    """`[T]` int64: absolute position of each token."""
    block_size: int
    wanted: Tensor | None = None
    """`[W]` int64: tokens whose hidden state is asked for, ascending, the last ones of each
    request; `None`: all. The last layer may leave out the others but for their keys and values."""
    wanted_start_loc: Tensor | None = None
    """`[R + 1]` int32: as `query_start_loc`, of `wanted`."""
    by_layer: Sequence[AttentionMetadata] = field(default=(), repr=False)
    """What each layer reads, if that differs between groups of layers; else empty."""
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)
    """A backend's notes about this step, shared by all layers that read the same
    (it may put what it likes)."""

    def of_layer(self, index: int) -> AttentionMetadata:
        """What one layer reads."""
        return self.by_layer[index] if self.by_layer else self

    def select(self, hidden: Tensor) -> Tensor:
        """The rows of `[T, ...]` that are wanted."""
        return hidden if self.wanted is None else hidden[self.wanted]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        """R."""
        return self.seq_lens.shape[0]

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: str | torch.device = "cpu",
    ) -> AttentionMetadata:
        """Fill all fields from plain numbers.

        Args:
            query_lens: tokens of each request in this step, at least 1.
            seq_lens: context length of each request after this step.
            block_tables: blocks of each request, enough for `seq_lens`.
        """
        for new, total, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
            assert 1 <= new <= total, f"{new} new tokens of {total}"
            assert total <= len(blocks) * block_size, f"{len(blocks)} blocks for {total} tokens"
        lens = torch.tensor(query_lens, dtype=torch.int64)
        ends = torch.tensor(seq_lens, dtype=torch.int64)
        starts = torch.zeros(len(lens) + 1, dtype=torch.int64)
        torch.cumsum(lens, 0, out=starts[1:])
        token_request = torch.repeat_interleave(torch.arange(len(lens)), lens)
        first = (ends - lens - starts[:-1])[token_request]
        positions = torch.arange(len(token_request)) + first
        table = _table(block_tables)
        blocks_of = table[token_request, positions // block_size].to(torch.int64)
        return cls(
            query_start_loc=starts.to(device, torch.int32),
            seq_lens=ends.to(device, torch.int32),
            block_table=table.to(device),
            slot_mapping=(blocks_of * block_size + positions % block_size).to(device),
            token_request=token_request.to(device),
            positions=positions.to(device),
            block_size=block_size,
        )


def _table(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ragged lists as `[R, max_blocks]` int32, filled up with 0."""
    table = torch.zeros(len(rows), max((len(row) for row in rows), default=0), dtype=torch.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = torch.tensor(row, dtype=torch.int32)
    return table
