"""A checkpoint as tensors that can be read one by one, whatever the format of its files.

`open_checkpoint` chooses the format (`--load-format`); headers are read and checked, data is not.
Knows formats, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from quire.checkpoint.gguf_header import is_gguf
from quire.checkpoint.gguf_model import gguf_file
from quire.config.model import FORMATS
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint, as its header states it."""

    shape: tuple[int, ...]
    dtype: str
    """The format's name of the type: `BF16`, `Q4_K`, …"""
    nbytes: int
    """Bytes in the file."""
    path: Path
    begin: int = 0
    """Where in the file it begins, to read files from front to back."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Checkpoint(AbstractContextManager["Checkpoint"], Protocol):
    """Tensors by Hugging Face's names. Leaving the context closes the files."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """All tensors; nothing of their data has been read."""
        ...

    @property
    def types(self) -> frozenset[str]:
        """Types of weights that are plain numbers, whatever they are stored as."""
        ...

    @property
    def total_bytes(self) -> int:
        """Size of the files."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, possibly memory-mapped: copy it before the context ends.

        Raises:
            ModelLoadError: the data cannot be read.
        """
        ...

    def read_stored(self, name: str) -> Tensor:
        """The same without turning numbers into others: packed ones as bytes, `[N, bytes]`.

        Raises:
            ModelLoadError: the data cannot be read.
        """
        ...


def open_checkpoint(model: Path, load_format: str = "auto") -> Checkpoint:
    """Open the checkpoint of a model folder or file.

    `auto`: safetensors if there are any, else GGUF. `pt` reads pickled `*.bin` files without
    running what is in them, and only if asked for.

    Raises:
        ModelLoadError: there is no such checkpoint, or a file of it is broken.
        ConfigError: the format is `dummy`, which has no files, or unknown.
    """
    if load_format == "dummy":
        raise ConfigError("--load-format dummy has no files to open")
    if load_format == "auto":
        load_format = "gguf" if _is_gguf_model(model) else "safetensors"
    made: Callable[[Path], Checkpoint] = FORMATS.get(load_format)
    return made(model)


def _is_gguf_model(model: Path) -> bool:
    if is_gguf(model):
        return True
    return not any(model.glob("*.safetensors")) and gguf_file(model) is not None
