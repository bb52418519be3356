"""Checkpoints of MLX (mlx-lm): codes with scales and biases of groups, or MXFP4, MXFP8, NVFP4.

Codes are dense in words along K; weight = code * scale + bias, codes from 0 on. `quantization` in
`config.json` has `bits`, `group_size` and `mode`, and the same by the names of layers that differ.
Layers that have `scales` are quantised, embeddings and routers too. After MLX 0.32 (`mx.quantize`)
and mlx-lm 0.32 (`load_model` in `utils.py`), https://github.com/ml-explore. Knows no kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.quantization.bits import fields, nibbles, words_for
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import entry_error, whole
from quire.quantization.scheme import FLOATS, LayerData, Scheme, Wanted, ceil_div, of_integers
from quire.weights.bundles import StoredPart

_WORDS: Final = frozenset({"U32"})
_BITS: Final = (1, 2, 3, 4, 5, 6, 8)
_MIDDLE: Final = -128
_AFFINE: Final = "affine"
_FLOATS: Final = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and columns of a group, by mode."""
_MODES: Final = (_AFFINE, *_FLOATS)
_ROUTER: Final = re.compile(r"(.*\.)?(gate|router|shared_expert_gate)")
"""Their few outputs decide where a token goes: rows stay floats."""


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by the entry `quantization`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    return QuantisedFormat(Mlx(config), codes_embeddings=True)


@dataclass(frozen=True, slots=True)
class MlxAffine:
    """`weight` and, for each group, `scales` and `biases`."""

    width: int
    group: int
    activations: str

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return f"int{self.width} in groups of {self.group} (MLX)"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        of_groups = Wanted(FLOATS, ((rows, ceil_div(columns, self.group)),))
        words = (rows, words_for(columns, self.width))
        return {"weight": Wanted(_WORDS, (words,)), "scales": of_groups, "biases": of_groups}

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        codes = fields(layer["weight"].view(torch.int32), self.width, layer.columns)
        scales, minima = layer.floats("scales"), -layer.floats("biases")
        kind, zeros = "int4", None
        if self.width > 4:
            kind, codes = "int8", codes.view(torch.int8)
        if self.width == 8:  # 0 to 255 as -128 to 127, and 0 as -128
            codes = codes ^ _MIDDLE
            zeros = torch.full(scales.shape, _MIDDLE, dtype=torch.int8)
        return CodedWeight(kind, codes, scales, zeros, self.group, self.activations, None, minima)


@dataclass(frozen=True, slots=True)
class MlxFloats:
    """`weight` in e2m1 or e4m3 and `scales` of groups: powers of two, or e4m3 (NVFP4)."""

    mode: str
    activations: str = "float"

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return f"{self.mode} (MLX)"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        width, group = _FLOATS[self.mode]
        return {
            "weight": Wanted(_WORDS, ((rows, words_for(columns, width)),)),
            "scales": Wanted(frozenset({"U8"}), ((rows, ceil_div(columns, group)),)),
        }

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        width, group = _FLOATS[self.mode]
        if self.mode == "nvfp4":
            scales = layer.e4m3("scales").to(torch.float32)
        else:
            scales = layer.floats("scales")
        if width == 4:
            codes = nibbles(layer["weight"].view(torch.uint8))
            return CodedWeight("e2m1", codes, scales, None, group, self.activations)
        return CodedWeight("e4m3", layer.e4m3("weight"), scales, None, group, self.activations)


class Mlx:
    """A `CheckpointFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        _scheme("", config)

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        if part.tensors and "scales" not in part.tensors:
            return None
        said = self._config.get(part.name, self._config)
        if not isinstance(said, dict):
            raise entry_error(part.name, "an object where the layer has scales", said)
        return _scheme(part.name, said)


def _scheme(name: str, config: Mapping[str, Any]) -> Scheme:
    """Of a layer; "": of those that are not named."""
    mode = config.get("mode", _AFFINE)
    if mode not in _MODES:
        raise entry_error("mode", " or ".join(_MODES), mode)
    if mode != _AFFINE:
        return MlxFloats(mode)
    width, group = whole(config, ["bits"], 4), whole(config, ["group_size"], 64)
    if width not in _BITS:
        near = min(_BITS, key=lambda known: (abs(known - width), -known))
        layer = f"layer {name!r}: " if name else ""
        raise ModelLoadError(
            f"{layer}MLX with {width} bits is not read; nearest: {near} of "
            f"{', '.join(map(str, _BITS))}"
        )
    if group < 1:
        raise entry_error("group_size", "a positive whole number", group)
    return MlxAffine(width, group, "float" if _ROUTER.fullmatch(name) else of_integers())
