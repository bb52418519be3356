"""Random values for every parameter: `--load-format dummy`, for measuring without a checkpoint.

A value depends on the parameter's name only, so two starts give the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor


class _Target(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def load(self) -> Callable[[Tensor], None]: ...


def fill_with_noise(targets: Mapping[str, _Target], dtype: torch.dtype, device: str) -> int:
    """Load small random values into all targets; returns their number.

    Matrices are scaled by 1 / sqrt(row length), vectors lie around 1, so that activations keep
    their size through any depth.
    """
    loaded = 0
    for name, target in targets.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode("utf-8")))
        values = torch.randn(target.shape, generator=generator)
        scaled = values * target.shape[-1] ** -0.5 if values.dim() > 1 else 1 + values * 0.02
        target.load(scaled.to(device, target.dtype or dtype))
        loaded += values.numel()
    return loaded
