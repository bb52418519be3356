"""GGUF files: each tensor has a type of its own, and its blocks are computed as they are.

Layouts are in `quire.weights.gguf_blocks`. Some have minima (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K),
which are taken from the numbers of a group. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.checkpoint.gguf_header import TYPES
from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.scheme import FLOATS, LayerData, Scheme, Wanted, of_integers
from quire.weights.bundles import StoredPart
from quire.weights.gguf_blocks import BLOCK_TYPES, E2M1_VALUES, IQ4_VALUES, BlockType

_SIZES = {name: (count, size) for name, count, size in TYPES.values()}
_BY_VALUES = {IQ4_VALUES: "iq4_nl", E2M1_VALUES: "e2m1"}
_AT_ONCE = 1 << 14
"""Blocks that are unpacked together, so that what is needed for it stays small."""


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a GGUF file. Its tensors say everything."""
    del config
    return QuantisedFormat(Gguf())


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """Blocks of one type."""

    dtype: str
    """As the file names it: `Q4_K`."""

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return f"GGUF {self.dtype}"

    @property
    def activations(self) -> str:
        """See `Scheme`."""
        return of_integers()

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        return {"weight": Wanted(frozenset({self.dtype}), ((rows, columns),))}

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        kind = BLOCK_TYPES[self.dtype]
        rows, columns = layer.rows, layer.columns
        codes, scales, minima = _unpacked(layer["weight"], kind, _SIZES[self.dtype])
        for what, numbers in (("scales", scales), ("minima", minima)):
            if numbers is not None and not bool(numbers.isfinite().all()):
                raise layer.refuse("weight", f"{what} of its blocks must be finite numbers")
        codes, scales = codes.reshape(rows, columns), scales.reshape(rows, -1)
        name = _BY_VALUES.get(kind.values) or ("int8" if codes.dtype == torch.int8 else "int4")
        zeros = None
        if kind.zero:
            zeros = torch.full(scales.shape, kind.zero, dtype=torch.uint8)
        least = None if minima is None else minima.reshape(rows, -1)
        group = min(kind.group, columns)
        return CodedWeight(name, codes, scales, zeros, group, self.activations, None, least)


class Gguf:
    """A `CheckpointFormat`."""

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        del columns
        weight = part.tensors.get("weight")
        if weight is None or weight.dtype in FLOATS:
            return None
        if weight.dtype not in BLOCK_TYPES:
            raise ModelLoadError(
                f"layer {part.name!r}: GGUF type {weight.dtype} is not read; nearest: "
                f"{_nearest(weight.dtype)} of {', '.join(BLOCK_TYPES)}"
            )
        return GgufScheme(weight.dtype)


def _unpacked(
    raw: Tensor, kind: BlockType, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and minima, flat, of bytes `[N, bytes of a row]`."""
    blocks = raw.numpy().reshape(-1, sizes[1])
    parts = [kind.decode(blocks[i : i + _AT_ONCE]) for i in range(0, len(blocks), _AT_ONCE)]
    codes = torch.from_numpy(np.concatenate([part.codes for part in parts]))
    scales = torch.from_numpy(np.concatenate([part.scales for part in parts]))
    found = [part.minima for part in parts if part.minima is not None]
    return codes, scales, torch.from_numpy(np.concatenate(found)) if found else None


def _nearest(dtype: str) -> str:
    """The type that is read whose size is nearest."""
    if dtype not in _SIZES:
        return "Q8_0"
    wanted = _SIZES[dtype][1] / _SIZES[dtype][0]
    return min(BLOCK_TYPES, key=lambda name: abs(_SIZES[name][1] / _SIZES[name][0] - wanted))
