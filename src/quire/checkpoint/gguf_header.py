"""The header of a GGUF file: metadata and tensor directory, checked against the file.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian):
magic, version, counts, key/value pairs, tensor infos, then the data from the next multiple of
`general.alignment`. Every length is checked against the rest of the file before anything is read,
so a hostile header cannot cause a large allocation. Knows nothing of models.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.checkpoint.safetensors import TensorEntry
from quire.errors import ModelLoadError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMS: Final = 4
MAX_NESTING: Final = 2
"""Largest depth of arrays in arrays."""
MAX_ARRAY: Final = 2**24
"""Largest number of values in one metadata array; vocabularies are far smaller."""
SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
"""Metadata types that are single numbers, as `struct` formats."""
STRING: Final = 8
ARRAY: Final = 9

TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Tensor types: number in the file to name, elements of a block, bytes of a block."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a file says about itself."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    """Tensors by their names in the file; shapes are row-major, slowest dimension first."""


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def read_header(path: Path) -> GGUFHeader:
    """Metadata and tensors of a file.

    Raises:
        ModelLoadError: the file cannot be read, is truncated, or is not a GGUF file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Cursor(view).header()
    except _Broken as error:
        raise ModelLoadError(broken(path, str(error))) from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelLoadError(broken(path, str(error))) from None


def broken(path: Path, why: str) -> str:
    """The message for a file that is not what its name says."""
    return f"{str(path)!r} is not a whole GGUF file: {why}. Was the download or copy cut short?"


class _Broken(Exception):
    """What is wrong with a file."""


class _Cursor:
    """Reads one value after another, never past the end."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._take(4) != MAGIC:
            raise _Broken("it does not begin with 'GGUF'")
        version = self._number("<I")
        if version not in VERSIONS:
            raise _Broken(f"its version is {version}; versions 2 and 3 are read")
        # A tensor info has at least 24 bytes and a metadata entry 13: more cannot be there.
        tensors, entries = self._count(24), self._count(13)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            if key in metadata:
                raise _Broken(f"its metadata has {key[:80]!r} twice")
            metadata[key] = self._value(self._number("<I"), 0)
        infos = [self._info() for _ in range(tensors)]
        return GGUFHeader(metadata, self._placed(infos, _alignment(metadata)))

    def _take(self, count: int) -> bytes:
        if count > len(self._view) - self._at:
            raise _Broken(f"{count} bytes are missing at byte {self._at}")
        self._at += count
        return self._view[self._at - count : self._at]

    def _number(self, format: str) -> Any:
        return struct.unpack(format, self._take(struct.calcsize(format)))[0]

    def _count(self, least: int) -> int:
        """The number of elements that follow, each at least `least` bytes long; they must fit into
        the file."""
        count = int(self._number("<Q"))
        if count * least > len(self._view) - self._at:
            raise _Broken(f"{count} entries are announced at byte {self._at}")
        return count

    def _string(self) -> str:
        text = self._take(self._number("<Q"))
        return text.decode("utf-8", "surrogateescape")

    def _value(self, kind: int, depth: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY or depth > MAX_NESTING:
            raise _Broken(f"a metadata value has the unknown type {kind}")
        inner = int(self._number("<I"))
        scalar = SCALARS.get(inner)
        count = self._count(struct.calcsize(scalar) if scalar else 8)
        if count > MAX_ARRAY:
            raise _Broken(f"a metadata array of {count} values; at most {MAX_ARRAY} are read")
        if scalar:
            letter = scalar[1]
            return list(struct.unpack(f"<{count}{letter}", self._take(count * _width(letter))))
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _info(self) -> tuple[str, TensorEntry]:
        name = self._string()
        dims = int(self._number("<I"))
        if not 1 <= dims <= MAX_DIMS:
            raise _Broken(f"tensor {name[:80]!r} has {dims} dimensions")
        shape = tuple(int(self._number("<Q")) for _ in range(dims))
        kind, offset = int(self._number("<I")), int(self._number("<Q"))
        if kind not in TYPES:
            raise _Broken(f"tensor {name[:80]!r} has the unknown type {kind}")
        dtype, block, size = TYPES[kind]
        if shape[0] % block or math.prod(shape) >= 2**62:
            raise _Broken(f"tensor {name[:80]!r} of type {dtype} has the impossible shape {shape}")
        nbytes = math.prod(shape) // block * size
        return name, TensorEntry(dtype, shape[::-1], offset, nbytes)

    def _placed(
        self, infos: list[tuple[str, TensorEntry]], alignment: int
    ) -> dict[str, TensorEntry]:
        base = -(-self._at // alignment) * alignment
        placed: dict[str, TensorEntry] = {}
        for name, info in infos:
            begin = base + info.begin
            if name in placed:
                raise _Broken(f"tensor {name[:80]!r} is there twice")
            if begin + info.nbytes > len(self._view):
                raise _Broken(f"tensor {name[:80]!r} ends at byte {begin + info.nbytes}")
            placed[name] = TensorEntry(info.dtype, info.shape, begin, info.nbytes)
        return placed


def _width(letter: str) -> int:
    return struct.calcsize("<" + letter)


def _alignment(metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 1 <= value <= 2**20:
        raise _Broken(f"general.alignment is {value!r:.60}")
    return value
