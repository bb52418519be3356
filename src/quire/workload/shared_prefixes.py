"""Finds out which earlier sequence a new one begins like, and for how many tokens.

Keeps salted hashes of blocks of tokens, and of each block its tokens, in bounded memory: what was
seen longest ago is forgotten first. Knows no engine and no text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

LEAST_SHARED: Final = 4
"""Tokens of a block that must be equal to be told: the engine copies no fewer (`MIN_COPIED_TOKENS`
of `quire.core.kv.manager`)."""
MOST_BLOCKS: Final = 200_000
"""Blocks that are remembered: with 16 tokens each, some 60 MB."""
MOST_BRANCHES: Final = 32
"""Blocks with the same beginning that are compared."""


class Sharing(NamedTuple):
    """What a sequence has in common with earlier ones."""

    block_hashes: list[str]
    """Of its full blocks."""
    number: int
    """Of the sequence that begins like it for most tokens; 0: none."""
    length: int
    """For how many."""


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
        self._next: OrderedDict[bytes, list[tuple[int, array[int]]]] = OrderedDict()
        # by what comes before a block and its first tokens: whose it is, and all its tokens

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
        partner, more = self._compare(hashes[place], ids[shared : shared + size])
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

    def _compare(self, before: bytes, block: array[int]) -> tuple[int, int]:
        """The sequence that goes on like `block` for most tokens, and how many they are."""
        best = (0, 0)
        for number, other in self._next.get(_branch(before, block), ()):
            count = _common(block, other)
            if count > best[1]:
                best = (number, count)
        return best

    def _remember(self, number: int, hashes: list[bytes], ids: array[int], place: int) -> None:
        size = self._size
        for index in range(place, len(hashes)):
            block = ids[index * size : (index + 1) * size]
            if len(block) >= LEAST_SHARED:
                branches = self._next.setdefault(_branch(hashes[index], block), [])
                branches.append((number, block))
                del branches[:-MOST_BRANCHES]
            if index + 1 < len(hashes):
                self._owners[hashes[index + 1]] = number
        for known in (self._owners, self._next):
            while len(known) > self._most:
                known.popitem(last=False)


def _branch(before: bytes, block: array[int]) -> bytes:
    return before + block[:LEAST_SHARED].tobytes()


def _common(a: array[int], b: array[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
