"""Rotary position tables: frequencies, their scalings, and the cosines and sines.

A table is computed once at load, in float64, for all positions of the model, so a position's
entry never depends on a batch. Knows the entries of `config.json`, no family.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.registry import did_you_mean


def cos_sin_table(shape: ModelShape, device: str) -> Tensor:
    """Float32 `[max_position_embeddings, head_dim]`: cosines, then sines, of each position.

    Raises:
        ModelLoadError: the model asks for a scaling quire does not know, or misses a number.
    """
    if shape.head_dim % 2:
        raise ModelLoadError(f"head_dim must be even for rotary positions, got {shape.head_dim}")
    frequencies = inverse_frequencies(shape)
    positions = torch.arange(shape.max_position_embeddings, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device, torch.float32)


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Angle per position of each pair of dimensions, float64 `[head_dim / 2]`, after scaling."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    frequencies = shape.rope_theta**-exponents
    scaling = shape.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    scale = _SCALINGS.get(kind)
    if scale is None:
        hint = did_you_mean(str(kind), _SCALINGS)
        raise ModelLoadError(
            f"rope_scaling type must be one of {', '.join(_SCALINGS)}, got {kind!r}{hint}"
        )
    return scale(frequencies, scaling)


def _default(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    return frequencies


def _linear(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Positions divided by `factor` (Position Interpolation, Chen et al. 2023)."""
    return frequencies / _number(scaling, "factor")


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between blended."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low == high:
        raise ModelLoadError(f"rope_scaling: low_freq_factor equals high_freq_factor ({low:g})")
    turns = _number(scaling, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor)


def _number(scaling: dict[str, Any], name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ModelLoadError(f"rope_scaling needs {name!r} as a positive number, got {value!r}")
    return float(value)


_SCALINGS: Final[dict[str, Callable[[Tensor, dict[str, Any]], Tensor]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
}
