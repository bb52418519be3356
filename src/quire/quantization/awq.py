"""AWQ checkpoints of AutoAWQ, versions gemm and gemv: 4 bits in groups.

Layout after AutoAWQ 0.2.9 (`modules/linear/gemm.py`, `gemv.py`, `utils/packing_utils.py`,
https://github.com/casper-hansen/AutoAWQ). gemm: `qweight` int32 `[K, N / 8]` and `qzeros`
`[G, N / 8]` hold eight columns in a word, in the order of `AWQ_ORDER`. gemv: `[N, K / 8]` and
`[N, padded G / 8]` in plain order. weight = (code - zero) * scale. K is G whole groups. Knows no
kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.quantization.bits import awq_fields, fields
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import contains_any, group_size, names, switch, whole
from quire.quantization.scheme import FLOATS, LayerData, Scheme, Wanted, ceil_div, of_integers
from quire.quantization.schemes import integer_codes
from quire.weights.bundles import StoredPart

_WORDS: Final = frozenset({"I32"})
_BITS: Final = 4
_IN_WORD: Final = 8
"""Codes in a word."""


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    return QuantisedFormat(Awq(config))


@dataclass(frozen=True, slots=True)
class AwqGemm:
    """Words along N."""

    group: int
    zeros: bool
    activations: str

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return f"int4 in groups of {self.group} (AWQ gemm)"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        groups, words = ceil_div(columns, self.group), ceil_div(rows, _IN_WORD)
        return {
            "qweight": Wanted(_WORDS, ((columns, words),)),
            "qzeros": Wanted(_WORDS, ((groups, words),), optional=not self.zeros),
            "scales": Wanted(FLOATS, ((groups, rows),)),
        }

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        rows = layer.rows
        codes = awq_fields(layer["qweight"])[:, :rows].t().contiguous()
        scales = layer.floats("scales").t().contiguous()
        zeros = None
        if "qzeros" in layer:
            zeros = awq_fields(layer["qzeros"])[:, :rows].t().contiguous()
        return integer_codes(codes, _BITS, scales, zeros, self.group, self.activations)


@dataclass(frozen=True, slots=True)
class AwqGemv:
    """Words along K; groups are padded."""

    group: int
    zeros: bool
    activations: str

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return f"int4 in groups of {self.group} (AWQ gemv)"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        width = _padded_words(columns, self.group)
        return {
            "qweight": Wanted(_WORDS, ((rows, ceil_div(columns, _IN_WORD)),)),
            "qzeros": Wanted(_WORDS, ((rows, width),), optional=not self.zeros),
            "scales": Wanted(FLOATS, ((rows, width * _IN_WORD),)),
        }

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        groups = ceil_div(layer.columns, self.group)
        codes = fields(layer["qweight"], _BITS, layer.columns)
        scales = layer.floats("scales")[:, :groups].contiguous()
        zeros = fields(layer["qzeros"], _BITS, groups) if "qzeros" in layer else None
        return integer_codes(codes, _BITS, scales, zeros, self.group, self.activations)


class Awq:
    """A `CheckpointFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        _check_width(whole(config, ["bits", "w_bit"], _BITS))
        version = str(config.get("version") or "gemm").lower()
        if version not in ("gemm", "gemv"):
            raise ModelLoadError(
                f"AWQ of the version {version!r:.40} is not read; nearest: save it with the "
                "version gemm"
            )
        self._kind = AwqGemm if version == "gemm" else AwqGemv
        self._zeros = switch(config, "zero_point", True)
        self._left = names(config, "modules_to_not_convert")

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        if contains_any(part.name, self._left):
            return None
        group = group_size(self._config, ["group_size", "q_group_size"], columns)
        _check_groups(part.name, columns, group)
        return self._kind(group, self._zeros, of_integers())


def awq_gemm(name: str, columns: int, width: int, group: int, zeros: bool) -> AwqGemm:
    """That of a layer of `columns` (K).

    Args:
        zeros: There must be `qzeros`.

    Raises:
        ModelLoadError: it has a width or groups that AWQ does not have.
    """
    _check_width(width)
    _check_groups(name, columns, group)
    return AwqGemm(group, zeros, of_integers())


def _check_width(width: int) -> None:
    if width != _BITS:
        raise ModelLoadError(f"AWQ with {width} bits is not read; nearest: {_BITS}")


def _check_groups(name: str, columns: int, group: int) -> None:
    if columns % group:  # AutoAWQ writes no such layer, so nothing says how it would lie
        raise ModelLoadError(
            f"layer {name!r} has {columns} columns, which groups of {group} do not divide "
            "(AWQ has whole groups alone); nearest: GPTQ, whose last group may be shorter"
        )


def _padded_words(columns: int, group: int) -> int:
    """Words of a row of zeros: AutoAWQ's `calculate_zeros_width`."""
    multiple = {64: 2, 32: 4}.get(group, 1)
    words = ceil_div(columns // group, _IN_WORD)
    return ceil_div(words, multiple) * multiple
