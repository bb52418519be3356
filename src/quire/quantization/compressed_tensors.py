"""Checkpoints of compressed-tensors (llm-compressor): groups of layers, each with its scheme.

Formats of tensors after compressed-tensors 0.20 (`compressors/`, `quantization/quant_args.py`,
https://github.com/vllm-project/compressed-tensors). Activations: int8 ones are rounded for each
row, whatever the checkpoint has measured for the whole tensor; those of float schemes stay as they
are. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.logger import get_logger
from quire.quantization.bits import fields, words_for
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import entry_error, matches, names, switch, whole
from quire.quantization.order import sorted_columns
from quire.quantization.scheme import (
    FLOATS,
    LayerData,
    Scheme,
    Wanted,
    ceil_div,
    of_integers,
    per_row,
)
from quire.quantization.schemes import Fp4, Fp8, Int8, integer_codes
from quire.weights.bundles import StoredPart

logger = get_logger(__name__)

_WORDS: Final = frozenset({"I32"})
_LINEAR: Final = "Linear"
"""The class that all layers here belong to, as a target."""
_BY_TYPE: Final = {
    ("int", 8): "int-quantized", ("float", 8): "float-quantized",
    ("float", 4): "nvfp4-pack-quantized",
}  # fmt: skip
"""Formats of checkpoints that do not name theirs."""
_PACKED: Final = "pack-quantized"


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    return QuantisedFormat(CompressedTensors(config))


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes of 2 to 8 bits, dense in words along K, as unsigned numbers."""

    width: int
    group: int | None
    """`None`: rows or the whole tensor have one scale."""
    symmetric: bool
    activations: str

    @property
    def label(self) -> str:
        """See `Scheme`."""
        groups = "" if self.group is None else f" in groups of {self.group}"
        return f"int{self.width}{groups} ({_PACKED})"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        scales: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
        zeros = (*scales, (words_for(rows, self.width), 1))
        if self.group is not None:
            groups = ceil_div(columns, self.group)
            scales = ((rows, groups),)
            zeros = ((words_for(rows, self.width), groups), (rows, groups))
        whole_numbers = frozenset({"I32", "I64"})
        return {
            "weight_packed": Wanted(_WORDS, ((rows, words_for(columns, self.width)),)),
            "weight_scale": Wanted(FLOATS, scales),
            "weight_shape": Wanted(whole_numbers, ((2,),), optional=True),
            "weight_zero_point": Wanted(_WORDS | {"I8"}, zeros, optional=self.symmetric),
            "weight_g_idx": Wanted(whole_numbers, ((columns,),), optional=True),
        }

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        rows, columns = layer.rows, layer.columns
        if "weight_shape" in layer and layer["weight_shape"].tolist() != [rows, columns]:
            said = layer["weight_shape"].tolist()
            raise layer.refuse("weight_shape", f"must be {[rows, columns]}, got {said}")
        codes = fields(layer["weight_packed"], self.width, columns)
        scales, group = layer.floats("weight_scale"), self.group or columns
        if self.group is None:
            scales = per_row(scales, rows)
        zeros = self._zeros(layer, scales.shape[1])
        order = None
        if "weight_g_idx" in layer and bool((layer["weight_g_idx"] != -1).any()):
            order = sorted_columns(layer, "weight_g_idx", min(group, columns), scales.shape[1])
        if order is not None:
            codes = codes[:, order]
        group = min(group, columns)
        return integer_codes(codes, self.width, scales, zeros, group, self.activations, order)

    def _zeros(self, layer: LayerData, groups: int) -> torch.Tensor | None:
        """Unsigned, as the codes are; `None`: the middle."""
        if "weight_zero_point" not in layer:
            return None
        zeros = self._stored_zeros(layer, groups)
        if self.symmetric and bool((zeros != 1 << (self.width - 1)).any()):
            raise layer.refuse(
                "weight_zero_point",
                "holds zero points, but the checkpoint's configuration says that the layer is "
                "symmetric (or leaves it open, which means that)",
            )
        return zeros

    def _stored_zeros(self, layer: LayerData, groups: int) -> torch.Tensor:
        """Older writers leave them unpacked and signed."""
        stored, rows = layer["weight_zero_point"], layer.rows
        if stored.dtype == torch.int8:
            middle = 1 << (self.width - 1)
            zeros = stored.reshape(-1, groups).expand(rows, groups).to(torch.int32) + middle
            if bool(((zeros < 0) | (zeros >= 2 * middle)).any()):
                why = f"holds zero points outside {-middle} to {middle - 1}"
                raise layer.refuse("weight_zero_point", why)
            return zeros
        packed = stored.reshape(-1, groups).t().contiguous()
        return fields(packed, self.width, rows).t().contiguous()


class CompressedTensors:
    """A `CheckpointFormat`: `config_groups`, the first whose targets have a layer, those with its
    name before others, and `ignore`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._ignore = names(config, "ignore")
        self._groups: list[tuple[tuple[str, ...], Scheme]] = []
        groups = config.get("config_groups")
        # Checkpoints of which keys and values alone are quantised have none.
        empty = not groups and not config.get("kv_cache_scheme")
        if not isinstance(groups, dict) or empty:
            raise entry_error("config_groups", "an object with groups", groups)
        _refuse_extras(config)
        said = config.get("format")
        for name, group in groups.items():
            if not isinstance(group, dict):
                raise entry_error(f"config_groups.{name}", "an object", group)
            if "weights" in group and group["weights"] is None:
                continue  # of attention, say: activations alone
            targets = names(group, "targets")
            self._groups.append((targets, _scheme(str(name), group, said)))

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        del columns
        name = part.name
        if any(matches(name, entry) or entry == _LINEAR for entry in self._ignore):
            return None
        # As compressed-tensors ranks them: names, then expressions, then classes.
        by_name = [s for targets, s in self._groups if name in targets]
        by_pattern = [s for targets, s in self._groups if any(matches(name, t) for t in targets)]
        by_class = [s for targets, s in self._groups if _LINEAR in targets]
        return next(iter(by_name + by_pattern + by_class), None)


def _refuse_extras(config: Mapping[str, Any]) -> None:
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ModelLoadError(
            f"the checkpoint is sparse ({sparsity['format']!r:.60}), which quire does not read: "
            "save it with the format dense"
        )
    transform = config.get("transform_config")
    if isinstance(transform, dict) and transform.get("config_groups"):
        raise ModelLoadError(
            "the checkpoint rotates activations at run time (transform_config), which quire does "
            "not do: use one without transforms, or with those that are merged into its weights"
        )
    if config.get("kv_cache_scheme"):
        logger.info(
            "the checkpoint has scales for an 8-bit KV cache: --kv-cache-dtype fp8 uses them"
        )


def _scheme(name: str, group: Mapping[str, Any], said: object) -> Scheme:
    where = f"config_groups.{name}"
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise entry_error(f"{where}.weights", "an object", weights)
    kind, bits = weights.get("type", "int"), whole(weights, ["num_bits"], 8)
    form = group.get("format") or said
    if form in (None, "dense", "mixed-precision", "naive-quantized"):
        form = _BY_TYPE.get((str(kind), bits), _PACKED)
        if form == "float-quantized" and weights.get("scale_dtype") == "torch.uint8":
            form = "mxfp8-quantized"
    readers = {
        "int-quantized": _int8, "float-quantized": _fp8, _PACKED: _packed,
        "nvfp4-pack-quantized": _nvfp4, "mxfp4-pack-quantized": _mxfp4,
        "mxfp8-quantized": _mxfp8,
    }  # fmt: skip
    if not isinstance(form, str) or form not in readers:
        raise ModelLoadError(
            f"{where} of the checkpoint has the format {form!r:.60}, which quire does not read; "
            f"those it reads: {', '.join(readers)}. Nearest: save it as {_PACKED}"
        )
    scheme: Scheme = readers[form](where, weights, group.get("input_activations"), bits)
    return scheme


_Entries = Mapping[str, Any]


def _int8(where: str, weights: _Entries, inputs: object, bits: int) -> Scheme:
    _expect(where, weights, bits, "int", 8)
    group = _group(where, weights)
    return Int8(_activations(where, inputs), group, switch(weights, "symmetric", True))


def _packed(where: str, weights: _Entries, inputs: object, bits: int) -> Scheme:
    if weights.get("type", "int") != "int" or not 2 <= bits <= 8:
        raise ModelLoadError(
            f"{where} of the checkpoint: {_PACKED} weights of {bits} bits "
            f"({weights.get('type')!r:.20}) are not read; nearest: int with 2 to 8 bits"
        )
    group = _group(where, weights)
    symmetric = switch(weights, "symmetric", True)
    return Packed(bits, group, symmetric, _activations(where, inputs))


def _fp8(where: str, weights: _Entries, inputs: object, bits: int) -> Scheme:
    del inputs
    _expect(where, weights, bits, "float", 8)
    if not switch(weights, "symmetric", True):
        raise entry_error(f"{where}.weights.symmetric", "true for float weights", False)
    block: tuple[int, int] | None = None
    if weights.get("strategy") == "block":
        sizes = weights.get("block_structure")
        if isinstance(sizes, str):  # as older writers have it: "128x128"
            sizes = [int(size) if size.isdecimal() else 0 for size in sizes.split("x")]
        right = isinstance(sizes, list) and len(sizes) == 2
        if not right or not all(type(s) is int and s > 0 for s in sizes):
            raise entry_error(f"{where}.weights.block_structure", "two sizes", sizes)
        block = (sizes[0], sizes[1])
    elif (group := _group(where, weights)) is not None:
        block = (1, group)
    return Fp8(block=block)


def _mxfp8(where: str, weights: _Entries, inputs: object, bits: int) -> Scheme:
    del inputs
    _expect(where, weights, bits, "float", 8)
    return Fp8(block=(1, _group(where, weights) or 32), exponents=True)


def _nvfp4(where: str, weights: _Entries, inputs: object, bits: int) -> Scheme:
    del inputs
    _expect(where, weights, bits, "float", 4)
    return Fp4("weight_packed", group=_group(where, weights) or 16, whole="weight_global_scale",
               divides=True)  # fmt: skip


def _mxfp4(where: str, weights: _Entries, inputs: object, bits: int) -> Scheme:
    del inputs
    _expect(where, weights, bits, "float", 4)
    group = _group(where, weights) or 32
    return Fp4("weight_packed", group=group)


def _expect(where: str, weights: _Entries, bits: int, kind: str, width: int) -> None:
    if weights.get("type", "int") != kind or bits != width:
        raise ModelLoadError(
            f"{where} of the checkpoint: its format has {kind} weights of {width} bits, but "
            f"it says {weights.get('type')!r:.20} of {bits} bits; nearest: {_PACKED}, 2 to 8 bits"
        )


def _group(where: str, weights: _Entries) -> int | None:
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:
        strategy = "group" if size not in (None, -1) else "tensor" if size is None else "channel"
    if strategy in ("tensor", "channel"):
        return None
    if strategy not in ("group", "tensor_group"):
        raise ModelLoadError(
            f"{where} of the checkpoint: the strategy {strategy!r:.40} is not read for these "
            "weights; nearest: group, channel or tensor"
        )
    if type(size) is not int or size < 1:
        raise entry_error(f"{where}.weights.group_size", "a positive whole number", size)
    return size


def _activations(where: str, inputs: object) -> str:
    if inputs is None:
        return of_integers()
    if not isinstance(inputs, dict):
        raise entry_error(f"{where}.input_activations", "an object", inputs)
    kind, bits = inputs.get("type", "int"), whole(inputs, ["num_bits"], 8)
    if kind != "int":
        return "float"
    if bits != 8:
        raise ModelLoadError(
            f"{where} of the checkpoint: activations of {bits} bits are not computed; nearest: 8"
        )
    if not inputs.get("dynamic", False):
        logger.warning_once(
            "the checkpoint has one scale for all activations of a layer; quire rounds each row "
            "with a scale of its own, which is at least as exact"
        )
    return "int8"
