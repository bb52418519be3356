"""Token ids for the requests of a trace: made up, and shared exactly as the trace says.

Two sequences have equal beginnings for as many tokens as the trace tells, and the token after that
differs. Knows no scheduler.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

from quire.workload.trace import TraceRequest

VOCABULARY: Final = 2**31
"""Made-up ids are below this, unless a model has to take them."""
DRAWN: Final = 2**20
"""Ids that are drawn at once; `random` cannot draw 2**31 bits and more."""
Piece = tuple[int, int]
"""(seed of made-up tokens, where they end in the sequence)."""


class Sequences:
    """Makes prompts, and the outputs that others share.

    Args:
        requests: All of the trace; which of them others refer to is remembered, nothing else.
        block_size: Of their `block_hashes`.
        vocabulary: Ids are below this.
    """

    def __init__(
        self, requests: Iterable[TraceRequest], block_size: int, vocabulary: int = VOCABULARY
    ) -> None:
        self.block_size, self.vocabulary = block_size, vocabulary
        self._pieces: dict[int, list[Piece]] = {}
        # of the requests that others share with
        self._fresh = 0
        requests = list(requests)
        wanted = {request.shared_with for request in requests} - {0}
        # `shared_with` is exact, hashes tell of whole blocks: where there are both, it counts.
        self._by_hashes = not wanted
        for request in requests:
            if request.number in wanted:
                self._pieces[request.number] = self._pieces_of(request)

    def make(
        self, request: TraceRequest, with_output: bool = False
    ) -> tuple[list[int], list[int] | None]:
        """The prompt of a request, and its output if others may share it, or if it is wanted;
        `None`: its output is like no other, whatever its ids."""
        if request.token_ids is not None:
            return self._split(request, list(request.token_ids))
        if request.number in self._pieces:
            return self._split(request, self._tokens(self._pieces[request.number]))
        if request.block_hashes and self._by_hashes:
            return self._split(request, self._from_hashes(request))
        pieces = self._pieces_of(request, request.prompt_len)
        if with_output or request.shared_len > request.prompt_len:
            return self._split(request, self._tokens(self._pieces_of(request)))
        return self._tokens(pieces), None

    def _split(
        self, request: TraceRequest, tokens: list[int]
    ) -> tuple[list[int], list[int] | None]:
        return tokens[: request.prompt_len], tokens[request.prompt_len :]

    def _pieces_of(self, request: TraceRequest, length: int | None = None) -> list[Piece]:
        """What a sequence is made of: what others began, and a piece of its own."""
        length = request.prompt_len + request.output_len if length is None else length
        pieces: list[Piece] = []
        shared = min(request.shared_len, length)
        for seed, end in self._pieces.get(request.shared_with, ()):
            pieces.append((seed, min(end, shared)))
            if end >= shared:
                break
        if not pieces or pieces[-1][1] < length:
            self._fresh += 1
            pieces.append((request.number or -self._fresh, length))
        return pieces

    def _tokens(self, pieces: list[Piece]) -> list[int]:
        tokens: list[int] = []
        for seed, end in pieces:
            # From the beginning each time: a piece that is cut short has the same tokens.
            tokens += self._made_up(seed, end)[len(tokens) :]
        return tokens

    def _made_up(self, seed: int | str, count: int) -> list[int]:
        """`count` ids; fewer of the same seed are a beginning of more."""
        made, drawn = random.Random(f"quire{seed}"), []
        for start in range(0, count, DRAWN):
            raw = made.randbytes(4 * min(DRAWN, count - start))
            drawn += [n % self.vocabulary for n in memoryview(raw).cast("I").tolist()]
        return drawn

    def _from_hashes(self, request: TraceRequest) -> list[int]:
        tokens: list[int] = []
        length = request.prompt_len + request.output_len
        for block_hash in request.block_hashes:
            tokens += self._made_up(block_hash, self.block_size)
        self._fresh += 1
        own = length - len(tokens)
        if own > 0:
            tokens += self._made_up(request.number or -self._fresh, own)
        return tokens[:length]
