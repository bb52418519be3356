"""GPTQ checkpoints, versions 1 and 2 of the format: 2, 3, 4 and 8 bits, `desc_act`, `dynamic`.

Layout after GPTQModel 7.7 (`nn_modules/qlinear`, `quantization/config.py`,
https://github.com/ModelCloud/GPTQModel): `qweight` int32 `[K * bits / 32, N]` has fields along K,
`qzeros` `[G, N * bits / 32]` along N, the lowest bits first; weight = (code - zero) * scale.
G = ceil(K / group): the last group may be shorter.
Version 1 stores each zero less 1, within its field: 2^bits - 1 stands for 0. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.quantization.bits import fields, words_for
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import begins_with, entry_error, group_size, switch, whole
from quire.quantization.order import sorted_columns
from quire.quantization.scheme import FLOATS, LayerData, Scheme, Wanted, ceil_div, of_integers
from quire.quantization.schemes import integer_codes
from quire.weights.bundles import StoredPart

_BITS: Final = (2, 3, 4, 8)
_VERSIONS: Final = ("gptq", "gptq_v2")
_WORDS: Final = frozenset({"I32"})


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config` or `quantize_config.json`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    return QuantisedFormat(Gptq(config))


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """`qweight`, `qzeros`, `scales`, perhaps `g_idx`."""

    width: int
    group: int
    less_one: bool
    """Zeros are stored less 1 (version 1)."""
    activations: str

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return f"int{self.width} in groups of {self.group} (GPTQ)"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        width, groups = self.width, ceil_div(columns, self.group)
        return {
            "qweight": Wanted(_WORDS, ((words_for(columns, width), rows),)),
            "qzeros": Wanted(_WORDS, ((groups, words_for(rows, width)),)),
            "scales": Wanted(FLOATS, ((groups, rows),)),
            "g_idx": Wanted(frozenset({"I32", "I64"}), ((columns,),), optional=True),
            # Of a layer without bias: older writers gave each a bias of zeros.
            "bias": Wanted(FLOATS, ((rows,),), optional=True),
        }

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        if "bias" in layer and bool(layer["bias"].any()):
            raise layer.refuse("bias", "is not 0, and this layer of the model has no bias")
        codes = fields(layer["qweight"].t().contiguous(), self.width, layer.columns)
        stored = fields(layer["qzeros"], self.width, layer.rows)
        if self.less_one:
            stored = (stored + 1) & ((1 << self.width) - 1)
        scales = layer.floats("scales").t().contiguous()
        order = None
        if "g_idx" in layer:
            order = sorted_columns(layer, "g_idx", self.group, scales.shape[1])
        if order is not None:
            codes = codes[:, order]
        zeros = stored.t().contiguous()
        return integer_codes(codes, self.width, scales, zeros, self.group, self.activations, order)


class Gptq:
    """A `CheckpointFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        version = config.get("checkpoint_format") or config.get("format") or "gptq"
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"the GPTQ checkpoint has the format {version!r:.40}, which quire does not read; "
                f"nearest: save it as {' or '.join(_VERSIONS)}"
            )
        self._less_one = version == "gptq"
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise entry_error("dynamic", "an object", dynamic)
        self._dynamic: dict[str, Any] = dynamic
        self._head = switch(config, "lm_head", False)
        blocks = config.get("modules_in_block_to_quantize") or []
        self._suffixes = _flat(blocks)
        width_of(config, "")

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        name = part.name
        settings = self._settings(name)
        if settings is None:
            return None
        if name.endswith("lm_head") and not self._head and "qweight" not in part.tensors:
            return None
        listed = any(name.endswith(f".{suffix}") for suffix in self._suffixes)
        if self._suffixes and not listed and "qweight" not in part.tensors:
            return None
        width = width_of(settings, name)
        group = group_size(settings, ["group_size"], columns)
        # A group longer than the layer is its one group.
        return GptqScheme(width, min(group, columns), self._less_one, of_integers())

    def _settings(self, name: str) -> Mapping[str, Any] | None:
        """Those of a layer, by the first rule of `dynamic` that fits; `None`: it is left as it
        was."""
        for rule, changes in self._dynamic.items():
            if begins_with(name, rule.removeprefix("+:").removeprefix("-:")):
                if rule.startswith("-:"):
                    return None
                if not isinstance(changes, dict):
                    raise entry_error(f"dynamic.{rule}", "an object", changes)
                return {**self._config, **changes}
        return self._config


def width_of(config: Mapping[str, Any], name: str) -> int:
    """Bits of a code in a layer; "" stands for those that are not named.

    Raises:
        ModelLoadError: a width that GPTQ does not have.
    """
    width = whole(config, ["bits"])
    if width not in _BITS:
        where = f"layer {name!r}" if name else "the checkpoint"
        raise ModelLoadError(
            f"{where}: GPTQ with {width} bits is not read; nearest: "
            f"{min(_BITS, key=lambda known: (abs(known - width), -known))} of "
            f"{', '.join(map(str, _BITS))}"
        )
    return width


def _flat(blocks: object) -> tuple[str, ...]:
    if not isinstance(blocks, list):
        raise entry_error("modules_in_block_to_quantize", "a list of lists of names", blocks)
    found: list[str] = []
    for block in blocks:
        for name in block if isinstance(block, list) else [block]:
            if not isinstance(name, str):
                raise entry_error("modules_in_block_to_quantize", "lists of names", blocks)
            found.append(name)
    return tuple(found)
