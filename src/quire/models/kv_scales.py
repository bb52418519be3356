"""Scales that a checkpoint has for the keys and values of a layer, as parameters.

They count where keys and values are kept as 8-bit floats. A layer has one for keys and one for
values here: where a checkpoint has one for each head, the largest, with which no head is cut.
Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.parameter import Parameter, Parameters
from quire.weights.kv_scales import BOTH


def kv_scale_parameters(kv_heads: int, take: Callable[[int, float], None]) -> Parameters:
    """`k_scale` and `v_scale`, which a checkpoint may lack.

    `take(i, scale)` gets that of keys (i = 0) and of values (1). A scale below 0 stands for none.

    Raises:
        ModelLoadError: in `load`, for a scale that is 0 or no finite number.
    """
    shapes = ((), (1,), (1, 1), (kv_heads,), (kv_heads, 1), (kv_heads, 1, 1),
              (1, kv_heads))  # fmt: skip
    return {
        name: Parameter((0,), partial(_load, i, take), dtype=torch.float32, optional=shapes)
        for i, name in enumerate(BOTH)
    }


def _load(i: int, take: Callable[[int, float], None], scales: Tensor) -> None:
    if not scales.numel():  # --load-format dummy
        return
    largest = float(scales.max())
    if not bool(scales.isfinite().all()) or largest == 0:
        raise ModelLoadError(
            f"scales of the KV cache must be finite numbers above 0 (or -1: none), got "
            f"{scales.flatten().tolist()!r:.80}"
        )
    take(i, largest if largest > 0 else 1.0)
