"""The header of a safetensors file: names, types, shapes and offsets, checked against the file.

Format: the length of the header as 8 little-endian bytes, the header as a JSON object, then the
data. The header maps a name to `{"dtype", "shape", "data_offsets": [begin, end]}`; offsets count
from the end of the header and must tile the data without gaps
(https://huggingface.co/docs/safetensors). Reads no tensor data and allocates no more than the
header, whose size is limited. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.errors import ModelLoadError

MAX_HEADER: Final = 100_000_000
"""Largest header that is read, in bytes; the reference implementation has the same limit."""
MAX_DIMS: Final = 8
BITS: Final = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits of an element, by type."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, as its header states it."""

    dtype: str
    """The type under the format's name: `BF16`, `Q4_K`, …"""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name, in the order of their data.

    Raises:
        ModelLoadError: the file cannot be read, is truncated, or has an invalid header.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                raise _Broken(f"the header should have {length} bytes" if start else "it is empty")
            if length > MAX_HEADER:
                raise _Broken(f"a header of {length} bytes is more than the {MAX_HEADER} allowed")
            data = _parsed(file.read(length))
        entries = {name: _entry(name, e, 8 + length) for name, e in data.items()}
        return _tiled(entries, 8 + length, size)
    except _Broken as error:
        raise ModelLoadError(broken(path, str(error))) from None
    except OSError as error:
        raise ModelLoadError(broken(path, error.strerror or str(error))) from None


def broken(path: Path, why: str) -> str:
    """The message for a file that is not what its name says."""
    try:
        size = f"{path.stat().st_size} bytes"
    except OSError:
        size = "unreadable"
    return (
        f"{str(path)!r} ({size}) is not a whole safetensors file: {why}. "
        "Was the download or copy cut short?"
    )


class _Broken(Exception):
    """What is wrong with a file."""


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _Broken(f"its header is not JSON ({str(error)[:100]})") from None
    if not isinstance(data, dict):
        raise _Broken("its header is not a JSON object")
    data.pop("__metadata__", None)
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Broken("its header has a name twice")
    return found


def _entry(name: str, entry: object, base: int) -> TensorEntry:
    if not isinstance(entry, dict):
        raise _Broken(f"its header does not describe tensor {name[:80]!r}")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    place: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Broken(f"tensor {name[:80]!r} has the unknown type {str(dtype)[:20]!r}")
    if not _sizes(shape) or len(shape) > MAX_DIMS:
        raise _Broken(f"tensor {name[:80]!r} has the impossible shape {str(shape)[:60]}")
    if not _sizes(place) or len(place) != 2 or place[0] > place[1]:
        raise _Broken(f"tensor {name[:80]!r} has the impossible data_offsets {str(place)[:60]}")
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (place[1] - place[0]):
        raise _Broken(
            f"tensor {name[:80]!r} of shape {list(shape)} in {dtype} cannot have "
            f"{place[1] - place[0]} bytes"
        )
    return TensorEntry(dtype, tuple(shape), base + place[0], place[1] - place[0])


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value
    )


def _tiled(entries: dict[str, TensorEntry], base: int, size: int) -> dict[str, TensorEntry]:
    """The entries in order of their data, if they fill the file exactly."""
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].nbytes))
    end = base
    for name, entry in ordered:
        if entry.begin != end:
            raise _Broken(f"tensor {name[:80]!r} begins at byte {entry.begin}, not at {end}")
        end += entry.nbytes
    if end != size:
        raise _Broken(f"its tensors end at byte {end}")
    return dict(ordered)
