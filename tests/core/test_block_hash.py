"""The chain made in one go is the chain of single hashes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.block_hash import NONE_HASH, extend_block_hashes, hash_block
from quire.core.request import Request
from quire.params import SamplingParams

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60)


@given(TOKENS, st.lists(st.integers(0, 60), max_size=4), st.sampled_from([4, 8]))
def test_extending_in_pieces_is_hashing_block_by_block(
    tokens: list[int], cuts: list[int], block_size: int
) -> None:
    request = Request("r", tokens[:1], SamplingParams(), cache_salt="s")
    for cut in [*sorted(cuts), len(tokens)]:
        request.all_token_ids = tokens[: max(cut, len(request.all_token_ids))]
        extend_block_hashes(request, block_size)
    parent, expected = NONE_HASH, []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra = b"" if expected else b"salt:s"
        parent = hash_block(parent, tokens[start : start + block_size], extra)
        expected.append(parent)
    assert request.block_hashes == expected
