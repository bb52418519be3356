"""The longest cached prefix that serves all groups of layers at once.

A group that keeps all tokens needs every block from the first on, so it is followed from left to
right. A group with a window needs only the last few blocks before the first token to be computed,
so it is searched from right to left. Each answer can shorten what the other groups may use; the
search ends when all agree. It changes nothing and knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.config.kv_groups import blocks_before
from quire.core.kv.block import KVBlock

GroupBlocks = tuple[list[KVBlock], ...]
"""One block list per group, all of the same length. The null block stands for a block that the
group does not need."""


class Lookup(Protocol):
    """Where cached blocks are looked up: a `BlockPool`, or the pool and the second tier."""

    null_block: KVBlock

    def get_cached_block(self, block_hash: bytes, group: int = 0) -> KVBlock | None:
        """See `BlockPool`."""
        ...

    def find_run(self, hashes: Iterable[bytes], group: int = 0) -> list[KVBlock]:
        """See `BlockPool`."""
        ...


def find_hits(
    pool: Lookup, windows: Sequence[int | None], hashes: list[bytes], block_size: int
) -> GroupBlocks:
    """Cached blocks of the longest common prefix.

    Args:
        pool: Where to look.
        windows: Of each group.
        hashes: Of the blocks that may be hit, in order.
        block_size: Tokens per block.
    """
    found: list[list[KVBlock]] = []
    end = len(hashes)  # blocks that every group looked at so far can follow
    for group, window in enumerate(windows):
        if window is None:
            found.append(pool.find_run(hashes[:end], group))
            end = len(found[-1])
        else:
            found.append([])
    needs = [(g, blocks_before(w, block_size)) for g, w in enumerate(windows) if w is not None]
    end = _common_end(pool, needs, hashes, end)
    for blocks in found:
        del blocks[end:]
    for group, need in needs:
        first = max(0, end - need)
        found[group] = [pool.null_block] * first + pool.find_run(hashes[first:end], group)
    return tuple(found)


def _common_end(
    pool: Lookup, needs: Sequence[tuple[int, int]], hashes: list[bytes], end: int
) -> int:
    """The greatest number of blocks, at most `end`, that all windowed groups can follow."""
    # Shortening the end for one group moves its last blocks, which another group may not have: ask
    # all of them again until none shortens it. It only shrinks, so this ends.
    agreed = False
    while not agreed:
        agreed = True
        for group, need in needs:
            shorter = _window_end(pool, group, need, hashes, end)
            agreed, end = agreed and shorter == end, shorter
    return end


def _window_end(pool: Lookup, group: int, need: int, hashes: list[bytes], end: int) -> int:
    """The greatest boundary, at most `end`, with `need` cached blocks before it, or all if there
    are fewer."""
    run = 0
    for index in range(end - 1, -1, -1):
        if run >= need:
            break
        if pool.get_cached_block(hashes[index], group) is None:
            run, end = 0, index
        else:
            run += 1
    return end
