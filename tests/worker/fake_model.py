"""A model of almost nothing that notices every misplaced key, and a plain twin of it.

The KV cache holds (token + 1, position) at each slot. The logits of a position are a function of
all (position, token) pairs read back through the block table, so a wrong slot, block, position or
context length changes them, or raises at once.
"""

import numpy as np
import torch

from quire.kernels.dispatch import ops
from quire.kernels.rows import largest_columns

VOCAB = 50
_MOD = 2**31 - 1


def fold(tokens):
    """A number for a sequence of tokens that depends on their order."""
    value = 7
    for position, token in enumerate(tokens):
        value = (value * 48271 + token * 31 + position + 1) % _MOD
    return value


def logits_of(value):
    """float32 logits `[VOCAB]` for a folded number."""
    ids = np.arange(1, VOCAB + 1, dtype=np.int64)
    return (((value % 1_000_003) * ids * 7919 % 10_007) / 10_007 * 8 - 4).astype(np.float32)


class FakeModel:
    ops = ops
    strict = True
    """Raise at a misplaced position; otherwise it only changes the logits, as in a real model."""

    def __init__(self):
        self.rows_of_logits = 0
        self.calls = 0

    def forward(self, input_ids, positions, kv_caches, metadata):
        self.calls += 1
        keys, values = kv_caches[0]
        flat_keys, flat_values = keys.view(-1), values.view(-1)
        assert (metadata.slot_mapping >= metadata.block_size).all(), "null block written"
        assert len(set(metadata.slot_mapping.tolist())) == len(positions), "a slot written twice"
        assert torch.equal(positions, metadata.positions)
        flat_keys[metadata.slot_mapping] = input_ids + 1
        flat_values[metadata.slot_mapping] = positions
        starts = metadata.query_start_loc.tolist()
        assert starts[-1] == len(input_ids)
        hidden = []
        for token, request in enumerate(metadata.token_request.tolist()):
            assert starts[request] <= token < starts[request + 1]
            position = int(positions[token])
            context = torch.arange(position + 1)
            blocks = metadata.block_table[request].long()[context // metadata.block_size]
            slots = blocks * metadata.block_size + context % metadata.block_size
            placed = torch.equal(flat_values[slots], context)
            assert placed or not self.strict, "a position is not where it should be"
            hidden.append(fold((flat_keys[slots] - 1).tolist()))
        for request, length in enumerate(metadata.seq_lens.tolist()):
            assert positions[starts[request + 1] - 1] == length - 1
        return metadata.select(torch.tensor(hidden, dtype=torch.float64).unsqueeze(1))

    def compute_logits(self, hidden, keep=None):
        self.rows_of_logits += len(hidden)
        return torch.from_numpy(np.stack([logits_of(int(v)) for v in hidden.flatten()]))

    def tokens_after(self, last, kv_caches, picks):
        return None

    def logits_after(self, last, kv_caches):
        return None

    def compute_likeliest(self, hidden):
        return largest_columns(self.compute_logits(hidden))


def fake_caches(num_blocks, block_size):
    size = (num_blocks, block_size)
    return [(torch.full(size, -99), torch.full(size, -99))]
