"""`--kv-cache-dtype`: which layers of a model keep keys and values in another type than its own.

Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from quire.config.shape import LayerKV
from quire.errors import ConfigError

KV_CACHE_DTYPES: Final = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8_per_token_head": "int8",
}
"""vLLM's names and the type of `LayerKV.dtype`; `None`: the model's."""
WINDOWED: Final = "sliding_window"


def kept_layers(
    layers: Sequence[LayerKV], dtype: str, name: str, skip: Sequence[str] = ()
) -> tuple[LayerKV, ...]:
    """What each layer keeps, in the type of that name.

    Args:
        layers: In the model's type, unless the model says another.
        dtype: The model's.
        name: One of `KV_CACHE_DTYPES`.
        skip: Layers that stay as they are: their numbers, or `sliding_window`.

    Raises:
        ConfigError: there is no layer of that number.
    """
    for one in skip:
        if one != WINDOWED and int(one) >= len(layers):
            raise ConfigError(
                f"--kv-cache-dtype-skip-layers: the model has layers 0 to {len(layers) - 1}, "
                f"got {one}"
            )
    kind = KV_CACHE_DTYPES[name]
    if kind is None or kind == dtype:
        return tuple(layers)
    skipped = {int(one) for one in skip if one != WINDOWED}

    def stays(index: int, layer: LayerKV) -> bool:
        return index in skipped or (WINDOWED in skip and layer.window is not None)

    return tuple(
        layer if stays(index, layer) else replace(layer, dtype=kind)
        for index, layer in enumerate(layers)
    )
