"""Formats of quantised checkpoints that are not read, and what to convert them to. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NEAREST: Final = "save it again as compressed-tensors (llm-compressor), GPTQ or AWQ gemm"
_UNQUANTISED: Final = "use the unquantised model"

REFUSED: Final[Mapping[str, str]] = {
    "aqlm": f"{_UNQUANTISED}, or {_NEAREST}",
    "bitnet": f"{_UNQUANTISED}, or its GGUF file if there is one",
    "eetq": f"{_UNQUANTISED}: int8 per row is compressed-tensors' int-quantized",
    "exl2": _NEAREST,
    "exl3": _NEAREST,
    "higgs": f"{_UNQUANTISED}, or {_NEAREST}",
    "hqq": f"{_UNQUANTISED}, or {_NEAREST} (its zeros are no whole numbers)",
    "llm-awq": "save it as AWQ gemm (autoawq)",
    "petit_nvfp4": "save it as ModelOpt NVFP4",
    "quanto": f"{_UNQUANTISED}, or {_NEAREST}",
    "quip": f"{_UNQUANTISED}, or {_NEAREST}",
    "spqr": f"{_UNQUANTISED}, or {_NEAREST}",
    "torchao": f"{_UNQUANTISED}, or {_NEAREST} (its tensors are Python objects)",
    "vptq": f"{_UNQUANTISED}, or {_NEAREST}",
}
"""By `quant_method`."""
