"""From the architecture a checkpoint names to a loaded model.

The only place that puts family, attention backend and weights together. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from quire.attention.base import AttentionBackend, AttentionNeed
from quire.attention.select import select_backend
from quire.config.shape import LayerKV, ModelShape
from quire.errors import ModelLoadError
from quire.kernels.dtypes import TORCH_DTYPES, torch_dtype
from quire.logger import get_logger
from quire.models.base import CausalLM
from quire.models.blocks import DecoderForCausalLM
from quire.registry import Registry
from quire.weights.loader import load_weights

logger = get_logger(__name__)

MODELS: Final[Registry[type[DecoderForCausalLM]]] = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "quire.models.llama:LlamaForCausalLM",
    },
    error=ModelLoadError,
)
"""Architecture in `config.json` to class."""


@torch.inference_mode()
def load_model(
    shape: ModelShape,
    folder: Path,
    dtype: str = "auto",
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """Build the model of a folder and load its weights.

    `dtype` `auto` is the checkpoint's own type; `device` `auto` a GPU if there is one.
    `progress(done, total)` hears bytes.

    Raises:
        ModelLoadError: the architecture, a size, a file or a tensor is not as it must be.
        ConfigError: no attention backend serves the model on this device.
    """
    device = resolve_device(device)
    model = build_model(shape, resolve_dtype(shape, dtype), device)
    model.num_parameters = load_weights(
        folder, model.parameters(), model.name_rules(), model.dtype, device, progress
    )
    return model


def build_model(shape: ModelShape, dtype: str, device: str) -> DecoderForCausalLM:
    """The model without its weights; `dtype` and `device` are settled.

    Raises:
        ModelLoadError: the architecture or a size is not as it must be.
        ConfigError: no attention backend serves the model on this device.
    """
    family = MODELS.get(shape.architecture)
    _refuse_quantised(shape)
    return family(shape, torch_dtype(dtype), device, _attention(shape, dtype, device))


def kv_layers(shape: ModelShape) -> tuple[LayerKV, ...]:
    """What each layer of a model keeps of a token.

    Raises:
        ModelLoadError: no family of that name.
    """
    return MODELS.get(shape.architecture).kv_layers(shape)


def resolve_dtype(shape: ModelShape, dtype: str) -> str:
    """The type a model computes with: `float32`, `bfloat16` or `float16`.

    Raises:
        ModelLoadError: `dtype` is `auto` and the checkpoint's type is none of these.
    """
    if dtype != "auto":
        return dtype
    own = shape.dtype.removeprefix("torch.")
    if own not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise ModelLoadError(f"the checkpoint's dtype must be one of {known}, got {own!r}")
    return own


def resolve_device(device: str) -> str:
    """`auto` as `cuda` if there is a GPU, else `cpu`."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _attention(shape: ModelShape, dtype: str, device: str) -> AttentionBackend:
    kind = torch.device(device).type
    need = AttentionNeed(kind, dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    selection = select_backend(need)
    for name, reason in selection.rejected:
        logger.info("attention backend %s not used: it %s", name, reason)
    return selection.backend


def _refuse_quantised(shape: ModelShape) -> None:
    quantization = shape.raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelLoadError(
            f"the checkpoint is quantised ({method or quantization}), which quire does not read "
            "yet: use a float32, bfloat16 or float16 one"
        )
