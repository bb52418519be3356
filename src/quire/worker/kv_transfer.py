"""Copies KV blocks between the cache and the second tier, as a batch describes it.

The tier is memory or a file. Writing or reading a file can fail; the blocks concerned are then
returned, and nothing is raised. Which block goes where is decided elsewhere.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.kv_cache import untouched_zeros
from quire.errors import ConfigError
from quire.kernels.cache_tensors import KVCache
from quire.logger import get_logger

logger = get_logger(__name__)

Move = tuple[int, int]


class Store(Protocol):
    """Where the tier's blocks are."""

    def write(self, moves: Sequence[Move]) -> list[int]:
        """Copy pairs of (block of the cache, block of the tier); returns the blocks of the tier
        that failed."""
        ...

    def read(self, moves: Sequence[Move]) -> list[int]:
        """Copy pairs of (block of the tier, block of the cache); returns the blocks of the cache
        that failed."""
        ...


class MemoryStore:
    """Host memory: page-locked for a GPU's cache; for a CPU's, pages the system provides on first
    use.

    Args:
        tensors: The cache's, each `[num_blocks, …]`.
        num_blocks: Blocks of the tier.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int) -> None:
        self._pairs = [(tensor, _host_tensor(tensor, num_blocks)) for tensor in tensors]

    def write(self, moves: Sequence[Move]) -> list[int]:
        """See `Store`."""
        source, parked = _columns(moves)
        for tensor, host in self._pairs:
            rows = tensor.index_select(0, source.to(tensor.device))
            host.index_copy_(0, parked, rows.to(host.device))
        return []

    def read(self, moves: Sequence[Move]) -> list[int]:
        """See `Store`."""
        parked, target = _columns(moves)
        for tensor, host in self._pairs:
            rows = host.index_select(0, parked).to(tensor.device)
            tensor.index_copy_(0, target.to(tensor.device), rows)
        return []


class FileStore:
    """A file, one block after another.

    Args:
        tensors: As for `MemoryStore`.
        fd: Open for reading and writing; closed with the store.
    """

    def __init__(self, tensors: Sequence[Tensor], fd: int) -> None:
        self._tensors = tensors
        self._fd = fd
        self._sizes = [t[0].numel() * t.element_size() for t in tensors]
        self._said: set[str] = set()

    def __del__(self) -> None:
        os.close(self._fd)

    def write(self, moves: Sequence[Move]) -> list[int]:
        """See `Store`."""
        failed = []
        for block, parked in moves:
            data = b"".join(_bytes(tensor[block]) for tensor in self._tensors)
            try:
                done = os.pwrite(self._fd, data, parked * len(data))
                if done < len(data):
                    raise OSError(f"only {done} of {len(data)} bytes were written")
            except OSError as error:
                self._say("written", error)
                failed.append(parked)
        return failed

    def read(self, moves: Sequence[Move]) -> list[int]:
        """See `Store`."""
        failed = []
        size = sum(self._sizes)
        for parked, block in moves:
            try:
                data = os.pread(self._fd, size, parked * size)
                if len(data) < size:
                    raise OSError(f"only {len(data)} of {size} bytes were read")
            except OSError as error:
                self._say("read", error)
                failed.append(block)
                continue
            parts = torch.frombuffer(bytearray(data), dtype=torch.uint8).split(self._sizes)
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor[block].copy_(part.view(tensor.dtype).view(tensor.shape[1:]))
        return failed

    def _say(self, verb: str, error: OSError) -> None:
        if verb not in self._said:
            self._said.add(verb)
            logger.warning("the swap file cannot be %s: %s", verb, error)


@dataclass(slots=True)
class Moved:
    """The outcome of a step's copies."""

    unwritten: list[int] = field(default_factory=list)
    """Blocks of the tier."""
    unread: list[int] = field(default_factory=list)
    """Blocks of the cache."""
    seconds: float = 0.0


class KVTransfer:
    """Copies blocks, and reports what failed and how long it took.

    Args:
        store: The tier; without one nothing is copied.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store

    def move_out(self, moves: Sequence[Move], moved: Moved) -> None:
        """Copy (block, block of the tier)."""
        if moves:
            assert self._store is not None, "moves to a tier that is not there"
            start = time.perf_counter()
            moved.unwritten = self._store.write(moves)
            moved.seconds += time.perf_counter() - start

    def move_in(self, moves: Sequence[Move], moved: Moved) -> None:
        """Copy pairs of (block of the tier, block). A block that failed to be written in this step
        cannot be read, either."""
        if moves:
            assert self._store is not None, "moves from a tier that is not there"
            start = time.perf_counter()
            lost = set(moved.unwritten)
            readable = [move for move in moves if move[0] not in lost]
            moved.unread = [block for parked, block in moves if parked in lost]
            if readable:
                moved.unread += self._store.read(readable)
            moved.seconds += time.perf_counter() - start


def make_transfer(
    caches: Sequence[KVCache], num_blocks: int, folder: str | None
) -> KVTransfer | None:
    """What moves blocks to and from a tier of `num_blocks`; `None` if that is 0.

    Args:
        caches: Of each layer; layers that share memory are moved once.
        num_blocks: Blocks of the tier.
        folder: For a file instead of memory. The file has no name: it is gone with the process.

    Raises:
        ConfigError: no file can be made in `folder`.
    """
    if not num_blocks:
        return None
    tensors = list({t.data_ptr(): t for pair in caches for t in pair if t.numel()}.values())
    if folder is None:
        return KVTransfer(MemoryStore(tensors, num_blocks))
    return KVTransfer(FileStore(tensors, _nameless_file(folder)))


def _nameless_file(folder: str) -> int:
    try:
        fd, path = tempfile.mkstemp(prefix="quire-swap-", dir=Path(folder))
        os.unlink(path)
    except OSError as error:
        raise ConfigError(f"--swap-dir {folder}: no file can be made there: {error}") from None
    return fd


def _host_tensor(tensor: Tensor, num_blocks: int) -> Tensor:
    size = (num_blocks, *tensor.shape[1:])
    if tensor.device.type == "cpu":
        return untouched_zeros(size, tensor.dtype)
    return torch.zeros(size, dtype=tensor.dtype, pin_memory=True)


def _columns(moves: Sequence[Move]) -> tuple[Tensor, Tensor]:
    first, second = torch.tensor(moves, dtype=torch.int64).unbind(1)
    return first, second


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
