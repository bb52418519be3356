"""Reading and writing safetensors: one file, or shards with an index.

Every fault of a file becomes a `ModelLoadError` that names it. Tensors are memory-mapped; they
must be copied before the files may change. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ModelLoadError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
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
        hint = f" (quire does not read {', '.join(found)})" if found else ""
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


def iterate_tensors(
    files: list[Path], skip: Callable[[str], bool] = lambda name: False
) -> Iterator[tuple[str, Tensor, Path]]:
    """Name, memory-mapped tensor and file, in the order of the files; what `skip` says of a name
    is not read (it may be of any type).

    Raises:
        ModelLoadError: a file is missing, truncated or corrupt, holds a type that is not a known
            float type, or two files hold the same name.
    """
    seen: dict[str, Path] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in seen:
                    raise ModelLoadError(f"{name!r} is in both {seen[name].name} and {path.name}")
                seen[name] = path
                if skip(name):
                    continue
                yield name, _tensor(file, name, path), path


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(_broken(path, error)) from None


def _tensor(file: Any, name: str, path: Path) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{_broken(path, error)} (tensor {name!r})") from None
    if tensor.dtype not in FLOATS:
        raise ModelLoadError(
            f"{str(path)!r}: tensor {name!r} has type {str(tensor.dtype).removeprefix('torch.')}; "
            "quire reads float32, bfloat16 and float16 weights, not quantised ones"
        )
    return tensor


def _broken(path: Path, error: Exception) -> str:
    try:
        size = f"{path.stat().st_size} bytes"
    except OSError:
        size = "unreadable"
    return (
        f"{str(path)!r} ({size}) is not a whole safetensors file: {error}. "
        "Was the download or copy cut short?"
    )


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
