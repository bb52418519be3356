"""Gives back the memory of checkpoint pages that have been read.

A memory-mapped file counts as this process's memory once touched, although the page cache holds
it anyway: without this, loading peaks at twice the weights. Knows nothing of tensors' meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torch import Tensor

from quire.kernels.compiled import lib

_MAPS: Final = Path("/proc/self/maps")


class MappedPages:
    """The places where some files are, or will be, mapped into this process."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._names = {str(path.resolve()) for path in paths}
        self._last: tuple[int, int] = (0, 0)

    def drop(self, tensor: Tensor) -> None:
        """Let go of a tensor's pages if they are a file's: they are read again if needed.

        Anything else is left alone: what is dropped from other memory is lost.
        """
        size = tensor.numel() * tensor.element_size()
        if lib is None or tensor.device.type != "cpu" or not tensor.is_contiguous() or not size:
            return
        if self._covers(tensor.data_ptr(), size):
            lib.drop_pages(tensor.data_ptr(), size)

    def _covers(self, begin: int, size: int) -> bool:
        if not self._last[0] <= begin < self._last[1]:
            self._last = next((r for r in self._ranges() if r[0] <= begin < r[1]), (0, 0))
        return self._last[0] <= begin and begin + size <= self._last[1]

    def _ranges(self) -> Iterable[tuple[int, int]]:
        try:
            lines = _MAPS.read_text("utf-8", "surrogateescape").splitlines()
        except OSError:
            return  # not Linux
        for line in lines:
            fields = line.split(maxsplit=5)
            if fields[5:] and fields[5] in self._names:
                first, _, last = fields[0].partition("-")
                yield int(first, 16), int(last, 16)
