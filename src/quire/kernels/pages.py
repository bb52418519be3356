"""Memory on large pages.

A processor remembers where a few thousand pages are. Weights on pages of 4 KiB are more than that,
and every page it must look up again holds up a read, in a virtual machine twice. Large ones are
2 MiB, where the system has them. Knows nothing of contents.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from quire.utils import memory_file
from quire.utils.math import align_up
from quire.utils.memory_file import LARGE_PAGE

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


class FilePages:
    """The same as `Slabs`, out of memory with a descriptor, which other processes can map as well.

    It grows with what is taken and holds nothing else. `freeze` makes it read-only.

    Args:
        descriptor: Of empty memory.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._slabs: list[tuple[int, int, int]] = []
        # address, place in the file, size
        self._end = self._size = 0
        # where the next piece begins; where the file ends

    def take(self, size: int) -> Tensor:
        """Bytes that begin with a cache line, zero.

        Raises:
            OSError: there is no more memory; or, with the first piece, it would lie on small pages
                where other memory lies on large ones, so that every step would be slower.
        """
        place = align_up(self._end, _LINE)
        if not self._slabs or place + size > self._slabs[-1][1] + self._slabs[-1][2]:
            self._trim()
            place = self._size
            room = align_up(max(size, _SLAB), LARGE_PAGE)
            address = memory_file.map_memory(self._descriptor, room, place, writable=True)
            self._slabs.append((address, place, room))
        address, begin, _ = self._slabs[-1]
        if place + size > self._size:
            self._grow(align_up(place + size, LARGE_PAGE), address - begin)
        self._end = place + size
        return bytes_at(address + place - begin, size)

    def _trim(self) -> None:
        """Unmap what the last slab has behind the end of the file: the next one begins there."""
        if self._slabs:
            address, place, room = self._slabs[-1]
            used = self._size - place
            memory_file.unmap(address + used, room - used)
            self._slabs[-1] = (address, place, used)

    def _grow(self, size: int, shift: int) -> None:
        os.ftruncate(self._descriptor, size)
        first, old, self._size = not self._size, self._size, size
        large = memory_file.take_large_pages(shift + old, size - old)
        if first and not large and memory_file.private_memory_has_large_pages():
            raise OSError(errno.EOPNOTSUPP, "no large pages for memory with a descriptor")

    def place_of(self, tensor: Tensor) -> int | None:
        """Where in the file a contiguous tensor is; `None` if it is elsewhere."""
        begin = tensor.data_ptr()
        for address, place, room in self._slabs:
            if address <= begin and begin + tensor.nbytes <= address + room:
                return place + begin - address
        return None

    def freeze(self) -> None:
        """Make it read-only, in this process too: whoever writes to it from now on crashes.

        Raises:
            OSError: the system does not allow it.
        """
        readable = memory_file.read_only(self._descriptor)
        self._trim()
        try:
            for address, place, room in self._slabs:
                memory_file.map_again(address, readable, room, place)
            memory_file.seal(self._descriptor)
        finally:
            os.close(readable)


def bytes_at(address: int, size: int) -> Tensor:
    """Memory that stays mapped, as a tensor of bytes."""
    buffer = (ctypes.c_uint8 * size).from_address(address)
    with torch.inference_mode(False):
        return torch.frombuffer(buffer, dtype=torch.uint8)


class WeightMemory:
    """Where packed weights are put: memory of this process alone, or, within `from_file`, memory
    that outlives it."""

    def __init__(self) -> None:
        self._slabs = Slabs()
        self._file: FilePages | None = None

    @property
    def is_kept(self) -> bool:
        """Whether what is taken now outlives the process."""
        return self._file is not None

    def take(self, size: int) -> Tensor:
        """Bytes that begin with a cache line, undefined."""
        if self._file is not None:
            try:
                return self._file.take(size)
            except OSError:
                self._file = None  # whoever keeps them sees that this weight lies elsewhere
        return self._slabs.take(size)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a weight that is used as it is."""
        if self._file is None or tensor.device.type != "cpu" or not tensor.nbytes:
            return tensor.clone(memory_format=torch.contiguous_format)
        return self.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    @contextlib.contextmanager
    def from_file(self, file: FilePages) -> Iterator[None]:
        """Take memory there, as long as there is some."""
        self._file = file
        try:
            yield
        finally:
            self._file = None


weight_memory: Final = WeightMemory()
"""Of this process."""
