"""Memory on large pages.

A processor remembers where a few thousand pages are. Weights on pages of 4 KiB are more than that,
and every page it must look up again holds up a read, in a virtual machine twice. Large ones are
2 MiB, where the system has them. Knows nothing of contents.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Final

import torch
from torch import Tensor

from quire.utils.math import align_up

LARGE_PAGE: Final = 2 << 20
_SLAB: Final = 64 << 20
_LINE: Final = 64


def large_pages(size: int) -> Tensor:
    """`size` zero bytes, on large pages if they fill one; memory is taken when first written to.

    So they cost neither time nor memory before they are used.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    large = size >= LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    room = align_up(size, mmap.PAGESIZE) + (LARGE_PAGE if large else 0)
    # Private: shared pages, the default, never become large ones.
    pages = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large:
        with contextlib.suppress(OSError):  # a kernel without them: small pages do, too
            pages.madvise(mmap.MADV_HUGEPAGE)
    # No inference tensor: others may be given a part of it, outside inference mode.
    with torch.inference_mode(False):
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        start = -memory.data_ptr() % LARGE_PAGE if large else 0
        return memory[start : start + size]


class Slabs:
    """Pieces of large pages, one behind the other: what is smaller than a page has its part of one.

    A slab is given back when nothing in it is used any more; pieces are not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Bytes that begin with a cache line, undefined."""
        with self._lock, torch.inference_mode(False):
            if size > len(self._slab):
                self._slab = large_pages(max(size, _SLAB))
            piece, self._slab = self._slab[:size], self._slab[align_up(size, _LINE) :]
            return piece
