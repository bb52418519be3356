"""Gives back the memory of checkpoint pages that have been read.

A memory-mapped file counts as this process's memory once touched, although the page cache holds
it anyway: without this, loading peaks at twice the weights. Knows nothing of tensors' meaning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from torch import Tensor

from quire.kernels.compiled import lib

_MAPS: Final = Path("/proc/self/maps")


class MappedPages:
    """The places where a file is mapped into this process."""

    def __init__(self, path: Path) -> None:
        self._ranges = list(_ranges(path)) if lib is not None else []

    def drop(self, tensor: Tensor) -> None:
        """Let go of a tensor's pages if they are the file's: they are read again if needed.

        Anything else is left alone: what is dropped from other memory is lost.
        """
        begin = tensor.data_ptr()
        size = tensor.numel() * tensor.element_size()
        if any(first <= begin and begin + size <= last for first, last in self._ranges):
            lib.drop_pages(begin, size)


def _ranges(path: Path) -> list[tuple[int, int]]:
    name = str(path.resolve())
    try:
        lines = _MAPS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []  # not Linux
    places = [line.split(maxsplit=5) for line in lines]
    bounds = [place[0].split("-") for place in places if place[5:] == [name]]
    return [(int(first, 16), int(last, 16)) for first, last in bounds]
