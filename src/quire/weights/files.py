"""Reading and writing safetensors: one file, or shards with an index.

Every fault of a file becomes a `ModelLoadError` that names it. Tensors are memory-mapped; they
must be copied before the files may change. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.checkpoint.safetensors import broken, read_header
from quire.errors import ModelLoadError
from quire.weights.formats import Stored

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
FLOATS: Final = ("F32", "BF16", "F16")
"""Types of weights that are understood."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model of a folder.

    The index decides if there is one, else `model.safetensors`, else every `*.safetensors`.

    Raises:
        ModelLoadError: there are none, or the index is unreadable or names a missing file.
    """
    if (folder / INDEX).exists():
        return _indexed(folder)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".gguf"))
        hint = f" (but {', '.join(found[:5])}: see --load-format)" if found else ""
        raise ModelLoadError(f"the model folder {str(folder)!r} has no *.safetensors{hint}")
    return files


def _indexed(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"cannot read {str(index)!r}: {error!r}") from None
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{str(index)!r} names {name!r}, which is not a plain file name")
        if not (folder / name).is_file():
            raise ModelLoadError(f"{str(folder / name)!r} is missing, but {INDEX} names it")
    if not names:
        raise ModelLoadError(f"{str(index)!r} names no files")
    return [folder / name for name in names]


class SafetensorsCheckpoint(contextlib.ExitStack):
    """The safetensors of a folder: a `quire.weights.formats.Checkpoint`.

    Raises:
        ModelLoadError: a file is missing, truncated or corrupt, or two files hold the same name.
    """

    types = frozenset(FLOATS)

    def __init__(self, folder: Path) -> None:
        super().__init__()
        files = weight_files(folder)
        self.tensors: dict[str, Stored] = {}
        for path in files:
            for name, entry in read_header(path).items():
                if name in self.tensors:
                    first = self.tensors[name].path.name
                    raise ModelLoadError(f"{name!r} is in both {first} and {path.name}")
                self.tensors[name] = Stored(
                    entry.shape, entry.dtype, entry.nbytes, path, entry.begin
                )
        self.total_bytes = total_bytes(files)
        self._open: dict[Path, Any] = {}

    def read(self, name: str) -> Tensor:
        """One tensor, memory-mapped.

        Raises:
            ModelLoadError: the file changed, or cannot be mapped.
        """
        path = self.tensors[name].path
        try:
            if path not in self._open:
                opened = safe_open(path, framework="pt", device="cpu")
                self._open[path] = self.enter_context(opened)
            tensor: Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelLoadError(f"{broken(path, str(error))} (tensor {name!r})") from None
        return tensor

    read_stored = read


def total_bytes(files: list[Path]) -> int:
    """Sum of the file sizes.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    try:
        return sum(path.stat().st_size for path in files)
    except OSError as error:
        raise ModelLoadError(f"cannot read the weights: {error}") from None


def write_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one file with the metadata that Hugging Face's libraries expect."""
    save_file(tensors, path, metadata={"format": "pt"})
