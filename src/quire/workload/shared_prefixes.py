"""Finds out which earlier sequence a new one begins like, and for how many tokens.

Keeps salted hashes of blocks of tokens, and of each block its tokens, in bounded memory: what was
seen longest ago is forgotten first. Knows no engine and no text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

LEAST_SHARED: Final = 4
"""Tokens of a block that must be equal to be told: the engine copies no fewer (`MIN_COPIED_TOKENS`
of `quire.core.kv.manager`)."""
MOST_BLOCKS: Final = 200_000
"""Blocks that are remembered: with 16 tokens each, some 160 MB."""
MOST_BRANCHES: Final = 4096
"""Different blocks with the same beginning that are remembered. A system prompt that ends within a
block has as many as users have questions."""


class Sharing(NamedTuple):
    """What a sequence has in common with earlier ones."""

    block_hashes: list[str]
    """Of its full blocks."""
    number: int
    """Of the sequence that begins like it for most tokens; 0: none."""
    length: int
    """For how many."""


class Branches:
    """Blocks that begin alike, each with the number of its sequence: which of them begins like
    another for most tokens.

    Args:
        most: That are remembered; then that of the lowest number goes.
    """

    __slots__ = ("_most", "_numbers", "_sorted")

    def __init__(self, most: int = MOST_BRANCHES) -> None:
        self._most = most
        self._sorted: list[array[int]] = []
        self._numbers: list[int] = []
        # of these

    def __len__(self) -> int:
        return len(self._sorted)

    def best(self, block: array[int]) -> tuple[int, int]:
        """The sequence that goes on like `block` for most tokens, and how many they are."""
        # Whatever shares most with a block stands beside its place among sorted ones.
        place, best = bisect_left(self._sorted, block), (0, 0)
        for index in (place - 1, place):
            if 0 <= index < len(self._sorted):
                count = _common(block, self._sorted[index])
                if count > best[1]:
                    best = (self._numbers[index], count)
        return best

    def add(self, number: int, block: array[int]) -> None:
        """Remember it, unless another says as much."""
        place = bisect_left(self._sorted, block)
        if place < len(self._sorted) and self._sorted[place][: len(block)] == block:
            return
        self._sorted.insert(place, block)
        self._numbers.insert(place, number)
        if len(self._sorted) > self._most:
            oldest = self._numbers.index(min(self._numbers))
            del self._sorted[oldest], self._numbers[oldest]


class SharedPrefixes:
    """Remembers sequences.

    Args:
        salt: Without it nobody can tell from a hash which tokens it stands for; at most 64 bytes.
        block_size: Tokens per block.
        most_blocks: That are remembered.
    """

    def __init__(self, salt: bytes, block_size: int = 16, most_blocks: int = MOST_BLOCKS) -> None:
        self._salt, self._size, self._most = salt, block_size, most_blocks
        self._owners: OrderedDict[bytes, int] = OrderedDict()
        # by the hash of everything up to a block's end
        self._next: OrderedDict[bytes, Branches] = OrderedDict()
        # by what comes before a block and its first tokens
        self._num_blocks = 0
        # in these

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, number: int, tokens: Sequence[int], keys: str = "") -> Sharing:
        """Compare a sequence with those before it, and remember it.

        Args:
            number: Its own.
            tokens: All of it.
            keys: Sequences with different keys share nothing.
        """
        ids, size = array("q", tokens), self._size
        hashes = self._hashes(ids, keys)
        owner = shared = 0
        for known, block_hash in enumerate(hashes[1:]):
            found = self._owners.get(block_hash)
            if found is None:
                break
            self._owners.move_to_end(block_hash)
            owner, shared = found, (known + 1) * size
        place = shared // size
        block = ids[shared : shared + size]
        branches = self._next.get(_branch(hashes[place], block))
        partner, more = (0, 0) if branches is None else branches.best(block)
        if more:
            owner, shared = partner, shared + more
        self._remember(number, hashes, ids, place)
        return Sharing([block_hash.hex() for block_hash in hashes[1:]], owner, shared)

    def _hashes(self, ids: array[int], keys: str) -> list[bytes]:
        """Of what comes before the first block, and of everything up to the end of each."""
        running = blake2b(keys.encode("utf-8", "surrogatepass"), key=self._salt, digest_size=8)
        raw, width = ids.tobytes(), self._size * ids.itemsize
        hashes = [running.digest()]
        for end in range(width, len(raw) + 1, width):
            running.update(raw[end - width : end])
            hashes.append(running.digest())
        return hashes

    def _remember(self, number: int, hashes: list[bytes], ids: array[int], place: int) -> None:
        size = self._size
        for index in range(place, len(hashes)):
            block = ids[index * size : (index + 1) * size]
            if len(block) >= LEAST_SHARED:
                name = _branch(hashes[index], block)
                if (branches := self._next.get(name)) is None:
                    branches = self._next[name] = Branches()
                self._next.move_to_end(name)
                self._num_blocks -= len(branches)
                branches.add(number, block)
                self._num_blocks += len(branches)
            if index + 1 < len(hashes):
                self._owners[hashes[index + 1]] = number
        while len(self._owners) > self._most:
            self._owners.popitem(last=False)
        while self._num_blocks > self._most:
            self._num_blocks -= len(self._next.popitem(last=False)[1])


def _branch(before: bytes, block: array[int]) -> bytes:
    return before + block[:LEAST_SHARED].tobytes()


def _common(a: array[int], b: array[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
