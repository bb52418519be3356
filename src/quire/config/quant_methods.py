"""What checkpoints and vLLM call the formats of quantised checkpoints. Names alone."""

from __future__ import annotations

from typing import Any, Final

_SAME: Final = {
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "auto_round": "auto-round",
    "autoround": "auto-round",
    "awq_marlin": "awq",
    "gpt_oss_mxfp4": "mxfp4",
    "gptq_marlin": "gptq",
    "inc": "auto-round",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
}
"""Names of a kernel, of a variant or of the tool that writes it, by which vLLM knows a format."""


def quant_method(name: Any) -> Any:
    """A format's own name. What is no text, or no such name, stays as it is."""
    return _SAME.get(name.lower(), name.lower()) if isinstance(name, str) else name


def method_of(said: dict[str, Any]) -> Any:
    """The format that a checkpoint's `quantization_config` names; `None`: it names none."""
    return quant_method(said.get("quant_method") or said.get("method"))
