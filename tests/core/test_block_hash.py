"""The hashes read from one running hash are those of the prefixes, each hashed in one go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.block_hash import extend_block_hashes, hash_prefix, parent_key
from quire.core.request import Request
from quire.params import SamplingParams

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60)


@given(TOKENS, st.lists(st.integers(0, 60), max_size=4), st.sampled_from([4, 8]))
def test_extending_in_pieces_is_hashing_each_prefix(
    tokens: list[int], cuts: list[int], block_size: int
) -> None:
    request = Request("r", tokens[:1], SamplingParams(), cache_salt="s")
    for cut in [*sorted(cuts), len(tokens)]:
        request.all_token_ids = tokens[: max(cut, len(request.all_token_ids))]
        extend_block_hashes(request, block_size)
    ends = range(block_size, len(tokens) + 1, block_size)
    assert request.block_hashes == [hash_prefix(tokens[:end], b"salt:s") for end in ends]
    assert parent_key(request, 0) == hash_prefix([], b"salt:s")
    assert all(parent_key(request, i + 1) == h for i, h in enumerate(request.block_hashes))


@given(
    st.tuples(st.none() | st.text(max_size=9), st.none() | st.text(max_size=9)),
    st.tuples(st.none() | st.text(max_size=9), st.none() | st.text(max_size=9)),
)
def test_adapter_and_salt_tell_equal_tokens_apart(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> None:
    def key(adapter: str | None, salt: str | None) -> bytes:
        request = Request("r", [1], SamplingParams(), adapter=adapter, cache_salt=salt)
        return parent_key(request, 0)

    assert (key(*one) == key(*other)) == (one == other)
    assert key("salt:a", None) != key(None, "a") != key("a", None)
