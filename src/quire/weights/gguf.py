"""Reading the tensors of GGUF files: blocks of quantised weights to float32.

The layouts of blocks are ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h);
values agree with its own bit for bit (`gguf_blocks.py`). Layers that compute with the blocks take
them as they are (`read_stored`). What llama.cpp's converter did
to a family's tensors (`GGUFLayout`) is undone, so that names, shapes and values are those of the
original checkpoint. Knows no model class.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.checkpoint.gguf_families import Metadata, layers_of
from quire.checkpoint.gguf_header import TYPES, read_header
from quire.checkpoint.gguf_model import gguf_file, hf_name, layout_of, parts_of
from quire.checkpoint.safetensors import TensorEntry
from quire.errors import ModelLoadError
from quire.weights.formats import Stored
from quire.weights.gguf_blocks import BLOCK_TYPES, Bytes, Floats

ROWS_AT_ONCE: Final = 2**15
"""Blocks that are unpacked together, so that intermediate arrays stay in the cache."""
_BLOCK: Final = re.compile(r"blk\.(\d+)\.")


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
                get = Metadata(metadata, str(metadata["general.architecture"]))
                self._experts, self._layers = get("expert_count"), layers_of(get)
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
        """The blocks of a matrix as bytes `[N, bytes of a row]`, rows in the original order. What
        is not quantised comes as numbers."""
        place = self._places[name]
        entry = place.entry
        if entry.dtype not in BLOCK_TYPES:
            return self.read(name)
        raw = np.frombuffer(place.view, np.uint8, entry.nbytes, entry.begin)
        rows = self._permuted(name, raw.reshape(entry.shape[0], -1))
        # A view of a file that cannot be written to; nobody writes to what is stored.
        return torch.from_numpy(rows if rows.flags.writeable else rows.copy())

    def _add(self, path: Path, entries: dict[str, TensorEntry]) -> None:
        self.total_bytes += path.stat().st_size
        # The view is closed by the last tensor that lets go of it: numpy arrays may outlive us.
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for theirs, whole in entries.items():
            ours = hf_name(theirs, self._layout)
            if ours is None or self._is_beyond(theirs):
                continue
            for name, entry in self._pieces(ours, theirs, whole):
                if name in self.tensors:
                    raise ModelLoadError(f"{name!r} is in {path.name!r} and in an earlier part")
                self.tensors[name] = Stored(
                    entry.shape, entry.dtype, entry.nbytes, path, entry.begin
                )
                self._places[name] = _Place(view, entry)

    def _is_beyond(self, name: str) -> bool:
        """Whether a tensor belongs to a layer behind the last, which predicts further tokens."""
        block = _BLOCK.match(name)
        return block is not None and isinstance(self._layers, int) and int(block[1]) >= self._layers

    def _pieces(
        self, ours: str, theirs: str, whole: TensorEntry
    ) -> Iterator[tuple[str, TensorEntry]]:
        """A tensor as it is; of one with all experts of a layer, each expert's."""
        if "*" not in ours:
            if ours.endswith("shared_expert_gate.weight") and len(whole.shape) == 1:
                whole = replace(whole, shape=(1, *whole.shape))  # as the converter squeezes it
            yield ours, whole
            return
        count, dims = self._experts, 3 if ours.endswith(".weight") else 2
        fits = len(whole.shape) == dims and whole.shape[0] == count
        if type(count) is not int or count < 1 or not fits:
            raise ModelLoadError(
                f"{theirs!r} must have {dims} dimensions, the first of them expert_count "
                f"({count!r:.40}); it has the shape {list(whole.shape)}"
            )
        size = whole.nbytes // count
        for i in range(count):
            name = ours.replace("*", str(i))
            yield name, replace(whole, shape=whole.shape[1:], begin=whole.begin + i * size,
                                nbytes=size)  # fmt: skip

    def _permuted(self, name: str, rows: Any) -> Any:
        if not self._layout.permuted or ".self_attn." not in name:
            return rows
        for part, heads in zip(("q_proj", "k_proj"), self._heads, strict=True):
            if f".{part}." in name:
                return unpermuted(rows, heads)
        if ".qkv_proj." in name:  # as the converter's --fuse-qkv has them
            heads, kv_heads = self._heads
            size = len(rows) // (heads + 2 * kv_heads)
            q, k, v = np.split(rows, [heads * size, (heads + kv_heads) * size])
            return np.concatenate([unpermuted(q, heads), unpermuted(k, kv_heads), v])
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


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


DEQUANTISE: Final[dict[str, Callable[[Bytes], Floats]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    **{name: kind.floats for name, kind in BLOCK_TYPES.items()},
}
"""Types that are read, each with its formula."""
