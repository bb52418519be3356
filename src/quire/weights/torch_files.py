"""Reading pickled PyTorch checkpoints (`*.bin`), without running what is in them.

Only on request (`--load-format pt`), only through torch's restricted reader, which builds tensors
and plain containers and refuses everything else. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.weights.formats import Stored

SINGLE: Final = "pytorch_model.bin"
INDEX: Final = "pytorch_model.bin.index.json"
FLOATS: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
NAMES: Final = FLOATS | {
    torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Types under the names that safetensors has for them."""


class TorchCheckpoint(contextlib.ExitStack):
    """The `*.bin` files of a folder: a `quire.weights.formats.Checkpoint`.

    Raises:
        ModelLoadError: there are none, one is broken, or one holds more than tensors.
    """

    types = frozenset(FLOATS.values())

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tensors: dict[str, Stored] = {}
        self._data: dict[str, Tensor] = {}
        files = bin_files(folder)
        for path in files:
            for name, tensor in _loaded(path).items():
                if name in self.tensors:
                    first = self.tensors[name].path.name
                    raise ModelLoadError(f"{name!r} is in both {first} and {path.name}")
                self._data[name] = tensor
                dtype = NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
                place = len(self.tensors)
                self.tensors[name] = Stored(tuple(tensor.shape), dtype, tensor.nbytes, path, place)
        self.total_bytes = sum(path.stat().st_size for path in files)

    def read(self, name: str) -> Tensor:
        """One tensor, memory-mapped if the file allows."""
        return self._data[name]

    read_stored = read


def bin_files(folder: Path) -> list[Path]:
    """The files of the checkpoint: those of the index, `pytorch_model.bin`, or all `*.bin`.

    Raises:
        ModelLoadError: there are none, or the index is unreadable or names a missing file.
    """
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            files = [folder / Path(name).name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"cannot read {str(index)!r}: {error!r}") from None
    else:
        single = folder / SINGLE
        files = [single] if single.exists() else sorted(folder.glob("*.bin"))
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{str(file)!r} is missing, but {INDEX} names it")
    if not files:
        raise ModelLoadError(f"the model folder {str(folder)!r} has no *.bin for --load-format pt")
    return files


def _loaded(path: Path) -> dict[str, Tensor]:
    data = _unpickled(path)
    data = data.get("state_dict", data) if isinstance(data, dict) else data
    if not isinstance(data, dict) or not all(isinstance(v, Tensor) for v in data.values()):
        raise ModelLoadError(f"{str(path)!r} must hold a dictionary of tensors")
    return {str(name): tensor for name, tensor in data.items()}


def _unpickled(path: Path) -> Any:
    # Files older than torch 1.6 are no archives and cannot be mapped; they are read whole.
    for mapped in (True, False):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # the reader raises many kinds for a bad file
            problem = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    raise ModelLoadError(
        f"cannot read {str(path)!r} as tensors and nothing else: {problem}. quire runs no code "
        "from a checkpoint: convert it to safetensors where you trust it"
    )
