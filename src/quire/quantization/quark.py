"""Checkpoints of AMD Quark: fp8, int8 and MXFP4.

`global_quant_config` says how layers are quantised, `layer_quant_config` which ones otherwise, by
names with `*`, and `exclude` which ones not. After vLLM 0.32 (`quantization/quark/`). Activations
are floats, or int8 rounded for each row, whatever scales the checkpoint has for them. Knows no
kernel.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, Final

from quire.errors import ModelLoadError
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import entry_error, matches, names
from quire.quantization.scheme import Scheme, of_integers
from quire.quantization.schemes import Fp4, Fp8, Int8
from quire.weights.bundles import StoredPart

_NEAREST: Final = (
    "nearest: fp8_e4m3 or int8 per_tensor or per_channel, or fp4 per_group of 32 with scales in "
    "e8m0; or save it as compressed-tensors (llm-compressor), GPTQ or AWQ gemm"
)


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    return QuantisedFormat(Quark(config))


class Quark:
    """A `CheckpointFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._exclude = names(config, "exclude")
        self._usual = _scheme("global_quant_config", config.get("global_quant_config"))
        layers = config.get("layer_quant_config") or {}
        if not isinstance(layers, dict):
            raise entry_error("layer_quant_config", "an object", layers)
        self._layers = {
            pattern: _scheme(f"layer_quant_config.{pattern}", said)
            for pattern, said in layers.items()
        }
        if self._usual is None and not any(self._layers.values()):
            raise entry_error("global_quant_config", "an object with 'weight'", None)

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        del columns
        if any(_fits(part.name, entry) for entry in self._exclude):
            return None
        said = (scheme for entry, scheme in self._layers.items() if _fits(part.name, entry))
        return next(said, self._usual)


def _fits(name: str, entry: str) -> bool:
    return matches(name, entry) or ("*" in entry and fnmatch.fnmatchcase(name, entry))


def _scheme(where: str, said: object) -> Scheme | None:
    """Of a configuration of layers; `None`: their weights are not quantised."""
    if said is None:
        return None
    if not isinstance(said, dict):
        raise entry_error(where, "an object", said)
    weight = said.get("weight")
    if weight is None:
        return None
    if isinstance(weight, list):
        kinds = " over ".join(str(w.get("dtype")) for w in weight if isinstance(w, dict))
        raise ModelLoadError(
            f"{where} of Quark has weights quantised twice ({kinds:.60}), which are not read; "
            f"{_NEAREST}"
        )
    if not isinstance(weight, dict):
        raise entry_error(f"{where}.weight", "an object", weight)
    kind, way = weight.get("dtype"), weight.get("qscheme")
    whole = way in ("per_tensor", "per_channel") and weight.get("ch_axis") in (None, 0)
    if kind == "fp8_e4m3" and whole:
        return Fp8()
    if kind == "int8" and whole and weight.get("symmetric", True) is True:
        inputs = said.get("input_tensors")
        activations = "int8" if inputs else of_integers()
        return Int8(activations)
    groups = way, weight.get("group_size"), weight.get("scale_format")
    if kind == "fp4" and groups == ("per_group", 32, "e8m0"):
        return Fp4("weight", group=32)
    raise ModelLoadError(
        f"{where} of Quark has weights of {kind!r:.40} {way!r:.40} (group_size "
        f"{weight.get('group_size')!r:.20}, scale_format {weight.get('scale_format')!r:.20}, "
        f"symmetric {weight.get('symmetric')!r:.20}), which are not read; {_NEAREST}"
    )
