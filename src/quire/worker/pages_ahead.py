"""Has the system provide the next pages of the KV cache before they are used.

A page of memory is provided when it is first written to. A large one takes a tenth of a
millisecond, and several where the machine is virtual, and those of all layers end with the same
block: the step that goes on to the next ones took up to a quarter of a second longer. A thread asks
for them ahead of time, so memory still grows with what is used, but steps need not wait for it.
Knows tensors and blocks, and no requests.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from quire.utils.memory_file import LARGE_PAGE, provide_pages

AHEAD: Final = 64 << 20
"""Bytes beyond those in use that are asked for, or one page of each tensor if that is more."""
NICE: Final = 10
"""The thread steps back when steps want all processors. What it has not done then, they do."""


class PagesAhead:
    """Of the tensors of one KV cache, on the CPU.

    Args:
        tensors: At least one. Blocks come first in each, equally many; none share memory.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._num_blocks = len(tensors[0])
        sizes = [t.stride(0) * t.itemsize for t in tensors]
        self._stage = max(1, LARGE_PAGE // max(sizes))
        # blocks for which the tensors get pages in turn
        self._ahead = max(self._stage, AHEAD // sum(sizes))
        self._wanted = self._provided = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.used(0)

    def used(self, block: int) -> None:
        """Blocks up to this one are about to be written to. Returns at once."""
        if block + self._ahead // 2 < self._wanted or self._wanted == self._num_blocks:
            return
        with self._lock:
            self._wanted = min(self._num_blocks, block + self._ahead)
            if self._thread is not None:
                return
            # No daemon: the interpreter ends those wherever they are, even within a library.
            self._thread = threading.Thread(target=self._run, name="quire-pages")
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: pages come when they are written to
                self._thread, self._wanted = None, self._num_blocks

    def stop(self) -> None:
        """Leave out what is still to be asked for, and return when nothing is under way."""
        with self._lock:
            self._provided = self._wanted
        self.wait()

    def wait(self) -> None:
        """Until all that was asked for is there."""
        if (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with self._lock:
                first, end = self._provided, min(self._provided + self._stage, self._wanted)
                if first >= end or not threading.main_thread().is_alive():  # the program ends
                    self._thread = None
                    return
                self._provided = end
            if not all(_provide(tensor, first, end) for tensor in self._tensors):
                # The system does no such thing: pages come when they are written to.
                with self._lock:
                    self._provided = self._wanted = self._num_blocks


def _provide(tensor: Tensor, first: int, end: int) -> bool:
    size = tensor.stride(0) * tensor.itemsize
    return provide_pages(tensor.data_ptr() + first * size, (end - first) * size)
