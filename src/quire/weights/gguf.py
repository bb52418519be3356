"""Reading the tensors of GGUF files: blocks of quantised weights to float32.

The layouts of blocks are ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h);
each formula is evaluated in float32 in ggml's order, so values agree with its own bit for bit.
What llama.cpp's converter did to a family's tensors (`GGUFLayout`) is undone, so that names, shapes
and values are those of the original checkpoint. Knows no model class.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.checkpoint.gguf_header import TYPES, read_header
from quire.checkpoint.gguf_model import gguf_file, hf_name, layout_of, parts_of
from quire.checkpoint.safetensors import TensorEntry
from quire.errors import ModelLoadError
from quire.weights.formats import Stored

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
ROWS_AT_ONCE: Final = 2**15
"""Blocks that are unpacked together, so that intermediate arrays stay in the cache."""


class GGUFCheckpoint(contextlib.ExitStack):
    """A GGUF model under Hugging Face's names: a `quire.weights.formats.Checkpoint`.

    Raises:
        ModelLoadError: there is no such file, it is broken, or its architecture is unknown.
    """

    def __init__(self, model: Path) -> None:
        super().__init__()
        path = gguf_file(model)
        if path is None:
            raise ModelLoadError(f"{str(model)!r} is no GGUF file and has none")
        self.types = frozenset(DEQUANTISE)
        self.tensors: dict[str, Stored] = {}
        self.total_bytes = 0
        self._places: dict[str, _Place] = {}
        for number, part in enumerate(parts_of(path)):
            header = read_header(part)
            if number == 0:
                metadata = header.metadata
                self._layout = layout_of(metadata, str(part))
            self._add(part, header.tensors)
        self._heads = _heads(metadata)

    def read(self, name: str) -> Tensor:
        """One tensor as float32, in the original checkpoint's layout."""
        place = self._places[name]
        entry = place.entry
        raw = np.frombuffer(place.view, np.uint8, entry.nbytes, entry.begin)
        values = dequantise(raw, entry.dtype).reshape(entry.shape)
        return torch.from_numpy(self._restored(name, values))

    def read_stored(self, name: str) -> Tensor:
        """The blocks of a matrix as bytes `[N, bytes of a row]`, rows in the original order."""
        place = self._places[name]
        entry = place.entry
        raw = np.frombuffer(place.view, np.uint8, entry.nbytes, entry.begin)
        rows = self._permuted(name, raw.reshape(entry.shape[0], -1))
        # A view of a file that cannot be written to; nobody writes to what is stored.
        return torch.from_numpy(rows if rows.flags.writeable else rows.copy())

    def _add(self, path: Path, entries: dict[str, TensorEntry]) -> None:
        self.total_bytes += path.stat().st_size
        # The view is closed by the last tensor that lets go of it: numpy arrays may outlive us.
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for theirs, entry in entries.items():
            name = hf_name(theirs)
            if name is None:
                continue
            if name in self.tensors:
                raise ModelLoadError(f"{name!r} is in {path.name!r} and in an earlier part")
            self.tensors[name] = Stored(entry.shape, entry.dtype, entry.nbytes, path, entry.begin)
            self._places[name] = _Place(view, entry)

    def _permuted(self, name: str, rows: Any) -> Any:
        if self._layout.permuted and ".self_attn." in name:
            for part, heads in zip(("q_proj", "k_proj"), self._heads, strict=True):
                if f".{part}." in name:
                    return unpermuted(rows, heads)
        return rows

    def _restored(self, name: str, values: Floats) -> Floats:
        values = self._permuted(name, values)
        if self._layout.norm_offset and name.endswith("norm.weight"):
            return values - np.float32(self._layout.norm_offset)
        return values


@dataclass(frozen=True, slots=True)
class _Place:
    view: mmap.mmap
    entry: TensorEntry


def _heads(metadata: dict[str, object]) -> tuple[int, int]:
    prefix = f"{metadata['general.architecture']}.attention.head_count"
    heads = metadata.get(prefix)
    kv_heads = metadata.get(f"{prefix}_kv") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or min(heads, kv_heads) < 1:
        raise ModelLoadError(f"{prefix} must be a positive whole number, got {heads!r:.60}")
    return heads, kv_heads


def unpermuted(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo the converter's interleaving of each head's rows: `[heads * dim, ...]`.

    Row 2i + j of a head in the file is row j * dim / 2 + i of the original.
    """
    rows = values.shape[0]
    if rows % (2 * heads):
        raise ModelLoadError(f"{rows} rows of queries or keys cannot belong to {heads} heads")
    split = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def dequantise(raw: Bytes, dtype: str) -> Floats:
    """Float32 values of a tensor's bytes, flat.

    Raises:
        ModelLoadError: the type is not one of `DEQUANTISE`.
    """
    unpack = DEQUANTISE.get(dtype)
    if unpack is None:
        raise ModelLoadError(f"GGUF type {dtype} is not read; known: {', '.join(DEQUANTISE)}")
    size, per_block = next((b, n) for name, n, b in TYPES.values() if name == dtype)
    blocks = raw.reshape(-1, size)
    out = np.empty((len(blocks), per_block), np.float32)
    for start in range(0, len(blocks), ROWS_AT_ONCE):
        part = blocks[start : start + ROWS_AT_ONCE]
        out[start : start + ROWS_AT_ONCE] = unpack(part).reshape(len(part), per_block)
    return out.reshape(-1)


# ---------------------------------------------------------------- blocks [B, bytes] to [B, values]


def _half(blocks: Bytes, at: int) -> Floats:
    """A float16 of each block as `[B, 1]`."""
    halves: Floats = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    return halves.astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """`[B, n]` bytes to `[B, 2, n]`: all low halves, then all high halves."""
    return np.stack((packed & 15, packed >> 4), axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """4 bytes of each block as 32 bits `[B, 32]`, worth 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _q4_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 2:]).reshape(-1, 32).astype(np.int8) - np.int8(8)
    return _half(blocks, 0) * quants.astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 4:]).reshape(-1, 32).astype(np.float32)
    return _half(blocks, 0) * quants + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (quants.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 8:]).reshape(-1, 32) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes of each block: eight scales and eight minima of six bits, `[B, 8, 1]` each.

    The first four of each are the low six bits of bytes 0-3 and 4-7; the others have their low
    four bits in bytes 8-11 and their high two in the top bits of bytes 0-7.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (low & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (low >> 4) | (second >> 6 << 4)), axis=1)
    return scales.astype(np.float32)[..., None], minima.astype(np.float32)[..., None]


def _k_affine(blocks: Bytes, quants: Bytes) -> Floats:
    """`[B, 8, 32]` quants of a K block with scales and minima: d * scale * q - dmin * minimum."""
    scales, minima = _k_scales(blocks[:, 4:16])
    d, dmin = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return d * scales * quants.astype(np.float32) - dmin * minima


def _q4_k(blocks: Bytes) -> Floats:
    packed = blocks[:, 16:].reshape(-1, 32)  # four rows of a block, two sub-blocks in each
    return _k_affine(blocks, _nibbles(packed).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> shifts) & 1
    return _k_affine(blocks, low | (high << 4))


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)
    return scales[..., None] * quants.reshape(-1, 16, 16).astype(np.float32)


DEQUANTISE: Final[dict[str, Callable[[Bytes], Floats]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Types that are read, each with its formula."""
