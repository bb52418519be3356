"""Loaded weights in memory that outlives the process that loaded them.

Whoever starts engine cores owns the memory and passes each core its descriptor. The first one packs
its weights there, writes down what is where, and seals it. The next ones map it read-only and pack
nothing. Only what is sealed is trusted: a core that dies while it packs leaves nothing behind that
another would use. Nobody can write to it afterwards, in no process; who tries, crashes.

The form of a weight is whatever its layer says (`Parameter.keep`). Knows no files of checkpoints.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from quire.kernels import compiled
from quire.kernels.pages import FilePages, bytes_at, weight_memory
from quire.logger import get_logger
from quire.utils import memory_file
from quire.utils.math import human_bytes
from quire.version import __version__

logger = get_logger(__name__)

_HEAD: Final = struct.Struct("<8sQQI")
# what it is, then place, size and check sum of the list of contents
_MAGIC: Final = b"quirewts"
_LARGEST_COPY: Final = 1 << 20
"""Bytes. A larger tensor that is not there already is not kept: it would be held twice."""
_TENSOR: Final = "tensor"


@dataclass(frozen=True, slots=True)
class KeptModel:
    """What is kept of one model."""

    num_weights: int
    """Weights loaded, as `load_weights` returns it."""
    entries: dict[str, Any]
    """By parameter: what its `keep` gave, or its checkpoint's tensors."""


class KeptWeights:
    """The memory behind one descriptor.

    Args:
        descriptor: Of memory that is empty or sealed.

    Raises:
        OSError: it cannot be mapped.
        ValueError: it is sealed, and its contents are not what this version writes.
    """

    def __init__(self, descriptor: int) -> None:
        self.size = 0
        """Bytes that were found sealed; this process shares them."""
        self._descriptor = descriptor
        self._models: dict[str, Any] = {}
        self._address = 0
        self._pages: FilePages | None = None
        self._head: Tensor | None = None
        if memory_file.is_sealed(descriptor):
            self._open()
        else:
            self._pages = FilePages(descriptor)

    def _open(self) -> None:
        readable = memory_file.read_only(self._descriptor)
        size = os.fstat(readable).st_size
        self._address = memory_file.map_memory(readable, size)
        os.close(readable)
        magic, place, length, check = _HEAD.unpack(ctypes.string_at(self._address, _HEAD.size))
        text = b"" if magic != _MAGIC else ctypes.string_at(self._address + place, length)
        if not text or zlib.crc32(text) != check:
            raise ValueError("the memory of the weights does not hold what it should")
        listed = json.loads(text)
        if listed["made_by"] != made_by():
            raise ValueError("they were packed by another version of quire")
        self._models = listed["models"]
        self.size = size

    # ---- to use what another process has loaded ----------------------------------------------

    def find(self, key: str) -> KeptModel | None:
        """What is kept of a model; tensors are read-only views."""
        found = self._models.get(key) if self.size else None
        if found is None:
            return None
        entries = {name: self._decoded(entry) for name, entry in found["entries"].items()}
        return KeptModel(found["num_weights"], entries)

    def _decoded(self, value: Any) -> Any:
        if isinstance(value, dict):
            if _TENSOR in value:
                place, size, dtype, shape = value[_TENSOR]
                kind = getattr(torch, dtype)
                return bytes_at(self._address + place, size).view(kind).view(shape)
            return {key: self._decoded(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self._decoded(part) for part in value]
        return value

    # ---- to leave something for another process ----------------------------------------------

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Weights that are packed meanwhile are packed there."""
        if self._pages is None:
            yield
            return
        with weight_memory.from_file(self._pages):
            if self._head is None:
                self._head = weight_memory.take(_HEAD.size)
            yield

    def keep(self, key: str, model: KeptModel) -> None:
        """Note what was loaded. A model is kept whole or, if some of its large tensors lie
        elsewhere, not at all."""
        if self._pages is None:
            return
        try:
            entries = self._encoded(self._pages, model.entries)
        except OSError as error:
            logger.info("weights are not kept for a core that may follow: %s", error)
        else:
            self._models[key] = {"num_weights": model.num_weights, "entries": entries}

    def _encoded(self, pages: FilePages, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.contiguous()
            place = pages.place_of(value)
            if place is None:
                if value.nbytes > _LARGEST_COPY:
                    raise OSError("the system has no such memory, or not enough of it")
                copy = pages.take(max(1, value.nbytes))
                copy[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)
                place = pages.place_of(copy)
            dtype = str(value.dtype).removeprefix("torch.")
            return {_TENSOR: [place, value.nbytes, dtype, list(value.shape)]}
        if isinstance(value, dict):
            return {key: self._encoded(pages, part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._encoded(pages, part) for part in value]
        return value

    def finish(self) -> None:
        """Everything is loaded: seal it. If that cannot be done, nobody will use it."""
        pages, self._pages = self._pages, None
        if pages is None or self._head is None or not self._models:
            return
        try:
            text = json.dumps({"made_by": made_by(), "models": self._models}).encode()
            listed = pages.take(len(text))
            place = pages.place_of(listed)
            head = _HEAD.pack(_MAGIC, place, len(text), zlib.crc32(text))
            for piece, content in ((listed, text), (self._head, head)):
                piece.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            pages.freeze()
        except OSError as error:
            logger.info("weights are not kept for a core that may follow: %s", error)
        else:
            size = human_bytes(os.fstat(self._descriptor).st_size)
            logger.debug("%s of weights are kept for a core that may follow", size)


def model_key(
    folder: object, load_format: str, dtype: torch.dtype, shapes: Mapping[str, Any]
) -> str:
    """Names a model as it is in memory: equal names, interchangeable weights."""
    facts = [str(folder), load_format, str(dtype), sorted(shapes.items())]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def made_by() -> list[Any]:
    """What decides how weights are packed: the version and the compiled module. Somebody may
    install another one while a server runs."""
    path = getattr(compiled.lib, "__file__", None)
    try:
        about = os.stat(path) if path else None
    except OSError:
        about = None
    return [__version__, *([about.st_size, about.st_mtime_ns] if about else [])]


_here: KeptWeights | None = None


def open_kept(descriptor: int) -> None:
    """Use this memory for the models that this process loads from now on.

    It never keeps a process from starting: if the memory is of no use, weights are read as without.
    """
    global _here
    try:
        _here = KeptWeights(descriptor)
    except (OSError, ValueError) as error:
        logger.warning("the weights of the core before cannot be used: %s", error)


def kept_weights() -> KeptWeights | None:
    """That of this process; `None` if it has none."""
    return _here
