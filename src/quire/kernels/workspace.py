"""Scratch tensors that are kept from call to call.

Fresh large tensors cost a page fault per 4 KiB; these are mapped once. Knows nothing of contents.
"""

from __future__ import annotations

import math
import threading
from typing import Final

import torch
from torch import Tensor

from quire.kernels.pages import large_pages
from quire.utils.memory_file import LARGE_PAGE


class _Workspace(threading.local):
    """One growing buffer per purpose, for each thread its own."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A contiguous tensor with undefined contents, valid until the purpose is taken again."""
        size = math.prod(shape)
        return self.buffer(purpose, size, dtype, device)[:size].view(shape)

    def buffer(self, purpose: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The purpose's whole buffer, of at least this many elements: for a caller who wants no
        more than its address."""
        key = (purpose, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # Not an inference tensor, so that callers outside inference mode may write to it.
            with torch.inference_mode(False):
                buffer = _allocate(size, dtype, device)
            self._buffers[key] = buffer
        return buffer


def _allocate(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu" and size * dtype.itemsize >= LARGE_PAGE:
        return large_pages(size * dtype.itemsize).view(dtype)
    return torch.empty(size, dtype=dtype, device=device)


workspace: Final = _Workspace()
