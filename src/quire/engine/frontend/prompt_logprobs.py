"""Log-probabilities of a prompt, as the core sent them until somebody reads them.

A prompt of 32,000 tokens with 20 candidates each makes 672,000 `Logprob`s, which takes longer than
other streams may wait. So a position becomes a dictionary when it is looked at, each time anew.
Until then it is bytes: every request waits while the garbage collector looks at a hundred thousand
lists. Knows no request and no format of replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, overload

import msgspec

from quire.core.batch import TokenLogprobs
from quire.outputs import Logprob, PositionLogprobs

SpellToken = Callable[[int], str]
"""The text of one token id."""

pack = msgspec.msgpack.Encoder().encode
"""A position as bytes."""
_unpack = msgspec.msgpack.Decoder(TokenLogprobs).decode
CANDIDATE_BYTES: Final = 14
"""Of a candidate in them: an id and a float64 with their marks."""


def candidates(
    position: TokenLogprobs, spell: SpellToken | None, named: int = 0
) -> PositionLogprobs:
    """The sampled token with its own rank, then the likeliest, ranked 1, 2, ..., then as many as
    the request named (`named`), whose ranks nobody looked up."""
    found: PositionLogprobs = {}
    ranked = len(position.token_ids) - named
    pairs = zip(position.token_ids, position.logprobs, strict=True)
    for rank, (token_id, logprob) in enumerate(pairs):
        if token_id not in found:
            known = (rank or position.rank) if rank < ranked else None
            found[token_id] = Logprob(logprob, known, None if spell is None else spell(token_id))
    return found


class PromptLogprobs(Sequence[PositionLogprobs | None]):
    """One entry per token of the prompt; entry 0 is `None`, because nothing precedes it.

    Args:
        positions: What the core sent, each through `pack`.
        spell: Makes the texts of tokens; `None`: they have none.
    """

    def __init__(self, positions: Sequence[bytes | None], spell: SpellToken | None) -> None:
        self._positions = positions
        self._spell = spell

    @property
    def num_candidates(self) -> int:
        """Of all positions together, about."""
        return sum([len(p) for p in self._positions if p is not None]) // CANDIDATE_BYTES

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs | None]: ...
    def __getitem__(
        self, index: int | slice
    ) -> PositionLogprobs | list[PositionLogprobs | None] | None:
        if isinstance(index, slice):
            return [self._convert(position) for position in self._positions[index]]
        return self._convert(self._positions[index])

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        return map(self._convert, self._positions)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PromptLogprobs):
            return self._positions == other._positions
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def _convert(self, position: bytes | None) -> PositionLogprobs | None:
        return None if position is None else candidates(_unpack(position), self._spell)
