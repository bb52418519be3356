"""Checkpoints of NVIDIA ModelOpt: FP8 and NVFP4, described in `config.json` or in
`hf_quant_config.json`.

After vLLM 0.32 (`quantization/modelopt.py`). NVFP4: weight = e2m1 * weight_scale * weight_scale_2.
Activations stay floats, so their scales are not used. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.errors import ModelLoadError
from quire.logger import get_logger
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import entry_error, is_within, names, whole
from quire.quantization.scheme import Scheme
from quire.quantization.schemes import Fp4, Fp8
from quire.weights.bundles import StoredPart

logger = get_logger(__name__)

_MIXED: Final = "MIXED_PRECISION"
_FP8: Final = Fp8()


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config` or `hf_quant_config.json`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    inner = config.get("quantization")
    if isinstance(inner, dict):
        config = {**config, **inner}
    return QuantisedFormat(ModelOpt(config))


class ModelOpt:
    """A `CheckpointFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._left = names(config, "exclude_modules", "ignore")
        self._algorithm = str(config.get("quant_algo") or "").upper()
        layers = config.get("quantized_layers") or {}
        if not isinstance(layers, dict):
            raise entry_error("quantized_layers", "an object", layers)
        self._layers: dict[str, Any] = layers
        self._config = config
        of_cache = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
        self._cache_alone = not self._algorithm and bool(of_cache)
        if self._algorithm != _MIXED and not self._cache_alone:
            _scheme(self._algorithm, config)
        if of_cache:
            logger.info(
                "the checkpoint has scales for an 8-bit KV cache: --kv-cache-dtype fp8 uses them"
            )

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        del columns
        if self._cache_alone or is_within(part.name, self._left):
            return None
        if self._algorithm != _MIXED:
            return _scheme(self._algorithm, self._config)
        said = self._layers.get(part.name)
        if said is None:
            return None
        if not isinstance(said, dict):
            raise entry_error(f"quantized_layers.{part.name}", "an object", said)
        return _scheme(str(said.get("quant_algo") or "").upper(), {**self._config, **said})


def _scheme(algorithm: str, config: Mapping[str, Any]) -> Scheme:
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return _FP8
    if algorithm == "FP8_PB_WO":
        return Fp8(block=(128, 128))
    if algorithm == "MXFP8":
        return Fp8(block=(1, 32), exponents=True)
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        group = whole(config, ["group_size"], 16)
        if group < 1:
            raise entry_error("group_size", "a positive whole number", group)
        return Fp4("weight", group=group, whole="weight_scale_2")
    raise ModelLoadError(
        f"ModelOpt's algorithm {algorithm!r:.40} is not read; nearest: FP8, NVFP4, MXFP8 or "
        f"{_MIXED} of these"
    )
