"""The memory that packed weights live in: the API process owns it, its cores come and go.

A core that dies while it packs leaves memory that is not sealed; the next one gets new memory.
What is in it is `quire.weights.kept`'s business. Knows descriptors, no contents.
"""

from __future__ import annotations

import os

from quire.utils import memory_file


class KeptMemory:
    """One memory at a time, for cores that load the same model."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._is_given = False

    def filled(self) -> int | None:
        """The descriptor, if a core has packed all its weights there."""
        if self._descriptor is not None and memory_file.is_sealed(self._descriptor):
            return self._descriptor
        return None

    def for_core(self) -> int | None:
        """The descriptor that the next core is to inherit; `None` where there is no such memory."""
        if self._is_given and self.filled() is None:
            self.close()
        if self._descriptor is None:
            self._descriptor = memory_file.create("quire-weights")
        self._is_given = True
        return self._descriptor

    def close(self) -> None:
        """Let go of it; it is free when the last core that has it mapped ends."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._is_given = None, False
