"""The books of the second tier's blocks: which are pinned, what is found in them, which is evicted
first.

A block of the tier is *pinned* (a swapped-out request or a copy under way needs it), *kept* (not
pinned, but its content can be found by key) or *empty*. Kept blocks are evicted least recently
used first. It moves no data and knows no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

Key = tuple[int, bytes]
"""Group of layers, and hash of the content."""


class HostTier:
    """A fixed number of blocks beside the pool, in host memory or on disk.

    Args:
        num_blocks: At least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks))[::-1]
        self._pins: dict[int, int] = {}
        self._key_of: dict[int, Key] = {}
        self._by_key: dict[Key, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._taken: set[int] = set()
        # since `mark`: what these held before is lost, whatever is undone

    def mark(self) -> None:
        """Start to remember which blocks are taken, for `undo`."""
        self._taken.clear()

    def undo(self, pins: Mapping[int, int]) -> None:
        """Rebuild the books: only content that was here at `mark` and still is can be found.

        Args:
            pins: The holds that remain, block to number.
        """
        self._pins = dict(pins)
        self._key_of = {b: key for b, key in self._key_of.items() if b not in self._taken}
        self._by_key = {key: block for block, key in self._key_of.items()}
        free = [b for b in {**self._kept, **self._key_of} if b in self._key_of and b not in pins]
        self._kept = OrderedDict.fromkeys(free)
        places = {*self._kept, *pins}
        self._empty = [b for b in reversed(range(self.num_blocks)) if b not in places]

    @property
    def num_pinned(self) -> int:
        """Blocks that must not be given up."""
        return len(self._pins)

    def find(self, key: Key) -> int | None:
        """The block with this content, which counts as used now; None if there is none."""
        block = self._by_key.get(key)
        if block is not None and block in self._kept:
            self._kept.move_to_end(block)
        return block

    def take(self, key: Key | None) -> int | None:
        """A block for new content, pinned; None if all are pinned.

        Args:
            key: What the content can be found by; None: only the caller knows where it is.
        """
        if not self._empty and self._kept:
            self._forget(next(iter(self._kept)))
        if not self._empty:
            return None
        block = self._empty[-1]
        self._taken.add(block)
        self._pins[block] = 1
        self._empty.pop()
        if key is not None:
            assert key not in self._by_key, "content is kept once"
            self._key_of[block] = key
            self._by_key[key] = block
        return block

    def pin(self, block: int) -> None:
        """Add a hold to a block."""
        self._kept.pop(block, None)
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, blocks: Iterable[int]) -> None:
        """Give up one hold of each."""
        for block in blocks:
            self._pins[block] -= 1
            if self._pins[block]:
                continue
            del self._pins[block]
            if block in self._key_of:
                self._kept[block] = None
            else:
                self._empty.append(block)

    def forget(self, key: Key) -> None:
        """This content must not be found any more."""
        block = self._by_key.get(key)
        if block is not None:
            self._forget(block)

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """What these blocks hold must not be found any more."""
        for block in blocks:
            if block in self._key_of:
                self._forget(block)

    def _forget(self, block: int) -> None:
        del self._by_key[self._key_of.pop(block)]
        if block in self._kept:
            del self._kept[block]
            self._empty.append(block)

    def clear(self) -> None:
        """Forget all content that nobody has pinned."""
        for block in list(self._kept):
            self._forget(block)

    def check_integrity(self, pins: dict[int, int]) -> None:
        """Compare with the holds that there should be.

        Args:
            pins: Block to number of holds.

        Raises:
            AssertionError: naming what is wrong.
        """
        assert self._pins == pins, f"the tier's pins are {self._pins}, should be {pins}"
        places = [*self._empty, *self._kept, *self._pins]
        assert sorted(places) == list(range(self.num_blocks)), "a block of the tier is lost"
        assert self._by_key == {key: block for block, key in self._key_of.items()}
        assert set(self._kept) <= set(self._key_of), "a block is kept for nobody"
        assert not set(self._empty) & set(self._key_of), "an empty block has content"
